"""What a reconcile and a prune have found and done, for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.record.events import PAYLOADS
from tasks.spec.words import code, commas, counted, size_text, table, text
from tasks.upkeep.retention import Act, PrunePlan, Step


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
    #: Guardians were left to take down their parts, which is a matter of seconds.
    is_at_work: bool = False

    @property
    def has_acted(self) -> bool:
        """Something was changed."""
        changed = (self.killed, self.jobs, self.nodes, self.removed, self.record, self.server)
        return any(changed)

    def as_payload(self) -> dict[str, object]:
        """Of an event."""
        known = json.loads(json.dumps(asdict(self), default=str))
        return {key: known[key] for key in PAYLOADS["muster.run.reconciled"]}

    def __str__(self) -> str:
        done = [
            f"ended {len(self.killed)} processes ({_pids(self.killed)})" if self.killed else "",
            f"ended {', '.join(self.jobs)}" if self.jobs else "",
            f"asked again: {', '.join(self.nodes)}" if self.nodes else "",
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
        head = ("run", "found", "ended", "removed", "run.json", "Prefect", "still open")
        rows = (
            (
                *(text(run.name), text(run.found)),
                text("; ".join(filter(None, (_pids(run.killed), *run.jobs, *run.nodes)))),
                commas(map(code, run.removed)),
                *(text(run.record), text(run.server), text(run.open)),
            )
            for run in self.acted
        )
        return f"Reconciled on **{self.host}**\n\n{table(head, rows)}"


def _pids(pids: Sequence[int]) -> str:
    return f"pid {commas(pids)}" if pids else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """One prune of a MUSTER_HOME."""

    host: str
    home: Path
    plan: PrunePlan
    #: The plan was only shown.
    is_dry: bool
    done: tuple[Step, ...] = ()
    #: Logs of the stack that were cut.
    rotated: tuple[Path, ...] = ()
    #: Flow runs of the upkeep that were deleted from the server.
    flow_runs: int = 0
    #: Of the code store: what nothing names.
    codes: int = 0
    #: What was left out, and why; empty where nothing was.
    open: str = ""

    @property
    def has_acted(self) -> bool:
        return bool(self.done or self.rotated or self.flow_runs or self.codes)

    @property
    def has_problem(self) -> bool:
        return bool(self.open) or any(done.problem for done in self.done)

    @property
    def summary(self) -> str:
        """One line."""
        steps = self.plan.steps if self.is_dry else self.done
        removed = sum(step.act is Act.REMOVE for step in steps)
        packed = len(steps) - removed
        if self.is_dry:
            size = size_text(
                sum(step.run.removable_bytes for step in steps if step.act is Act.REMOVE)
            )
            would = f"would remove the files of {counted(removed, 'run')} ({size})"
            parts = [would, f"compress the logs of {counted(packed, 'run')}"]
            parts += [f"remove {counted(self.codes, 'file')} of code" if self.codes else ""]
        else:
            parts = [f"removed the files of {counted(removed, 'run')}" if removed else ""]
            parts += [f"compressed the logs of {counted(packed, 'run')}" if packed else ""]
            freed = size_text(sum(step.freed_bytes for step in steps))
            parts += [f"{freed} freed" if steps else ""]
            parts += [f"removed {counted(self.codes, 'file')} of code" if self.codes else ""]
            parts += [f"cut {len(self.rotated)} logs of the stack" if self.rotated else ""]
            parts += [f"deleted {self.flow_runs} flow runs of the upkeep" if self.flow_runs else ""]
        text = ", ".join(filter(None, parts)) or "nothing to do"
        return self.open or text

    def lines(self) -> Iterator[str]:
        """One for each run that is concerned, and the summary."""
        if self.is_dry:
            for step in self.plan.steps:
                yield _line(step, step.run.removable_bytes)
        for step in self.done:
            yield _line(step, step.freed_bytes)
        for run in self.plan.held:
            yield f"{'keep':8} {size_text(run.size_bytes):>10}  {run.run_id}: {run.held}"
        if self.plan.over_bytes:
            over = size_text(self.plan.over_bytes)
            yield f"{over} more than allowed are left: nothing else may go"
        yield self.summary

    def as_markdown(self) -> str:
        """Of what was done."""
        said = f"Pruned {code(self.home)} on **{self.host}**: {text(self.summary)}"
        head = ("run", "done", "why", "freed", "problem")
        rows = [
            (
                *(one.run.run_id, one.act.value, one.why),
                *(size_text(one.freed_bytes), text(one.problem)),
            )
            for one in self.done
        ]
        return f"{said}\n\n{table(head, rows)}" if rows else said


def _line(step: Step, size: int) -> str:
    freed = size_text(size) if step.act is Act.REMOVE or size else ""
    text = f"{step.act.value:8} {freed:>10}  {step.run.run_id}: {step.why}"
    return f"{text}; not all: {step.problem}" if step.problem else text
