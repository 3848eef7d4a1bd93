"""Write a first run spec for an existing training, from the files in its directory.

The command `muster init` uses this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import yaml

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import find_project_root

#: YAML file with the training frameworks that Muster recognises, and with text for their run specs.
_TEMPLATES = Path(__file__).with_suffix(".yaml")
#: Number of bytes that are read from the beginning of each file that may be the training script.
_READ_BYTES = 65_536
#: Matches paths that are ignored: hidden files, installed packages and outputs of trainings.
_IGNORED = re.compile(r"(^|/)(\.|__pycache__|node_modules|site-packages|wandb/|outputs/)")
_WORKLOADS = ("grpo", "ppo", "sft")
#: Matches a variable in the text for a run spec, such as COMMAND.
_VARIABLE = re.compile(r"\b[A-Z]{4,}\b")
#: Words that are likely in the name of a training's main file, the likeliest first. If several
#: files use a framework, these words decide which of them is the main file.
_LIKELY = ("rl", "train", *_WORKLOADS, "run", "main")


def draft_spec(directory: Path) -> tuple[str, str]:
    """Recognise the training in a directory, and return a commented run spec for it.

    Returns:
        A summary of the framework and the recognised file, such as `TRL (sft.py)`, and the text of
        the run spec.

    Raises:
        InvalidSpec: The directory contains no training that Muster could start.
    """
    templates = yaml.safe_load(_TEMPLATES.read_text(encoding="utf-8"))
    files = sorted(_find_candidate_files(directory), key=_rank_file)
    for framework, file in product(templates["ways"], files):
        command = framework["commands"].get(file.suffix, "")
        content = _read_beginning(directory / file) if command else ""
        if re.search(framework["pattern"], content, re.MULTILINE):
            text = "".join(templates["parts"][part] for part in ("head", *framework["parts"]))
            text = text.replace("COMMAND", command).replace("OVERRIDES", templates["overrides"])
            training = framework["name"]
            workload = _find_workload(f"{file} {content}", framework.get("workload", "sft"))
            text = _fill_in(text, directory.absolute(), file, training, workload)
            return f"{training} ({file})", text
    problem = "contains no script, and no configuration of verl, TRL, slime or prime-rl"
    remedy = "change to the directory of the training, or write its path after `muster init`"
    raise InvalidSpec((Fault(path="", problem=problem, remedy=remedy),), str(directory))


def _find_candidate_files(directory: Path) -> Iterator[Path]:
    """Yield the paths of the files that may start a training, relative to the directory.

    Only files in the directory and up to two folders below it are yielded.
    """
    for pattern in ("*", "*/*", "*/*/*"):
        for path in directory.glob(pattern):
            file = path.relative_to(directory)
            if path.is_file() and not _IGNORED.search(str(file)) and file.name != "muster.yaml":
                yield file


def _rank_file(file: Path) -> tuple[int, int, str]:
    """Return the sort key of a candidate file. Files that are more likely the main file come first.

    Files in fewer folders come first. Within the same depth, files with likely names come first.

    Args:
        file: Path of the file, relative to the directory of the training.
    """
    ranks = [rank for rank, name in enumerate(_LIKELY) if name in file.stem.lower()]
    return len(file.parts), min(ranks, default=len(_LIKELY)), str(file)


def _read_beginning(path: Path) -> str:
    """Return the first `_READ_BYTES` bytes of a file as text; an empty string if unreadable."""
    with suppress(OSError), path.open("rb") as f:
        return f.read(_READ_BYTES).decode("utf-8", errors="replace")
    return ""


def _find_workload(text: str, default: str) -> str:
    """Return the first workload of `_WORKLOADS` that a text mentions, or `default` if none."""
    lowered = text.lower()
    return next((workload for workload in _WORKLOADS if workload in lowered), default)


def _fill_in(text: str, directory: Path, file: Path, training: str, workload: str) -> str:
    """Return the text of a run spec with its variables, words in capital letters, replaced.

    Args:
        text: Text of the spec.
        directory: Absolute path of the training's directory.
        file: Main file of the training, relative to the directory.
        training: Name of the recognised framework.
        workload: Workload of the training, such as `grpo`.
    """
    name = re.sub(r"[^a-z0-9]+", "-", directory.name.lower()).lstrip("-0123456789")
    values = {
        "TRAINING": training,
        "FILE": str(file),
        "FOLDER": str((directory / file).parent),
        "STEM": file.stem,
        "NAME": name[:32].strip("-") or "training",
        "WORKLOAD": workload,
        "METHOD": workload if workload != "ppo" else "grpo",
        "HERE": str(directory.relative_to(find_project_root(directory / "muster.yaml"))),
    }
    return _VARIABLE.sub(lambda match: values.get(match[0], match[0]), text)
