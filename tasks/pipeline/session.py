"""Run a pipeline in its flow process: create the run of each stage, and wait for the run's end.

The Prefect server stores the whole progress of a pipeline, and each step reads the progress again.
The flow process of a pipeline can therefore be killed at any time. The next flow process continues
at the same step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

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
    decide,
    find_last_request,
)
from tasks.pipeline.early_stopping import require_optuna
from tasks.pipeline.early_stops import EarlyStops
from tasks.pipeline.function_check import check_functions
from tasks.pipeline.matrix_page import MatrixPage
from tasks.pipeline.point_histories import PointHistories
from tasks.pipeline.progress_report import ProgressReport
from tasks.pipeline.run_cancellation import cancel_and_wait
from tasks.pipeline.run_ends import listen_for_run_ends
from tasks.pipeline.run_results import RunResults
from tasks.pipeline.server_requests import POLL_INTERVAL_S, ServerRequests
from tasks.pipeline.stage_runs import (
    create_stage_run,
    describe_stage_run,
    find_cached_runs,
    format_link,
    list_cached_runs,
    list_stage_runs,
    make_cache_tag,
    use_cached_run,
)
from tasks.pipeline.stage_specs import CannotBegin, read_specs_of_deployments
from tasks.pipeline.stage_values import StageValues
from tasks.record.code_store import NoCode
from tasks.record.result_file import InvalidResult
from tasks.record.states import RunState
from tasks.server import flow_process, flow_runs
from tasks.server.flow_runs import ServerAway
from tasks.server.interruption import end_on_request
from tasks.server.server import NoServer, read_secrets
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import join_commas
from tasks.spec.pipeline import PipelineSpec, add_deployment_specs, parse_pipeline
from tasks.spec.run import RunSpec
from tasks.spec.secrets import drop_common_values, find_env_secrets

_log = logging.getLogger(__name__)

#: Seconds from a handover of the pipeline until the next flow process may start. The old flow
#: process exits within this time.
_DUE_AFTER_S = 5.0
#: Wait after a check of the runs if no run ends, as a multiple of the duration of the check. For
#: example, a check of 1 s is followed by a wait of 10 s. The wait is never shorter than
#: `POLL_INTERVAL_S`, and never longer than `_LONGEST_POLL_S`.
_WAIT_PER_DECISION = 10.0
#: Upper limit in seconds for the wait between two checks of the runs.
_LONGEST_POLL_S = 20.0

#: Function that returns a fault for each stage that can never fit on its cluster.
FindUnfitStages = Callable[[PipelineSpec], Sequence[Fault]]


class PipelineSession:
    """One pipeline that runs in this process.

    `interrupt`, `hurry` and `hand_over` may be called by any thread.
    """

    def __init__(self, spec: PipelineSpec, *, flow_run_id: UUID, api_url: str) -> None:
        self.spec = spec
        self.flow_run_id = flow_run_id
        self._requests = ServerRequests(api_url)
        #: Reason for ending the pipeline as cancelled, or an empty string.
        self.cancel_reason = ""
        #: Reason why this process stops and another flow process will continue the pipeline. Empty
        #: if this process keeps the pipeline.
        self.hand_over_reason = ""
        #: Reason why a stage cannot begin. If the reason is not empty, the pipeline fails.
        self.failure = ""
        #: The failed or cancelled stage run that ended the pipeline, or None.
        self.final_run: StageRun | None = None
        #: All runs of the pipeline's stages, as the Prefect server last returned them. The order is
        #: arbitrary.
        self._runs: list[StageRun] = []
        #: Mapping from the name of a stage to its state at the last decision.
        self._states: Mapping[str, StageState] = {}
        #: Mapping from the name of a skipped stage to the reason.
        self._skipped: Mapping[str, str] = {}
        #: Results of the completed runs. The values of secret environment variables are masked.
        self._results = RunResults(self._requests, find_env_secrets(os.environ))
        self._report = ProgressReport(flow_run_id, self._requests, spec.stage_names)
        self._histories = PointHistories()
        self._early_stops = EarlyStops(self._requests, self._histories)
        self._matrix_page = MatrixPage(flow_run_id, self._requests, self._histories)
        #: Mapping from the name of a stage, or `STAGE.N` for one combination of its parameters, to
        #: an earlier run whose result is used instead of a new run.
        self._reused: dict[str, StageRun] = {}
        #: Duration of the last call of `advance`, in seconds.
        self._advance_s = 0.0
        #: Seconds that the last call of `advance` took to read the runs, and to decide which new
        #: runs begin.
        self._decide_s = 0.0
        #: True after this process has begun to hand the pipeline over to the next flow process.
        self.is_handing_over = False

    def interrupt(self, why: str) -> None:
        """Request that the pipeline ends as cancelled. This method returns at once.

        All active runs are cancelled with their grace periods. A second call changes nothing: the
        same cancellation may arrive as a signal and from the Prefect server.
        """
        self.cancel_reason = self.cancel_reason or why
        self._requests.end_soon()

    def hurry(self) -> None:
        """Request that cancelled runs skip their grace periods. This method returns at once."""
        self._requests.hurry()

    def hand_over(self, why: str) -> None:
        """Request that the next flow process continues the pipeline, and return at once."""
        self.hand_over_reason = self.hand_over_reason or why
        self._requests.end_soon()

    def close(self) -> None:
        """Close the connection to the Prefect server."""
        self._requests.close()

    def prepare(self, find_unfit_stages: FindUnfitStages = lambda _spec: ()) -> None:
        """Check all stages before this process creates a run, and describe faults in `failure`.

        The specs, deployments and secrets of the stages are always checked. The functions and
        resources of the stages are checked only if no stage has begun.

        Args:
            find_unfit_stages: Function that returns a fault for each stage that can never fit on
                its cluster.
        """
        self._requests.try_once(self._update_tags)
        try:
            spec = parse_pipeline(self.spec)
            specs = self._requests.ask(lambda client: read_specs_of_deployments(client, spec))
            self.spec = add_deployment_specs(spec, specs)
            for stage in self.spec.stages:
                for unit in stage.units[:1]:
                    run_spec = RunSpec.model_validate(self._plain_run_spec(unit))
                    blocks = self._requests.ask(partial(read_secrets, spec=run_spec))
                    self._results.add_secrets(
                        run_spec.secrets | drop_common_values(blocks.values())
                    )
            require_optuna(self.spec)
            runs, _ = self._requests.ask(self._read_progress)
            unfit: Sequence[Fault] = ()
            if not runs:
                self._requests.ask(
                    partial(check_functions, pipeline=self.spec, directory=Path.cwd())
                )
                unfit = find_unfit_stages(self.spec)
        except (InvalidSpec, CannotBegin, NoCode) as error:
            self.failure = f"USER_ERROR: {error}"
            return
        except (ServerAway, NoServer) as error:
            _log.warning(
                "Muster could not read the nodes of the work pools, so it did not check whether "
                "the stages fit on the nodes: %s",
                error,
            )
            return
        if unfit:
            self.failure = f"INFEASIBLE: {'; '.join(map(str, unfit))}"

    def advance(self) -> bool:
        """Create the runs that may begin now, and report the changes of all runs.

        Returns:
            True if the pipeline must wait for a run. False if the pipeline ends.

        Raises:
            Pause: This process must exit, because another flow process will continue the pipeline.
        """
        if self.cancel_reason:
            return False
        began_s = time.monotonic()
        decision = self._decide()
        self._decide_s = time.monotonic() - began_s
        self._report.report(decision, self._runs)
        self._matrix_page.show(self._values(decision.states))
        if decision.is_over or self.cancel_reason:
            return False
        # Do not hand the pipeline over while a run is being cancelled, for example by `muster
        # down`. The cancellation of that run will end the pipeline. Runs that the pipeline itself
        # stops early do not matter here.
        is_cancelling = any(run.is_cancelling and not run.stop_reason for run in decision.active)
        if self.hand_over_reason and not is_cancelling:
            self._hand_over(_describe_handover(decision))
        if not self._requests.ending.is_set():
            for run, reason in self._early_stops.stop_points(self.spec, self._runs):
                self._report.say(f"stage {run.stage}: stopped early, because {reason}")
        for step in decision.begins:
            if self.failure or self._requests.ending.is_set():
                break
            self._begin(step)
        self._advance_s = time.monotonic() - began_s
        return True

    def wait(self) -> None:
        """Wait until the next call of `advance` is due, or until the pipeline must end.

        A call of `advance` is due after two seconds, or shortly after a run has ended. The wait
        after the end of a run is twice the duration of the last call of `advance`, so that the next
        call can handle all runs that end at nearly the same time.

        A pipeline with hundreds of runs waits longer than two seconds if no run ends, because the
        server needs much CPU time to list the runs.
        """
        poll_s = min(max(POLL_INTERVAL_S, _WAIT_PER_DECISION * self._decide_s), _LONGEST_POLL_S)
        if self._requests.wait(poll_s):
            self._requests.ending.wait(min(POLL_INTERVAL_S, 2 * self._advance_s))

    def owns_run(self, flow_run_id: str) -> bool:
        """Return True if a flow run belongs to a stage. May be called in any thread."""
        return any(run.flow_run_id == flow_run_id for run in self._runs)

    def wake(self) -> None:
        """End the pause between two checks of the pipeline's runs. May be called in any thread."""
        self._requests.wake()

    def cancel_runs(self) -> None:
        """Cancel all unfinished runs of a cancelled pipeline, and wait until the runs have ended.

        If the pipeline is not cancelled, nothing happens. The wait ends at the latest three minutes
        after the grace periods of all runs. After a call of `hurry`, the runs get no grace periods,
        and the wait takes at most 30 s. A phrase about the end of each run is added to
        `cancel_reason`.
        """
        if not self.cancel_reason:
            return
        try:
            # Read the list of runs again, because this process may have created a run just before
            # the pipeline was cancelled.
            self._runs, _ = self._requests.ask(self._read_progress)
        except ServerAway as error:
            _log.warning(
                "Muster cancels the runs of the pipeline, but could not read the newest list of "
                "these runs from the Prefect server. A run that was created a moment ago may "
                "continue: %s",
                error,
            )
        runs = [run for run in self._runs if run.ending is None]
        if runs:
            names = join_commas([run.stage for run in runs])
            self._report.say(f"cancelling stage {names}: {self.cancel_reason}")
            self.cancel_reason += cancel_and_wait(
                runs, self._requests, lambda: self._longest_teardown_s(runs)
            )

    def _longest_teardown_s(self, runs: Iterable[StageRun]) -> float:
        """Return the longest time in seconds that the grace periods of a run take."""
        specs = [RunSpec.model_validate(self._plain_run_spec(run.stage)) for run in runs]
        return max(spec.teardown_s for spec in specs)

    def _plain_run_spec(self, unit: str) -> object:
        """Return the run spec of a stage, without the results of other stages.

        A fixed text replaces each placeholder for a result, `${stage.NAME.KEY}`, because the result
        may still be unknown.
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
                message=f"stage {run.stage}: this run was cancelled: {format_link(run)}"
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
        runs, requested_at = self._requests.ask(self._read_progress)
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
                decision = decide(
                    plans,
                    self._runs,
                    requested_at,
                    lambda name, states: self._values(states).find_skip_reason(name),
                )
            except (CannotBegin, InvalidSpec) as error:
                self.failure = str(error)
        if decision is None:
            decision = decide(plans, self._runs, requested_at, lambda *_: self.failure)
            decision = replace(decision, begins=(), evaluated=(), skipped={})
        self._states = decision.states
        self._skipped = decision.skipped
        self.final_run = decision.ended_by
        return decision

    def _begin(self, step: Begin) -> None:
        """Create a new run of a stage. If the run cannot be created, store the reason in
        `failure`.
        """
        stage = self.spec.unit_stage(step.stage)
        try:
            spec = self.spec.fill_run_spec(step.stage, self._values(self._states).placeholder_value)
            tags = [*self.spec.tags, f"pipeline:{self.spec.name}"]
            if stage.cache is not None:
                tag = make_cache_tag(spec, with_code=stage.cache == "inputs_and_code")
                tags.append(tag)
                if self._use_cache(step, tag):
                    return
            run = self._requests.ask(
                lambda client: create_stage_run(
                    client, self.flow_run_id, stage, step.stage, step.number, spec=spec, tags=tags
                )
            )
        except (InvalidSpec, CannotBegin, InvalidResult) as error:
            self.failure = f"stage {step.stage}: USER_ERROR: {error}"
            return
        self._runs.append(run)
        self._report.report_new_run(run)

    def _use_cache(self, step: Begin, tag: str) -> bool:
        """Use the result of an earlier run instead of creating a planned run, if possible.

        Args:
            step: The planned run.
            tag: Tag of all runs that have the same inputs as the planned run.

        Returns:
            True if an earlier run with a usable result was found.
        """
        for flow_run in self._requests.ask(lambda client: [*find_cached_runs(client, tag)]):
            cached = describe_stage_run(step.stage, step.number, flow_run)
            if self._check_result(cached).ending is not RunState.COMPLETED:
                continue
            self._requests.ask(
                partial(
                    use_cached_run,
                    pipeline=self.flow_run_id,
                    unit=step.stage,
                    number=step.number,
                    flow_run=flow_run,
                )
            )
            self._reused[step.stage] = replace(cached, state="Cached")
            self._report.say(
                f"stage {step.stage}: not run again, because the run {flow_run.name} had the same "
                "inputs. The pipeline uses the result of that run"
            )
            return True
        return False

    def _check_result(self, run: StageRun) -> StageRun:
        """Return a run with its result checked by `RunResults.check_result`.

        If the stage of the run is no longer in the pipeline, the run is returned unchanged.
        """
        if run.stage_name not in self.spec.stage_names:
            return run
        return self._results.check_result(self.spec.unit_stage(run.stage), run)

    def _values(self, states: Mapping[str, StageState]) -> StageValues:
        """Return the values that later stages can use in placeholders and conditions.

        Args:
            states: Mapping from the name of a stage to its state.
        """
        return StageValues(
            spec=self.spec,
            flow_run_id=self.flow_run_id,
            runs=tuple(self._runs),
            states=states,
            results=self._results,
        )

    def _update_tags(self, client: SyncPrefectClient) -> None:
        """Add tags to the flow run: the tags of the pipeline's spec, and the pipeline's name.

        If a worker has started this process, remove the tag that names an earlier process, which a
        user had started on the command line.
        """
        old_tags = set(client.read_flow_run(self.flow_run_id).tags)
        stale_tags: set[str] = set()
        if flow_process.find_worker_flow_run() is not None:
            stale_tags = flow_runs.find_process_tags(old_tags)
        new_tags = (old_tags - stale_tags) | {*self.spec.tags, f"pipeline:{self.spec.name}"}
        if new_tags != old_tags:
            client.update_flow_run(self.flow_run_id, tags=sorted(new_tags))

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

    def _hand_over(self, progress: str) -> NoReturn:
        """Set a waiting state for the flow run, whose next process then continues the pipeline.

        If the server does not answer, the state is not set. A later `muster reconcile` then finds
        the flow run without a process, and schedules its next process.

        Args:
            progress: Progress of the pipeline, for the message of the state.

        Raises:
            Pause: Always. Because of this exception, Prefect does not change the flow run's state
                at the end of this process.
        """
        state = flow_runs.make_handover_state(f"{self.hand_over_reason}; {progress}", _DUE_AFTER_S)
        self._report.say(str(state.message))
        self.is_handing_over = True
        try:
            self._requests.ask(
                lambda client: flow_process.hand_over_flow_run(client, self.flow_run_id, state)
            )
        except ServerAway as error:
            _log.warning("The state of the pipeline's flow run could not be changed: %s", error)
        raise Pause(state=state)


def _describe_handover(decision: PipelineDecision) -> str:
    """Return a text about the stages that the next flow process will continue or begin."""
    runs = (*decision.active, *decision.evaluated)
    if runs:
        names = join_commas([run.stage for run in runs])
        return (
            f"stage {names} continues. A worker will start a new process of the pipeline, which "
            "then waits for the end of this stage"
        )
    names = join_commas([step.stage for step in decision.begins])
    return f"a worker will start a new process of the pipeline, which then begins stage {names}"


def pipeline_id_of_flow_run() -> str:
    """Return the run id of the pipeline whose flow run this process belongs to.

    All processes of the flow run have the same run id.
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
    There is one exception: if a worker sends SIGTERM and the pipeline was not cancelled, the next
    worker continues the pipeline.

    Args:
        spec: Spec of the pipeline.
        find_unfit_stages: See `PipelineSession.prepare`.
    """
    flow_run_id = flow_process.get_current_flow_run().id
    session = PipelineSession(spec, flow_run_id=flow_run_id, api_url=PREFECT_API_URL.value() or "")
    with closing(session), end_on_request(session, flow_run_id, may_be_left=True):
        session.prepare(find_unfit_stages)
        with listen_for_run_ends(session.owns_run, session.wake):
            yield session
