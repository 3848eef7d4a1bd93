"""Reports about what a reconcile has found and done."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.record.events import PAYLOADS
from tasks.spec.formatting import escape_markdown, join_commas

#: Text in front of each field of `Reconciled` when a report is printed.
_FIELD_TEXTS = {
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
    """Report about a run or flow run that was not in the state that its record said."""

    #: Run id, which is also the name of the flow run.
    name: str
    #: What was wrong: `its process (pid 812) was gone`.
    found: str
    #: None if there is no flow run.
    flow_run_id: str | None = None
    #: Pids of the processes that were killed.
    killed: tuple[int, ...] = ()
    #: Submission ids of the Ray jobs that were ended.
    jobs: tuple[str, ...] = ()
    #: Results of checking nodes again that could not be checked after a job had ended.
    nodes: tuple[str, ...] = ()
    #: Files, directories and cgroups that were removed.
    removed: tuple[Path, ...] = ()
    #: New state in `run.json`, or an empty string if it was not changed.
    record: str = ""
    #: New name of the flow run's state on the server, or an empty string if it was not changed.
    server: str = ""
    #: What is still to be done and why it was not, or an empty string.
    open: str = ""

    @property
    def has_acted(self) -> bool:
        """True if anything was changed."""
        return any(getattr(self, name) for name in _FIELD_TEXTS if name != "open")

    def as_payload(self) -> dict[str, object]:
        """Return the payload of the event `muster.run.reconciled`."""
        fields = json.loads(json.dumps(asdict(self), default=str))
        return {key: fields[key] for key in PAYLOADS["muster.run.reconciled"]}

    def __str__(self) -> str:
        parts = [self.found]
        for name, field_text in _FIELD_TEXTS.items():
            value = getattr(self, name)
            if value:
                value_text = join_commas(value) if isinstance(value, tuple) else value
                parts.append(f"{field_text} {value_text}")
        return f"{self.name}: {'; '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of one reconcile of one host."""

    host: str
    runs: tuple[Reconciled, ...] = ()

    @property
    def acted(self) -> tuple[Reconciled, ...]:
        """The reports about runs for which something was changed."""
        return tuple(run for run in self.runs if run.has_acted)

    @property
    def summary(self) -> str:
        """Summary in one line."""
        if not self.runs:
            return "nothing to do"
        open_count = sum(bool(run.open) for run in self.runs)
        summary = f"{self.host}: {len(self.acted)} of {len(self.runs)} lost runs reconciled"
        return f"{summary}, {open_count} to be looked at again" if open_count else summary

    def as_markdown(self) -> str:
        """Return a Markdown list with the runs for which something was changed."""
        lines = [f"- {escape_markdown(run)}" for run in self.acted]
        return "\n".join((f"Reconciled on **{escape_markdown(self.host)}**\n", *lines))
