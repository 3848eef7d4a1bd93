"""`muster reconcile` finishes lost runs once, and changes no other run of the Prefect server."""

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
from tests.support.host_environment import HostEnvironment, Run, make_sleeping_spec, wait_for
from tests.support.prefect_api import send_request
from tests.support.supervised_components import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    """Yield the address of a Prefect server for this module only.

    On a shared server, the tests could also find lost runs of other modules. A run is lost if its
    flow process has died.
    """
    with temporary_settings(restore_defaults={PREFECT_API_URL}), prefect_server(password="") as url:
        yield url


@pytest.fixture
def host_env(api: str, tmp_path: Path) -> Iterator[HostEnvironment]:
    """Yield a `HostEnvironment`: a simulated host, which has no runs yet."""
    host_env = HostEnvironment(home=tmp_path / "home", api=api)
    yield host_env
    host_env.clear()
    # A killed flow process leaves a lost run. Close the records of all lost runs now, so that the
    # next test does not find these runs.
    host_env.reconcile_without_flow()


@pytest.fixture
def pending(host_env: HostEnvironment) -> Callable[..., Run]:
    """Return a function that makes a flow run in the state PENDING.

    A worker has taken the flow run, but has not started a process for the flow run.
    """

    def make_pending_run(worker: str) -> Run:
        flow = host_env.post("/flows/", name="train")["id"]
        pool = {"name": "gang", "type": "process"}
        if not host_env.post("/work_pools/filter", work_pools={"name": {"any_": ["gang"]}}):
            host_env.post("/work_pools/", **pool)
        deployment = host_env.post("/deployments/", name="t", flow_id=flow, work_pool_name="gang")
        path = f"/deployments/{deployment['id']}/create_flow_run"
        run = host_env.post(path, parameters={"spec": make_sleeping_spec()})["id"]
        set_state(host_env, run, "PENDING")
        set_worker(host_env, run, worker)
        return Run(host_env=host_env, flow_run_id=run)

    return make_pending_run


def set_state(
    host_env: HostEnvironment, flow_run_id: str, state_type: str, **state_fields: Any
) -> None:
    """Give a flow run a state of this type on the Prefect server."""
    host_env.post(f"/flow_runs/{flow_run_id}/set_state", state={"type": state_type, **state_fields})


def set_worker(host_env: HostEnvironment, flow_run_id: str, worker: str) -> None:
    """Record on the Prefect server that the worker has taken the flow run."""
    url = f"{host_env.api}/flow_runs/{flow_run_id}/labels"
    send_request("PATCH", url, {"prefect.worker.name": worker})


@pytest.mark.thorough
def test_run_with_a_killed_flow_process_is_finished_completely(host_env: HostEnvironment) -> None:
    artifacts_before = len(host_env.artifacts())
    run = host_env.start_run(make_sleeping_spec("api", "trainer")).wait_until_running()
    pid = run.flow_pid()

    run.kill_flow()
    summary = host_env.reconcile()

    assert summary == f"{host_name()}: 1 of 1 lost runs reconciled"
    assert run.pids() == []
    record = run.record()
    (attempt,) = record["attempts"]
    assert (record["state"], attempt["state"]) == ("failed", "failed")
    assert attempt["failure"]["rule"] == "flow-lost"
    assert all(component["ended_at"] for component in attempt["components"].values())
    state_type, message = run.state()
    assert state_type == "CRASHED"
    assert f"the flow process (pid {pid}) of this run was killed or lost" in message
    assert [e["event"] for e in run.events()][-3:] == ["reconcile.ended", "run.state", "run.state"]
    assert not (host_env.home / "live" / run.name).exists()
    # The cleanup made an artifact and an event.
    artifacts = host_env.artifacts()
    assert len(artifacts) == artifacts_before + 1
    assert f"- {run.name}: " in artifacts[-1]["data"]
    (event,) = wait_for(
        lambda: host_env.events(run.flow_run_id), "the cleanup is reported as an event"
    )
    assert (event["payload"]["record"], event["payload"]["server"]) == ("failed", "Crashed")
    # Running `reconcile` again finds nothing to do.
    assert host_env.reconcile_without_flow() == "nothing to do"
    assert host_env.artifacts() == artifacts and run.record() == record


#: A training that hangs when it updates the run's page in the Prefect UI for the last time.
HANGS_AT_LAST_PAGE = """
import threading
from tasks.train.reporter import Reporter
Reporter._send_last_page = lambda self: threading.Event().wait()
from flows.train import command
from tasks.show.arguments import run_alone
run_alone(command, "train")
"""


@pytest.mark.thorough
def test_page_of_a_run_killed_before_its_last_update_is_completed(
    host_env: HostEnvironment,
) -> None:
    spec = make_sleeping_spec("trainer")
    spec["components"]["trainer"] |= {"command": ["true"], "ready": None}
    run = host_env.start_run(spec, "-c", HANGS_AT_LAST_PAGE)
    run.wait_for_state("COMPLETED")
    record = run.record()

    run.kill_flow()
    host_env.reconcile_without_flow()

    assert record["state"] == "completed" and run.record() == record
    artifact_filter = {"flow_run_id": {"any_": [run.flow_run_id]}}
    artifacts = {
        artifact["key"]: artifact
        for artifact in host_env.post("/artifacts/filter", artifacts=artifact_filter)
    }
    assert {*artifacts} == {"summary", "components", "timeline", "attempts", "record"}
    assert artifacts["summary"]["description"].startswith("**completed**")
    assert run.state()[0] == "COMPLETED"
    assert not (host_env.home / "live" / run.name).exists()


@pytest.mark.thorough
def test_simultaneous_reconciles_finish_a_run_once(host_env: HostEnvironment) -> None:
    run = host_env.start_run(make_sleeping_spec()).wait_until_running()
    run.kill_flow()

    with ThreadPoolExecutor(2) as pool:
        summaries = set(pool.map(lambda _: host_env.reconcile(), range(2)))

    # Only one of the two calls of `reconcile` finishes the run.
    assert summaries == {f"{host_name()}: 1 of 1 lost runs reconciled", "nothing to do"}
    assert [e["event"] for e in run.events()].count("reconcile.ended") == 1
    assert run.state()[0] == "CRASHED"


@pytest.mark.thorough
def test_live_run_is_not_changed(host_env: HostEnvironment) -> None:
    run = host_env.start_run(make_sleeping_spec()).wait_until_running()
    flow_run_before = run.flow_run()
    record = run.record_path().read_bytes()
    pids = run.pids()

    summary = host_env.reconcile_without_flow()

    assert summary == "nothing to do"
    assert run.flow_run()["state"] == flow_run_before["state"]
    assert run.record_path().read_bytes() == record
    assert run.pids() == pids


@pytest.mark.thorough
def test_lost_run_that_was_being_cancelled_becomes_cancelled(host_env: HostEnvironment) -> None:
    run = host_env.start_run(make_sleeping_spec()).wait_until_running()
    # Kill the flow process before the cancellation. A living flow process would end the run, and
    # leave no work for `reconcile`.
    run.kill_flow()
    set_state(host_env, run.flow_run_id, "CANCELLING")

    host_env.reconcile_without_flow()

    assert run.state()[0] == "CANCELLED"
    assert run.record()["state"] == "cancelled"


@pytest.mark.thorough
def test_run_that_waits_for_its_next_attempt_keeps_its_state(host_env: HostEnvironment) -> None:
    """The flow process was killed, and the flow run waits for its next attempt.

    The registry still has an entry of the run. `muster reconcile` must not change the state of the
    flow run.
    """
    run = host_env.start_run(make_sleeping_spec()).wait_until_running()
    set_state(host_env, run.flow_run_id, "SCHEDULED", name="PendingResources")
    run.kill_flow()
    state_before = run.flow_run()["state"]

    host_env.reconcile_without_flow()

    assert run.flow_run()["state"] == state_before
    # `reconcile` keeps the state, but ends leftover processes of the run. The leftover processes
    # could disturb the next attempt.
    assert run.pids() == []
    assert run.record()["state"] == "pending_resources"


@pytest.mark.thorough
def test_run_is_finished_without_the_server_and_reported_when_it_returns(
    host_env: HostEnvironment,
) -> None:
    run = host_env.start_run(make_sleeping_spec()).wait_until_running()
    run.kill_flow()
    owner = host_env.home / "live" / run.name / "owner.json"
    owner_content = owner.read_text()
    owner.write_text(owner_content.replace(host_env.api, "http://127.0.0.1:9/api"))

    summary_without_server = host_env.reconcile_without_flow()
    state_without_server = run.state()[0]
    record_without_server = run.record()
    owner.write_text(owner_content)
    summary_with_server = host_env.reconcile_without_flow()

    assert summary_without_server == f"{host_name()}: 1 of 1 lost runs reconciled, 1 still open"
    assert (state_without_server, record_without_server["state"]) == ("RUNNING", "failed")
    assert summary_with_server == f"{host_name()}: 1 of 1 lost runs reconciled"
    assert run.state()[0] == "CRASHED"
    assert run.record() == record_without_server
    assert not owner.exists()


@pytest.mark.thorough
def test_pending_flow_run_without_a_process_is_rescheduled(
    host_env: HostEnvironment, pending: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = pending(worker=host_name())
    other = pending(worker="another-host")
    monkeypatch.setenv("MUSTER_HOME", str(host_env.home))
    with temporary_settings({PREFECT_API_URL: host_env.api}):
        first_report = reconcile_host()
        # `reconcile` ignores a flow run whose state is younger than this limit. Lower the limit, so
        # that the test need not wait. A limit of zero is not low enough: the server rounds times to
        # whole seconds, so a new state may seem to come from the future.
        monkeypatch.setattr(flow_runs, "_SETTLED_AFTER", timedelta(seconds=-2))

        second_report = reconcile_host()

    assert first_report.runs == ()
    assert [run.name for run in second_report.runs] == [ours.name]
    assert ours.state()[0] == "SCHEDULED"
    assert other.state()[0] == "PENDING"


@pytest.mark.thorough
def test_state_set_after_the_end_is_corrected_from_the_record(
    host_env: HostEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Prefect server accepts another state after Completed. Muster must correct this state."""
    run = host_env.start_run(make_sleeping_spec(code="print('up', flush=True); raise SystemExit"))
    run.wait_for_state("COMPLETED")
    run.wait_until_gone()
    wait_for(lambda: host_env._started[-1].poll() is not None, "the flow process has ended")
    set_state(host_env, run.flow_run_id, "RUNNING", message="step 3 of 4")
    monkeypatch.setenv("MUSTER_HOME", str(host_env.home))
    monkeypatch.setattr(flow_runs, "_SETTLED_AFTER", timedelta(seconds=-2))

    with temporary_settings({PREFECT_API_URL: host_env.api}):
        report = reconcile_host()

    assert [(reconciled_run.name, reconciled_run.server) for reconciled_run in report.runs] == [
        (run.name, "Completed")
    ]
    state_type, message = run.state()
    assert (state_type, message) == ("COMPLETED", run.record()["message"])


@pytest.mark.thorough
def test_run_that_ends_on_a_full_disk_reports_its_failure_everywhere(
    api: str, tmp_path: Path
) -> None:
    options = ("-t", "tmpfs", "-o", "size=8m", "none")
    if reason := why_no_disks(lambda place: mounted(place, *options)):
        pytest.skip(reason)
    with mounted(tmp_path / "disk", *options):
        host_env = HostEnvironment(home=tmp_path / "disk" / "home", api=api)
        try:
            run = host_env.start_run(make_sleeping_spec("api", "trainer")).wait_until_running()
            pid = run.record()["attempts"][0]["components"]["trainer"]["pid"]
            name = run.name
            flow = run.flow_pid()
            filler = tmp_path / "disk" / "filler"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"x" * 4096):
                    pass

            os.kill(pid, signal.SIGKILL)
            message = run.wait_for_state("FAILED")
            run.wait_until_gone()
            filler.unlink()
            wait_for(lambda: not is_alive(flow), "the flow process has ended")
            host_env.reconcile_without_flow()

            assert "trainer" in message and "SIGKILL" in message
            record = run.record()
            assert (record["state"], run.state()[0]) == ("failed", "FAILED")
            failure = record["attempts"][-1]["failure"]
            assert (failure["component"], failure["signal"]) == ("trainer", "SIGKILL")
            assert not (host_env.home / "live" / name).exists()
        finally:
            host_env.clear()


#: Replacement for the program that a Prefect worker starts to execute a flow run.
START_FLOW_RUN = """
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
def test_second_process_of_a_flow_run_leaves_the_run_to_the_first(
    host_env: HostEnvironment,
) -> None:
    run = host_env.start_run(make_sleeping_spec("api", "trainer")).wait_until_running()
    first_pid = run.flow_pid()

    second_process = host_env.start("-c", START_FLOW_RUN, run.flow_run_id, log="again")

    assert second_process.wait(60) == 0, host_env.log("again")
    assert f"left: another process of this machine already runs {run.name}" in host_env.log("again")
    assert run.state()[0] == "RUNNING"
    assert run.flow_pid() == first_pid
    os.kill(first_pid, signal.SIGTERM)
    run.wait_for_state("CANCELLED")


@pytest.mark.thorough
def test_run_that_moved_to_another_host_is_left_to_that_host(
    host_env: HostEnvironment, pending: Callable[..., Run]
) -> None:
    """Another host, with its own MUSTER_HOME, continues a run whose first host was down.

    The first host is up again and runs `muster reconcile`. The command must not change the flow
    run.
    """
    run = pending(worker=host_name())
    host_env.start("-c", START_FLOW_RUN, run.flow_run_id, log="here")
    run.wait_until_running().kill_flow()
    set_worker(host_env, run.flow_run_id, worker="another-host")

    first_summary = host_env.reconcile_without_flow()
    state = run.state()[0]
    record = run.record()
    final_record = {**record, "state": "completed", "message": "done there"}
    host_env.post(
        "/artifacts/",
        key="record",
        flow_run_id=run.flow_run_id,
        data=f"```\n{json.dumps(final_record)}\n```",
    )
    set_state(host_env, run.flow_run_id, "COMPLETED")
    second_summary = host_env.reconcile_without_flow()

    assert first_summary == f"{host_name()}: 1 of 1 lost runs reconciled"
    assert run.pids() == []
    assert (state, record["state"]) == ("RUNNING", "pending_resources")
    assert record["message"].startswith("taken over by another-host: the flow process")
    assert record["attempts"][0]["failure"]["rule"] == "flow-lost"
    assert second_summary == "nothing to do"
    assert run.record()["message"] == "done there"
    assert list(host_env.home.glob("live/*")) == list(host_env.home.glob("parked/*")) == []


@pytest.mark.thorough
def test_runs_of_a_lost_host_are_finished_from_another_host(
    host_env: HostEnvironment, pending: Callable[..., Run]
) -> None:
    """Both hosts share a MUSTER_HOME. The lost host failed together with its runs."""
    run = pending(worker="lost-host")
    host_env.start("-c", START_FLOW_RUN, run.flow_run_id, log="there")
    run.wait_until_running().kill_flow()
    run.wait_until_gone()
    owner = host_env.home / "live" / run.name / "owner.json"
    owner_content = json.loads(owner.read_text())
    owner_on_lost_host = {
        "host": "lost-host",
        "process": owner_content["process"] | {"boot_id": "another"},
    }
    owner.write_text(json.dumps(owner_content | owner_on_lost_host))

    own_summary = host_env.reconcile_without_flow()
    output = host_env.run_module("tasks.command", "reconcile", "--lost-host", "lost-host")

    assert own_summary == "nothing to do"
    assert output.splitlines()[-1] == "lost-host: 1 of 1 lost runs reconciled"
    assert run.state()[0] == "CRASHED"
    assert run.record()["state"] == "failed"
    assert not owner.exists()
