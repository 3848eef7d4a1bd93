"""The UI alone shows the reason why a run does not train or has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ui import specs
from tests.ui.browsing import Ui
from tests.ui.ui_stack import NODES, UiStack

Start = Callable[[specs.Spec], str]


@pytest.fixture
def start_run(stack: UiStack) -> Iterator[Start]:
    """Yield a function that queues a run and returns its id; all runs are cancelled afterwards."""
    started: list[str] = []

    def start_run(spec: specs.Spec) -> str:
        started.append(stack.run(spec))
        return started[-1]

    yield start_run
    for id in reversed(started):
        stack.cancel(id)


def test_page_of_a_crashed_run_names_component_error_log_and_next_step(
    stack: UiStack, ui: Ui, start_run: Start
) -> None:
    failed = stack.until_state(start_run(specs.crashing()), "Failed")

    ui.open_run(failed["id"], "Artifacts")

    ui.sees("RUNTIME_ERROR", "trainer: exit code 1", specs.COMPLAINT[:30], "next: not retried")
    ui.sees("attempt-01/trainer.log")
    ui.open_run(failed["id"], "Details")
    ui.sees("RUNTIME_ERROR: trainer (pid ", specs.COMPLAINT)


def test_summary_of_a_crashed_run_names_cause_log_and_next_step(
    stack: UiStack, ui: Ui, start_run: Start
) -> None:
    failed = stack.until_state(start_run(specs.crashing()), "Failed")
    artifact_filter = {
        "artifacts": {"flow_run_id": {"any_": [failed["id"]]}, "key": {"any_": ["summary"]}}
    }
    [summary] = stack.ask("POST", "/artifacts/filter", artifact_filter)

    ui.open(f"/v2/artifacts/artifact/{summary['id']}")

    ui.sees("first failure", "trainer: exit code 1", "RUNTIME_ERROR", specs.COMPLAINT)
    ui.sees(str(stack.place(failed) / "attempt-01" / "trainer.log"))
    ui.sees("what happens next", "not retried")


def test_invalid_spec_is_refused_with_a_remedy(stack: UiStack, ui: Ui, start_run: Start) -> None:
    refused = stack.until_state(start_run(specs.broken()), "Failed")

    ui.open_run(refused["id"], "Details")

    ui.sees("USER_ERROR", "progress.jsonl: unknown name `${attmpt.dir}`")
    ui.sees("did you mean `${attempt.dir}`?")
    assert not stack.place(refused).exists()


def test_infeasible_run_names_the_existing_nodes(stack: UiStack, ui: Ui, start_run: Start) -> None:
    refused = stack.until_state(start_run(specs.gang_of("too-large", 8)), "Failed")

    ui.open_run(refused["id"], "Details")

    ui.sees("INFEASIBLE: the run needs 1 node with 8 GPUs", "The nodes are: 1 with 2 GPUs")


def test_queued_run_names_the_run_that_holds_the_gpus(
    stack: UiStack, ui: Ui, start_run: Start
) -> None:
    holder = stack.until_state(start_run(specs.gang_of("holds", 2)), "Running", saying="running:")
    waiting_run = stack.until_state(start_run(specs.gang_of("waits", 2)), "PendingResources")

    ui.open_run(waiting_run["id"], "Details")

    ui.sees("PendingResources", "needs 1 node with 2 GPUs", f"waits for {holder['name']}")
    ui.open("/v2/artifacts/key/gang-queue")
    ui.sees("1 waiting", "0 of 2 GPUs are free on 1 node")
    ui.page.locator("[data-testid^=timeline-card] a").first.click()
    ui.sees(stack.flow_run(waiting_run["id"])["name"], "2 GPUs", f"waits for {holder['name']}")
    ui.open("/v2/artifacts/key/gang-nodes")
    ui.page.locator("[data-testid^=timeline-card] a").first.click()
    ui.sees(NODES[0].name, holder["name"])
