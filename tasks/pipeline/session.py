"""Run a pipeline in its flow process: create the run of each stage, and wait for the run's end.

The Prefect server stores the whole progress of a pipeline, and each step reads the progress again.
The flow process of a pipeline can therefore be killed at any time. The next flow process continues
at the same step.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed

from tasks.pipeline.decision import (
    Begin,
    PipelineDecision,
    StagePlan,
    StageRun,
    StageState,
    completed_run,
    decide,
    find_last_request,
)
from tasks.pipeline.results import (
    InvalidResult,
    choose_best,
    format_points,
    keep_large_value,
    read_last_metric,
    read_result,
    select_value,
)
from tasks.pipeline.stage_runs import (
    cancel_stage_run,
    create_stage_run,
    describe_stage_run,
    find_cached_runs,
    format_link,
    list_cached_runs,
    list_stage_runs,
    make_cache_tag,
    show_skipped_stage,
    use_cached_run,
)
from tasks.pipeline.stage_specs import CannotBegin, read_specs_of_deployments
from tasks.record.checkpoint_paths import CheckpointPath
from tasks.record.checkpoints import find_stage_checkpoint
from tasks.record.places import RunPlace
from tasks.record.states import RunState
from tasks.server import flow_process, flow_runs
from tasks.server.artifacts import Artifacts
from tasks.server.flow_runs import ServerAway, connect_to_server
from tasks.server.interruption import end_on_request
from tasks.server.server import NoServer, read_secrets
from tasks.show.run_view import Shown
from tasks.spec.conditions import InvalidCondition, parse_condition
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import join_commas
from tasks.spec.pipeline import PipelineSpec, add_deployment_specs, parse_pipeline
from tasks.spec.placeholders import BEST, POINT, RESULT, RESULTS, RUN_DIR, RUN_ID, STAGE, STATE
from tasks.spec.probes import get_number
from tasks.spec.run import RunSpec
from tasks.spec.secrets import drop_common_values, find_env_secrets, mask_text

_log = logging.getLogger(__name__)

#: Function that is called with each progress message of a pipeline. `muster pipeline` sets a
#: function that prints the messages. By default, the messages are only logged.
on_message: ContextVar[Callable[[str], None]] = ContextVar(
    "on_message", default=lambda message: None
)

#: Seconds between two requests for the state of a stage's run.
_POLL_INTERVAL_S = 2.0
#: Largest number of active runs that the state message of the pipeline's flow run describes.
_MAX_SHOWN_RUNS = 5
#: Seconds to wait for the end of a cancelled stage run, in addition to its grace periods.
_CANCEL_TIMEOUT_S = 180.0
#: Seconds to wait for the end of a stage run that is cancelled without grace periods.
_HURRIED_TIMEOUT_S = 30.0
#: Seconds to wait for a Prefect server that does not answer, once the pipeline must end.
_SERVER_TIMEOUT_S = 30.0
#: Seconds until the next flow process of a pipeline may start, after the old flow process has given
#: up the pipeline. The old flow process exits within this time.
_DUE_AFTER_S = 5.0

T = TypeVar("T")
#: Function that returns a fault for each stage that can never fit on its cluster.
FindUnfitStages = Callable[[PipelineSpec], Sequence[Fault]]


class PipelineSession:
    """One pipeline that runs in this process.

    `interrupt`, `hurry` and `hand_over` may be called by any thread.
    """

    def __init__(self, spec: PipelineSpec, *, flow_run_id: UUID, api_url: str) -> None:
        self.spec = spec
        self.flow_run_id = flow_run_id
        self._api_url = api_url
        #: Reason for ending the pipeline as cancelled, or an empty string.
        self.cancel_reason = ""
        #: Reason why this process stops and the pipeline's next flow process continues the
        #: pipeline. An empty string if this process keeps the pipeline.
        self.hand_over_reason = ""
        #: Reason why a stage cannot begin, so that the pipeline fails, or an empty string.
        self.failure = ""
        #: The failed or cancelled stage run that ended the pipeline, or None.
        self.final_run: StageRun | None = None
        #: All runs of the pipeline's stages when the Prefect server was last asked, in any order.
        self._runs: list[StageRun] = []
        #: State of each stage at the last decision, by name.
        self._states: Mapping[str, StageState] = {}
        #: Reason why a stage is skipped, by the name of the stage. Contains only skipped stages.
        self._skipped: Mapping[str, str] = {}
        #: Result of each completed step, or the fault of the result, by the id of the flow run.
        self._results: dict[str, Any] = {}
        #: Numbers that the key `best` compares to find the best point of a matrix. The keys are the
        #: flow run ids of the completed points. None if a point has no such number.
        self._figures: dict[str, float | None] = {}
        #: Earlier runs whose results are used instead of new runs. The keys are the names of the
        #: stages, or `STAGE.N` for the point N of a matrix.
        self._reused: dict[str, StageRun] = {}
        #: Last reported state of each run, by the id of the flow run.
        self._reported: dict[str, StageRun] = {}
        #: Names of the skipped stages that the pipeline's page in the Prefect UI shows.
        self._shown_skips: set[str] = set()
        #: Last shown rows of each matrix, by the name of the stage.
        self._tables: dict[str, list[dict[str, str]]] = {}
        #: Artifact of each matrix, by the key of the artifact.
        self._artifacts: dict[str, Artifacts] = {}
        #: Secret values that are masked in results.
        self._secrets: frozenset[str] = find_env_secrets(os.environ)
        #: The last progress message about the active runs, or an empty string.
        self._last_message = ""
        #: True if the active runs must be cancelled without their grace periods.
        self._is_hurried = False
        #: Event that is set when the pipeline must end, or when the next flow process of the
        #: pipeline must continue it.
        self._ending = threading.Event()
        #: True after this process has begun to leave the pipeline to the next flow process.
        self.is_handing_over = False

    def interrupt(self, why: str) -> None:
        """Request that the pipeline ends as cancelled, and return at once.

        All active runs are cancelled with their grace periods. A second call changes nothing,
        because one cancellation may arrive both as a signal and from the Prefect server.
        """
        self.cancel_reason = self.cancel_reason or why
        self._ending.set()

    def hurry(self) -> None:
        """Request that cancelled runs skip their grace periods, and return at once."""
        self._is_hurried = True

    def hand_over(self, why: str) -> None:
        """Request that the next flow process continues the pipeline, and return at once."""
        self.hand_over_reason = self.hand_over_reason or why
        self._ending.set()

    def prepare(self, find_unfit_stages: FindUnfitStages = lambda _spec: ()) -> None:
        """Check spec, deployment, secrets and resources of every stage before the first begins.

        If a stage cannot begin, the reason is stored in `failure`.

        Args:
            find_unfit_stages: Function that returns a fault for each stage that needs resources
                that no node has. It is called only if no stage has begun.
        """
        self._try(self._update_tags)
        try:
            spec = parse_pipeline(self.spec)
            specs = self._ask(lambda client: read_specs_of_deployments(client, spec))
            self.spec = add_deployment_specs(spec, specs)
            for stage in self.spec.stages:
                for unit in stage.units[:1]:
                    run_spec = RunSpec.model_validate(self._plain_run_spec(unit))
                    blocks = self._ask(partial(read_secrets, spec=run_spec))
                    self._secrets |= run_spec.secrets | drop_common_values(blocks.values())
            runs, _ = self._ask(self._read_progress)
            unfit = () if runs else find_unfit_stages(self.spec)
        except (InvalidSpec, CannotBegin) as error:
            self.failure = f"USER_ERROR: {error}"
            return
        except (ServerAway, NoServer) as error:
            _log.warning("The nodes of the queue are unknown: %s", error)
            return
        if unfit:
            self.failure = f"INFEASIBLE: {'; '.join(map(str, unfit))}"

    def advance(self) -> bool:
        """Create the runs that may begin now, and report the changes of all runs.

        Returns:
            True if the pipeline must wait for a run. False if the pipeline ends.

        Raises:
            Pause: This process must exit, because the next flow process continues the pipeline.
        """
        if self.cancel_reason:
            return False
        decision = self._decide()
        self._report(decision)
        if decision.is_over or self.cancel_reason:
            return False
        # If a run is being cancelled, the pipeline will end, too. So wait for the end of the run,
        # and do not hand over the pipeline. For example, `muster down` cancels all runs of this
        # machine.
        is_cancelling = any(
            run.state in ("Cancelling", flow_runs.CANCELLING_NOW) for run in decision.active
        )
        if self.hand_over_reason and not is_cancelling:
            self._hand_over(_describe_handover(decision))
        for step in decision.begins:
            if self.failure or self._ending.is_set():
                break
            self._begin(step)
        return True

    def wait(self) -> None:
        """Wait until the next read of the runs' states is due, or until the pipeline ends."""
        self._wait(_POLL_INTERVAL_S)

    def cancel_runs(self) -> None:
        """Cancel all runs of a cancelled pipeline that have not ended, and wait for their ends.

        Does nothing if the pipeline is not cancelled. The wait is limited to the longest grace
        periods of a run plus three minutes. After a call of `hurry`, the runs are cancelled without
        grace periods, and the wait is limited to 30 s. A phrase about the end of each run is added
        to `cancel_reason`.
        """
        if not self.cancel_reason:
            return
        try:
            # Read the list of runs again, because this process may have created a run just before
            # it was cancelled.
            self._runs, _ = self._ask(self._read_progress)
        except ServerAway as error:
            _log.warning("The runs of the pipeline could not be read again: %s", error)
        runs = [run for run in self._runs if run.ending is None]
        if runs:
            self._cancel(runs)

    def _cancel(self, runs: Sequence[StageRun]) -> None:
        """Cancel runs, and wait for their ends for the limited time that `cancel_runs` explains."""
        names = join_commas([run.stage for run in runs])
        self.say(f"cancelling stage {names}: {self.cancel_reason}")
        current = {run.flow_run_id: run for run in runs}
        away: ServerAway | None = None
        try:
            for run in runs:
                self._ask(partial(cancel_stage_run, run=run))
            deadline = time.monotonic() + self._longest_teardown_s(runs) + _CANCEL_TIMEOUT_S
            was_hurried = False
            while time.monotonic() < deadline:
                for run in runs:
                    if current[run.flow_run_id].ending is None:
                        current[run.flow_run_id] = self._refresh(run)
                open_runs = [run for run in current.values() if run.ending is None]
                if not open_runs:
                    break
                if self._is_hurried and not was_hurried:
                    was_hurried = True
                    for run in open_runs:
                        self._ask(partial(cancel_stage_run, run=run, is_now=True))
                    deadline = min(deadline, time.monotonic() + _HURRIED_TIMEOUT_S)
                time.sleep(_POLL_INTERVAL_S / 4)
        except ServerAway as error:
            away = error
        for run in current.values():
            state = run.state if run.ending is not None else f"still {run.state}"
            if away is not None and run.ending is None:
                state = (
                    "state unknown, it may continue, because the Prefect server does not answer: "
                    f"{away}"
                )
            self.cancel_reason += f"; stage {run.stage}: {state}"

    def _longest_teardown_s(self, runs: Iterable[StageRun]) -> float:
        """Return the longest time in seconds that the grace periods of a run take."""
        specs = [RunSpec.model_validate(self._plain_run_spec(run.stage)) for run in runs]
        return max(spec.teardown_s for spec in specs)

    def _plain_run_spec(self, unit: str) -> object:
        """Return the run spec of a stage or matrix point.

        A fixed text replaces each placeholder `${stage.NAME.KEY}`.
        """
        return self.spec.fill_run_spec(unit, lambda _stage, _key: "stage")

    def conclude(self) -> State[Any]:
        """Return the final Prefect state of the pipeline."""
        if self.cancel_reason:
            return Cancelled(message=self.cancel_reason)
        if self.failure:
            return Failed(message=self.failure)
        run = self.final_run
        if run is None:
            return Completed(message=self._describe_completion())
        if run.ending is RunState.CANCELLED:
            return Cancelled(
                message=f"stage {run.stage}: its run was cancelled ({format_link(run)})"
            )
        reason = run.message if run.state == "Failed" else f"{run.state}: {run.message}"
        return Failed(message=f"stage {run.stage}: {reason} ({format_link(run)})")

    def _describe_completion(self) -> str:
        """Return the final message of a pipeline that has completed.

        The message also lists the stages that were skipped, and the stages whose failure did not
        stop the pipeline.
        """
        others = {
            name: state
            for name, state in self._states.items()
            if state in (StageState.SKIPPED, StageState.FAILED)
        }
        names = [name for name in self.spec.stage_names if name not in others]
        if not others:
            return f"all stages are complete: {', '.join(names)}"
        parts = [f"complete: {', '.join(names) or 'none'}"]
        for name, state in others.items():
            reason = self._skipped.get(name, "failed, and the pipeline continued")
            is_skipped = state is StageState.SKIPPED
            parts.append(f"stage {name}: {'skipped, because ' if is_skipped else ''}{reason}")
        return "; ".join(parts)

    def _decide(self) -> PipelineDecision:
        """Read the progress of the pipeline, and return the next actions.

        If a stage cannot begin, the reason is stored in `failure`, and no further run begins.
        """
        runs, requested_at = self._ask(self._read_progress)
        self._runs = [self._check_result(run) for run in runs]
        needs = self.spec.needs
        plans = [
            StagePlan(
                name=stage.name,
                needs=needs[stage.name],
                units=stage.units,
                at_most=stage.at_most,
                continues=stage.on_failure == "continue",
            )
            for stage in self.spec.stages
        ]
        decision: PipelineDecision | None = None
        if not self.failure:
            try:
                decision = decide(plans, self._runs, requested_at, self._find_skip_reason)
            except (CannotBegin, InvalidSpec) as error:
                self.failure = str(error)
        if decision is None:
            decision = decide(plans, self._runs, requested_at, lambda *_: self.failure)
            decision = replace(decision, begins=(), skipped={})
        self._states = decision.states
        self._skipped = decision.skipped
        self.final_run = decision.ended_by
        return decision

    def _begin(self, step: Begin) -> None:
        """Create a new run of a stage. If that is not possible, store the reason in `failure`."""
        stage = self.spec.unit_stage(step.stage)
        try:
            spec = self.spec.fill_run_spec(step.stage, self._placeholder_value)
            tags = [*self.spec.tags, f"pipeline:{self.spec.name}"]
            if stage.cache is not None:
                tag = make_cache_tag(spec, with_code=stage.cache == "inputs_and_code")
                tags.append(tag)
                if self._use_cache(step, tag):
                    return
            run = self._ask(
                lambda client: create_stage_run(
                    client, self.flow_run_id, stage, step.stage, step.number, spec=spec, tags=tags
                )
            )
        except (InvalidSpec, CannotBegin, InvalidResult) as error:
            self.failure = f"stage {step.stage}: USER_ERROR: {error}"
            return
        self._reported[run.flow_run_id] = run
        self._runs.append(run)
        try_text = f", try {step.number}" if step.number > 1 else ""
        self.say(f"stage {step.stage}{try_text}: queued ({format_link(run)})")

    def _use_cache(self, step: Begin, tag: str) -> bool:
        """Use the result of an earlier run of a step, if there is one.

        Args:
            step: The step that would begin now. A found earlier run takes its place.
            tag: Tag of the runs with the same inputs.

        Returns:
            True if an earlier run with a usable result was found.
        """
        for flow_run in self._ask(lambda client: [*find_cached_runs(client, tag)]):
            cached = describe_stage_run(step.stage, step.number, flow_run)
            if self._check_result(cached).ending is not RunState.COMPLETED:
                continue
            self._ask(
                partial(
                    use_cached_run,
                    pipeline=self.flow_run_id,
                    unit=step.stage,
                    number=step.number,
                    flow_run=flow_run,
                )
            )
            self._reused[step.stage] = replace(cached, state="Cached")
            self.say(f"stage {step.stage}: cached, with the result of the run {flow_run.name}")
            return True
        return False

    def _check_result(self, run: StageRun) -> StageRun:
        """Return a run, with the state Failed if the run is a step without a valid result.

        The state changes only if the run is completed.
        """
        if run.ending is not RunState.COMPLETED or not self._is_step(run.stage):
            return run
        if run.flow_run_id not in self._results:
            stage = self.spec.unit_stage(run.stage)
            try:
                self._results[run.flow_run_id] = read_result(
                    RunPlace.of(run.name),
                    is_required=stage.call is not None,
                    mask=partial(mask_text, secret_values=self._secrets),
                )
            except InvalidResult as error:
                self._results[run.flow_run_id] = error
        result = self._results[run.flow_run_id]
        if isinstance(result, InvalidResult):
            message = f"USER_ERROR: {result}"
            return replace(run, state="Failed", message=message, ending=RunState.FAILED)
        return run

    def _is_step(self, unit: str) -> bool:
        """Return True if a stage of the spec is a step.

        Args:
            unit: Name of the stage, or `STAGE.N` for the point N of its matrix.
        """
        name = unit.partition(".")[0]
        return name in self.spec.stage_names and self.spec.stage(name).is_step

    def _find_skip_reason(self, name: str, states: Mapping[str, StageState]) -> str:
        """Return the reason for skipping a stage, or an empty string.

        Args:
            name: Name of the stage.
            states: State of each stage that the stage needs, and of further stages.

        Raises:
            CannotBegin: The condition of the stage cannot be evaluated.
        """
        self._states = states
        for other, key in self._list_used_values(name):
            state = states[other]
            has_value = state is StageState.COMPLETED or key == STATE
            if self.spec.stage(other).matrix is not None and self._completed_points(other):
                has_value = True
            if not has_value:
                verb = "was skipped" if state is StageState.SKIPPED else "failed"
                return f"it uses a value of stage {other}, which {verb}"
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
        return "" if holds else f"its condition is false: {text}"

    def _list_used_values(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield, for each value that a stage uses, the earlier stage and the key of its result."""
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

    def say(self, message: str) -> None:
        """Write a progress message to the flow run's log, and call `on_message` with it."""
        get_run_logger().info(message)
        on_message.get()(message)

    def _update_tags(self, client: SyncPrefectClient) -> None:
        """Add the tags of the pipeline's spec, and the pipeline's name as a tag, to the flow run.

        If a user started an earlier process of the pipeline on the command line, the flow run has a
        tag with that process. If a worker has started the present process, this outdated tag is
        removed.
        """
        old_tags = set(client.read_flow_run(self.flow_run_id).tags)
        stale_tags: set[str] = set()
        if flow_process.find_worker_flow_run() is not None:
            stale_tags = flow_runs.find_process_tags(old_tags)
        new_tags = (old_tags - stale_tags) | {*self.spec.tags, f"pipeline:{self.spec.name}"}
        if new_tags != old_tags:
            client.update_flow_run(self.flow_run_id, tags=sorted(new_tags))

    def _refresh(self, run: StageRun) -> StageRun:
        """Return a run with its current state on the Prefect server."""
        flow_run = self._ask(lambda client: client.read_flow_run(UUID(run.flow_run_id)))
        return describe_stage_run(run.stage, run.number, flow_run)

    def _report(self, decision: PipelineDecision) -> None:
        """Report the changes of the runs and stages since the last call.

        The state message of the pipeline's flow run is set to the states of the active runs.
        """
        for run in self._runs:
            before = self._reported.get(run.flow_run_id)
            self._reported[run.flow_run_id] = run
            if before is None and run.ending is None:
                self.say(f"stage {run.stage}: attached to run {run.name}, which is {run.state}")
            elif before is not None and before.ending is None and run.ending is not None:
                self.say(f"stage {run.stage}: {run.state}: {run.message}")
        for name, reason in decision.skipped.items():
            if name not in self._shown_skips:
                self._shown_skips.add(name)
                self.say(f"stage {name}: skipped, because {reason}")
                self._try(
                    partial(
                        show_skipped_stage,
                        pipeline=self.flow_run_id,
                        stage=name,
                        reason=reason,
                    )
                )
        self._show_points()
        if not decision.active:
            return
        message = "; ".join(map(self._describe_active_run, decision.active[:_MAX_SHOWN_RUNS]))
        if len(decision.active) > _MAX_SHOWN_RUNS:
            message += f"; and {len(decision.active) - _MAX_SHOWN_RUNS} more runs"
        if decision.ended_by is not None:
            message += f"; stage {decision.ended_by.stage} failed, so no further stage begins"
        if message == self._last_message:
            return
        on_message.get()(message)
        self._last_message = message
        self._try(
            lambda _client: flow_runs.set_running_message(self.flow_run_id, message, self._ending)
        )

    def _describe_active_run(self, run: StageRun) -> str:
        """Return a text about an active run, such as `stage eval (2 of 3): Running`."""
        name = run.stage_name
        state_text = f"{run.state}: {run.message}" if run.message else run.state
        if name not in self.spec.stage_names:
            return f"stage {run.stage}: {state_text}"
        position = self.spec.stage_names.index(name) + 1
        return f"stage {run.stage} ({position} of {len(self.spec.stages)}): {state_text}"

    def _show_points(self) -> None:
        """Update the table of each matrix on the pipeline's page, if its rows have changed."""
        for stage in self.spec.stages:
            if stage.matrix is None:
                continue
            runs = {run.stage: run for run in sorted(self._runs, key=lambda run: run.number)}
            figures = self._read_figures(stage.name) if stage.best is not None else {}
            best = choose_best(figures, stage.best.mode) if stage.best is not None else None
            rows = [
                (unit, point, runs[unit].state if unit in runs else "waits", figures.get(unit))
                for unit, point in zip(stage.units, stage.points, strict=True)
            ]
            table = format_points(rows, best)
            if (
                not any(unit in runs for unit in stage.units)
                or self._tables.get(stage.name) == table
            ):
                continue
            self._tables[stage.name] = table
            ended = sum(run.ending is not None for run in runs.values() if run.stage in stage.units)
            headline = f"{stage.name}: {ended} of {len(rows)} points ended"
            if best is not None and stage.best is not None:
                headline += f", best {stage.best.by} {figures[best]:.6g} at point "
                headline += best.partition(".")[2]
            shown = Shown(headline=headline, data=json.dumps(table), type="table")
            key = f"points-{stage.name}".replace("_", "-")
            artifacts = self._artifacts.setdefault(key, Artifacts(self.flow_run_id, [key]))
            self._try(partial(artifacts.show, key=key, shown=shown))

    def _completed_points(self, name: str) -> dict[str, StageRun]:
        """Return the completed runs of a stage's matrix points, by their names `STAGE.N`.

        Args:
            name: Name of the stage.
        """
        runs = {unit: completed_run(unit, self._runs) for unit in self.spec.stage(name).units}
        return {unit: run for unit, run in runs.items() if run is not None}

    def _read_figures(self, name: str) -> dict[str, float | None]:
        """Return the number by which `best` compares the completed points of a stage's matrix.

        Args:
            name: Name of the stage.

        Returns:
            The number of each completed point, by the point's name `STAGE.N`. None if unknown.
        """
        stage = self.spec.stage(name)
        assert stage.best is not None
        figures: dict[str, float | None] = {}
        for unit, run in self._completed_points(name).items():
            if run.flow_run_id not in self._figures:
                self._figures[run.flow_run_id] = self._read_figure(run, stage.best.by)
            figures[unit] = self._figures[run.flow_run_id]
        return figures

    def _read_figure(self, run: StageRun, key: str) -> float | None:
        """Return the number of a completed run that the key `best` of a stage compares.

        Args:
            run: The completed run.
            key: Dotted key in the result of a step, or the name of a metric of a training.

        Returns:
            The number in the step's result, or the last value of the training's metric. None if
            there is no such number.
        """
        if self._is_step(run.stage):
            return get_number(self._results[run.flow_run_id], key)
        try:
            return read_last_metric(RunPlace.of(run.name), key)
        except (OSError, ValueError) as error:
            _log.warning("The metrics of the run %s cannot be read: %s", run.name, error)
            return None

    def _read_progress(self, client: SyncPrefectClient) -> tuple[list[StageRun], datetime]:
        """Return all stage runs so far, and the time at which a user last started the pipeline."""
        states = client.read_flow_run_states(self.flow_run_id)
        times = [(state.timestamp, state.is_final()) for state in states]
        runs = list_stage_runs(client, self.flow_run_id)
        if any(stage.cache is not None for stage in self.spec.stages):
            runs += list_cached_runs(client, self.flow_run_id)
        known_units = {run.stage for run in runs}
        runs += [run for unit, run in self._reused.items() if unit not in known_units]
        return runs, find_last_request(times)

    def _placeholder_value(self, stage: str, key: str) -> object:
        """Return the value of a spec placeholder that refers to an earlier stage.

        A large value is written to a file of the pipeline's directory. The result is then the path
        of the file.

        Raises:
            CannotBegin, InvalidResult: The earlier stage has no such value.
        """
        try:
            return keep_large_value(
                self.flow_run_id, f"{stage}.{key}", self._stage_value(stage, key)
            )
        except OSError as error:
            raise CannotBegin(
                f"the value {stage}.{key} is too large for a run spec, and the file for it cannot "
                f"be written: {error}"
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
            return self._states[stage].value
        if key == RESULTS:
            points = self.spec.stage(stage).points
            units = self.spec.stage(stage).units
            return [
                {"point": points[units.index(unit)], "result": self._unit_value(run, RESULT)}
                for unit, run in self._completed_points(stage).items()
            ]
        first, _, rest = key.partition(".")
        if first != BEST or self.spec.stage(stage).matrix is None:
            run = completed_run(stage, self._runs)
            assert run is not None, f"stage {stage} has not completed"
            return self._unit_value(run, key)

        choice = self.spec.stage(stage).best
        assert choice is not None, f"stage {stage} has no key best"
        unit = choose_best(self._read_figures(stage), choice.mode)
        if unit is None:
            raise CannotBegin(f"no completed point of stage {stage} has the figure {choice.by!r}")
        if rest.startswith(f"{POINT}."):
            point = self.spec.stage(stage).points[self.spec.stage(stage).units.index(unit)]
            return select_value(point, rest.removeprefix(f"{POINT}."))
        return self._unit_value(self._completed_points(stage)[unit], rest)

    def _unit_value(self, run: StageRun, key: str) -> object:
        """Return a value of a completed run, as JSON data.

        Args:
            run: The completed run.
            key: Part of the placeholder, such as `checkpoint` or `result.score`.

        Raises:
            CannotBegin: The key stands for a checkpoint, and no checkpoint was found on this host,
                or the folder of the checkpoints cannot be read.
            InvalidResult: The result has no such key.
        """
        stage = run.stage
        if key == RESULT or key.startswith(f"{RESULT}."):
            result = self._results[run.flow_run_id]
            return select_value(result, key.removeprefix(RESULT).removeprefix("."))
        if key == RUN_ID:
            return run.name
        directory = RunPlace.of(run.name).directory
        if key == RUN_DIR:
            return str(directory)
        try:
            checkpoint = self._ask(lambda client: self._find_checkpoint(client, run))
        except OSError as error:
            raise CannotBegin(
                f"Stage {stage} has completed, but its checkpoints cannot be read: {error}"
            ) from error
        if checkpoint is not None:
            return str(checkpoint)
        raise CannotBegin(
            f"Stage {stage} has completed, but no checkpoint of it was found for its run directory "
            f"{directory}. Make sure that this host can read that directory, and that "
            "`checkpoints` or `checkpoint` in the spec names the place of the checkpoints."
        )

    def _find_checkpoint(self, client: SyncPrefectClient, run: StageRun) -> CheckpointPath | None:
        """Return the path of a completed run's checkpoint, or None if the run has no checkpoint."""
        # The pipeline's spec may have changed after the start of the run. So read the spec with
        # which the run was started.
        spec = RunSpec.model_validate(
            client.read_flow_run(UUID(run.flow_run_id)).parameters.get("spec")
        )
        return find_stage_checkpoint(
            self.spec.unit_stage(run.stage).checkpoint, spec, RunPlace.of(run.name)
        )

    def _ask(self, request: Callable[[SyncPrefectClient], T]) -> T:
        """Send a request to the Prefect server, and repeat it while the server does not answer.

        Args:
            request: Function that sends the request. Its argument is a client of the server.

        Returns:
            The result of the function.

        Raises:
            ServerAway: The server did not answer, and the pipeline must end.
        """
        ending_since_s: float | None = None
        while True:
            try:
                with connect_to_server(self._api_url) as client:
                    return request(client)
            except ServerAway as error:
                if self._ending.is_set():
                    ending_since_s = ending_since_s or time.monotonic()
                    waited_s = time.monotonic() - ending_since_s
                    if self._is_hurried or waited_s > _SERVER_TIMEOUT_S:
                        raise
                _log.warning("Repeating the request to the Prefect server: %s", error)
            self._wait(_POLL_INTERVAL_S)

    def _try(self, request: Callable[[SyncPrefectClient], object]) -> None:
        """Send a request to the Prefect server once. A failure is only logged."""
        try:
            with connect_to_server(self._api_url) as client:
                request(client)
        except Exception as error:
            _log.warning("The Prefect server was not updated: %r", error)

    def _wait(self, delay_s: float) -> None:
        """Wait `delay_s` seconds, or less if the pipeline must end.

        If the pipeline must already end at the call, the wait lasts a quarter of `delay_s`.
        """
        if self._ending.is_set():
            time.sleep(delay_s / 4)
        else:
            self._ending.wait(delay_s)

    def _hand_over(self, progress: str) -> NoReturn:
        """Set a waiting state for the flow run. Its next flow process then continues the pipeline.

        If the server does not answer, a later `muster reconcile` finds that the flow run has no
        process, and schedules the flow run's next process.

        Args:
            progress: Progress of the pipeline, for the message of the state.

        Raises:
            Pause: Always. The exception makes Prefect leave the flow run's state unchanged when
                this process ends.
        """
        state = flow_runs.make_handover_state(f"{self.hand_over_reason}; {progress}", _DUE_AFTER_S)
        self.say(str(state.message))
        self.is_handing_over = True
        try:
            self._ask(
                lambda client: flow_process.hand_over_flow_run(client, self.flow_run_id, state)
            )
        except ServerAway as error:
            _log.warning("The state of the pipeline's flow run was not changed: %s", error)
        raise Pause(state=state)


def _describe_handover(decision: PipelineDecision) -> str:
    """Return a clause that names the stages with which the pipeline's next process continues."""
    if decision.active:
        names = join_commas([run.stage for run in decision.active])
        return f"stage {names} continues, and the pipeline's next process attaches to it"
    return f"stage {join_commas([step.stage for step in decision.begins])} is next"


def pipeline_id_of_flow_run() -> str:
    """Return the name of the pipeline's flow run that runs in this process.

    All processes of the same flow run get the same name.
    """
    return flow_process.make_current_run_id(
        flow_process.get_current_spec(PipelineSpec).name, "pipeline"
    )


@contextmanager
def open_pipeline(
    spec: PipelineSpec, find_unfit_stages: FindUnfitStages
) -> Iterator[PipelineSession]:
    """Open the pipeline of the active flow run, as a context manager.

    While the context is open, a signal or a cancellation ends the pipeline and all active runs.
    There is one exception: if a worker sends SIGTERM without a cancellation, the
    pipeline is handed over to a process of the next worker.

    Args:
        spec: Spec of the pipeline.
        find_unfit_stages: See `PipelineSession.prepare`.
    """
    flow_run_id = flow_process.get_current_flow_run().id
    session = PipelineSession(spec, flow_run_id=flow_run_id, api_url=PREFECT_API_URL.value() or "")
    with end_on_request(session, flow_run_id, may_be_left=True):
        session.prepare(find_unfit_stages)
        yield session
