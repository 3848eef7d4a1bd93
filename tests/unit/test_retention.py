"""Which runs are pruned, and how far: the rules, and what they never touch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.upkeep.retention import Act, Found, Retention, plan, variable_of

DAY_S = 24 * 3600.0
NOW = 1_800_000_000.0
GIB = 1024**3
#: No rule at all: each test switches on what it is about.
NEVER = {"compress_after_days": None, "days": None, "upkeep_days": None}


def run(
    name: str, days_ago: float = 0.0, *, mib: float = 1.0, log_mib: float = 1.0, held: str = ""
) -> Found:
    return Found(
        directory=Path("/runs") / name,
        held=held,
        ended_at=NOW - days_ago * DAY_S,
        removable_bytes=int(mib * 1024**2),
        log_bytes=int(log_mib * 1024**2),
        size_bytes=int(mib * 1024**2),
    )


def acts(found: list[Found], **rules: object) -> dict[str, Act]:
    keep = Retention.model_validate({**NEVER, **rules})
    return {step.run.run_id: step.act for step in plan(found, keep, NOW).steps}


@pytest.mark.parametrize(
    ("days_ago", "act"),
    [
        (0.0, None),
        # both bounds are for what is older, to the second
        (7.0, None),
        (7.1, Act.COMPRESS),
        (60.0, Act.COMPRESS),
        (60.1, Act.REMOVE),
    ],
)
def test_logs_are_compressed_before_files_are_removed(days_ago: float, act: Act | None) -> None:
    done = acts([run("a", days_ago)], compress_after_days=7, days=60)

    assert done.get("a") is act


def test_the_defaults_touch_no_output_of_a_run() -> None:
    keep = Retention()

    assert (keep.compress_after_days, keep.days, keep.outputs) == (7, 60, False)
    assert keep.runs is None and keep.gib is None


def test_what_has_nothing_left_to_remove_or_compress_is_passed_over() -> None:
    pruned = run("a", 100, mib=0, log_mib=0)
    compressed = run("b", 30, log_mib=0)

    assert acts([pruned, compressed], compress_after_days=7, days=60) == {}


def test_the_youngest_runs_keep_their_files_by_number() -> None:
    found = [run("old", 3), run("new", 1), run("older", 9), run("mid", 2)]

    assert acts(found, runs=2) == {"older": Act.REMOVE, "old": Act.REMOVE}


def test_a_run_that_goes_on_takes_no_place_of_those_that_have_ended() -> None:
    running = Found(
        directory=Path("/runs/now"),
        held="it has not ended",
        ended_at=math.inf,
        removable_bytes=9,
        log_bytes=9,
        size_bytes=9,
    )

    assert acts([running, run("a", 1)], runs=1) == {}


def test_the_oldest_go_until_the_rest_is_small_enough() -> None:
    found = [run("a", 4, mib=600), run("b", 3, mib=600), run("c", 2, mib=600), run("d", 1, mib=300)]

    assert acts(found, gib=1) == {"a": Act.REMOVE, "b": Act.REMOVE}


def test_what_can_not_be_freed_is_told() -> None:
    held = run("held", 9, mib=2048, held="another has started from it")

    result = plan([held, run("b", 1, mib=10)], Retention.model_validate({**NEVER, "gib": 1}), NOW)

    assert [step.run.run_id for step in result.steps] == ["b"]
    assert result.held == (held,)
    assert result.over_bytes == GIB


@pytest.mark.parametrize(
    "rules", [{"days": 1}, {"runs": 0}, {"gib": 0}, {"compress_after_days": 1}]
)
def test_no_rule_touches_a_run_that_is_held(rules: dict[str, float]) -> None:
    held = run("a", 100, held="it waits for its next attempt")

    result = plan([held], Retention.model_validate({**NEVER, **rules}), NOW)

    assert result.steps == ()
    assert result.held == (held,)


def test_a_held_run_that_no_rule_would_take_is_not_told() -> None:
    result = plan([run("a", 1, held="it is registered as running")], Retention(), NOW)

    assert result.held == ()


def test_an_operator_sets_the_rules_in_the_environment() -> None:
    keep = Retention.of_environment(
        {
            "MUSTER_PRUNE_DAYS": "never",
            "MUSTER_PRUNE_COMPRESS_AFTER_DAYS": "0.5",
            "MUSTER_PRUNE_GIB": "200",
            "MUSTER_PRUNE_OUTPUTS": "true",
            "MUSTER_PRUNE_RUNS": "",
        }
    )

    assert keep == Retention(days=None, compress_after_days=0.5, gib=200, outputs=True)


@pytest.mark.parametrize("value", ["sixty", "-1", "60d"])
def test_nonsense_in_the_environment_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Retention.of_environment({variable_of("days"): value})

    assert caught.value.errors()[0]["loc"] == ("days",)
