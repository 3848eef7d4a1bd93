"""A run in the UI, from the click that starts it to its end."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ui.browsing import Ui
from tests.ui.ui_stack import UiStack, wait_for

#: Names of a run's tasks in the graph and in the list of task runs.
TASKS = ("admit", "start-api", "start-trainer", "start-environment", "monitor", "teardown")
#: A user's training program, which does not use Muster.
SCRIPT = """
import os, sys
print(f"{sys.executable} in {os.getcwd()}")
with open(os.environ["METRICS"], "w") as file:
    file.writelines(f'{{"step": {step}}}\\n' for step in (1, 2, 3))
"""
METRICS = "${attempt.dir}/metrics.jsonl"
#: Spec of a run whose trainer is the program SCRIPT.
USER_SPEC = {
    "name": "of-my-own",
    "workload": "sft",
    "env": {"METRICS": METRICS},
    "components": {"trainer": {"command": ["python", "train.py"]}},
    "progress": {"jsonl": METRICS, "step": "step", "total": 3},
    "success": {"step": 3},
}


@pytest.fixture(scope="module")
def completed_run(stack: UiStack) -> dict[str, Any]:
    """Return a completed run of the quickstart."""
    return stack.until_state(stack.run(), "Completed")


def quick_run(stack: UiStack, ui: Ui, name: str) -> str:
    """Start a deployment in the UI with Run > Quick run, and return the id of the new flow run."""
    newest_before = stack.newest_run(f"train/{name}")
    ui.open("/")
    ui.page.get_by_role("link", name="Deployments").click()
    ui.page.get_by_role("link", name=name, exact=True).click()
    ui.page.get_by_role("button", name="Run", exact=True).click()
    ui.page.get_by_role("menuitem", name="Quick run").click()

    def find_new_run() -> str | None:
        newest_run = stack.newest_run(f"train/{name}")
        return (
            str(newest_run["id"])
            if newest_run and newest_run["id"] != (newest_before or {}).get("id")
            else None
        )

    return str(wait_for(find_new_run, "the menu has created a run"))


def test_new_user_finds_a_deployment_and_starts_it(stack: UiStack, ui: Ui) -> None:
    id = quick_run(stack, ui, "quickstart")

    ended = stack.until_state(id, "Completed", "Failed", "Crashed")
    ui.open_run(id, "TaskRuns")
    ui.sees("Completed", *TASKS)
    assert re.match(r"quickstart-grpo-\d{8}-\d{6}-[0-9a-f]{8}$", ended["name"])
    assert ended["name"] in ui.text()


def test_users_own_deployment_can_be_started_by_a_click(
    stack: UiStack, ui: Ui, tmp_path: Path
) -> None:
    """A user has created the deployment with `muster deploy` in the user's own project.

    The run must work in a copy of this project, with the Python interpreter of the project.
    """
    project = tmp_path / "mine"
    folder = tmp_path / "mine" / "runs"
    python = project / ".venv" / "bin" / "python"
    for directory in (folder, python.parent):
        directory.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (project / "pyproject.toml").touch()
    (project / "train.py").write_text(SCRIPT)
    (folder / "my-spec.yaml").write_text(yaml.safe_dump(USER_SPEC))

    deploy_result = stack.muster("deploy", "my-spec.yaml", cwd=folder)
    id = quick_run(stack, ui, "of-my-own")

    assert deploy_result.returncode == 0, deploy_result.stdout + deploy_result.stderr
    ended = stack.until_state(id, "Completed", "Failed", "Crashed")
    ui.open_run(id, "TaskRuns")
    ui.sees("Completed", "admit", "start-trainer", "monitor", "teardown", ended["name"])
    log_text = (stack.place(ended) / "attempt-01" / "trainer.log").read_text()
    assert log_text == f"{python} in {stack.place(ended)}/code\n"
    assert (ended["state_type"], ended["state"]["message"]) == ("COMPLETED", "step 3 of 3")


def test_page_of_a_completed_run_shows_its_artifacts(ui: Ui, completed_run: dict[str, Any]) -> None:
    ui.open_run(completed_run["id"], "Artifacts")

    ui.sees("summary", "components", "timeline", "reward", "progress", "attempts", "step 60 of 60")
    ui.until(lambda: len(ui.pictures()) >= 2, "two pictures")
    assert all(width > 300 for width in ui.pictures())


@pytest.mark.parametrize(
    ("key", "expected_text", "pictures"),
    [
        ("summary", "step 60 of 60", 0),
        ("components", "trainer.log", 0),
        ("timeline", "1 attempt", 1),
        ("reward", "reward", 1),
    ],
)
def test_each_artifact_has_a_page(
    stack: UiStack,
    ui: Ui,
    completed_run: dict[str, Any],
    key: str,
    expected_text: str,
    pictures: int,
) -> None:
    artifact_filter = {
        "artifacts": {"flow_run_id": {"any_": [completed_run["id"]]}, "key": {"any_": [key]}}
    }
    [artifact] = stack.ask("POST", "/artifacts/filter", artifact_filter)

    ui.open(f"/v2/artifacts/artifact/{artifact['id']}")

    ui.sees(expected_text, completed_run["name"])
    ui.until(
        lambda: len(ui.pictures()) >= pictures and all(ui.pictures()),
        "the pictures of the artifact",
    )


def test_old_ui_also_shows_the_pictures(ui: Ui, completed_run: dict[str, Any]) -> None:
    ui.open(f"/runs/flow-run/{completed_run['id']}")
    ui.page.get_by_text("Artifacts", exact=True).last.click()

    ui.until(lambda: len(ui.pictures()) >= 2 and all(ui.pictures()), "two pictures")
