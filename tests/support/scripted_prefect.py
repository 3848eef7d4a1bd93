"""A Prefect server for one gate, in memory: the rules of states that a cancel leans on, and a hook
before each request, at which others act or the gate is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkPool, WorkQueue
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus, StateAcceptDetails

POOL = "gang"
_QUEUE = WorkQueue(id=uuid4(), name="default", priority=2, work_pool_id=uuid4())
#: So long ago that nothing is waited for any more.
_BEGAN = datetime.now(UTC) - timedelta(hours=1)


class ScriptedPrefect:
    """What a gate asks of its client."""

    api_url = "http://scripted/api"

    def __init__(self, template: dict[str, Any]) -> None:
        """
        Args:
            template: of the work pool.
        """
        self._pool = WorkPool(
            id=uuid4(),
            name=POOL,
            type="gang",
            base_job_template=template,
            default_queue_id=_QUEUE.id,
        )
        self._runs: dict[UUID, FlowRun] = {}
        self._histories: dict[UUID, list[State[Any]]] = {}
        self._states = 0
        self.events: list[dict[str, Any]] = []
        #: How many requests there were, and what is done before one, by its number.
        self.requests = 0
        self.before: dict[int, Callable[[], None]] = {}
        #: The same, before each of a name.
        self.ahead: dict[str, Callable[[], None]] = {}
        #: As `read_flow_run`.
        self.asked: list[str] = []

    def change(self, template: dict[str, Any]) -> None:
        """Another one, as an operator sets it."""
        self._pool = self._pool.model_copy(update={"base_job_template": template})

    def submit(self, spec: Any, due: datetime | None = None, **known: Any) -> UUID:
        """
        Args:
            due: long ago, if left out, and later than those before it.
        """
        id, due = uuid4(), due or _BEGAN + timedelta(seconds=len(self._runs))
        self._runs[id] = FlowRun(
            id=id,
            flow_id=uuid4(),
            name="idealistic-harrier",
            created=due,
            expected_start_time=due,
            next_scheduled_start_time=due,
            parameters={"spec": spec},
            work_pool_name=POOL,
            work_queue_id=_QUEUE.id,
            **known,
        )
        self._histories[id] = []
        self.set(id, State(type=StateType.SCHEDULED))
        return id

    def run(self, id: UUID) -> FlowRun:
        return self._runs[id].model_copy(deep=True)

    def history(self, id: UUID) -> list[str]:
        return [state.name or "" for state in self._histories[id]]

    def patch(self, id: UUID, **known: Any) -> None:
        self._runs[id] = self._runs[id].model_copy(update=known)

    def set(self, id: UUID, state: State[Any], *, force: bool = False) -> SetStateStatus:
        """Source: prefect/server/orchestration/core_policy.py."""
        run, before = self._runs[id], self._runs[id].state
        status = SetStateStatus.ACCEPT
        if before is not None and state.is_cancelling():
            if before.is_final():
                return SetStateStatus.ABORT
            if before.is_scheduled() and not run.infrastructure_pid:
                status, state = SetStateStatus.REJECT, State(type=StateType.CANCELLED)
        elif before is not None and not force:
            if before.is_cancelling() and not state.is_cancelled():
                return SetStateStatus.REJECT
            if before.is_final() and state.is_scheduled():
                came_back = run.empirical_policy.model_copy(update={"retry_type": "reschedule"})
                self.patch(id, empirical_policy=came_back)
        self._states += 1
        at = _BEGAN + timedelta(milliseconds=self._states)
        stored = state.model_copy(update={"id": uuid4(), "timestamp": at})
        self._histories[id].append(stored)
        self.patch(id, state=stored)
        return status

    def cancel(self, id: UUID) -> None:
        """As the button of the UI does."""
        self.set(id, State(type=StateType.CANCELLING))

    def delete(self, id: UUID) -> None:
        """As its history tells it: the server answers with none, and no error."""
        self._histories[id].clear()

    def _ask(self, what: str) -> None:
        self.requests += 1
        self.asked.append(what)
        self.before.get(self.requests, lambda: None)()
        self.ahead.get(what, lambda: None)()

    async def read_work_pools(self, **_filters: Any) -> list[WorkPool]:
        self._ask("read_work_pools")
        return [self._pool]

    async def read_workers_for_work_pool(self, work_pool_name: str) -> list[Any]:
        return []

    async def read_work_queues(self, **_filters: Any) -> list[WorkQueue]:
        self._ask("read_work_queues")
        return [_QUEUE]

    async def read_flow_run(self, id: UUID) -> FlowRun:
        self._ask("read_flow_run")
        return self.run(id)

    async def read_flow_run_states(self, id: UUID) -> list[State[Any]]:
        self._ask("read_flow_run_states")
        return [*self._histories[id]]

    async def set_flow_run_state(
        self, id: UUID, state: State[Any], force: bool = False
    ) -> OrchestrationResult[Any]:
        self._ask("set_flow_run_state")
        status = self.set(id, state, force=force)
        return OrchestrationResult(
            state=self._runs[id].state, status=status, details=StateAcceptDetails()
        )

    async def update_flow_run(self, id: UUID, *, name: str) -> None:
        self._ask("update_flow_run")
        self.patch(id, name=name)

    async def update_flow_run_labels(self, id: UUID, labels: dict[str, Any]) -> None:
        self._ask("update_flow_run_labels")
        self.patch(id, labels={**self._runs[id].labels, **labels})

    async def update_work_pool(self, name: str, update: WorkPoolUpdate) -> None:
        self._ask("update_work_pool")
        assert name == POOL and update.base_job_template is not None
        self.change(update.base_job_template)

    async def request(self, method: str, path: str, *, json: Any, path_params: Any = None) -> Any:
        if (method, path) == ("POST", "/flow_runs/filter"):
            return SimpleNamespace(json=lambda: self._filtered(**json))
        if (method, path) == ("POST", "/events"):
            return self.events.extend(json)
        self._ask("request")
        return self.patch(path_params["id"], **json)

    def _filtered(
        self, *, flow_runs: dict[str, Any], offset: int = 0, limit: int = 200, **_filters: Any
    ) -> list[dict[str, Any]]:
        self._ask("read_flow_runs")
        types = flow_runs["state"].get("type", {}).get("any_", list(StateType))
        names, ids = (
            at.get("any_") for at in (flow_runs["state"].get("name", {}), flow_runs.get("id", {}))
        )
        after = flow_runs.get("next_scheduled_start_time", {}).get("after_")
        since = datetime.fromisoformat(after) if after else _BEGAN
        return [
            self.run(id).model_dump(mode="json")
            for id, run in self._runs.items()
            if run.state is not None
            and run.state.type in types
            and (names is None or run.state.name in names)
            and (ids is None or str(id) in ids)
            and (due := run.next_scheduled_start_time) is not None
            and due >= since
        ][offset : offset + limit]


class FreeLease:
    """A lease that nobody else asks for."""

    #: Whether another gate has decided since this one looked first.
    is_passed: bool = False

    def __init__(self, *_arguments: Any, **_more: Any) -> None:
        self._asked = 0

    async def turn(self) -> str | None:
        self._asked += 1
        return str(self._asked if self.is_passed else 0)

    async def begin_turn(self, holding: Any) -> str:
        holding.check()
        return await self.turn() or ""

    @asynccontextmanager
    async def held(self, *, within_s: float) -> AsyncIterator[Any]:
        yield SimpleNamespace(check=lambda: None)
