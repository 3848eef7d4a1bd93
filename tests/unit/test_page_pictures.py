"""Tests of the pictures on a run's page: the timeline of its attempts and the curve of a metric."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.show import pictures
from tasks.show.markdown import markdown_image
from tasks.show.page import show_curve
from tasks.show.pictures import (
    Figures,
    MatrixCurve,
    draw_curve,
    draw_matrix,
    draw_timeline,
    list_curve_metrics,
    list_phases,
    show_timeline,
)
from tasks.show.run_view import ObservedRun, RunView
from tasks.spec.run import RunSpec

SVG = "{http://www.w3.org/2000/svg}"


def view(*attempts: dict[str, Any], components: tuple[str, ...] = ("api", "trainer")) -> RunView:
    spec = {
        "name": "x",
        "workload": "grpo",
        "components": {name: {"command": ["sleep", "1"]} for name in components},
        "progress": {"jsonl": "m.jsonl", "step": "step"},
    }
    record = {"run_id": "x-1", "state": "running", "started_at": 990.0, "attempts": [*attempts]}
    valid = RunSpec.model_validate(spec)
    return RunView(
        at=1020.0,
        spec=valid,
        record=RunJson.model_validate(record),
        place=RunPlace(directory=Path("/runs/x-1")),
        seen=ObservedRun(valid),
    )


def attempt(number: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the record of a running attempt."""
    return {
        "number": number,
        "state": "running",
        "started_at": 1000.0,
        "ended_at": None,
        "failure": None,
        "components": {"api": component(1001.0, 1003.0)},
        **fields,
    }


def component(started: float, ready: float | None, ended: float | None = None) -> Any:
    """Return the record of a component. The arguments are times in seconds."""
    times = {"started_at": started, "ready_at": ready, "ended_at": ended}
    return {"pid": 1, **times, "exit_code": None, "signal": None}


def texts(source: str) -> list[str]:
    """Return the texts in an SVG picture."""
    return [element.text or "" for element in ElementTree.fromstring(source).iter(f"{SVG}text")]


def test_phases_of_a_component_last_until_now() -> None:
    run = view(attempt())

    phases = list_phases(run, run.record.attempts[0], "api")

    assert phases == [
        ("waiting", 1000.0, 1001.0),
        ("starting", 1001.0, 1003.0),
        ("ready", 1003.0, 1020.0),
    ]


def test_component_that_was_never_ready_is_starting_until_its_end() -> None:
    run = view(attempt(components={"api": component(1000.0, None, 1009.0)}, ended_at=1010.0))

    phases = list_phases(run, run.record.attempts[0], "api")

    assert phases == [("starting", 1000.0, 1009.0)]


def test_timeline_marks_only_the_component_that_failed_first() -> None:
    failure = {"kind": "STALLED", "component": "api", "exit_code": 1, "message": "silent"}
    components = {
        "api": component(1001.0, 1003.0, 1009.0),
        "trainer": component(1003.0, 1004.0, 1009.5),
    }
    run = view(attempt(ended_at=1010.0, failure=failure, components=components, state="failed"))

    source = draw_timeline(run)

    assert len([*ElementTree.fromstring(source).iter(f"{SVG}circle")]) == 1
    assert "attempt 1: STALLED" in texts(source)


def test_timeline_has_a_row_for_each_component_even_if_it_never_started() -> None:
    source = draw_timeline(view(attempt(ended_at=1010.0)))

    assert {"api", "trainer", "never started"} <= {*texts(source)}


def test_timeline_draws_the_last_attempts_and_the_wait_before_each() -> None:
    run = view(*(attempt(number, ended_at=1000.0 - 60) for number in range(1, 10)))

    drawn = texts(draw_timeline(run))

    assert [text for text in drawn if text.startswith("attempt ")] == [
        f"attempt {number}: running" for number in range(5, 10)
    ]
    assert "x-1: 9 attempts, the last 5 shown" in drawn
    assert sum("waited 1 min 00 s" in text for text in drawn) == 5


def test_timeline_has_a_picture_and_a_headline() -> None:
    shown = show_timeline(view(attempt()))

    assert ElementTree.fromstring(shown.picture).tag == f"{SVG}svg"
    assert shown.headline == "x-1: 1 attempt, as of 00:17:00 UTC"


def test_picture_becomes_one_line_of_markdown() -> None:
    line = markdown_image("<svg>\n</svg>", "a [b]\nc")

    assert line.startswith("![a (b) c](data:image/svg+xml;base64,") and "\n" not in line
    assert base64.b64decode(line.partition("base64,")[2][:-1]) == b"<svg>\n</svg>"


@pytest.mark.parametrize(
    "points",
    [
        # the curve has only a single point, which is drawn as a dot
        [(1.0, 0.5)],
        # all values are equal, so the axis needs a range around the value
        [(1.0, 0.5), (2.0, 0.5)],
        [(0.0, 0.0), (1.0, 0.0)],
        [(1.0, -3.0), (2.0, 8e9)],
        # the curve has more points than the picture has pixels, so some points are left out
        [(float(step), step % 7) for step in range(5000)],
    ],
)
def test_curve_is_drawn_within_its_picture(points: list[tuple[float, float]]) -> None:
    source = draw_curve(points, x="step", y="<reward>", title="r & s")

    root = ElementTree.fromstring(source)
    assert len(source) < 20_000
    for element in root.iter():
        for x, y in points_of(element):
            assert 0 <= x <= pictures.WIDTH and 0 <= y <= float(root.attrib["height"])
    assert "step" in texts(source) and "<reward>" in texts(source)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (5, 3), (13, 1), (1000, 300)])
def test_curves_of_a_matrix_are_drawn_within_their_picture(count: int, length: int) -> None:
    curves = [
        MatrixCurve(
            number=number,
            points=[(float(step), number + step / 7) for step in range(1, length + 1)],
            is_best=number == count,
            is_stopped=number % 2 == 0,
        )
        for number in range(1, count + 1)
    ]

    source = draw_matrix(curves, x="step", y="reward", title="grid: best < 3")

    root = ElementTree.fromstring(source)
    assert len(source) < 250_000
    assert source.count("<circle") == count
    for element in root.iter():
        for x, y in points_of(element):
            assert 0 <= x <= pictures.WIDTH and 0 <= y <= float(root.attrib["height"])
    assert {"grid: best < 3", "stopped early", str(count)} <= set(texts(source))


def test_best_curve_of_a_matrix_is_drawn_last_in_its_own_colour() -> None:
    curves = [
        MatrixCurve(number=1, points=[(1.0, 3.0)], is_best=True),
        MatrixCurve(number=2, points=[(1.0, 1.0)], is_stopped=True),
        MatrixCurve(number=3, points=[(1.0, 2.0)]),
    ]

    source = draw_matrix(curves, x="step", y="reward", title="grid")

    circles = [e for e in ElementTree.fromstring(source).iter() if e.tag == f"{SVG}circle"]
    heights = [float(circle.attrib["cy"]) for circle in circles]
    assert heights[2] < heights[1] < heights[0]
    assert len({circle.attrib["fill"] for circle in circles}) == 3


def points_of(element: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the points of a line, or the centre of a circle, in pixels."""
    pairs = element.attrib.get("points", "").split()
    if "cx" in element.attrib:
        pairs.append(f"{element.attrib['cx']},{element.attrib['cy']}")
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]


def test_ticks_are_round_numbers_within_the_range() -> None:
    assert pictures.axis_ticks(0, 60, 6) == [0, 10, 20, 30, 40, 50, 60]
    assert [round(tick, 6) for tick in pictures.axis_ticks(0.07, 0.99)] == [0.2, 0.4, 0.6, 0.8]
    assert pictures.axis_ticks(3, 3) == [3]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        # the metrics have a reward and a loss: the picture shows the reward
        ({"step": 1, "reward": 0.5, "loss": 3.0}, "reward"),
        # metrics that verl's file logger writes, below the key `data`
        (
            {"step": 1, "data": {"critic/rewards/mean": 0.5, "actor/pg_loss": 1}},
            "critic/rewards/mean",
        ),
        # the metrics have no reward, so the loss is drawn
        ({"step": 1, "data": {"train/loss": 0.5}}, "train/loss"),
        # the metrics have no reward and no loss, so nothing is drawn
        ({"step": 1, "lr": 0.5}, ""),
        ({"step": 1, "reward": "high"}, ""),
    ],
)
def test_reward_or_loss_is_found_under_the_names_of_common_trainers(
    tmp_path: Path, line: dict[str, Any], name: str
) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps(line) + "\n")
    figures = Figures(tmp_path / "m.jsonl", "step")

    figures.read_new()

    assert figures.name == name
    assert figures.points == ([(1.0, 0.5)] if name else [])


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("grpo", "mean_reward"),
        ("sft", "mean_reward"),
        ("dpo", "rewards/margins"),
        ("rm", "loss"),
        ("pretrain", "loss"),
        ("other", "mean_reward"),
    ],
)
def test_workload_decides_which_metric_is_drawn(tmp_path: Path, workload: str, name: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 2, "mean_reward": 3, "rewards/margins": 4}\n')

    figures = Figures(path, "step", list_curve_metrics(workload))
    figures.read_new()

    assert figures.name == name


def test_second_read_returns_only_complete_new_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    figures = Figures(path, "at.step")
    figures.read_new()
    path.write_text('{"at": {"step": 1}, "reward": 1}\n{"at": {"step": 2}, "rew')
    figures.read_new()
    first = figures.points
    with path.open("a") as f:
        f.write('ard": NaN}\nnonsense\n[1]\n{"at": {"step": 3}, "reward": 3}\n')

    figures.read_new()

    assert first == [(1.0, 1.0)]
    assert figures.points == [(1.0, 1.0), (3.0, 3.0)]


def test_truncated_file_is_read_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "reward": 1}\n{"step": 2, "reward": 2}\n')
    figures = Figures(path, "step")
    figures.read_new()
    path.write_text('{"step": 1, "reward": 7}\n')

    figures.read_new()

    assert figures.points == [(1.0, 7.0)]


def test_headline_of_a_curve_gives_its_first_and_last_value(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [json.dumps({"step": step, "reward": step / 100}) for step in range(1, 101)]
    path.write_text("\n".join(lines) + "\n")
    figures = Figures(path, "step")
    figures.read_new()

    shown = show_curve(view(attempt()), figures)

    assert shown is not None
    assert shown.headline == "reward by step: first 0.01, last 1 at step 100"
    assert str(path) in str(shown.data)
    assert show_curve(view(attempt()), Figures(tmp_path / "none", "step")) is None


def test_headline_of_a_curve_says_that_the_last_values_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = ["1.0", "0.5", "NaN", "NaN"]
    lines = [f'{{"step": {step}, "loss": {value}}}' for step, value in enumerate(values, 1)]
    path.write_text("\n".join(lines) + "\n")
    figures = Figures(path, "step")
    figures.read_new()

    shown = show_curve(view(attempt()), figures)

    assert shown is not None
    assert shown.headline == "loss by step: first 1, last 0.5 at step 2, nan since step 3"


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "reward": NaN}\n{"step": 2, "reward": 2}\n{"step": 3}\n')

    figures = Figures(path, "step")
    figures.read_new()

    assert figures.points == [(2.0, 2.0)]


def test_control_characters_do_not_break_a_picture() -> None:
    points = [(1.0, 0.5), (2.0, 0.6)]

    source = draw_curve(points, x="step\x01", y="re\x1b[2Jward", title="a\x00b <&> \ud800")

    assert "ab <&> \N{REPLACEMENT CHARACTER}" in texts(source)
