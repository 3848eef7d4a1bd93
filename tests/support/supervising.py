"""A supervising process that a test may kill: `python -m tests.support.supervising DIRECTORY`.

It supervises the plan that lies in the directory, ends the run as cancelled at `stop` on stdin or
at SIGTERM (again: without grace), and leaves `events.jsonl` and `verdict.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.run.errors import RunEnded
from tasks.run.events import EventLog
from tasks.supervise.plan import AttemptPlan
from tasks.supervise.ports import PortsReserved
from tasks.supervise.supervisor import Supervisor


def supervise(plan: AttemptPlan) -> None:
    events = EventLog(plan.cwd / "events.jsonl")
    with Supervisor(plan, PortsReserved([]), events.emit) as supervisor:
        told = threading.Event()

        def end(*_: object) -> None:
            supervisor.interrupt("told to end")
            if told.is_set():
                supervisor.hurry()
            told.set()

        signal.signal(signal.SIGTERM, end)
        threading.Thread(target=obey, args=(end,), daemon=True).start()
        with contextlib.suppress(RunEnded):
            for component in plan.components:
                supervisor.start(component.name)
            supervisor.wait_decided()
        verdict = supervisor.teardown()
    failure = verdict.failure
    content = {
        "state": verdict.state.value,
        "message": verdict.message,
        "failure": failure.as_json() if failure else None,
        "left": {name: list(pids) for name, pids in verdict.left.items()},
    }
    (plan.cwd / "verdict.json").write_text(json.dumps(content))


def obey(end: Callable[[], None]) -> None:
    # The end of stdin is that of the test.
    for _ in sys.stdin:
        end()
    end()


def ignore_sigchld(run: Callable[[], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    run()


def block_signals(run: Callable[[], None]) -> None:
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1}
    )
    run()


def wait_for_any_child(run: Callable[[], None]) -> None:
    """Beside a thread that reaps whatever child it can get, as some libraries do."""

    def reap() -> None:
        pause = threading.Event()
        while True:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
            pause.wait(0.001)

    threading.Thread(target=reap, daemon=True).start()
    run()


def make_in_short_lived_thread(run: Callable[[], None]) -> None:
    """Each supervisor is made by a thread that ends at once."""
    init = Supervisor.__init__

    def from_thread(self: Supervisor, *arguments: Any) -> None:
        thread = threading.Thread(target=init, args=(self, *arguments))
        thread.start()
        thread.join()

    Supervisor.__init__ = from_thread  # type: ignore[method-assign]
    run()


def beside_a_fork(run: Callable[[], None]) -> None:
    """A fork, made once guardians are there, holds copies of all descriptors until told to end."""
    init = Supervisor.__init__

    def with_fork(self: Supervisor, plan: AttemptPlan, *arguments: Any) -> None:
        init(self, plan, *arguments)
        if os.fork() == 0:
            while not (plan.cwd / "release").exists():
                time.sleep(0.01)
            os._exit(0)

    Supervisor.__init__ = with_fork  # type: ignore[method-assign]
    run()


#: What may be odd about the process that supervises.
ODDITIES: dict[str, Callable[[Callable[[], None]], None]] = {
    "": lambda run: run(),
    "sigchld-ignored": ignore_sigchld,
    "signals-blocked": block_signals,
    "foreign-wait": wait_for_any_child,
    "short-lived-thread": make_in_short_lived_thread,
    "fork": beside_a_fork,
}


def main() -> None:
    plan, oddity = pickle.loads((Path(sys.argv[1]) / "plan.pickle").read_bytes())
    ODDITIES[oddity](lambda: supervise(plan))


if __name__ == "__main__":
    main()
