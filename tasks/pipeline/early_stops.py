"""Stop the runs of matrix points early, by the rule in the key `stop_early` of their stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from tasks.pipeline.decision import StageRun, list_last_runs
from tasks.pipeline.early_stopping import find_reason_to_stop
from tasks.pipeline.point_histories import PointHistories
from tasks.pipeline.server_requests import ServerRequests
from tasks.pipeline.stage_runs import STOP_REASON_LABEL, cancel_stage_run
from tasks.spec.pipeline import PipelineSpec


class EarlyStops:
    """Compares the runs of a parameter sweep by a metric, and cancels runs with a bad metric early.

    Only stages with the key `stop_early` are affected. The key names the metric and the rule.
    """

    def __init__(self, requests: ServerRequests, histories: PointHistories) -> None:
        """
        Args:
            requests: Connection to the Prefect server.
            histories: Object that reads the metric values of runs.
        """
        self._requests = requests
        self._histories = histories

    def stop_points(
        self, spec: PipelineSpec, runs: Sequence[StageRun]
    ) -> Iterator[tuple[StageRun, str]]:
        """Cancel active runs according to the key `stop_early` of their stage.

        The method yields each cancelled run with the reason. If the Prefect server rejects a
        cancellation, the next call repeats the request.

        Args:
            spec: The pipeline.
            runs: All runs of the stages, in any order.
        """
        for stage in spec.stages:
            rule = stage.stop_early
            if rule is None:
                continue
            points = list_last_runs(stage.units, runs)
            histories = {unit: self._histories.read(run, rule.by) for unit, run in points.items()}
            for unit, run in points.items():
                if run.ending is not None or run.is_cancelling:
                    continue
                others = [history for other, history in histories.items() if other != unit]
                reason = run.stop_reason or find_reason_to_stop(rule, histories[unit], others)
                if reason and self._requests.try_once(partial(_stop, run=run, reason=reason)):
                    yield run, reason


def _stop(client: SyncPrefectClient, run: StageRun, reason: str) -> None:
    """Record the reason for stopping a run early, and cancel the run.

    The reason is recorded first. If the process of the pipeline is killed between the two requests,
    the pipeline's next process cancels the run for the same reason.
    """
    client.update_flow_run_labels(UUID(run.flow_run_id), {STOP_REASON_LABEL: reason})
    cancel_stage_run(client, run, f"stopped early: {reason}")
