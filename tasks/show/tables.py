"""What of a run is told as figures: its step, its reward, its attempts."""

from __future__ import annotations

import json

from tasks.record.retries import table_of
from tasks.show import pictures
from tasks.show.chart import curve_of
from tasks.show.figures import Figures
from tasks.show.markdown import code, table, text
from tasks.show.view import RunView, Shown, moment

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
        f"{title}: {pictures.number(values[0])} at first, {pictures.number(values[-1])} at {step} "
        f"{pictures.number(points[-1][0])}"
    )
    every = -(-len(points) // _ROWS_AT_MOST)
    listed = [*points[::every], *points[-1:]] if (len(points) - 1) % every else points[::every]
    rows = [[pictures.number(at), pictures.number(value)] for at, value in listed]
    parts = [
        f"{text(said)}. From {code(figures.path)}, as of {moment(view.at)}.",
        table((text(step), text(name)), rows),
    ]
    picture = curve_of(points, x=step, y=name, title=title)
    return Shown(headline=said, picture=picture, data="\n\n".join(parts))
