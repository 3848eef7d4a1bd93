"""The work pool and the deployments in the UI, as an operator sees them."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.ui import specs
from tests.ui.browsing import Ui
from tests.ui.ui_stack import UiStack, wait_for

RUNS = Path(__file__).resolve().parents[2] / "deployments" / "runs"


def test_each_spec_has_a_deployment(ui: Ui) -> None:
    ui.open("/v2/deployments?limit=50")

    for file in sorted(RUNS.glob("*.yaml")):
        expect(ui.page.get_by_role("link", name=file.stem, exact=True)).to_be_visible()


def test_settings_of_the_queue_are_fields_of_the_pool(stack: UiStack, ui: Ui) -> None:
    ui.open("/v2/work-pools/work-pool/gang/edit")

    expect(ui.page.get_by_text("Gang queue (Optional)")).to_be_visible()
    expect(
        ui.page.get_by_text("fifo: runs start strictly in the order of the queue.")
    ).to_be_visible()
    expect(ui.page.get_by_text("Drained nodes (Optional)")).to_be_visible()
    expect(ui.field("Name", ui.page.locator("form"))).to_have_value("gang")


def test_queued_run_of_a_paused_pool_names_the_pause(stack: UiStack, ui: Ui) -> None:
    ui.open("/v2/work-pools/work-pool/gang")
    ui.page.get_by_role("switch").first.click()
    wait_for(lambda: stack.ask("GET", "/work_pools/gang")["is_paused"], "the pool is paused")

    waiting_id = stack.run(specs.spec("paused"))
    try:
        stack.until_state(waiting_id, "PendingResources", saying="paused")
        ui.open_run(waiting_id, "Details")
        ui.sees("PendingResources", "paused")
    finally:
        stack.cancel(waiting_id)
        ui.open("/v2/work-pools/work-pool/gang")
        ui.page.get_by_role("switch").first.click()
        wait_for(
            lambda: not stack.ask("GET", "/work_pools/gang")["is_paused"],
            "the pool is active again",
        )
