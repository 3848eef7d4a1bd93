"""Show a table of the points of each matrix on the pipeline's page in the Prefect UI."""

from __future__ import annotations

import json
from functools import partial
from uuid import UUID

from tasks.pipeline.results import choose_best, format_points
from tasks.pipeline.server_requests import ServerRequests
from tasks.pipeline.stage_values import StageValues
from tasks.server.artifacts import Artifacts
from tasks.show.run_view import Shown
from tasks.spec.pipeline import Stage


class MatrixTables:
    """The tables of the matrices of a pipeline. Each table is an artifact, updated in place."""

    def __init__(self, flow_run_id: UUID, requests: ServerRequests) -> None:
        """
        Args:
            flow_run_id: Id of the pipeline's flow run, which owns the artifacts.
            requests: Connection to the Prefect server.
        """
        self._flow_run_id = flow_run_id
        self._requests = requests
        #: Last shown rows of each matrix, by the name of the stage.
        self._tables: dict[str, list[dict[str, str]]] = {}
        #: Artifact of each matrix, by the key of the artifact.
        self._artifacts: dict[str, Artifacts] = {}

    def show(self, values: StageValues) -> None:
        """Update the table of each matrix, if its rows have changed.

        Args:
            values: The runs and the values of the stages.
        """
        for stage in values.spec.stages:
            if stage.matrix is not None:
                self._show_stage(stage, values)

    def _show_stage(self, stage: Stage, values: StageValues) -> None:
        """Update the table of one matrix, if it has a run and its rows have changed."""
        runs = {run.stage: run for run in sorted(values.runs, key=lambda run: run.number)}
        figures = values.read_figures(stage.name) if stage.best is not None else {}
        best = choose_best(figures, stage.best.mode) if stage.best is not None else None
        rows = [
            (unit, point, runs[unit].state if unit in runs else "waits", figures.get(unit))
            for unit, point in zip(stage.units, stage.points, strict=True)
        ]
        table = format_points(rows, best)
        if not any(unit in runs for unit in stage.units) or self._tables.get(stage.name) == table:
            return
        self._tables[stage.name] = table
        ended = sum(run.ending is not None for run in runs.values() if run.stage in stage.units)
        headline = f"{stage.name}: {ended} of {len(rows)} points ended"
        if best is not None and stage.best is not None:
            headline += f", best {stage.best.by} {figures[best]:.6g} at point "
            headline += best.partition(".")[2]
        shown = Shown(headline=headline, data=json.dumps(table), type="table")
        key = f"points-{stage.name}".replace("_", "-")
        artifacts = self._artifacts.setdefault(key, Artifacts(self._flow_run_id, [key]))
        self._requests.try_once(partial(artifacts.show, key=key, shown=shown))
