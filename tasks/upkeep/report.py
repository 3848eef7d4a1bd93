"""What a reconcile has found and done, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """One run, or one flow run, that was not as its record said."""

    #: The run id, which is the flow run's name.
    name: str
    #: What was wrong: `its process (pid 812) was gone`.
    found: str
    #: None for what is no flow run, such as a temporary Prefect server.
    flow_run_id: str | None = None
    #: Pids that were ended.
    killed: tuple[int, ...] = ()
    #: Jobs on a cluster that were ended.
    jobs: tuple[str, ...] = ()
    #: Files, directories and cgroups.
    removed: tuple[Path, ...] = ()
    #: The state that `run.json` was given; empty where it was left as it is.
    record: str = ""
    #: The state that the flow run was given on its server; empty where it was left as it is.
    server: str = ""
    #: What is still to be done, and why it was not; empty where all of it is.
    open: str = ""
    #: Guardians were left to take down their parts, which is a matter of seconds.
    is_at_work: bool = False

    @property
    def has_acted(self) -> bool:
        """Something was changed."""
        return bool(self.killed or self.jobs or self.removed or self.record or self.server)

    def as_payload(self) -> dict[str, object]:
        """Of an event."""
        return {
            "found": self.found,
            "killed": list(self.killed),
            "jobs": list(self.jobs),
            "removed": [str(path) for path in self.removed],
            "record": self.record,
            "server": self.server,
            "open": self.open,
        }

    def __str__(self) -> str:
        done = [
            f"ended {len(self.killed)} processes ({_pids(self.killed)})" if self.killed else "",
            f"ended {', '.join(self.jobs)}" if self.jobs else "",
            f"removed {', '.join(map(str, self.removed))}" if self.removed else "",
            f"run.json: {self.record}" if self.record else "",
            f"Prefect: {self.server}" if self.server else "",
            f"still open: {self.open}" if self.open else "",
        ]
        return f"{self.name}: {'; '.join([self.found, *filter(None, done)])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one reconcile of one host came to."""

    host: str
    runs: tuple[Reconciled, ...] = ()

    @property
    def acted(self) -> tuple[Reconciled, ...]:
        """Those for which something was changed."""
        return tuple(run for run in self.runs if run.has_acted)

    @property
    def summary(self) -> str:
        """One line."""
        if not self.runs:
            return "nothing to do"
        waiting = sum(bool(run.open) for run in self.runs)
        text = f"{self.host}: {len(self.acted)} of {len(self.runs)} lost runs reconciled"
        return f"{text}, {waiting} to be looked at again" if waiting else text

    def as_markdown(self) -> str:
        """A table of those for which something was changed."""
        lines = [
            f"Reconciled on **{self.host}**",
            "",
            "| run | found | ended | removed | run.json | Prefect | still open |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for run in self.acted:
            removed = ", ".join(f"`{path}`" for path in run.removed)
            ended = "; ".join(filter(None, (_pids(run.killed), *run.jobs)))
            done = (ended, removed, run.record, run.server, run.open)
            lines.append(f"| {' | '.join(map(_cell, (run.name, run.found, *done)))} |")
        return "\n".join(lines)


def _pids(pids: Sequence[int]) -> str:
    return f"pid {', '.join(map(str, pids))}" if pids else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
