"""Tests of the texts on a run's page: summary, components, progress, attempts and first failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tasks.record.events import Event
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.show.failure import format_failure, summarize_failure
from tasks.show.markdown import (
    code_block,
    escape_markdown,
    inline_code,
    markdown_link,
    markdown_table,
)
from tasks.show.page import (
    list_other_pages,
    show_attempts,
    show_components,
    show_progress,
    show_summary,
)
from tasks.show.run_view import ObservedRun, RunView
from tasks.spec.formatting import format_duration
from tasks.spec.run import RunSpec

COMPONENT: dict[str, Any] = {"command": ["sleep", "600"]}
SPEC = {
    "name": "x",
    "workload": "grpo",
    "components": {"api": COMPONENT, "trainer": COMPONENT},
    "progress": {"jsonl": "metrics.jsonl", "step": "step", "total": 60},
}
FAILURE = {
    "kind": "RUNTIME_ERROR",
    "component": "trainer",
    "exit_code": 1,
    "signal": None,
    "message": "trainer (pid 8) ended with exit code 1 after 3.1 s: ValueError: no",
    "rule": "traceback",
    "line": "ValueError: no",
    "hint": "",
    "log_tail": "Traceback (most recent call last):\nValueError: no",
}


def component(
    started: float, ready: float | None = None, ended: float | None = None, **fields: Any
):
    """Return the record of a component. The first three arguments are times in seconds."""
    return {
        "pid": 8,
        "started_at": started,
        "ready_at": ready,
        "ended_at": ended,
        "exit_code": None,
        "signal": None,
        **fields,
    }


def attempt(number: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the record of a running attempt."""
    return {
        "number": number,
        "state": "running",
        "started_at": 1000.0,
        "ended_at": None,
        "failure": None,
        "components": {"api": component(1000.0, 1001.5), "trainer": component(1002.0)},
        "ray": {},
        "ports": {"api.port": 4100, "trainer.port": 4101, "trainer.ports.metrics": 4102},
        "resume_from": None,
        "decision": None,
        **fields,
    }


def failed(number: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the record of an attempt that failed because of its trainer."""
    return attempt(
        number,
        **{
            "state": "failed",
            "ended_at": 1006.0,
            "failure": FAILURE,
            "components": {
                "api": component(1000.0, 1001.5, 1005.9, signal="SIGTERM"),
                "trainer": component(1002.0, 1003.0, 1005.1, exit_code=1),
            },
            "decision": "final: RUNTIME_ERROR is not retried",
            **fields,
        },
    )


def view(
    *attempts: dict[str, Any],
    state: str = "running",
    doing: str = "",
    step: float | None = None,
    unready: str = "",
    servers: Sequence[Event] = (),
    **more: Any,
) -> RunView:
    """Return a `RunView`: the data from which Muster makes the page of a run in the Prefect UI.

    Args:
        unready: Reason for the failure of the trainer's readiness probe, or an empty string if
            the probe did not fail.
        servers: Events of the components or inference servers of the run.
    """
    spec = RunSpec.model_validate({**SPEC, **more.pop("spec", {})})
    seen = ObservedRun(spec)
    seen.doing = doing
    if step is not None:
        seen.observe(Event(at=0.0, name="run.progress", fields={"step": step}))
    if unready:
        fields = {"reason": unready}
        seen.observe(Event(at=0.0, name="probe.failed", component="trainer", fields=fields))
    for event in servers:
        seen.observe(event)
    record = {"run_id": "x-1", "state": state, "started_at": 998.0, "ended_at": None}
    return RunView(
        at=1010.0,
        spec=spec,
        record=RunJson.model_validate({**record, "attempts": attempts}),
        place=RunPlace(directory=Path("/home/runs/x-1")),
        seen=seen,
        **more,
    )


def test_summary_of_a_failed_run_gives_cause_log_and_next_step() -> None:
    shown = show_summary(view(failed(), state="failed", step=7))

    for text in (
        "exit code 1, pid 8, 3.1 s after its start",
        "RUNTIME\\_ERROR: trainer (pid 8)",
        "the traceback in the log shows the code that raised the error",
        "`/home/runs/x-1/attempt-01/trainer.log`",
        "not retried",
        "`/home/runs/x-1/run.json`",
        "```\nTraceback (most recent call last):\nValueError: no\n```",
    ):
        assert text in str(shown.data)
    assert shown.headline.split("\n\n") == [
        "**failed**: RUNTIME\\_ERROR",
        "trainer: exit code 1 after 3.1 s",
        "ValueError: no",
        "log: attempt-01/trainer.log",
        "next: not retried",
        "step 7 of 60",
    ]


def test_run_waiting_for_its_next_attempt_shows_the_last_failure() -> None:
    decided = "requeued: INSUFFICIENT_RESOURCES, next try in 61 s"
    waiting = view(failed(decision=decided), state="pending_resources", doing="waiting: for room")

    shown = show_summary(waiting)

    assert shown.headline.startswith("**waiting**: RUNTIME\\_ERROR")
    assert "requeued: INSUFFICIENT\\_RESOURCES, next try in 61 s" in str(shown.data)


def test_running_attempt_does_not_show_an_earlier_failure() -> None:
    shown = show_summary(view(failed(), attempt(2), doing="starting trainer"))

    assert shown.headline.split("\n\n") == ["**running**: starting trainer"]
    assert "What went wrong" not in str(shown.data)
    assert "2, after 1 failed attempt" in str(shown.data)


def test_run_that_failed_before_its_first_attempt_shows_the_reason() -> None:
    shown = show_summary(
        view(state="failed", message="USER_ERROR: the spec has 1 fault:\n  - a: b")
    )

    assert "```\nUSER_ERROR: the spec has 1 fault:\n  - a: b\n```" in str(shown.data)
    assert "Correct the mistake in the spec or in the program" in str(shown.data)
    assert shown.headline == "**failed**: USER\\_ERROR: the spec has 1 fault:\n\n- a: b"


def test_component_that_is_not_ready_in_time_is_shown_as_alive() -> None:
    failure = {**FAILURE, "kind": "NOT_READY", "exit_code": None, "line": ""}
    components = {"trainer": component(1002.0, None, 1005.0, signal="SIGTERM")}

    shown = show_summary(view(failed(failure=failure, components=components), state="failed"))

    assert "trainer: still alive, pid 8, was never ready" in str(shown.data)


def test_message_of_a_failed_run_ends_with_log_and_next_step() -> None:
    place = RunPlace(directory=Path("/r"))

    summary = summarize_failure("RUNTIME_ERROR: it died", place, view(failed()).record.attempt)

    assert summary.startswith("RUNTIME_ERROR: it died; log: /r/attempt-01/trainer.log; not retried")
    assert summarize_failure("USER_ERROR: the spec", place, None) == "USER_ERROR: the spec"


def test_formatted_failure_contains_every_label() -> None:
    run = view(failed())
    assert run.failed is not None

    text = format_failure(RunPlace(directory=Path("/r")), *run.failed)

    for label in ("first failure: ", "why: ", "what to do: ", "log: ", "what happens next"):
        assert f"\n{label}" in text
    assert text.endswith("ValueError: no")


def test_running_components_are_shown_with_pid_and_ports() -> None:
    shown = show_components(view(attempt(), unready="GET /health: refused", host="h1"))

    lines = str(shown.data).splitlines()
    [api] = [line for line in lines if line.startswith("| api ")]
    [trainer] = [line for line in lines if line.startswith("| trainer ")]
    assert "Attempt 1 on h1" in lines[0] and "`/home/runs/x-1/attempt-01`" in lines[0]
    assert api.startswith("| api | ready | pid 8 | 1.5 s | 4100 |")
    assert "starting, not ready: GET /health: refused | pid 8 | not yet | 4101, metrics 4102" in (
        trainer
    )
    assert shown.headline == "api ready\n\ntrainer starting"


def test_component_shows_the_recorded_time_until_it_was_ready() -> None:
    # A Ray job waited 59 s for its start, and was ready 1 s after its start.
    job = component(100.0, 160.0, ready_after_s=1.0)

    shown = show_components(view(attempt(components={"api": job})))

    [api] = [line for line in str(shown.data).splitlines() if line.startswith("| api ")]
    assert "| 1.0 s |" in api


def test_last_status_of_a_component_is_shown() -> None:
    statuses = [
        Event(at=0.0, name="component.status", component="api", fields={"message": message})
        for message in ("loading", "serving 4 models")
    ]

    shown = show_components(view(attempt(), servers=statuses))

    assert "| api | ready; last status: serving 4 models | pid 8 |" in str(shown.data)


def test_ray_job_is_shown_with_submission_id_and_nodes() -> None:
    ray = {"component": "trainer", "submission_id": "x-1--a01", "nodes": ["10.0.0.7"]}
    components = {"trainer": {**component(1000.0), "pid": None}}

    shown = show_components(view(attempt(components=components, ray=ray)))

    assert "Ray job `x-1--a01` on 10.0.0.7" in str(shown.data)


def test_component_that_failed_first_is_marked() -> None:
    shown = show_components(view(failed(), state="failed"))

    assert "| trainer | **failed first**: exit code 1 |" in str(shown.data)
    assert "| api | stopped by SIGTERM |" in str(shown.data)


def test_servers_of_a_fleet_are_shown_with_their_restarts() -> None:
    fleet_events = [
        Event(at=0.0, name=name, component="rollout", fields=fields)
        for name, fields in (
            ("rollout.server.started", {"rank": 0, "epoch": 1, "url": "http://h:1"}),
            ("rollout.group.state", {"group": 0, "ranks": [0], "after": "active", "cause": ""}),
            ("rollout.group.state", {"group": 0, "ranks": [0], "after": "inactive", "cause": "x"}),
            ("rollout.server.started", {"rank": 0, "epoch": 2, "url": "http://h:2"}),
            ("rollout.group.state", {"group": 0, "ranks": [0], "after": "active", "cause": ""}),
        )
    ]

    shown = show_components(view(attempt(), servers=fleet_events))

    assert "| 0 | active | `http://h:2` | 1 | `rollout-r0.log` |" in str(shown.data)


def test_new_attempt_starts_without_the_servers_of_the_previous_attempt() -> None:
    fleet = ObservedRun(RunSpec.model_validate(SPEC))
    started = {"rank": 0, "epoch": 1, "url": ""}
    fleet.observe(Event(at=0.0, name="rollout.server.started", fields=started))

    fleet.observe(Event(at=1.0, name="attempt.begun", fields={}))

    assert fleet.servers == ()


@pytest.mark.parametrize(
    ("printed", "url"),
    [
        (
            "\x1b[34mwandb\x1b[0m: View run \x1b[33mx\x1b[0m at: "
            "\x1b[34mhttps://wandb.ai/a/b/runs/c\x1b[0m",
            "https://wandb.ai/a/b/runs/c",
        ),
        (
            "View run x at: http://mlflow.lab:5000/#/experiments/1/runs/c.",
            "http://mlflow.lab:5000/#/experiments/1/runs/c",
        ),
    ],
)
def test_address_printed_by_the_tracker_is_linked(tmp_path: Path, printed: str, url: str) -> None:
    place = RunPlace(directory=tmp_path)
    place.attempt(1).directory.mkdir()
    place.attempt(1).log("trainer").write_text(f"loading\n{printed}\n")

    pages = list_other_pages(replace(view(attempt()), place=place))

    assert pages == (("Tracker", url),)


def test_ray_job_is_linked_to_the_dashboard_of_its_cluster() -> None:
    ray = {"component": "trainer", "submission_id": "x-1--a01"}
    spec = {"ray": {"address": "http://head:8265/"}}

    [link] = list_other_pages(view(attempt(ray=ray), spec=spec))

    assert link == ("Ray dashboard", "http://head:8265/#/jobs/x-1--a01")


def test_progress_is_shown_only_with_a_step_and_a_total() -> None:
    shown = show_progress(view(attempt(), step=15))

    assert shown is not None and (shown.data, shown.headline) == (25.0, "step 15 of 60")
    assert show_progress(view(attempt())) is None
    without_total = {"progress": {"jsonl": "m", "step": "s"}}
    assert show_progress(view(attempt(), step=3, spec=without_total)) is None


def test_headline_of_attempts_lists_only_the_last_five() -> None:
    shown = show_attempts(view(*(failed(number) for number in range(1, 9))))

    assert shown.headline.split("\n\n") == [
        "8 attempts, the last 5:",
        *(f"{number}: RUNTIME\\_ERROR" for number in range(4, 9)),
    ]


def test_markup_in_foreign_text_is_escaped() -> None:
    assert escape_markdown("a <b>|* [x](y)\nnext") == "a &lt;b&gt;\\|\\* \\[x\\](y) next"
    assert inline_code("a `b` | <c>") == "`` a `b` | <c> ``"
    assert markdown_table(["a"], [[inline_code("x|y")]]).splitlines()[-1] == "| `x\\|y` |"
    assert code_block("a\n```\nb") == "````\na\n```\nb\n````"


TAG = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("ticks", ["", "`", "``", "a``b`c```", "\r```\r", "\n```\n"])
@pytest.mark.parametrize(
    "make_markdown",
    [
        escape_markdown,
        inline_code,
        code_block,
        lambda text: markdown_table(["a"], [[inline_code(text)]]),
        lambda text: markdown_table(["a"], [[escape_markdown(text)]]),
        lambda text: markdown_link("a", f"https://wandb.ai/runs/{text.strip()})"),
    ],
)
def test_html_of_programs_does_not_reach_the_page(
    make_markdown: Callable[[str], str], ticks: str
) -> None:
    markdown = make_markdown(f"{ticks}{TAG}{ticks}")

    page = MarkdownIt("commonmark").enable("table").render(markdown)

    assert "<img" not in page, page
    assert "alert" in page


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (0.0, "0.00 s"),
        (0.256, "0.26 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (90061, "1 d 1 h"),
    ],
)
def test_duration_has_at_most_two_units(duration: float, expected: str) -> None:
    assert format_duration(duration) == expected


def test_summary_of_a_running_run_says_that_the_names_are_its_components() -> None:
    running = view(attempt(1), state="running")
    running.seen.doing = running.seen.running

    names = ", ".join(running.seen.names)
    assert f"### Running\n\nComponents: {names}" in show_summary(running).data
