"""Each part of a stack is killed at random moments, while trainings run and wait: all of them
complete, each once, and their records agree with what they wrote.

    MUSTER_SEED=1 MUSTER_KILLS=5 pytest tests/faults/test_stack_parts.py -s

The seed is printed. MUSTER_KILLS is how often each part is killed.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.ground import until
from tests.support.own_stack import OwnStack, faults_of, plan_of_kills

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

SEED = int(os.environ.get("MUSTER_SEED") or time.time())
KILLS = int(os.environ.get("MUSTER_KILLS") or 5)
#: Each is killed once all of the stack is up; `deployments` runs while it starts.
PARTS = ("prefect-server", "ray-head", "ray-node-1", "upkeep", "pipelines", "worker")
RUNS = ("one", "two", "three", "four", "five")
#: Two run at a time: each has one of the two GPUs.
GANG = {"nodes": 1, "gpus_per_node": 1, "hours": 1}
PAUSE_S = 0.25


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[OwnStack]:
    stack = OwnStack(place=tmp_path, variables={"MUSTER_GPUS": "0-1"})
    try:
        yield stack
    finally:
        stack.down()


def test_all_trainings_outlive_the_parts_of_their_stack(stack: OwnStack) -> None:
    chance = random.Random(SEED)
    print(f"\nMUSTER_SEED={SEED} MUSTER_KILLS={KILLS}", flush=True)
    deaths = Counter[str]()

    up_under_kills(stack, chance, deaths)
    # Long enough for all kills: some 20 s each, in three rounds of two trainings.
    steps = max(40, int(len(PARTS) * KILLS * 20 / 3 / PAUSE_S))
    ids = {name: stack.submit(name, steps, PAUSE_S, gang=GANG) for name in RUNS}
    until(lambda: sum(bool(stack.marks(name)) for name in RUNS) == 2, "two trainings run")
    is_over = threading.Event()
    load = threading.Thread(target=look_all_the_time, args=(stack, is_over))
    load.start()
    try:
        kill_all(stack, chance, deaths)
        until(lambda: is_ended(stack, ids), "all trainings have ended", within_s=1500)
    finally:
        is_over.set()
        load.join()

    states = stack.states()
    faults = [
        fault
        for name, run_id in ids.items()
        for fault in faults_of(stack, name, run_id, steps, states)
    ]
    admissions = [stack.admissions(ids[name]) for name in RUNS]
    died = {part.name: part.deaths for part in stack.stack.parts}
    print("part, kills, deaths in stack.json:", flush=True)
    for part, count in deaths.items():
        print(f"  {part:<15} {count} {died[part]}", flush=True)
    assert faults == []
    # A process that is forked may begin before one that was started, so the queue's word counts.
    assert [len(moments) for moments in admissions] == [1] * len(RUNS), "each was started once"
    assert admissions == sorted(admissions), "the runs were admitted in the order of the queue"
    assert dict(deaths) == {part: KILLS for part in ("deployments", *PARTS)}
    # A kill of a guardian may come when its part is dying: no kill is counted twice.
    assert all(died[part] >= count for part, count in deaths.items())


def up_under_kills(stack: OwnStack, chance: random.Random, deaths: Counter[str]) -> None:
    """Start the stack, and kill the part that sets it up as often as the others will be."""
    up = stack.begin_up("--gpus", "1x2")
    try:
        kill_while_starting(stack, chance, deaths, up)
        output = up.communicate()[0]
    finally:
        # An interrupted test leaves nobody whom `muster down` would wait for.
        up.terminate()
        up.wait()
    assert up.returncode == 0, output


def kill_while_starting(
    stack: OwnStack, chance: random.Random, deaths: Counter[str], up: subprocess.Popen[str]
) -> None:
    deadline = time.monotonic() + 600
    while up.poll() is None:
        assert time.monotonic() < deadline
        part = stack.part("deployments") if deaths["deployments"] < KILLS else None
        if part is not None and part.state == "starting" and part.deaths == deaths["deployments"]:
            time.sleep(chance.uniform(0.0, 2.0))
            deaths["deployments"] += stack.kill("deployments", guardian=chance.random() < 0.5)
            died = partial(has_died, stack, "deployments", deaths["deployments"])
            until(died, "its death is known")
        time.sleep(0.05)


def has_died(stack: OwnStack, name: str, times: int) -> bool:
    part = stack.part(name)
    return part is not None and part.deaths >= times


def kill_all(stack: OwnStack, chance: random.Random, deaths: Counter[str]) -> None:
    """Kill each part so often, at random moments; sometimes while another one is still away."""
    for name, guardian in plan_of_kills(PARTS, KILLS, chance):
        before = stack.part(name)
        assert before is not None
        until(partial(stack.kill, name, guardian=guardian), f"{name} has a process to be killed")
        deaths[name] += 1
        print(f"{time.strftime('%X')} {name} killed{' (guardian)' * guardian}", flush=True)
        if chance.random() < 0.7:
            stack.until_back(name, before.deaths + 1)
        else:
            died = partial(has_died, stack, name, before.deaths + 1)
            until(died, f"the death of {name} is known")
        time.sleep(chance.uniform(0.0, 6.0))
    for name in PARTS:
        stack.until_back(name, 1)


def look_all_the_time(stack: OwnStack, is_over: threading.Event) -> None:
    """Load: somebody lists the runs again and again, server or not."""
    while not is_over.wait(0.5):
        stack.states()


def is_ended(stack: OwnStack, ids: dict[str, str]) -> bool:
    states = stack.states()
    return all(
        states.get(run_id) in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        for run_id in ids.values()
    )
