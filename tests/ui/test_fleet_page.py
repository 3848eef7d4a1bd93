"""A fleet that loses a server, as the UI shows it."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import yaml

from tests.ui.browsing import Ui
from tests.ui.ui_stack import ROOT, UiStack, wait_for

SPEC = ROOT / "deployments" / "runs" / "quickstart-fleet.yaml"


def test_death_of_a_server_appears_in_the_message_and_as_a_task_run(stack: UiStack, ui: Ui) -> None:
    spec = yaml.safe_load(SPEC.read_text())
    # With these values, a killed server restarts only after 20 s. Meanwhile, the test can see in
    # the UI that the server is missing.
    spec["components"]["rollout"]["recovery"] |= {"backoff_s": 20, "max_backoff_s": 20}
    # On a busy machine, the test may need some seconds to find and kill a server. With more steps,
    # the run does not complete before that.
    spec["progress"]["total"] = spec["success"]["step"] = 200
    run = stack.run(spec, deployment="train/quickstart-fleet")
    try:
        running = stack.until_state(run, "Running", saying="running:")
        [first_server, *_] = wait_for(
            lambda: find_servers(str(running["name"])), "the fleet has servers"
        )

        first_server.send_signal(signal.SIGKILL)

        degraded = stack.until_state(run, "Running", "Completed", saying="of 3")
        recovery = wait_for(lambda: find_recovery(stack, run), "the recovery has a task run")
        assert recovery["name"].startswith("recover-rollout-")
        ui.open_run(run, "TaskRuns")
        ui.sees(recovery["name"])
        assert "of 3" in degraded["state"]["message"]
        stack.until_state(run, "Completed")
        ui.open_run(run, "Artifacts")
        ui.sees("step 200 of 200", "summary", "components")
    finally:
        stack.cancel(run)


def find_servers(run_id: str) -> list[psutil.Process]:
    """Return the processes of a run's inference servers."""
    servers = []
    for process in psutil.process_iter():
        try:
            is_server = "deployments/quickstart/server.py" in process.cmdline()[1:2]
            if is_server and process.environ().get("MUSTER_RUN_ID") == run_id:
                servers.append(process)
        except psutil.Error:
            continue
    return servers


def find_recovery(stack: UiStack, run: str) -> dict[str, Any] | None:
    """Return the Prefect task run that recovers an inference engine, or None if there is none."""
    tasks = stack.ask("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return next((task_run for task_run in tasks if task_run["name"].startswith("recover-")), None)
