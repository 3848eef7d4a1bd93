"""Reconcile on a real Prefect server: lost runs come to a true end, once, and no other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes.identity import host_name
from tasks.server import flow_runs
from tasks.server.server import prefect_server
from tasks.upkeep.reconcile import reconcile_host
from tests.faults.injections import mounted, why_no_disks
from tests.support.ground import Ground, Run, sleepers, until
from tests.support.prefect_api import ask
from tests.support.stage import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    """A server of this module's own: another's may have lost runs of other tests."""
    with temporary_settings(restore_defaults={PREFECT_API_URL}), prefect_server(password="") as url:
        yield url


@pytest.fixture
def ground(api: str, tmp_path: Path) -> Iterator[Ground]:
    """A host without any run."""
    ground = Ground(home=tmp_path / "home", api=api)
    yield ground
    ground.clear()
    # What was just killed is no lost run of the next test's.
    ground.reconcile_without_flow()


@pytest.fixture
def pending(ground: Ground) -> Callable[..., Run]:
    """Makes a flow run that was handed to a worker, which never came to start its process."""

    def make(worker: str) -> Run:
        flow = ground.post("/flows/", name="train")["id"]
        pool = {"name": "gang", "type": "process"}
        if not ground.post("/work_pools/filter", work_pools={"name": {"any_": ["gang"]}}):
            ground.post("/work_pools/", **pool)
        deployment = ground.post("/deployments/", name="t", flow_id=flow, work_pool_name="gang")
        path = f"/deployments/{deployment['id']}/create_flow_run"
        run = ground.post(path, parameters={"spec": sleepers()})["id"]
        set_state(ground, run, "PENDING")
        label(ground, run, worker)
        return Run(ground=ground, flow_run_id=run)

    return make


def set_state(ground: Ground, flow_run_id: str, kind: str, **more: Any) -> None:
    ground.post(f"/flow_runs/{flow_run_id}/set_state", state={"type": kind, **more})


def label(ground: Ground, flow_run_id: str, worker: str) -> None:
    url = f"{ground.api}/flow_runs/{flow_run_id}/labels"
    ask("PATCH", url, {"prefect.worker.name": worker})


@pytest.mark.thorough
def test_a_run_whose_flow_process_was_killed_comes_to_a_true_end(ground: Ground) -> None:
    before = len(ground.artifacts())
    run = ground.start_run(sleepers("api", "trainer")).until_running()
    pid = run.flow_pid()

    run.kill_flow()
    said = ground.reconcile()

    assert said == f"{host_name()}: 1 of 1 lost runs reconciled"
    assert run.pids() == []
    record = run.record()
    (attempt,) = record["attempts"]
    assert (record["state"], attempt["state"]) == ("failed", "failed")
    assert attempt["failure"]["rule"] == "flow-lost"
    assert all(component["ended_at"] for component in attempt["components"].values())
    kind, message = run.state()
    assert kind == "CRASHED"
    assert f"the flow process (pid {pid}) of this run was killed or lost" in message
    assert [e["event"] for e in run.events()][-3:] == ["reconcile.ended", "run.state", "run.state"]
    assert not (ground.home / "live" / run.name).exists()
    # What was done is told by an artifact and an event.
    artifacts = ground.artifacts()
    assert len(artifacts) == before + 1
    assert f"- {run.name}: " in artifacts[-1]["data"]
    (event,) = until(lambda: ground.events(run.flow_run_id), "the event")
    assert (event["payload"]["record"], event["payload"]["server"]) == ("failed", "Crashed")
    # A second time there is nothing to do.
    assert ground.reconcile_without_flow() == "nothing to do"
    assert ground.artifacts() == artifacts and run.record() == record


#: Its last page takes for ever.
UNTOLD = """
import threading
from tasks.train.reporter import Reporter
Reporter._send_last_page = lambda self: threading.Event().wait()
from flows.train import command
from tasks.show.arguments import run_alone
run_alone(command, "train")
"""


@pytest.mark.thorough
def test_a_run_killed_between_its_final_state_and_its_last_page_has_its_page_mended(
    ground: Ground,
) -> None:
    spec = sleepers("trainer")
    spec["components"]["trainer"] |= {"command": ["true"], "ready": None}
    run = ground.start_run(spec, "-c", UNTOLD)
    run.until_state("COMPLETED")
    record = run.record()

    run.kill_flow()
    ground.reconcile_without_flow()

    assert record["state"] == "completed" and run.record() == record
    of_run = {"flow_run_id": {"any_": [run.flow_run_id]}}
    shown = {one["key"]: one for one in ground.post("/artifacts/filter", artifacts=of_run)}
    assert {*shown} == {"summary", "components", "timeline", "attempts", "record"}
    assert shown["summary"]["description"].startswith("**completed**")
    assert run.state()[0] == "COMPLETED"
    assert not (ground.home / "live" / run.name).exists()


@pytest.mark.thorough
def test_two_at_once_do_it_once(ground: Ground) -> None:
    run = ground.start_run(sleepers()).until_running()
    run.kill_flow()

    with ThreadPoolExecutor(2) as pool:
        said = set(pool.map(lambda _: ground.reconcile(), range(2)))

    # The other found it claimed, or gone already.
    assert said == {f"{host_name()}: 1 of 1 lost runs reconciled", "nothing to do"}
    assert [e["event"] for e in run.events()].count("reconcile.ended") == 1
    assert run.state()[0] == "CRASHED"


@pytest.mark.thorough
def test_a_live_run_is_not_touched(ground: Ground) -> None:
    run = ground.start_run(sleepers()).until_running()
    before, record = run.flow_run(), run.record_path().read_bytes()
    pids = run.pids()

    said = ground.reconcile_without_flow()

    assert said == "nothing to do"
    assert run.flow_run()["state"] == before["state"]
    assert run.record_path().read_bytes() == record
    assert run.pids() == pids


@pytest.mark.thorough
def test_a_run_that_was_being_cancelled_is_cancelled(ground: Ground) -> None:
    run = ground.start_run(sleepers()).until_running()
    # The process first: alive, it would see the cancel itself.
    run.kill_flow()
    set_state(ground, run.flow_run_id, "CANCELLING")

    ground.reconcile_without_flow()

    assert run.state()[0] == "CANCELLED"
    assert run.record()["state"] == "cancelled"


@pytest.mark.thorough
def test_a_parked_run_is_not_touched(ground: Ground) -> None:
    """Its process is gone, as it should be: it left its entry, and a state to be waited in."""
    run = ground.start_run(sleepers()).until_running()
    set_state(ground, run.flow_run_id, "SCHEDULED", name="PendingResources")
    run.kill_flow()
    parked = run.flow_run()["state"]

    ground.reconcile_without_flow()

    assert run.flow_run()["state"] == parked
    # What it had left running is ended all the same, and the next attempt can begin.
    assert run.pids() == []
    assert run.record()["state"] == "pending_resources"


@pytest.mark.thorough
def test_with_the_server_away_the_run_is_finished_and_kept_in_mind(ground: Ground) -> None:
    run = ground.start_run(sleepers()).until_running()
    run.kill_flow()
    owner = ground.home / "live" / run.name / "owner.json"
    here = owner.read_text()
    owner.write_text(here.replace(ground.api, "http://127.0.0.1:9/api"))

    away = ground.reconcile_without_flow()
    state_meanwhile, record_meanwhile = run.state()[0], run.record()
    owner.write_text(here)
    back = ground.reconcile_without_flow()

    assert away == f"{host_name()}: 1 of 1 lost runs reconciled, 1 to be looked at again"
    assert (state_meanwhile, record_meanwhile["state"]) == ("RUNNING", "failed")
    assert back == f"{host_name()}: 1 of 1 lost runs reconciled"
    assert run.state()[0] == "CRASHED"
    assert run.record() == record_meanwhile
    assert not owner.exists()


@pytest.mark.thorough
def test_a_pending_flow_run_without_a_process_is_scheduled_again(
    ground: Ground, pending: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = pending(worker=host_name()), pending(worker="another-host")
    monkeypatch.setenv("MUSTER_HOME", str(ground.home))
    with temporary_settings({PREFECT_API_URL: ground.api}):
        fresh = reconcile_host()
        # Rather than to wait for it; the clock of the server has whole seconds only.
        monkeypatch.setattr(flow_runs, "_SETTLED_AFTER", timedelta(seconds=-2))

        settled = reconcile_host()

    assert fresh.runs == ()
    assert [run.name for run in settled.runs] == [ours.name]
    assert ours.state()[0] == "SCHEDULED"
    assert other.state()[0] == "PENDING"


@pytest.mark.thorough
def test_a_word_that_came_after_the_end_gives_way_to_the_record(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lets a flow run leave Completed."""
    run = ground.start_run(sleepers(code="print('up', flush=True); raise SystemExit"))
    run.until_state("COMPLETED")
    run.until_gone()
    until(lambda: ground._started[-1].poll() is not None, "its process has left")
    set_state(ground, run.flow_run_id, "RUNNING", message="step 3 of 4")
    monkeypatch.setenv("MUSTER_HOME", str(ground.home))
    monkeypatch.setattr(flow_runs, "_SETTLED_AFTER", timedelta(seconds=-2))

    with temporary_settings({PREFECT_API_URL: ground.api}):
        found = reconcile_host()

    assert [(one.name, one.server) for one in found.runs] == [(run.name, "Completed")]
    kind, message = run.state()
    assert (kind, message) == ("COMPLETED", run.record()["message"])


@pytest.mark.thorough
def test_a_run_that_ends_on_a_full_disk_says_why_wherever_it_is_asked(
    api: str, tmp_path: Path
) -> None:
    options = ("-t", "tmpfs", "-o", "size=8m", "none")
    if why := why_no_disks(lambda place: mounted(place, *options)):
        pytest.skip(why)
    with mounted(tmp_path / "disk", *options):
        ground = Ground(home=tmp_path / "disk" / "home", api=api)
        try:
            run = ground.start_run(sleepers("api", "trainer")).until_running()
            pid = run.record()["attempts"][0]["components"]["trainer"]["pid"]
            name, flow, filler = run.name, run.flow_pid(), tmp_path / "disk" / "filler"
            with filler.open("wb", buffering=0) as f, suppress(OSError):
                while f.write(b"x" * 4096):
                    pass

            os.kill(pid, signal.SIGKILL)
            said = run.until_state("FAILED")
            run.until_gone()
            filler.unlink()
            until(lambda: not is_alive(flow), "its process has left")
            ground.reconcile_without_flow()

            assert "trainer" in said and "SIGKILL" in said
            record = run.record()
            assert (record["state"], run.state()[0]) == ("failed", "FAILED")
            failure = record["attempts"][-1]["failure"]
            assert (failure["component"], failure["signal"]) == ("trainer", "SIGKILL")
            assert not (ground.home / "live" / name).exists()
        finally:
            ground.clear()


#: As a worker's process does.
START_AGAIN = """
import sys
from uuid import UUID
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort
from prefect.flow_engine import run_flow
from flows.train import train
with get_client(sync_client=True) as client:
    flow_run = client.read_flow_run(UUID(sys.argv[1]))
try:
    run_flow(train, flow_run=flow_run, parameters=flow_run.parameters, return_type="state")
except Abort as error:
    print("left:", error)
"""


@pytest.mark.thorough
def test_a_flow_run_that_is_started_twice_is_left_to_the_first(ground: Ground) -> None:
    run = ground.start_run(sleepers("api", "trainer")).until_running()
    first = run.flow_pid()

    again = ground.start("-c", START_AGAIN, run.flow_run_id, log="again")

    assert again.wait(60) == 0, ground.log("again")
    assert f"left: another process of this machine runs {run.name}" in ground.log("again")
    assert run.state()[0] == "RUNNING"
    assert run.flow_pid() == first
    os.kill(first, signal.SIGTERM)
    run.until_state("CANCELLED")


@pytest.mark.thorough
def test_a_run_of_another_host_is_left_to_it(ground: Ground, pending: Callable[..., Run]) -> None:
    """Each has a MUSTER_HOME of its own; this one comes back, and finds what it had begun."""
    run = pending(worker=host_name())
    ground.start("-c", START_AGAIN, run.flow_run_id, log="here")
    run.until_running().kill_flow()
    label(ground, run.flow_run_id, worker="another-host")

    meanwhile = ground.reconcile_without_flow()
    state, record = run.state()[0], run.record()
    there = {**record, "state": "completed", "message": "done there"}
    ground.post(
        "/artifacts/",
        key="record",
        flow_run_id=run.flow_run_id,
        data=f"```\n{json.dumps(there)}\n```",
    )
    set_state(ground, run.flow_run_id, "COMPLETED")
    afterwards = ground.reconcile_without_flow()

    assert meanwhile == f"{host_name()}: 1 of 1 lost runs reconciled"
    assert run.pids() == []
    assert (state, record["state"]) == ("RUNNING", "pending_resources")
    assert record["message"].startswith("given to another-host since: the flow process")
    assert record["attempts"][0]["failure"]["rule"] == "flow-lost"
    assert afterwards == "nothing to do"
    assert run.record()["message"] == "done there"
    assert list(ground.home.glob("live/*")) == list(ground.home.glob("parked/*")) == []


@pytest.mark.thorough
def test_the_runs_of_a_host_that_is_given_up_are_finished_from_another_one(
    ground: Ground, pending: Callable[..., Run]
) -> None:
    """They share a MUSTER_HOME, and the host went down with its runs."""
    run = pending(worker="lost-host")
    ground.start("-c", START_AGAIN, run.flow_run_id, log="there")
    run.until_running().kill_flow()
    run.until_gone()
    owner = ground.home / "live" / run.name / "owner.json"
    here = json.loads(owner.read_text())
    there = {"host": "lost-host", "process": here["process"] | {"boot_id": "another"}}
    owner.write_text(json.dumps(here | there))

    of_this_host = ground.reconcile_without_flow()
    said = ground.ask("tasks.command", "reconcile", "--lost-host", "lost-host")

    assert of_this_host == "nothing to do"
    assert said.splitlines()[-1] == "lost-host: 1 of 1 lost runs reconciled"
    assert run.state()[0] == "CRASHED"
    assert run.record()["state"] == "failed"
    assert not owner.exists()
