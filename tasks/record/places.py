"""Names and places of a run: its id and the files it leaves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID


def muster_home() -> Path:
    """`$MUSTER_HOME`, by default `~/.muster`; absolute."""
    return Path(os.environ.get("MUSTER_HOME") or "~/.muster").expanduser().absolute()


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one that is on disk by that name. A lock on one that was removed
    or replaced since it was opened keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def make_run_id(name: str, workload: str, flow_run_id: UUID, created: datetime) -> str:
    """`<name>-<workload>-<YYYYMMDD>-<HHMMSS>-<8 hex>`, the same each time for one flow run.

    Args:
        created: when the flow run was created, aware; written in UTC.
    """
    return f"{name}-{workload}-{created.astimezone(UTC):%Y%m%d-%H%M%S}-{flow_run_id.hex[-8:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlace:
    """The files of one attempt."""

    #: `attempt-01` under the run's directory, absolute.
    directory: Path
    #: From 1.
    number: int

    @property
    def spec(self) -> Path:
        return self.directory / "spec.yaml"

    @property
    def events(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def fleet_plan(self) -> Path:
        """What the process of its fleet is to do."""
        return self.directory / "rollout-plan.json"

    @property
    def fleet_events(self) -> Path:
        """What the process of its fleet says happens to it."""
        return self.directory / "rollout.jsonl"

    @property
    def submission(self) -> Path:
        """Of its Ray job; further jobs of the attempt have files beside it."""
        return self.directory / "submission.json"

    def submissions(self) -> list[Path]:
        """Of its jobs that were submitted, or about to be."""
        return sorted(self.directory.glob("submission*.json"))

    def log(self, component: str) -> Path:
        return self.directory / f"{component}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """The files of one run."""

    #: `$MUSTER_HOME/runs/<run id>`, absolute.
    directory: Path

    @staticmethod
    def of(run_id: str, home: Path | None = None) -> RunPlace:
        return RunPlace(directory=(home or muster_home()) / "runs" / run_id)

    @property
    def run_id(self) -> str:
        return self.directory.name

    @property
    def record(self) -> Path:
        return self.directory / "run.json"

    def attempt(self, number: int) -> AttemptPlace:
        return AttemptPlace(directory=self.directory / f"attempt-{number:02d}", number=number)
