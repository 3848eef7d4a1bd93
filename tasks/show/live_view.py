"""The live region under the lines of a run: its components, its probes, its progress.

A view takes in events and gives frozen pictures; `drawn` makes rich's text of a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from rich.text import Text

from tasks.record.events import Event
from tasks.show.lines import Pace, how_ended, rate_text
from tasks.show.screen import printable
from tasks.show.view import FleetWords
from tasks.spec.run import FLEET, RunSpec
from tasks.spec.words import stopwatch

#: What is said of a component stands beside it where so many columns are left, else below it.
_NOTE_AT_LEAST = 24
_BAR_AT_LEAST, _BAR_AT_MOST = 8, 40


class Stage(Enum):
    """Where a component stands, for people."""

    #: Those before it are not ready yet.
    WAITING = "waiting"
    #: Its program runs, or its job is on its way; its readiness probe has not said yes.
    STARTING = "starting"
    READY = "ready"
    #: The run's fate is decided, and it has not ended yet.
    STOPPING = "stopping"
    ENDED = "ended"


_STYLES = {
    Stage.WAITING: "dim",
    Stage.STARTING: "yellow",
    Stage.READY: "green",
    Stage.STOPPING: "yellow",
    Stage.ENDED: "dim",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One component."""

    name: str
    stage: Stage = Stage.WAITING
    #: None where it has none on this machine.
    pid: int | None = None
    #: UTC epoch seconds of its start and its end.
    began_at: float | None = None
    ended_at: float | None = None
    #: What its readiness probe last answered, how it ended, how many engines serve.
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A run at one moment."""

    #: In the order of their start.
    rows: tuple[Row, ...]
    #: Why it waits, or that it stops; empty while there is nothing to say.
    message: str = ""
    step: float | None = None
    total: float | None = None
    #: Steps; None while nobody can say.
    per_second: float | None = None
    left_s: float | None = None


class LiveView:
    """What is known of a run by its events. One thread at a time."""

    def __init__(self, spec: RunSpec) -> None:
        self._total = spec.progress.total if spec.progress else None
        self._engines = spec.fleet.engines if spec.fleet is not None else 0
        self._names = tuple(spec.components)
        self._is_begun = False
        self._message = ""
        self._begin()

    def look(self, now: float) -> Picture | None:
        """The run as it is now; None before there is anything to be seen.

        Args:
            now: UTC epoch seconds.
        """
        if not self._is_begun:
            return None
        return Picture(
            rows=tuple(self._rows.values()),
            message=self._message,
            step=self._pace.step,
            total=self._total,
            per_second=self._pace.per_second(now),
            left_s=self._pace.left_s(now),
        )

    def observe(self, event: Event) -> None:
        """Take in an event of the run. Returns at once."""
        fields = event.fields
        match event.name:
            case "attempt.begun" | "attempt.adopted":
                self._begin()
                self._is_begun = True
            case "run.waiting":
                # For its gang: no component of an earlier attempt is left.
                self._begin()
                self._is_begun, self._message = True, f"waiting: {fields['message']}"
            case "run.state" if fields["state"] == "pending_resources" and fields["message"]:
                self._begin()
                self._message = f"waiting: {fields['message']}"
            case "run.progress":
                self._pace.see(event.at, fields["step"])
            case "teardown.begun":
                self._message = f"stopping: {fields['reason']}"
                for row in self._rows.values():
                    if row.stage in (Stage.STARTING, Stage.READY):
                        self._rows[row.name] = replace(row, stage=Stage.STOPPING)
            case "rollout.group.state" if self._fleet.observe(event):
                self._change(FLEET, note=f"{self._fleet.serving} of {self._engines} engines serve")
            case _ if event.component in self._rows:
                self._observe_component(event.component, event)

    def _observe_component(self, name: str, event: Event) -> None:
        fields = event.fields
        match event.name:
            case "component.starting":
                self._change(name, stage=Stage.STARTING, began_at=event.at)
            case "component.spawned":
                self._change(name, stage=Stage.STARTING, pid=fields["pid"], began_at=event.at)
            case "job.state":
                place = f", {fields['place']}" if fields["place"] else ""
                self._change(name, note=f"job {fields['status']}{place}")
            case "probe.failed" if fields.get("probe") != "live":
                self._change(name, note=fields["reason"])
            case "component.ready":
                # What its probe said is over; where its job runs is not.
                note = self._rows[name].note
                is_lasting = note.startswith("job ") or (name == FLEET and "engines" in note)
                self._change(name, stage=Stage.READY, note=note if is_lasting else "")
            case "component.drained":
                self._change(name, note=f"{self._rows[name].note}, its part is done".lstrip(", "))
            case "component.exited":
                self._change(name, stage=Stage.ENDED, ended_at=event.at, note=how_ended(fields))
            case "component.stuck":
                self._change(name, note="can't be ended")

    def _begin(self) -> None:
        self._rows = {name: Row(name=name) for name in self._names}
        self._pace = Pace(self._total)
        self._fleet = FleetWords(self._engines)
        self._message = ""

    def _change(self, name: str, **changes: object) -> None:
        if name in self._rows:
            self._rows[name] = replace(self._rows[name], **changes)  # type: ignore[arg-type]


def drawn(
    picture: Picture, *, columns: int, lines: int, now: float, has_unicode: bool = True
) -> list[Text]:
    """The region, no line wider and not more of them than there is room.

    Args:
        now: UTC epoch seconds.
    """
    width = max(1, columns - 1)
    below = [*_message(picture, width), *_progress(picture, width, has_unicode)]
    table = list(_table(picture, width, now))
    room = max(1, lines - len(below))
    if len(table) > room:
        hidden = len(table) - room + 1
        table = [*table[: room - 1], Text(f"  and {hidden} lines more", style="dim")]
    text = [*table, *below][:lines]
    for line in text:
        line.truncate(width, overflow="ellipsis" if has_unicode else "crop")
    return text


def _table(picture: Picture, width: int, now: float) -> Iterator[Text]:
    names = max([len("component"), *(len(row.name) for row in picture.rows)])
    # Of a long name in a narrow terminal some is given up for the state behind it.
    names = min(names, max(len("component"), width - len("  stopping  ")))
    pids = max([len("pid"), *(len(str(row.pid)) for row in picture.rows if row.pid)])
    head = f"{'component':<{names}}  {'state':<8}  {'pid':>{pids}}  {'age':>7}"
    yield Text(head, style="dim")
    for row in picture.rows:
        line = Text(f"{row.name[:names]:<{names}}  ")
        line.append(f"{row.stage.value:<8}", style=_STYLES[row.stage])
        line.append(f"  {row.pid or '':>{pids}}  {_age(row, now):>7}")
        note = " ".join(printable(row.note).split())
        if note and width - len(head) - 2 >= min(_NOTE_AT_LEAST, len(note)):
            line.append(f"  {note}", style="dim")
            yield line
        else:
            yield line
            if note:
                yield Text(f"  {note}", style="dim")


def _age(row: Row, now: float) -> str:
    """How long it has been there, or was."""
    if row.began_at is None:
        return ""
    return stopwatch((now if row.ended_at is None else row.ended_at) - row.began_at)


def _message(picture: Picture, width: int) -> Iterator[Text]:
    """Why it waits, over as many lines as that needs, up to a few."""
    words = printable(picture.message).split()
    line = ""
    lines = []
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    if line:
        lines.append(line)
    for text in lines[:4]:
        yield Text(text, style="yellow")


def _progress(picture: Picture, width: int, has_unicode: bool) -> Iterator[Text]:
    if picture.step is None:
        return
    left = f"step {picture.step:g}"
    parts = []
    share = None
    if picture.total:
        share = min(1.0, max(0.0, picture.step / picture.total))
        left += f" of {picture.total:g}"
        parts.append(f"{100 * share:.0f} %")
    if picture.per_second is not None:
        parts.append(rate_text(picture.per_second))
    if picture.left_s is not None and (share is None or share < 1):
        parts.append(f"{stopwatch(picture.left_s)} left")
    right = "  ".join(parts)
    line = Text(left)
    bar = min(_BAR_AT_MOST, width - len(left) - len(right) - 4)
    if share is not None and bar >= _BAR_AT_LEAST:
        full, empty = ("━", "─") if has_unicode else ("#", "-")
        done = round(share * bar)
        line.append("  ").append(full * done, style="green")
        line.append(empty * (bar - done), style="dim")
    line.append(f"  {right}" if right else "")
    yield line
