"""How many modules a spec passes before its program runs, a death before it is a state, and a run
that waits before its process has its GPUs.

`make house` prints it. A real run is traced, and a gate and a process before a scripted server: a
module is passed where one of its functions is called with the spec, or with what was made of it,
among its arguments; on the other ways, with the end of a process, or with the flow run that waits,
or what was made of those. All modules of `tasks/spec` that are called read or check the spec, but
for the masking of secrets; that is the first way, and no part of the third. Whoever only looks on
(`tasks/show`) is on none.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from contextlib import suppress
from types import FrameType
from typing import Any
from uuid import uuid4

from prefect.client.schemas.objects import State, StateType

#: Classes that carry a spec on, until its program runs.
SPEC = frozenset({"RunSpec", "Component", "AttemptPlan", "ComponentPlan", "Command"})
#: Classes that carry a death on, until it is the flow run's state.
DEATH = frozenset({"Exit", "Decision", "Failure", "Verdict"})

#: Classes that carry a run that waits on, until its process has what it was granted.
WAIT = frozenset(
    {
        *("FlowRun", "Request", "Demand", "QueueEntry", "Ledger", "Look", "Waiting", "Plan"),
        *("Cluster", "ClusterNode", "PoolSettings", "Grant", "Admitted", "DeviceLease"),
    }
)

_NOT_ON_THE_WAY = ("show/", "spec/secrets.py")

_RUN = {
    "name": "ways",
    "workload": "grpo",
    "components": {"trainer": {"command": ["sh", "-c", "exit 3"]}},
}


class Ways:
    """The modules that were passed, in the order of their first call, each with that call."""

    def __init__(self) -> None:
        #: From the spec to the program that it names.
        self.to_exec: dict[str, str] = {}
        #: From the end of that program to the state of the flow run.
        self.to_state: dict[str, str] = {}
        #: From a flow run that is scheduled to the GPUs of its process.
        self.to_gpus: dict[str, str] = {}
        self._runs = False
        self._waits = False

    def observe(self, frame: FrameType, event: str, argument: object) -> None:
        """Source: sys.setprofile."""
        code = frame.f_code
        _, found, path = code.co_filename.partition(f"{os.sep}tasks{os.sep}")
        if event != "call" or not found or path.startswith(_NOT_ON_THE_WAY):
            return
        way, carriers = (self.to_state, DEATH) if self._runs else (self.to_exec, SPEC)
        if self._waits:
            way, carriers = self.to_gpus, WAIT
        if path.startswith("spec") and (self._waits or not self._runs):
            if not self._waits:
                way.setdefault(path, code.co_name)
        elif path not in way:
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                if (kind := type(frame.f_locals.get(name)).__name__) in carriers:
                    way[path] = f"{code.co_name}({name}: {kind})"
                    break
        if path.endswith("guarded.py") and code.co_name == "launch":
            # Its guardian executes the program.
            self._runs = True
            self.to_exec["processes/guardian.py"] = "spawn(order: Order)"


def measure() -> Ways:
    """The ways of a run that fails, in a `MUSTER_HOME` of its own."""
    from tasks.spec.loading import parse_spec
    from tasks.train.session import RunSession
    from tasks.train.spec_check import check_spec
    from tasks.train.tasks import conclude
    from tasks.train.waiting import next_attempt

    ways = Ways()
    with tempfile.TemporaryDirectory(prefix="muster-ways-") as home:
        os.environ["MUSTER_HOME"] = home
        threading.setprofile(ways.observe)
        sys.setprofile(ways.observe)
        try:
            spec = parse_spec(_RUN)
            check_spec(spec)
            run = RunSession(spec, run_id="ways-grpo-20260101-000000-00000000", flow_run_id=uuid4())
            run.begin_attempt()
            with suppress(Exception):
                run.supervisor.start("trainer")
                run.supervisor.wait_decided()
            run.end_attempt()
            next_attempt(run)
            conclude(run)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return ways


def measure_wait(ways: Ways) -> None:
    """The way of a run that waits until another one has ended."""
    from tasks.queue import admission, gate, worker
    from tasks.queue.nodes import Capacity
    from tasks.queue.settings import PoolSettings, TableNode, with_settings
    from tests.support.scripted_prefect import FreeLease, ScriptedPrefect

    gate.GateLease = FreeLease  # type: ignore[assignment, misc]
    table = (TableNode(name="n1", gpus=1),)
    job = worker.GangWorker.get_default_base_job_template()
    server: Any = ScriptedPrefect(with_settings(job, PoolSettings(nodes=table)))

    async def wait() -> None:
        one = gate.Gate(server, capacity=Capacity(), worker=("gang", "n1"))
        spec, known = {**_RUN, "gang": {"gpus_per_node": 1}}, {"work_pool_id": uuid4()}
        first, second = (server.submit(spec, **known) for _ in range(2))
        look, [granted] = await one.decide(lambda entry, nodes: True)
        await one.tell(look)
        server.set(first, State(type=StateType.COMPLETED))
        look, [granted] = await one.decide(lambda entry, nodes: True)
        assert granted.id == second and await one.is_granted(granted)
        waiting = admission._Admission(second, True, False, print, lambda _s: True)
        grant = await admission._grant_of_worker(server, server.run(second))
        assert grant is not None
        given = await waiting._accept(server, grant)
        assert given is not None and given.devices is not None
        given.devices.close()

    with tempfile.TemporaryDirectory(prefix="muster-ways-") as home:
        os.environ |= {"MUSTER_HOME": home, "MUSTER_HOST": "n1", "MUSTER_GPUS": "0"}
        ways._waits = True
        threading.setprofile(ways.observe)
        sys.setprofile(ways.observe)
        try:
            asyncio.run(wait())
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def main() -> None:
    """Print the ways."""
    ways = measure()
    measure_wait(ways)
    for title, way in (
        ("a spec to its program", ways.to_exec),
        ("a death", ways.to_state),
        ("a run that waits", ways.to_gpus),
    ):
        print(f"{title}: {len(way)} modules")
        for path, call in way.items():
            print(f"  {path}: {call}")


if __name__ == "__main__":
    main()
