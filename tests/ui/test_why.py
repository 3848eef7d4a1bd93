"""Why a run did not train, from the UI alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ui import specs
from tests.ui.browsing import Ui
from tests.ui.ui_stack import NODES, UiStack

Start = Callable[[specs.Spec], str]


@pytest.fixture
def start(stack: UiStack) -> Iterator[Start]:
    """Queues a run; what still runs or waits at the end is cancelled."""
    started: list[str] = []

    def start(spec: specs.Spec) -> str:
        started.append(stack.run(spec))
        return started[-1]

    yield start
    for id in reversed(started):
        stack.cancel(id)


def test_a_crashed_trainer_is_named_with_its_line_its_log_and_what_follows(
    stack: UiStack, ui: Ui, start: Start
) -> None:
    failed = stack.until_state(start(specs.crashing()), "Failed")

    ui.open_run(failed["id"], "Artifacts")

    ui.sees("RUNTIME_ERROR", "trainer: exit code 1", specs.COMPLAINT[:30], "next: not tried again")
    ui.sees("attempt-01/trainer.log")
    ui.open_run(failed["id"], "Details")
    ui.sees("RUNTIME_ERROR: trainer (pid ", specs.COMPLAINT)


def test_the_summary_of_a_crash_answers_it_all(stack: UiStack, ui: Ui, start: Start) -> None:
    failed = stack.until_state(start(specs.crashing()), "Failed")
    of_run = {"artifacts": {"flow_run_id": {"any_": [failed["id"]]}, "key": {"any_": ["summary"]}}}
    [summary] = stack.ask("POST", "/artifacts/filter", of_run)

    ui.open(f"/v2/artifacts/artifact/{summary['id']}")

    ui.sees("what failed first", "trainer: exit code 1", "RUNTIME_ERROR", specs.COMPLAINT)
    ui.sees(str(stack.place(failed) / "attempt-01" / "trainer.log"))
    ui.sees("what happens next", "not tried again")


def test_a_broken_spec_is_refused_with_a_remedy(stack: UiStack, ui: Ui, start: Start) -> None:
    refused = stack.until_state(start(specs.broken()), "Failed")

    ui.open_run(refused["id"], "Details")

    ui.sees("USER_ERROR", "progress.jsonl: unknown name `${attmpt.dir}`")
    ui.sees("did you mean `${attempt.dir}`?")
    assert not stack.place(refused).exists()


def test_a_run_that_can_never_fit_says_what_there_is(stack: UiStack, ui: Ui, start: Start) -> None:
    refused = stack.until_state(start(specs.gang_of("too-large", 8)), "Failed")

    ui.open_run(refused["id"], "Details")

    ui.sees("INFEASIBLE: the run asks for 1 node with 8 GPUs", "there are: 1 with 2 GPUs")


def test_a_run_that_waits_for_gpus_says_for_whose(stack: UiStack, ui: Ui, start: Start) -> None:
    holder = stack.until_state(start(specs.gang_of("holds", 2)), "Running", saying="running:")
    waits = stack.until_state(start(specs.gang_of("waits", 2)), "PendingResources")

    ui.open_run(waits["id"], "Details")

    ui.sees("PendingResources", "asks for 1 node with 2 GPUs", f"waits for {holder['name']}")
    ui.open("/v2/artifacts/key/gang-queue")
    ui.sees("1 waiting", "0 of 2 GPUs are free on 1 node")
    ui.page.locator("[data-testid^=timeline-card] a").first.click()
    # It has the name of a run a moment after the state.
    ui.sees(stack.flow_run(waits["id"])["name"], "2 GPUs", f"waits for {holder['name']}")
    ui.open("/v2/artifacts/key/gang-nodes")
    ui.page.locator("[data-testid^=timeline-card] a").first.click()
    ui.sees(NODES[0].name, holder["name"])
