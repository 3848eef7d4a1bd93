"""Verbs whose answer is in the files of this machine do not import Prefect, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.record.places import RunPlace
from tests.support.documents import ROOT

RUN = "trial-sft-20260102-000000-bbbbbbbb"
#: Address at which no program listens. A request to this address would print a warning.
DEAD_SERVER = "http://127.0.0.1:9/api"
#: Program that runs `muster` with its arguments, and then prints on stderr whether Prefect was
#: imported.
PROGRAM = """
import sys
from tasks.command import main
code = main(sys.argv[1:])
print("prefect" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def ended_run(muster_home: Path) -> str:
    """Write the files of a run that has failed on this machine, and return the run id."""
    place = RunPlace.of(RUN)
    attempt_place = place.attempt(1)
    attempt_place.directory.mkdir(parents=True)
    failure = {"kind": "USER_ERROR", "component": "trainer", "exit_code": 1, "message": "it failed"}
    record = {
        "run_id": RUN,
        "flow_run_id": "11111111-0000-4000-8000-000000000000",
        "state": "failed",
        "message": "USER_ERROR: it failed",
        "started_at": 1000.0,
        "ended_at": 2000.0,
        "attempts": [{"number": 1, "state": "failed", "failure": failure}],
    }
    place.record.write_text(json.dumps(record))
    trainer = {"command": ["true"], "checkpoints": str(attempt_place.directory / "checkpoints")}
    spec = {
        "name": "trial",
        "workload": "sft",
        "cwd": str(attempt_place.directory),
        "components": {"trainer": trainer},
        "progress": {"jsonl": "metrics.jsonl", "step": "step", "total": 60},
    }
    attempt_place.spec.write_text(yaml.safe_dump(spec))
    (attempt_place.directory / "metrics.jsonl").write_text('{"step": 7, "loss": 0.5}\n')
    attempt_place.log("trainer").write_text("ValueError: no\n")
    return RUN


def run_muster(*words: str, server: str) -> subprocess.CompletedProcess[str]:
    """Run `muster` in a new process.

    The last line on stderr says whether the process has imported Prefect: `True` or `False`.
    """
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PREFECT_API_URL": server},
    )


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["ls"], RUN),
        (["show", RUN], "it failed"),
        (["why", "latest"], "USER_ERROR: it failed"),
        (["explain", RUN], "loss"),
        (["show", "--diff", RUN, f"{RUN}--a01"], "does not have the code files"),
        ([], RUN),
    ],
)
def test_verb_does_not_import_prefect_if_no_server_is_configured(
    ended_run: str, words: list[str], output: str
) -> None:
    done = run_muster(*words, server="")

    assert (done.returncode, done.stderr) == (0, "False\n")
    assert output in done.stdout


@pytest.mark.parametrize(
    ("words", "output", "error"),
    [
        (["logs", RUN], "ValueError: no", ""),
        (["metrics", RUN], '"loss": 0.5', ""),
        (["checkpoints", RUN], "", f"The run {RUN} has no checkpoint yet.\n"),
    ],
)
def test_verb_for_files_of_an_ended_run_here_asks_no_server(
    ended_run: str, words: list[str], output: str, error: str
) -> None:
    done = run_muster(*words, server=DEAD_SERVER)

    assert (done.returncode, done.stderr) == (0, f"{error}False\n")
    assert output in done.stdout


def test_verb_for_a_run_that_may_continue_elsewhere_asks_the_server(ended_run: str) -> None:
    path = RunPlace.of(RUN).record
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": "pending_resources"}))

    done = run_muster("metrics", RUN, server=DEAD_SERVER)

    assert done.returncode == 0
    assert done.stderr.endswith("Only runs with a record on this machine are shown.\nTrue\n")
