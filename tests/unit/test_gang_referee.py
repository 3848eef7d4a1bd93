"""Tests of the referee of the gang queue: it finds each broken rule in a constructed history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.gang_referee import ComponentProcess, History, State, judge

#: GPUs of each node, in a cluster of one node and in a cluster of two nodes.
ALONE = {"n1": 8}
PAIR = {"n1": 8, "n2": 8}


def run(
    number: int,
    pending: float,
    ends: float,
    gpus: int = 8,
    on: Sequence[str] = ("n1",),
    rank: int = 1,
    end: str = "COMPLETED",
    seen: str = "",
    **changes: Any,
) -> History:
    """Return the history of a correct run with one component.

    The run is submitted at `number` / 100 s. All times are in seconds.

    Args:
        number: Number of the run, which is also its position in the queue.
        pending: Time at which the run is admitted.
        ends: Time at which the run ends.
        gpus: Number of GPUs on each node.
        on: Names of the run's nodes.
        rank: Priority of the run's queue. The lowest number is served first.
        end: Type of the run's final state.
        seen: Devices that the component saw, one character each. Default: the granted devices.
        changes: Fields of the history to replace.
    """
    placed = dict.fromkeys(on, gpus)
    component = ComponentProcess(
        attempt=1,
        pid=100 + number,
        began=pending + 1,
        ended=ends - 0.5,
        nodes=placed,
        host=next(iter(on)),
        devices=tuple(seen) or tuple(f"{number}.{device}" for device in range(gpus)),
    )
    states = [
        State(at=number / 100, type="SCHEDULED", name="Scheduled"),
        State(at=number / 100 + 0.5, type="SCHEDULED", name="PendingResources"),
        State(at=pending, type="PENDING", name="Pending"),
        State(at=pending + 0.1, type="PENDING", name="Submitting"),
        State(at=pending + 0.5, type="RUNNING", name="Running"),
        State(at=ends, type=end, name=end.title()),
    ]
    fields = {
        "name": f"r{number}",
        "nodes": len(on),
        "gpus": gpus,
        "place": (rank, number),
        "placed": placed,
        "parts": [component],
        "states": states,
    }
    return History(**{**fields, **changes})


def requeued(requeued_at: float, readmitted_at: float, ends: float) -> History:
    """Return the history of run 1, which is requeued and admitted a second time.

    Args:
        requeued_at: Time of the requeue, in seconds.
        readmitted_at: Time of the second admission, in seconds.
        ends: Time of the end, in seconds.
    """
    first = run(1, 1, requeued_at)
    second = run(1, readmitted_at, ends)
    queued = State(at=requeued_at, type="SCHEDULED", name="PendingResources", due=requeued_at + 1)
    parts = [*first.parts, replace(second.parts[0], attempt=2, pid=201)]
    return replace(second, parts=parts, states=[*first.states[:-1], queued, *second.states[2:]])


#: A correct run on node n1, admitted at 1 s, that ends at 5 s.
ONE = run(1, 1, 5)
BOTH = ("n1", "n2")


def with_state(at: float, type: str, name: str) -> History:
    """Return a copy of the history `ONE`, with one more state of the flow run.

    Args:
        at: Time of the state, in seconds.
        type: Prefect's type of the state.
        name: Name of the state.
    """
    states = [*ONE.states, State(at=at, type=type, name=name)]
    return replace(ONE, states=sorted(states, key=lambda state: state.at))


def with_part(attempt: int, began: float, ended: float) -> History:
    """Return a copy of the history `ONE`, with one more component process (pid 7).

    Args:
        attempt: Number of the attempt of the process.
        began: Start of the process, in seconds.
        ended: End of the process, in seconds.
    """
    return replace(
        ONE, parts=[*ONE.parts, ComponentProcess(attempt=attempt, pid=7, began=began, ended=ended)]
    )


def seeing(*devices: str | None, host: str = "n1") -> History:
    """Return a copy of the history `ONE`. In the copy, the component saw the given GPUs.

    Args:
        *devices: The GPUs that the component saw. A single None if the component reported no GPUs.
        host: Name of the host on which the component ran.
    """
    devices_seen = None if None in devices else devices
    return replace(ONE, parts=[replace(ONE.parts[0], devices=devices_seen, host=host)])


@pytest.mark.parametrize(
    ("runs", "nodes"),
    [
        ([ONE, run(2, 1.2, 9, on=["n2"]), run(3, 9.1, 12, on=BOTH), run(4, 12.1, 14, 3)], PAIR),
        # run 1 releases its GPUs, and run 2 gets them at the same moment
        ([ONE, run(2, 5, 9)], ALONE),
        # run 3 starts before run 2, because the work queue of run 3 has a higher priority
        ([ONE, run(3, 5.1, 9, rank=0), run(2, 9.1, 12)], ALONE),
        # run 1 is requeued, keeps its position before run 2, and holds no GPUs while it waits
        ([requeued(5, 6.5, 9), run(2, 9.1, 12)], ALONE),
    ],
)
def test_histories_that_keep_the_rules_of_the_queue_have_no_fault(
    runs: list[History], nodes: dict[str, int]
) -> None:
    assert judge(runs, nodes).faults == ()


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        # two runs together hold 9 GPUs of a node with 8 GPUs
        ([run(1, 1, 5, 5), run(2, 4.9, 8, 4)], "by their states: 9 of 8 n1 at 4.900: r1, r2"),
        # run 1 has ended, but a component of run 1 still uses GPUs that run 2 has now
        (
            [replace(ONE, parts=[replace(ONE.parts[0], ended=7)]), run(2, 5.1, 9)],
            "by the components: 16 of 8 n1 at 6.100: r1, r2",
        ),
        (
            [replace(ONE, parts=[replace(ONE.parts[0], ended=7)])],
            "a component of r1 ran 2.00 s after its gang was given back",
        ),
        # a run was admitted twice
        ([with_state(3, "PENDING", "Pending")], "r1 was admitted again 1.90 s after it had been"),
        # a component was started twice
        ([with_part(1, 4.7, 4.8)], "attempt 1 of r1 ran twice: 101, 7"),
        ([with_part(2, 3, 4)], "r1 ran twice at once: 101, 7"),
        # a component ran before its run was admitted
        ([with_part(2, 0.5, 0.6)], "(pid 7) ran without a gang"),
        # a run has completed, but its component has not ended
        (
            [replace(ONE, parts=[replace(ONE.parts[0], ended=None)])],
            "r1 completed, and its component (pid 101) never ended",
        ),
        # a later run of the queue gets GPUs that an earlier run is waiting for
        (
            [run(1, 1, 9), run(2, 9.1, 12, on=BOTH), run(3, 2, 5, 2, on=["n2"])],
            "r3 passed r2, for which there was no room",
        ),
        (
            [requeued(5, 9.5, 12), run(2, 5.5, 9), run(3, 1, 20, on=["n2"], place=(0, 0))],
            "r2 passed r1, for which there was no room",
        ),
        # the first run of the queue was not started for a long time, although its GPUs were free
        ([run(1, 30, 35), run(2, 1, 5, on=["n2"])], "r1 was admitted 29.00 s after r2"),
        # a run has no final state, or another final state than expected
        ([replace(ONE, states=ONE.states[:5])], "r1 never ended: it is RUNNING Running"),
        ([run(1, 1, 5, end="CRASHED")], "r1 ended as CRASHED"),
        # a component saw other devices than granted, or ran on another node
        ([seeing("0", "1")], "r1 has 8 GPUs, and its component saw ('0', '1')"),
        ([seeing(None)], "r1 has 8 GPUs, and its component saw None"),
        ([seeing(*"01234567", host="n2")], "r1 was granted {'n1': 8}, and ran on n2"),
        (
            [run(1, 1, 5, 1, seen="3"), run(2, 2, 6, 1, seen="3")],
            "by what they saw: 2 of 1 device 3 of n1 at 3.000: r1, r2",
        ),
        # the granted numbers of nodes and of GPUs per node differ from the requested numbers
        ([replace(ONE, nodes=2, gpus=4)], "r1 asks for 2 x 4 GPUs and was given {'n1': 8}"),
    ],
)
def test_each_broken_rule_of_the_queue_is_detected(runs: list[History], fault: str) -> None:
    assert fault in "\n".join(judge(runs, PAIR).faults)
