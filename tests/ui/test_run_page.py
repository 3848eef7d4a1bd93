"""A run from a click in the UI to its end, seen in the UI."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.ui.browsing import Ui
from tests.ui.ui_stack import UiStack, until

#: The tasks of a run, as the graph and the list of task runs call them.
TASKS = ("admit", "start-api", "start-trainer", "start-environment", "monitor", "teardown")


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
    assert re.match(r"quickstart-grpo-\d{8}-\d{6}-[0-9a-f]{4}$", ended["name"])
    assert ended["name"] in ui.text()


def test_what_ran_shows_what_came_of_it(stack: UiStack, ui: Ui) -> None:
    done = stack.newest_run("train/quickstart")
    assert done is not None, "the test before this one has run it"

    ui.open_run(done["id"], "Artifacts")

    ui.sees("summary", "components", "timeline", "reward", "progress", "attempts", "step 60 of 60")
    ui.until(lambda: len(ui.pictures()) >= 2, "two pictures")
    assert all(width > 300 for width in ui.pictures())


def test_the_summary_is_a_page_with_its_pictures_tables_and_paths(stack: UiStack, ui: Ui) -> None:
    done = stack.newest_run("train/quickstart")
    assert done is not None
    of_run = {"artifacts": {"flow_run_id": {"any_": [done["id"]]}, "key": {"any_": ["summary"]}}}
    [summary] = stack.ask("POST", "/artifacts/filter", of_run)

    ui.open(f"/v2/artifacts/artifact/{summary['id']}")

    ui.sees("api", "trainer", "environment", str(stack.place(done)))
    expect(ui.page.get_by_role("table").first).to_be_visible()
    ui.until(lambda: ui.pictures() and all(ui.pictures()), "its pictures")


def test_the_old_ui_shows_the_pictures_too(stack: UiStack, ui: Ui) -> None:
    done = stack.newest_run("train/quickstart")
    assert done is not None

    ui.open(f"/runs/flow-run/{done['id']}")
    ui.page.get_by_text("Artifacts", exact=True).last.click()

    ui.until(lambda: len(ui.pictures()) >= 2 and all(ui.pictures()), "two pictures")
