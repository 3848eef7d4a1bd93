"""Count the modules of `tasks/` on three paths through Muster: `make house` prints them.

- From a spec to the start of its program.
- From the end of the program to the state of the flow run.
- From a waiting flow run to the GPUs of its process.

The first two paths are traced in a real run, the third in a scheduler and an admission with a fake
Prefect server. A module is on a path if a function of it is called with an argument of one of the
path's classes, for example `RunSpec`. All modules of `tasks/spec` that are called count for the
first path, and none for the third. Modules that only show data (`tasks/show`) and the masking of
secrets are on no path.
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

#: Names of the data classes that Muster uses from the loading of a spec to the start of a program.
#: If a function gets an argument of one of these classes, the module of the function is on the path
#: from the spec to the start of the program (`ModulePaths.to_exec`).
SPEC = frozenset({"RunSpec", "Component", "AttemptPlan", "ComponentPlan", "Command"})
#: Names of the data classes that Muster uses after the end of a program. `ModulePaths.to_state`
#: lists each module with a function that gets an argument of one of these classes.
DEATH = frozenset({"Exit", "Decision", "Failure", "Verdict"})
#: Names of the data classes that Muster uses while a flow run waits for GPUs. `ModulePaths.to_gpus`
#: lists each module with a function that gets an argument of one of these classes.
WAIT = frozenset(
    {
        "FlowRun",
        "Request",
        "Demand",
        "QueueEntry",
        "Ledger",
        "Look",
        "Waiting",
        "Plan",
        "Cluster",
        "ClusterNode",
        "PoolSettings",
        "Grant",
        "Admitted",
        "DeviceLease",
    }
)

#: Beginnings of file names in `tasks/`. The modules in these files are not recorded.
_EXCLUDED = ("show/", "spec/secrets.py")

#: Spec of the run that is traced. Its program fails.
_RUN = {
    "name": "ways",
    "workload": "grpo",
    "components": {"trainer": {"command": ["sh", "-c", "exit 3"]}},
}


class ModulePaths:
    """The modules that Muster calls in three phases of a run.

    The phases are:

    - `to_exec`: from a spec to the start of its program.
    - `to_state`: from the end of the program to the final state of the flow run.
    - `to_gpus`: from a waiting flow run to the assignment of GPUs to its process.

    Each attribute maps the file of a module to the function that was called first in the module.
    The modules are in the order of their first call.
    """

    def __init__(self) -> None:
        #: Modules on the path from a spec to the start of a program: mapping from the file of each
        #: module to the first called function of the module.
        self.to_exec: dict[str, str] = {}
        #: Modules that Muster calls after a program has ended, until the flow run has its final
        #: state. Each key is the file of a module. Each value is the first called function of this
        #: module.
        self.to_state: dict[str, str] = {}
        #: Modules that are called while a flow run waits for GPUs, until its process gets the GPUs.
        #: Each key is the file of a module. Each value is the first called function of this module.
        self.to_gpus: dict[str, str] = {}
        #: True after the program of the traced run has started.
        self._has_started = False
        #: True while a waiting flow run is traced.
        self._traces_wait = False

    def observe(self, frame: FrameType, event: str, argument: object) -> None:
        """Record the module of a called function. Python calls this method for each function call.

        Source: documentation of `sys.setprofile`, which installs this method.
        """
        code = frame.f_code
        _, separator, path = code.co_filename.partition(f"{os.sep}tasks{os.sep}")
        if event != "call" or not separator or path.startswith(_EXCLUDED):
            return

        if self._traces_wait:
            modules = self.to_gpus
            classes = WAIT
        elif self._has_started:
            modules = self.to_state
            classes = DEATH
        else:
            modules = self.to_exec
            classes = SPEC

        if path.startswith("spec") and self._traces_wait:
            pass
        elif path.startswith("spec") and not self._has_started:
            modules.setdefault(path, code.co_name)
        elif path not in modules:
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                class_name = type(frame.f_locals.get(name)).__name__
                if class_name in classes:
                    modules[path] = f"{code.co_name}({name}: {class_name})"
                    break

        if path.endswith("guarded.py") and code.co_name == "launch":
            # `launch` lets the guardian process start the program. The guardian process is not
            # traced, so this code adds the guardian's module to `to_exec`.
            self._has_started = True
            self.to_exec["processes/guardian.py"] = "spawn(order: Order)"

    def begin_wait(self) -> None:
        """Let `observe` record the modules in `to_gpus` from now on."""
        self._traces_wait = True


def trace_run() -> ModulePaths:
    """Trace a run in a new MUSTER_HOME, and return the modules that were called.

    The attribute `to_exec` of the result has the modules that were called before the program of the
    run started. The attribute `to_state` has the modules that were called later.
    """
    from tasks.spec.loading import parse_spec
    from tasks.train.session import RunSession
    from tasks.train.spec_check import check_spec
    from tasks.train.tasks import conclude
    from tasks.train.waiting import next_attempt

    ways = ModulePaths()
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


def trace_wait(ways: ModulePaths) -> None:
    """Trace a run that waits for another run's end; add the called Muster modules to `ways`."""
    from tasks.queue import admission, worker
    from tasks.queue import scheduler as scheduler_module
    from tasks.queue.nodes import Capacity
    from tasks.queue.settings import PoolSettings, TableNode, with_settings
    from tests.support.scripted_prefect import FreeLease, ScriptedPrefect

    scheduler_module.SchedulingLease = FreeLease  # type: ignore[assignment, misc]
    table = (TableNode(name="n1", gpus=1),)
    job = worker.GangWorker.get_default_base_job_template()
    server: Any = ScriptedPrefect(with_settings(job, PoolSettings(nodes=table)))

    async def wait() -> None:
        scheduler = scheduler_module.Scheduler(server, capacity=Capacity(), worker=("gang", "n1"))
        spec = {**_RUN, "gang": {"gpus_per_node": 1}}
        pool_id = uuid4()
        first = server.submit(spec, work_pool_id=pool_id)
        second = server.submit(spec, work_pool_id=pool_id)

        # The first run gets the only GPU, so the second run waits until the first run has ended.
        scheduling_pass, [granted] = await scheduler.decide(lambda entry, nodes: True)
        await scheduler.publish_reasons(scheduling_pass)
        server.set(first, State(type=StateType.COMPLETED))
        scheduling_pass, [granted] = await scheduler.decide(lambda entry, nodes: True)
        assert granted.id == second and await scheduler.is_granted(granted)

        waiting = admission._Admission(second, True, False, print, lambda _s: True)
        grant = await admission._find_grant_of_worker(server, server.run(second))
        assert grant is not None
        admitted = await waiting._accept(server, grant)
        assert admitted is not None and admitted.devices is not None
        admitted.devices.close()

    with tempfile.TemporaryDirectory(prefix="muster-ways-") as home:
        os.environ |= {"MUSTER_HOME": home, "MUSTER_HOST": "n1", "MUSTER_GPUS": "0"}
        ways.begin_wait()
        threading.setprofile(ways.observe)
        sys.setprofile(ways.observe)
        try:
            asyncio.run(wait())
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def main() -> None:
    """Print three lists of modules: one list for each path that `ModulePaths` describes."""
    ways = trace_run()
    trace_wait(ways)
    for title, modules in (
        ("a spec to its program", ways.to_exec),
        ("a death", ways.to_state),
        ("a run that waits", ways.to_gpus),
    ):
        print(f"{title}: {len(modules)} modules")
        for path, call in modules.items():
            print(f"  {path}: {call}")


if __name__ == "__main__":
    main()
