"""Report the progress of a pipeline: log messages, skipped stages, and the state message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from uuid import UUID

from prefect import get_run_logger

from tasks.pipeline.decision import PipelineDecision, StageRun
from tasks.pipeline.server_requests import ServerRequests
from tasks.pipeline.stage_runs import format_link, show_skipped_stage
from tasks.server import flow_runs

#: Function that is called with each progress message of a pipeline. `muster pipeline` sets a
#: function that prints the messages. By default, the messages are only logged.
on_message: ContextVar[Callable[[str], None]] = ContextVar(
    "on_message", default=lambda message: None
)

#: Largest number of active runs that the state message of the pipeline's flow run describes.
_MAX_SHOWN_RUNS = 5


class ProgressReport:
    """Tells the user about changes of a pipeline's runs, by log messages and the Prefect UI."""

    def __init__(
        self, flow_run_id: UUID, requests: ServerRequests, stage_names: Sequence[str]
    ) -> None:
        """
        Args:
            flow_run_id: Id of the pipeline's flow run.
            requests: Connection to the Prefect server.
            stage_names: Names of the stages, in the order of the pipeline file.
        """
        self._flow_run_id = flow_run_id
        self._requests = requests
        self._stage_names = stage_names
        #: Mapping from the id of a flow run to the last reported state of the run.
        self._reported: dict[str, StageRun] = {}
        #: Names of the skipped stages that the pipeline's page in the Prefect UI shows.
        self._shown_skips: set[str] = set()
        #: The last progress message about the active runs, or an empty string.
        self._last_message = ""

    def say(self, message: str) -> None:
        """Write a progress message to the flow run's log, and call `on_message` with it."""
        get_run_logger().info(message)
        on_message.get()(message)

    def report_new_run(self, run: StageRun) -> None:
        """Report a run that this process has created."""
        self._reported[run.flow_run_id] = run
        try_text = f", try {run.number}" if run.number > 1 else ""
        self.say(f"stage {run.stage}{try_text}: queued ({format_link(run)})")

    def report(self, decision: PipelineDecision, runs: Sequence[StageRun]) -> None:
        """Report the changes since the last call: new runs, ended runs and skipped stages.

        The state message of the pipeline's flow run is set to a text with the states of the active
        runs.

        Args:
            decision: The present decision of the pipeline.
            runs: All runs of the stages, in any order.
        """
        for run in runs:
            before = self._reported.get(run.flow_run_id)
            self._reported[run.flow_run_id] = run
            if before is None and run.ending is None:
                self.say(
                    f"stage {run.stage}: the pipeline continues with the run {run.name}, which is "
                    f"{run.state}"
                )
            elif before is not None and before.ending is None and run.ending is not None:
                self.say(f"stage {run.stage}: {run.state}: {run.message}")
        for name, reason in decision.skipped.items():
            if name not in self._shown_skips:
                self._shown_skips.add(name)
                self.say(f"stage {name}: skipped, because {reason}")
                self._requests.try_once(
                    partial(
                        show_skipped_stage,
                        pipeline=self._flow_run_id,
                        stage=name,
                        reason=reason,
                    )
                )
        if decision.active or decision.evaluated:
            self._report_active_runs(decision)

    def _report_active_runs(self, decision: PipelineDecision) -> None:
        """Set the state message of the pipeline's flow run, if the message has changed."""
        runs = (*decision.active, *decision.evaluated)
        message = "; ".join(map(self._describe_active_run, runs[:_MAX_SHOWN_RUNS]))
        if len(runs) > _MAX_SHOWN_RUNS:
            message += f"; and {len(runs) - _MAX_SHOWN_RUNS} more runs"
        if decision.ended_by is not None:
            message += f"; stage {decision.ended_by.stage} failed, so no further stage begins"
        if message == self._last_message:
            return
        on_message.get()(message)
        self._last_message = message
        self._requests.try_once(
            lambda _client: flow_runs.set_running_message(
                self._flow_run_id, message, self._requests.ending
            )
        )

    def _describe_active_run(self, run: StageRun) -> str:
        """Return a text about an active run, such as `stage eval (2 of 3): Running`."""
        name = run.stage_name
        state_text = f"{run.state}: {run.message}" if run.message else run.state
        if run.awaits_evaluations:
            state_text = f"{run.state}, but the evaluations of its checkpoints have not ended"
        if name not in self._stage_names:
            return f"stage {run.stage}: {state_text}"
        position = self._stage_names.index(name) + 1
        return f"stage {run.stage} ({position} of {len(self._stage_names)}): {state_text}"
