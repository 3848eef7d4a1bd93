"""A work pool that was deleted and created again gets back its settings."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.actions import VariableCreate, VariableUpdate, WorkPoolUpdate
from prefect.client.schemas.objects import Variable, WorkPool

from tasks.queue.pool_copies import PoolCopies, is_empty, read_copy, variable_name
from tasks.queue.settings import PoolSettings, TableNode, settings_of, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import ListedCluster

TEMPLATE = GangWorker.get_default_base_job_template()
SETTINGS = PoolSettings(
    policy="backfill",
    nodes=(TableNode(name="n1", gpus=8), TableNode(name="n2", gpus=4, cpus=16)),
    clusters=(ListedCluster(address="http://ray:8265", max_nodes=4),),
    limits={"team": 8},
    drained=("n2",),
)


class Server:
    """A fake Prefect client. Its server has a work pool, and Prefect variables."""

    def __init__(self) -> None:
        self.pool = WorkPool(
            id=uuid4(),
            name="gang",
            type="gang",
            description="Runs",
            concurrency_limit=3,
            is_paused=True,
            base_job_template=with_settings(TEMPLATE, SETTINGS),
        )
        self.variables: dict[str, Any] = {}
        self.requests = 0

    def create_again(self, template: dict[str, Any] = TEMPLATE) -> None:
        """Replace the work pool by a new pool that has the same name and the given template."""
        self.pool = WorkPool(id=uuid4(), name="gang", type="gang", base_job_template=template)

    async def read_work_pool(self, name: str) -> WorkPool:
        self.requests += 1
        return self.pool

    async def update_work_pool(self, name: str, update: WorkPoolUpdate) -> None:
        self.pool = self.pool.model_copy(update=update.model_dump(exclude_unset=True))

    async def read_variable_by_name(self, name: str) -> Variable | None:
        self.requests += 1
        if name not in self.variables:
            return None
        return Variable(id=uuid4(), name=name, value=self.variables[name])

    async def update_variable(self, variable: VariableUpdate) -> None:
        if variable.name not in self.variables:
            request = httpx.Request("PATCH", "http://scripted/api/variables")
            response = httpx.Response(404, request=request)
            raise httpx.HTTPStatusError("missing", request=request, response=response)
        self.variables[variable.name] = variable.value

    async def create_variable(self, variable: VariableCreate) -> None:
        self.variables[variable.name] = variable.value


@pytest.fixture
def server() -> Server:
    return Server()


def update(server: Server, copies: PoolCopies | None = None) -> None:
    """Call `PoolCopies.update` with the current work pool of the server."""
    copies = copies or PoolCopies(server)  # type: ignore[arg-type]
    asyncio.run(copies.update([server.pool]))


@pytest.mark.parametrize("is_same_leader", [True, False])
def test_pool_that_was_created_again_gets_back_its_settings(
    server: Server, is_same_leader: bool
) -> None:
    copies = PoolCopies(server) if is_same_leader else None  # type: ignore[arg-type]
    before = server.pool
    update(server, copies)
    server.create_again()

    update(server, copies)

    assert server.pool.id != before.id
    assert (server.pool.concurrency_limit, server.pool.description) == (3, "Runs")
    assert server.pool.is_paused
    assert settings_of(server.pool.base_job_template) == SETTINGS


def test_pool_that_is_deleted_twice_is_restored_twice(server: Server) -> None:
    update(server)
    for _ in range(2):
        server.create_again()
        update(server)
        update(server)

    assert settings_of(server.pool.base_job_template) == SETTINGS


def test_settings_that_a_user_has_removed_stay_removed(server: Server) -> None:
    update(server)
    empty = {"description": None, "concurrency_limit": None, "base_job_template": TEMPLATE}
    server.pool = server.pool.model_copy(update=empty)
    update(server)
    update(server)
    assert is_empty(server.pool)

    server.create_again()
    update(server)

    assert is_empty(server.pool)


def test_new_pool_with_settings_of_its_own_is_not_changed(server: Server) -> None:
    update(server)
    own = PoolSettings(nodes=(TableNode(name="n9", gpus=1),))
    server.create_again(with_settings(TEMPLATE, own))

    update(server)

    assert settings_of(server.pool.base_job_template) == own
    copy = asyncio.run(read_copy(server, "gang"))  # type: ignore[arg-type]
    assert copy is not None
    assert (copy.pool_id, copy.settings) == (server.pool.id, own)


def test_pool_without_a_template_is_restored_after_a_worker_has_added_the_template(
    server: Server,
) -> None:
    update(server)
    server.create_again({})
    update(server)
    assert server.pool.base_job_template == {}

    server.pool = server.pool.model_copy(update={"base_job_template": TEMPLATE})
    update(server)

    assert settings_of(server.pool.base_job_template) == SETTINGS


def test_unchanged_pool_costs_no_request(server: Server) -> None:
    copies = PoolCopies(server)  # type: ignore[arg-type]
    update(server, copies)
    requests = server.requests

    update(server, copies)

    assert server.requests == requests


def test_settings_that_do_not_fit_into_a_variable_cause_one_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    copies = PoolCopies(server)  # type: ignore[arg-type]
    nodes = tuple(TableNode(name=f"node-{number}", gpus=8) for number in range(500))
    template = with_settings(TEMPLATE, PoolSettings(nodes=nodes))
    server.pool = server.pool.model_copy(update={"base_job_template": template})

    with caplog.at_level(logging.WARNING):
        update(server, copies)
        update(server, copies)

    assert server.variables == {}
    [warning] = caplog.messages
    assert "may have at most 5000" in warning


def test_names_of_variables_are_valid_and_different() -> None:
    names = {variable_name(name) for name in ("gang", "Gang", "a b", "a/b", "ä" * 300)}

    assert len(names) == 5
    for name in names:
        VariableCreate(name=name, value=1)
