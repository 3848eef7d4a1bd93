"""The process behind a stack: it starts the parts in order and watches them until it is stopped.

`deployments.stack` starts it, in a session of its own, and reads from `--report-fd` a JSON line for
each thing that happens, the last of them `stack.up` or `stack.failed`. A reader that has gone
before the stack is up means that nobody waits for it any more: then all is stopped.

A part that dies is started again in place, and stack.json says so. Only a part that can't be
started again for minutes ends the stack.

SIGTERM stops the runs of the worker and then the stack, each with its grace period. However this
process ends, the parts' guardians see it: they tell the runs to end, give them their time, and
leave nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from deployments.stack.nodes import Fleet
from deployments.stack.plan import Blueprint, draw_up
from deployments.stack.state import StackPart, StackPlace
from tasks.processes.services import ServiceReport, Services
from tasks.record.events import Event, EventLog
from tasks.record.outcome import Failure
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
        self._blueprint = blueprint
        self._stack = blueprint.stack
        self._report = report
        self._lock = threading.Lock()

    def run(self) -> int:
        """Returns: 0 when it was stopped, 1 when it failed."""
        self._save()
        events = EventLog(self._place.logs / "events.jsonl", (self._report.pass_on,))
        with Services(
            self._blueprint.plan,
            self._blueprint.ports,
            events.emit,
            needs=self._blueprint.needs,
            on_change=self._note_part,
        ) as services:
            threading.Thread(target=self._obey_signals, args=(services,), daemon=True).start()
            if self._start_all(services):
                self._report.tell("stack.up")
                self._report.close()
            if self._report.is_cut:
                services.stop("nobody waits for it any more")
            services.wait_over()
            failure = services.failure
            message = failure.message if failure is not None else services.stopped_by
            self._save(state="stopping", message=message)
            left = services.teardown()
        return self._conclude(failure, message, left)

    def _start_all(self, services: Services) -> bool:
        for component in self._blueprint.plan.components:
            if self._report.is_cut:
                return False
            try:
                services.start(component.name)
            except RunEnded:
                return False
        return self._save(state="up")

    def _obey_signals(self, services: Services) -> None:
        signum = signal.sigwait(_STOP_SIGNALS)
        self._save(state="stopping")
        # Further stop signals change nothing: the runs keep their grace periods.
        services.stop(f"stopped by {signal.Signals(signum).name}")

    def _note_part(self, report: ServiceReport) -> None:
        """Write down what has become of a part; before anything runs under a new guardian."""
        before = self._stack.part(report.name)
        if report.deaths > (before.deaths if before is not None else 0):
            print(f"{report.reason}", flush=True)
            self._report.tell("part.died", component=report.name, message=report.reason)
        part = StackPart(
            name=report.name,
            state=report.state.value,
            pid=report.pid,
            guardians=report.guardians,
            deaths=report.deaths,
            died_at=report.died_at,
            reason=report.reason,
        )
        try:
            self._save(part=part)
        except OSError as error:
            # A full disk, for example, is no reason to stop what runs.
            print(f"The state of {report.name} was not written down: {error}", flush=True)

    def _conclude(
        self, failure: Failure | None, message: str, left: Mapping[str, tuple[int | str, ...]]
    ) -> int:
        if left:
            message = f"{message}; these processes outlived SIGKILL: {dict(left)}"
        if failure is None and not left:
            self._save(state="stopped", message=message)
            return 0
        self._save(state="failed", message=message)
        log = self._place.log(failure.component) if failure and failure.component else None
        tail = failure.log_tail if failure is not None else ""
        self._report.tell("stack.failed", message=message, log=log, log_tail=tail)
        print(f"The stack failed: {message}", flush=True)
        return 1

    def _save(self, part: StackPart | None = None, **changes: Any) -> bool:
        """Write the stack with these changes to its file; False for a state that was left behind
        already."""
        with self._lock:
            if changes.get("state") == "up" and self._stack.state != "starting":
                return False
            if part is not None:
                others = [one for one in self._stack.parts if one.name != part.name]
                changes["parts"] = (*others, part)
            self._stack = self._stack.model_copy(update=changes)
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
