"""Reasons why a run waits, and which changes rewrite its state."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tasks.processes.identity import host_name
from tasks.queue import nodes, reasons
from tasks.queue.packing import Demand
from tasks.queue.policy import Reason, Why
from tasks.queue.reasons import (
    FREE_NOW,
    MAX_POSITION_WITH_FIRST_RUN,
    Message,
    describe_free,
    describe_gang,
    explain_wait,
    no_answer_message,
    paused_message,
    pool_limit_message,
    steady_part,
)
from tasks.spec.formatting import format_date_minute, format_minutes

NOW = datetime(2026, 1, 2, 13, 5, 30, tzinfo=UTC).timestamp()
NAMES = {"1": "grpo-a", "2": "ppo-b", "3": "sft-c", "4": "grpo-d", "5": "grpo-e"}
WIDE = Demand(nodes=2, gpus_per_node=8, cpus_per_gpu=3)
SMALL = Demand(nodes=1, gpus_per_node=4, cpus_per_gpu=3)
THREE = {"n0": 8, "n1": 0, "n2": 3}


def first(
    *waits_for: str,
    in_s: float | None = None,
    demand: Demand = WIDE,
    now: float = NOW,
    **there: Any,
) -> Message:
    """Return the message with the reason why the first run of the queue waits.

    Args:
        *waits_for: Ids of the runs whose GPUs the first run waits for.
        in_s: Seconds from NOW to the expected start. None if the start is unknown.
        now: Current time, in UTC epoch seconds.
        **there: Further arguments of `explain_wait`.
    """
    starts_at = None if in_s is None else NOW + in_s
    reason = Reason(why=Why.GPUS, waits_for=waits_for, starts_at=starts_at)
    return explain_wait(WIDE, reason, NAMES, **{"free": THREE, "now": now, **there})


def later(why: Why, number: int = 2, free: dict[str, int] | None = None, **more: Any) -> Message:
    """Return the message with the reason why a later run of the queue waits.

    Args:
        why: Kind of the reason.
        number: Position of the run in the queue.
        free: Mapping from the name of a node to its number of free GPUs. If None, the
            constant THREE is used.
        **more: Further arguments of `explain_wait`.
    """
    reason = Reason(why=why, waits_for=("1",), starts_at=NOW + number, tag="team-a")
    return explain_wait(SMALL, reason, NAMES, free=free or THREE, now=NOW, number=number, **more)


def test_start_after_a_run_without_hours_is_marked_as_assumed() -> None:
    reason = Reason(why=Why.GPUS, waits_for=("1",), starts_at=NOW + 86_400, is_start_assumed=True)

    message = explain_wait(WIDE, reason, NAMES, free=THREE, now=NOW)

    assert "UTC (a guess, because at least one of these runs has no `gang.hours`)" in message.text
    assert message.is_start_assumed


def test_message_of_the_first_run_names_free_gpus_and_awaited_runs() -> None:
    message = first("1", "2", in_s=4500)

    assert message.text == (
        "needs 2 nodes with 8 GPUs each; waits for grpo-a and ppo-b to end, expected 14:20 UTC; "
        "free now: 8 on 1 node, 3 on 1 node, 0 on 1 node"
    )
    assert message.text.startswith(f"needs {describe_gang(WIDE)}; {message.reason}; free")


@pytest.mark.parametrize(
    ("in_s", "expected"),
    [
        (None, "expected time unknown"),
        # the expected time has passed, or is less than a minute away: the text contains no time
        (-7200, "expected soon"),
        (59, "expected soon"),
        (60, "expected 13:06 UTC"),
        # the start is expected on another day, so the text contains the date
        (86400, "expected 2026-01-03 13:05 UTC"),
    ],
)
def test_expected_start_is_shown(in_s: float | None, expected: str) -> None:
    assert f"waits for grpo-a to end, {expected}; free now" in first("1", in_s=in_s).text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        # the run would fit on the drained nodes, so the message names these nodes
        (
            first(drained={"n3": 8}),
            "would fit on drained nodes: n3 (to use them: muster queue undrain NODE); free now: 8 "
            "on",
        ),
        (
            first("1", drained={"n3": 8}),
            "to end, expected time unknown; would fit on drained",
        ),
        # the run would fit on a node without a worker, so the text says how to start a worker
        (
            first(unserved_free={"n3": 8}, pool="gang"),
            "the run would fit on nodes without a worker: n3 (start a worker there: prefect worker "
            "start --pool gang)",
        ),
        # the run would not fit even if the drained nodes could be used
        (
            first(drained={"n3": 7}),
            "waits for missing nodes to return, because the present nodes are",
        ),
        # programs outside the queue use the GPUs that the run needs
        (first(others=5), "programs that are not in this queue use 5 GPUs"),
        # enough GPUs are free, but too few CPUs: the text names the CPUs
        (
            first("1", free={"n0": 8, "n1": 8}),
            "enough nodes have free GPUs, but too few of these nodes have 24 free CPUs; "
            "free now: 8 on 2 nodes",
        ),
        # the run waits for a run whose name is unknown, or for several runs; the text has at most
        # four names
        (first("unknown"), "waits for unknown to end"),
        (first("1", "2", "3", "4"), "waits for grpo-a, ppo-b, sft-c and grpo-d to end"),
        (first("1", "2", "3", "4", "5"), "waits for grpo-a, ppo-b, sft-c and 2 more to end"),
    ],
)
def test_reason_of_the_first_run_is_shown(message: Message, expected: str) -> None:
    assert expected in message.text


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ({}, "none"),
        ({"a": 3}, "3 on 1 node"),
        # the runs hold more GPUs of node b than node b has, so node b is shown with 0 free GPUs
        ({"a": 0, "b": -8}, "0 on 2 nodes"),
        ({"a": 1, "b": 4, "c": 8}, "8 on 1 node, 4 on 1 node, 1 on 1 node"),
        ({f"n{i}": 8 if i < 2 else 0 for i in range(128)}, "8 on 2 nodes, 0 on 126 nodes"),
    ],
)
def test_free_gpus_are_listed_largest_first(free: dict[str, int], expected: str) -> None:
    assert describe_free(free) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (later(Why.BEHIND), "waits behind grpo-a, which is first in the queue"),
        (
            later(Why.WOULD_DELAY),
            "its GPUs are free, but its start would delay grpo-a, which is first in the queue",
        ),
        (
            later(Why.LIMIT, limit=16),
            "waits because all runs with the tag team-a together may use at most 16 GPUs",
        ),
        (
            later(Why.RETRY, not_before=NOW + 65),
            "was requeued because its GPUs were not free; next try at 13:06:35 UTC",
        ),
        (paused_message(SMALL, "gang"), "waits because the work pool gang is paused"),
        (
            paused_message(SMALL, "gang", "low"),
            "waits because the queue low of the work pool gang is paused",
        ),
        (
            pool_limit_message(SMALL, "gang", 8),
            "waits for a run to end: the work pool gang is at its limit of 8 runs",
        ),
        (
            no_answer_message(SMALL, "http://ray:8265", TimeoutError("no answer\nwithin 5 s")),
            "waits for its Ray cluster, http://ray:8265, which does not answer "
            "(no answer within 5 s)",
        ),
        # the spec names no Ray cluster, and the pool lists no Ray cluster either
        (
            no_answer_message(SMALL, "", "the pool lists none"),
            "waits for nodes: the pool lists none",
        ),
    ],
)
def test_each_reason_is_one_line_after_the_demand(message: Message, expected: str) -> None:
    text, _, _free = message.text.partition(FREE_NOW)
    assert text == f"needs 1 node with 4 GPUs; {expected}"
    assert message.reason == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # only the current time is different, so the state is not rewritten
        (first("1", in_s=-60), first("1", in_s=-60, now=NOW + 600)),
        # the expected start is only 10 s later, so the state is not rewritten
        (first("1", in_s=4500), first("1", in_s=4510)),
        # only the free GPUs or the positions of later runs have changed, so the state is not
        # rewritten
        (first("1"), first("1", free={"n0": 8, "n1": 1, "n2": 3})),
        (later(Why.BEHIND), later(Why.BEHIND, free={"n0": 1})),
        (later(Why.BEHIND), later(Why.BEHIND, number=3)),
        # only a port or a memory address in the error is different, so the state is not rewritten
        (
            no_answer_message(None, "http://ray:8265", "at 0x1"),
            no_answer_message(None, "http://ray:8265", "0x2"),
        ),
        # far back in the queue, the reasons BEHIND and WOULD_DELAY have the same text
        (
            later(Why.BEHIND, number=MAX_POSITION_WITH_FIRST_RUN + 1),
            later(Why.WOULD_DELAY, number=MAX_POSITION_WITH_FIRST_RUN + 2),
        ),
    ],
)
def test_minor_changes_do_not_rewrite_the_message_of_a_waiting_run(
    before: Message, after: Message
) -> None:
    assert steady_part(before.text) == steady_part(after.text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (first("1"), first("2")),
        (first("1", in_s=4500), first("1", in_s=4600)),
        (later(Why.BEHIND), later(Why.WOULD_DELAY)),
        (later(Why.LIMIT, limit=16), later(Why.LIMIT, limit=24)),
        (
            later(Why.BEHIND, number=MAX_POSITION_WITH_FIRST_RUN),
            later(Why.BEHIND, number=MAX_POSITION_WITH_FIRST_RUN + 1),
        ),
        (paused_message(None, "gang"), paused_message(None, "gang", "low")),
    ],
)
def test_major_changes_rewrite_the_message_of_a_waiting_run(
    before: Message, after: Message
) -> None:
    assert steady_part(before.text) != steady_part(after.text)


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (None, "no GPUs"),
        (Demand(nodes=1, gpus_per_node=1, cpus_per_gpu=3), "1 node with 1 GPU"),
        (Demand(nodes=3, gpus_per_node=1, cpus_per_gpu=3), "3 nodes with 1 GPU each"),
    ],
)
def test_demand_is_shown(demand: Demand | None, expected: str) -> None:
    assert describe_gang(demand) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-1, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h 00 min"),
        (86399, "23 h 59 min"),
        (86400 * 3 + 7200, "3 d 2 h"),
    ],
)
def test_duration_is_shown_in_two_units(seconds: float, expected: str) -> None:
    assert format_minutes(seconds) == expected


def test_long_error_is_cut() -> None:
    assert len(no_answer_message(None, "a", "x" * 5000).text) < 400


def test_error_cannot_be_taken_for_html() -> None:
    assert "[urlopen error]" in no_answer_message(None, "a", "<urlopen error>").text


def test_time_is_shown_in_utc() -> None:
    assert format_date_minute(NOW) == "2026-01-02 13:05 UTC"


def test_command_that_adds_a_node_is_not_cut_off() -> None:
    # The longest name of a host has 64 characters.
    message = nodes.NO_TABLE.replace(f"node.{host_name()}=", f"node.{'h' * 64}=")

    assert reasons.one_line(message) == message
    assert message.endswith("=N`")
