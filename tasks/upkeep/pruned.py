"""What a prune has found and done, for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.upkeep.retention import Act, Plan, Step

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One step that was carried out."""

    step: Step
    #: Bytes that the disk has got back.
    freed_bytes: int
    #: What went wrong; empty where nothing did. The next prune tries again.
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """One prune of a MUSTER_HOME."""

    host: str
    home: Path
    plan: Plan
    #: The plan was only shown.
    is_dry: bool
    done: tuple[Done, ...] = ()
    #: Logs of the stack that were cut.
    rotated: tuple[Path, ...] = ()
    #: Flow runs of the upkeep that were deleted from the server.
    flow_runs: int = 0
    #: What was left out, and why; empty where nothing was.
    open: tuple[str, ...] = ()

    @property
    def has_acted(self) -> bool:
        return bool(self.done or self.rotated or self.flow_runs)

    @property
    def freed_bytes(self) -> int:
        return sum(done.freed_bytes for done in self.done)

    @property
    def has_problem(self) -> bool:
        return bool(self.open) or any(done.problem for done in self.done)

    @property
    def summary(self) -> str:
        """One line."""
        steps = [done.step for done in self.done] if not self.is_dry else list(self.plan.steps)
        removed = sum(step.act is Act.REMOVE for step in steps)
        packed = len(steps) - removed
        if self.is_dry:
            size = shown(sum(step.run.removable_bytes for step in steps if step.act is Act.REMOVE))
            would = f"would remove the files of {_runs(removed)} ({size})"
            parts = [would, f"compress the logs of {_runs(packed)}"]
        else:
            parts = [f"removed the files of {_runs(removed)}" if removed else ""]
            parts += [f"compressed the logs of {_runs(packed)}" if packed else ""]
            parts += [f"{shown(self.freed_bytes)} freed" if self.done else ""]
            parts += [f"cut {len(self.rotated)} logs of the stack" if self.rotated else ""]
            parts += [f"deleted {self.flow_runs} flow runs of the upkeep" if self.flow_runs else ""]
        text = ", ".join(filter(None, parts)) or "nothing to do"
        return "; ".join(self.open) or text

    def lines(self) -> Iterator[str]:
        """One for each run that is concerned, and the summary."""
        if self.is_dry:
            for step in self.plan.steps:
                yield _line(step, step.run.removable_bytes, "")
        for done in self.done:
            yield _line(done.step, done.freed_bytes, done.problem)
        for run in self.plan.held:
            yield f"{'keep':8} {shown(run.size_bytes):>10}  {run.run_id}: {run.held}"
        if self.plan.over_bytes:
            yield f"{shown(self.plan.over_bytes)} more than allowed are left: nothing else may go"
        yield self.summary

    def as_markdown(self) -> str:
        """Of what was done."""
        rows = [
            f"| {done.step.run.run_id} | {done.step.act.value} | {done.step.why} "
            f"| {shown(done.freed_bytes)} | {done.problem} |"
            for done in self.done
        ]
        head = ["| run | done | why | freed | problem |", "| --- | --- | --- | --- | --- |"]
        table = ["", *head, *rows] if rows else []
        return "\n".join([f"Pruned `{self.home}` on **{self.host}**: {self.summary}", *table])


def shown(count: float) -> str:
    """Bytes, in a unit that people read."""
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _line(step: Step, size: int, problem: str) -> str:
    size_text = shown(size) if step.act is Act.REMOVE or size else ""
    text = f"{step.act.value:8} {size_text:>10}  {step.run.run_id}: {step.why}"
    return f"{text}; not all: {problem}" if problem else text
