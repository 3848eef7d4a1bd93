"""A run from a click in the UI to its end, seen in the UI."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ui.browsing import Ui
from tests.ui.ui_stack import UiStack, until

#: The tasks of a run, as the graph and the list of task runs call them.
TASKS = ("admit", "start-api", "start-trainer", "start-environment", "monitor", "teardown")
#: Somebody's training, which knows nothing of Muster, and its spec.
SCRIPT = """
import os, sys
print(f"{sys.executable} in {os.getcwd()}")
with open(os.environ["METRICS"], "w") as file:
    file.writelines(f'{{"step": {step}}}\\n' for step in (1, 2, 3))
"""
METRICS = "${attempt.dir}/metrics.jsonl"
OWN = {
    "name": "of-my-own",
    "workload": "sft",
    "env": {"METRICS": METRICS},
    "components": {"trainer": {"command": ["python", "train.py"]}},
    "progress": {"jsonl": METRICS, "step": "step", "total": 3},
    "success": {"step": 3},
}


@pytest.fixture(scope="module")
def done(stack: UiStack) -> dict[str, Any]:
    """A run of the quickstart that has completed."""
    return stack.until_state(stack.run(), "Completed")


def quick_run(stack: UiStack, ui: Ui, name: str) -> str:
    """Find a deployment of the flow train, and click Run > Quick run; the id of its flow run."""
    before = stack.newest_run(f"train/{name}")
    ui.open("/")
    ui.page.get_by_role("link", name="Deployments").click()
    ui.page.get_by_role("link", name=name, exact=True).click()
    ui.page.get_by_role("button", name="Run", exact=True).click()
    ui.page.get_by_role("menuitem", name="Quick run").click()

    def made() -> str | None:
        found = stack.newest_run(f"train/{name}")
        return str(found["id"]) if found and found["id"] != (before or {}).get("id") else None

    return str(until(made, "a run from the menu"))


def test_a_newcomer_finds_a_deployment_and_starts_it(stack: UiStack, ui: Ui) -> None:
    id = quick_run(stack, ui, "quickstart")

    ended = stack.until_state(id, "Completed", "Failed", "Crashed")
    ui.open_run(id, "TaskRuns")
    ui.sees("Completed", *TASKS)
    assert re.match(r"quickstart-grpo-\d{8}-\d{6}-[0-9a-f]{8}$", ended["name"])
    assert ended["name"] in ui.text()


def test_a_deployment_of_ones_own_is_started_by_a_click(
    stack: UiStack, ui: Ui, tmp_path: Path
) -> None:
    """By `muster deploy`, typed in a project that is not Muster's; the run works in a copy of that
    project, with the project's python."""
    project, folder = tmp_path / "mine", tmp_path / "mine" / "runs"
    python = project / ".venv" / "bin" / "python"
    for one in (folder, python.parent):
        one.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (project / "pyproject.toml").touch()
    (project / "train.py").write_text(SCRIPT)
    (folder / "my-spec.yaml").write_text(yaml.safe_dump(OWN))

    made = stack.muster("deploy", "my-spec.yaml", cwd=folder)
    id = quick_run(stack, ui, "of-my-own")

    assert made.returncode == 0, made.stdout + made.stderr
    ended = stack.until_state(id, "Completed", "Failed", "Crashed")
    ui.open_run(id, "TaskRuns")
    ui.sees("Completed", "admit", "start-trainer", "monitor", "teardown", ended["name"])
    said = (stack.place(ended) / "attempt-01" / "trainer.log").read_text()
    assert said == f"{python} in {stack.place(ended)}/code\n"
    assert (ended["state_type"], ended["state"]["message"]) == ("COMPLETED", "step 3 of 3")


def test_what_ran_shows_what_came_of_it(ui: Ui, done: dict[str, Any]) -> None:
    ui.open_run(done["id"], "Artifacts")

    ui.sees("summary", "components", "timeline", "reward", "progress", "attempts", "step 60 of 60")
    ui.until(lambda: len(ui.pictures()) >= 2, "two pictures")
    assert all(width > 300 for width in ui.pictures())


@pytest.mark.parametrize(
    ("key", "said", "pictures"),
    [
        ("summary", "step 60 of 60", 0),
        ("components", "trainer.log", 0),
        ("timeline", "1 attempt", 1),
        ("reward", "reward", 1),
    ],
)
def test_each_artifact_has_a_page(
    stack: UiStack, ui: Ui, done: dict[str, Any], key: str, said: str, pictures: int
) -> None:
    of_run = {"artifacts": {"flow_run_id": {"any_": [done["id"]]}, "key": {"any_": [key]}}}
    [artifact] = stack.ask("POST", "/artifacts/filter", of_run)

    ui.open(f"/v2/artifacts/artifact/{artifact['id']}")

    ui.sees(said, done["name"])
    ui.until(lambda: len(ui.pictures()) >= pictures and all(ui.pictures()), "its pictures")


def test_the_old_ui_shows_the_pictures_too(ui: Ui, done: dict[str, Any]) -> None:
    ui.open(f"/runs/flow-run/{done['id']}")
    ui.page.get_by_text("Artifacts", exact=True).last.click()

    ui.until(lambda: len(ui.pictures()) >= 2 and all(ui.pictures()), "two pictures")
