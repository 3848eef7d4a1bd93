"""The process behind a stack: it starts the parts in order and watches them until it is stopped.

`deployments.stack` starts it, in a session of its own, and reads from `--report-fd` a JSON line for
each thing that happens, the last of them `stack.up` or `stack.failed`. A reader that has gone
before the stack is up means that nobody waits for it any more: then all is stopped.

SIGTERM stops the stack, a second one without grace periods. However this process ends, the parts'
guardians see it and leave nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import Any

from deployments.stack_plan import Blueprint, draw_up
from deployments.stack_state import ProcessId, Stack, StackPlace
from tasks.run.errors import RunEnded
from tasks.run.events import Event, EventLog
from tasks.run.lifecycle import RunState
from tasks.run.outcome import Verdict
from tasks.supervise import tree
from tasks.supervise.supervisor import Supervisor


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
        if not self.is_cut:
            self._pipe.close()


class Orders:
    """Why the stack is to end: somebody asked (SIGTERM, SIGINT), nobody waits, a part has failed.

    Also those that come before there is anything to stop.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._hurry = threading.Event()
        #: The first reason; empty before.
        self.reason = ""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._ended.set()

    def is_hurried(self) -> bool:
        """Somebody asked twice."""
        return self._hurry.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def wait_hurried(self) -> None:
        self._hurry.wait()

    def _on_signal(self, signum: int, frame: object) -> None:
        if self.reason:
            self._hurry.set()
        self.end(f"stopped by {signal.Signals(signum).name}")


class Stage:
    """One stack, from its first part's start to its last one's end."""

    def __init__(self, place: StackPlace, blueprint: Blueprint, report: Report) -> None:
        self._place = place
        self._plan = blueprint.plan
        self._ports = blueprint.ports
        self._stack = blueprint.stack
        self._report = report

    def run(self, orders: Orders) -> int:
        """Returns: 0 when it was stopped, 1 when it failed."""
        self._save()
        events = EventLog(self._place.logs / "events.jsonl", (self._observe,))
        with Supervisor(self._plan, self._ports, events.emit) as supervisor:
            # Before any of them has anything to guard.
            guardians = tree.children(os.getpid())
            self._save(guardians=tuple(map(ProcessId.of, guardians)))
            _in_background(lambda: (supervisor.wait_decided(), orders.end(supervisor.reason)))
            _in_background(lambda: (orders.wait_hurried(), supervisor.hurry()))
            starting = _in_background(lambda: self._start_all(supervisor, orders))
            orders.wait()
            self._save(state="stopping")
            self._end_runs(supervisor, orders)
            supervisor.interrupt(orders.reason)
            starting.join()
            verdict = supervisor.teardown()
        return self._conclude(verdict)

    def _start_all(self, supervisor: Supervisor, orders: Orders) -> None:
        for component in self._plan.components:
            if self._report.is_cut:
                orders.end("nobody waits for it any more")
            try:
                supervisor.start(component.name)
            except RunEnded:
                return
        self._save(state="up")
        self._report.tell("stack.up")
        if self._report.is_cut:
            orders.end("nobody waits for it any more")

    def _end_runs(self, supervisor: Supervisor, orders: Orders) -> None:
        if self._worker and supervisor.decided_state is None:
            end_runs(self._worker, within_s=RUNS_WITHIN_S, is_hurried=orders.is_hurried)

    def _observe(self, event: Event) -> None:
        if event.name == "component.spawned" and event.component == WORKER:
            self._worker = event.fields["pid"]
        self._report.pass_on(event)

    def _conclude(self, verdict: Verdict) -> int:
        if verdict.state is RunState.CANCELLED:
            self._save(state="stopped", message=verdict.message)
            return 0
        failure = verdict.failure
        # Only a part that has failed ends the stack by itself.
        message = failure.message if failure is not None else verdict.message
        self._save(state="failed", message=message)
        log = self._place.log(failure.component) if failure and failure.component else None
        tail = failure.log_tail if failure is not None else ""
        self._report.tell("stack.failed", message=message, log=log, log_tail=tail)
        print(f"The stack failed: {message}", flush=True)
        return 1

    def _save(self, **changes: Any) -> None:
        self._stack = Stack.model_validate({**self._stack.model_dump(), **changes})
        self._place.save(self._stack)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.stack_supervisor")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args()
    signals = Signals()
    report = Report(options.report_fd)
    os.set_inheritable(options.report_fd, False)
    place = StackPlace.of_home()
    try:
        place.server_home.mkdir(parents=True, exist_ok=True)
        blueprint = draw_up(place, options.port)
        return Stage(place, blueprint, report).run(signals)
    except OSError as error:
        report.tell("stack.failed", message=f"could not start: {error}", log=None, log_tail="")
        raise


if __name__ == "__main__":
    raise SystemExit(main())
