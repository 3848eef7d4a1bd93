"""The tables of the queue and the operator's command, on a real Prefect server."""

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
from tests.support.ground import sleepers
from tests.support.prefect_api import ask

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queued(number: int, reason: str = "waits behind earlier runs of the line") -> QueuedRun:
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


def view(pool: str, *line: QueuedRun, at: float = 1_767_359_130.0, running: int = 1) -> QueueView:
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


def versions(api: str, key: str) -> list[dict[str, Any]]:
    """Every artifact that the server keeps of a key."""
    return ask("POST", f"{api}/artifacts/filter", {"artifacts": {"key": {"any_": [key]}}})


def latest(api: str, key: str) -> dict[str, Any]:
    """What the UI shows of a key."""
    return ask("GET", f"{api}/artifacts/{key}/latest")


def test_what_has_changed_is_shown_in_place(api: str) -> None:
    clock = Clock()

    async def show() -> None:
        artifacts = QueueArtifacts(api, clock=clock)
        for count in range(4):
            clock.now += 10
            await artifacts.show(view("place", *map(queued, range(1, count + 1)), running=count))

    asyncio.run(show())

    for key, rows in (("place-gang-queue", 3), ("place-gang-nodes", 1)):
        assert len(versions(api, key)) == 1
        shown = latest(api, key)
        assert shown["type"] == "table"
        assert len(json.loads(shown["data"])) == rows
        assert "work pool place, fifo: 3 running, 3 waiting" in shown["description"]
        assert "As of 2026-01-02 13:05:30 UTC" in shown["description"]


def test_what_is_the_same_is_not_written_again(api: str) -> None:
    clock = Clock()
    first = view("same", queued(1))

    async def show() -> None:
        artifacts = QueueArtifacts(api, clock=clock)
        await artifacts.show(first)
        clock.now += 10
        await artifacts.show(replace(first, at=first.at + 10))

    asyncio.run(show())

    assert "As of 2026-01-02 13:05:30 UTC" in latest(api, "same-gang-queue")["description"]


def test_what_changes_too_soon_is_left_to_the_next_look(api: str) -> None:
    clock = Clock()
    seen = []

    async def show() -> None:
        artifacts = QueueArtifacts(api, every_s=2.0, clock=clock)
        for at in (0.0, 1.9, 2.0):
            clock.now = at
            await artifacts.show(view("soon", queued(1, reason=f"looked at {at}")))
            seen.append(json.loads(latest(api, "soon-gang-queue")["data"])[0]["reason"])

    asyncio.run(show())

    assert seen == ["looked at 0.0", "looked at 0.0", "looked at 2.0"]


def test_what_another_gate_wrote_is_written_over_in_a_minute(api: str) -> None:
    clock = Clock()

    async def show() -> None:
        one = QueueArtifacts(api, renewed_every_s=60.0, clock=clock)
        await one.show(view("back"))
        await QueueArtifacts(api).show(view("back", queued(1)))
        clock.now += 60
        await one.show(view("back"))

    asyncio.run(show())

    assert len(versions(api, "back-gang-queue")) == 1
    assert json.loads(latest(api, "back-gang-queue")["data"]) == []


def test_a_table_that_somebody_deleted_is_made_again(api: str) -> None:
    clock = Clock()

    async def show() -> None:
        artifacts = QueueArtifacts(api, clock=clock)
        await artifacts.show(view("again"))
        ask("DELETE", f"{api}/artifacts/{versions(api, 'again-gang-queue')[0]['id']}")
        clock.now += 10
        await artifacts.show(view("again", queued(1)))

    asyncio.run(show())

    assert len(versions(api, "again-gang-queue")) == 1
    assert len(json.loads(latest(api, "again-gang-queue")["data"])) == 1


def test_a_long_line_is_cut_and_says_so(api: str) -> None:
    asyncio.run(QueueArtifacts(api).show(view("long", *map(queued, range(1, 302)))))

    shown = latest(api, "long-gang-queue")
    assert len(json.loads(shown["data"])) == ROWS_AT_MOST
    assert "the first 200 of 301 waiting runs" in shown["description"]


@pytest.mark.parametrize(
    ("pool", "queue"),
    [
        ("gang", "gang-queue"),
        ("", "gang-queue"),
        ("team-a", "team-a-gang-queue"),
        # what a key can't hold
        ("Team A", "team-a-e18d32-gang-queue"),
        ("组", "76acfb-gang-queue"),
    ],
)
def test_each_pool_has_keys_of_its_own(api: str, pool: str, queue: str) -> None:
    keys = artifact_keys(pool)

    asyncio.run(QueueArtifacts(api).show(view(pool)))

    assert keys[0] == queue
    assert [len(versions(api, key)) for key in keys] == [1, 1]


async def no_look(_client: object, pool: str) -> QueueView:
    return view(pool)


@pytest.fixture
def pool(api: str) -> Iterator[str]:
    """A work pool with a job template such as a worker gives it, and a queue beside the default."""
    template = {
        "job_configuration": {"env": "{{ env }}"},
        "variables": {"type": "object", "properties": {"env": {"type": "object"}}},
    }
    made = {"name": "operated", "type": "process", "base_job_template": template}
    ask("POST", f"{api}/work_pools/", made)
    ask("POST", f"{api}/work_pools/operated/queues", {"name": "low"})
    yield "operated"
    ask("DELETE", f"{api}/work_pools/operated")


def test_an_operator_changes_the_pool_and_nothing_else_of_it(
    api: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "read_queue_view", no_look)
    before = ask("GET", f"{api}/work_pools/{pool}")

    codes = [
        run(command.app, [*words, "--pool", pool])
        for words in (["drain", "gpu-1"], ["set", "policy=backfill", "limit.team-a=16"])
    ]

    after = ask("GET", f"{api}/work_pools/{pool}")
    settings = settings_of(after["base_job_template"])
    assert codes == [0, 0]
    assert (settings.drained, settings.policy) == (("gpu-1",), "backfill")
    assert settings.limits == {"team-a": 16}
    after["base_job_template"]["variables"]["properties"].pop("gang")
    assert after["base_job_template"] == before["base_job_template"]


@pytest.fixture
def unserved(api: str) -> Iterator[str]:
    """A pool of one node with 8 GPUs, which no worker serves, and two runs that want all of it."""
    nodes = {"nodes": [{"name": "gpu-1", "gpus": 8}]}
    variables = {"properties": {"gang": {"default": nodes}}}
    template = {"job_configuration": {"env": {}}, "variables": variables}
    made = {"name": "alone", "type": "gang", "base_job_template": template}
    ask("POST", f"{api}/work_pools/", made)
    flow = ask("POST", f"{api}/flows/", {"name": "train"})["id"]
    deployment = {"name": "alone", "flow_id": flow, "work_pool_name": "alone"}
    deployed = ask("POST", f"{api}/deployments/", deployment)["id"]
    for _ in range(2):
        spec = {**sleepers("trainer"), "gang": {"nodes": 1, "gpus_per_node": 8}}
        ask("POST", f"{api}/deployments/{deployed}/create_flow_run", {"parameters": {"spec": spec}})
    yield "alone"
    ask("DELETE", f"{api}/work_pools/alone")


def test_an_onlooker_sees_what_a_gate_would_do_and_does_nothing(
    api: str, unserved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ask("POST", f"{api}/flow_runs/filter", {"work_pools": {"name": {"any_": [unserved]}}})

    code = run(command.app, ["--pool", unserved])

    after = ask("POST", f"{api}/flow_runs/filter", {"work_pools": {"name": {"any_": [unserved]}}})
    told = capsys.readouterr().out
    assert code == 0
    assert "work pool alone, fifo: 0 running, 2 waiting; 8 of 8 GPUs are free on 1 node" in told
    assert told.count("none serves the queue default of the work pool alone") == 2
    assert len(before) == 2
    assert [(run["state"]["id"], run["labels"]) for run in before] == [
        (run["state"]["id"], run["labels"]) for run in after
    ]
