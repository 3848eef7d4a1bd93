"""`python -m flows.train`: exit codes, states and files of a run, and no leftover process."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.prefect_api import send_request
from tests.support.saving_component import has_saved, saving_spec, until_training

STAY = "import time; time.sleep(600)"
#: A program that ignores SIGTERM and starts a daemon, which clears its environment.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for name in list(os.environ):
            del os.environ[name]
print("up", flush=True)
while True:
    time.sleep(1)
"""


def test_run_with_a_successful_trainer_completes(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    run = start_run(build_gang_spec("print('trained')", tags=["demo", "night"]))

    assert run.wait() == 0, run.text()
    record = run.record()
    flow_run = run.flow_run()
    assert record["state"] == "completed"
    assert re.fullmatch(r"trial-grpo-\d{8}-\d{6}-[0-9a-f]{8}", record["run_id"])
    assert flow_run["name"] == record["run_id"] == run.directory.name
    assert flow_run["state"]["type"] == "COMPLETED"
    assert [attempt["state"] for attempt in record["attempts"]] == ["completed"]
    assert record["attempts"][0]["failure"] is None
    [process] = set(flow_run["tags"]) - {"demo", "night"}
    assert re.fullmatch(rf"process:.+:{run.process.pid}:\d+", process)
    assert run.pids() == []


@pytest.mark.thorough
def test_concurrency_limit_of_a_tag_does_not_delay_the_task_runs(
    api: str, start_run: Callable, build_gang_spec: Callable
) -> None:
    # A concurrency limit of 0 makes Prefect block every task run with the tag `held`. The run must
    # still complete, because Muster does not pass the tags of the run to its task runs.
    send_request("POST", f"{api}/concurrency_limits/", {"tag": "held", "concurrency_limit": 0})

    run = start_run(build_gang_spec("print('trained')", tags=["held"]))

    assert run.wait() == 0
    assert "held" in run.flow_run()["tags"]
    assert not any(step["tags"] for step in run.task_runs())


def test_record_events_and_files_of_a_run_have_their_fixed_form(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    run = start_run(build_gang_spec("import time; time.sleep(1)"))

    assert run.wait() == 0, run.text()
    attempt = run.directory / "attempt-01"
    assert {"spec.yaml", "events.jsonl", "api.log", "trainer.log", "environment.log"} <= {
        path.name for path in attempt.iterdir()
    }
    [entry] = run.record()["attempts"]
    assert list(entry["components"]) == ["api", "trainer", "environment"]
    for component in entry["components"].values():
        assert component["started_at"] <= component["ready_at"] <= component["ended_at"]
    names = [event["event"] for event in run.events()]
    assert names.index("teardown.begun") < names.index("teardown.ended")
    stopped = [
        event["component"] for event in run.events() if event["event"] == "component.stopped"
    ]
    assert stopped == ["environment", "trainer", "api"]
    steps = [task_run["name"] for task_run in run.task_runs()]
    starts = ["start-api", "start-trainer", "start-environment"]
    assert steps == ["admit", *starts, "monitor", "teardown"]


def test_failed_run_names_the_cause(start_run: Callable, build_gang_spec: Callable) -> None:
    run = start_run(
        build_gang_spec("print('loading', flush=True); import os, signal; os.kill(os.getpid(), 11)")
    )

    assert run.wait() == 1, run.text()
    record = run.record()
    failure = record["attempts"][0]["failure"]
    assert record["state"] == "failed"
    assert (failure["component"], failure["signal"]) == ("trainer", "SIGSEGV")
    assert "killed by SIGSEGV" in failure["message"]
    assert "loading" in failure["log_tail"]
    state = run.flow_run()["state"]
    assert state["type"] == "FAILED"
    assert state["message"].startswith(f"{failure['kind']}: ")
    assert (
        "SIGSEGV" in run.text() and str(run.directory / "attempt-01" / "trainer.log") in run.text()
    )


def test_run_with_an_invalid_spec_does_not_start(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    spec = build_gang_spec(STAY, succes={"step": 3})
    spec["components"]["api"]["command"] = ["no-such-program-here"]
    spec["components"]["trainer"]["ready"] = {"http": "http://127.0.0.1:${trainr.port}/"}

    run = start_run(spec)

    assert run.wait() == 2
    for path in ("succes", "components.trainer.ready.http"):
        assert path in run.text()
    assert not run.home.exists()


@pytest.mark.thorough
def test_missing_program_is_reported_before_the_start(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    spec = build_gang_spec(STAY)
    spec["components"]["environment"]["command"] = ["python", "no/such/environment.py", "serve"]

    run = start_run(spec)

    assert run.wait() == 2
    assert "components.environment.command" in run.text()
    assert not run.home.exists()


@pytest.mark.parametrize(
    "signum",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.thorough),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.thorough),
    ],
)
def test_signal_ends_the_run_as_cancelled(
    start_run: Callable, build_gang_spec: Callable, signum: signal.Signals
) -> None:
    run = start_run(build_gang_spec(STAY))
    run.until_event("attempt.ready")

    run.process.send_signal(signum)

    assert run.wait() == 130, run.text()
    assert run.record()["state"] == "cancelled"
    assert run.record()["attempts"][0]["failure"] is None
    assert run.flow_run()["state"]["type"] == "CANCELLED"
    assert run.pids() == []


@pytest.mark.thorough
def test_second_interrupt_skips_the_grace_periods(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    spec = build_gang_spec(STUBBORN)
    spec["components"]["trainer"] |= {"ready": {"log": "up"}, "stop": {"grace_s": 600}}
    run = start_run(spec)
    run.until_event("attempt.ready")

    run.process.send_signal(signal.SIGINT)
    run.until_event("component.stopped", "environment")
    run.process.send_signal(signal.SIGINT)

    assert run.wait() == 130, run.text()
    assert run.record()["state"] == "cancelled"
    assert run.pids() == []


def test_cancel_of_a_directly_started_run_needs_no_worker(
    start_run: Callable, build_gang_spec: Callable, api: str
) -> None:
    run = start_run(build_gang_spec(STAY))
    run.until_event("attempt.ready")

    cancelling = {"type": "CANCELLING", "name": "Cancelling"}
    url = f"{api}/flow_runs/{run.record()['flow_run_id']}/set_state"
    send_request("POST", url, {"state": cancelling})

    assert run.wait() == 130, run.text()
    assert run.record()["state"] == "cancelled"
    assert run.flow_run()["state"]["type"] == "CANCELLED"
    assert run.pids() == []


def test_component_can_save_although_the_cancel_arrives_twice(
    start_run: Callable, tmp_path: Path, api: str
) -> None:
    saved_file = tmp_path / "saved.txt"
    run = start_run(saving_spec(saved_file, save_s=3))
    until_training(saved_file)

    url = f"{api}/flow_runs/{run.record()['flow_run_id']}/set_state"
    send_request("POST", url, {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 130, run.text()
    assert has_saved(saved_file)
    assert run.record()["attempts"][0]["components"]["trainer"]["exit_code"] == 0


@pytest.mark.thorough
def test_secrets_appear_in_no_file_that_muster_writes(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    secret = "sk-very-secret-1234567890"
    spec = build_gang_spec(
        "import os; key = os.environ['WANDB_API_KEY']; print(key); raise RuntimeError(key)",
        env={"WANDB_API_KEY": secret},
    )

    run = start_run(spec)

    assert run.wait() == 1, run.text()
    muster_files = [run.directory / "run.json", *(run.directory / "attempt-01").glob("*.jsonl")]
    muster_files.append(run.directory / "attempt-01" / "spec.yaml")
    for path in muster_files:
        assert secret not in path.read_text(), path
    assert secret not in run.text()
    assert secret not in str(run.flow_run()["state"])


@pytest.mark.thorough
def test_run_without_a_server_uses_a_temporary_server(
    start_run: Callable, build_gang_spec: Callable
) -> None:
    run = start_run(build_gang_spec("print('trained')"), server=None)

    assert run.wait(120) == 0, run.text()
    assert run.record()["state"] == "completed"


def test_unreachable_server_is_named(start_run: Callable, build_gang_spec: Callable) -> None:
    run = start_run(build_gang_spec(STAY), server="http://127.0.0.1:9/api")

    assert run.wait() == 1
    assert "http://127.0.0.1:9/api" in run.text() and "muster up" in run.text()
    assert not (run.home / "runs").exists()
