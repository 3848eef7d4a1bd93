"""The attempts at a run: what follows one that has ended, and all of them as a table.

The next one starts from the last complete checkpoint, which is found where the spec of the run says
that they lie; a completed stage of a pipeline hands the same on to its next stage.
"""

from __future__ import annotations

import glob
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from tasks.record.outcome import Failure, Verdict
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, JobRecord, RunJson
from tasks.record.states import RunState
from tasks.spec.failure_kinds import REQUEUED, FailureKind
from tasks.spec.placeholders import mapping, substituted
from tasks.spec.run import Retry, RunSpec
from tasks.spec.words import moment

#: The delay grows by this factor with each try, and is spread by this part of it both ways, so that
#: runs which were sent back together do not come back together.
_GROWTH = 2.0
_JITTER = 0.1
#: Beyond this power the delay is at its longest anyway, and a float at its end.
_POWERS = 64

#: Ended before the run could do anything.
_NEVER_RAN = REQUEUED - {FailureKind.FLEET_LOST}

#: Of what a node can be blamed for.
_OF_A_NODE = (
    FailureKind.GPU_HARDWARE,
    FailureKind.NODE_LOST,
    FailureKind.STORAGE,
    FailureKind.PORT_CONFLICT,
    FailureKind.COLLECTIVE_TIMEOUT,
)
#: The rule of a failure of a run's nodes that was found before a component started.
PREFLIGHT = "preflight"
#: That of a checkpoint which a trainer could not read.
_CUT_SHORT = "checkpoint-cut-short"
_RANK = re.compile(r"\brank\W{0,3}\d", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequel:
    """What follows an attempt."""

    #: One line for people: `requeued: INSUFFICIENT_RESOURCES, next try in 61 s`.
    text: str
    #: Seconds until the next attempt; None where its verdict is the run's.
    delay_s: float | None = None
    #: The run waits for resources again, and its user's attempts are not touched.
    is_requeue: bool = False
    #: The checkpoint that the next attempt starts from; empty for none.
    resume_from: str = ""


def decide(
    verdict: Verdict,
    before: Sequence[FailureKind | None],
    policy: Retry | None,
    *,
    resume_from: str = "",
    is_unloadable: bool = False,
    uniform: Callable[[float, float], float] = random.uniform,
) -> Sequel:
    """What follows an attempt.

    INSUFFICIENT_RESOURCES, START_TIMEOUT and FLEET_LOST say nothing about the run itself: such
    attempts are requeued, and count against no other kind's `attempts`. Their own counts those of
    the same kind.

    Args:
        before: Why the earlier attempts that count failed, in order; None for one that did not. See
            `tries_of`.
        policy: How the spec has this kind of failure tried again; None for not at all.
        resume_from: The checkpoint that the next attempt starts from; empty for none.
        is_unloadable: The checkpoint that it started from is what it failed by.
    """
    if verdict.state is not RunState.FAILED or verdict.failure is None:
        return Sequel(text=f"final: {verdict.state.value}")
    kind = verdict.failure.kind
    if is_unloadable and not verdict.left:
        start = f"from {resume_from}" if resume_from else "from the beginning"
        text = f"retried: {kind.value} before its first step, {start} in {_STEP_BACK_S:.0f} s"
        return Sequel(text=text, delay_s=_STEP_BACK_S, resume_from=resume_from)
    if policy is None:
        return Sequel(text=f"final: {kind.value} is not retried")
    if verdict.left:
        # What could not be ended holds its GPUs, its ports and its files.
        return Sequel(text=f"final: {kind.value}, and processes of it are left")
    is_requeue = kind in REQUEUED
    if is_requeue:
        used = 1 + sum(earlier is kind for earlier in before)
        # Since its last attempt that had its gang; of those that had it, all.
        waited = takewhile(_NEVER_RAN.__contains__, reversed(before))
        step = 1 + len([*waited]) if kind in _NEVER_RAN else used
    else:
        used = step = 1 + sum(earlier not in REQUEUED for earlier in before)
    if policy.attempts is not None and used >= policy.attempts:
        return Sequel(text=f"final: {kind.value}, {used} of {policy.attempts} attempts used")
    grown = policy.delay_s * _GROWTH ** min(step - 1, _POWERS)
    longest_s = max(policy.delay_s, policy.max_delay_s)
    delay_s = min(grown, longest_s) * uniform(1 - _JITTER, 1 + _JITTER)
    what = "requeued" if is_requeue else "retried"
    count = f" ({used + 1} of {policy.attempts})" if policy.attempts else ""
    start = f", from {resume_from}" if resume_from else ""
    return Sequel(
        text=f"{what}: {kind.value}, next try{count} in {delay_s:.0f} s{start}",
        delay_s=delay_s,
        is_requeue=is_requeue,
        resume_from=resume_from,
    )


#: Seconds until a run that could not load its checkpoint is tried from the one before, and how many
#: such attempts may follow each other.
_STEP_BACK_S, _STEPS_BACK = 5.0, 3
#: What a checkpoint may be blamed for.
_BY_A_CHECKPOINT = frozenset(
    {FailureKind.USER_ERROR, FailureKind.RUNTIME_ERROR, FailureKind.NOT_READY, FailureKind.UNKNOWN}
)


def tries_of(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> list[FailureKind | None]:
    """Of the attempts before the last one, why those failed that count against a run: those without
    a new step since the last that made one, which is the first of them."""
    stepped_back = _stepped_back(spec, attempts)
    first, best = 0, float("-inf")
    for index, attempt in enumerate(attempts):
        if attempt.step is not None and attempt.step > best:
            first, best = index, attempt.step
    counted = (one for one in attempts[first:-1] if one not in stepped_back)
    return [one.failure.kind if one.failure else None for one in counted]


def is_unloadable(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> bool:
    """Whether the last attempt failed by the checkpoint that it started from."""
    return attempts[-1] in _stepped_back(spec, attempts)


def _stepped_back(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Those that failed by the checkpoint that they started from: the component that has
    checkpoints failed before its first step, of a run whose steps are known.

    Of several in a row only the first ones: then it is something else.
    """
    found, count = list[AttemptRecord](), 0
    for attempt in attempts:
        count = count + 1 if _is_by_its_checkpoint(spec, attempt) else 0
        found += [attempt] if 0 < count <= _STEPS_BACK else []
    return found


def _is_by_its_checkpoint(spec: RunSpec, attempt: AttemptRecord) -> bool:
    failed, step = attempt.failure, attempt.step
    if not failed or not attempt.resume_from or not spec.progress:
        return False
    if step is not None and spec.progress.http and step <= _step(Path(attempt.resume_from)):
        step = None  # Said before the first one.
    component = spec.processes.get(failed.component or "")
    is_blamed = failed.kind in _BY_A_CHECKPOINT or failed.rule == _CUT_SHORT
    return step is None and is_blamed and component is not None and bool(component.checkpoints)


def _unfit(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> Callable[[Path], bool]:
    """Of a checkpoint, whether no attempt should start from it: one could not load it, or it was
    written while an alarm held that ended one. What was trained anew since then is fit."""
    reached, bound, unloadable = float("-inf"), float("inf"), set[Path]()
    stepped_back = _stepped_back(spec, attempts)
    for attempt in reversed(attempts):
        if attempt.failure and attempt.failure.kind is FailureKind.ALARM and attempt.alarms:
            said = {f"watch-{alarm.rule}": alarm.since for alarm in attempt.alarms}
            since = said.get(attempt.failure.rule, attempt.alarms[-1].since)
            bound = min(bound, since) if since > reached else bound
        elif attempt in stepped_back:
            path = Path(attempt.resume_from or "")
            unloadable |= {path} if _step(path) > reached else set()
        reached = max(reached, attempt.step if attempt.step is not None else reached)
    return lambda path: path in unloadable or _step(path) >= bound


def blamed(failure: Failure | None, nodes: Iterable[str]) -> list[str]:
    """Which of the nodes of an attempt its failure is blamed on: those that its line or its message
    names; where they name none, all of them.

    A collective that timed out says nothing of a node, unless it names the rank.
    """
    if failure is None or failure.rule == _CUT_SHORT:
        return []
    if failure.kind not in _OF_A_NODE and failure.rule != PREFLIGHT:
        return []
    said = f"{failure.line} {failure.message}"
    if failure.kind is FailureKind.COLLECTIVE_TIMEOUT and not _RANK.search(said):
        return []
    every = [*nodes]
    # A node that shares its name with another has a suffix, which no log knows.
    bare = {node: re.escape(node.partition("/")[0]) for node in every}
    return [n for n in every if re.search(rf"(?<![\w.-]){bare[n]}(?![\w-]|\.\w)", said)] or every


def table_of(attempts: Sequence[AttemptRecord]) -> list[dict[str, object]]:
    """The attempts of `run.json` as rows for people, a column each key; empty cells are None."""
    rows: list[dict[str, object]] = []
    for attempt in attempts:
        failure, job = attempt.failure, next(iter(attempt.jobs.values()), JobRecord())
        rows.append(
            {
                "attempt": attempt.number,
                "submission": job.submission_id or None,
                "nodes": ", ".join(job.nodes) or None,
                "started": moment(attempt.started_at),
                "ended": moment(attempt.ended_at) if attempt.ended_at is not None else None,
                "state": attempt.state.value,
                "kind": failure.kind.value if failure else None,
                "line": (failure.line or failure.message) if failure else None,
                "resumed from": attempt.resume_from,
                "decided": attempt.decision,
            }
        )
    return rows


#: Files in which a trainer names its last complete checkpoint, by its name or its step. Sources:
#: verl/utils/checkpoint/checkpoint_manager.py; Megatron-LM megatron/training/checkpointing.py;
#: SkyRL skyrl_train/trainer.py; DeepSpeed runtime/engine.py, and so the quickstart's trainer.
_POINTERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt", "latest")
_POINTER_LIMIT = 4096
#: These trainers make the folder of a checkpoint first and its pointer last: without one, what lies
#: there is the part that a crash has left.
_ONLY_WITH_POINTER = re.compile(r"(global_step|iter)_\d+")
#: Last written into a checkpoint by Hugging Face's Trainer: those beside one that have none are
#: parts. Source: transformers/trainer.py, _save_checkpoint.
_COMPLETE_WITH = "trainer_state.json"
_NUMBER = re.compile(r"\d+")
_STEP = re.compile(r"(?:step|iter)[-_=]?(\d+)")
#: What trainers write beside their checkpoints, and has numbers in its name.
_NO_CHECKPOINT = re.compile(r"^events\.out\.tfevents\.|\.(log|ya?ml)$")
#: A checkpoint that is being written changes at least so often.
_GROWS_WITHIN_S = 30.0
#: Behind the name of one that is being removed.
_GOING = ".muster-old"
#: Names under which something is written before it is complete, or after it was given up.
_PARTIAL = re.compile(r"^[.~]|^(tmp|temp)[-_.]|[-_.](tmp|temp|part|partial|incomplete|old|bak)\b")


def resume_point(spec: RunSpec, place: RunPlace, attempts: Sequence[AttemptRecord]) -> Path | None:
    """The last complete checkpoint of a run that is fit to start from, absolute; None where it has
    or names none.

    An attempt whose folder is its own and that came to no checkpoint leaves it at the one before.

    Args:
        spec: As loaded, with its placeholders.
        attempts: All that the run has had.
    """
    unfit = _unfit(spec, attempts)
    named = {name: part.checkpoints for name, part in spec.processes.items() if part.checkpoints}
    for name, written in named.items():
        for number in reversed(_with_folders(written, attempts)):
            if fit := [one for one in _of_attempt(place, number, name) if not unfit(one)]:
                return fit[-1]
    return None


def _with_folders(written: str, attempts: Sequence[AttemptRecord]) -> range:
    """The numbers of the attempts that have a folder of checkpoints of their own, or the last."""
    numbers = range(1, len(attempts) + 1)
    return numbers if "${attempt." in written else numbers[-1:]


def _of_attempt(place: RunPlace, number: int, component: str) -> list[Path]:
    """The complete checkpoints that an attempt has left where its spec says, the last one last."""
    spec = spec_of(place, number)
    part = mapping(mapping(spec.get("components")).get(component))
    # One of a Muster before has no absolute `cwd`, and none where the default was meant.
    root = Path.cwd() / (part.get("cwd") or spec.get("cwd") or ".")
    written = part.get("checkpoints")
    return _checkpoints(written, root) if written else []


def superfluous(spec: RunSpec, place: RunPlace, attempts: Sequence[AttemptRecord]) -> list[Path]:
    """The complete checkpoints of a run that are more than its spec keeps, the oldest first: not
    that which its attempt under way has started from, that no attempt could load, or that a link
    beside them names.

    Args: as of `resume_point`.
    """
    unfit = _unfit(spec, attempts)
    in_use = {Path(one.resume_from or "").resolve() for one in attempts[-1:]}
    for name, part in spec.processes.items():
        if part.keep is not None and part.checkpoints:
            found = [
                one
                for number in _with_folders(part.checkpoints, attempts)
                for one in _of_attempt(place, number, name)
                if not unfit(one)
            ]
            for folder in {one.parent for one in found[-1:]}:
                in_use |= {one.resolve() for one in folder.iterdir() if one.is_symlink()}
            keep = part.keep
            if found and not (found[-1] / _COMPLETE_WITH).exists():
                # Where no pointer says that it is complete either, it may be written just now.
                keep += not any((found[-1].parent / name).is_file() for name in _POINTERS)
            # A file beside them that has a number in its name, too, is called otherwise.
            kinds = [_NUMBER.sub("", one.name) for one in found]
            most = max(reversed(kinds), key=kinds.count, default="")
            alike = [one for one, kind in zip(found, kinds, strict=True) if kind == most]
            return [o for o in alike[:-keep] if not (o.resolve() in in_use or o.is_symlink())]
    return []


def remove_checkpoint(path: Path) -> None:
    """Remove one, which is no checkpoint any more before a part of it is gone. Raises: OSError."""
    # What a process that was killed meanwhile has left may have the name that it gets.
    _clear(path.parent)
    path.rename(path.with_name(f".{path.name}{_GOING}"))
    _clear(path.parent)


def _clear(folder: Path) -> None:
    for one in folder.glob(f".*{_GOING}"):
        shutil.rmtree(one) if one.is_dir() else one.unlink()


def spec_of(place: RunPlace, number: int) -> Mapping[str, Any]:
    """The spec that an attempt was run with: its names are filled in, its `cwd` is absolute. Empty
    where it can't be read."""
    with suppress(OSError, yaml.YAMLError):
        return mapping(yaml.safe_load(place.attempt(number).spec.read_text(encoding="utf-8")))
    return {}


def latest_checkpoint(written: str, root: Path) -> Path | None:
    """The last complete checkpoint, absolute; None where there is none yet. See `_checkpoints`."""
    return next(reversed(_checkpoints(written, root)), None)


def _checkpoints(written: str, root: Path) -> list[Path]:
    """The complete checkpoints, absolute, the last one last.

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
            return _complete_in(path)
        if glob.has_magic(written):
            return _complete(map(Path, glob.iglob(str(path))))
        return [path] if _is_there(path) else []
    except OSError:
        # A file system that does not answer now is no reason to give the run up.
        return []


def _complete_in(folder: Path) -> list[Path]:
    names = (name for name in os.listdir(folder) if not _NO_CHECKPOINT.search(name))
    entries = [folder / name for name in names if _NUMBER.search(name)]
    for pointer in (folder / name for name in _POINTERS):
        if pointer.is_file() or (pointer.is_symlink() and pointer.is_dir()):
            named = pointer.resolve().name if pointer.is_dir() else ""
            named = named or pointer.read_text("utf-8", "replace")[:_POINTER_LIMIT].strip()
            last = _named(folder, named)
            # Those before it were complete before it was begun.
            step = int(named) if named.isdecimal() else _step(Path(named))
            before = _complete(entry for entry in entries if _step(entry) < step)
            if last is None and not before:
                # A pointer that was cut as it was written: of all, the newest may be so, too.
                return _complete(entries)[:-1]
            return [*before, *([last] if last is not None else [])]
    return _complete(entry for entry in entries if not _ONLY_WITH_POINTER.fullmatch(entry.name))


def is_saving(written: str, root: Path) -> bool:
    """Whether something in a folder of checkpoints grows that is to be one, after those that are
    complete."""
    folder, since = root / written, time.time() - _GROWS_WITHIN_S
    with suppress(OSError):
        *_, last = None, *_complete_in(folder)
        for one in folder.iterdir():
            is_like_it = last is not None and one.suffix == last.suffix
            if _step(one) <= (_step(last) if last else -1) or one.name.endswith(_GOING):
                continue
            if one.is_dir() or is_like_it or _PARTIAL.search(one.name):
                parts = (part.stat().st_mtime for part in (one, *one.rglob("*")))
                if any(changed > since for changed in parts):
                    return True
    return False


def _named(folder: Path, name: str) -> Path | None:
    """What a pointer names, by its name or its step; None where that is not there."""
    if name.isdecimal():
        found = _complete(entry for entry in folder.iterdir() if _step(entry) == int(name))
        return next(reversed(found), None)
    target = folder / name
    return target if name and target != folder and _is_there(target) else None


def _complete(entries: Iterable[Path]) -> list[Path]:
    there = [entry for entry in entries if not _PARTIAL.search(entry.name) and _is_there(entry)]
    if complete := [entry for entry in there if (entry / _COMPLETE_WITH).exists()]:
        there = complete
    return sorted(there, key=lambda entry: (_step(entry), entry.stat().st_mtime_ns))


def _step(entry: Path) -> int:
    """The last number in its name, as in `global_step_10` and `step-000010.npz`, or that of a step,
    as in `step=10-loss=0.31.ckpt`; -1 for none."""
    name = entry.name.removesuffix(entry.suffix)
    numbers: list[str] = _STEP.findall(name) or _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1


def _is_there(path: Path) -> bool:
    """It holds something."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def handed_on(checkpoint: str | None, spec: RunSpec, place: RunPlace) -> Path | None:
    """The last complete checkpoint of a run, absolute; None where there is none.

    Args:
        checkpoint: The path or pattern that the stage has; None: what the run would be resumed
            from.
    """
    attempts: tuple[AttemptRecord, ...] = ()
    with suppress(OSError, ValueError):
        attempts = RunJson.read(place.record).attempts
    if checkpoint is None:
        return resume_point(spec, place, attempts)
    names = {
        "run.id": place.run_id,
        "run.dir": str(place.directory),
        "attempt.number": str(len(attempts)),
        "attempt.dir": str(place.attempt(len(attempts)).directory),
    }
    root = Path(spec_of(place, len(attempts)).get("cwd") or spec.cwd)
    return latest_checkpoint(substituted(checkpoint, names.__getitem__), root)
