"""Write the first run spec for an existing training, from the files in its directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import yaml

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import find_project_root

#: File with the frameworks that Muster recognises, and with the parts of a spec.
_TEMPLATES = Path(__file__).with_suffix(".yaml")
#: Number of bytes that are read from the beginning of a file.
_READ_BYTES = 65_536
_IGNORED = re.compile(r"(^|/)(\.|__pycache__|node_modules|site-packages|wandb/|outputs/)")
_WORKLOADS = ("grpo", "ppo", "sft")
_VARIABLE = re.compile(r"\b[A-Z]{4,}\b")
#: Parts of likely file names, the likeliest first. They decide if several files match.
_LIKELY = ("rl", "train", *_WORKLOADS, "run", "main")


def draft_spec(directory: Path) -> tuple[str, str]:
    """Recognise the training in a directory and write a commented run spec for it.

    Returns:
        The name of the recognised framework with the file that showed it, and the text of the spec.

    Raises:
        InvalidSpec: The directory contains no training that Muster could start.
    """
    templates = yaml.safe_load(_TEMPLATES.read_text(encoding="utf-8"))
    files = sorted(_candidate_files(directory), key=_rank_file)
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
    problem = "no script is in it, and no configuration of verl, TRL, slime or prime-rl"
    remedy = "go where the training lies, or name that directory"
    raise InvalidSpec((Fault(path="", problem=problem, remedy=remedy),), str(directory))


def _candidate_files(directory: Path) -> Iterator[Path]:
    """Yield the files at most two folders below the directory, relative to the directory."""
    for pattern in ("*", "*/*", "*/*/*"):
        for path in directory.glob(pattern):
            file = path.relative_to(directory)
            if path.is_file() and not _IGNORED.search(str(file)) and file.name != "muster.yaml":
                yield file


def _rank_file(file: Path) -> tuple[int, int, str]:
    """Return a sort key: files in the directory itself come first, then those with likely names."""
    ranks = [rank for rank, name in enumerate(_LIKELY) if name in file.stem.lower()]
    return len(file.parts), min(ranks, default=len(_LIKELY)), str(file)


def _read_beginning(path: Path) -> str:
    with suppress(OSError), path.open("rb") as f:
        return f.read(_READ_BYTES).decode("utf-8", errors="replace")
    return ""


def _find_workload(text: str, default: str) -> str:
    """Return the first workload that the text mentions, or the default."""
    lowered = text.lower()
    return next((workload for workload in _WORKLOADS if workload in lowered), default)


def _fill_in(text: str, directory: Path, file: Path, training: str, workload: str) -> str:
    """Replace the variables of a template, which are words in capitals, by their values."""
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
