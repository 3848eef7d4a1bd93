"""The live region: what it says of a run at each moment, and in how much room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from tasks.record.events import Event
from tasks.show.terminal import build_region
from tasks.show.view import Pace, Row, RunSeen, Standing
from tasks.spec.run import RunSpec

T = 1_000_000.0


def spec(**more: Any) -> RunSpec:
    one = {"command": ["true"]}
    content = {"name": "x", "workload": "grpo", "components": {"api": one, "trainer": one}}
    return RunSpec.model_validate(content | more)


def viewed(*events: Event, of: RunSpec | None = None) -> RunSeen:
    seen = RunSeen(of or spec())
    for event in (BEGUN, *events):
        seen.observe(event)
    return seen


def event(name: str, component: str | None = None, at: float = T, **fields: Any) -> Event:
    return Event(at=at, name=name, component=component, fields=fields)


BEGUN = event("attempt.begun", attempt=1, run_id="x", directory="/x/attempt-01")


def rows(picture: RunSeen) -> dict[str, tuple[Standing, str]]:
    return {row.name: (row.stage, row.note) for row in picture.rows.values()}


def lines(picture: RunSeen, columns: int = 80, at: float = T) -> list[str]:
    console = Console(width=columns, color_system="truecolor", force_terminal=True)
    rows = console.render_lines(build_region(picture, at), pad=False)
    return ["".join(segment.text for segment in row).rstrip() for row in rows]


def test_before_anything_has_happened_nothing_is_shown() -> None:
    assert "".join(lines(RunSeen(spec()))) == ""


def test_a_component_that_starts_says_what_its_probe_answered() -> None:
    picture = viewed(
        event("component.starting", "api"),
        event("component.spawned", "api", pid=7, argv=[]),
        event("probe.failed", "api", reason="GET http://127.0.0.1:1/: connection refused"),
    )

    assert rows(picture) == {
        "api": (Standing.STARTING, "GET http://127.0.0.1:1/: connection refused"),
        "trainer": (Standing.WAITING, ""),
    }
    assert lines(picture, at=T + 4) == [
        "component  state     pid    age",
        "api        starting    7  4.0 s  GET http://127.0.0.1:1/: connection refused",
        "trainer    waiting",
    ]


def test_what_a_probe_answered_is_over_once_it_is_ready() -> None:
    picture = viewed(
        event("component.spawned", "api", pid=7, argv=[]),
        event("probe.failed", "api", reason="refused"),
        event("component.ready", "api", pid=7, after_s=0.5),
        # of liveness, which a line tells
        event("probe.failed", "api", reason="no answer", misses=1, probe="live"),
    )

    assert rows(picture)["api"] == (Standing.READY, "")


def test_the_last_status_of_a_component_stands_beside_it() -> None:
    picture = viewed(
        event("component.spawned", "api", pid=7, argv=[]),
        event("component.status", "api", message="loading"),
        event("component.ready", "api", pid=7, after_s=0.5),
    )
    ready = rows(picture)["api"]
    picture.observe(event("component.status", "api", message="serving 4 models"))

    assert ready == (Standing.READY, "loading")
    assert rows(picture)["api"] == (Standing.READY, "serving 4 models")


def test_an_end_is_told_by_its_exit_code_or_signal_and_its_age_stands_still() -> None:
    picture = viewed(
        event("component.spawned", "api", pid=7, argv=[]),
        event("component.exited", "api", at=T + 3, pid=7, exit_code=None, signal="SIGKILL"),
        event("component.spawned", "trainer", pid=8, argv=[]),
        event("component.exited", "trainer", at=T + 70, pid=8, exit_code=1, signal=None),
    )

    shown = lines(picture, at=T + 500)
    assert shown[1].split() == ["api", "ended", "7", "3.0", "s", "SIGKILL"]
    assert shown[2].split() == ["trainer", "ended", "8", "1", "min", "10", "s", "exit", "code", "1"]


def test_what_runs_at_a_teardown_is_stopping() -> None:
    picture = viewed(
        event("component.spawned", "api", pid=7, argv=[]),
        event("component.ready", "api", pid=7, after_s=0.5),
        event("teardown.begun", reason="trainer killed by SIGSEGV", cause="trainer"),
    )

    assert rows(picture)["api"][0] is Standing.STOPPING
    assert rows(picture)["trainer"][0] is Standing.WAITING
    assert lines(picture)[-1] == "stopping: trainer killed by SIGSEGV"


def test_a_job_says_where_it_runs_also_when_it_is_ready() -> None:
    picture = viewed(
        event("component.spawned", "trainer", pid=None, submission_id="x--a01"),
        event("job.state", "trainer", status="RUNNING", place="node 10.0.0.2"),
        event("component.ready", "trainer", pid=None, after_s=0.5),
    )

    assert rows(picture)["trainer"] == (Standing.READY, "job RUNNING, node 10.0.0.2")


def test_a_fleet_says_how_many_engines_serve() -> None:
    command = ["serve", "--port", "${server.port}"]
    fleet = {"backend": "command", "command": command, "engines": 3}
    of = spec(components={"rollout": fleet})
    states = [event("rollout.group.state", "rollout", group=g, after="active") for g in range(3)]
    lost = event("rollout.group.state", "rollout", group=1, after="inactive")
    ready = event("component.ready", "rollout", pid=7, after_s=1.0)
    spawned = event("component.spawned", "rollout", pid=7, argv=[])

    before = viewed(spawned, *states, ready, of=of)
    after = viewed(spawned, *states, ready, lost, of=of)

    assert rows(before)["rollout"] == (Standing.READY, "3 of 3 engines serve")
    assert rows(after)["rollout"] == (Standing.READY, "2 of 3 engines serve")


def test_a_run_that_waits_for_its_gang_says_its_place_and_why() -> None:
    seen = RunSeen(spec())
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


def test_a_new_attempt_begins_with_nothing_of_the_one_before() -> None:
    of = spec(progress={"jsonl": "f", "step": "step", "total": 60})
    picture = viewed(
        event("component.spawned", "api", pid=7, argv=[]),
        event("run.progress", step=12.0),
        event("teardown.begun", reason="gone", cause="api"),
        event("run.state", state="pending_resources", message="INSUFFICIENT_RESOURCES: no room"),
        event("attempt.begun", attempt=2, run_id="x", directory="/x/attempt-02"),
        of=of,
    )

    assert len(lines(picture)) == len(["head", "api", "trainer"])
    assert set(rows(picture).values()) == {(Standing.WAITING, "")}


def test_the_step_bar_says_how_far_how_fast_and_how_long_still() -> None:
    of = spec(progress={"jsonl": "f", "step": "step", "total": 60})
    steps = [event("run.progress", at=T + n, step=10.0 + n) for n in range(11)]

    picture = viewed(*steps, of=of)

    said = "step 20 of 60  BAR  33%  1.0 s/step  40 s left"
    for columns, width in ((100, 40), (60, 17)):
        bar = "━" * width
        shown = lines(picture, columns=columns, at=T + 10)[-1].replace("╸", "━").replace("╺", "━")
        assert shown == said.replace("BAR", bar)


def test_without_a_total_the_step_stands_alone() -> None:
    of = spec(progress={"jsonl": "f", "step": "step"})

    picture = viewed(event("run.progress", step=12.0), of=of)

    assert lines(picture)[-1] == "step 12"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_state_of_each_component_is_there_however_long_its_name_is(columns: int) -> None:
    seen = viewed(event("run.progress", step=12.0))
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
    def of(*seen: tuple[float, float], total: float | None = 100) -> Pace:
        made = Pace(total)
        for at, step in seen:
            made.see(at, step)
        return made

    yield of


@pytest.mark.parametrize(
    ("seen", "now", "expected"),
    [
        # nobody can say by one step
        ([(0, 5)], 1, None),
        ([(0, 5), (10, 25)], 10, 2.0),
        # a step that is due has not come: it grows slower
        ([(0, 5), (10, 15)], 110, 0.1),
        # the last one is reached: it stays
        ([(0, 80), (10, 100)], 500, 2.0),
        # back to a checkpoint: anew from there
        ([(0, 50), (10, 60), (20, 40), (30, 50)], 30, 1.0),
        # the same step twice is no progress
        ([(0, 5), (10, 5)], 10, None),
    ],
)
def test_a_rate(
    pace: Callable[..., Pace], seen: list[tuple[float, float]], now: float, expected: float | None
) -> None:
    rate = pace(*seen).per_second(now)

    assert rate == (pytest.approx(expected, rel=0.1) if expected is not None else None)


def test_steps_of_long_ago_do_not_count(pace: Callable[..., Pace]) -> None:
    slow = [(float(at * 100), float(at)) for at in range(10)]
    fast = [(1000.0 + n, 10.0 + n) for n in range(130)]

    assert pace(*slow, *fast, total=None).per_second(1130.0) == pytest.approx(1.0, rel=0.05)


def test_a_snapshot_is_of_its_moment() -> None:
    seen = viewed(
        event("component.starting", "api"),
        event("rollout.server.started", "rollout", rank=0, url="http://h:1"),
        event("run.progress", step=1.0),
    )

    before = seen.snapshot()
    told = lines(before), before.servers
    seen.observe(event("component.spawned", "api", pid=7, argv=[]))
    seen.observe(event("rollout.server.started", "rollout", rank=0, url="http://h:2"))
    seen.observe(event("rollout.group.state", "rollout", group=0, ranks=[0], after="active"))
    seen.observe(event("run.progress", step=2.0))

    assert (lines(before), before.servers) == told
    assert lines(seen) != lines(before) and seen.servers != before.servers
