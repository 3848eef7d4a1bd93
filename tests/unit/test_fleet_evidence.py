"""Rules without I/O: failures of a server, pauses between retries, and the restart budget."""

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

NO_ANSWER = NoReply("no answer")
BAD_ANSWER = "503 dead"


def collect_evidence(history: str, threshold: int = 3) -> Evidence:
    """Return the evidence after a series of events.

    Args:
        history: One letter for each event:
            `y` is a successful probe.
            `n` is a probe with a bad answer.
            `b` is a probe with a bad answer, during which a request got tokens.
            `s` is a probe without an answer.
            `x` is a probe without an answer, during which a request got tokens.
            `r` is a failed request.
            `t` is a token for a request.
        threshold: Number of failed probes and requests after which a server counts as failed.
    """
    evidence = Evidence()
    for event in history:
        evidence = {
            "y": lambda _: Evidence(),
            "n": lambda e: e.after_probe(BAD_ANSWER),
            "s": lambda e: e.after_probe(NO_ANSWER),
            "x": lambda e: e.after_probe(NO_ANSWER, is_excused=True),
            "b": lambda e: e.after_probe(BAD_ANSWER, is_excused=True),
            "r": lambda e: e.after_request("reset", threshold=threshold),
            "t": lambda e: e.after_tokens(),
        }[event](evidence)
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
        # the verdict is "silent" if the last failure is a missing answer (`s`), and "sick" if the
        # last failure is a bad answer (`n`)
        ("nns", 3, "silent"),
        ("ssn", 3, "sick"),
        # after a successful probe (`y`), the count of bad answers (`n`) begins again at zero
        ("nnyn", 3, "suspect"),
        # the threshold is 1, so a single failed probe is enough
        ("n", 1, "sick"),
        ("s", 1, "silent"),
        # failed requests and failed probes are counted together
        ("rrn", 3, "sick"),
        ("rns", 3, "silent"),
        ("nrs", 3, "silent"),
        # a failed request (`r`) is not counted if it would raise the number of failures to the
        # threshold
        ("rrrrrrrrr", 3, "suspect"),
        ("rrrrrrrrr", 1, "well"),
        ("nnrrrrr", 3, "suspect"),
        # `x` is no failure: the probe got no answer, but a request got tokens during the probe
        ("xxxxx", 3, "well"),
        ("ssx", 3, "suspect"),
        # a probe with a bad answer counts as a failure, even if a request got tokens meanwhile
        # (`b`)
        ("bbb", 3, "sick"),
        # a generated token (`t`) resets the count of failures if each failure was a missing answer
        # (`s`) or a failed request (`r`)
        ("ssts", 3, "suspect"),
        ("rrt", 3, "well"),
        # a generated token (`t`) does not reset the count if one failure was a bad answer (`n`)
        ("nntn", 3, "sick"),
    ],
)
def test_consecutive_failures_decide_if_a_server_is_sick_or_silent(
    history: str, threshold: int, verdict: str
) -> None:
    evidence = collect_evidence(history, threshold)

    assert judge(evidence, threshold) == verdict


def judge(evidence: Evidence, threshold: int) -> str:
    if evidence.misses >= threshold:
        return "silent" if evidence.is_silence else "sick"
    return "suspect" if evidence.misses else "well"


@pytest.mark.parametrize(
    ("count", "longest_s"),
    [
        (0, 1.0),
        (1, 2.0),
        (5, 32.0),
        # a pause is never longer than 60 s
        (6, 60.0),
        (10_000, 60.0),
    ],
)
def test_random_pause_is_between_half_of_its_bound_and_the_bound(
    count: int, longest_s: float
) -> None:
    dice = Random(3)

    pauses = [choose_pause_s(count, first_s=1.0, longest_s=60.0, random=dice) for _ in range(200)]

    assert longest_s / 2 <= min(pauses) < longest_s * 0.55
    assert longest_s * 0.95 < max(pauses) <= longest_s


def test_failures_within_the_window_are_one_incident() -> None:
    incidents = Incidents(budget=1)

    first = incidents.add_failure(0, now_s=10.0, window_s=2.0)
    second = incidents.add_failure(1, now_s=12.0, window_s=2.0)
    third = incidents.add_failure(2, now_s=12.1, window_s=2.0)

    assert second is first
    assert third is not first


def test_second_failure_of_a_group_is_a_new_incident() -> None:
    incidents = Incidents(budget=math.inf)

    first = incidents.add_failure(0, now_s=10.0, window_s=2.0)

    assert incidents.add_failure(0, now_s=10.5, window_s=2.0) is not first


def test_budget_is_charged_once_for_each_attempt_of_an_incident() -> None:
    incidents = Incidents(budget=2)
    incident = incidents.add_failure(0, now_s=0.0, window_s=2.0)
    incidents.add_failure(1, now_s=0.0, window_s=2.0)

    paid = [incidents.pay(incident, attempt) for attempt in (0, 0, 1, 1, 0, 2)]

    assert paid == [True, True, True, True, True, False]


@pytest.mark.parametrize(
    ("recovery", "engines", "budget"),
    [
        # the default restart budget grows with the number of engines
        ({}, 1, 10),
        ({}, 3, 10),
        ({"parallel": 2}, 4, 12),
        ({}, 64, 192),
        # the spec sets the restart budget
        ({"budget": 1}, 64, 1),
        ({"budget": "unlimited"}, 1, math.inf),
    ],
)
def test_restart_budget_is_finite_by_default(
    recovery: dict[str, Any], engines: int, budget: float
) -> None:
    command = {"backend": "command", "command": ["serve", "${server.port}"]}
    fleet = Rollout.model_validate({**command, "engines": engines, "recovery": recovery})

    assert count_allowed_recoveries(fleet) == budget
