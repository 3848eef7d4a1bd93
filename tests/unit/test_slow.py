"""Tests of `TimeSpent`: the time of a run by training step, GPU utilisation and engine latency."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import httpx
import pytest

from tasks.ray.dashboard import Dashboard
from tasks.record.events import Event
from tasks.rollout.metrics import Metrics
from tasks.show.slow import Slow, TimeSpent


def slow(rows: Iterable[Mapping[str, float]] = (), events: Iterable[Event] = ()) -> Slow:
    """Return the analysis of how a run spent its time, for example in rollout or in waiting.

    Args:
        rows: Metrics of the run, one row per training step.
        events: Events of the run.
    """
    spent = TimeSpent()
    for event in events:
        spent.observe(event)
    for step, row in enumerate(rows, 1):
        spent.take(step, row)
    assert spent.slow is not None
    return spent.slow


def text_of(analysis: Slow) -> str:
    """Return the sentences of an analysis, as `muster` shows them to the user, in one text."""
    return " ".join(analysis.sentences())


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
        # verl's own metrics file has the durations in a mapping under the key `data`.
        ({"data": VERL}, {"rollout": 0.6, "training": 0.25, "other": 0.1, "weight sync": 0.05}),
        # The trainer waits for 70 s. This time contains 62 s of rollout and 3 s of weight sync, so
        # only 5 s count as waiting.
        (
            {**SLIME, "perf/rollout_time": 62.0, "perf/update_weights_time": 3.0},
            {"rollout": 0.62, "training": 0.3, "waiting": 0.05, "weight sync": 0.03, "other": 0.0},
        ),
        # The rollout (95 s) and the training (30 s) overlap, so the rollout has no share of its
        # own. The time in which the trainer waits for the rollout is shown as waiting.
        (
            {**SLIME, "perf/rollout_time": 95.0},
            {"waiting": 0.7, "training": 0.3, "other": 0.0},
        ),
        (
            {"time/step": 10.0, "time/wait_for_batch": 7.0, "time/forward_backward": 3.0},
            {"waiting": 0.7, "training": 0.3, "other": 0.0},
        ),
        # The metrics have no duration of the whole step, so the sum of the parts is used.
        (
            {"timeperf/rollout": 6.0, "timeperf/train_step": 2.0},
            {"rollout": 0.75, "training": 0.25, "other": 0.0},
        ),
        # The metrics have only the duration of the whole step, so no share of a part is known.
        ({"step_time": 10.0}, {}),
    ],
)
def test_shares_of_a_step_add_up_to_the_whole_step(
    row: Mapping[str, float], shares: Mapping[str, float]
) -> None:
    assert slow([row] * 3).shares == pytest.approx(shares)


def test_slower_steps_are_compared_with_earlier_steps_of_the_run() -> None:
    usual_row = {"time/step": 10.0, "time/wait_for_batch": 4.0, "time/forward_backward": 6.0}
    slow_row = {"time/step": 25.0, "time/wait_for_batch": 18.0, "time/forward_backward": 7.0}

    analysis = slow([usual_row] * 50 + [slow_row] * 10)

    assert analysis.step is not None
    assert (analysis.step.now, analysis.step.before) == (25.0, 10.0)
    assert text_of(analysis) == (
        "A training step takes 25 s: waiting 72%, training 28%. A step now takes 2.5 times as long "
        "as the earlier steps, which took 10 s each. The largest increase is 14 s, in the part "
        '"waiting" of the step.'
    )


def read_progress(step_times: Iterable[float]) -> list[Event]:
    """Return the progress events of a training, whose current step is read every half second.

    Args:
        step_times: Durations of the steps in seconds.
    """
    ends = [*accumulate(step_times)]
    events = []
    seen = 0
    for poll in range(int(ends[-1] * 2)):
        at = poll / 2
        step = bisect_right(ends, at)
        if step > seen:
            seen = step
            events.append(Event(at=at, name="run.progress", fields={"step": step}))
    return events


@pytest.mark.parametrize("step_s", [0.07, 0.3, 0.45, 0.7, 1.1])
@pytest.mark.parametrize("seed", range(20))
def test_steps_that_are_read_at_intervals_do_not_count_as_slower(step_s: float, seed: int) -> None:
    noise = random.Random(seed)
    step_times = [step_s * noise.uniform(0.9, 1.1) for _ in range(noise.randint(60, 200))]

    analysis = slow(events=read_progress(step_times))

    assert "times as long" not in text_of(analysis)


@pytest.mark.parametrize("count", range(25, 45))
def test_regular_evaluation_does_not_count_as_slower(count: int) -> None:
    rows = [{"step_time": 60.0 if step % 5 == 0 else 10.0} for step in range(count)]

    assert "times as long" not in text_of(slow(rows))


@pytest.mark.parametrize("step_s", [0.07, 0.3, 0.7, 5.0])
def test_slower_steps_are_noticed_if_the_step_is_read_at_intervals(step_s: float) -> None:
    step_times = [step_s] * 600 + [3 * step_s] * 60

    text = text_of(slow(events=read_progress(step_times)))

    assert "times as long" in text


@pytest.mark.parametrize("count", [1, 12])
def test_few_or_equal_steps_are_not_compared(count: int) -> None:
    assert text_of(slow([{"step_time": 10.0}] * count)) == "A training step takes 10 s."


def test_repeated_step_counts_once_and_its_lines_are_merged() -> None:
    spent = TimeSpent()
    rows: list[tuple[int, dict[str, float]]] = [
        # The first step is not counted, because its duration includes the start of the components.
        (0, SLIME),
        (1, SLIME),
        (1, {"perf/rollout_time": 70.0}),
        (2, SLIME),
        (1, SLIME),
    ]

    for step, row in rows:
        spent.take(step, row)

    assert spent.slow is not None
    assert spent.slow.parts["rollout"].now == pytest.approx(35.0)


def test_steps_without_figures_are_timed_by_progress_events() -> None:
    progress = ((0, 0), (5, 1), (25, 3))
    events = [Event(at=at, name="run.progress", fields={"step": step}) for at, step in progress]

    analysis = slow(events=events)

    assert analysis.step is not None and analysis.step.now == pytest.approx((5 + 10 + 10) / 3)


@pytest.mark.parametrize(("step_s", "is_shown"), [(0.27, False), (2.0, True)])
def test_duration_of_a_step_is_shown_only_if_the_step_was_read_often_enough(
    step_s: float, is_shown: bool
) -> None:
    spent = TimeSpent(read_every_s=0.5)

    for event in read_progress([step_s] * 4):
        spent.observe(event)

    assert (spent.slow is not None) is is_shown


def test_long_interval_between_readings_needs_a_longer_measurement() -> None:
    events = read_progress([2.0] * 4)
    frequent = TimeSpent(read_every_s=0.5)
    seldom = TimeSpent(read_every_s=10.0)

    for event in events:
        frequent.observe(event)
        seldom.observe(event)

    assert frequent.slow is not None
    assert seldom.slow is None


def test_idle_nodes_and_slow_responses_are_named() -> None:
    gpu_load = Event(at=1.0, name="run.load", fields={"gpus": {"n1": 0.9, "n2": 0.1}})
    latencies = {"count": 100, "p50": 2.0, "p99": 30.0, "max": 90.0}
    fleet_loads = [
        Event(at=1.0, name="rollout.load", fields={"requests": {**latencies, "max": longest}})
        for longest in (90.0, 40.0)
    ]

    analysis = slow(events=[gpu_load, *fleet_loads])

    assert text_of(analysis) == (
        "The GPUs are 50% busy on average. The least busy nodes are n2 10% and n1 90%. "
        "Response times of the inference servers: median 2.0 s, 99th percentile 30 s, "
        "maximum 1 min 30 s."
    )
    assert analysis.as_json()["gpus"]["n2"] == {"now": 0.1, "before": None}


def test_run_without_timings_has_no_analysis() -> None:
    spent = TimeSpent()
    spent.observe(Event(at=1.0, name="run.progress", fields={"step": 1}))
    spent.take(1, {"reward": 0.5})

    assert spent.slow is None


def test_gateway_reports_response_times_since_the_last_request() -> None:
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
    ("granted_gpus", "expected"),
    [
        ({}, {"n1": 0.45, "n2": 0.0}),
        # The run uses one of two GPUs, and Muster does not know which GPU. So the utilisation of
        # the busier GPU is used.
        ({"n1": 1}, {"n1": 0.9}),
        ({"n2/abcdef01": 2}, {"n2/abcdef01": 0.0}),
        ({"elsewhere": 8}, {}),
    ],
)
async def test_gpu_utilisation_is_read_for_each_granted_node(
    granted_gpus: Mapping[str, int], expected: Mapping[str, float]
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
        # A node that has just joined the cluster has no utilisation values yet.
        {"raylet": {}},
    ]
    dashboard = Dashboard("http://cluster:8265")
    vars(dashboard)["_client"] = httpx.AsyncClient(
        base_url=dashboard.address,
        transport=httpx.MockTransport(
            lambda request: httpx.Response(200, json={"data": {"summary": nodes}})
        ),
    )

    utilisation = await dashboard.gpu_use(granted_gpus)
    await dashboard.aclose()

    assert utilisation == pytest.approx(expected)
