"""`python -m flows.train`: exit codes, states, files, and nothing left, whatever happens."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.prefect_api import ask
from tests.support.saving import has_saved, saving_spec, until_training

STAY = "import time; time.sleep(600)"
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


def test_a_run_that_did_its_work_completes(start_run: Callable, gang_of: Callable) -> None:
    run = start_run(gang_of("print('trained')", tags=["demo", "night"]))

    assert run.wait() == 0, run.text()
    record, flow_run = run.record(), run.flow_run()
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
def test_a_limit_of_one_of_its_tags_keeps_none_of_its_steps_waiting(
    api: str, start_run: Callable, gang_of: Callable
) -> None:
    # Prefect's own limit of task runs by tag; how many runs there are is for the queue to say.
    ask("POST", f"{api}/concurrency_limits/", {"tag": "held", "concurrency_limit": 0})

    run = start_run(gang_of("print('trained')", tags=["held"]))

    assert run.wait() == 0
    assert "held" in run.flow_run()["tags"]
    assert not any(step["tags"] for step in run.task_runs())


def test_what_it_leaves_has_the_fixed_form(start_run: Callable, gang_of: Callable) -> None:
    run = start_run(gang_of("import time; time.sleep(1)"))

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
    stopped = [e["component"] for e in run.events() if e["event"] == "component.stopped"]
    assert stopped == ["environment", "trainer", "api"]
    steps = [task_run["name"] for task_run in run.task_runs()]
    starts = ["start-api", "start-trainer", "start-environment"]
    assert steps == ["admit", *starts, "monitor", "teardown"]


def test_a_failed_run_names_the_cause(start_run: Callable, gang_of: Callable) -> None:
    run = start_run(
        gang_of("print('loading', flush=True); import os, signal; os.kill(os.getpid(), 11)")
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


def test_an_invalid_spec_starts_nothing(start_run: Callable, gang_of: Callable) -> None:
    spec = gang_of(STAY, succes={"step": 3})
    spec["components"]["api"]["command"] = ["no-such-program-here"]
    spec["components"]["trainer"]["ready"] = {"http": "http://127.0.0.1:${trainr.port}/"}

    run = start_run(spec)

    assert run.wait() == 2
    for path in ("succes", "components.trainer.ready.http"):
        assert path in run.text()
    assert not run.home.exists()


@pytest.mark.thorough
def test_a_missing_program_is_found_at_first(start_run: Callable, gang_of: Callable) -> None:
    spec = gang_of(STAY)
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
def test_a_signal_ends_the_run_as_cancelled(
    start_run: Callable, gang_of: Callable, signum: signal.Signals
) -> None:
    run = start_run(gang_of(STAY))
    run.until_event("attempt.ready")

    run.process.send_signal(signum)

    assert run.wait() == 130, run.text()
    assert run.record()["state"] == "cancelled"
    assert run.record()["attempts"][0]["failure"] is None
    assert run.flow_run()["state"]["type"] == "CANCELLED"
    assert run.pids() == []


@pytest.mark.thorough
def test_a_second_interrupt_waits_for_no_grace(start_run: Callable, gang_of: Callable) -> None:
    spec = gang_of(STUBBORN)
    spec["components"]["trainer"] |= {"ready": {"log": "up"}, "stop": {"grace_s": 600}}
    run = start_run(spec)
    run.until_event("attempt.ready")

    run.process.send_signal(signal.SIGINT)
    run.until_event("component.stopped", "environment")
    run.process.send_signal(signal.SIGINT)

    assert run.wait() == 130, run.text()
    assert run.record()["state"] == "cancelled"
    assert run.pids() == []


def test_a_cancel_needs_no_worker(start_run: Callable, gang_of: Callable, api: str) -> None:
    run = start_run(gang_of(STAY))
    run.until_event("attempt.ready")

    cancelling = {"type": "CANCELLING", "name": "Cancelling"}
    url = f"{api}/flow_runs/{run.record()['flow_run_id']}/set_state"
    ask("POST", url, {"state": cancelling})

    assert run.wait() == 130, run.text()
    assert run.record()["state"] == "cancelled"
    assert run.flow_run()["state"]["type"] == "CANCELLED"
    assert run.pids() == []


def test_a_cancel_that_arrives_twice_lets_a_component_save(
    start_run: Callable, tmp_path: Path, api: str
) -> None:
    file = tmp_path / "saved.txt"
    run = start_run(saving_spec(file, save_s=3))
    until_training(file)

    url = f"{api}/flow_runs/{run.record()['flow_run_id']}/set_state"
    ask("POST", url, {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 130, run.text()
    assert has_saved(file)
    assert run.record()["attempts"][0]["components"]["trainer"]["exit_code"] == 0


@pytest.mark.thorough
def test_secrets_appear_in_no_file_of_ours(start_run: Callable, gang_of: Callable) -> None:
    secret = "sk-very-secret-1234567890"
    spec = gang_of(
        "import os; key = os.environ['WANDB_API_KEY']; print(key); raise RuntimeError(key)",
        env={"WANDB_API_KEY": secret},
    )

    run = start_run(spec)

    assert run.wait() == 1, run.text()
    ours = [run.directory / "run.json", *(run.directory / "attempt-01").glob("*.jsonl")]
    ours.append(run.directory / "attempt-01" / "spec.yaml")
    for path in ours:
        assert secret not in path.read_text(), path
    assert secret not in run.text()
    assert secret not in str(run.flow_run()["state"])


@pytest.mark.thorough
def test_without_a_server_a_temporary_one_serves(start_run: Callable, gang_of: Callable) -> None:
    run = start_run(gang_of("print('trained')"), server=None)

    assert run.wait(120) == 0, run.text()
    assert run.record()["state"] == "completed"


def test_a_server_that_does_not_answer_is_named(start_run: Callable, gang_of: Callable) -> None:
    run = start_run(gang_of(STAY), server="http://127.0.0.1:9/api")

    assert run.wait() == 1
    assert "http://127.0.0.1:9/api" in run.text() and "muster up" in run.text()
    assert not (run.home / "runs").exists()
