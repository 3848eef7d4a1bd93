"""The automations of deployments/automations/ on a real Prefect server, which posts to a webhook.

`make thorough` runs these tests.
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
from tests.support.host_environment import ROOT, Run, Server, wait_for
from tests.support.web import serving

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(240)]

DUMMY = ROOT / "tests" / "support" / "dummy_server.py"
#: Waiting time, in seconds, after which the automations of these tests report a run. Prefect
#: accepts no time below 10 seconds.
LONG_S = 25
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FAILED, WAITS, FLOOR, DRAINED = (
    "Muster: a run failed",
    "Muster: a run waits for long",
    "Muster: a fleet is under its floor",
    "Muster: a node was drained",
)


class Sink:
    """A web server that stores the messages of Prefect's automations."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []

    def answer(self, _method: str, _path: str, body: bytes) -> tuple[int, None]:
        self.messages.append(json.loads(body))
        return 200, None

    def of(self, text: str) -> list[dict[str, str]]:
        """Return the messages whose subject or body contains a text."""
        return [
            message for message in self.messages if text in message["subject"] + message["body"]
        ]


@dataclass(kw_only=True)
class AutomationSetup:
    """A work pool with a worker, and a web server that receives notifications.

    The automations of the Prefect server send their messages to this web server.
    """

    pool: GangPool
    sink: Sink
    #: Address of the webhook.
    url: str

    def message_of(self, text: str) -> dict[str, str]:
        """Wait for a webhook message that contains a text, and return the first such message."""
        wait_for(lambda: self.sink.of(text), f"a message with {text}", 60)
        return self.sink.of(text)[0]

    def events(self, *names: str, about: str = "") -> list[dict[str, Any]]:
        """Return up to 50 events of the Prefect server, oldest first.

        Args:
            names: Names of the events. Without names, the method returns all events whose name
                begins with "muster.".
            about: Id of the Prefect resource that the events are about; empty for any resource.
        """
        event = {"name": list(names)} if names else {"prefix": ["muster."]}
        event_filter: dict[str, Any] = {"event": event, "order": "ASC"}
        if about:
            event_filter["resource"] = {"id": [about]}
        answer = self.pool.host_env.post("/events/filter", filter=event_filter, limit=50)
        return list(answer["events"])

    def until_fired(self, automation: str, resource: str) -> dict[str, Any]:
        """Wait for Prefect's event that a resource triggered an automation; return the event."""

        def find_event() -> Any:
            for event in self.events("prefect.automation.triggered"):
                resource_of_trigger = (event["payload"].get("triggering_event") or {}).get(
                    "resource", {}
                )
                is_automation = event["resource"]["prefect.resource.name"] == automation
                if is_automation and resource_of_trigger.get("prefect.resource.id") == resource:
                    return event
            return None

        fired: dict[str, Any] = wait_for(find_event, f"{automation} fires for {resource}", 60)
        return fired


@pytest.fixture(scope="module")
def client_of() -> Callable[[str], SyncPrefectClient]:
    """Return a function that takes the address of a Prefect server and returns a client."""

    def client(api: str) -> SyncPrefectClient:
        with temporary_settings({PREFECT_API_URL: api}):
            return get_client(sync_client=True)

    return client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the folder with Muster's automations, changed for a short waiting time.

    The copied automations report a run that has waited LONG_S seconds. The original automations
    report a run that has waited an hour.
    """
    folder = tmp_path_factory.mktemp("automations")
    for path in FOLDER.glob("*.yaml"):
        shutil.copy(path, folder)
    waiting = folder / "run-waiting.yaml"
    text = waiting.read_text()
    assert "within: 3600\n" in text
    waiting.write_text(text.replace("within: 3600\n", f"within: {LONG_S}\n"))
    return folder


@pytest.fixture(scope="module")
def automation_setup(
    tmp_path_factory: pytest.TempPathFactory,
    folder: Path,
    client_of: Callable[[str], SyncPrefectClient],
) -> Iterator[AutomationSetup]:
    server = Server(tmp_path_factory.mktemp("server"))
    host_env = host("n1", tmp_path_factory.mktemp("home"), server.api)
    pool = GangPool(host_env=host_env, server=server)
    sink = Sink()
    with serving(sink.answer) as url:
        try:
            server.start()
            save_block(server.api, url)
            with client_of(server.api) as client:
                assert {automation.what for automation in apply(client, folder)} == {"created"}
            pool.set_up()
            pool.start_worker()
            yield AutomationSetup(pool=pool, sink=sink, url=url)
        finally:
            host_env.clear()
            server.kill()


@pytest.fixture(autouse=True)
def empty_pool(automation_setup: AutomationSetup) -> Iterator[None]:
    yield
    automation_setup.pool.cancel_all()


def save_block(api: str, url: str) -> None:
    with temporary_settings({PREFECT_API_URL: api}):
        CustomWebhookNotificationBlock(
            name="sink", url=url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
        ).save("muster", overwrite=True, _sync=True)  # type: ignore[call-arg]


def submit_failing_run(pool: GangPool) -> Run:
    command = [sys.executable, "-c", f"import sys; sys.exit({OUT_OF_MEMORY!r})"]
    return pool.submit(
        {"name": "trial", "workload": "grpo", "components": {"trainer": {"command": command}}},
        tags=["team-a"],
    )


def test_failed_run_is_notified_once_with_kind_component_and_log(
    automation_setup: AutomationSetup,
) -> None:
    run = submit_failing_run(automation_setup.pool)
    run.wait_for_state("FAILED")

    message = automation_setup.message_of(run.name)

    assert message["subject"] == f"{run.name} failed: CUDA_OOM"
    lines = message["body"].splitlines()
    assert f"run: {run.name}" in lines and "kind: CUDA_OOM" in lines
    assert "component: trainer" in lines
    log = next(line.partition(":")[2] for line in lines if line.startswith("log: "))
    assert OUT_OF_MEMORY in Path(log.partition(":")[2]).read_text()
    assert lines[-1] == OUT_OF_MEMORY
    assert any(run.flow_run_id in line for line in lines if line.startswith("page: "))
    # Muster and the Prefect server each emit an event about the failure. Muster's event has already
    # caused a message to the user. The server's event must not cause a second message.
    fired = automation_setup.until_fired(FAILED, f"prefect.flow-run.{run.flow_run_id}")
    executed = wait_for(
        lambda: automation_setup.events(
            "prefect.automation.action.executed", about=fired["resource"]["prefect.resource.id"]
        ),
        "the feed of events names the action",
    )
    assert executed
    wait_for(
        lambda: automation_setup.events(
            "prefect.flow-run.Failed", about=f"prefect.flow-run.{run.flow_run_id}"
        ),
        "the server's own event of the failure",
    )
    assert len(automation_setup.sink.of(run.name)) == 1


def test_infeasible_run_is_notified_with_the_requested_resources(
    automation_setup: AutomationSetup,
) -> None:
    run = automation_setup.pool.submit(automation_setup.pool.spec(nodes=3, gpus=8))
    wait_for(lambda: run.name.startswith("gang-grpo-"), "the run has its name")

    message = automation_setup.message_of(run.name)

    # The message is caused by Muster's event or by the Prefect server's event. In both cases, the
    # message must have this content.
    assert message["subject"] == f"{run.name} failed: INFEASIBLE"
    assert "kind: INFEASIBLE" in message["body"].splitlines()
    assert "3 nodes with 8 GPUs" in message["body"]


def test_run_with_a_killed_flow_process_is_notified(automation_setup: AutomationSetup) -> None:
    run = automation_setup.pool.submit(automation_setup.pool.spec(lasts_s=60))
    run.wait_until_running()
    run.kill_flow()

    message = automation_setup.message_of(run.name)

    assert message["subject"] == f"{run.name} failed: Crashed"
    # The log of the flow run has the final message.
    automation_setup.pool.host_env.reconcile_without_flow()
    log_filter = {"flow_run_id": {"any_": [run.flow_run_id]}}
    logs = automation_setup.pool.host_env.post("/logs/filter", logs=log_filter)
    [end] = [line["message"] for line in logs if line["name"] == "muster.reconcile"]
    assert "of this run was killed or lost" in end


def test_only_the_run_that_still_waits_is_notified(automation_setup: AutomationSetup) -> None:
    pool = automation_setup.pool
    pool.hold({"n1": 8})
    second = pool.hold({"n2": 8})
    admitted = pool.submit(pool.spec(gpus=1, lasts_s=60))
    waiting = pool.submit(pool.spec(gpus=8))
    about = f"prefect.flow-run.{waiting.flow_run_id}"
    wait_for(
        lambda: automation_setup.events("muster.run.waiting", about=about),
        "Muster reports that the run waits",
    )
    pool.set_state(second, "COMPLETED")
    admitted.wait_for_state("RUNNING")

    message = automation_setup.message_of(waiting.name)

    # The admitted run has its GPUs, so there must be no message about this run. The message about
    # the waiting run may still mention the admitted run.
    assert automation_setup.sink.of(f"run: {admitted.name}") == []
    assert "still waits" in message["subject"]
    assert "needs 1 node with 8 GPUs" in message["body"]
    automation_setup.until_fired(WAITS, about)


def test_fleet_below_min_active_is_notified(automation_setup: AutomationSetup) -> None:
    stay = "import time; print('up', flush=True); time.sleep(600)"
    server = [sys.executable, str(DUMMY), "--port", "${server.port}", "--rank", "${server.rank}"]
    run = automation_setup.pool.submit(
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
    run.wait_until_running()
    started = [event for event in run.events() if event["event"] == "rollout.server.started"]
    port = int(started[0]["url"].rpartition(":")[2])
    for listener in listeners(port):
        os.kill(listener.pid, signal.SIGKILL)

    message = automation_setup.message_of(f"{run.name}: 1 of 2 engines serve")

    assert "floor: 2" in message["body"]
    automation_setup.until_fired(FLOOR, f"prefect.flow-run.{run.flow_run_id}")
    run.wait_for_state("FAILED")
    names = [
        event["event"]
        for event in automation_setup.events(about=f"prefect.flow-run.{run.flow_run_id}")
    ]
    assert {"muster.rollout.engine.failed", "muster.rollout.degraded"} <= set(names)
    # Engines that stop because the run ends are not reported as failed.
    assert names.count("muster.rollout.engine.failed") == 1


def test_node_drained_by_the_command_is_notified(automation_setup: AutomationSetup) -> None:
    command = [sys.executable, "-m", "tasks.command", "queue", "drain", "n1"]
    done = subprocess.run(
        command, cwd=ROOT, env=automation_setup.pool.host_env.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    message = automation_setup.message_of("Node n1 was drained")

    assert "pool: gang" in message["body"] and "undrain n1" in message["body"]
    automation_setup.until_fired(DRAINED, "muster.node.n1")
    automation_setup.pool.change()


def test_automation_changed_on_the_server_is_kept_until_it_is_replaced(
    automation_setup: AutomationSetup, folder: Path, client_of: Callable[[str], SyncPrefectClient]
) -> None:
    with client_of(automation_setup.pool.server.api) as client:
        (changed,) = client.read_automations_by_name(WAITS)
        (disabled,) = client.read_automations_by_name(DRAINED)

        def apply_folder(**options: bool) -> dict[str, str]:
            return {
                automation.name: automation.what for automation in apply(client, folder, **options)
            }

        results_before = apply_folder()
        changed.trigger.within = changed.trigger.within * 2  # type: ignore[union-attr]
        # Change the automation in the same way as a person does in Prefect's UI.
        content = changed.model_dump(exclude={"id", "owner_resource"})
        client.update_automation(changed.id, AutomationCore.model_validate(content))
        client.pause_automation(disabled.id)
        results_after_change = apply_folder()
        results_of_replace = apply_folder(replace=True)
        (restored,) = client.read_automations_by_name(WAITS)
        (still_disabled,) = client.read_automations_by_name(DRAINED)
        client.resume_automation(disabled.id)

    assert set(results_before.values()) == {"as it was"}
    assert results_after_change == {**results_before, WAITS: "kept"}
    assert results_of_replace == {**results_before, WAITS: "updated"}
    assert restored.trigger.within.total_seconds() == LONG_S  # type: ignore[union-attr]
    assert not still_disabled.enabled


def test_automation_without_a_block_only_fires_and_with_a_block_also_notifies(
    tmp_path: Path, automation_setup: AutomationSetup, client_of: Callable[[str], SyncPrefectClient]
) -> None:
    source = (FOLDER / "node-drained.yaml").read_text().replace(DRAINED, "theirs")
    (tmp_path / "theirs.yaml").write_text(source)
    api = automation_setup.pool.server.api
    with client_of(api) as client:
        block = client.request(
            "GET",
            "/block_types/slug/{slug}/block_documents/name/{block_document_name}",
            path_params={"slug": "custom-webhook", "block_document_name": "muster"},
        ).json()["id"]
        client.delete_block_document(block)
        created = [automation.what for automation in apply(client, tmp_path)]
        command = [sys.executable, "-m", "tasks.command", "queue", "drain", "n2"]
        subprocess.run(command, cwd=ROOT, env=automation_setup.pool.host_env.env, check=True)
        fired = automation_setup.until_fired("theirs", "muster.node.n2")
        save_block(api, automation_setup.url)
        updated = [automation.what for automation in apply(client, tmp_path)]
        (automation,) = client.read_automations_by_name("theirs")
        client.delete_automation(automation.id)
    automation_setup.pool.change()

    assert created == ["created"] and fired
    assert updated == ["updated"]
    assert [action.type for action in automation.actions] == ["send-notification"]
