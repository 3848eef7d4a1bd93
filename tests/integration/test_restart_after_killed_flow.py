"""A run whose flow process was killed starts again before `muster reconcile` has run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from tasks.spec.run import RunSpec
from tasks.train.session import RunSession
from tests.support.supervised_components import RUN_ID, is_alive, wait_until

FLOW_RUN = UUID(int=7)

#: A program that takes the place of the run's flow process. The program starts one component, and
#: then waits until the test kills the program.
OWNER = f"""
import sys, uuid
from tasks.spec.run import RunSpec
from tasks.train.session import RunSession
spec = RunSpec.model_validate({{"name": "x", "workload": "grpo", "components": {{"trainer": {{
    "command": ["sh", "-c", "trap '' TERM; setsid env -i /bin/sleep 600 & echo up; exec sleep 600"],
    "ready": {{"log": "up"}}, "stop": {{"grace_s": 0.3}}}}}}}})
run = RunSession(spec, run_id="{RUN_ID}", flow_run_id=uuid.UUID(int=7))
run.begin_attempt()
run.supervisor.start("trainer")
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def killed_owner(muster_home: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that is recorded as the run's flow process. A test can kill this process."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MUSTER_HOME": str(muster_home)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_leftovers_of_the_killed_process_are_ended_before_the_run_continues(
    killed_owner: subprocess.Popen[str], muster_home: Path
) -> None:
    path = muster_home / "live" / RUN_ID / "component-trainer.json"
    entry = json.loads(path.read_text())
    pids = [entry["process"]["pid"], entry["guardian"]["pid"]]
    for pid in (killed_owner.pid, pids[1]):
        os.kill(pid, signal.SIGKILL)
    killed_owner.wait()

    spec = RunSpec.model_validate(
        {"name": "x", "workload": "grpo", "components": {"trainer": {"command": ["sleep", "600"]}}}
    )
    new_session = RunSession(spec, run_id=RUN_ID, flow_run_id=FLOW_RUN)

    wait_until(lambda: not any(map(is_alive, pids)), "the first attempt's processes have ended")
    record = json.loads(new_session.place.record.read_text())
    [attempt] = record["attempts"]
    assert record["state"] == "pending_resources"
    assert (attempt["state"], attempt["failure"]["rule"]) == ("failed", "flow-lost")
    new_session.begin_attempt()
    new_session.supervisor.start("trainer")
    new_session.end_attempt()
    new_session.close()
    assert [a["number"] for a in json.loads(new_session.place.record.read_text())["attempts"]] == [
        1,
        2,
    ]
