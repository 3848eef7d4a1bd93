"""Test that trainings survive when each process of `muster up` is killed at random moments.

    MUSTER_SEED=1 MUSTER_KILLS=5 pytest tests/faults/test_stack_parts.py -s

Some trainings run and others wait in the queue during the kills. Each training must complete
exactly once, and its record must agree with the files that it wrote.

The seed is printed. MUSTER_KILLS is the number of kills of each part.
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

from tests.support.host_environment import wait_for
from tests.support.own_stack import OwnStack, find_faults, plan_kills

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

SEED = int(os.environ.get("MUSTER_SEED") or time.time())
KILLS = int(os.environ.get("MUSTER_KILLS") or 5)
#: Processes of `muster up` that are killed after all of them have started. The list does not
#: contain the process `deployments`, which runs, and is killed, only while the stack starts.
PARTS = ("prefect-server", "ray-head", "ray-node-1", "upkeep", "pipelines", "worker")
RUNS = ("one", "two", "three", "four", "five")
#: GPUs that each training needs. The Ray cluster has two GPUs, so two trainings run at a time.
GANG = {"nodes": 1, "gpus_per_node": 1, "hours": 1}
#: Duration of a training step, in seconds.
PAUSE_S = 0.25


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[OwnStack]:
    stack = OwnStack(place=tmp_path, variables={"MUSTER_GPUS": "0-1"})
    try:
        yield stack
    finally:
        stack.down()


def test_all_trainings_complete_while_parts_of_the_stack_are_killed(stack: OwnStack) -> None:
    random_draws = random.Random(SEED)
    print(f"\nMUSTER_SEED={SEED} MUSTER_KILLS={KILLS}", flush=True)
    deaths = Counter[str]()

    start_stack_under_kills(stack, random_draws, deaths)
    # A training must still run at the last kill, and each kill takes about 20 s. The five trainings
    # run in three rounds, because only two trainings run at a time. Therefore each training must
    # last a third of the duration of all kills.
    steps = max(40, int(len(PARTS) * KILLS * 20 / 3 / PAUSE_S))
    ids = {name: stack.submit(name, steps, PAUSE_S, gang=GANG) for name in RUNS}
    wait_for(lambda: sum(bool(stack.marks(name)) for name in RUNS) == 2, "two trainings run")
    is_over = threading.Event()
    load = threading.Thread(target=list_runs_repeatedly, args=(stack, is_over))
    load.start()
    try:
        kill_all(stack, random_draws, deaths)
        wait_for(lambda: is_ended(stack, ids), "all trainings have ended", within_s=1500)
    finally:
        is_over.set()
        load.join()

    states = stack.states()
    faults = [
        fault
        for name, run_id in ids.items()
        for fault in find_faults(stack, name, run_id, steps, states)
    ]
    admissions = [stack.admissions(ids[name]) for name in RUNS]
    recorded_deaths = {part.name: part.deaths for part in stack.stack.parts}
    print("part, kills, deaths in stack.json:", flush=True)
    for part, count in deaths.items():
        print(f"  {part:<15} {count} {recorded_deaths[part]}", flush=True)
    assert faults == []
    # The test compares the order in which the queue admits the trainings, and not the order of
    # their first steps. The first steps may come in another order, because a forked flow process
    # starts faster than a flow process that is a new program.
    assert [len(moments) for moments in admissions] == [1] * len(RUNS), "each was started once"
    assert admissions == sorted(admissions), "the runs were admitted in the order of the queue"
    assert dict(deaths) == {part: KILLS for part in ("deployments", *PARTS)}
    # `muster up` must have recorded a death for each process that the test has killed.
    assert all(recorded_deaths[part] >= count for part, count in deaths.items())


def start_stack_under_kills(
    stack: OwnStack, random_draws: random.Random, deaths: Counter[str]
) -> None:
    """Run `muster up`. Kill the process `deployments` each time it starts, `KILLS` times in all.

    Args:
        stack: The stack.
        random_draws: Random generator for the moments of the kills.
        deaths: Mapping from process name to number of kills. This function adds its own kills.
    """
    up = stack.begin_up("--gpus", "1x2")
    try:
        kill_while_starting(stack, random_draws, deaths, up)
        output = up.communicate()[0]
    finally:
        # End `muster up`, which may still run if the test was interrupted. `muster down` would wait
        # for the end of `muster up`.
        up.terminate()
        up.wait()
    assert up.returncode == 0, output


def kill_while_starting(
    stack: OwnStack, random_draws: random.Random, deaths: Counter[str], up: subprocess.Popen[str]
) -> None:
    """Kill the process `deployments` `KILLS` times, each time while this process is starting.

    `muster up` starts the process again after each kill. Return when `muster up` has ended.

    Args:
        stack: The stack.
        random_draws: Random generator for the moments of the kills.
        deaths: Mapping from process name to number of kills. This function adds its own kills.
        up: Process of `muster up`.
    """
    deadline = time.monotonic() + 600
    while up.poll() is None:
        assert time.monotonic() < deadline
        part = stack.part("deployments") if deaths["deployments"] < KILLS else None
        if part is not None and part.state == "starting" and part.deaths == deaths["deployments"]:
            time.sleep(random_draws.uniform(0.0, 2.0))
            deaths["deployments"] += stack.kill("deployments", guardian=random_draws.random() < 0.5)
            is_recorded = partial(has_died, stack, "deployments", deaths["deployments"])
            wait_for(is_recorded, "its death is recorded")
        time.sleep(0.05)


def has_died(stack: OwnStack, name: str, times: int) -> bool:
    """Return True if `muster up` has recorded at least `times` deaths of the named process."""
    part = stack.part(name)
    return part is not None and part.deaths >= times


def kill_all(stack: OwnStack, random_draws: random.Random, deaths: Counter[str]) -> None:
    """Kill each process in `PARTS`, or its guardian process, `KILLS` times at random moments.

    After about 70 % of the kills, chosen at random, the function waits until the killed process has
    started again.

    Args:
        stack: The stack.
        random_draws: Random generator for the moments and the order of the kills.
        deaths: Mapping from process name to number of kills. This function adds its own kills.
    """
    for name, guardian in plan_kills(PARTS, KILLS, random_draws):
        before = stack.part(name)
        assert before is not None
        wait_for(partial(stack.kill, name, guardian=guardian), f"{name} has a process to be killed")
        deaths[name] += 1
        print(f"{time.strftime('%X')} {name} killed{' (guardian)' * guardian}", flush=True)
        if random_draws.random() < 0.7:
            stack.wait_until_back(name, before.deaths + 1)
        else:
            is_recorded = partial(has_died, stack, name, before.deaths + 1)
            wait_for(is_recorded, f"the death of {name} is recorded")
        time.sleep(random_draws.uniform(0.0, 6.0))
    for name in PARTS:
        stack.wait_until_back(name, 1)


def list_runs_repeatedly(stack: OwnStack, is_over: threading.Event) -> None:
    """List the runs twice a second, even while the server is down, to add load."""
    while not is_over.wait(0.5):
        stack.states()


def is_ended(stack: OwnStack, ids: dict[str, str]) -> bool:
    states = stack.states()
    return all(
        states.get(run_id) in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        for run_id in ids.values()
    )
