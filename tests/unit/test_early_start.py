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


def wait_in_line(count: int, *, gpus: int = 1, series: str = "grid") -> list[Waiting]:
    """Return waiting runs `w0`, `w1`, ... of a series, in the order of the queue."""
    demand = Demand(nodes=1, gpus_per_node=gpus, cpus_per_gpu=1)
    return [
        Waiting(id=f"w{number}", demand=demand, place=(1, number), estimate_s=600, series=series)
        for number in range(count)
    ]


def run_on(node: str, count: int, *, gpus: int = 1, series: str = "grid") -> list[Held]:
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
def test_few_runs_of_a_short_series_start_on_a_full_node(
    gpus_of_node: int, gpus_of_run: int, expected: int
) -> None:
    running = run_on("a", gpus_of_node // gpus_of_run, gpus=gpus_of_run)
    waiting = wait_in_line(5, gpus=gpus_of_run)

    decisions = plan(waiting, running, [replace(NODE, gpus=gpus_of_node)], NOW)

    first = [run.id for run in waiting[:expected]]
    assert list(decisions.admitted) == first
    assert decisions.early == frozenset(first)
    assert decisions.reasons[f"w{expected}"].why is Why.GPUS
    assert decisions.free == {"a": 0}


def test_early_runs_are_counted_in_the_next_pass() -> None:
    held = run_on("a", 10)

    decisions = plan(wait_in_line(3), held, [NODE], NOW)

    assert decisions.admitted == {}


def test_run_that_fits_does_not_count_as_an_early_start() -> None:
    decisions = plan(wait_in_line(2), run_on("a", 7), [NODE], NOW)

    assert list(decisions.admitted) == ["w0", "w1"]
    assert decisions.early == frozenset({"w1"})


@pytest.mark.parametrize(
    ("waiting", "held", "node"),
    [
        # the run does not belong to a short series
        (wait_in_line(1, series=""), run_on("a", 8), NODE),
        # another series uses the node, and its runs may be long
        (wait_in_line(1), run_on("a", 8, series="other"), NODE),
        # the GPUs of the node will not be enough for the run, even after the end of the series
        (wait_in_line(1, gpus=4), [*run_on("a", 2), *run_on("a", 6, series="other")], NODE),
        # no run starts on a drained node
        (wait_in_line(1), run_on("a", 8), replace(NODE, is_drained=True)),
        # another program has taken GPUs that runs of the series were granted
        (wait_in_line(1), run_on("a", 8), replace(NODE, others_gpus=2)),
        # GPUs are free, and CPUs are missing
        (wait_in_line(1), run_on("a", 7), replace(NODE, cpus=7)),
    ],
)
def test_run_waits_for_free_gpus(
    waiting: list[Waiting], held: list[Held], node: ClusterNode
) -> None:
    assert plan(waiting, held, [node], NOW).admitted == {}


def test_no_run_starts_early_before_an_earlier_run_of_the_queue() -> None:
    first = replace(wait_in_line(1, gpus=8, series="")[0], id="first", place=(0, 0))

    for policy in ("fifo", "backfill"):
        decisions = plan([first, *wait_in_line(2)], run_on("a", 8), [NODE], NOW, policy=policy)
        assert decisions.admitted == {}


def test_early_start_respects_nodes_to_avoid_and_requeue_delays_and_tag_limits() -> None:
    [run] = wait_in_line(1)
    held = run_on("a", 8)

    avoided = plan([replace(run, avoid=frozenset("a"))], held, [NODE], NOW)
    not_allowed = plan([replace(run, among=frozenset("b"))], held, [NODE], NOW)
    delayed = plan([replace(run, not_before=NOW + 1)], held, [NODE], NOW)
    tagged = [replace(gang, tags=frozenset({"red"})) for gang in held]
    limited = plan([replace(run, tags=frozenset({"red"}))], tagged, [NODE], NOW, limits={"red": 8})

    assert [p.admitted for p in (avoided, not_allowed, delayed, limited)] == [{}] * 4


def spec_of_step(**more: Any) -> dict[str, Any]:
    """Return the run spec of a point of a matrix whose step needs a GPU."""
    stage = {"name": "grid", "command": ["python", "point.py"], "resources": {"gpus": 1}}
    return build_run_spec(stage | more, ray_address=RAY)


def test_points_of_a_matrix_are_a_series() -> None:
    first = find_series(spec_of_step(env={"LR": "1"}), Gang(gpus_per_node=1), RAY)
    second = find_series(spec_of_step(env={"LR": "2"}), Gang(gpus_per_node=1), RAY)
    other = find_series(spec_of_step(name="eval"), Gang(gpus_per_node=1), RAY)

    assert first and first == second
    assert other not in ("", first)


@pytest.mark.parametrize(
    ("spec", "gang", "cluster"),
    [
        # Ray does not know of the GPUs before the program of the driver asks for them
        ({"ray": {}}, {"gpus_per_node": 1}, RAY),
        ({}, {"gpus_per_node": 2}, RAY),
        ({}, {"gpus_per_node": 1, "nodes": 2}, RAY),
        # no Ray
        ({}, {"gpus_per_node": 1}, ""),
        # several programs
        (
            {"components": {"a": {"launcher": "ray_job"}, "b": {"launcher": "ray_job"}}},
            {"gpus_per_node": 1},
            RAY,
        ),
        ({"components": {"a": {"launcher": "process"}}}, {"gpus_per_node": 1}, RAY),
        # the spec chooses the node
        (
            {"ray": {"entrypoint_gpus": 1, "entrypoint_label_selector": {"zone": "a"}}},
            {"gpus_per_node": 1},
            RAY,
        ),
        # a time limit
        ({"timeout_s": 60}, {"gpus_per_node": 1}, RAY),
        ({}, {"gpus_per_node": 1, "max_hours": 1}, RAY),
        # invalid content
        ({"components": "a", "ray": "b"}, {"gpus_per_node": 1}, RAY),
        ({"components": {"a": None}}, {"gpus_per_node": 1}, RAY),
    ],
)
def test_other_runs_belong_to_no_series(
    spec: dict[str, Any], gang: dict[str, Any], cluster: str
) -> None:
    assert find_series(spec_of_step() | spec, Gang(**gang), cluster) == ""


def test_series_is_short_while_all_its_last_runs_were_short() -> None:
    durations = SeriesDurations()
    found = []
    now = 0.0
    for number, duration_s in enumerate([20, 30, 400, *[10] * 8]):
        run = SeriesRun(series="grid", granted_at=now)
        found.append(durations.update({UUID(int=number): run}, now))
        now += duration_s
    found.append(durations.update({}, now))

    short = frozenset({"grid"})
    # The first run has not ended in the first call. The third run is long, and it is forgotten
    # after eight further runs.
    assert found == [frozenset(), short, short, *[frozenset()] * 8, short]
