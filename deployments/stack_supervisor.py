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


class Signals:
    """SIGTERM and SIGINT, also those that come before there is anything to stop."""

    def __init__(self) -> None:
        self._asked: list[str] = []
        self._supervisor: Supervisor | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def stop(self, supervisor: Supervisor) -> None:
        """From now on they stop this one."""
        self._supervisor = supervisor
        if self._asked:
            supervisor.interrupt(self._asked[0])

    def _on_signal(self, signum: int, frame: object) -> None:
        self._asked.append(f"stopped by {signal.Signals(signum).name}")
        if self._supervisor is not None:
            self._supervisor.interrupt(self._asked[0])
            if len(self._asked) > 1:
                self._supervisor.hurry()


class Stage:
    """One stack, from its first part's start to its last one's end."""

    def __init__(self, place: StackPlace, blueprint: Blueprint, report: Report) -> None:
        self._place = place
        self._plan = blueprint.plan
        self._ports = blueprint.ports
        self._stack = blueprint.stack
        self._report = report

    def run(self, signals: Signals) -> int:
        """Returns: 0 when it was stopped, 1 when it failed."""
        self._save()
        events = EventLog(self._place.logs / "events.jsonl", (self._report.pass_on,))
        with Supervisor(self._plan, self._ports, events.emit) as supervisor:
            # Before any of them has anything to guard.
            guardians = tree.children(os.getpid())
            self._save(guardians=tuple(map(ProcessId.of, guardians)))
            signals.stop(supervisor)
            if self._start_all(supervisor):
                self._save(state="up")
                self._report.tell("stack.up")
                if self._report.is_cut:
                    supervisor.interrupt("nobody waits for it any more")
                self._report.close()
            supervisor.wait_decided()
            self._save(state="stopping")
            verdict = supervisor.teardown()
        return self._conclude(verdict)

    def _start_all(self, supervisor: Supervisor) -> bool:
        for component in self._plan.components:
            if self._report.is_cut:
                supervisor.interrupt("nobody waits for it any more")
            try:
                supervisor.start(component.name)
            except RunEnded:
                return False
        return True

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
