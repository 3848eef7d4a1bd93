"""The values of a pipeline's stages that placeholders and conditions of later stages use.

`StageValues` is a snapshot: it has the runs and the states of the stages at one decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from tasks.pipeline.decision import StageRun, StageState, completed_run, list_last_runs
from tasks.pipeline.results import choose_best, keep_large_value, select_value
from tasks.pipeline.run_results import RunResults
from tasks.pipeline.stage_specs import CannotBegin
from tasks.record.places import RunPlace
from tasks.record.result_file import InvalidResult
from tasks.spec.conditions import InvalidCondition, parse_condition
from tasks.spec.pipeline import PipelineSpec
from tasks.spec.placeholders import BEST, POINT, RESULT, RESULTS, RUN_DIR, RUN_ID, STAGE, STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class StageValues:
    """The values that stages have produced for placeholders and conditions of later stages.

    The values are computed from a snapshot of the stages and their runs. The pipeline takes a new
    snapshot before each decision about the next runs.
    """

    spec: PipelineSpec
    #: Id of the pipeline's flow run. Values that are too large for a run spec are written to files
    #: in the directory of this flow run.
    flow_run_id: UUID
    #: All runs of the stages, in any order.
    runs: Sequence[StageRun]
    #: Mapping from the name of a stage to its state. Stages whose state is not decided yet may be
    #: missing.
    states: Mapping[str, StageState]
    results: RunResults

    def find_skip_reason(self, name: str) -> str:
        """Return the reason for skipping a stage, or an empty string.

        Args:
            name: Name of the stage. The stages that it needs have ended.

        Raises:
            CannotBegin: The condition of the stage cannot be evaluated.
        """
        for other, key in self._list_used_values(name):
            state = self.states[other]
            has_value = state is StageState.COMPLETED or key == STATE
            if self.spec.stage(other).matrix is not None and self._usable_points(other):
                has_value = True
            if not has_value:
                verb = "was skipped" if state is StageState.SKIPPED else "failed"
                return f"the stage uses a value of stage {other}, but stage {other} {verb}"
        text = self.spec.stage(name).when
        if text is None:
            return ""

        def value_of(placeholder: str) -> object:
            other, _, key = placeholder.removeprefix(STAGE).partition(".")
            return self._stage_value(other, key)

        try:
            holds = parse_condition(text).evaluate(value_of)
        except (InvalidCondition, InvalidResult) as error:
            raise CannotBegin(f"stage {name}: USER_ERROR: when: {error}") from error
        return "" if holds else f"the condition of the stage is false: {text}"

    def _list_used_values(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the values that a stage gets from earlier stages, as pairs of stage name and key.

        Args:
            name: Name of the stage that uses the values.
        """
        used: list[tuple[str, str]] = []

        def collect(other: str, key: str) -> str:
            used.append((other, key))
            return "stage"

        stage = self.spec.stage(name)
        self.spec.fill_run_spec(stage.units[0], collect)
        if stage.when is not None:
            for placeholder in parse_condition(stage.when).names:
                other, _, key = placeholder.removeprefix(STAGE).partition(".")
                used.append((other, key))
        yield from used

    def completed_points(self, name: str) -> dict[str, StageRun]:
        """Return the completed runs of a parameter sweep.

        Args:
            name: Name of the stage.

        Returns:
            Mapping from `STAGE.N` to run N of the stage.
        """
        runs = {unit: completed_run(unit, self.runs) for unit in self.spec.stage(name).units}
        return {unit: run for unit, run in runs.items() if run is not None}

    def _usable_points(self, name: str) -> dict[str, StageRun]:
        """Return the runs of a parameter sweep that have completed or were stopped early.

        The best run is chosen from these runs. The keys of the result are the names `STAGE.N`.
        """
        stopped = {
            unit: run
            for unit, run in list_last_runs(self.spec.stage(name).units, self.runs).items()
            if run.is_stopped_early
        }
        return stopped | self.completed_points(name)

    def read_figures(self, name: str) -> dict[str, float | None]:
        """Return the numbers that decide which run of a parameter sweep is best.

        Args:
            name: Name of the stage.

        Returns:
            Mapping from the name `STAGE.N` of a run to the number, or to None if the number is
            unknown. Only runs that have completed or were stopped early are included.
        """
        stage = self.spec.stage(name)
        assert stage.best is not None
        return {
            unit: self.results.figure(stage, run, stage.best)
            for unit, run in self._usable_points(name).items()
        }

    def find_best(self, name: str) -> str | None:
        """Return the name `STAGE.N` of the best run of a parameter sweep, or None if unknown.

        - Runs without a number in the result of `read_figures` are ignored.
        - If a run has completed, the best completed run is returned.
        - If no run has completed, the best run that was stopped early is returned, but only after
          all runs of the sweep have ended.
        """
        stage = self.spec.stage(name)
        assert stage.best is not None
        figures = self.read_figures(name)
        completed = self.completed_points(name)
        best = choose_best(
            {unit: figure for unit, figure in figures.items() if unit in completed}, stage.best.mode
        )
        last_runs = list_last_runs(stage.units, self.runs)
        is_over = len(last_runs) == len(stage.units) and all(
            run.ending is not None for run in last_runs.values()
        )
        if best is None and is_over:
            return choose_best(figures, stage.best.mode)
        return best

    def placeholder_value(self, stage: str, key: str) -> object:
        """Return the value of a spec placeholder that refers to an earlier stage.

        A large value is written to a file in the pipeline's directory, and the path of the file is
        returned.

        Raises:
            CannotBegin, InvalidResult: The earlier stage has no such value.
        """
        try:
            return keep_large_value(
                self.flow_run_id, f"{stage}.{key}", self._stage_value(stage, key)
            )
        except OSError as error:
            raise CannotBegin(
                f"Muster must store the value {stage}.{key} in a file, because the value is too "
                f"large for a run spec. Muster could not write this file: {error}"
            ) from error

    def _stage_value(self, stage: str, key: str) -> object:
        """Return a value of an earlier stage, as JSON data.

        Args:
            stage: Name of the earlier stage.
            key: Part of the placeholder after the stage's name.

        Raises:
            CannotBegin, InvalidResult: The earlier stage has no such value.
        """
        if key == STATE:
            return self.states[stage].value
        if key == RESULTS:
            points = self.spec.stage(stage).points
            units = self.spec.stage(stage).units
            return [
                {"point": points[units.index(unit)], "result": self._run_value(run, RESULT)}
                for unit, run in self.completed_points(stage).items()
            ]
        first, _, rest = key.partition(".")
        if first != BEST or self.spec.stage(stage).matrix is None:
            run = completed_run(stage, self.runs)
            assert run is not None, f"stage {stage} has not completed"
            return self._run_value(run, key)

        choice = self.spec.stage(stage).best
        assert choice is not None, f"stage {stage} has no key best"
        unit = self.find_best(stage)
        if unit is None:
            raise CannotBegin(
                f"the best point of stage {stage} is unknown, because no completed point of the "
                f"matrix has a value of the metric {choice.by!r}"
            )
        if rest.startswith(f"{POINT}."):
            point = self.spec.stage(stage).points[self.spec.stage(stage).units.index(unit)]
            return select_value(point, rest.removeprefix(f"{POINT}."))
        return self._run_value(self._usable_points(stage)[unit], rest)

    def _run_value(self, run: StageRun, key: str) -> object:
        """Return a value of a completed run, as JSON data.

        Args:
            run: The completed run.
            key: Part of the placeholder, such as `checkpoint` or `result.score`.

        Raises:
            CannotBegin: The key is `checkpoint`, but this host has no checkpoint of the run, or the
                folder of the checkpoints cannot be read.
            InvalidResult: The result has no such key.
        """
        if key == RESULT or key.startswith(f"{RESULT}."):
            result = self.results.result(run)
            return select_value(result, key.removeprefix(RESULT).removeprefix("."))
        if key == RUN_ID:
            return run.name
        if key == RUN_DIR:
            return str(RunPlace.of(run.name).directory)
        return self.results.checkpoint(self.spec.unit_stage(run.stage), run)
