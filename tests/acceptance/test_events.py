"""The events of a run on its Prefect server, as automations and the UI receive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.conftest import Run, python
from tests.support.host_environment import wait_for
from tests.support.prefect_api import send_request

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-of-the-hub"


def read_muster_events(run: Run) -> list[dict[str, Any]]:
    """Return the events about the run that Muster has sent to the Prefect server, oldest first."""
    about = f"prefect.flow-run.{run.record()['flow_run_id']}"
    event_filter = {"event": {"prefix": ["muster."]}, "resource": {"id": [about]}, "order": "ASC"}
    events: list[dict[str, Any]] = send_request(
        "POST", f"{run.api}/events/filter", {"filter": event_filter}
    )["events"]
    return events


def test_events_describe_a_failed_run_without_secrets(start_run: Callable[..., Run]) -> None:
    crash = "import os, sys; sys.exit('CUDA out of memory, token ' + os.environ['HF_TOKEN'])"
    run = start_run(
        {
            "name": "trial",
            "workload": "grpo",
            "tags": ["team-a"],
            "env": {"HF_TOKEN": SECRET},
            "components": {
                "api": {
                    "command": python("import time; print('up', flush=True); time.sleep(600)"),
                    "ready": {"log": "up"},
                },
                "trainer": {"command": python(crash), "ready": {"log": "never"}},
            },
        }
    )
    assert run.wait() == 1, run.text()

    def find_complete_events() -> list[dict[str, Any]]:
        # The server stores the events in batches, so the list may be incomplete at first.
        events_so_far = read_muster_events(run)
        return (
            events_so_far
            if events_so_far and events_so_far[-1]["event"] == "muster.run.failed"
            else []
        )

    events = wait_for(find_complete_events, "the server has all events of the run")

    assert [(event["event"], event["payload"].get("component")) for event in events] == [
        ("muster.run.started", None),
        ("muster.component.started", "api"),
        ("muster.component.ready", "api"),
        ("muster.component.started", "trainer"),
        ("muster.component.exited", "trainer"),
        ("muster.component.stopped", "trainer"),
        ("muster.component.exited", "api"),
        ("muster.component.stopped", "api"),
        ("muster.run.failed", "trainer"),
    ]
    failed = events[-1]["payload"]
    assert (failed["run_id"], failed["kind"]) == (run.directory.name, "CUDA_OOM")
    assert failed["log"] == str(run.directory / "attempt-01" / "trainer.log")
    assert "CUDA out of memory" in failed["log_tail"]
    related = {resource["prefect.resource.id"] for resource in events[-1]["related"]}
    assert "prefect.tag.team-a" in related
    assert SECRET not in str(events)
