"""Tests that the set-up of a Prefect server lists the GPUs of this machine in the work pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import Variable
from prefect.exceptions import ObjectAlreadyExists

from deployments.stack import part_checks, setup
from deployments.stack.env import POOL, RAY_VARIABLE
from tasks.processes.identity import host_name
from tasks.queue.ledger import TYPE
from tasks.queue.pool_copies import PoolCopy, variable_name
from tasks.queue.settings import PoolSettings, TableNode, settings_of, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import ListedCluster
from tests.support.web import serving

HERE = host_name()


class PoolServer:
    """A fake synchronous Prefect client. Its server has a single work pool."""

    def __init__(self, nodes: tuple[TableNode, ...] | None) -> None:
        """Create the fake client.

        Args:
            nodes: The nodes in the settings of the work pool. None if the pool does not exist.
        """
        self._exists = nodes is not None
        template = GangWorker.get_default_base_job_template()
        self.template = with_settings(template, PoolSettings(nodes=nodes or ()))
        self.description: str | None = None
        self.limit: int | None = None
        self.variables: dict[str, Variable] = {}
        #: Deployments of the flow `train`.
        self.deployments: list[SimpleNamespace] = []

    def create_work_pool(self, pool: Any) -> None:
        if self._exists:
            raise ObjectAlreadyExists(http_exc=Exception("409"))
        self._exists = True
        self.update_work_pool(pool.name, pool)

    def read_variable_by_name(self, name: str) -> Variable | None:
        return self.variables.get(name)

    def read_work_pool(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            type=TYPE,
            base_job_template=self.template,
            description=self.description,
            concurrency_limit=self.limit,
        )

    def update_work_pool(self, name: str, update: Any) -> None:
        self.template = update.base_job_template or self.template
        self.description = update.description or self.description
        self.limit = update.concurrency_limit or self.limit

    def read_deployments(self, *, flow_filter: Any) -> list[SimpleNamespace]:
        return self.deployments if flow_filter.name.any_ == ["train"] else []

    def update_deployment(self, id: object, update: Any) -> None:
        for deployment in self.deployments:
            if deployment.id == id:
                deployment.work_pool_name = update.work_pool_name

    def read_work_queues(self, **_: str) -> list[Any]:
        return []

    def create_work_queue(self, **_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        ("0-3", None, {HERE: 4}),
        # The pool does not list this machine yet, so the machine is added with all its GPUs.
        ("0-3", (), {HERE: 4}),
        ("0-3", (TableNode(name="other", gpus=8),), {"other": 8, HERE: 4}),
        # The pool already lists this machine with a number of GPUs, and this number is kept.
        ("0-3", (TableNode(name=HERE, gpus=2),), {HERE: 2}),
        ("0-3", (TableNode(name=HERE, gpus=0),), {HERE: 0}),
        ("", (), {}),
        ("", (TableNode(name="other", gpus=8),), {"other": 8}),
        ("nonsense", (), {}),
    ],
)
def test_set_up_lists_the_gpus_of_this_machine(
    gpus: str,
    nodes: tuple[TableNode, ...] | None,
    expected: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", gpus)
    server = PoolServer(nodes)

    setup.ensure_pool(server)  # type: ignore[arg-type]

    listed = settings_of(server.template).nodes
    assert {node.name: node.gpus for node in listed} == expected


def test_pool_that_a_worker_created_again_gets_limit_nodes_and_clusters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "0-3")
    monkeypatch.setenv(RAY_VARIABLE, "http://127.0.0.1:8265")
    server = PoolServer(())

    setup.ensure_pool(server)  # type: ignore[arg-type]

    settings = settings_of(server.template)
    assert server.limit == setup.POOL_LIMIT
    assert server.description
    assert [(node.name, node.gpus) for node in settings.nodes] == [(HERE, 4)]
    assert [cluster.address for cluster in settings.clusters] == ["http://127.0.0.1:8265"]


@pytest.mark.parametrize("nodes", [None, ()], ids=["deleted", "created again by a worker"])
def test_deleted_pool_gets_back_the_settings_of_its_copy(
    nodes: tuple[TableNode, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "0-3")
    monkeypatch.setenv(RAY_VARIABLE, "http://127.0.0.1:9999")
    server = PoolServer(nodes)
    old_settings = PoolSettings(
        nodes=(TableNode(name=HERE, gpus=2), TableNode(name="other", gpus=8)),
        clusters=(ListedCluster(address="http://ray:8265"),),
        limits={"team": 8},
    )
    copy = PoolCopy(pool_id=uuid4(), description="Ours", concurrency_limit=3, settings=old_settings)
    name = variable_name(POOL)
    server.variables[name] = Variable(id=uuid4(), name=name, value=copy.model_dump(mode="json"))

    setup.ensure_pool(server)  # type: ignore[arg-type]

    settings = settings_of(server.template)
    assert (server.limit, server.description) == (3, "Ours")
    assert (settings.nodes, settings.limits) == (old_settings.nodes, {"team": 8})
    addresses = [cluster.address for cluster in settings.clusters]
    assert addresses == ["http://ray:8265", "http://127.0.0.1:9999"]


@pytest.mark.parametrize(
    ("description", "nodes"), [("Runs", ()), (None, (TableNode(name="other", gpus=8),))]
)
def test_pool_without_a_limit_that_an_operator_has_changed_stays_without_a_limit(
    description: str | None, nodes: tuple[TableNode, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "0-3")
    server = PoolServer(nodes)
    server.description = description

    setup.ensure_pool(server)  # type: ignore[arg-type]

    assert server.limit is None


def test_deployments_of_a_deleted_pool_are_in_the_pool_again() -> None:
    server = PoolServer(())
    pools_and_steps = {"own": ("other-pool", []), "lost": (None, []), "served": (None, None)}
    server.deployments = [
        SimpleNamespace(id=name, name=name, work_pool_name=pool, pull_steps=steps)
        for name, (pool, steps) in pools_and_steps.items()
    ]

    setup.ensure_pools_of_deployments(server)  # type: ignore[arg-type]

    pools = {deployment.name: deployment.work_pool_name for deployment in server.deployments}
    assert pools == {"own": "other-pool", "lost": POOL, "served": None}


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((TableNode(name="a", gpus=8), TableNode(name="b", gpus=1)), "a (8 GPUs), b (1 GPU)"),
        ((), f"muster queue set node.{HERE}=GPUS"),
    ],
)
def test_summary_of_the_stack_names_the_listed_machines(
    nodes: tuple[TableNode, ...], text: str, muster_home: object
) -> None:
    template = PoolServer(nodes).template

    def answer(method: str, path: str, body: bytes) -> tuple[int, object]:
        assert path == f"/api/work_pools/{POOL}"
        return 200, {"base_job_template": template}

    with serving(answer) as url:
        stack: Any = SimpleNamespace(api_url=f"{url}/api")
        description = part_checks.describe_listed_nodes(stack)

    assert text in description
