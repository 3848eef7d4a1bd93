"""Show the evaluations of a run's checkpoints: the artifact on the run's page in the Prefect UI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from tasks.record.evaluation_rules import find_best_checkpoint
from tasks.record.evaluations import EvaluatedCheckpoint, read_evaluated_checkpoints
from tasks.record.places import RunPlace
from tasks.show.markdown import escape_markdown, inline_code, markdown_table
from tasks.show.pictures import draw_curve, number_text
from tasks.show.run_view import Shown
from tasks.spec.evaluations import KeepBest
from tasks.spec.formatting import format_count, format_datetime

_HEADINGS = ("checkpoint", "evaluation", "state", "metrics", "run")
#: Largest number of evaluations in the table.
_MAX_ROWS = 200
#: Largest number of figures (numbers in the result) of one evaluation in the table.
_MAX_FIGURES = 10


def show_evaluations(place: RunPlace, keep_best: KeepBest | None, at: float) -> Shown | None:
    """Return the artifact with the evaluations of a run, or None before the first evaluation.

    The artifact has a table, newest evaluation first, and a curve of one number over the training
    steps. The curve shows the number that `keep_best` names. Without `keep_best`, it shows the
    first number in the first result.

    Args:
        place: Directory of the run.
        keep_best: The key `keep_best` of the run spec, or None.
        at: Present time in UTC epoch seconds.
    """
    try:
        evaluated = read_evaluated_checkpoints(place)
    except (OSError, ValueError) as error:
        text = f"{place.evaluations} cannot be read: {error}"
        return Shown(headline=escape_markdown(text), data=escape_markdown(text))
    if not evaluated:
        return None

    best = find_best_checkpoint(keep_best, evaluated) if keep_best is not None else None
    rows = [_make_row(one, best) for one in reversed(evaluated)]
    parts = [markdown_table(_HEADINGS, rows[:_MAX_ROWS])]
    if len(rows) > _MAX_ROWS:
        parts.append(f"The table shows the last {_MAX_ROWS} of {len(rows)} evaluations.")
    parts.append(f"As of {format_datetime(at)}.")

    lines = [format_count(len(evaluated), "evaluation")]
    picture = ""
    name = _choose_figure(evaluated, keep_best)
    if points := _list_points(evaluated, name):
        step, value = points[-1]
        lines = [
            f"{name} by step: the last value is {number_text(value)} at step {number_text(step)}"
        ]
        picture = draw_curve(points, x="step", y=name, title=f"{name} by step")
    if best is not None and keep_best is not None:
        figure = number_text(best.figure(keep_best.by) or 0.0)
        lines.append(f"best {keep_best.by}: {figure} at {_name_checkpoint(best)}")
    headline = "\n\n".join(map(escape_markdown, lines))
    return Shown(headline=headline, picture=picture, data="\n\n".join(parts))


def _name_checkpoint(one: EvaluatedCheckpoint) -> str:
    step = one.checkpoint.step
    return one.checkpoint.path if step is None else f"step {step}"


def _make_row(one: EvaluatedCheckpoint, best: EvaluatedCheckpoint | None) -> list[str]:
    """Return the cells of an evaluation in the table, in the order of the columns.

    Args:
        one: The evaluation.
        best: Evaluation of the best checkpoint, or None if no checkpoint is the best yet.
    """
    checkpoint = escape_markdown(_name_checkpoint(one))
    if best is not None and one.checkpoint == best.checkpoint:
        checkpoint = f"**{checkpoint}, the best**"
    message = f": {one.evaluation.message}" if one.evaluation.message else ""
    figures = [*one.figures.items()][:_MAX_FIGURES]
    return [
        checkpoint,
        escape_markdown(one.evaluation.name),
        escape_markdown(one.state.value + message),
        escape_markdown(", ".join(f"{key or 'result'} {value:.6g}" for key, value in figures)),
        inline_code(one.evaluation.run_id) if one.evaluation.run_id else "",
    ]


def _choose_figure(evaluated: Sequence[EvaluatedCheckpoint], keep_best: KeepBest | None) -> str:
    """Return the name of the number to draw as a curve over the steps, such as `math.accuracy`.

    Returns:
        An empty string if no evaluation has written a number.
    """
    names = [*chain.from_iterable(one.list_named_figures() for one in evaluated)]
    if keep_best is not None and keep_best.by in names:
        return keep_best.by
    return names[0] if names else ""


def _list_points(evaluated: Sequence[EvaluatedCheckpoint], name: str) -> list[tuple[float, float]]:
    """Return one result of each evaluated checkpoint, as pairs of training step and result.

    The pairs are sorted by step.

    Args:
        evaluated: The evaluated checkpoints. Checkpoints without this result are left out.
        name: Name of the result, such as `math.accuracy`.
    """
    return sorted(dict(_yield_points(evaluated, name)).items())


def _yield_points(
    evaluated: Sequence[EvaluatedCheckpoint], name: str
) -> Iterator[tuple[float, float]]:
    for one in evaluated:
        value = one.list_named_figures().get(name)
        if value is not None and one.checkpoint.step is not None:
            yield one.checkpoint.step, value
