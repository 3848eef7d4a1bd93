"""The process behind a stack: it starts the parts in order and watches them until it is stopped.

`deployments.stack` starts it, in a session of its own, and reads from `--report-fd` a JSON line for
each thing that happens, the last of them `stack.up` or `stack.failed`. A reader that has gone
before the stack is up means that nobody waits for it any more: then all is stopped.

SIGTERM stops the runs of the worker and then the stack, each with its grace period. However this
process ends, the parts' guardians see it and leave nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from contextlib import suppress
from typing import Any

from deployments.stack.nodes import Fleet
from deployments.stack.plan import PIPELINES, RUNS_WITHIN_S, WORKER, Blueprint, draw_up
from deployments.stack.runs import end_runs
from deployments.stack.state import Stack, StackPlace
from tasks.processes import tree
from tasks.processes.identity import ProcessId
from tasks.processes.supervisor import Supervisor
from tasks.record.events import Event, EventLog
from tasks.record.outcome import Verdict
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded

_STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT))


class Report:
    """The line to the command that waits for the stack."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w", buffering=1, encoding="utf-8")
        #: The command has gone.
        self.is_cut = False

    def tell(self, event: str, **fields: Any) -> None:
        if self.is_cut or self._pipe.closed:
            return
        try:
            self._pipe.write(json.dumps({"event": event, **fields}, default=str) + "\n")
        except OSError:
            self.is_cut = True

    def pass_on(self, event: Event) -> None:
        self.tell(event.name, component=event.component, **event.fields)

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.close()


class Stage:
    """One stack, from its first part's start to its last one's end."""

    def __init__(self, place: StackPlace, blueprint: Blueprint, report: Report) -> None:
        self._place = place
        self._plan = blueprint.plan
        self._ports = blueprint.ports
        self._stack = blueprint.stack
        self._report = report
        #: Pids of the workers, by component.
        self._workers: dict[str, int] = {}
        self._lock = threading.Lock()

    def run(self) -> int:
        """Returns: 0 when it was stopped, 1 when it failed."""
        self._save()
        events = EventLog(self._place.logs / "events.jsonl", (self._observe,))
        with Supervisor(self._plan, self._ports, events.emit) as supervisor:
            # Before any of them has anything to guard.
            guardians = tree.children(os.getpid())
            self._save(guardians=tuple(map(ProcessId.of, guardians)))
            threading.Thread(target=self._obey_signals, args=(supervisor,), daemon=True).start()
            if self._start_all(supervisor):
                self._report.tell("stack.up")
                self._report.close()
            if self._report.is_cut:
                supervisor.interrupt("nobody waits for it any more")
            supervisor.wait_decided()
            self._save(state="stopping")
            verdict = supervisor.teardown()
        return self._conclude(verdict)

    def _start_all(self, supervisor: Supervisor) -> bool:
        for component in self._plan.components:
            if self._report.is_cut:
                return False
            try:
                supervisor.start(component.name)
            except RunEnded:
                return False
        return self._save(state="up")

    def _obey_signals(self, supervisor: Supervisor) -> None:
        signum = signal.sigwait(_STOP_SIGNALS)
        self._save(state="stopping")
        # The runs first: a pipeline ends with its run, and would be left to go on without.
        for name in (WORKER, PIPELINES):
            if name in self._workers:
                end_runs(self._workers[name], within_s=RUNS_WITHIN_S)
        # Further stop signals change nothing: a second `muster down` is no reason to cut the grace
        # periods of the runs short.
        supervisor.interrupt(f"stopped by {signal.Signals(signum).name}")

    def _observe(self, event: Event) -> None:
        if event.name == "component.spawned" and event.component in (WORKER, PIPELINES):
            assert event.pid is not None
            self._workers[event.component] = event.pid
        self._report.pass_on(event)

    def _conclude(self, verdict: Verdict) -> int:
        if verdict.state is RunState.CANCELLED:
            self._save(state="stopped", message=verdict.message)
            return 0
        # Only a part that has failed ends the stack by itself.
        failure = verdict.failure
        message = failure.message if failure is not None else verdict.message
        log = self._place.log(failure.component) if failure and failure.component else None
        tail = failure.log_tail if failure is not None else ""
        self._save(state="failed", message=message)
        self._report.tell("stack.failed", message=message, log=log, log_tail=tail)
        print(f"The stack failed: {message}", flush=True)
        return 1

    def _save(self, **changes: Any) -> bool:
        """Note it in the file; False for a state that was left behind already."""
        with self._lock:
            if changes.get("state") == "up" and self._stack.state != "starting":
                return False
            self._stack = Stack.model_validate({**self._stack.model_dump(), **changes})
            self._place.save(self._stack)
            return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.stack.supervisor")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ray-dashboard", type=int, help="a port; 0: any free one")
    parser.add_argument("--gpus", type=Fleet.parsed, help="nodes with GPUs, NxG")
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--lock-fd", type=int, required=True, help="kept open, and that is all")
    options = parser.parse_args()
    # Taken by one thread that waits for them; those that come before it does are kept for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    report = Report(options.report_fd)
    for fd in (options.report_fd, options.lock_fd):
        os.set_inheritable(fd, False)
    place = StackPlace.of_home()
    try:
        place.server_home.mkdir(parents=True, exist_ok=True)
        blueprint = draw_up(place, options.port, options.ray_dashboard, options.gpus)
        return Stage(place, blueprint, report).run()
    except OSError as error:
        report.tell("stack.failed", message=f"could not start: {error}", log=None, log_tail="")
        raise


if __name__ == "__main__":
    raise SystemExit(main())
