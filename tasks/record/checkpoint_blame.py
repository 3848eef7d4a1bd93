"""Decide whether a checkpoint is to blame for a failed attempt.

A checkpoint is given up only if an attempt died or hung while it loaded the checkpoint. Any other
failure before the first step has another cause: a busy port, a lost network, a missing GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tasks.record.checkpoint_names import read_step
from tasks.record.run_json import AttemptRecord
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import RunSpec

#: Rule that recognises a checkpoint which a trainer could not read completely.
CUT_SHORT = "checkpoint-cut-short"
#: Most consecutive attempts that may be blamed on their checkpoints. If more attempts fail, the
#: cause is something else.
_MAX_BLAMED_IN_A_ROW = 3
#: Kinds of failure that mean that an attempt hung.
_HUNG = frozenset({FailureKind.STALLED, FailureKind.TIME_LIMIT, FailureKind.NOT_READY})
#: Kinds of failure with which an attempt may die because of a bad checkpoint.
_DIED = frozenset({FailureKind.USER_ERROR, FailureKind.RUNTIME_ERROR, FailureKind.UNKNOWN})
#: Signals that come from outside of the program.
_OUTSIDE_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})
#: Without `progress`, an attempt that lived longer than this probably got past the loading.
_LOADS_WITHIN_S = 120.0
#: Number of frames at the end of a traceback that may show that a checkpoint was being loaded.
_INNER_FRAMES = 3

#: Words in the end of a traceback, or in the line of the error, that show the loading.
_LOADING = re.compile(
    r"checkpoint|ckpt|state_dict|resum|restor|torch\.load|load_state|deserializ|unpickl"
    r"|PytorchStream|safetensor|EOFError|invalid load key|central directory|BadZipFile"
    r"|zip (?:file|archive)|trainer_state|size mismatch|magic number",
    re.IGNORECASE,
)
#: Words that name another cause.
_OTHER_CAUSE = re.compile(
    r"No CUDA GPUs|CUDA (?:driver|error|initialization)|CUDA_ERROR|NCCL|out of memory"
    r"|Address already in use|Connection (?:refused|reset|aborted)|Name or service not known"
    r"|Temporary failure in name resolution|timed out|Too many open files|No space left",
    re.IGNORECASE,
)
#: Functions in which the ranks of a training wait for each other.
_COLLECTIVE = re.compile(
    r"nccl|all_?reduce|all_?gather|reduce_?scatter|barrier|init_process_group|rendezvous",
    re.IGNORECASE,
)
_FRAME = re.compile(r'^\s*File "[^"]*"')


class Blame(Enum):
    """Conclusion from a failed attempt about the checkpoint from which it started."""

    #: The checkpoint is not to blame: the attempt made a step, or had another cause.
    NONE = "none"
    #: The attempt failed before its first step, and its checkpoint may be the cause. If another
    #: attempt does, too, the checkpoint is given up.
    SUSPECTED = "suspected"
    #: The attempt died or hung while it loaded the checkpoint.
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedCheckpoint:
    """A checkpoint from which no attempt should start again."""

    path: Path
    #: Hash of its files when the attempt started, or an empty string if unknown.
    signature: str
    #: Number of the attempt that could not load it.
    attempt: int

    @property
    def why(self) -> str:
        return f"attempt {self.attempt} failed while it loaded this checkpoint"


def blame_attempts(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> list[Blame]:
    """Return the blame of the checkpoint for each attempt.

    A checkpoint is given up once at most. If attempts fail with more than three checkpoints in
    turn, the cause is something else, and no checkpoint of this series is given up.
    """
    blames: list[Blame] = []
    suspected: set[str] = set()
    given_up: set[str] = set()
    row: list[int] = []
    for index, attempt in enumerate(attempts):
        key = attempt.checkpoint or ""
        blame = _judge(spec, attempt)
        if blame is Blame.NONE or key in given_up:
            has_started = _has_made_step(spec, attempt) or attempt.failure is None
            if not has_started and len(row) >= _MAX_BLAMED_IN_A_ROW:
                for earlier in row:
                    blames[earlier] = Blame.NONE
            row = [] if has_started else row
            blames.append(Blame.NONE)
            continue
        if blame is Blame.SUSPECTED and key in suspected:
            is_hung = attempt.failure is not None and attempt.failure.kind in _HUNG
            is_to_blame = is_hung or not _names_other_cause(attempt)
            blame = Blame.GIVEN_UP if is_to_blame else Blame.NONE
        suspected.add(key)
        if blame is Blame.GIVEN_UP:
            given_up.add(key)
            row.append(index)
            if len(row) > _MAX_BLAMED_IN_A_ROW:
                for earlier in row[:-1]:
                    blames[earlier] = Blame.NONE
                blame = Blame.NONE
        blames.append(blame)
    return blames


def find_given_up(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> list[RejectedCheckpoint]:
    """Return the checkpoints that are to blame for a failed attempt."""
    blames = blame_attempts(spec, attempts)
    return [
        RejectedCheckpoint(
            path=Path(attempt.checkpoint or ""),
            signature=attempt.resume.signature if attempt.resume else "",
            attempt=attempt.number,
        )
        for attempt, blame in zip(attempts, blames, strict=True)
        if blame is Blame.GIVEN_UP
    ]


def find_attempts_failed_by_checkpoint(
    spec: RunSpec, attempts: Sequence[AttemptRecord]
) -> list[AttemptRecord]:
    """Return the attempts that do not count against `attempts`, because of their checkpoint.

    These are attempts that could not load it, and the first attempt that died before its first
    step for an unknown reason. An attempt that used up its time counts: it held its GPUs for hours.
    """
    blames = blame_attempts(spec, attempts)
    return [
        attempt
        for attempt, blame in zip(attempts, blames, strict=True)
        if blame is not Blame.NONE
        and attempt.failure is not None
        and attempt.failure.kind is not FailureKind.TIME_LIMIT
        and (blame is Blame.GIVEN_UP or spec.progress is not None)
    ]


def _judge(spec: RunSpec, attempt: AttemptRecord) -> Blame:
    """Return the blame of one attempt, without regard to the others."""
    failure = attempt.failure
    if failure is None or not attempt.checkpoint or _has_made_step(spec, attempt):
        return Blame.NONE
    component = spec.processes.get(failure.component or "")
    if failure.component is not None and (component is None or not component.checkpoints):
        return Blame.NONE
    if failure.rule == CUT_SHORT:
        return Blame.GIVEN_UP
    if failure.exit_code == 0:
        return Blame.NONE
    if failure.kind in _HUNG:
        is_silent = spec.progress is not None or failure.kind is FailureKind.STALLED
        if not is_silent:
            return Blame.NONE
        # The ranks may wait for each other because of the network.
        is_collective = _COLLECTIVE.search(failure.message) is not None
        return Blame.SUSPECTED if is_collective else Blame.GIVEN_UP
    if failure.kind not in _DIED or failure.signal in _OUTSIDE_SIGNALS:
        return Blame.NONE
    if _shows_loading(attempt) and not _names_other_cause(attempt):
        return Blame.GIVEN_UP
    if spec.progress is None and _lifetime_s(attempt) > _LOADS_WITHIN_S:
        return Blame.NONE
    return Blame.SUSPECTED


def _has_made_step(spec: RunSpec, attempt: AttemptRecord) -> bool:
    """Return True if the attempt made a step of training after it had loaded its checkpoint."""
    step = attempt.highest_step
    if step is None or step <= 0:
        return False
    if not attempt.checkpoint:
        return True
    loaded_step: float | None = attempt.resume.step if attempt.resume else None
    if loaded_step is None:
        loaded_step = read_step(Path(attempt.checkpoint).name)
    if loaded_step is None:
        return True
    # A trainer may report the step of its checkpoint: it evaluates before it trains.
    if step == loaded_step:
        return False
    # A server may report an old step. A trainer that reports a lower step counts from zero.
    is_server = spec.progress is not None and spec.progress.http is not None
    return step > loaded_step or not is_server


def _shows_loading(attempt: AttemptRecord) -> bool:
    """Return True if the error of an attempt comes from the loading of its checkpoint."""
    text = _error_text(attempt)
    name = Path(attempt.checkpoint or "").name
    return _LOADING.search(text) is not None or (bool(name) and name in text)


def _names_other_cause(attempt: AttemptRecord) -> bool:
    return _OTHER_CAUSE.search(_error_text(attempt)) is not None


def _error_text(attempt: AttemptRecord) -> str:
    """Return the error of an attempt: the innermost frames of its traceback, and its message.

    Paths of source files are left out, because a folder or program may be named after anything.
    """
    failure = attempt.failure
    if failure is None:
        return ""
    _, has_traceback, traceback = failure.log_tail.rpartition("Traceback (most recent call last)")
    lines = traceback.splitlines() if has_traceback else []
    frames = [index for index, line in enumerate(lines) if _FRAME.match(line)]
    first = frames[-_INNER_FRAMES] if len(frames) >= _INNER_FRAMES else 0
    inner = [_FRAME.sub("", line) for line in lines[first:]]
    return "\n".join([*inner, failure.line, failure.message])


def _lifetime_s(attempt: AttemptRecord) -> float:
    if attempt.ended_at is None:
        return 0.0
    return attempt.ended_at - attempt.started_at


def match_given_up(
    given_up: Sequence[RejectedCheckpoint],
    path: Path,
    signature: str,
    best_later_steps: Mapping[int, float],
) -> RejectedCheckpoint | None:
    """Return the entry for a checkpoint, or None if it was not given up or was saved again since.

    Args:
        given_up: Checkpoints that were given up.
        path: The checkpoint.
        signature: Hash of its present files.
        best_later_steps: Best step of the attempts after an attempt, by the number of that attempt.
            It is used if the record has no signature.
    """
    for entry in given_up:
        if entry.path != path:
            continue
        if entry.signature:
            if entry.signature == signature:
                return entry
        elif (read_step(path.name) or -1) > best_later_steps.get(entry.attempt, float("-inf")):
            return entry
    return None
