"""Find the checkpoints of a run on disk, for its next attempt and for the next stage of a pipeline.

The spec of the run names the folder of its checkpoints, or a pattern that matches them.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.placeholders import mapping_or_empty, substitute
from tasks.spec.run import RunSpec

#: Rule that recognises a checkpoint which a trainer could not read completely.
CUT_SHORT = "checkpoint-cut-short"
#: Most consecutive attempts that may be blamed on their checkpoints. If more attempts fail, the
#: cause is something else.
_MAX_BLAMED_IN_A_ROW = 3
#: Kinds of failure that a bad checkpoint can cause.
_CAUSED_BY_CHECKPOINT = frozenset(
    {FailureKind.USER_ERROR, FailureKind.RUNTIME_ERROR, FailureKind.NOT_READY, FailureKind.UNKNOWN}
)

#: Files in which a trainer names its last complete checkpoint, by its name or its step.
#: Sources: verl/utils/checkpoint/checkpoint_manager.py; Megatron-LM
#: megatron/training/checkpointing.py; SkyRL skyrl_train/trainer.py; DeepSpeed runtime/engine.py,
#: and so the quickstart's trainer.
_POINTERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt", "latest")
#: Largest number of characters that are read from such a file.
_POINTER_LIMIT = 4096
#: Folder names of trainers that write the pointer last. Without a pointer, such a folder is an
#: incomplete checkpoint after a crash.
_ONLY_WITH_POINTER = re.compile(r"(global_step|iter)_\d+")
#: File that Hugging Face's Trainer writes last. If one checkpoint in a folder has it, checkpoints
#: without it are incomplete. Source: transformers/trainer.py, _save_checkpoint.
_COMPLETE_WITH = "trainer_state.json"
_NUMBER = re.compile(r"\d+")
_STEP = re.compile(r"(?:step|iter)[-_=]?(\d+)")
#: Other files in a folder of checkpoints whose names may contain numbers.
_NO_CHECKPOINT = re.compile(r"^events\.out\.tfevents\.|\.(log|ya?ml)$")
#: A checkpoint that is being written has a file that changed within this time.
_GROWS_WITHIN_S = 30.0
#: Suffix of a checkpoint that is being removed.
_REMOVAL_SUFFIX = ".muster-old"
#: Names of files that are incomplete or were abandoned.
_PARTIAL = re.compile(r"^[.~]|^(tmp|temp)[-_.]|[-_.](tmp|temp|part|partial|incomplete|old|bak)\b")


def find_resume_checkpoint(
    spec: RunSpec, place: RunPlace, attempts: Sequence[AttemptRecord]
) -> Path | None:
    """Return the last complete checkpoint from which the next attempt can start.

    Checkpoints that an attempt could not load, or that were written during an alarm, are skipped.
    If each attempt has its own folder, the folders of earlier attempts are searched as well.

    Args:
        spec: The spec of the run, with its placeholders.
        place: Directory of the run.
        attempts: All attempts of the run.

    Returns:
        The absolute path, or None if there is no such checkpoint or the spec names no folder.
    """
    is_unfit = _unfit_checkpoints(spec, attempts)
    for name, component in spec.processes.items():
        if not component.checkpoints:
            continue
        for number in reversed(_attempts_with_folders(component.checkpoints, attempts)):
            checkpoints = _checkpoints_of_attempt(place, number, name)
            fit = [checkpoint for checkpoint in checkpoints if not is_unfit(checkpoint)]
            if fit:
                return fit[-1]
    return None


def find_superfluous_checkpoints(
    spec: RunSpec, place: RunPlace, attempts: Sequence[AttemptRecord]
) -> list[Path]:
    """Return the complete checkpoints that exceed the number `keep` in the spec, oldest first.

    Never returned are the checkpoint from which the current attempt started, checkpoints that an
    attempt could not load, and targets of symbolic links in the same folder.

    Args:
        spec: The spec of the run, with its placeholders.
        place: Directory of the run.
        attempts: All attempts of the run.
    """
    is_unfit = _unfit_checkpoints(spec, attempts)
    for name, component in spec.processes.items():
        if component.keep is not None and component.checkpoints:
            checkpoints = [
                checkpoint
                for number in _attempts_with_folders(component.checkpoints, attempts)
                for checkpoint in _checkpoints_of_attempt(place, number, name)
                if not is_unfit(checkpoint)
            ]
            if not checkpoints:
                return []
            newest = checkpoints[-1]

            in_use = {Path(attempt.resume_from or "").resolve() for attempt in attempts[-1:]}
            in_use |= {entry.resolve() for entry in newest.parent.iterdir() if entry.is_symlink()}

            keep = component.keep
            if not (newest / _COMPLETE_WITH).exists():
                # Without a pointer, the newest checkpoint may still be incomplete.
                has_pointer = any((newest.parent / pointer).is_file() for pointer in _POINTERS)
                keep += not has_pointer

            candidates = _with_commonest_name(checkpoints)[:-keep]
            return [
                checkpoint
                for checkpoint in candidates
                if checkpoint.resolve() not in in_use and not checkpoint.is_symlink()
            ]
    return []


def _with_commonest_name(checkpoints: list[Path]) -> list[Path]:
    """Return the checkpoints with the commonest name, not counting numbers in it.

    Other files in the folder may also have numbers in their names, but they have another name.
    """
    names = [_NUMBER.sub("", checkpoint.name) for checkpoint in checkpoints]
    commonest = max(reversed(names), key=names.count, default="")
    return [
        checkpoint for checkpoint, name in zip(checkpoints, names, strict=True) if name == commonest
    ]


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no reader finds an incomplete checkpoint.

    Raises:
        OSError: The checkpoint cannot be removed.
    """
    # If a process was killed during a removal, a file with the new name may already exist.
    _finish_removals(path.parent)
    path.rename(path.with_name(f".{path.name}{_REMOVAL_SUFFIX}"))
    _finish_removals(path.parent)


def _finish_removals(folder: Path) -> None:
    """Delete the renamed checkpoints in a folder."""
    for entry in folder.glob(f".*{_REMOVAL_SUFFIX}"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def read_attempt_spec(place: RunPlace, number: int) -> Mapping[str, Any]:
    """Return the spec of an attempt as plain data, or an empty mapping if it cannot be read.

    Its placeholders are filled in, and each `cwd` is absolute.
    """
    with suppress(OSError, yaml.YAMLError):
        return mapping_or_empty(
            yaml.safe_load(place.attempt(number).spec.read_text(encoding="utf-8"))
        )
    return {}


def find_latest_checkpoint(written: str, root: Path) -> Path | None:
    """Return the last complete checkpoint, or None if there is none yet.

    Args:
        written: Folder of the checkpoints, or a pattern (`*`, `?`, `[...]`) that matches them.
        root: Directory from which a relative path starts.

    Returns:
        The absolute path of the checkpoint.
    """
    return next(reversed(_list_checkpoints(written, root)), None)


def is_writing_checkpoint(written: str, root: Path) -> bool:
    """Return True if a trainer is writing a checkpoint to a folder at the moment.

    Only files and folders with a higher step than the last complete checkpoint are examined.

    Args:
        written: Folder of the checkpoints.
        root: Directory from which a relative path starts.
    """
    folder = root / written
    changed_after = time.time() - _GROWS_WITHIN_S
    with suppress(OSError):
        last = next(reversed(_complete_in_folder(folder)), None)
        last_step = _step_in_name(last) if last else -1
        for entry in folder.iterdir():
            if _step_in_name(entry) <= last_step or entry.name.endswith(_REMOVAL_SUFFIX):
                continue
            has_same_suffix = last is not None and entry.suffix == last.suffix
            if entry.is_dir() or has_same_suffix or _PARTIAL.search(entry.name):
                files = (entry, *entry.rglob("*"))
                if any(file.stat().st_mtime > changed_after for file in files):
                    return True
    return False


def find_stage_checkpoint(checkpoint: str | None, spec: RunSpec, place: RunPlace) -> Path | None:
    """Return the checkpoint that a completed stage of a pipeline passes to the next stage.

    Args:
        checkpoint: Path or pattern of the stage's `checkpoint`. None means the checkpoint from
            which the run would be resumed.
        spec: The spec of the stage's run, with its placeholders.
        place: Directory of the stage's run.

    Returns:
        The absolute path, or None if there is no complete checkpoint.
    """
    attempts: tuple[AttemptRecord, ...] = ()
    with suppress(OSError, ValueError):
        attempts = RunJson.read(place.record).attempts
    if checkpoint is None:
        return find_resume_checkpoint(spec, place, attempts)
    values = {
        "run.id": place.run_id,
        "run.dir": str(place.directory),
        "attempt.number": str(len(attempts)),
        "attempt.dir": str(place.attempt(len(attempts)).directory),
    }
    root = Path(read_attempt_spec(place, len(attempts)).get("cwd") or spec.cwd)
    return find_latest_checkpoint(substitute(checkpoint, values.__getitem__), root)


def find_attempts_failed_by_checkpoint(
    spec: RunSpec, attempts: Sequence[AttemptRecord]
) -> list[AttemptRecord]:
    """Return the attempts that failed because of the checkpoint from which they started.

    These are attempts whose component with checkpoints failed before its first step. If more than
    three such attempts follow each other, only the first three are returned, because the cause is
    then something else. A run without `progress` has no such attempts.
    """
    blamed: list[AttemptRecord] = []
    in_a_row = 0
    for attempt in attempts:
        in_a_row = in_a_row + 1 if _is_checkpoint_to_blame(spec, attempt) else 0
        if 0 < in_a_row <= _MAX_BLAMED_IN_A_ROW:
            blamed.append(attempt)
    return blamed


def _is_checkpoint_to_blame(spec: RunSpec, attempt: AttemptRecord) -> bool:
    failure = attempt.failure
    if not failure or not attempt.resume_from or not spec.progress:
        return False

    step = attempt.step
    # A trainer may report the step of its checkpoint even before it has made a step.
    checkpoint_step = _step_in_name(Path(attempt.resume_from))
    if step is not None and spec.progress.http and step <= checkpoint_step:
        step = None

    component = spec.processes.get(failure.component or "")
    has_checkpoints = component is not None and bool(component.checkpoints)
    is_possible_kind = failure.kind in _CAUSED_BY_CHECKPOINT or failure.rule == CUT_SHORT
    return step is None and is_possible_kind and has_checkpoints


def _unfit_checkpoints(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> Callable[[Path], bool]:
    """Return a predicate that is True for checkpoints from which no attempt should start.

    A checkpoint is unfit if an attempt could not load it, or if it was written while an alarm held
    that ended the attempt. If a later attempt has reached the same step again, the checkpoint of
    that step was replaced and is fit.
    """
    highest_later_step = float("-inf")
    first_alarmed_step = float("inf")
    not_loadable: set[Path] = set()
    blamed = find_attempts_failed_by_checkpoint(spec, attempts)
    for attempt in reversed(attempts):
        if attempt.failure and attempt.failure.kind is FailureKind.ALARM and attempt.alarms:
            since_by_rule = {f"watch-{alarm.rule}": alarm.since for alarm in attempt.alarms}
            since = since_by_rule.get(attempt.failure.rule, attempt.alarms[-1].since)
            if since > highest_later_step:
                first_alarmed_step = min(first_alarmed_step, since)
        elif attempt in blamed:
            path = Path(attempt.resume_from or "")
            if _step_in_name(path) > highest_later_step:
                not_loadable.add(path)
        if attempt.step is not None:
            highest_later_step = max(highest_later_step, attempt.step)
    return lambda path: path in not_loadable or _step_in_name(path) >= first_alarmed_step


def _attempts_with_folders(written: str, attempts: Sequence[AttemptRecord]) -> range:
    """Return the numbers of the attempts whose checkpoint folders must be searched.

    If all attempts share one folder, this is only the last attempt.
    """
    numbers = range(1, len(attempts) + 1)
    return numbers if "${attempt." in written else numbers[-1:]


def _checkpoints_of_attempt(place: RunPlace, number: int, component_name: str) -> list[Path]:
    """Return the complete checkpoints in the folder of an attempt, oldest first."""
    spec = read_attempt_spec(place, number)
    component = mapping_or_empty(mapping_or_empty(spec.get("components")).get(component_name))
    # An earlier version of Muster wrote a relative `cwd`, or omitted the default.
    root = Path.cwd() / (component.get("cwd") or spec.get("cwd") or ".")
    written = component.get("checkpoints")
    return _list_checkpoints(written, root) if written else []


def _list_checkpoints(written: str, root: Path) -> list[Path]:
    """Return the absolute paths of the complete checkpoints, oldest first.

    If a pointer file names the last checkpoint, that decides. Otherwise the last checkpoint is the
    one with the highest step in its name, and of several the newest.

    Args:
        written: Folder of the checkpoints, or a pattern (`*`, `?`, `[...]`) that matches them.
        root: Directory from which a relative path starts.
    """
    path = root / written
    try:
        if path.is_dir():
            return _complete_in_folder(path)
        if glob.has_magic(written):
            return _sort_complete(map(Path, glob.iglob(str(path))))
        return [path] if _has_content(path) else []
    except OSError:
        # A file system that fails now must not end the run.
        return []


def _complete_in_folder(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    names = (name for name in os.listdir(folder) if not _NO_CHECKPOINT.search(name))
    entries = [folder / name for name in names if _NUMBER.search(name)]
    for pointer in (folder / name for name in _POINTERS):
        if pointer.is_file() or (pointer.is_symlink() and pointer.is_dir()):
            return _complete_by_pointer(folder, pointer, entries)
    return _sort_complete(
        entry for entry in entries if not _ONLY_WITH_POINTER.fullmatch(entry.name)
    )


def _complete_by_pointer(folder: Path, pointer: Path, entries: list[Path]) -> list[Path]:
    """Return the checkpoint that a pointer names, preceded by those with lower steps.

    Checkpoints with lower steps were complete before the trainer began to write the named one.
    """
    name = pointer.resolve().name if pointer.is_dir() else ""
    name = name or pointer.read_text("utf-8", "replace")[:_POINTER_LIMIT].strip()
    last = _find_named(folder, name)

    step = int(name) if name.isdecimal() else _step_in_name(Path(name))
    earlier = _sort_complete(entry for entry in entries if _step_in_name(entry) < step)
    if last is None and not earlier:
        # The pointer itself is damaged, so the newest checkpoint may be damaged, too.
        return _sort_complete(entries)[:-1]
    return [*earlier, last] if last is not None else earlier


def _find_named(folder: Path, name: str) -> Path | None:
    """Return the checkpoint that a pointer names by its name or its step, or None if missing."""
    if name.isdecimal():
        with_step = (entry for entry in folder.iterdir() if _step_in_name(entry) == int(name))
        return next(reversed(_sort_complete(with_step)), None)
    target = folder / name
    return target if name and target != folder and _has_content(target) else None


def _sort_complete(entries: Iterable[Path]) -> list[Path]:
    """Return the complete checkpoints among some paths, sorted by step and then by age."""
    checkpoints = [
        entry for entry in entries if not _PARTIAL.search(entry.name) and _has_content(entry)
    ]
    if with_marker := [entry for entry in checkpoints if (entry / _COMPLETE_WITH).exists()]:
        checkpoints = with_marker
    return sorted(checkpoints, key=lambda entry: (_step_in_name(entry), entry.stat().st_mtime_ns))


def _step_in_name(entry: Path) -> int:
    """Return the step in the name of a checkpoint, or -1.

    This is the number after `step` or `iter`, as in `step=10-loss=0.31.ckpt`, otherwise the last
    number in the name.
    """
    name = entry.name.removesuffix(entry.suffix)
    numbers: list[str] = _STEP.findall(name) or _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1


def _has_content(path: Path) -> bool:
    """Return True if a file is not empty, or if a folder has an entry."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0
