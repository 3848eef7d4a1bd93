"""The checkpoint that a run's next attempt starts from, found where its spec says they lie."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from tasks.record.places import RunPlace
from tasks.spec.loading import project_root
from tasks.spec.run import RunSpec

#: Files in which a trainer names its last complete checkpoint, by its name or its step. Sources:
#: verl/utils/checkpoint/checkpoint_manager.py; Megatron-LM megatron/training/checkpointing.py;
#: SkyRL skyrl_train/trainer.py; DeepSpeed runtime/engine.py, and so the quickstart's trainer.
_POINTERS = (
    "latest_checkpointed_iteration.txt",
    "latest_ckpt_global_step.txt",
    "latest",
)
_POINTER_LIMIT = 4096
#: These trainers make the folder of a checkpoint first and its pointer last: without one, what lies
#: there is the part that a crash has left.
_ONLY_WITH_POINTER = re.compile(r"(global_step|iter)_\d+")
#: Last written into a checkpoint by Hugging Face's Trainer: those beside one that have none are
#: parts. Source: transformers/trainer.py, _save_checkpoint.
_COMPLETE_WITH = "trainer_state.json"
_NUMBER = re.compile(r"\d+")
#: Names under which something is written before it is complete, or after it was given up.
_PARTIAL = re.compile(r"^[.~]|^(tmp|temp)[-_.]|[-_.](tmp|temp|part|partial|incomplete|old|bak)\b")


def resume_point(spec: RunSpec, place: RunPlace, attempts: int) -> Path | None:
    """The last complete checkpoint of a run, absolute; None where it has or names none.

    An attempt whose folder is its own and that came to no checkpoint leaves it at the one before.

    Args:
        spec: As loaded, with its placeholders.
        attempts: How many the run has had.
    """
    named = {name: part.checkpoints for name, part in spec.processes.items() if part.checkpoints}
    for name, written in named.items():
        own = range(attempts, 0, -1) if "${attempt." in written else range(attempts, 0, -1)[:1]
        for number in own:
            if (found := _of_attempt(place, number, name)) is not None:
                return found
    return None


def _of_attempt(place: RunPlace, number: int, component: str) -> Path | None:
    """By the spec that the attempt was run with, in which the names are filled in."""
    try:
        spec = yaml.safe_load(place.attempt(number).spec.read_text(encoding="utf-8"))
        part = spec["components"][component]
        root = project_root() / (part.get("cwd") or spec.get("cwd") or ".")
        return latest_checkpoint(part["checkpoints"], root)
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def latest_checkpoint(written: str, root: Path) -> Path | None:
    """The last complete checkpoint, absolute; None where there is none yet.

    What a pointer in the folder names is the last one, since it is written after it. Without a
    pointer it is the one with the highest step in its name, then the youngest.

    Args:
        written: A folder of checkpoints, or a pattern (`*`, `?`, `[...]`) that matches the
            checkpoints themselves.
        root: What a relative path starts from.
    """
    path = root / written
    try:
        if path.is_dir():
            return _latest_in(path)
        if glob.has_magic(written):
            return _latest(map(Path, glob.iglob(str(path))))
        return path if _is_there(path) else None
    except OSError:
        # A file system that does not answer now is no reason to give the run up.
        return None


def _latest_in(folder: Path) -> Path | None:
    for name in _POINTERS:
        if (folder / name).is_file():
            return _pointed_at(folder / name)
    names = (entry for entry in folder.iterdir() if _NUMBER.search(entry.name))
    return _latest(entry for entry in names if not _ONLY_WITH_POINTER.fullmatch(entry.name))


def _pointed_at(pointer: Path) -> Path | None:
    name = pointer.read_text(encoding="utf-8", errors="replace")[:_POINTER_LIMIT].strip()
    if name.isdecimal():
        entries = (entry for entry in pointer.parent.iterdir() if _step(entry) == int(name))
        return _latest(entries)
    target = pointer.parent / name
    return target if name and target != pointer.parent and _is_there(target) else None


def _latest(entries: Iterable[Path]) -> Path | None:
    there = [entry for entry in entries if not _PARTIAL.search(entry.name) and _is_there(entry)]
    if complete := [entry for entry in there if (entry / _COMPLETE_WITH).exists()]:
        there = complete
    return max(there, key=lambda entry: (_step(entry), entry.stat().st_mtime_ns), default=None)


def _step(entry: Path) -> int:
    """The last number in its name, as in `global_step_10` and `step-000010.npz`; -1 for none."""
    numbers: list[str] = _NUMBER.findall(entry.name.removesuffix(entry.suffix))
    return int(numbers[-1]) if numbers else -1


def _is_there(path: Path) -> bool:
    """It holds something."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0
