"""The events of a run as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.record.events import Event
from tasks.show.screen import Line

_TAIL_LINES = 12
#: Before what belongs to the line above it.
_INDENT = " " * 9


def lines_of(event: Event) -> Iterator[Line]:
    """What is said of an event; of most nothing. The run's end is told by `end_block`."""
    name, fields = event.component or "", event.fields
    match event.name:
        case "attempt.begun" | "attempt.adopted":
            goes_on = " goes on" if event.name == "attempt.adopted" else ""
            yield Line(
                text=f"run {fields['run_id']}, attempt {fields['attempt']}{goes_on}", style="bold"
            )
            yield Line(text=f"files in {fields['directory']}")
        case "containment":
            yield Line(text=f"containment {fields['text']}", style="dim")
        case "component.spawned" if fields["pid"] is not None:
            yield Line(text=f"{name}: started, pid {fields['pid']}")
        case "job.submitted" | "job.attached":
            done = event.name.removeprefix("job.")
            yield Line(text=f"{name}: job {fields['submission_id']} {done}")
        case "job.state":
            place = f", {fields['place']}" if fields["place"] else ""
            yield Line(text=f"{name}: job {fields['status']}{place}")
        case "job.swept" if fields["killed"] or fields["left"]:
            ended = "; ".join(fields["killed"])
            yield Line(text=f"{name}: ended what its job had left: {ended}", style="yellow")
        case "contact.lost":
            yield Line(text=f"{name}: no answer: {fields['message']}", style="yellow")
        case "contact.back":
            yield Line(text=f"{name}: {fields['address']} answers again", style="green")
        case "component.ready":
            yield Line(text=f"{name}: ready after {fields['after_s']:.2f} s", style="green")
        case "component.drained":
            yield Line(text=f"{name}: its part is done, the run goes on")
        case "component.exited":
            yield Line(text=f"{name}: ended, {how_ended(fields)}")
        case "component.stuck":
            left = ", ".join(map(str, fields["pids"]))
            yield Line(text=f"{name}: can't be ended: {left}", style="bold red")
        case "component.diagnosed":
            yield Line(text=f"{name}: what it was doing is in {fields['path']}")
        case "rollout.server.died":
            yield Line(
                text=f"{name}: server {fields['rank']} died: {fields['why']}", style="yellow"
            )
        case "rollout.recovery.ended":
            yield from _recovery(name, fields)
        case "rollout.warning":
            yield Line(text=f"{name}: {fields['message']}", style="yellow")
        case "rollout.failed":
            yield Line(text=f"{name}: {fields['reason']}", style="bold red")
        case "probe.failed" if fields.get("probe") == "live":
            yield Line(text=f"{name}: {fields['reason']} (miss {fields['misses']})", style="yellow")
        case "teardown.begun":
            yield Line(text=f"stopping: {fields['reason']}")
        case "run.waiting":
            yield Line(text=f"waiting: {fields['message']}", style="yellow")
        case "run.state" if fields["state"] == "pending_resources" and fields["message"]:
            yield Line(text=f"waiting: {fields['message']}", style="yellow")


def failed_attempt(ended: Event, directory: Path) -> Iterator[Line]:
    """Of an attempt that failed, and that another one follows.

    Args:
        ended: its `attempt.ended`.
        directory: of the attempt.
    """
    failure = ended.fields["failure"]
    yield Line(
        text=f"attempt {ended.fields['attempt']} failed: {failure['kind']}: {failure['message']}",
        style="red",
    )
    if failure["hint"]:
        yield Line(text=f"hint: {failure['hint']}")
    if failure["component"]:
        log = directory / f"{failure['component']}.log"
        tail = failure["log_tail"].splitlines()[-_TAIL_LINES:]
        last = "".join(f"\n{_INDENT}| {line}" for line in tail)
        yield Line(text=f"log {log}; its last lines:{last}" if last else f"log {log}")


def how_ended(fields: Mapping[str, Any]) -> str:
    """`SIGTERM`, `exit code 1`; of a component, by its event or its record."""
    if fields["signal"]:
        return str(fields["signal"])
    code = fields["exit_code"]
    return f"exit code {'unknown' if code is None else code}"


def _recovery(name: str, fields: Mapping[str, Any]) -> Iterator[Line]:
    ranks, took_s = ", ".join(map(str, fields["ranks"])), fields["took_s"]
    if fields["outcome"] == "recovered":
        yield Line(text=f"{name}: server {ranks} is back after {took_s:.1f} s", style="green")
    elif fields["outcome"] == "failed":
        yield Line(text=f"{name}: server {ranks} is not back: {fields['message']}", style="yellow")
