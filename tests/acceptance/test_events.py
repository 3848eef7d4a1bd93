"""The events of a run on its Prefect server, as an automation or the UI's feed gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.conftest import Run, python
from tests.support.ground import until
from tests.support.prefect_api import ask

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-of-the-hub"


def events_of(run: Run) -> list[dict[str, Any]]:
    """Muster's, in the order in which they happened."""
    about = f"prefect.flow-run.{run.record()['flow_run_id']}"
    wanted = {"event": {"prefix": ["muster."]}, "resource": {"id": [about]}, "order": "ASC"}
    found: list[dict[str, Any]] = ask("POST", f"{run.api}/events/filter", {"filter": wanted})[
        "events"
    ]
    return found


def test_a_run_tells_its_server_its_story_without_secrets(start_run: Callable[..., Run]) -> None:
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

    def whole() -> list[dict[str, Any]]:
        # The server writes them down in batches.
        found = events_of(run)
        return found if found and found[-1]["event"] == "muster.run.failed" else []

    events = until(whole, "the events of the run")

    assert [(one["event"], one["payload"].get("component")) for one in events] == [
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
    related = {one["prefect.resource.id"] for one in events[-1]["related"]}
    assert "prefect.tag.team-a" in related
    assert SECRET not in str(events)
