"""Show the points of each matrix on the pipeline's page in the Prefect UI: picture and table."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from uuid import UUID

from tasks.pipeline.decision import StageRun, list_last_runs
from tasks.pipeline.point_histories import PointHistories
from tasks.pipeline.results import format_points
from tasks.pipeline.server_requests import ServerRequests
from tasks.pipeline.stage_values import StageValues
from tasks.record.evaluations import read_evaluation_curve
from tasks.record.places import RunPlace
from tasks.server.artifacts import Artifacts
from tasks.show.markdown import escape_markdown
from tasks.show.pictures import MatrixCurve, draw_matrix
from tasks.show.run_view import Shown
from tasks.spec.pipeline import Stage

_log = logging.getLogger(__name__)

#: Shortest time in seconds between two updates of a parameter sweep's table and picture, if only
#: numbers have changed. After a change of a run's state, both are updated at once.
_FIGURES_EVERY_S = 10.0


class MatrixPage:
    """Shows each parameter sweep of a pipeline as a picture and a table in the Prefect UI.

    A parameter sweep is a stage with the key `matrix`, which lists combinations of parameters. The
    stage is run once for each combination. Each sweep has one Prefect artifact, which is updated in
    place.
    """

    def __init__(
        self,
        flow_run_id: UUID,
        requests: ServerRequests,
        histories: PointHistories,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            flow_run_id: Id of the pipeline's flow run, which owns the artifacts.
            requests: Connection to the Prefect server.
            histories: Object that reads the metric values of runs.
            clock: Returns the current time in seconds.
        """
        self._flow_run_id = flow_run_id
        self._requests = requests
        self._histories = histories
        self._clock = clock
        #: Mapping from the name of a stage with a matrix to the present content of the stage's
        #: artifact.
        self._contents: dict[str, Shown] = {}
        #: Mapping from the name of a stage with a matrix to the states of the stage's runs at the
        #: last update of the stage's artifact.
        self._states: dict[str, list[str]] = {}
        #: Mapping from the name of a stage with a matrix to the time at which the stage's artifact
        #: was last updated, in seconds of `clock`.
        self._updated_s: dict[str, float] = {}
        #: Mapping from the key of a Prefect artifact to the client that updates the artifact.
        self._artifacts: dict[str, Artifacts] = {}

    def show(self, values: StageValues) -> None:
        """Update the Prefect artifact of each parameter sweep if the content has changed.

        A sweep without runs has no artifact. If only numbers have changed, an artifact is updated
        at most every ten seconds.

        Args:
            values: The runs of the pipeline's stages, and the values that they have produced.
        """
        for stage in values.spec.stages:
            if stage.matrix is None:
                continue
            runs = list_last_runs(stage.units, values.runs)
            states = [runs[unit].state if unit in runs else "waits" for unit in stage.units]
            is_due = (
                states != self._states.get(stage.name)
                or self._clock() >= self._updated_s.get(stage.name, 0.0) + _FIGURES_EVERY_S
            )
            if not runs or not is_due:
                continue
            content = self._describe_stage(stage, values, runs, states)
            self._states[stage.name] = states
            self._updated_s[stage.name] = self._clock()
            if self._contents.get(stage.name) == content:
                continue
            self._contents[stage.name] = content
            key = f"points-{stage.name}".replace("_", "-")
            artifacts = self._artifacts.setdefault(key, Artifacts(self._flow_run_id, [key]))
            self._requests.try_once(partial(artifacts.show, key=key, shown=content))

    def _describe_stage(
        self,
        stage: Stage,
        values: StageValues,
        runs: Mapping[str, StageRun],
        states: list[str],
    ) -> Shown:
        """Return the content of a parameter sweep's artifact: a headline, a picture and a table.

        Args:
            stage: The stage whose key `matrix` defines the parameter sweep.
            values: The runs of the pipeline's stages, and the values that they have produced.
            runs: Mapping from the name `STAGE.N` of a combination of parameters to the last run.
                Combinations without runs are missing.
            states: State of the last run with each combination of parameters. `waits` for a
                combination without runs.
        """
        best = values.find_best(stage.name) if stage.best is not None else None
        curves = self._read_curves(stage, values, runs, best)
        figures: dict[str, float | None] = {
            unit: curve.points[-1][1] for unit, curve in curves.items()
        }
        if stage.best is not None:
            figures |= values.read_figures(stage.name)
        rows = [
            (unit, point, state, figures.get(unit))
            for unit, point, state in zip(stage.units, stage.points, states, strict=True)
        ]

        ended = sum(run.ending is not None for run in runs.values())
        headline = f"{stage.name}: {ended} of {len(rows)} points of the matrix have ended"
        stopped = sum(run.is_stopped_early for run in runs.values())
        if stopped:
            headline += f", {stopped} stopped early"
        best_text = ""
        if best is not None and stage.best is not None:
            number = best.partition(".")[2]
            best_text = f"best {stage.best.by} {figures[best]:.6g} at point {number}"

        picture = ""
        if curves:
            picture = draw_matrix(
                [*curves.values()],
                x="point" if stage.is_step else "step",
                y=_find_figure_key(stage),
                title=headline,
                caption=best_text,
            )
        return Shown(
            headline=escape_markdown(", ".join(filter(None, (headline, best_text)))),
            data=json.dumps(format_points(rows, best)),
            type="table",
            picture=picture,
        )

    def _read_curves(
        self,
        stage: Stage,
        values: StageValues,
        runs: Mapping[str, StageRun],
        best: str | None,
    ) -> dict[str, MatrixCurve]:
        """Return a mapping from the name of each run of a parameter sweep to the run's curve.

        The name is `STAGE.N`. N is the number of the run's combination of parameters, from 1. For a
        training, the curve shows a metric, or a number from the evaluations, over the training
        steps. For a function or a command, the curve is a single dot: x is N, and y is a number in
        the result. Runs without a value are missing.

        Args:
            stage: The stage whose key `matrix` defines the parameter sweep.
            values: The runs of the pipeline's stages, and the values that they have produced.
            runs: Mapping from the name `STAGE.N` of a combination of parameters to the last run.
                Combinations without runs are missing.
            best: Name of the best combination, or None if unknown.
        """
        key = _find_figure_key(stage)
        curves: dict[str, MatrixCurve] = {}
        if not key:
            return curves
        results = values.read_figures(stage.name) if stage.is_step else {}
        for unit, run in runs.items():
            number = int(unit.partition(".")[2])
            figure = results.get(unit)
            points = [(float(number), figure)] if figure is not None else []
            if stage.best_evaluation:
                points = [*_read_evaluations(run, key).items()]
            elif not stage.is_step:
                points = [*self._histories.read(run, key).figures.items()]
            if points:
                curves[unit] = MatrixCurve(
                    number=number,
                    points=points,
                    is_best=unit == best,
                    is_stopped=run.is_stopped_early,
                )
        return curves


def _read_evaluations(run: StageRun, key: str) -> dict[float, float]:
    """Return the numbers with the name `key` in a run's evaluations, by training step.

    Returns:
        Mapping from training step to number. Empty if the evaluations cannot be read.
    """
    try:
        return read_evaluation_curve(RunPlace.of(run.name), key)
    except (OSError, ValueError) as error:
        _log.warning("The evaluations of the run %s cannot be read: %s", run.name, error)
        return {}


def _find_figure_key(stage: Stage) -> str:
    """Return the name of the metric that the picture of a parameter sweep shows.

    Returns:
        The value of `best.by` or `stop_early.by` in the stage. An empty string if the stage has
        neither key.
    """
    choice = stage.best or stage.stop_early
    return choice.by if choice is not None else ""
