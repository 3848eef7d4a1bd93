"""The automations of deployments/automations/ on a real server, notifying a webhook of the test's.

All but the first test are for `make thorough`: a server with its pool and worker of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.automations.apply import FOLDER, apply
from tasks.processes.ports import listeners
from tests.support.gang_pool import GangPool, host
from tests.support.ground import ROOT, Run, Server, until
from tests.support.web import serving

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(240)]

DUMMY = ROOT / "tests" / "support" / "dummy_server.py"
#: A run waits for long after so many seconds, here. The least that Prefect takes is 10.
LONG_S = 25
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FAILED, WAITS, FLOOR, DRAINED = (
    "Muster: a run failed",
    "Muster: a run waits for long",
    "Muster: a fleet is under its floor",
    "Muster: a node was drained",
)


class Sink:
    """A webhook: what was posted to it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []

    def answer(self, _method: str, _path: str, body: bytes) -> tuple[int, None]:
        self.messages.append(json.loads(body))
        return 200, None

    def of(self, text: str) -> list[dict[str, str]]:
        """The messages in which a text stands."""
        return [one for one in self.messages if text in one["subject"] + one["body"]]


@dataclass(kw_only=True)
class Scene:
    """A pool with a worker, whose server notifies the sink."""

    pool: GangPool
    sink: Sink
    #: Of the sink.
    url: str

    def message_of(self, text: str) -> dict[str, str]:
        """The first one in which a text stands."""
        until(lambda: self.sink.of(text), f"a message with {text}", 60)
        return self.sink.of(text)[0]

    def events(self, *names: str, about: str = "") -> list[dict[str, Any]]:
        """In the order in which they happened; without names, Muster's.

        Args:
            about: the resource of the events.
        """
        event = {"name": list(names)} if names else {"prefix": ["muster."]}
        wanted: dict[str, Any] = {"event": event, "order": "ASC"}
        if about:
            wanted["resource"] = {"id": [about]}
        found = self.pool.ground.post("/events/filter", filter=wanted, limit=50)
        return list(found["events"])

    def until_fired(self, automation: str, resource: str) -> dict[str, Any]:
        """What the feed has of an automation that was triggered by an event about a resource."""

        def found() -> Any:
            for one in self.events("prefect.automation.triggered"):
                event = (one["payload"].get("triggering_event") or {}).get("resource", {})
                is_it = one["resource"]["prefect.resource.name"] == automation
                if is_it and event.get("prefect.resource.id") == resource:
                    return one
            return None

        fired: dict[str, Any] = until(found, f"{automation} fires for {resource}", 60)
        return fired


@pytest.fixture(scope="module")
def client_of() -> Callable[[str], SyncPrefectClient]:
    def client(api: str) -> SyncPrefectClient:
        with temporary_settings({PREFECT_API_URL: api}):
            return get_client(sync_client=True)

    return client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The automations, but for how long a long wait is."""
    folder = tmp_path_factory.mktemp("automations")
    for path in FOLDER.glob("*.yaml"):
        shutil.copy(path, folder)
    waiting = folder / "run-waiting.yaml"
    text = waiting.read_text()
    assert "within: 3600\n" in text
    waiting.write_text(text.replace("within: 3600\n", f"within: {LONG_S}\n"))
    return folder


@pytest.fixture(scope="module")
def scene(
    tmp_path_factory: pytest.TempPathFactory,
    folder: Path,
    client_of: Callable[[str], SyncPrefectClient],
) -> Iterator[Scene]:
    server = Server(tmp_path_factory.mktemp("server"))
    ground = host("n1", tmp_path_factory.mktemp("home"), server.api)
    pool = GangPool(ground=ground, server=server)
    sink = Sink()
    with serving(sink.answer) as url:
        try:
            server.start()
            save_block(server.api, url)
            with client_of(server.api) as client:
                assert {one.what for one in apply(client, folder)} == {"created"}
            pool.set_up()
            pool.start_worker()
            yield Scene(pool=pool, sink=sink, url=url)
        finally:
            ground.clear()
            server.kill()


@pytest.fixture(autouse=True)
def emptied(scene: Scene) -> Iterator[None]:
    yield
    scene.pool.empty()


def save_block(api: str, url: str) -> None:
    with temporary_settings({PREFECT_API_URL: api}):
        CustomWebhookNotificationBlock(
            name="sink", url=url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
        ).save("muster", overwrite=True, _sync=True)  # type: ignore[call-arg]


def failing(pool: GangPool) -> Run:
    command = [sys.executable, "-c", f"import sys; sys.exit({OUT_OF_MEMORY!r})"]
    return pool.submit(
        {"name": "trial", "workload": "grpo", "components": {"trainer": {"command": command}}},
        tags=["team-a"],
    )


def test_a_run_that_fails_is_notified_once_with_kind_component_and_log(scene: Scene) -> None:
    run = failing(scene.pool)
    run.until_state("FAILED")

    message = scene.message_of(run.name)

    assert message["subject"] == f"{run.name} failed: CUDA_OOM"
    lines = message["body"].splitlines()
    assert f"run: {run.name}" in lines and "kind: CUDA_OOM" in lines
    assert "component: trainer" in lines
    log = next(line.partition(":")[2] for line in lines if line.startswith("log: "))
    assert OUT_OF_MEMORY in Path(log.partition(":")[2]).read_text()
    assert lines[-1] == OUT_OF_MEMORY
    assert any(run.flow_run_id in line for line in lines if line.startswith("page: "))
    # The server's own event of the same failure has come by now.
    fired = scene.until_fired(FAILED, f"prefect.flow-run.{run.flow_run_id}")
    executed = until(
        lambda: scene.events(
            "prefect.automation.action.executed", about=fired["resource"]["prefect.resource.id"]
        ),
        "the action is in the feed",
    )
    assert executed
    until(
        lambda: scene.events(
            "prefect.flow-run.Failed", about=f"prefect.flow-run.{run.flow_run_id}"
        ),
        "the server's event",
    )
    assert len(scene.sink.of(run.name)) == 1


def test_a_run_that_can_never_start_is_notified_with_the_numbers(scene: Scene) -> None:
    run = scene.pool.submit(scene.pool.spec(nodes=3, gpus=8))
    until(lambda: run.name.startswith("gang-grpo-"), "it has its name")

    message = scene.message_of(run.name)

    # By the gate's event or the server's own, whichever comes first.
    assert message["subject"] == f"{run.name} failed: INFEASIBLE"
    assert "kind: INFEASIBLE" in message["body"].splitlines()
    assert "3 nodes with 8 GPUs" in message["body"]


def test_a_run_whose_process_is_killed_is_notified(scene: Scene) -> None:
    run = scene.pool.submit(scene.pool.spec(lasts_s=60))
    run.until_running()
    run.kill_flow()

    message = scene.message_of(run.name)

    assert message["subject"] == f"{run.name} failed: Crashed"


def test_a_long_wait_is_notified_and_one_that_was_admitted_is_not(scene: Scene) -> None:
    pool = scene.pool
    pool.hold({"n1": 8})
    second = pool.hold({"n2": 8})
    admitted = pool.submit(pool.spec(gpus=1, lasts_s=60))
    waiting = pool.submit(pool.spec(gpus=8))
    about = f"prefect.flow-run.{waiting.flow_run_id}"
    until(lambda: scene.events("muster.run.waiting", about=about), "it is told that it waits")
    pool.set_state(second, "COMPLETED")
    admitted.until_state("RUNNING")

    message = scene.message_of(waiting.name)

    # It had begun to wait before the other one. Which may say whom it waits for.
    assert scene.sink.of(f"run: {admitted.name}") == []
    assert "still waits" in message["subject"]
    assert "asks for 1 node with 8 GPUs" in message["body"]
    scene.until_fired(WAITS, about)


def test_a_fleet_under_its_floor_is_notified(scene: Scene) -> None:
    stay = "import time; print('up', flush=True); time.sleep(600)"
    server = [sys.executable, str(DUMMY), "--port", "${server.port}", "--rank", "${server.rank}"]
    run = scene.pool.submit(
        {
            "name": "fleet",
            "workload": "grpo",
            "components": {
                "rollout": {
                    "backend": "command",
                    "engines": 2,
                    "command": server,
                    "recovery": {"min_active": 2},
                    "stop": {"grace_s": 2},
                },
                "trainer": {"command": [sys.executable, "-c", stay], "ready": {"log": "up"}},
            },
        }
    )
    run.until_running()
    started = [one for one in run.events() if one["event"] == "rollout.server.started"]
    port = int(started[0]["url"].rpartition(":")[2])
    for listener in listeners(port):
        os.kill(listener.pid, signal.SIGKILL)

    message = scene.message_of(f"{run.name}: 1 of 2 engines serve")

    assert "floor: 2" in message["body"]
    scene.until_fired(FLOOR, f"prefect.flow-run.{run.flow_run_id}")
    run.until_state("FAILED")
    names = [one["event"] for one in scene.events(about=f"prefect.flow-run.{run.flow_run_id}")]
    assert {"muster.rollout.engine.failed", "muster.rollout.degraded"} <= set(names)
    # What the end of the run takes down has not failed.
    assert names.count("muster.rollout.engine.failed") == 1


def test_a_node_that_is_drained_by_the_command_is_notified(scene: Scene) -> None:
    command = [sys.executable, "-m", "tasks.command", "queue", "drain", "n1"]
    done = subprocess.run(
        command, cwd=ROOT, env=scene.pool.ground.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    message = scene.message_of("Node n1 was drained")

    assert "pool: gang" in message["body"] and "undrain n1" in message["body"]
    scene.until_fired(DRAINED, "muster.node.n1")
    scene.pool.change()


def test_what_was_changed_on_the_server_is_kept_until_it_is_replaced(
    scene: Scene, folder: Path, client_of: Callable[[str], SyncPrefectClient]
) -> None:
    with client_of(scene.pool.server.api) as client:
        (theirs,) = client.read_automations_by_name(WAITS)
        (off,) = client.read_automations_by_name(DRAINED)

        def applied(**options: bool) -> dict[str, str]:
            return {one.name: one.what for one in apply(client, folder, **options)}

        untouched = applied()
        theirs.trigger.within = theirs.trigger.within * 2  # type: ignore[union-attr]
        # As the UI sends it.
        content = theirs.model_dump(exclude={"id", "owner_resource"})
        client.update_automation(theirs.id, AutomationCore.model_validate(content))
        client.pause_automation(off.id)
        kept = applied()
        replaced = applied(replace=True)
        (now,) = client.read_automations_by_name(WAITS)
        (still_off,) = client.read_automations_by_name(DRAINED)
        client.resume_automation(off.id)

    assert set(untouched.values()) == {"as it was"}
    assert kept == {**untouched, WAITS: "kept"}
    assert replaced == {**untouched, WAITS: "updated"}
    assert now.trigger.within.total_seconds() == LONG_S  # type: ignore[union-attr]
    assert not still_off.enabled


def test_without_a_block_the_firing_is_in_the_feed_and_with_one_it_notifies(
    tmp_path: Path, scene: Scene, client_of: Callable[[str], SyncPrefectClient]
) -> None:
    source = (FOLDER / "node-drained.yaml").read_text().replace(DRAINED, "theirs")
    (tmp_path / "theirs.yaml").write_text(source)
    api = scene.pool.server.api
    with client_of(api) as client:
        block = client.request(
            "GET",
            "/block_types/slug/{slug}/block_documents/name/{block_document_name}",
            path_params={"slug": "custom-webhook", "block_document_name": "muster"},
        ).json()["id"]
        client.delete_block_document(block)
        created = [one.what for one in apply(client, tmp_path)]
        command = [sys.executable, "-m", "tasks.command", "queue", "drain", "n2"]
        subprocess.run(command, cwd=ROOT, env=scene.pool.ground.env, check=True)
        fired = scene.until_fired("theirs", "muster.node.n2")
        save_block(api, scene.url)
        updated = [one.what for one in apply(client, tmp_path)]
        (now,) = client.read_automations_by_name("theirs")
        client.delete_automation(now.id)
    scene.pool.change()

    assert created == ["created"] and fired
    assert updated == ["updated"]
    assert [action.type for action in now.actions] == ["send-notification"]
