"""The first run spec of a training that is there already, by what lies in its directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import yaml

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import project_of

_KNOWN = Path(__file__).with_suffix(".yaml")
_READ_BYTES = 65_536
_PASSED_OVER = re.compile(r"(^|/)(\.|__pycache__|node_modules|site-packages|wandb/|outputs/)")
_WORKLOADS = ("grpo", "ppo", "sft")
_IN_CAPITALS = re.compile(r"\b[A-Z]{4,}\b")
#: Of several files that tell the same, one of these names comes first.
_LIKELY = ("rl", "train", *_WORKLOADS, "run", "main")


def draft_of(directory: Path) -> tuple[str, str]:
    """What was found in a directory, and a commented run spec for it.

    Raises: InvalidSpec, where nothing is there that could be started.
    """
    known = yaml.safe_load(_KNOWN.read_text(encoding="utf-8"))
    for way, file in product(known["ways"], sorted(_files(directory), key=_likelihood)):
        command = way["commands"].get(file.suffix, "")
        said = _read(directory / file) if command else ""
        if re.search(way["pattern"], said, re.MULTILINE):
            text = "".join(known["parts"][part] for part in ("head", *way["parts"]))
            text = text.replace("COMMAND", command).replace("OVERRIDES", known["overrides"])
            training, workload = way["name"], way.get("workload", "sft")
            text = _filled_in(text, directory.absolute(), file, said, training, workload)
            return f"{training} ({file})", text
    problem = "no script is in it, and no configuration of verl, TRL, slime or prime-rl"
    remedy = "go where the training lies, or name that directory"
    raise InvalidSpec((Fault(path="", problem=problem, remedy=remedy),), str(directory))


def _files(directory: Path) -> Iterator[Path]:
    """At most two folders down, relative to the directory."""
    for pattern in ("*", "*/*", "*/*/*"):
        for path in directory.glob(pattern):
            file = path.relative_to(directory)
            if path.is_file() and not _PASSED_OVER.search(str(file)) and file.name != "muster.yaml":
                yield file


def _likelihood(file: Path) -> tuple[int, int, str]:
    ranks = [rank for rank, name in enumerate(_LIKELY) if name in file.stem.lower()]
    return len(file.parts), min(ranks, default=len(_LIKELY)), str(file)


def _read(path: Path) -> str:
    with suppress(OSError), path.open("rb") as f:
        return f.read(_READ_BYTES).decode("utf-8", errors="replace")
    return ""


def _filled_in(
    text: str, directory: Path, file: Path, said: str, training: str, workload: str
) -> str:
    """The text with what the words in capitals stand for."""
    name = re.sub(r"[^a-z0-9]+", "-", directory.name.lower()).lstrip("-0123456789")
    told = f"{file} {said}".lower()
    workload = next((one for one in _WORKLOADS if one in told), workload)
    words = {
        "TRAINING": training,
        "FILE": str(file),
        "FOLDER": str((directory / file).parent),
        "STEM": file.stem,
        "NAME": name[:32].strip("-") or "training",
        "WORKLOAD": workload,
        "METHOD": workload if workload != "ppo" else "grpo",
        "HERE": str(directory.relative_to(project_of(directory / "muster.yaml"))),
    }
    return _IN_CAPITALS.sub(lambda found: words.get(found[0], found[0]), text)
