"""What follows from answers and silences, and how long a pause is."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest

from tasks.rollout.clock import choose_pause_s
from tasks.rollout.health import Evidence
from tasks.rollout.probing import NoReply
from tasks.rollout.recovery import Incidents, count_allowed_recoveries
from tasks.spec.rollout import Rollout

SILENT, BAD = NoReply("no answer"), "503 dead"


def after(history: str, threshold: int = 3) -> Evidence:
    """
    Args:
        history: a letter each. y yes, n bad answer, s silence, x silence that is excused, r a
            request that failed, t tokens of one that is answered.
    """
    evidence = Evidence()
    for what in history:
        evidence = {
            "y": lambda _: Evidence(),
            "n": lambda e: e.after_probe(BAD),
            "s": lambda e: e.after_probe(SILENT),
            "x": lambda e: e.after_probe(SILENT, is_excused=True),
            "b": lambda e: e.after_probe(BAD, is_excused=True),
            "r": lambda e: e.after_request("reset", threshold=threshold),
            "t": lambda e: e.after_tokens(),
        }[what](evidence)
    return evidence


@pytest.mark.parametrize(
    ("history", "threshold", "verdict"),
    [
        ("", 3, "well"),
        ("y", 3, "well"),
        ("n", 3, "suspect"),
        ("nn", 3, "suspect"),
        ("nnn", 3, "sick"),
        ("sss", 3, "silent"),
        # the last word says whether it answers at all
        ("nns", 3, "silent"),
        ("ssn", 3, "sick"),
        # in a row
        ("nnyn", 3, "suspect"),
        # one is enough
        ("n", 1, "sick"),
        ("s", 1, "silent"),
        # requests and probes add up
        ("rrn", 3, "sick"),
        ("rns", 3, "silent"),
        ("nrs", 3, "silent"),
        # requests alone never have the last word
        ("rrrrrrrrr", 3, "suspect"),
        ("rrrrrrrrr", 1, "well"),
        ("nnrrrrr", 3, "suspect"),
        # tokens for a request came meanwhile
        ("xxxxx", 3, "well"),
        ("ssx", 3, "suspect"),
        # which excuses no bad answer
        ("bbb", 3, "sick"),
        # they end a silence
        ("ssts", 3, "suspect"),
        ("rrt", 3, "well"),
        # and say nothing against what the server itself says
        ("nntn", 3, "sick"),
    ],
)
def test_the_verdict_follows_from_what_came_in_a_row(
    history: str, threshold: int, verdict: str
) -> None:
    evidence = after(history, threshold)

    enough = "silent" if evidence.is_silence else "sick"
    found = enough if evidence.misses >= threshold else "suspect" if evidence.misses else "well"
    assert found == verdict


@pytest.mark.parametrize(
    ("count", "longest"),
    [
        (0, 1.0),
        (1, 2.0),
        (5, 32.0),
        # the bound
        (6, 60.0),
        (10_000, 60.0),
    ],
)
def test_a_pause_is_between_a_half_and_the_whole_of_its_longest(count: int, longest: float) -> None:
    dice = Random(3)

    pauses = [choose_pause_s(count, first_s=1.0, longest_s=60.0, random=dice) for _ in range(200)]

    assert longest / 2 <= min(pauses) < longest * 0.55
    assert longest * 0.95 < max(pauses) <= longest


def test_failures_belong_together_until_the_window_is_over() -> None:
    incidents = Incidents(budget=1)

    first = incidents.add_failure(0, now_s=10.0, window_s=2.0)
    second = incidents.add_failure(1, now_s=12.0, window_s=2.0)
    third = incidents.add_failure(2, now_s=12.1, window_s=2.0)

    assert second is first
    assert third is not first


def test_a_group_that_fails_again_within_the_window_is_a_new_incident() -> None:
    incidents = Incidents(budget=math.inf)

    first = incidents.add_failure(0, now_s=10.0, window_s=2.0)

    assert incidents.add_failure(0, now_s=10.5, window_s=2.0) is not first


def test_the_budget_is_charged_once_for_each_try_of_an_incident() -> None:
    incidents = Incidents(budget=2)
    one = incidents.add_failure(0, now_s=0.0, window_s=2.0)
    incidents.add_failure(1, now_s=0.0, window_s=2.0)

    paid = [incidents.pay(one, attempt) for attempt in (0, 0, 1, 1, 0, 2)]

    assert paid == [True, True, True, True, True, False]


@pytest.mark.parametrize(
    ("recovery", "engines", "budget"),
    [
        # left out: a finite one, by the number of engines
        ({}, 1, 10),
        ({}, 3, 10),
        ({"parallel": 2}, 4, 12),
        ({}, 64, 192),
        # as written
        ({"budget": 1}, 64, 1),
        ({"budget": "unlimited"}, 1, math.inf),
    ],
)
def test_a_fleet_has_a_finite_budget_unless_it_asks_for_none(
    recovery: dict[str, Any], engines: int, budget: float
) -> None:
    command = {"backend": "command", "command": ["serve", "${server.port}"]}
    fleet = Rollout.model_validate({**command, "engines": engines, "recovery": recovery})

    assert count_allowed_recoveries(fleet) == budget
