"""Recoveries of a fleet as task runs of its flow run, so that the server keeps their history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed, Running


class RecoveryRuns:
    """A task run of the flow run for each recovery of a group, running as long as that does.

    Asks the server: use it from a thread that may wait.
    """

    def __init__(self, flow_run_id: UUID) -> None:
        self._flow_run_id = flow_run_id
        #: `open[recovery id] -> (task run, what it recovers)`.
        self._open: dict[str, tuple[UUID, str]] = {}

    def begun(self, fields: Mapping[str, Any]) -> None:
        """Make the task run `recover-rollout-<group>`."""
        name = f"recover-rollout-{fields['group']}"
        what = f"ranks {_listed(fields['ranks'])}: {fields['cause']}"
        task = Task(_nothing, name=name)
        with get_client(sync_client=True) as client:
            made = client.create_task_run(
                task, self._flow_run_id, dynamic_key=f"{name}-{fields['id']}", name=name
            )
            self._open[str(fields["id"])] = made.id, what
            number = fields.get("try")
            tried = f" (try {number})" if number not in (None, 1) else ""
            client.set_task_run_state(made.id, Running(message=f"{what}{tried}"), force=True)

    def ended(self, fields: Mapping[str, Any]) -> None:
        """Give the task run the state that the recovery came to."""
        if (known := self._open.pop(str(fields["id"]), None)) is None:
            return
        task_run_id, what = known
        outcome = fields["outcome"]
        message = f"{outcome} after {fields['took_s']:.1f} s: {what}"
        if fields.get("message"):
            message += f"; {fields['message']}"
        with get_client(sync_client=True) as client:
            _close(client, task_run_id, _state_after(outcome, message))

    def abandon(self) -> None:
        """Close what the end of the run has cut short."""
        if not self._open:
            return
        with get_client(sync_client=True) as client:
            while self._open:
                _, (task_run_id, what) = self._open.popitem()
                message = f"abandoned with the end of the run: {what}"
                _close(client, task_run_id, Cancelled(message=message))


def _state_after(outcome: str, message: str) -> State[Any]:
    match outcome:
        case "recovered":
            return Completed(message=message)
        case "abandoned":
            return Cancelled(message=message)
        case _:
            return Failed(message=message)


def _close(client: SyncPrefectClient, task_run_id: UUID, state: State[Any]) -> None:
    client.set_task_run_state(task_run_id, state, force=True)


def _nothing() -> None:
    """Stands for what the fleet's process does."""


def _listed(ranks: object) -> str:
    return ", ".join(map(str, ranks)) if isinstance(ranks, list | tuple) else str(ranks)
