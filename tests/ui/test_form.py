"""The form of a custom run, as somebody fills it in who has read nothing."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tasks.spec.run import RunSpec
from tests.ui.browsing import Ui
from tests.ui.ui_stack import UiStack, until


def deployment(stack: UiStack, name: str) -> dict[str, Any]:
    found: dict[str, Any] = stack.ask("GET", f"/deployments/name/train/{name}")
    return found


def submitted(stack: UiStack, ui: Ui, name: str, before: dict[str, Any] | None) -> dict[str, Any]:
    """The flow run that the form's button makes."""
    ui.page.get_by_role("button", name="Submit").click()

    def made() -> dict[str, Any] | None:
        found = stack.newest_run(f"train/{name}")
        return found if found and found["id"] != (before or {}).get("id") else None

    return until(made, "a run from the form")


def test_every_field_has_a_label_a_description_and_its_value(stack: UiStack, ui: Ui) -> None:
    form = ui.open_form(deployment(stack, "quickstart")["id"])

    said = form.inner_text()
    for text in (
        "What this training is called; the run's id begins with it.",
        "The GPUs it needs; left out: none are asked for.",
        "Steps in all; ${progress.total} in a command.",
        "The server between the others, such as run-api of Atropos.",
        "The program and its arguments, one item each",
    ):
        assert text in said
    assert "Field (Optional)" not in said
    expect(ui.field("name")).to_have_value("quickstart")
    expect(ui.field("total (Optional)")).to_have_value("60")
    expect(ui.field("grace_s (Optional)")).to_have_value("10")
    # What may be left out is an empty box, and not a choice between a text and None.
    expect(ui.field("checkpoints (Optional)")).to_have_value("")


@pytest.mark.parametrize("name", ["quickstart", "quickstart-fleet", "quickstart-ray"])
def test_the_form_as_it_is_asks_for_the_run_of_the_file(stack: UiStack, ui: Ui, name: str) -> None:
    there, before = deployment(stack, name), stack.newest_run(f"train/{name}")

    ui.open_form(there["id"])
    run = submitted(stack, ui, name, before)
    stack.cancel(run["id"])

    asked, wanted = run["parameters"]["spec"], there["parameters"]["spec"]
    assert RunSpec.model_validate(asked) == RunSpec.model_validate(wanted)
    assert list(RunSpec.model_validate(asked).components) == list(wanted["components"])


def test_a_value_that_is_changed_in_the_form_reaches_the_run(stack: UiStack, ui: Ui) -> None:
    before = stack.newest_run("train/quickstart")

    ui.open_form(deployment(stack, "quickstart")["id"])
    ui.field("total (Optional)").fill("7")
    ui.page.get_by_label("step", exact=True).nth(1).fill("7")
    run = submitted(stack, ui, "quickstart", before)

    ended = stack.until_state(run["id"], "Completed", "Failed", "Crashed")
    assert ended["state"]["message"] == "step 7 of 7"


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("total (Optional)", "-3", "greater than or equal to 1"),  # said by the browser
        ("name", "No Such Name!", "'No Such Name!' does not match"),  # said by the server
    ],
)
def test_a_value_that_makes_no_sense_starts_nothing(
    stack: UiStack, ui: Ui, field: str, value: str, complaint: str
) -> None:
    before = stack.newest_run("train/quickstart")

    ui.open_form(deployment(stack, "quickstart")["id"])
    ui.field(field).fill(value)
    ui.page.get_by_role("button", name="Submit").click()

    own = ui.field(field).evaluate("one => one.validationMessage")
    if complaint not in own:
        expect(ui.page.get_by_text(complaint).first).to_be_visible()
    assert ui.page.url.endswith("/run")
    assert stack.newest_run("train/quickstart") == before
