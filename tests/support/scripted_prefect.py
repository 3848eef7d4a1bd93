"""A fake Prefect server in memory, for tests of one scheduler process (`Scheduler`).

The fake has the server's rules for changes of states, as far as cancellation depends on them.
Before each request, a test can call a function: it changes the server like another client, or it
stops the scheduler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect.client.schemas.actions import LogCreate, WorkPoolUpdate
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkPool, WorkQueue
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus, StateAcceptDetails

POOL = "gang"
_QUEUE = WorkQueue(id=uuid4(), name="default", priority=2, work_pool_id=uuid4())
#: Default scheduled start of the first flow run: one hour ago, so that the run is due. The next
#: scheduled starts, and the times of all states, are a little later.
_BEGAN = datetime.now(UTC) - timedelta(hours=1)


class ScriptedPrefect:
    """A fake of the Prefect client, with the methods that the scheduler calls."""

    api_url = "http://scripted/api"

    def __init__(self, template: dict[str, Any]) -> None:
        """
        Args:
            template: Base job template of the work pool.
        """
        self._pool = WorkPool(
            id=uuid4(),
            name=POOL,
            type="gang",
            base_job_template=template,
            default_queue_id=_QUEUE.id,
        )
        self._runs: dict[UUID, FlowRun] = {}
        #: States of each flow run, the oldest first.
        self._histories: dict[UUID, list[State[Any]]] = {}
        #: Total number of states of all flow runs up to now.
        self._state_count = 0
        #: Flow run id and text of each log message that the scheduler has written.
        self.logs: list[tuple[UUID | None, str]] = []
        #: One JSON object for each deployment, with the fields about the concurrency limit.
        self.deployments: list[dict[str, Any]] = []
        #: Ids of the concurrency leases of runs whose deployment no longer has a concurrency limit.
        #: The server refuses new states of these runs until the leases are released.
        self.leases_without_limit: set[UUID] = set()
        #: The events that the scheduler has sent.
        self.events: list[dict[str, Any]] = []
        #: Number of requests up to now.
        self.requests = 0
        #: Functions that the test has set: mapping from the number of a request to a function that
        #: is called before this request. The first request has the number 1.
        self.before: dict[int, Callable[[], None]] = {}
        #: Functions that the test has set: mapping from the name of a request to a function that is
        #: called before every request with this name.
        self.ahead: dict[str, Callable[[], None]] = {}
        #: Names of the requests up to now, for example `read_flow_run`.
        self.asked: list[str] = []

    def change(self, template: dict[str, Any]) -> None:
        """Set the base job template of the work pool, as an operator does."""
        self._pool = self._pool.model_copy(update={"base_job_template": template})

    def submit(self, spec: Any, due: datetime | None = None, **fields: Any) -> UUID:
        """Create a scheduled flow run, and return its id.

        Args:
            spec: Spec of the run.
            due: Scheduled start. None means one hour ago for the first run, and one second later
                for each further run.
            **fields: Further fields of the flow run.
        """
        run_id = uuid4()
        due = due or _BEGAN + timedelta(seconds=len(self._runs))
        self._runs[run_id] = FlowRun(
            id=run_id,
            flow_id=uuid4(),
            name="idealistic-harrier",
            created=due,
            expected_start_time=due,
            next_scheduled_start_time=due,
            parameters={"spec": spec},
            work_pool_name=POOL,
            work_queue_id=_QUEUE.id,
            **fields,
        )
        self._histories[run_id] = []
        self.set(run_id, State(type=StateType.SCHEDULED))
        return run_id

    def run(self, id: UUID) -> FlowRun:
        """Return a copy of the flow run with this id."""
        return self._runs[id].model_copy(deep=True)

    def history(self, id: UUID) -> list[str]:
        """Return the names of the states of a flow run, the oldest first."""
        return [state.name or "" for state in self._histories[id]]

    def patch(self, id: UUID, **fields: Any) -> None:
        """Change fields of a flow run."""
        self._runs[id] = self._runs[id].model_copy(update=fields)

    def set(self, id: UUID, state: State[Any], *, force: bool = False) -> SetStateStatus:
        """Propose a state for a flow run, and return whether Prefect's rules accept or reject it.

        Source of the rules: prefect/server/orchestration/core_policy.py.

        Args:
            id: Id of the flow run.
            state: The proposed state.
            force: True to skip most rules, as the server does for a forced change.
        """
        run = self._runs[id]
        old_state = run.state
        status = SetStateStatus.ACCEPT
        if old_state is not None and state.is_cancelling():
            if old_state.is_final():
                return SetStateStatus.ABORT
            if old_state.is_scheduled() and not run.infrastructure_pid:
                status = SetStateStatus.REJECT
                state = State(type=StateType.CANCELLED)
        elif old_state is not None and not force:
            if old_state.is_cancelling() and not state.is_cancelled():
                return SetStateStatus.REJECT
            if old_state.is_final() and state.is_scheduled():
                policy = run.empirical_policy.model_copy(update={"retry_type": "reschedule"})
                self.patch(id, empirical_policy=policy)

        self._state_count += 1
        at = _BEGAN + timedelta(milliseconds=self._state_count)
        stored = state.model_copy(update={"id": uuid4(), "timestamp": at})
        self._histories[id].append(stored)
        self.patch(id, state=stored)
        return status

    def cancel(self, id: UUID) -> None:
        """Cancel a flow run, as the Prefect UI does."""
        self.set(id, State(type=StateType.CANCELLING))

    def delete_queue(self, id: UUID) -> None:
        """Remove work pool and queue from a flow run, as the server does for a deleted queue."""
        self.patch(id, work_pool_name=None, work_queue_id=None, deployment_id=uuid4())

    def delete(self, id: UUID) -> None:
        """Delete the states of a flow run.

        For a deleted flow run, the server answers with an empty list of states, and no error.
        """
        self._histories[id].clear()

    def _begin_request(self, name: str) -> None:
        """Count a request, and call the functions that the test has set for this request."""
        self.requests += 1
        self.asked.append(name)
        self.before.get(self.requests, lambda: None)()
        self.ahead.get(name, lambda: None)()

    async def read_work_pools(self, **_filters: Any) -> list[WorkPool]:
        self._begin_request("read_work_pools")
        return [self._pool]

    async def read_workers_for_work_pool(self, work_pool_name: str) -> list[Any]:
        return []

    async def read_work_queues(self, **_filters: Any) -> list[WorkQueue]:
        self._begin_request("read_work_queues")
        return [_QUEUE]

    async def read_flow_run(self, id: UUID) -> FlowRun:
        self._begin_request("read_flow_run")
        return self.run(id)

    async def read_flow_run_states(self, id: UUID) -> list[State[Any]]:
        self._begin_request("read_flow_run_states")
        return [*self._histories[id]]

    async def set_flow_run_state(
        self, id: UUID, state: State[Any], force: bool = False
    ) -> OrchestrationResult[Any]:
        self._begin_request("set_flow_run_state")
        old_state = self._runs[id].state
        assert old_state is not None
        if old_state.state_details.deployment_concurrency_lease_id in self.leases_without_limit:
            request = httpx.Request("POST", f"{self.api_url}/flow_runs/{id}/set_state")
            response = httpx.Response(HTTPStatus.INTERNAL_SERVER_ERROR, request=request)
            raise httpx.HTTPStatusError("refused", request=request, response=response)
        status = self.set(id, state, force=force)
        return OrchestrationResult(
            state=self._runs[id].state, status=status, details=StateAcceptDetails()
        )

    async def release_concurrency_slots_with_lease(self, lease_id: UUID) -> None:
        self._begin_request("release_concurrency_slots_with_lease")
        self.leases_without_limit.discard(lease_id)

    async def create_logs(self, logs: list[LogCreate]) -> None:
        self._begin_request("create_logs")
        self.logs += [(log.flow_run_id, log.message) for log in logs]

    async def update_flow_run(self, id: UUID, *, name: str) -> None:
        self._begin_request("update_flow_run")
        self.patch(id, name=name)

    async def update_flow_run_labels(self, id: UUID, labels: dict[str, Any]) -> None:
        self._begin_request("update_flow_run_labels")
        self.patch(id, labels={**self._runs[id].labels, **labels})

    async def update_work_pool(self, name: str, update: WorkPoolUpdate) -> None:
        self._begin_request("update_work_pool")
        assert name == POOL and update.base_job_template is not None
        self.change(update.base_job_template)

    async def request(self, method: str, path: str, *, json: Any, path_params: Any = None) -> Any:
        if (method, path) == ("POST", "/flow_runs/filter"):
            return SimpleNamespace(json=lambda: self._filter_flow_runs(**json))
        if (method, path) == ("POST", "/deployments/filter"):
            ids = json["deployments"]["id"]["any_"]
            deployments = [row for row in self.deployments if row["id"] in ids]
            return SimpleNamespace(json=lambda: deployments)
        if (method, path) == ("POST", "/flow_runs/count"):
            return SimpleNamespace(json=lambda: len(self._select_flow_runs(**json)))
        if (method, path) == ("POST", "/events"):
            return self.events.extend(json)
        self._begin_request("request")
        return self.patch(path_params["id"], **json)

    def _filter_flow_runs(
        self, *, flow_runs: dict[str, Any], offset: int = 0, limit: int = 200, **_filters: Any
    ) -> list[dict[str, Any]]:
        """Return the flow runs that a filter of Prefect's API selects, as JSON objects.

        The filter may have state types, state names, ids and an earliest scheduled start.
        """
        self._begin_request("read_flow_runs")
        selected = self._select_flow_runs(flow_runs=flow_runs, **_filters)
        return selected[offset : offset + limit]

    def _select_flow_runs(
        self,
        *,
        flow_runs: dict[str, Any],
        work_pools: dict[str, Any] | None = None,
        **_filters: Any,
    ) -> list[dict[str, Any]]:
        """Return all flow runs that a filter of Prefect's API selects, as JSON objects."""
        types = flow_runs["state"].get("type", {}).get("any_", list(StateType))
        names = flow_runs["state"].get("name", {}).get("any_")
        ids = flow_runs.get("id", {}).get("any_")
        after = flow_runs.get("next_scheduled_start_time", {}).get("after_")
        since = datetime.fromisoformat(after) if after else _BEGAN
        selected = [
            self.run(run_id).model_dump(mode="json")
            for run_id, run in self._runs.items()
            if run.state is not None
            and run.state.type in types
            and (names is None or run.state.name in names)
            and (ids is None or str(run_id) in ids)
            and (due := run.next_scheduled_start_time) is not None
            and due >= since
            and (work_pools is None or run.work_pool_name is not None)
        ]
        return selected


class FreeLease:
    """A fake scheduler lease, which can always be acquired."""

    #: True to return a new id from each call of `read_last_decision`, as if a second scheduler had
    #: made a decision before the call.
    is_passed: bool = False

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self._reads = 0

    async def read_last_decision(self) -> str | None:
        """Return the id of the last scheduling decision."""
        self._reads += 1
        return str(self._reads if self.is_passed else 0)

    async def begin_decision(self, held_lease: Any) -> str:
        """Check that the scheduler lease is held, and return the id of a scheduling decision."""
        held_lease.check()
        return await self.read_last_decision() or ""

    @asynccontextmanager
    async def acquire(self, *, within_s: float) -> AsyncIterator[Any]:
        """Hold the scheduler lease while the context is open."""
        yield SimpleNamespace(check=lambda: None)
