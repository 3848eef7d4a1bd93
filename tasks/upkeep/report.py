"""What a reconcile has found and done, for people to read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.record.events import PAYLOADS
from tasks.spec.words import commas, text

#: How the fields of `Reconciled` are told that say what was changed, and what is left to do.
_TOLD = {
    "killed": "ended pid",
    "jobs": "ended",
    "nodes": "asked again:",
    "removed": "removed",
    "record": "run.json:",
    "server": "Prefect:",
    "open": "still open:",
}


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
    #: What is known by now of nodes that were not seen after a job's end.
    nodes: tuple[str, ...] = ()
    #: Files, directories and cgroups.
    removed: tuple[Path, ...] = ()
    #: The state that `run.json` was given; empty where it was left as it is.
    record: str = ""
    #: The state that the flow run was given on its server; empty where it was left as it is.
    server: str = ""
    #: What is still to be done, and why it was not; empty where all of it is.
    open: str = ""

    @property
    def has_acted(self) -> bool:
        """Something was changed."""
        return any(getattr(self, name) for name in _TOLD if name != "open")

    def as_payload(self) -> dict[str, object]:
        """Of an event."""
        known = json.loads(json.dumps(asdict(self), default=str))
        return {key: known[key] for key in PAYLOADS["muster.run.reconciled"]}

    def __str__(self) -> str:
        fields = ((what, getattr(self, name)) for name, what in _TOLD.items())
        told = [
            f"{what} {commas(said) if isinstance(said, tuple) else said}"
            for what, said in fields
            if said
        ]
        return f"{self.name}: {'; '.join([self.found, *told])}"


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
        """A line for each of those for which something was changed."""
        lines = [f"- {text(run)}" for run in self.acted]
        return "\n".join((f"Reconciled on **{self.host}**\n", *lines))
