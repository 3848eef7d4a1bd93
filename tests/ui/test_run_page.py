"""A run from a click in the UI to its end, seen in the UI."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ui.browsing import Ui
from tests.ui.ui_stack import UiStack, until

#: The tasks of a run, as the graph and the list of task runs call them.
TASKS = ("admit", "start-api", "start-trainer", "start-environment", "monitor", "teardown")


@pytest.fixture(scope="module")
def done(stack: UiStack) -> dict[str, Any]:
    """A run of the quickstart that has completed."""
    return stack.until_state(stack.run(), "Completed")


def test_a_newcomer_finds_a_deployment_and_starts_it(stack: UiStack, ui: Ui) -> None:
    before = stack.newest_run("train/quickstart")

    ui.open("/")
    ui.page.get_by_role("link", name="Deployments").click()
    ui.page.get_by_role("link", name="quickstart", exact=True).click()
    ui.page.get_by_role("button", name="Run", exact=True).click()
    ui.page.get_by_role("menuitem", name="Quick run").click()

    def made() -> str | None:
        found = stack.newest_run("train/quickstart")
        return str(found["id"]) if found and found["id"] != (before or {}).get("id") else None

    id = until(made, "a run from the menu")
    ended = stack.until_state(id, "Completed", "Failed", "Crashed")
    ui.open_run(id, "TaskRuns")
    ui.sees("Completed", *TASKS)
    assert re.match(r"quickstart-grpo-\d{8}-\d{6}-[0-9a-f]{8}$", ended["name"])
    assert ended["name"] in ui.text()


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
        ("timeline", "environment", 1),
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
