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
from tasks.record.checkpoint_paths import CheckpointPath
from tasks.record.outcome import Failure
from tasks.record.run_json import AttemptRecord
from tasks.spec.failure_kinds import CheckpointBlame, FailureKind
from tasks.spec.run import RunSpec

#: Name of the rule in `cause_rules.toml` that matches the error message of a trainer which loads an
#: incomplete checkpoint.
CUT_SHORT = "checkpoint-cut-short"
#: If more than this number of consecutive attempts fail to load their checkpoints, Muster assumes
#: that the checkpoints are not the cause.
_MAX_BLAMED_IN_A_ROW = 3
#: Signals that usually come from another process. If a trainer dies from a different signal, such
#: as SIGSEGV, the trainer itself caused the failure.
_OUTSIDE_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})
#: Longest assumed time in seconds for loading a checkpoint. Used if the run spec has no key
#: `progress`.
_LOADS_WITHIN_S = 120.0
#: Number of innermost frames of a traceback that are searched for the words in `_LOADING`.
_INNER_FRAMES = 3

#: Matches words that occur in an error message or traceback about a checkpoint that cannot be
#: loaded.
_LOADING = re.compile(
    r"checkpoint|ckpt|state_dict|resum|restor|torch\.load|load_state|deserializ|unpickl"
    r"|PytorchStream|safetensor|EOFError|invalid load key|central directory|BadZipFile"
    r"|zip (?:file|archive)|trainer_state|size mismatch|magic number",
    re.IGNORECASE,
)
#: Matches words in an error message that show a different cause than a damaged checkpoint.
_OTHER_CAUSE = re.compile(
    r"No CUDA GPUs|CUDA (?:driver|error|initialization)|CUDA_ERROR|NCCL|out of memory"
    r"|Address already in use|Connection (?:refused|reset|aborted)|Name or service not known"
    r"|Temporary failure in name resolution|timed out|Too many open files|No space left",
    re.IGNORECASE,
)
#: Matches names of functions in which the ranks of a training wait for each other.
_COLLECTIVE = re.compile(
    r"nccl|all_?reduce|all_?gather|reduce_?scatter|barrier|init_process_group|rendezvous",
    re.IGNORECASE,
)
_FRAME = re.compile(r'^\s*File "[^"]*"')


class Blame(Enum):
    """Result of the check whether an attempt failed because of the checkpoint that the attempt
    loaded.
    """

    #: The checkpoint is not the cause. The attempt completed a training step, failed for another
    #: reason, or did not fail.
    NONE = "none"
    #: The attempt failed before its first training step, and its checkpoint may be the cause. If a
    #: second attempt fails in the same way with the same checkpoint, the second attempt gets the
    #: value `GIVEN_UP`.
    SUSPECTED = "suspected"
    #: The checkpoint counts as the cause of the failure. The attempt died or hung while it loaded
    #: the checkpoint, or it failed in the same way as an earlier attempt that is `SUSPECTED` and
    #: has the same checkpoint. No later attempt starts from this checkpoint.
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedCheckpoint:
    """A checkpoint that an attempt could not load. No later attempt should start from this
    checkpoint.
    """

    #: Path or URL.
    path: str
    #: Hash of the checkpoint's files when the attempt started. Empty if the record of the attempt
    #: has no hash.
    signature: str
    #: Number of the attempt that could not load the checkpoint.
    attempt: int

    @property
    def why(self) -> str:
        return f"attempt {self.attempt} failed while it loaded this checkpoint"


def blame_attempts(spec: RunSpec, attempts: Sequence[AttemptRecord]) -> list[Blame]:
    """Return one `Blame` per attempt: whether the attempt failed because of its checkpoint.

    The value `GIVEN_UP` means that no later attempt starts from the checkpoint. At most one attempt
    per checkpoint gets this value. If consecutive attempts fail with more than three different
    checkpoints, the checkpoints are not the cause. All these attempts then get the value `NONE`.
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
            is_to_blame = _is_hung(attempt.failure) or not _names_other_cause(attempt)
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
    """Return the checkpoints that an attempt could not load and that no later attempt should load.

    Args:
        spec: The spec of the run.
        attempts: All attempts of the run, in order.
    """
    blames = blame_attempts(spec, attempts)
    return [
        RejectedCheckpoint(
            path=attempt.checkpoint or "",
            signature=attempt.resume.signature if attempt.resume else "",
            attempt=attempt.number,
        )
        for attempt, blame in zip(attempts, blames, strict=True)
        if blame is Blame.GIVEN_UP
    ]


def find_attempts_failed_by_checkpoint(
    spec: RunSpec, attempts: Sequence[AttemptRecord]
) -> list[AttemptRecord]:
    """Return the attempts that failed because of their checkpoint.

    The returned attempts do not count against the limit in the spec key `retry.attempts`. An
    attempt that reached its time limit is never returned. An attempt with the value
    `Blame.SUSPECTED` is returned only if the run spec has the key `progress`. Without this key,
    Muster does not know whether the attempt completed a training step.
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
    """Return whether the checkpoint of an attempt is the cause of the attempt's failure.

    Only this attempt is checked, without the other attempts of the run.
    """
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
    if _is_hung(failure):
        is_silent = spec.progress is not None or failure.kind is FailureKind.STALLED
        if not is_silent:
            return Blame.NONE
        # If the attempt hung while the ranks of the training waited for each other, the cause may
        # be the network instead of the checkpoint.
        is_collective = _COLLECTIVE.search(failure.message) is not None
        return Blame.SUSPECTED if is_collective else Blame.GIVEN_UP
    can_be_damaged = failure.kind.properties.blames_checkpoint is CheckpointBlame.IF_DIED
    if not can_be_damaged or failure.signal in _OUTSIDE_SIGNALS:
        return Blame.NONE
    if _shows_loading(attempt) and not _names_other_cause(attempt):
        return Blame.GIVEN_UP
    if spec.progress is None and _lifetime_s(attempt) > _LOADS_WITHIN_S:
        return Blame.NONE
    return Blame.SUSPECTED


def _is_hung(failure: Failure | None) -> bool:
    """Return True if the attempt failed because it made no progress for too long."""
    return (
        failure is not None and failure.kind.properties.blames_checkpoint is CheckpointBlame.IF_HUNG
    )


def _has_made_step(spec: RunSpec, attempt: AttemptRecord) -> bool:
    """Return True if the attempt completed a training step after it had loaded its checkpoint."""
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
    # A trainer that runs an evaluation first may report the step of its checkpoint again. This
    # report does not show that the trainer has completed a step.
    if step == loaded_step:
        return False
    # If the reported step is above that of the checkpoint, the trainer has completed a step. If the
    # reported step is lower, the result depends on the source of the reported step:
    # - An HTTP server may still report a step of an earlier attempt. Such a report does not show
    #   that the trainer has completed a step in this attempt.
    # - With any other source, a lower step means that the trainer counts its steps from zero after
    #   each start. The reported step is above zero, so the trainer has completed a step.
    is_server = spec.progress is not None and spec.progress.http is not None
    return step > loaded_step or not is_server


def _shows_loading(attempt: AttemptRecord) -> bool:
    """Return True if the error message of an attempt says that loading the checkpoint failed."""
    text = _error_text(attempt)
    name = Path(attempt.checkpoint or "").name
    return _LOADING.search(text) is not None or (bool(name) and name in text)


def _names_other_cause(attempt: AttemptRecord) -> bool:
    return _OTHER_CAUSE.search(_error_text(attempt)) is not None


def _error_text(attempt: AttemptRecord) -> str:
    """Return the last frames of the traceback of an attempt, and the message of its failure.

    Paths of source files are omitted, because a path may contain a word such as `checkpoint` by
    chance.
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
    path: CheckpointPath,
    signature: str,
    best_later_steps: Mapping[int, float],
) -> RejectedCheckpoint | None:
    """Return the entry of `given_up` for a checkpoint, or None if the checkpoint may be loaded.

    Args:
        given_up: Checkpoints that attempts could not load.
        path: Path of the checkpoint.
        signature: Hash of the checkpoint's present files.
        best_later_steps: Mapping from an attempt number to the highest training step of all later
            attempts. Used only for an entry without a hash: if a later attempt has reached the step
            of the checkpoint, that attempt has saved the checkpoint again.

    Returns:
        The entry, or None if no attempt failed to load the checkpoint. Also None if the checkpoint
        was saved again after the failure.
    """
    for entry in given_up:
        if entry.path != str(path):
            continue
        if entry.signature:
            if entry.signature == signature:
                return entry
        elif (read_step(path.name) or -1) > best_later_steps.get(entry.attempt, float("-inf")):
            return entry
    return None
