"""Tests of the live region: the lines at the bottom of the terminal that show a running run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from tasks.record.events import Event
from tasks.show.run_view import ObservedRun, Pace, Row, Standing
from tasks.show.terminal import build_region
from tasks.spec.run import RunSpec

#: Time of the events, in UTC epoch seconds.
T = 1_000_000.0


def spec(**fields: Any) -> RunSpec:
    component = {"command": ["true"]}
    components = {"api": component, "trainer": component}
    content = {"name": "x", "workload": "grpo", "components": components}
    return RunSpec.model_validate(content | fields)


def observe_run(*events: Event, of: RunSpec | None = None) -> ObservedRun:
    """Return the displayed state of a run after the given events.

    The first attempt of the run begins before these events.
    """
    seen = ObservedRun(of or spec())
    for event in (BEGUN, *events):
        seen.observe(event)
    return seen


def event(name: str, component: str | None = None, at: float = T, **fields: Any) -> Event:
    return Event(at=at, name=name, component=component, fields=fields)


BEGUN = event("attempt.begun", attempt=1, run_id="x", directory="/x/attempt-01")


def rows(view: ObservedRun) -> dict[str, tuple[Standing, str]]:
    """Return the displayed state, such as ready, and the displayed note of each component."""
    return {row.name: (row.stage, row.note) for row in view.rows.values()}


def lines(view: ObservedRun, columns: int = 80, at: float = T) -> list[str]:
    """Return the lines that show the run in the terminal, without colours and trailing spaces."""
    console = Console(width=columns, color_system="truecolor", force_terminal=True)
    rows = console.render_lines(build_region(view, at), pad=False)
    return ["".join(segment.text for segment in row).rstrip() for row in rows]


def test_region_is_empty_before_the_first_event() -> None:
    assert "".join(lines(ObservedRun(spec()))) == ""


def test_starting_component_shows_the_reason_of_its_failed_probe() -> None:
    view = observe_run(
        event("component.starting", "api"),
        event("component.spawned", "api", pid=7, argv=[]),
        event("probe.failed", "api", reason="GET http://127.0.0.1:1/: connection refused"),
    )

    assert rows(view) == {
        "api": (Standing.STARTING, "GET http://127.0.0.1:1/: connection refused"),
        "trainer": (Standing.WAITING, ""),
    }
    assert lines(view, at=T + 4) == [
        "component  state     pid    age",
        "api        starting    7  4.0 s  GET http://127.0.0.1:1/: connection refused",
        "trainer    waiting",
    ]


def test_ready_component_shows_no_failed_probe() -> None:
    view = observe_run(
        event("component.spawned", "api", pid=7, argv=[]),
        event("probe.failed", "api", reason="refused"),
        event("component.ready", "api", pid=7, after_s=0.5),
        # A failed liveness probe does not change the component's row in the table. The failure is
        # printed once, above the table.
        event("probe.failed", "api", reason="no answer", misses=1, probe="live"),
    )

    assert rows(view)["api"] == (Standing.READY, "")


def test_last_status_of_a_component_is_shown() -> None:
    view = observe_run(
        event("component.spawned", "api", pid=7, argv=[]),
        event("component.status", "api", message="loading"),
        event("component.ready", "api", pid=7, after_s=0.5),
    )
    ready = rows(view)["api"]
    view.observe(event("component.status", "api", message="serving 4 models"))

    assert ready == (Standing.READY, "loading")
    assert rows(view)["api"] == (Standing.READY, "serving 4 models")


def test_ended_component_shows_exit_code_or_signal_and_its_final_age() -> None:
    view = observe_run(
        event("component.spawned", "api", pid=7, argv=[]),
        event("component.exited", "api", at=T + 3, pid=7, exit_code=None, signal="SIGKILL"),
        event("component.spawned", "trainer", pid=8, argv=[]),
        event("component.exited", "trainer", at=T + 70, pid=8, exit_code=1, signal=None),
    )

    shown = lines(view, at=T + 500)
    assert shown[1].split() == ["api", "ended", "7", "3.0", "s", "SIGKILL"]
    assert shown[2].split() == ["trainer", "ended", "8", "1", "min", "10", "s", "exit", "code", "1"]


def test_running_component_is_stopping_during_a_teardown() -> None:
    view = observe_run(
        event("component.spawned", "api", pid=7, argv=[]),
        event("component.ready", "api", pid=7, after_s=0.5),
        event("teardown.begun", reason="trainer killed by SIGSEGV", cause="trainer"),
    )

    assert rows(view)["api"][0] is Standing.STOPPING
    assert rows(view)["trainer"][0] is Standing.WAITING
    assert lines(view)[-1] == "stopping: trainer killed by SIGSEGV"


def test_ready_ray_job_shows_its_node() -> None:
    view = observe_run(
        event("component.spawned", "trainer", pid=None, submission_id="x--a01"),
        event("job.state", "trainer", status="RUNNING", place="node 10.0.0.2"),
        event("component.ready", "trainer", pid=None, after_s=0.5),
    )

    assert rows(view)["trainer"] == (Standing.READY, "job RUNNING, node 10.0.0.2")


def test_run_says_that_ray_has_not_started_its_job_yet() -> None:
    submitted = [
        event("component.starting", "trainer"),
        event("component.spawned", "trainer", pid=None, submission_id="x--a01"),
        event("job.state", "trainer", status="PENDING", place=""),
    ]
    started = event("job.state", "trainer", status="RUNNING", place="node 10.0.0.2")

    pending = observe_run(*submitted)
    running = observe_run(*submitted, started)

    assert pending.doing.startswith("starting trainer: Ray has not started the job yet")
    assert running.doing == "starting trainer"


def test_fleet_shows_the_number_of_serving_engines() -> None:
    command = ["serve", "--port", "${server.port}"]
    fleet = {"backend": "command", "command": command, "engines": 3}
    of = spec(components={"rollout": fleet})
    states = [event("rollout.group.state", "rollout", group=g, after="active") for g in range(3)]
    lost = event("rollout.group.state", "rollout", group=1, after="inactive")
    ready = event("component.ready", "rollout", pid=7, after_s=1.0)
    spawned = event("component.spawned", "rollout", pid=7, argv=[])

    before = observe_run(spawned, *states, ready, of=of)
    after = observe_run(spawned, *states, ready, lost, of=of)

    assert rows(before)["rollout"] == (Standing.READY, "3 of 3 engines serve requests")
    assert rows(after)["rollout"] == (Standing.READY, "2 of 3 engines serve requests")


def test_queued_run_shows_its_position_and_the_reason() -> None:
    seen = ObservedRun(spec())
    message = (
        "position 2 of 5 in the queue; needs 2 nodes with 8 GPUs each; waits for a-grpo to end"
    )

    seen.observe(event("run.waiting", message=message))

    shown = lines(seen, columns=40)
    assert shown[-3:] == [
        "waiting: position 2 of 5 in the queue;",
        "needs 2 nodes with 8 GPUs each; waits",
        "for a-grpo to end",
    ]


def test_new_attempt_shows_nothing_of_the_previous_attempt() -> None:
    of = spec(progress={"jsonl": "f", "step": "step", "total": 60})
    view = observe_run(
        event("component.spawned", "api", pid=7, argv=[]),
        event("run.progress", step=12.0),
        event("teardown.begun", reason="gone", cause="api"),
        event("run.state", state="pending_resources", message="INSUFFICIENT_RESOURCES: no room"),
        event("attempt.begun", attempt=2, run_id="x", directory="/x/attempt-02"),
        of=of,
    )

    assert len(lines(view)) == len(["head", "api", "trainer"])
    assert set(rows(view).values()) == {(Standing.WAITING, "")}


@pytest.mark.parametrize(
    "fields",
    [
        {"progress": {"jsonl": "f", "step": "step", "total": 40}},
        {"progress": {"jsonl": "f", "step": "step"}, "success": {"step": 40}},
    ],
)
def test_training_at_its_last_step_is_finishing(fields: dict[str, Any]) -> None:
    view = observe_run(
        event("attempt.ready"),
        event("run.progress", at=T + 1, step=39.0),
        event("run.slow", message="no step for 5 s since step 39"),
        event("run.progress", at=T + 7, step=40.0),
        of=spec(**fields),
    )

    assert lines(view, at=T + 60)[-1].endswith("last step, finishing")
    assert view.doing.startswith("finishing: the training is at its last step, step 40")


def test_stopped_run_at_its_last_step_is_stopping() -> None:
    view = observe_run(
        event("attempt.ready"),
        event("run.progress", step=40.0),
        event("teardown.begun", reason="step 40 of 40 reached", cause="trainer"),
        of=spec(progress={"jsonl": "f", "step": "step", "total": 40}),
    )

    assert "finishing" not in "".join(lines(view))
    assert view.doing == "stopping: step 40 of 40 reached"


def test_alarm_is_still_shown_at_the_last_step() -> None:
    view = observe_run(
        event("attempt.ready"),
        event("run.alarm", message="loss is nan"),
        event("run.progress", step=40.0),
        of=spec(progress={"jsonl": "f", "step": "step", "total": 40}),
    )

    assert view.doing == "alarm: loss is nan"


def test_step_bar_shows_progress_speed_and_remaining_time() -> None:
    of = spec(progress={"jsonl": "f", "step": "step", "total": 60})
    steps = [event("run.progress", at=T + n, step=10.0 + n) for n in range(11)]

    view = observe_run(*steps, of=of)

    expected = "step 20 of 60  BAR  33%  1.0 s/step  40 s left"
    for columns, width in ((100, 40), (60, 17)):
        bar = "━" * width
        shown = lines(view, columns=columns, at=T + 10)[-1].replace("╸", "━").replace("╺", "━")
        assert shown == expected.replace("BAR", bar)


def test_step_without_a_total_is_shown_without_a_bar() -> None:
    of = spec(progress={"jsonl": "f", "step": "step"})

    view = observe_run(event("run.progress", step=12.0), of=of)

    assert lines(view)[-1] == "step 12"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_state_of_a_component_is_shown_even_if_its_name_is_long(columns: int) -> None:
    seen = observe_run(event("run.progress", step=12.0))
    note = "GET http://127.0.0.1:40001/health: HTTP 503 'loading the\nmodel \x1b[31mnow'" * 3
    names = [f"component-{number}-with-a-long-name" for number in range(12)]
    seen.rows = {
        name: Row(name=name, stage=Standing.STARTING, pid=4_000_000, began_at=T - 1e5, note=note)
        for name in names
    }

    shown = lines(seen, columns=columns)

    assert sum(" starting  4000000  1 d 3 h  " in line for line in shown) == len(names)
    assert all(len(line) <= columns and "\x1b" not in line for line in shown)


@pytest.fixture
def pace() -> Iterator[Callable[..., Pace]]:
    """Return a function that makes a `Pace`, which computes the training steps per second.

    The argument of the function is a list of pairs: a time in seconds, and the step at that time.
    """

    def make_pace(*steps: tuple[float, float], total: float | None = 100) -> Pace:
        pace = Pace(total)
        for at, step in steps:
            pace.add_step(at, step)
        return pace

    yield make_pace


@pytest.mark.parametrize(
    ("steps", "now", "expected"),
    [
        # the rate (steps per second) is unknown after a single step
        ([(0, 5)], 1, None),
        ([(0, 5), (10, 25)], 10, 2.0),
        # no step has been reported for 100 s, so the rate is low
        ([(0, 5), (10, 15)], 110, 0.1),
        # the last step of the run is reached, so the rate stays the same afterwards
        ([(0, 80), (10, 100)], 500, 2.0),
        # at 20 s, the training goes back to the checkpoint of step 40, so the steps that were
        # reported before 20 s are ignored
        ([(0, 50), (10, 60), (20, 40), (30, 50)], 30, 1.0),
        # the same step is reported twice, which is no progress, so the rate is unknown
        ([(0, 5), (10, 5)], 10, None),
    ],
)
def test_rate_is_computed_from_the_recent_steps(
    pace: Callable[..., Pace], steps: list[tuple[float, float]], now: float, expected: float | None
) -> None:
    rate = pace(*steps).per_second(now)

    if expected is None:
        assert rate is None
    else:
        assert rate == pytest.approx(expected, rel=0.1)


def test_old_steps_do_not_count(pace: Callable[..., Pace]) -> None:
    slow = [(float(at * 100), float(at)) for at in range(10)]
    fast = [(1000.0 + n, 10.0 + n) for n in range(130)]

    assert pace(*slow, *fast, total=None).per_second(1130.0) == pytest.approx(1.0, rel=0.05)


def test_snapshot_does_not_change_with_later_events() -> None:
    seen = observe_run(
        event("component.starting", "api"),
        event("rollout.server.started", "rollout", rank=0, url="http://h:1"),
        event("run.progress", step=1.0),
    )

    before = seen.snapshot()
    shown_before = (lines(before), before.servers)
    seen.observe(event("component.spawned", "api", pid=7, argv=[]))
    seen.observe(event("rollout.server.started", "rollout", rank=0, url="http://h:2"))
    seen.observe(event("rollout.group.state", "rollout", group=0, ranks=[0], after="active"))
    seen.observe(event("run.progress", step=2.0))

    assert (lines(before), before.servers) == shown_before
    assert lines(seen) != lines(before) and seen.servers != before.servers
