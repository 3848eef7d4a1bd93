"""A person changes the flow run of a working run, or deletes its flow run or its work queue.

The tests judge the runs by /proc, and by the files that the runs' own programs write.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.queue.grants import GRANT
from tasks.queue.pool_copies import variable_name
from tasks.queue.settings import settings_of
from tests.support.gang_pool import GangPool, Host, gang_pool
from tests.support.host_environment import ROOT, Run, wait_for
from tests.support.prefect_api import send_request

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

#: Time limit, in seconds, after a person has changed the state of a working run. Within this time,
#: the run must end, or Muster must correct the state.
WITHIN_S = 60.0
#: Delays between the end of a run's program and the cancellation of the run, in seconds.
CANCEL_DELAYS_S = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.2, 1.8)
#: Types of the final states of a flow run.
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
#: Types of the states in which a flow run does no work, because the flow run has no process yet or
#: is paused.
EARLIER = ("SCHEDULED", "PENDING", "PAUSED")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    with gang_pool(tmp_path_factory.mktemp("by-hand")) as pool:
        assert isinstance(pool.host_env, Host)
        pool.host_env.variables = {**pool.host_env.variables, "MUSTER_GPUS": "0-15"}
        pool.start_worker()
        yield pool


def force_state(run: Run, type: str) -> None:
    """Set the state of a run, as a person does with "Change state" in the Prefect UI."""
    path = f"/flow_runs/{run.flow_run_id}/set_state"
    run.host_env.post(path, force=True, state={"type": type})


def delete_flow_run(run: Run) -> None:
    send_request("DELETE", f"{run.host_env.api}/flow_runs/{run.flow_run_id}")


def read_queue(pool: GangPool) -> dict[str, float]:
    """Return the mapping from program name to number of used GPUs that `muster queue` shows."""
    command = (sys.executable, "-m", "tasks.command", "queue", "--json")
    env = pool.host_env.env
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    holders: dict[str, float] = {}
    for node in json.loads(done.stdout)["nodes"]:
        holders |= {**node["held"], **node["other_holders"]}
    return holders


def start_runs(pool: GangPool, count: int) -> list[Run]:
    runs = [pool.submit(pool.spec(lasts_s=900)) for _ in range(count)]
    return [run.wait_until_running() for run in runs]


def test_run_ends_after_its_flow_run_got_a_final_state(pool: GangPool) -> None:
    runs = dict(zip(FINAL, start_runs(pool, len(FINAL)), strict=True))

    for type, run in runs.items():
        force_state(run, type)

    for type, run in runs.items():
        wait_for(lambda run=run: not run.pids(), f"the run set to {type} ends", WITHIN_S)
        wait_for(lambda run=run: run.state()[0] == "CANCELLED", f"{type} is corrected", WITHIN_S)
        record = run.record()
        assert record["state"] == "cancelled"
        assert (
            type == "CANCELLED" or f"set the flow run to {type.capitalize()}" in record["message"]
        )


def test_run_that_was_set_back_keeps_its_process_and_is_running_again(pool: GangPool) -> None:
    runs = dict(zip(EARLIER, start_runs(pool, len(EARLIER)), strict=True))
    pids = {type: run.pids() for type, run in runs.items()}
    grants = {type: run.flow_run()["labels"][GRANT] for type, run in runs.items()}

    for type, run in runs.items():
        force_state(run, type)

    for type, run in runs.items():
        wait_for(lambda run=run: run.state()[0] == "RUNNING", f"{type} is corrected", WITHIN_S)
        assert run.pids() == pids[type]
        assert len(run.record()["attempts"]) == 1
        assert run.flow_run()["labels"][GRANT] == grants[type]
    pool.cancel_all()
    for run in runs.values():
        assert run.pids() == []


def test_run_with_a_deleted_flow_run_is_named_until_it_has_ended(pool: GangPool) -> None:
    [run] = start_runs(pool, 1)
    name = run.name

    delete_flow_run(run)

    assert read_queue(pool) == {name: 1}
    pool.asked.clear()
    wait_for(lambda: not run.pids(), "the run of the deleted flow run ends", WITHIN_S)
    wait_for(lambda: run.record()["state"] == "cancelled", "the record of the run is cancelled")
    assert "deleted" in run.record()["message"]
    wait_for(lambda: name not in read_queue(pool), "its GPUs are free")


def test_cancel_in_the_last_moment_has_the_same_result_everywhere(pool: GangPool) -> None:
    runs = [pool.submit(pool.spec(lasts_s=12.0)) for _ in CANCEL_DELAYS_S]

    def cancel_after_the_end(run: Run, delay_s: float) -> None:
        run.wait_until_running()
        wait_for(lambda: "end" in [line["what"] for line in pool.read_lines_of(run)], "the end")
        time.sleep(delay_s)
        pool.cancel(run)

    with ThreadPoolExecutor(len(runs)) as threads:
        list(threads.map(cancel_after_the_end, runs, CANCEL_DELAYS_S))

    def has_same_result(run: Run) -> bool:
        is_over = not run.pids() and run.state()[0] in FINAL
        return is_over and run.state()[0].lower() == run.record()["state"]

    for run in runs:
        wait_for(lambda run=run: has_same_result(run), "server and record agree", WITHIN_S)
        result = run.record()["state"]
        summaries = run.host_env.post(
            "/artifacts/filter",
            artifacts={"key": {"any_": ["summary"]}, "flow_run_id": {"any_": [run.flow_run_id]}},
        )
        assert result in ("completed", "cancelled")
        assert [f"### {result.capitalize()}" in row["data"] for row in summaries] == [True]


def test_run_of_a_deleted_work_queue_starts_and_delays_no_other_run(pool: GangPool) -> None:
    [holder] = start_runs(pool, 1)
    whole_node = pool.spec(gpus=16, lasts_s=1)
    lost = pool.submit(whole_node, queue="idle")
    later = pool.submit(whole_node)
    wait_for(lambda: lost.flow_run()["state"]["name"] == "PendingResources", "the run waits")

    send_request("DELETE", f"{pool.host_env.api}/work_pools/gang/queues/idle")
    pool.cancel(holder)

    for run in (lost, later):
        wait_for(lambda run=run: run.state()[0] == "COMPLETED", "the run completes", 120)


def test_deleted_pool_gets_back_its_settings_and_its_holders_stay_named(pool: GangPool) -> None:
    [working] = start_runs(pool, 1)
    name = working.name
    pool.patch(concurrency_limit=5)
    pool.change(limits={"team": 4}, drained=("n9",))
    before = settings_of(pool.host_env.get("/work_pools/gang")["base_job_template"])

    def copy_is_written() -> bool:
        variables = pool.host_env.post("/variables/filter")
        copies = [row["value"] for row in variables if row["name"] == variable_name("gang")]
        return bool(copies) and copies[0]["settings"].get("limits") == {"team": 4}

    wait_for(copy_is_written, "the server has a copy of the settings")

    send_request("DELETE", f"{pool.host_env.api}/work_pools/gang")

    def is_restored() -> bool:
        assert read_queue(pool) == {name: 1}
        pools = {row["name"]: row for row in pool.host_env.post("/work_pools/filter")}
        if "gang" not in pools or pools["gang"]["concurrency_limit"] != 5:
            return False
        assert settings_of(pools["gang"]["base_job_template"]) == before
        return True

    wait_for(is_restored, "the settings are restored", 120)
    assert read_queue(pool) == {name: 1}
    pool.cancel_all()
    pool.create_deployment(pool.name)


def test_runs_of_a_deleted_pool_continue_and_start_after_a_new_set_up(pool: GangPool) -> None:
    [working] = start_runs(pool, 1)
    pids = working.pids()
    waiting = pool.submit(pool.spec(gpus=16, lasts_s=1))
    wait_for(lambda: waiting.flow_run()["state"]["name"] == "PendingResources", "the run waits")

    send_request("DELETE", f"{pool.host_env.api}/work_pools/gang")
    set_up = pool.host_env.start("-m", "deployments.stack.setup", log="set-up")
    code = set_up.wait(300)

    assert code == 0, pool.host_env.log("set-up")
    assert working.pids() == pids
    pool.cancel(working)
    wait_for(lambda: waiting.state()[0] == "COMPLETED", "the waiting run completes", 180)
