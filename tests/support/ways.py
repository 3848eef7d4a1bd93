"""How many modules a spec passes before its program runs, and a death before it is a state.

`make house` prints it. A real run is traced: a module is passed where one of its functions is
called with the spec, or with what was made of it, among its arguments; on the other way, with the
end of a process, or with what was made of that. All modules of `tasks/spec` that are called read or
check the spec, but for the masking of secrets. Whoever only looks on (`tasks/show`) is not on the
way.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from contextlib import suppress
from types import FrameType
from uuid import uuid4

#: Classes that carry a spec on, until its program runs.
SPEC = frozenset({"RunSpec", "Component", "AttemptPlan", "ComponentPlan", "Command"})
#: Classes that carry a death on, until it is the flow run's state.
DEATH = frozenset({"Exit", "Decision", "Failure", "Verdict"})

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
        self._runs = False

    def observe(self, frame: FrameType, event: str, argument: object) -> None:
        """Source: sys.setprofile."""
        code = frame.f_code
        _, found, path = code.co_filename.partition(f"{os.sep}tasks{os.sep}")
        if event != "call" or not found or path.startswith(_NOT_ON_THE_WAY):
            return
        way, carriers = (self.to_state, DEATH) if self._runs else (self.to_exec, SPEC)
        if not self._runs and path.startswith("spec"):
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
    from tasks.train.session import RunSession, check_spec
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


def main() -> None:
    """Print both ways."""
    ways = measure()
    for title, way in (("a spec to its program", ways.to_exec), ("a death", ways.to_state)):
        print(f"{title}: {len(way)} modules")
        for path, call in way.items():
            print(f"  {path}: {call}")


if __name__ == "__main__":
    main()
