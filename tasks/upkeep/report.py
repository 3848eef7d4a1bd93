"""Reports of `muster reconcile` about lost runs and about the cleanup of their leftovers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.record.events import PAYLOADS
from tasks.show.markdown import escape_markdown
from tasks.spec.formatting import join_commas

#: Text that precedes each field of `RunReport` in a printed report.
_FIELD_TEXTS = {
    "killed": "ended pid",
    "jobs": "ended job",
    "nodes": "checked again:",
    "removed": "removed",
    "record": "run.json:",
    "server": "Prefect:",
    "open": "still open:",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Report about one run or flow run whose recorded state was wrong, and about its cleanup."""

    #: Run id, which is also the name of the flow run.
    name: str
    #: Phrase that describes the problem, for example `the flow process (pid 812) was gone`.
    found: str
    #: Id of the run's Prefect flow run, or None if there is none.
    flow_run_id: str | None = None
    #: Process ids of the leftover processes that were killed.
    killed: tuple[int, ...] = ()
    #: Submission ids of the Ray jobs that were ended.
    jobs: tuple[str, ...] = ()
    #: Phrases about Ray nodes, for example `checked node n1`. Some nodes could not be checked for
    #: leftover processes at the end of a Ray job. `muster reconcile` checks these nodes later, and
    #: describes the results in these phrases.
    nodes: tuple[str, ...] = ()
    #: Files, directories and cgroups that were removed.
    removed: tuple[Path, ...] = ()
    #: New state in the run's `run.json`, or an empty string if the state was not changed.
    record: str = ""
    #: New name of the flow run's state on the Prefect server, or an empty string if the state was
    #: not changed.
    server: str = ""
    #: Phrase about work that could not be done yet, with the reason. An empty string if all work is
    #: done.
    open: str = ""

    @property
    def has_changes(self) -> bool:
        """True if `muster reconcile` has changed anything for this run."""
        return any(getattr(self, name) for name in _FIELD_TEXTS if name != "open")

    def as_payload(self) -> dict[str, object]:
        """Return the payload of the Prefect event `muster.run.reconciled` as JSON data."""
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
    """Result of one `muster reconcile` of a host: a report for each run with a wrong state."""

    #: Name of the host whose runs were reconciled.
    host: str
    #: One report for each run with a wrong state, whether or not it could be corrected.
    runs: tuple[RunReport, ...] = ()

    @property
    def changed_runs(self) -> tuple[RunReport, ...]:
        """Reports about the runs that `muster reconcile` has changed."""
        return tuple(run for run in self.runs if run.has_changes)

    @property
    def summary(self) -> str:
        """One line with the host, the number of changed runs, and the number of unfinished runs."""
        if not self.runs:
            return "nothing to do"
        open_count = sum(bool(run.open) for run in self.runs)
        summary = f"{self.host}: {len(self.changed_runs)} of {len(self.runs)} lost runs reconciled"
        return f"{summary}, {open_count} still open" if open_count else summary

    def as_markdown(self) -> str:
        """Return a Markdown list of the runs that `muster reconcile` has changed."""
        lines = [f"- {escape_markdown(run)}" for run in self.changed_runs]
        return "\n".join((f"Reconciled on **{escape_markdown(self.host)}**\n", *lines))
