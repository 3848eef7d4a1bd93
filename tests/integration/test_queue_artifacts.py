"""The queue's tables in the Prefect UI and the operator's commands, on a real Prefect server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.queue import command
from tasks.queue.packing import Demand
from tasks.queue.scheduling_pass import QueuedRun, QueueView
from tasks.queue.settings import settings_of
from tasks.queue.tables import ROWS_AT_MOST, QueueArtifacts, artifact_keys
from tasks.ray.usage import ClusterNode
from tasks.show.arguments import run
from tests.support.host_environment import make_sleeping_spec
from tests.support.prefect_api import send_request

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    """Yield the address of the Prefect server that all clients in this process use."""
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


class Clock:
    """A fake monotonic clock, whose time the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def build_queued_run(
    number: int, reason: str = "waits behind earlier runs in the queue"
) -> QueuedRun:
    """Return a queued run that waits for two nodes with 8 GPUs each.

    Args:
        number: Position of the run in the queue. The name of the run contains this number.
        reason: Text that explains why the run waits.
    """
    return QueuedRun(
        number=number,
        flow_run_id=f"id-{number}",
        name=f"run-{number}",
        demand=Demand(nodes=2, gpus_per_node=8, cpus_per_gpu=3),
        cluster="",
        queue="default",
        waiting_since=1_767_000_000.0,
        reason=reason,
    )


def build_view(
    pool: str, *line: QueuedRun, at: float = 1_767_359_130.0, running: int = 1
) -> QueueView:
    """Return the view of a queue: the data of the queue's tables in the Prefect UI.

    The view has one node, whose GPUs are in use.

    Args:
        pool: Name of the work pool.
        *line: The queued runs.
        at: Time of the view, in UTC epoch seconds.
        running: Number of running runs.
    """
    node = ClusterNode(cluster="", name="gpu-1", gpus=8, held={"run-0": 8})
    return QueueView(
        at=at,
        pool=pool,
        policy="fifo",
        is_paused=False,
        limit=None,
        running=running,
        line=line,
        nodes=(node,),
    )


def list_versions(api: str, key: str) -> list[dict[str, Any]]:
    """Return all artifacts with this key that the Prefect server keeps."""
    return send_request("POST", f"{api}/artifacts/filter", {"artifacts": {"key": {"any_": [key]}}})


def read_latest(api: str, key: str) -> dict[str, Any]:
    """Return the newest artifact with this key."""
    return send_request("GET", f"{api}/artifacts/{key}/latest")


def test_changed_tables_replace_the_old_tables(api: str) -> None:
    clock = Clock()

    async def show() -> None:
        artifacts = QueueArtifacts(api, clock=clock)
        for count in range(4):
            clock.now += 10
            await artifacts.show(
                build_view("place", *map(build_queued_run, range(1, count + 1)), running=count)
            )

    asyncio.run(show())

    for key, rows in (("place-gang-queue", 3), ("place-gang-nodes", 1)):
        assert len(list_versions(api, key)) == 1
        artifact = read_latest(api, key)
        assert artifact["type"] == "table"
        assert len(json.loads(artifact["data"])) == rows
        assert "work pool place, fifo: 3 running, 3 waiting" in artifact["description"]
        assert "As of 2026-01-02 13:05:30 UTC" in artifact["description"]


def test_unchanged_table_is_not_written_again(api: str) -> None:
    clock = Clock()
    first_view = build_view("same", build_queued_run(1))

    async def show() -> None:
        artifacts = QueueArtifacts(api, clock=clock)
        await artifacts.show(first_view)
        clock.now += 10
        await artifacts.show(replace(first_view, at=first_view.at + 10))

    asyncio.run(show())

    assert "As of 2026-01-02 13:05:30 UTC" in read_latest(api, "same-gang-queue")["description"]


def test_change_within_the_minimum_interval_is_shown_in_the_next_pass(api: str) -> None:
    clock = Clock()
    shown_reasons = []

    async def show() -> None:
        artifacts = QueueArtifacts(api, every_s=2.0, clock=clock)
        for time_s in (0.0, 1.9, 2.0):
            clock.now = time_s
            await artifacts.show(
                build_view("soon", build_queued_run(1, reason=f"decided at {time_s}"))
            )
            shown_reasons.append(
                json.loads(read_latest(api, "soon-gang-queue")["data"])[0]["reason"]
            )

    asyncio.run(show())

    assert shown_reasons == ["decided at 0.0", "decided at 0.0", "decided at 2.0"]


def test_table_of_another_scheduler_is_overwritten_within_a_minute(api: str) -> None:
    clock = Clock()

    async def show() -> None:
        artifacts = QueueArtifacts(api, renewed_every_s=60.0, clock=clock)
        await artifacts.show(build_view("back"))
        await QueueArtifacts(api).show(build_view("back", build_queued_run(1)))
        clock.now += 60
        await artifacts.show(build_view("back"))

    asyncio.run(show())

    assert len(list_versions(api, "back-gang-queue")) == 1
    assert json.loads(read_latest(api, "back-gang-queue")["data"]) == []


def test_deleted_table_is_created_again(api: str) -> None:
    clock = Clock()

    async def show() -> None:
        artifacts = QueueArtifacts(api, clock=clock)
        await artifacts.show(build_view("again"))
        send_request("DELETE", f"{api}/artifacts/{list_versions(api, 'again-gang-queue')[0]['id']}")
        clock.now += 10
        await artifacts.show(build_view("again", build_queued_run(1)))

    asyncio.run(show())

    assert len(list_versions(api, "again-gang-queue")) == 1
    assert len(json.loads(read_latest(api, "again-gang-queue")["data"])) == 1


def test_table_of_a_long_queue_is_cut_and_names_the_full_length(api: str) -> None:
    asyncio.run(QueueArtifacts(api).show(build_view("long", *map(build_queued_run, range(1, 302)))))

    artifact = read_latest(api, "long-gang-queue")
    assert len(json.loads(artifact["data"])) == ROWS_AT_MOST
    assert "the first 200 of 301 waiting runs" in artifact["description"]


@pytest.mark.parametrize(
    ("pool", "queue"),
    [
        ("gang", "gang-queue"),
        ("", "gang-queue"),
        ("team-a", "team-a-gang-queue"),
        # These names contain characters that the key of a Prefect artifact cannot contain.
        ("Team A", "team-a-e18d32-gang-queue"),
        ("组", "76acfb-gang-queue"),
    ],
)
def test_each_pool_has_its_own_artifact_keys(api: str, pool: str, queue: str) -> None:
    keys = artifact_keys(pool)

    asyncio.run(QueueArtifacts(api).show(build_view(pool)))

    assert keys[0] == queue
    assert [len(list_versions(api, key)) for key in keys] == [1, 1]


async def build_empty_view(_client: object, pool: str) -> QueueView:
    """Return a queue view with no queued runs; send no request to the Prefect server."""
    return build_view(pool)


@pytest.fixture
def pool(api: str) -> Iterator[str]:
    """Yield a work pool with two work queues and a realistic job template."""
    template = {
        "job_configuration": {"env": "{{ env }}"},
        "variables": {"type": "object", "properties": {"env": {"type": "object"}}},
    }
    pool_settings = {"name": "operated", "type": "process", "base_job_template": template}
    send_request("POST", f"{api}/work_pools/", pool_settings)
    send_request("POST", f"{api}/work_pools/operated/queues", {"name": "low"})
    yield "operated"
    send_request("DELETE", f"{api}/work_pools/operated")


def test_operator_commands_change_only_the_settings_of_the_queue(
    api: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "read_queue_view", build_empty_view)
    before = send_request("GET", f"{api}/work_pools/{pool}")

    codes = [
        run(command.app, [*arguments, "--pool", pool])
        for arguments in (["drain", "gpu-1"], ["set", "policy=backfill", "limit.team-a=16"])
    ]

    after = send_request("GET", f"{api}/work_pools/{pool}")
    settings = settings_of(after["base_job_template"])
    assert codes == [0, 0]
    assert (settings.drained, settings.policy) == (("gpu-1",), "backfill")
    assert settings.limits == {"team-a": 16}
    after["base_job_template"]["variables"]["properties"].pop("gang")
    assert after["base_job_template"] == before["base_job_template"]


@pytest.fixture
def pool_without_worker(api: str) -> Iterator[str]:
    """Yield the name of a pool without a worker.

    The pool has a node with 8 GPUs and two queued runs. Each run requests all 8 GPUs.
    """
    nodes = {"nodes": [{"name": "gpu-1", "gpus": 8}]}
    variables = {"properties": {"gang": {"default": nodes}}}
    template = {"job_configuration": {"env": {}}, "variables": variables}
    pool_settings = {"name": "alone", "type": "gang", "base_job_template": template}
    send_request("POST", f"{api}/work_pools/", pool_settings)
    flow = send_request("POST", f"{api}/flows/", {"name": "train"})["id"]
    deployment = {"name": "alone", "flow_id": flow, "work_pool_name": "alone"}
    deployment_id = send_request("POST", f"{api}/deployments/", deployment)["id"]
    for _ in range(2):
        spec = {**make_sleeping_spec("trainer"), "gang": {"nodes": 1, "gpus_per_node": 8}}
        send_request(
            "POST",
            f"{api}/deployments/{deployment_id}/create_flow_run",
            {"parameters": {"spec": spec}},
        )
    yield "alone"
    send_request("DELETE", f"{api}/work_pools/alone")


def test_queue_command_shows_the_next_decision_without_making_it(
    api: str, pool_without_worker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = send_request(
        "POST", f"{api}/flow_runs/filter", {"work_pools": {"name": {"any_": [pool_without_worker]}}}
    )

    code = run(command.app, ["--pool", pool_without_worker])

    after = send_request(
        "POST", f"{api}/flow_runs/filter", {"work_pools": {"name": {"any_": [pool_without_worker]}}}
    )
    output = capsys.readouterr().out
    assert code == 0
    assert "work pool alone, fifo: 0 running, 2 waiting; 8 of 8 GPUs are free on 1 node" in output
    assert output.count("no worker serves the queue default of the work pool alone") == 2
    assert len(before) == 2
    assert [(run["state"]["id"], run["labels"]) for run in before] == [
        (run["state"]["id"], run["labels"]) for run in after
    ]
