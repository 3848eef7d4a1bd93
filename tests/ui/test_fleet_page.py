"""A fleet that loses a server, seen in the UI."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import yaml

from tests.ui.browsing import Ui
from tests.ui.ui_stack import ROOT, UiStack, until

SPEC = ROOT / "deployments" / "runs" / "quickstart-fleet.yaml"


def test_a_server_that_dies_is_a_word_in_the_message_and_a_task_run(stack: UiStack, ui: Ui) -> None:
    spec = yaml.safe_load(SPEC.read_text())
    # A server that comes back late is seen to be away.
    spec["components"]["rollout"]["recovery"] |= {"backoff_s": 20, "max_backoff_s": 20}
    run = stack.run(spec, deployment="train/quickstart-fleet")
    try:
        running = stack.until_state(run, "Running", saying="running:")
        [first, *_] = until(lambda: servers_of(str(running["name"])), "servers of the fleet")

        first.send_signal(signal.SIGKILL)

        degraded = stack.until_state(run, "Running", "Completed", saying="of 3")
        recovery = until(lambda: recovery_of(stack, run), "a task run for the recovery")
        assert recovery["name"].startswith("recover-rollout-")
        ui.open_run(run, "TaskRuns")
        ui.sees(recovery["name"])
        assert "of 3" in degraded["state"]["message"]
        stack.until_state(run, "Completed")
        ui.open_run(run, "Artifacts")
        ui.sees("step 60 of 60", "summary", "components")
    finally:
        stack.cancel(run)


def servers_of(run_id: str) -> list[psutil.Process]:
    """The inference servers of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            is_server = "deployments/quickstart/server.py" in process.cmdline()[1:2]
            if is_server and process.environ().get("MUSTER_RUN_ID") == run_id:
                found.append(process)
        except psutil.Error:
            continue
    return found


def recovery_of(stack: UiStack, run: str) -> dict[str, Any] | None:
    tasks = stack.ask("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return next((one for one in tasks if one["name"].startswith("recover-")), None)
