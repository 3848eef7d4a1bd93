"""Runs that a person retries, steps back, or starts from a checkpoint of another run.

Real processes train. The trainer itself writes down from which step each of its processes started.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.host_environment import DEADLINE_S, HostEnvironment, host_with_worker, wait_for
from tests.support.prefect_api import send_request

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

#: Trainer that saves a checkpoint every 10 steps. At step 35, the trainer kills itself if the file
#: `room` does not exist.
TRAINER = """
import json, os, pathlib, signal, sys

folder, resume_from, metrics, total, room, starts, run_id = sys.argv[1:]
step = json.loads(pathlib.Path(resume_from, "state.json").read_text())["step"] if resume_from else 0
with open(starts, "a") as file:
    file.write(json.dumps({"run": run_id, "from": resume_from, "step": step}) + "\\n")
while step < int(total):
    step += 1
    with open(metrics, "a") as file:
        file.write(json.dumps({"step": step}) + "\\n")
    if step % 10 == 0:
        draft = pathlib.Path(folder, f"step_{step}.tmp")
        draft.mkdir(parents=True)
        (draft / "state.json").write_text(json.dumps({"step": step}))
        target = pathlib.Path(folder, f"step_{step}")
        if target.exists():
            (target / "state.json").unlink()
            target.rmdir()
        draft.rename(target)
    if step == 35 and not os.path.exists(room):
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Project:
    """A project with a trainer and a spec. Its methods run `muster` in the project's folder."""

    def __init__(self, host_env: HostEnvironment, folder: Path) -> None:
        self.host_env = host_env
        self.folder = folder
        folder.mkdir()
        (folder / "pyproject.toml").touch()
        (folder / "train.py").write_text(TRAINER)
        #: File that lets the trainer train beyond step 35.
        self.room = folder.parent / "room"
        self._starts = folder.parent / "starts.jsonl"
        words = ["${run.dir}/checkpoints", "${attempt.resume_from}", "${attempt.dir}/metrics.jsonl"]
        words += ["${progress.total}", str(self.room), str(self._starts), "${run.id}"]
        spec = {
            "name": "trial",
            "workload": "sft",
            "components": {
                "trainer": {
                    "command": ["python", "train.py", *words],
                    "checkpoints": "${run.dir}/checkpoints",
                }
            },
            "progress": {"jsonl": "${attempt.dir}/metrics.jsonl", "step": "step", "total": 60},
        }
        self.spec = folder / "muster.yaml"
        self.spec.write_text(yaml.safe_dump(spec))

    def muster(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command `muster`, and return the exit code and the output."""
        return subprocess.run(
            [sys.executable, "-m", "tasks.command", *words],
            cwd=self.folder,
            env=self.host_env.env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def do(self, *words: str) -> Any:
        """Run the command `muster` with `--json`, and return the JSON from the output."""
        result = self.muster(*words, "--json")
        assert result.returncode in (0, 1), result.stdout + result.stderr
        return json.loads(result.stdout)

    def submit(self, *words: str) -> str:
        """Submit the spec, wait until the run has ended, and return the id of the run."""
        return str(self.do("submit", str(self.spec), "--watch", *words)["run_id"])

    def starts(self, run_id: str) -> list[tuple[str, int]]:
        """Return the starting point of each start of a run's trainer.

        A starting point is the id of the run that saved the checkpoint, and the step of the
        checkpoint. The id is an empty string if the trainer started without a checkpoint.
        """
        lines = [json.loads(line) for line in self._starts.read_text().splitlines()]
        return [
            (Path(line["from"]).parents[1].name if line["from"] else "", line["step"])
            for line in lines
            if line["run"] == run_id
        ]

    def record(self, run_id: str) -> dict[str, Any]:
        path = self.host_env.home / "runs" / run_id / "run.json"
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def saved(self, run_id: str) -> set[str]:
        """Return the names of the checkpoints in the directory of a run."""
        folder = self.host_env.home / "runs" / run_id / "checkpoints"
        return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def host_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostEnvironment]:
    """Yield a simulated host with a Prefect server and a worker."""
    home = tmp_path_factory.mktemp("host") / "home"
    with host_with_worker(tmp_path_factory.mktemp("server"), home) as host_env:
        yield host_env


@pytest.fixture
def project(host_env: HostEnvironment, tmp_path: Path) -> Project:
    return Project(host_env, tmp_path / "project")


def test_run_is_retried_from_its_last_and_from_an_earlier_checkpoint(project: Project) -> None:
    run_id = project.submit()
    project.do("retry", run_id, "--watch")
    project.room.touch()
    project.do("retry", run_id, "--watch")
    finished = project.muster("retry", run_id)
    unknown_step = project.muster("retry", run_id, "--from-step", "35")
    project.do("retry", run_id, "--from-step", "20", "--watch")

    own = [(run_id, step) for step in (30, 30, 20)]
    assert project.starts(run_id) == [("", 0), *own]
    assert finished.returncode == 2 and "is completed" in finished.stderr
    assert unknown_step.returncode == 2
    assert "Steps with a complete checkpoint: 10, 20, 30, 40, 50, 60." in unknown_step.stderr
    record = project.record(run_id)
    assert [attempt["state"] for attempt in record["attempts"]] == ["failed", "failed"] + [
        "completed"
    ] * 2
    assert "retried the run from this checkpoint" in record["attempts"][3]["resume"]["rule"]


def test_ui_retry_of_a_completed_run_ends_at_once_and_keeps_the_record(
    project: Project,
) -> None:
    project.room.touch()
    run_id = project.submit()
    record = project.record(run_id)
    flow_run = f"{project.host_env.api}/flow_runs/{record['flow_run_id']}"

    # The Prefect UI sends this request for *Retry*.
    retry = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the Prefect UI"}
    send_request("POST", f"{flow_run}/set_state", {"state": retry, "force": True})

    def is_complete() -> bool:
        message = send_request("GET", flow_run)["state"]["message"] or ""
        return message.startswith("the run was already complete, so no attempt was started")

    wait_for(is_complete, f"the retry of {run_id} has ended")
    assert send_request("GET", flow_run)["state"]["type"] == "COMPLETED"
    assert project.record(run_id) == record
    assert project.starts(run_id) == [("", 0)]
    project.do("retry", run_id, "--from-step", "20", "--watch")
    assert project.starts(run_id) == [("", 0), (run_id, 20)]


def test_two_runs_start_from_one_checkpoint_that_no_run_removes(project: Project) -> None:
    parent = project.submit("--set", "components.trainer.keep=2")
    project.room.touch()
    keep_two = ("--set", "components.trainer.keep=2")
    missing = project.muster("submit", str(project.spec), "--from", f"{parent}@5")
    fork = ("submit", str(project.spec), "--from", f"{parent}@10", *keep_two)
    children = [project.do(*fork)["run_id"] for _ in range(2)]
    project.do("retry", parent, "--watch")
    for child in children:
        wait_for(lambda child=child: _has_ended(project, child), f"{child} has ended")

    assert missing.returncode == 2
    assert "Steps with a complete checkpoint: 10, 20, 30." in missing.stderr
    assert [project.starts(child) for child in children] == [[(parent, 10)]] * 2
    # `keep=2` keeps the checkpoints of the steps 40 and 50. Muster also keeps the newest checkpoint
    # (step 60), because this checkpoint may be incomplete. The steps 10 and 30 are kept, because a
    # retry or another run has started from these checkpoints.
    kept = {"step_10", "step_30", "step_40", "step_50", "step_60"}
    assert project.saved(parent) == kept
    assert [project.saved(child) for child in children] == [{"step_40", "step_50", "step_60"}] * 2
    checkpoint = project.host_env.home / "runs" / parent / "checkpoints" / "step_10"
    assert [project.record(child)["provenance"]["parent"] for child in children] == [
        {"run": parent, "checkpoint": str(checkpoint), "step": 10}
    ] * 2
    assert f"step 10 of {parent}" in project.muster("show", children[0]).stdout


def _has_ended(project: Project, run_id: str) -> bool:
    return any(
        run["run_id"] == run_id and run["state"] in ("completed", "failed")
        for run in project.do("ls")
    )


@pytest.mark.parametrize("has_flow_run", [True, False])
def test_run_without_a_worker_is_retried_in_the_terminal(
    project: Project, has_flow_run: bool
) -> None:
    failed = project.muster("train", str(project.spec))
    run_id = project.do("ls")[0]["run_id"]
    if not has_flow_run:
        # Delete the flow run, as if it was lost together with a temporary Prefect server.
        flow_run_id = project.record(run_id)["flow_run_id"]
        send_request("DELETE", f"{project.host_env.api}/flow_runs/{flow_run_id}")
    project.room.touch()
    retried = project.muster("retry", run_id, "--from-step", "10")
    checkpoints = project.do("checkpoints", run_id)

    assert (failed.returncode, retried.returncode) == (1, 0), retried.stdout + retried.stderr
    assert project.starts(run_id) == [("", 0), (run_id, 10)]
    assert [run["run_id"] for run in project.do("ls")].count(run_id) == 1
    assert [(row["step"], row["attempt"]) for row in checkpoints] == [
        (step, 1 if step == 10 else 2) for step in (60, 50, 40, 30, 20, 10)
    ]


def test_run_that_has_not_ended_is_not_retried(project: Project) -> None:
    sleeper = ["python", "-c", "import time; time.sleep(600)"]
    words = ("--set", f"components.trainer.command={json.dumps(sleeper)}")
    run_id = str(project.do("submit", str(project.spec), *words)["run_id"])
    wait_for(lambda: project.do("show", run_id)["state"] == "running", f"{run_id} runs")

    refused = project.muster("retry", run_id)
    unknown = project.muster("retry", "no-such-run")
    project.muster("cancel", run_id, "--now")

    assert refused.returncode == 2
    assert f"{run_id} is running: only a run that has ended can be retried" in refused.stderr
    assert unknown.returncode == 2 and "there is no run no-such-run" in unknown.stderr
