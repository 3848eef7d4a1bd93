"""Early starts: short runs of a series start before the GPUs that they need are free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tasks.queue.early_start import SeriesDurations, SeriesRun, find_series
from tasks.queue.packing import Demand
from tasks.queue.policy import Held, Waiting, Why, plan
from tasks.ray.usage import ClusterNode
from tasks.spec.run import Gang
from tasks.spec.step import build_run_spec

NOW = 1000.0
RAY = "http://ray:8265"
NODE = ClusterNode(name="a", gpus=8)


def make_waiting_runs(count: int, *, gpus: int = 1, series: str = "grid") -> list[Waiting]:
    """Return waiting runs `w0`, `w1`, ... of a series, in the order of the queue."""
    demand = Demand(nodes=1, gpus_per_node=gpus, cpus_per_gpu=1)
    return [
        Waiting(id=f"w{number}", demand=demand, place=(1, number), estimate_s=600, series=series)
        for number in range(count)
    ]


def make_active_runs(node: str, count: int, *, gpus: int = 1, series: str = "grid") -> list[Held]:
    """Return runs of a series that hold GPUs of a node."""
    return [
        Held(
            id=f"{series}-{node}-{number}",
            gpus={node: gpus},
            cpus_per_gpu=1,
            place=(0, number),
            ends_at=NOW + 60,
            series=series,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("gpus_of_node", "gpus_of_run", "expected"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 2), (8, 2, 1), (8, 8, 1), (16, 2, 2)],
)
def test_limited_number_of_short_runs_starts_early_on_a_full_node(
    gpus_of_node: int, gpus_of_run: int, expected: int
) -> None:
    running = make_active_runs("a", gpus_of_node // gpus_of_run, gpus=gpus_of_run)
    waiting = make_waiting_runs(5, gpus=gpus_of_run)

    decisions = plan(waiting, running, [replace(NODE, gpus=gpus_of_node)], NOW)

    first = [run.id for run in waiting[:expected]]
    assert list(decisions.admitted) == first
    assert decisions.early == frozenset(first)
    assert decisions.reasons[f"w{expected}"].why is Why.GPUS
    assert decisions.free == {"a": 0}


def test_early_runs_of_earlier_passes_count_against_the_limit() -> None:
    held = make_active_runs("a", 10)

    decisions = plan(make_waiting_runs(3), held, [NODE], NOW)

    assert decisions.admitted == {}


def test_run_that_fits_does_not_count_as_an_early_start() -> None:
    decisions = plan(make_waiting_runs(2), make_active_runs("a", 7), [NODE], NOW)

    assert list(decisions.admitted) == ["w0", "w1"]
    assert decisions.early == frozenset({"w1"})


@pytest.mark.parametrize(
    ("waiting", "held", "node"),
    [
        # the runs of the waiting run's series are not short
        (make_waiting_runs(1, series=""), make_active_runs("a", 8), NODE),
        # another series uses the node, and its runs may be long
        (make_waiting_runs(1), make_active_runs("a", 8, series="other"), NODE),
        # even after all runs of the series on the node have ended, the node has too few free GPUs
        (
            make_waiting_runs(1, gpus=4),
            [*make_active_runs("a", 2), *make_active_runs("a", 6, series="other")],
            NODE,
        ),
        # a short run would wait for another series, whose runs may be long
        (make_waiting_runs(1, gpus=4), make_active_runs("a", 6, series="other"), NODE),
        # no run starts on a drained node
        (make_waiting_runs(1), make_active_runs("a", 8), replace(NODE, is_drained=True)),
        # another program uses GPUs that were granted to runs of the series
        (make_waiting_runs(1), make_active_runs("a", 8), replace(NODE, others_gpus=2)),
        # a GPU is free, but no CPU
        (make_waiting_runs(1), make_active_runs("a", 7), replace(NODE, cpus=7)),
    ],
)
def test_run_does_not_start_early(
    waiting: list[Waiting], held: list[Held], node: ClusterNode
) -> None:
    assert plan(waiting, held, [node], NOW).admitted == {}


def test_early_start_does_not_pass_the_first_run_of_the_queue() -> None:
    first = replace(make_waiting_runs(1, gpus=8, series="")[0], id="first", place=(0, 0))

    for policy in ("fifo", "backfill"):
        decisions = plan(
            [first, *make_waiting_runs(2)], make_active_runs("a", 8), [NODE], NOW, policy=policy
        )
        assert decisions.admitted == {}


def test_early_start_respects_node_choice_requeue_delay_and_tag_limit() -> None:
    [run] = make_waiting_runs(1)
    held = make_active_runs("a", 8)

    avoided = plan([replace(run, avoid=frozenset("a"))], held, [NODE], NOW)
    not_allowed = plan([replace(run, among=frozenset("b"))], held, [NODE], NOW)
    delayed = plan([replace(run, not_before=NOW + 1)], held, [NODE], NOW)
    tagged = [replace(gang, tags=frozenset({"red"})) for gang in held]
    limited = plan([replace(run, tags=frozenset({"red"}))], tagged, [NODE], NOW, limits={"red": 8})

    assert [decisions.admitted for decisions in (avoided, not_allowed, delayed, limited)] == [
        {}
    ] * 4


def spec_of_step(**changes: Any) -> dict[str, Any]:
    """Return the run spec of one point of a matrix step that needs one GPU.

    Args:
        **changes: Keys of the step that replace or extend its usual keys.
    """
    stage = {"name": "grid", "command": ["python", "point.py"], "resources": {"gpus": 1}}
    return build_run_spec(stage | changes, ray_address=RAY)


def test_points_of_a_matrix_are_a_series() -> None:
    first = find_series(spec_of_step(env={"LR": "1"}), Gang(gpus_per_node=1), RAY)
    second = find_series(spec_of_step(env={"LR": "2"}), Gang(gpus_per_node=1), RAY)
    other = find_series(spec_of_step(name="eval"), Gang(gpus_per_node=1), RAY)

    assert first and first == second
    assert other not in ("", first)


@pytest.mark.parametrize(
    ("spec", "gang", "cluster"),
    [
        # the driver does not take all GPUs of the run
        ({"ray": {}}, {"gpus_per_node": 1}, RAY),
        ({}, {"gpus_per_node": 2}, RAY),
        ({}, {"gpus_per_node": 1, "nodes": 2}, RAY),
        # no Ray
        ({}, {"gpus_per_node": 1}, ""),
        # several components
        (
            {"components": {"a": {"launcher": "ray_job"}, "b": {"launcher": "ray_job"}}},
            {"gpus_per_node": 1},
            RAY,
        ),
        # no Ray job
        ({"components": {"a": {"launcher": "process"}}}, {"gpus_per_node": 1}, RAY),
        # the spec chooses the node
        (
            {"ray": {"entrypoint_gpus": 1, "entrypoint_label_selector": {"zone": "a"}}},
            {"gpus_per_node": 1},
            RAY,
        ),
        # a time limit
        ({"ray": {"entrypoint_gpus": 1, "start_within_s": 60}}, {"gpus_per_node": 1}, RAY),
        ({"ray": {"entrypoint_gpus": 1, "start_within_s": "x"}}, {"gpus_per_node": 1}, RAY),
        ({"timeout_s": 60}, {"gpus_per_node": 1}, RAY),
        ({}, {"gpus_per_node": 1, "max_hours": 1}, RAY),
        # invalid spec
        ({"components": "a", "ray": "b"}, {"gpus_per_node": 1}, RAY),
        ({"components": {"a": None}}, {"gpus_per_node": 1}, RAY),
    ],
)
def test_run_that_must_never_start_early_belongs_to_no_series(
    spec: dict[str, Any], gang: dict[str, Any], cluster: str
) -> None:
    assert find_series(spec_of_step() | spec, Gang(**gang), cluster) == ""


GRID = frozenset({"grid"})


class Cluster:
    """The runs of the series `grid` on a cluster, as the scheduler sees them over time."""

    def __init__(self) -> None:
        self.durations = SeriesDurations()
        self.now = 0.0
        self.holding: dict[UUID, SeriesRun] = {}

    def start(self, number: int, *, is_early: bool = False, node: str = "a") -> None:
        self.holding[UUID(int=number)] = SeriesRun(
            series="grid", node=node, granted_at=self.now, is_early=is_early
        )

    def wait(self, duration_s: float) -> frozenset[str]:
        """Let some time pass, and return the series that are short then."""
        self.durations.update(self.holding, (), self.now)
        self.now += duration_s
        return self.durations.update(self.holding, (), self.now)

    def end(self, number: int, *, is_completed: bool = True) -> frozenset[str]:
        """End a run, and return the series that are short then."""
        self.durations.update(self.holding, (), self.now)
        self.holding = {run: held for run, held in self.holding.items() if run.int != number}
        completed = [UUID(int=number)] if is_completed else []
        return self.durations.update(self.holding, completed, self.now)


def test_series_is_short_if_its_last_eight_completed_runs_were_short() -> None:
    cluster = Cluster()
    short_series = []
    for number, duration_s in enumerate([20, 30, 400, *[10] * 8]):
        cluster.start(number)
        cluster.wait(duration_s)
        short_series.append(cluster.end(number))

    # One completed run does not make a series short. The third run is long, so the series is not
    # short until eight further runs have completed.
    assert short_series == [frozenset(), GRID, *[frozenset()] * 8, GRID]


def test_failed_and_cancelled_runs_do_not_make_a_series_short() -> None:
    cluster = Cluster()
    for number in range(8):
        cluster.start(number)
    cluster.wait(20)

    short_series = [cluster.end(number, is_completed=False) for number in range(4)]

    assert short_series == [frozenset()] * 4


def test_series_is_not_short_while_an_active_run_uses_its_gpus_for_a_long_time() -> None:
    cluster = Cluster()
    for number in range(3):
        cluster.start(number)
    cluster.wait(20)
    cluster.end(0)

    assert cluster.end(1) == GRID
    assert cluster.wait(270) == GRID
    assert cluster.wait(20) == frozenset()


def test_duration_of_an_early_run_does_not_include_the_wait_for_gpus() -> None:
    cluster = Cluster()
    for number in range(2):
        cluster.start(number)
    cluster.wait(200)
    cluster.end(0)
    cluster.end(1)
    cluster.start(2)
    cluster.start(3, is_early=True)
    cluster.start(4, is_early=True)
    cluster.wait(200)
    cluster.end(2)
    # Run 3 uses the GPUs from now on. Run 4 waits for the end of run 3.
    assert cluster.wait(200) == GRID
    assert cluster.end(3) == GRID
    assert cluster.wait(200) == GRID
    # Run 4 is the first run that uses GPUs for longer than five minutes.
    assert cluster.wait(200) == frozenset()


def test_early_run_does_not_take_over_gpus_of_another_node() -> None:
    cluster = Cluster()
    cluster.start(0)
    cluster.start(1, node="b")
    cluster.start(2, is_early=True)
    cluster.wait(100)
    cluster.end(1)
    cluster.wait(200)

    # Run 2 got its GPUs only now, from run 0.
    assert cluster.end(0) == GRID
    assert cluster.wait(290) == GRID


def test_early_run_that_ends_before_it_gets_gpus_has_no_duration() -> None:
    cluster = Cluster()
    cluster.start(0)
    cluster.start(1, is_early=True)
    cluster.wait(100)

    cluster.end(1)

    assert cluster.end(0) == frozenset()
