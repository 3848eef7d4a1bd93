"""Where a run's time goes, by what its trainer writes and what is seen of GPUs and fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import pytest

from tasks.ray.dashboard import Dashboard
from tasks.record.events import Event
from tasks.rollout.metrics import Metrics
from tasks.show.slow import Slow, TimeSpent


def slow(rows: Iterable[Mapping[str, float]] = (), events: Iterable[Event] = ()) -> Slow:
    spent = TimeSpent()
    for event in events:
        spent.observe(event)
    for step, row in enumerate(rows, 1):
        spent.take(step, row)
    assert spent.slow is not None
    return spent.slow


def said(found: Slow) -> str:
    return " ".join(found.sentences())


VERL = {
    "timing_s/step": 100.0,
    "timing_s/gen": 60.0,
    "timing_s/old_log_prob": 5.0,
    "timing_s/update_actor": 20.0,
    "timing_s/update_weights": 5.0,
    "timing_s/agent_loop/slowest/generate_sequences": 59.0,
}
SLIME = {"perf/step_time": 100.0, "perf/train_time": 30.0, "perf/train_wait_time": 70.0}


@pytest.mark.parametrize(
    ("row", "shares"),
    [
        (VERL, {"rollout": 0.6, "training": 0.25, "other": 0.1, "weight sync": 0.05}),
        # verl's own file has them a level below.
        ({"data": VERL}, {"rollout": 0.6, "training": 0.25, "other": 0.1, "weight sync": 0.05}),
        # The trainer waits for the rollout, and that is no wait besides ...
        (
            {**SLIME, "perf/rollout_time": 62.0, "perf/update_weights_time": 3.0},
            {"rollout": 0.62, "training": 0.3, "waiting": 0.05, "weight sync": 0.03, "other": 0.0},
        ),
        # ... but where it goes on beside the training, only what is waited for it counts.
        (
            {**SLIME, "perf/rollout_time": 95.0},
            {"waiting": 0.7, "training": 0.3, "other": 0.0},
        ),
        (
            {"time/step": 10.0, "time/wait_for_batch": 7.0, "time/forward_backward": 3.0},
            {"waiting": 0.7, "training": 0.3, "other": 0.0},
        ),
        # No step as a whole: its parts make it up.
        (
            {"timeperf/rollout": 6.0, "timeperf/train_step": 2.0},
            {"rollout": 0.75, "training": 0.25, "other": 0.0},
        ),
        # A step, and nothing of its parts.
        ({"step_time": 10.0}, {}),
    ],
)
def test_the_parts_of_a_step_make_up_the_whole(
    row: Mapping[str, float], shares: Mapping[str, float]
) -> None:
    assert slow([row] * 3).shares == pytest.approx(shares)


def test_steps_that_take_longer_than_before_are_held_against_the_runs_own_past() -> None:
    past = {"time/step": 10.0, "time/wait_for_batch": 4.0, "time/forward_backward": 6.0}
    late = {"time/step": 25.0, "time/wait_for_batch": 18.0, "time/forward_backward": 7.0}

    found = slow([past] * 50 + [late] * 10)

    assert found.step is not None
    assert (found.step.now, found.step.before) == (25.0, 10.0)
    assert said(found) == (
        "A step takes 25 s: waiting 72%, training 28%. "
        "This is 2.5 times the duration of earlier steps, 10 s. "
        "Most of the increase is in waiting: 14 s."
    )


@pytest.mark.parametrize("count", [1, 12])
def test_without_a_past_or_a_change_there_is_nothing_to_compare(count: int) -> None:
    assert said(slow([{"step_time": 10.0}] * count)) == "A step takes 10 s."


def test_a_step_that_is_trained_again_counts_once_and_its_lines_count_together() -> None:
    spent = TimeSpent()
    first = (0, SLIME)  # It waited for the start of all.
    for step, row in (first, (1, SLIME), (1, {"perf/rollout_time": 70.0}), (2, SLIME), (1, SLIME)):
        spent.take(step, row)

    assert spent.slow is not None
    assert spent.slow.parts["rollout"].now == pytest.approx(35.0)


def test_without_figures_steps_are_timed_as_they_are_seen() -> None:
    seen = ((0, 0), (5, 1), (25, 3))
    events = [Event(at=at, name="run.progress", fields={"step": step}) for at, step in seen]

    found = slow(events=events)

    assert found.step is not None and found.step.now == pytest.approx((5 + 10 + 10) / 3)


def test_idle_nodes_and_slow_answers_are_named() -> None:
    busy = Event(at=1.0, name="run.load", fields={"gpus": {"n1": 0.9, "n2": 0.1}})
    tail = {"count": 100, "p50": 2.0, "p99": 30.0, "max": 90.0}
    fleet = [
        Event(at=1.0, name="rollout.load", fields={"requests": {**tail, "max": longest}})
        for longest in (90.0, 40.0)
    ]

    found = slow(events=[busy, *fleet])

    assert said(found) == (
        "The GPUs are 50% busy on average. The least busy nodes are n2 10% and n1 90%. "
        "Response times of the fleet: median 2.0 s, 99th percentile 30 s, maximum 1 min 30 s."
    )
    assert found.as_json()["gpus"]["n2"] == {"now": 0.1, "before": None}


def test_of_a_run_without_any_of_it_nothing_is_said() -> None:
    spent = TimeSpent()
    spent.observe(Event(at=1.0, name="run.progress", fields={"step": 1}))
    spent.take(1, {"reward": 0.5})

    assert spent.slow is None


def test_a_gateway_says_how_long_the_answers_took_since_it_was_asked_last() -> None:
    fleet: Any = None
    metrics = Metrics(fleet, pieces=Counter())
    for took_s in (*[1.0] * 90, *[30.0] * 9, 120.0):
        metrics.ended(200, took_s)
    metrics.ended(499, 3600.0)

    load = metrics.load()

    assert (load["count"], load["max"]) == (100, 120.0)
    assert load["p50"] == pytest.approx(1.0, rel=0.03)
    assert load["p99"] == pytest.approx(30.0, rel=0.03)
    assert metrics.load() == {}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"n1": 0.45, "n2": 0.0}),
        # Of a part of a node nobody knows which: the busiest ones.
        ({"n1": 1}, {"n1": 0.9}),
        ({"n2/abcdef01": 2}, {"n2/abcdef01": 0.0}),
        ({"elsewhere": 8}, {}),
    ],
)
async def test_a_cluster_says_what_the_gpus_of_each_node_do(
    given: Mapping[str, int], found: Mapping[str, float]
) -> None:
    nodes = [
        {
            "raylet": {"nodeName": "n1", "nodeId": "00"},
            "gpus": [{"utilizationGpu": 0}, {"utilizationGpu": 90}],
        },
        {
            "raylet": {"nodeName": "n2", "nodeId": "abcdef0123"},
            "gpus": [{"utilizationGpu": -1}, {"utilizationGpu": 0}],
        },
        {"raylet": {"nodeName": "head", "nodeId": "11"}, "gpus": []},
        # One that has just joined.
        {"raylet": {}},
    ]
    dashboard = Dashboard("http://cluster:8265")
    vars(dashboard)["_client"] = httpx.AsyncClient(
        base_url=dashboard.address,
        transport=httpx.MockTransport(
            lambda request: httpx.Response(200, json={"data": {"summary": nodes}})
        ),
    )

    assert await dashboard.gpu_use(given) == pytest.approx(found)
    await dashboard.aclose()
