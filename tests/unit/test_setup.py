"""Tests that the set-up of a Prefect server lists the GPUs of this machine in the work pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectAlreadyExists

from deployments.stack import part_checks, setup
from deployments.stack.env import POOL
from tasks.processes.identity import host_name
from tasks.queue.ledger import TYPE
from tasks.queue.settings import PoolSettings, TableNode, settings_of, with_settings
from tasks.queue.worker import GangWorker
from tests.support.web import serving

HERE = host_name()


class PoolServer:
    """A fake of Prefect's synchronous client with one work pool."""

    def __init__(self, nodes: tuple[TableNode, ...] | None) -> None:
        """
        Args:
            nodes: The nodes in the settings of the work pool. None if the pool does not exist.
        """
        self._exists = nodes is not None
        template = GangWorker.get_default_base_job_template()
        self.template = with_settings(template, PoolSettings(nodes=nodes or ()))

    def create_work_pool(self, pool: Any) -> None:
        if self._exists:
            raise ObjectAlreadyExists(http_exc=Exception("409"))

    def read_work_pool(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(type=TYPE, base_job_template=self.template)

    def update_work_pool(self, name: str, update: Any) -> None:
        self.template = update.base_job_template

    def read_work_queues(self, **_: str) -> list[Any]:
        return []

    def create_work_queue(self, **_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        ("0-3", None, {HERE: 4}),
        # The pool was created before the machine showed GPUs, or before an older release.
        ("0-3", (), {HERE: 4}),
        ("0-3", (TableNode(name="other", gpus=8),), {"other": 8, HERE: 4}),
        # An operator has set another number for this machine.
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
