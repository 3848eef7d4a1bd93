"""List the checkpoints of a run, and find the checkpoint from which a person starts another run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from tasks.record.checkpoint_folder import Completeness
from tasks.record.checkpoint_paths import CheckpointPath, walk_files
from tasks.record.checkpoint_pins import pin_checkpoint
from tasks.record.checkpoints import (
    JudgedCheckpoint,
    describe_unrecognised,
    judge_checkpoints,
)
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.show.output import one_line
from tasks.spec.errors import BadArgument, InvalidSpec
from tasks.spec.formatting import format_minutes, join_commas
from tasks.spec.loading import load_resolved
from tasks.spec.run import RunSpec
from tasks.spec.start_from import StartFrom, find_start_faults
from tasks.train.finding_runs import find_run
from tasks.train.run_records import find_record
from tasks.train.runs import ENDED_STATES, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """One checkpoint of a run. The fields are those of `muster checkpoints --json`."""

    #: Absolute path of the checkpoint.
    path: str
    #: Training step of the checkpoint, or null if unknown.
    step: int | None
    #: Total size of the files in bytes.
    size_bytes: int
    #: Time of the last change of the files, in UTC epoch seconds.
    saved_at: float
    #: `complete`, `incomplete`, or `unknown` if it is not known yet whether all files were saved.
    completeness: str
    #: Evidence that the checkpoint is complete, or the reason why it may be incomplete.
    reason: str
    #: Number of the attempt that saved the checkpoint, or null if the checkpoint is older than the
    #: run.
    attempt: int | None
    #: Reason why no attempt of this run starts from the checkpoint, or an empty string.
    refused: str
    #: Reasons why Muster keeps the checkpoint. Empty if the checkpoint will be deleted because of
    #: the spec key `keep`.
    kept: tuple[str, ...]

    @property
    def is_usable(self) -> bool:
        """True if the checkpoint is complete, and an attempt of this run may start from it."""
        return self.completeness == Completeness.COMPLETE.value and not self.refused

    @property
    def step_text(self) -> str:
        return "step unknown" if self.step is None else f"step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoints:
    """The checkpoints of a run, oldest first, together with the paths of the run's files."""

    place: RunPlace
    record: RunJson
    judged: tuple[JudgedCheckpoint, ...]
    #: Sentences about files that may be checkpoints; see `describe_unrecognised`.
    unrecognised: str


def list_run_checkpoints(run: Run) -> list[RunCheckpoint]:
    """Return the checkpoints of a run, the newest first.

    Raises:
        BadArgument: This machine cannot list the checkpoints, or the run has none. The message says
            why.
        OSError: The folder of the checkpoints cannot be read.
    """
    checkpoints = _read_checkpoints(run)
    return [_describe(one, checkpoints.record.attempts) for one in reversed(checkpoints.judged)]


def describe_missing_checkpoints(run: Run) -> str:
    """Return the message about a run without checkpoints.

    If some files in the checkpoint folder may be checkpoints, the message names these files, and
    says how the spec can name them.

    Raises:
        BadArgument: This machine cannot list the checkpoints.
        OSError: The folder of the checkpoints cannot be read.
    """
    message = f"The run {run.run_id} has no checkpoint yet."
    unrecognised = _read_checkpoints(run).unrecognised
    return f"{message} {unrecognised}." if unrecognised else message


def format_checkpoints(rows: Sequence[RunCheckpoint], now: float) -> Iterator[str]:
    """Yield the lines of the table that `muster checkpoints` prints on a terminal.

    Args:
        rows: The checkpoints.
        now: Current time in UTC epoch seconds.
    """
    cells = [_format_cells(row, now) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row, row_cells in zip(rows, cells, strict=True):
        padded = (cell.ljust(width) for cell, width in zip(row_cells, widths, strict=True))
        yield "  ".join(padded).rstrip()
        yield f"  {row.path}"
        yield f"  {row.completeness}: {row.reason}"
        if row.refused:
            yield f"  refused: {row.refused}"
        yield f"  {_describe_retention(row)}"


def format_checkpoint_line(row: RunCheckpoint, now: float) -> str:
    """Return the description of a checkpoint as one line, in which tabs separate the cells."""
    details = (row.path, row.reason, row.refused, _describe_retention(row))
    return "\t".join(map(one_line, (*_format_cells(row, now), *details)))


def _format_cells(row: RunCheckpoint, now: float) -> tuple[str, ...]:
    return (
        row.step_text,
        decimal(row.size_bytes),
        f"{format_minutes(max(now - row.saved_at, 0.0))} old",
        f"attempt {row.attempt}" if row.attempt is not None else "no attempt",
        row.completeness,
        "kept" if row.kept else "removed by keep",
    )


def _describe_retention(row: RunCheckpoint) -> str:
    if not row.kept:
        return (
            "not kept, because newer checkpoints exist. If the run has not ended, Muster removes "
            "this checkpoint within a minute"
        )
    return f"kept: {'; '.join(row.kept)}"


def with_start(spec: RunSpec, name: str) -> RunSpec:
    """Return a copy of a run spec in which the run starts from a checkpoint of another run.

    Args:
        spec: The run spec.
        name: Value of the option `--from`: `RUN` for the newest complete checkpoint of a run, or
            `RUN@STEP`.

    Raises:
        InvalidSpec: The spec does not pass checkpoints to any program.
        BadArgument: There is no such run, or the run has no such checkpoint.
        OSError: The checkpoints cannot be read.
    """
    faults = [*find_start_faults({**spec.written(), "start_from": {"run": name}})]
    if faults:
        raise InvalidSpec(tuple(faults), source=f"--from {name}")
    start = choose_start(name)
    total = spec.progress.total if spec.progress is not None else None
    if start.step is not None and total is not None and start.step >= total:
        print(
            f"The checkpoint has step {start.step}, and progress.total is {total}. A trainer that "
            "counts its steps from the checkpoint has nothing left to train. To train longer, add "
            f"for example --set progress.total={start.step + total}",
            file=sys.stderr,
        )
    return spec.model_copy(update={"start_from": start})


def choose_start(name: str) -> StartFrom:
    """Return the checkpoint from which a new run will start, and pin the checkpoint.

    When Muster deletes old checkpoints because of the spec key `keep`, it skips pinned checkpoints.

    Args:
        name: `RUN` for the newest complete checkpoint of a run, or `RUN@STEP`.

    Raises:
        BadArgument: There is no such run, or the run has no such checkpoint. The message lists the
            steps of the existing checkpoints.
        OSError: The checkpoints cannot be read.
    """
    run_name, at_sign, step_text = name.rpartition("@")
    if not at_sign:
        run_name, step_text = name, ""
    elif not (step_text.isdecimal() and step_text.isascii()):
        raise BadArgument(
            f"--from {name}: the step after @ must be a whole number, found {step_text!r}. "
            "Write RUN or RUN@STEP."
        )
    run = find_run(run_name)
    return choose_step(run, int(step_text) if step_text else None, pins=True)


def choose_step(run: Run, step: int | None, *, pins: bool = False) -> StartFrom:
    """Return the checkpoint of a run from which another run or attempt will start.

    Args:
        run: The run that wrote the checkpoint.
        step: Step of the checkpoint, or None for the newest complete checkpoint.
        pins: True to pin the checkpoint. When Muster deletes old checkpoints because of the spec
            key `keep`, it skips pinned checkpoints.

    Raises:
        BadArgument: The run has no such checkpoint.
        OSError: The checkpoints cannot be read.
    """
    checkpoints = _read_checkpoints(run)
    complete = [
        one for one in checkpoints.judged if one.checkpoint.is_complete and not one.why_foreign
    ]
    if step is None:
        candidates = [one for one in complete if one.is_fit] or complete
    else:
        candidates = [one for one in complete if one.checkpoint.step == step]
    if not candidates:
        raise BadArgument(_explain_missing(run, step, checkpoints, complete))
    checkpoint = candidates[-1].checkpoint
    if pins:
        home = checkpoints.place.directory.parents[1]
        pin_checkpoint(checkpoint.path, checkpoint.parts, home)
    fields = {"run": run.run_id, "checkpoint": str(checkpoint.path), "step": checkpoint.step}
    return StartFrom.model_validate(fields)


def _explain_missing(
    run: Run,
    step: int | None,
    checkpoints: _Checkpoints,
    complete: Sequence[JudgedCheckpoint],
) -> str:
    """Return a message about a missing checkpoint, which also lists the existing checkpoints.

    Args:
        run: The run.
        step: Step that the person asked for, or None for the newest complete checkpoint.
        checkpoints: All checkpoints of the run.
        complete: The checkpoints of the run that are complete.
    """
    wanted = f"complete checkpoint of step {step}" if step is not None else "complete checkpoint"
    if checkpoints.unrecognised:
        return f"{run.run_id} has no {wanted}. {checkpoints.unrecognised}."
    at_step = [one for one in checkpoints.judged if step is None or one.checkpoint.step == step]
    reasons = [
        f"{one.checkpoint.path.name}: {one.why_foreign or one.checkpoint.reason}" for one in at_step
    ]
    reason = f" ({'; '.join(reasons[-3:])})" if reasons else ""
    steps = sorted({one.checkpoint.step for one in complete if one.checkpoint.step is not None})
    existing = f"Steps with a complete checkpoint: {join_commas(steps) or 'none'}."
    return (
        f"{run.run_id} has no {wanted}{reason}. {existing} "
        f"To list all checkpoints: muster checkpoints {run.run_id}"
    )


def read_run_spec(place: RunPlace, attempts: Sequence[AttemptRecord]) -> RunSpec | None:
    """Return the spec of a run from the files of the run, with secrets masked.

    Normally, the placeholders in this spec are not replaced. An earlier version of Muster wrote no
    spec of the run, only the specs of the attempts. For a run of that version, the function returns
    the spec of the last attempt, with replaced placeholders.

    Returns:
        The spec, or None if this machine has none of these files.
    """
    files = [place.spec, *(place.attempt(one.number).spec for one in attempts[-1:])]
    for file in files:
        if file.exists():
            return load_resolved(file)
    return None


def _read_checkpoints(run: Run) -> _Checkpoints:
    """Read the checkpoints of a run.

    Raises:
        BadArgument: This machine cannot list the checkpoints, or the run has none.
        OSError: The folder of the checkpoints cannot be read.
    """
    record = find_record(run)
    if record is None or not record.attempts:
        raise BadArgument(
            f"{run.run_id} has no checkpoints, because the run has not started its first attempt"
        )
    place = run.place
    if not place.record.exists() and record.directory:
        place = RunPlace(directory=Path(record.directory))
    spec = read_run_spec(place, record.attempts)
    if spec is None:
        host = record.attempts[-1].host or run.host or "another host"
        raise BadArgument(
            f"this machine cannot list the checkpoints of {run.run_id}, because the files of the "
            f"run are on {host}, in {place.directory}. Run the command on that host."
        )
    if not any(component.checkpoints for component in spec.processes.values()):
        raise BadArgument(
            f"{run.run_id} has no checkpoints, because no component of its spec has the key "
            "`checkpoints`"
        )
    judged = judge_checkpoints(
        spec,
        place,
        record.attempts,
        record.foreign_checkpoints,
        is_running=run.state not in ENDED_STATES,
    )
    unrecognised = "" if judged else describe_unrecognised(spec, place, record.attempts)
    return _Checkpoints(place=place, record=record, judged=tuple(judged), unrecognised=unrecognised)


def _describe(one: JudgedCheckpoint, attempts: Sequence[AttemptRecord]) -> RunCheckpoint:
    checkpoint = one.checkpoint
    return RunCheckpoint(
        path=str(checkpoint.path),
        step=checkpoint.step,
        size_bytes=sum(map(_measure, checkpoint.parts)),
        saved_at=checkpoint.changed_at,
        completeness=checkpoint.completeness.value,
        reason=checkpoint.reason,
        attempt=_find_attempt(checkpoint.changed_at, attempts),
        refused=one.why_foreign or one.why_unfit,
        kept=one.why_kept,
    )


def _find_attempt(saved_at: float, attempts: Sequence[AttemptRecord]) -> int | None:
    """Return the number of the attempt that saved a checkpoint.

    This is the last attempt that started before the checkpoint was saved.

    Args:
        saved_at: Time at which the checkpoint was saved, in UTC epoch seconds.
        attempts: The attempts of the run.

    Returns:
        The number, or None if the checkpoint is older than all attempts.
    """
    numbers = [attempt.number for attempt in attempts if attempt.started_at <= saved_at]
    return max(numbers, default=None)


def _measure(path: CheckpointPath) -> int:
    """Return the size of a file in bytes, or the total size of the files below a folder."""
    size = 0
    for file in walk_files(path) if path.is_dir() else [path]:
        # Skip a file that the trainer has deleted since the folder was listed.
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size
