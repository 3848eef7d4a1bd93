"""The components of a run over time, an attempt below the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.show import pictures
from tasks.show.markdown import table, text
from tasks.show.view import RunView, Shown, clock, end_of, seconds

#: The last ones are drawn, and more of them listed.
ATTEMPTS_AT_MOST = 5
_LISTED_AT_MOST = 50
_LEFT, _RIGHT = 104.0, pictures.WIDTH - 144.0
_HEAD, _ROW, _BAR, _AXIS, _GAP = 26.0, 22.0, 14.0, 24.0, 8.0
_TOP, _FOOT = 58.0, 8.0
_WAITING, _STARTING, _READY, _FAILED = "#d0d7de", "#d4a72c", "#2da44e", "#cf222e"
#: Less than so is the start of a process.
_WAITED_S = 5.0
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_LEGEND = ((_WAITING, "waiting"), (_STARTING, "starting"), (_READY, "ready"), (_FAILED, "failed"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """One stretch of a component's time, UTC epoch seconds."""

    color: str
    name: str
    begin: float
    end: float


def timeline_of(view: RunView) -> Shown:
    """The picture, and below it the same in figures."""
    if view.attempt is None:
        return Shown(headline="nothing was started yet", data="No attempt has begun.")
    said = f"{_title(view)}, as of {clock(view.at)}"
    rows = [row for attempt in view.attempts[-_LISTED_AT_MOST:] for row in _figures(view, attempt)]
    head = ("attempt", "component", "started (UTC)", "ready after", "ended (UTC)", "how")
    return Shown(headline=said, picture=drawn(view), data=f"{text(said)}.\n\n{table(head, rows)}")


def drawn(view: RunView) -> str:
    """The timeline as SVG."""
    attempts = view.attempts[-ATTEMPTS_AT_MOST:]
    names = [_names(view, attempt) for attempt in attempts]
    heights = [_HEAD + len(rows) * _ROW + _AXIS + _GAP for rows in names]
    parts = [
        pictures.words(16, 25, _title(view), size=15, bold=True, room=pictures.WIDTH - 32),
        *_legend(),
    ]
    top = _TOP
    for attempt, rows, height in zip(attempts, names, heights, strict=True):
        parts += _attempt(view, attempt, rows, top)
        top += height
    return pictures.picture(parts, height=top + _FOOT, title=_title(view))


def phases_of(view: RunView, attempt: Mapping[str, Any], name: str) -> list[_Phase]:
    """What a component did in an attempt, in order, without gaps."""
    begin, end = attempt["started_at"], _end_of(view, attempt)
    seen = attempt["components"].get(name)
    if seen is None:
        return [_Phase(color=_WAITING, name="never started", begin=begin, end=end)]
    started, ready, over = seen["started_at"], seen["ready_at"], seen["ended_at"] or end
    found = [_Phase(color=_WAITING, name="waiting", begin=begin, end=started)]
    found.append(_Phase(color=_STARTING, name="starting", begin=started, end=ready or over))
    if ready:
        found.append(_Phase(color=_READY, name="ready", begin=ready, end=over))
    return [phase for phase in found if phase.end > phase.begin]


def _attempt(
    view: RunView, attempt: Mapping[str, Any], names: Sequence[str], top: float
) -> Iterator[str]:
    begin, end = attempt["started_at"], _end_of(view, attempt)
    scale = (_RIGHT - _LEFT) / max(end - begin, 0.1)
    yield pictures.words(16, top + 14, _heading(attempt), bold=True, room=pictures.WIDTH - 232)
    at = pictures.WIDTH - 16, top + 14
    yield pictures.words(*at, _when(view, attempt), color=pictures.PALE, size=12, anchor="end")
    foot = top + _HEAD + len(names) * _ROW
    unit, unit_s = _unit_of(end - begin)
    for tick in (one * unit_s for one in pictures.ticks(0, max(end - begin, 0.1) / unit_s, 4)):
        x = _LEFT + tick * scale
        yield pictures.line(x, top + _HEAD - 4, x, foot)
        yield pictures.words(
            x,
            foot + 14,
            f"{pictures.number(tick / unit_s)} {unit}",
            color=pictures.PALE,
            size=12,
            anchor="middle",
        )
    for number, name in enumerate(names):
        y = top + _HEAD + number * _ROW
        yield pictures.words(16, y + 11, name, room=_LEFT - 24)
        for phase in phases_of(view, attempt, name):
            x, width = _LEFT + (phase.begin - begin) * scale, (phase.end - phase.begin) * scale
            said = f"{name}: {phase.name} for {seconds(phase.end - phase.begin)}"
            yield pictures.bar(x, y, width, _BAR, phase.color, said)
        seen = attempt["components"].get(name)
        is_failed = name == (attempt["failure"] or {}).get("component")
        if is_failed:
            died = (seen or {}).get("ended_at") or end
            yield _cross(_LEFT + (died - begin) * scale, y + _BAR / 2)
        color = _FAILED if is_failed else pictures.PALE
        room = pictures.WIDTH - _RIGHT - 16
        yield pictures.words(
            _RIGHT + 12, y + 11, _note(attempt, name), color=color, size=12, room=room
        )


def _unit_of(duration_s: float) -> tuple[str, float]:
    return next(
        (name, unit_s) for name, unit_s in _UNITS if duration_s >= 2 * unit_s or unit_s == 1
    )


def _cross(x: float, y: float) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{_FAILED}"/>'
        f'<path d="M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6" stroke="#ffffff" stroke-width="2"/>'
    )


def _legend() -> Iterator[str]:
    x = 16.0
    for color, name in _LEGEND:
        yield pictures.bar(x, 36, 10, 10, color)
        yield pictures.words(x + 15, 45, name, color=pictures.PALE, size=12)
        x += 80


def _note(attempt: Mapping[str, Any], name: str) -> str:
    seen = attempt["components"].get(name)
    if seen is None:
        return "never started" if attempt["ended_at"] else ""
    if seen["ended_at"]:
        return end_of(attempt, name)
    if seen["ready_at"]:
        return f"ready in {seconds(seen['ready_at'] - seen['started_at'])}"
    return "not ready yet"


def _title(view: RunView) -> str:
    count = len(view.attempts)
    shown = f", the last {ATTEMPTS_AT_MOST} drawn" if count > ATTEMPTS_AT_MOST else ""
    attempts = "1 attempt" if count == 1 else f"{count} attempts"
    return f"{view.record['run_id']}: {attempts}{shown}"


def _heading(attempt: Mapping[str, Any]) -> str:
    failure = attempt["failure"]
    how = failure["kind"] if failure else attempt["state"]
    return f"attempt {attempt['number']}: {how}"


def _when(view: RunView, attempt: Mapping[str, Any]) -> str:
    before = [one for one in view.attempts if one["number"] < attempt["number"]]
    waited_since = before[-1]["ended_at"] if before else view.record.get("started_at")
    waited_s = attempt["started_at"] - waited_since if waited_since else 0.0
    waited = f", waited {seconds(waited_s)}" if waited_s >= _WAITED_S else ""
    return f"{clock(attempt['started_at'])}{waited}"


def _names(view: RunView, attempt: Mapping[str, Any]) -> list[str]:
    return [*dict.fromkeys([*view.spec.components, *attempt["components"]])]


def _end_of(view: RunView, attempt: Mapping[str, Any]) -> float:
    if attempt["ended_at"] is not None:
        return float(attempt["ended_at"])
    return max(view.at, float(attempt["started_at"]))


def _figures(view: RunView, attempt: Mapping[str, Any]) -> Iterator[list[str]]:
    for name in _names(view, attempt):
        seen = attempt["components"].get(name)
        if seen is None:
            yield [str(attempt["number"]), text(name), "never", "", "", ""]
            continue
        ready = seen["ready_at"]
        yield [
            str(attempt["number"]),
            text(name),
            clock(seen["started_at"]).removesuffix(" UTC"),
            seconds(ready - seen["started_at"]) if ready else "never",
            clock(seen["ended_at"]).removesuffix(" UTC") if seen["ended_at"] else "",
            end_of(attempt, name) if seen["ended_at"] else "",
        ]
