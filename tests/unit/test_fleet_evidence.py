"""Tests of the evidence about servers, the pauses between restarts, and the budget."""

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
    """Return the evidence about a server after a history of answers.

    Args:
        history: One letter for each event: y for a yes, n for a bad answer, s for a missing answer,
            x for a missing answer that is excused, b for a bad answer that would be excused, r for
            a failed request, t for tokens of a request.
        threshold: Number of misses at which a server fails.
    """
    evidence = Evidence()
    for letter in history:
        evidence = {
            "y": lambda _: Evidence(),
            "n": lambda e: e.after_probe(BAD),
            "s": lambda e: e.after_probe(SILENT),
            "x": lambda e: e.after_probe(SILENT, is_excused=True),
            "b": lambda e: e.after_probe(BAD, is_excused=True),
            "r": lambda e: e.after_request("reset", threshold=threshold),
            "t": lambda e: e.after_tokens(),
        }[letter](evidence)
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
        # The last answer decides between sick and silent.
        ("nns", 3, "silent"),
        ("ssn", 3, "sick"),
        # A yes ends the row of bad answers.
        ("nnyn", 3, "suspect"),
        # With threshold 1, one bad answer is enough.
        ("n", 1, "sick"),
        ("s", 1, "silent"),
        # Failed requests and probes are added.
        ("rrn", 3, "sick"),
        ("rns", 3, "silent"),
        ("nrs", 3, "silent"),
        # Failed requests alone never reach the threshold.
        ("rrrrrrrrr", 3, "suspect"),
        ("rrrrrrrrr", 1, "well"),
        ("nnrrrrr", 3, "suspect"),
        # Tokens for a request excuse missing answers.
        ("xxxxx", 3, "well"),
        ("ssx", 3, "suspect"),
        # Tokens excuse no bad answer.
        ("bbb", 3, "sick"),
        # Tokens end a row of missing answers.
        ("ssts", 3, "suspect"),
        ("rrt", 3, "well"),
        # Tokens do not end a row of bad answers.
        ("nntn", 3, "sick"),
    ],
)
def test_verdict_follows_from_the_sequence_of_answers(
    history: str, threshold: int, verdict: str
) -> None:
    evidence = after(history, threshold)

    if evidence.misses >= threshold:
        actual = "silent" if evidence.is_silence else "sick"
    else:
        actual = "suspect" if evidence.misses else "well"
    assert actual == verdict


@pytest.mark.parametrize(
    ("count", "limit"),
    [
        (0, 1.0),
        (1, 2.0),
        (5, 32.0),
        # The longest pause is 60 s.
        (6, 60.0),
        (10_000, 60.0),
    ],
)
def test_pause_is_between_half_and_all_of_its_limit(count: int, limit: float) -> None:
    dice = Random(3)

    pauses = [choose_pause_s(count, first_s=1.0, longest_s=60.0, random=dice) for _ in range(200)]

    assert limit / 2 <= min(pauses) < limit * 0.55
    assert limit * 0.95 < max(pauses) <= limit


def test_failures_within_the_window_are_one_incident() -> None:
    incidents = Incidents(budget=1)

    first = incidents.add_failure(0, now_s=10.0, window_s=2.0)
    second = incidents.add_failure(1, now_s=12.0, window_s=2.0)
    third = incidents.add_failure(2, now_s=12.1, window_s=2.0)

    assert second is first
    assert third is not first


def test_second_failure_of_a_group_within_the_window_is_a_new_incident() -> None:
    incidents = Incidents(budget=math.inf)

    first = incidents.add_failure(0, now_s=10.0, window_s=2.0)

    assert incidents.add_failure(0, now_s=10.5, window_s=2.0) is not first


def test_budget_pays_once_for_each_try_of_an_incident() -> None:
    incidents = Incidents(budget=2)
    incident = incidents.add_failure(0, now_s=0.0, window_s=2.0)
    incidents.add_failure(1, now_s=0.0, window_s=2.0)

    paid = [incidents.pay(incident, attempt) for attempt in (0, 0, 1, 1, 0, 2)]

    assert paid == [True, True, True, True, True, False]


@pytest.mark.parametrize(
    ("recovery", "engines", "budget"),
    [
        # The default depends on the number of engines.
        ({}, 1, 10),
        ({}, 3, 10),
        ({"parallel": 2}, 4, 12),
        ({}, 64, 192),
        # The spec sets the budget.
        ({"budget": 1}, 64, 1),
        ({"budget": "unlimited"}, 1, math.inf),
    ],
)
def test_budget_is_finite_unless_the_spec_says_unlimited(
    recovery: dict[str, Any], engines: int, budget: float
) -> None:
    command = {"backend": "command", "command": ["serve", "${server.port}"]}
    fleet = Rollout.model_validate({**command, "engines": engines, "recovery": recovery})

    assert count_allowed_recoveries(fleet) == budget
