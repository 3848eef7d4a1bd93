"""Which of the runs on a machine are pruned, and how far: a pure function of what was found there.

Of a run that is pruned the record, `run.json`, and the spec of each attempt are kept for ever: they
are small, and say what was run and what became of it. What the run's own programs have written
beside Muster's files (checkpoints, models, figures) is theirs, and stays unless `outputs` says that
it may go with the rest.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

#: In place of a number: the rule is off.
NEVER = "never"
_DAY_S = 24 * 3600.0
_GIB = 1024**3


class Retention(BaseModel):
    """How long what runs leave is kept. Each rule counts by itself; null switches it off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compress_after_days: float | None = Field(
        default=7, ge=0, description="Logs are compressed (gzip) so many days after a run's end."
    )
    days: float | None = Field(
        default=60, ge=0, description="A run's files are removed so many days after its end."
    )
    runs: int | None = Field(
        default=None, ge=0, description="Of the runs that have ended, at most so many keep files."
    )
    gib: float | None = Field(
        default=None, ge=0, description="All runs together keep at most so many GiB."
    )
    outputs: bool = Field(
        default=False,
        description="What a run's own programs wrote into its directory, such as checkpoints, is "
        "removed with Muster's files.",
    )
    upkeep_days: float | None = Field(
        default=2,
        ge=0,
        description="Flow runs of `reconcile` and `prune` that completed are deleted from the "
        "Prefect server after so many days.",
    )

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> Retention:
        """What an operator has set: `MUSTER_PRUNE_DAYS` for `days`, and so on; `never` is null.

        Raises: ValidationError, which names the field.
        """
        named = {name: environment.get(variable_of(name), "") for name in Retention.model_fields}
        said = {name: value.strip() for name, value in named.items() if value.strip()}
        return Retention.model_validate(
            {name: None if value == NEVER else value for name, value in said.items()}
        )


def variable_of(field: str) -> str:
    """The environment variable that sets a field of `Retention`."""
    return f"MUSTER_PRUNE_{field.upper()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run's directory, as it was found."""

    #: `$MUSTER_HOME/runs/<run id>`.
    directory: Path
    #: Why it must be left as it is; empty where it need not.
    held: str = ""
    #: UTC epoch seconds; infinite while it has not ended, or nobody knows.
    ended_at: float
    #: Bytes that its removal would free.
    removable_bytes: int
    #: Bytes of logs that are not compressed, and of its copy of the code.
    log_bytes: int
    #: Bytes in all.
    size_bytes: int

    @property
    def run_id(self) -> str:
        return self.directory.name


class Act(Enum):
    """What is done with a run's directory."""

    #: Its logs are compressed, each in its place, with the suffix `.gz`; its code is removed.
    COMPRESS = "compress"
    #: Its files are removed, but for its record and specs.
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is to be done, or was, with one run's directory, and why."""

    run: Found
    act: Act
    why: str
    #: Once it was done: bytes that the disk has got back, and what went wrong, if anything did,
    #: which the next prune tries again.
    freed_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What is to be done, the oldest run first."""

    steps: tuple[Step, ...]
    #: Those that a rule would have taken, had they not been held.
    held: tuple[Found, ...]
    #: Still above `gib` after all of it, in bytes: what is left may not go.
    over_bytes: int = 0


def plan(found: Sequence[Found], keep: Retention, now: float) -> PrunePlan:
    """What the rules say at a time, UTC epoch seconds, without a look at the disk."""
    in_order = sorted(found, key=lambda run: (run.ended_at, run.run_id))
    reasons = _removals(in_order, keep, now)
    steps, held = [], []
    for run in in_order:
        act, why = Act.REMOVE, reasons.get(run.run_id, "")
        if not why and run.log_bytes:
            act, why = Act.COMPRESS, _age(run, keep.compress_after_days, now)
        if why and run.held:
            held.append(run)
        elif why:
            steps.append(Step(run=run, act=act, why=why))
    removed = sum(step.run.removable_bytes for step in steps if step.act is Act.REMOVE)
    over = sum(run.size_bytes for run in found) - removed - _most_bytes(keep)
    return PrunePlan(steps=tuple(steps), held=tuple(held), over_bytes=int(max(0, over)))


def _removals(in_order: Sequence[Found], keep: Retention, now: float) -> dict[str, str]:
    """`why[run id]` for those whose files the rules would take."""
    ended = [run for run in in_order if run.removable_bytes and math.isfinite(run.ended_at)]
    excess = len(ended) - keep.runs if keep.runs is not None else 0
    size = sum(run.size_bytes for run in in_order)
    found = {}
    for number, run in enumerate(ended):
        why = _age(run, keep.days, now)
        if not why and number < excess:
            why = f"more than {keep.runs} runs have files"
        if not why and size > _most_bytes(keep):
            why = f"all runs together have more than {keep.gib:g} GiB"
        if why:
            found[run.run_id] = why
            size -= 0 if run.held else run.removable_bytes
    return found


def _age(run: Found, days: float | None, now: float) -> str:
    """That it ended longer ago, in words; empty where it did not."""
    is_older = days is not None and now - run.ended_at > days * _DAY_S
    return f"ended more than {days:g} days ago" if is_older else ""


def _most_bytes(keep: Retention) -> float:
    return math.inf if keep.gib is None else keep.gib * _GIB


#: Of a run that is pruned these stay: what it was, and what became of it.
_KEPT = re.compile(r"run\.json|attempt-\d+/spec\.yaml")
#: What Muster itself writes, in the folder of an attempt.
_OWN = re.compile(
    r"attempt-\d+/[^/]*(\.log|\.log\.gz|\.hang\.txt)"
    r"|attempt-\d+/(events\.jsonl|rollout\.jsonl|rollout-plan\.json|submission[^/]*\.json)"
)
_LOG = re.compile(r"attempt-\d+/[^/]*\.log")
_RUN_ID = re.compile(r"[a-z][a-z0-9-]*-(?:ppo|grpo|sft)-\d{8}-\d{6}-[0-9a-f]{8}")


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file, by its path within the directory; links are not followed."""
    found = {}
    for folder, names, files in os.walk(directory):
        for name in [*files, *(n for n in names if os.path.islink(os.path.join(folder, n)))]:
            path = os.path.join(folder, name)
            with suppress(OSError):
                found[os.path.relpath(path, directory)] = os.lstat(path).st_size
    return found


def removable(names: Iterable[str], *, outputs: bool) -> list[str]:
    """Those of the paths within a run's directory that a prune removes, with the outputs of the
    run's own programs or without."""
    return [
        name for name in names if not _KEPT.fullmatch(name) and (outputs or _OWN.fullmatch(name))
    ]


def plain_logs(names: Iterable[str]) -> list[str]:
    """Those that can be compressed."""
    return [name for name in names if _LOG.fullmatch(name)]


def run_ids_in(text: str) -> set[str]:
    """The run ids that stand in it, within paths for example."""
    return set(_RUN_ID.findall(text))


def named_by(directory: Path) -> set[str]:
    """The other runs that a run's record and specs name: it has started from what they left."""
    found: set[str] = set()
    for path in (directory / "run.json", *directory.glob("attempt-*/spec.yaml")):
        with suppress(OSError):
            found |= run_ids_in(path.read_text(encoding="utf-8", errors="replace"))
    return found - {directory.name}


def remove(directory: Path, names: Iterable[str]) -> None:
    """Remove these files, and the folders that are empty then.

    Raises: OSError, the first one; all others were removed even so.
    """
    first: OSError | None = None
    for name in names:
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            first = first or error
    folders = (Path(above) / name for above, names, _ in os.walk(directory) for name in names)
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):
            folder.rmdir()
    if first is not None:
        raise first


def compress(path: Path) -> None:
    """Put `path.gz` in place of a file, with its times. Raises: OSError; the file is whole then."""
    draft, packed = path.with_name(f".{path.name}.gz"), path.with_name(f"{path.name}.gz")
    try:
        with path.open("rb") as source, gzip.open(draft, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        shutil.copystat(path, draft)
        draft.replace(packed)
    finally:
        draft.unlink(missing_ok=True)
    path.unlink()
