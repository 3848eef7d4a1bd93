"""What of a run is told as figures: its step, its reward, its attempts."""

from __future__ import annotations

import json

from tasks.page import svg
from tasks.page.chart import curve_of
from tasks.page.figures import Figures
from tasks.page.markdown import code, table, text
from tasks.page.view import RunView, Shown, moment
from tasks.record.retries import table_of

_ROWS_AT_MOST = 40
_SAID_AT_MOST = 5


def progress_of(view: RunView) -> Shown | None:
    """How far it has come; None where that is not known as a part of a whole."""
    progress = view.spec.progress
    if progress is None or progress.total is None or view.step is None:
        return None
    percent = max(0.0, min(100.0, 100.0 * view.step / progress.total))
    said = f"step {view.step:g} of {progress.total}"
    return Shown(headline=said, data=percent, type="progress")


def attempts_of(view: RunView) -> Shown:
    """Every attempt, a row each."""
    rows = table_of(view.attempts)
    told = [f"{row['attempt']}: {row['kind'] or row['state']}" for row in rows[-_SAID_AT_MOST:]]
    if len(rows) > len(told):
        told.insert(0, f"{len(rows)} attempts, the last {len(told)}:")
    headline = "\n\n".join(map(text, told))
    return Shown(headline=headline, data=json.dumps(rows), type="table")


def curve_shown(view: RunView, figures: Figures) -> Shown | None:
    """The curve of what the training writes; None while it has written nothing of it."""
    points, name = figures.points, figures.name
    if not points:
        return None
    step = view.spec.progress.step if view.spec.progress else "step"
    title = f"{name} by {step}"
    values = [value for _, value in points]
    said = (
        f"{title}: {svg.number(values[0])} at first, {svg.number(values[-1])} at {step} "
        f"{svg.number(points[-1][0])}"
    )
    every = -(-len(points) // _ROWS_AT_MOST)
    listed = [*points[::every], *points[-1:]] if (len(points) - 1) % every else points[::every]
    rows = [[svg.number(at), svg.number(value)] for at, value in listed]
    parts = [
        f"{text(said)}. From {code(figures.path)}, as of {moment(view.at)}.",
        table((text(step), text(name)), rows),
    ]
    picture = curve_of(points, x=step, y=name, title=title)
    return Shown(headline=said, picture=picture, data="\n\n".join(parts))
