"""The form of a custom run in the UI, as a user without knowledge of the documents fills it."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tasks.spec.run import RunSpec
from tests.ui.browsing import Ui
from tests.ui.ui_stack import UiStack, wait_for


def read_deployment(stack: UiStack, name: str) -> dict[str, Any]:
    """Return a deployment of the flow `train` from the Prefect server."""
    deployment: dict[str, Any] = stack.ask("GET", f"/deployments/name/train/{name}")
    return deployment


def submit_form(stack: UiStack, ui: Ui, name: str, before: dict[str, Any] | None) -> dict[str, Any]:
    """Click the button of the form, and return the flow run that the click creates.

    Args:
        before: The newest flow run of the deployment before the click. None if there was no flow
            run.
    """
    ui.page.get_by_role("button", name="Submit").click()

    def find_new_run() -> dict[str, Any] | None:
        newest_run = stack.newest_run(f"train/{name}")
        return newest_run if newest_run and newest_run["id"] != (before or {}).get("id") else None

    return wait_for(find_new_run, "the form has created a run")


def test_form_has_labels_descriptions_and_default_values(stack: UiStack, ui: Ui) -> None:
    form = ui.open_form(read_deployment(stack, "quickstart")["id"])

    form_text = form.inner_text()
    for text in (
        "Name of the training. The id of each run of this spec begins with the name.",
        "GPUs that the run needs. Muster starts the run when all of them are free.",
        "Number of steps of the whole training. A command can contain it as ${progress.total}.",
        "The server through which the other components exchange data, such as run-api of Atropos.",
        "The program of the component and its arguments, with one list item for each argument.",
    ):
        assert text in form_text
    assert "Field (Optional)" not in form_text
    expect(ui.field("name")).to_have_value("quickstart")
    expect(ui.field("total (Optional)")).to_have_value("60")
    # The form shows an optional key as an empty text field, without a menu to choose between a text
    # and None.
    expect(ui.field("checkpoints (Optional)")).to_have_value("")


def test_form_has_no_fields_for_rarely_used_keys(stack: UiStack, ui: Ui) -> None:
    form = ui.open_form(read_deployment(stack, "quickstart")["id"])

    form_text = form.inner_text()
    for key in ("containment", "on_lost_flow", "launcher", "grace_s", "every_s"):
        assert f"{key} (Optional)" not in form_text
    # The height is in pixels. A form with fields for all keys would be about 14,000 pixels high.
    box = form.bounding_box()
    assert box is not None and box["height"] < 7000


@pytest.mark.parametrize("name", ["quickstart", "quickstart-fleet", "quickstart-ray"])
def test_unchanged_form_submits_the_spec_of_the_deployment(
    stack: UiStack, ui: Ui, name: str
) -> None:
    deployment = read_deployment(stack, name)
    before = stack.newest_run(f"train/{name}")

    ui.open_form(deployment["id"])
    run = submit_form(stack, ui, name, before)
    stack.cancel(run["id"])

    submitted_spec = run["parameters"]["spec"]
    expected_spec = deployment["parameters"]["spec"]
    assert RunSpec.model_validate(submitted_spec) == RunSpec.model_validate(expected_spec)
    assert list(RunSpec.model_validate(submitted_spec).components) == list(
        expected_spec["components"]
    )


def test_changed_value_in_the_form_reaches_the_run(stack: UiStack, ui: Ui) -> None:
    deployment = read_deployment(stack, "quickstart")
    before = stack.newest_run("train/quickstart")

    ui.open_form(deployment["id"])
    ui.field("total (Optional)").fill("7")
    ui.page.get_by_label("step", exact=True).nth(1).fill("7")
    ui.page.get_by_label("checkpoints (Optional)").nth(1).fill("${run.dir}/from-form")
    run = submit_form(stack, ui, "quickstart", before)

    trainer = run["parameters"]["spec"]["components"]["trainer"]
    trainer_of_deployment = deployment["parameters"]["spec"]["components"]["trainer"]
    # The form has no field for `ready` and some other keys. These keys keep their values from the
    # deployment.
    assert trainer_of_deployment["ready"]
    assert trainer == {**trainer_of_deployment, "checkpoints": "${run.dir}/from-form"}
    ended = stack.until_state(run["id"], "Completed", "Failed", "Crashed")
    # The trainer saves its checkpoints in another folder, so the run has a warning.
    message = ended["state"]["message"]
    assert message.startswith("warning: step 7 of 7, but no checkpoint was found in ")
    # A path in the message is relative to the folder of the run.
    assert "was found in from-form, which does not exist" in message


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        # The browser reports this invalid value, without the Prefect server.
        ("total (Optional)", "-3", "greater than or equal to 1"),
        # The Prefect server reports this invalid value.
        ("name", "No Such Name!", "'No Such Name!' does not match"),
    ],
)
def test_invalid_value_in_the_form_starts_no_run(
    stack: UiStack, ui: Ui, field: str, value: str, complaint: str
) -> None:
    before = stack.newest_run("train/quickstart")

    ui.open_form(read_deployment(stack, "quickstart")["id"])
    ui.field(field).fill(value)
    ui.page.get_by_role("button", name="Submit").click()

    browser_message = ui.field(field).evaluate("field => field.validationMessage")
    if complaint not in browser_message:
        expect(ui.page.get_by_text(complaint).first).to_be_visible()
    assert ui.page.url.endswith("/run")
    assert stack.newest_run("train/quickstart") == before
