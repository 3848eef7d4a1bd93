"""The supervisor process of a stack: it starts the parts in order, and restarts parts that die.

`muster up` starts this process in a new session. The process reports its progress as JSON lines to
the pipe `--report-fd`. The last line is `stack.up` or `stack.failed`. If `muster up` ends before
the stack is up, the pipe closes, and the supervisor stops the stack.

The supervisor writes the state of each part to `stack.json`. It stops the whole stack if it cannot
restart a part for some minutes.

After SIGTERM, the supervisor stops first the worker's runs and then the parts, each with its grace
period. If the supervisor itself is killed, the guardian process that owns each part notices this,
and stops the part in the same way.
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
from deployments.stack.plan import Blueprint, build_blueprint
from deployments.stack.ray_directory import LockedRayDirectory
from deployments.stack.state import RAY, StackPart, StackPlace
from tasks.processes.component import AttemptContext, ComponentPlan
from tasks.processes.process_component import ProcessComponent
from tasks.processes.services import ServiceReport, Services, ServiceState
from tasks.record.events import Event, EventLog
from tasks.record.outcome import Failure
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.formatting import join_commas

#: Signals that stop the `muster up` stack.
_STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT))


class ReportPipe:
    """The pipe on which the supervisor reports the progress of the start to `muster up`."""

    def __init__(self, fd: int) -> None:
        """
        Args:
            fd: File descriptor of the write end of the pipe.
        """
        self._pipe = os.fdopen(fd, "w", buffering=1, encoding="utf-8")
        #: True if `muster up` has closed its end of the pipe.
        self.is_broken = False

    def send(self, event: str, **fields: Any) -> None:
        """Write one JSON line with the event's name and the fields.

        Do nothing if either end of the pipe is closed.
        """
        if self.is_broken or self._pipe.closed:
            return
        try:
            self._pipe.write(json.dumps({"event": event, **fields}, default=str) + "\n")
        except OSError:
            self.is_broken = True

    def send_event(self, event: Event) -> None:
        """Write an event, such as the death of a part of the stack, as one JSON line."""
        self.send(event.name, component=event.component, **event.fields)

    def close(self) -> None:
        """Close the pipe."""
        with suppress(OSError):
            self._pipe.close()


class Supervisor:
    """Starts, watches and stops the parts of one stack, and keeps its `stack.json` up to date."""

    def __init__(self, place: StackPlace, blueprint: Blueprint, report: ReportPipe) -> None:
        """
        Args:
            place: Directory of the stack.
            blueprint: The plan of the stack.
            report: The pipe to `muster up`.
        """
        self._place = place
        self._blueprint = blueprint
        self._stack = blueprint.stack
        self._report = report
        self._ray_directory = LockedRayDirectory(blueprint.stack.ray_temp)
        #: Lock that a thread holds while it changes `stack.json` and `_stack`.
        self._lock = threading.Lock()

    def run(self) -> int:
        """Start the `muster up` stack, wait until it is stopped or fails, and stop all parts.

        Returns:
            0 if the stack was stopped, 1 if it failed.
        """
        self._save()
        events = EventLog(self._place.logs / "events.jsonl", (self._report.send_event,))
        with Services(
            self._blueprint.plan,
            self._blueprint.ports,
            events.emit,
            needs=self._blueprint.needs,
            on_change=self._record_part,
            make_process=self._make_process,
        ) as services:
            threading.Thread(target=self._stop_on_signal, args=(services,), daemon=True).start()
            if self._start_parts(services):
                self._report.send("stack.up")
                self._report.close()
            if self._report.is_broken:
                services.stop("the command that started the stack has ended")
            services.wait_over()
            failure = services.failure
            message = failure.message if failure is not None else services.stopped_by
            self._save(state="stopping", message=message)
            survivors = services.teardown()
        return self._record_end(failure, message, survivors)

    def _start_parts(self, services: Services) -> bool:
        """Start all parts in order, each as soon as the part before is ready.

        Returns:
            True if the stack is up. False if a part failed, the stack was stopped, or the process
            `muster up` that waits for this start has ended.
        """
        for component in self._blueprint.plan.components:
            if self._report.is_broken:
                return False
            try:
                services.start(component.name)
            except RunEnded:
                return False
        return self._save(state="up")

    def _make_process(self, plan: ComponentPlan, context: AttemptContext) -> ProcessComponent:
        """Return a new `ProcessComponent` for a program of the `muster up` stack.

        For the Ray head, also create and lock the directory for Ray.

        Raises:
            OSError: The directory for Ray cannot be created or locked.
        """
        if plan.name == RAY:
            self._ray_directory.restore()
        return ProcessComponent(plan, context)

    def _stop_on_signal(self, services: Services) -> None:
        """Wait for a stop signal, and then stop all programs of the `muster up` stack.

        Later signals are ignored, because they must not shorten the grace periods of the runs.
        """
        signum = signal.sigwait(_STOP_SIGNALS)
        self._save(state="stopping")
        services.stop(f"stopped by {signal.Signals(signum).name}")

    def _record_part(self, report: ServiceReport) -> None:
        """Write the new state of a part to `stack.json`, and send a report if the part has died.

        `Services` calls this method before a new guardian process starts the program of the part.
        So `muster down` can find every guardian with a running program in `stack.json`.
        """
        previous_part = self._stack.part(report.name)
        previous_deaths = previous_part.deaths if previous_part is not None else 0
        if report.deaths > previous_deaths:
            print(f"{report.reason}", flush=True)
            if report.state is not ServiceState.GIVEN_UP:
                self._report.send("part.died", component=report.name, message=report.reason)
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
            # Only print the error, for example a full disk. The programs of the `muster up` stack
            # must continue even if `stack.json` cannot be written.
            print(f"Muster could not save the state of {report.name}: {error}", flush=True)

    def _record_end(
        self,
        failure: Failure | None,
        message: str,
        survivors: Mapping[str, tuple[int | str, ...]],
    ) -> int:
        """Write the final state of the `muster up` stack to `stack.json`, and report a failure.

        Args:
            failure: The failure that ended the stack, or None if the stack was stopped.
            message: Reason for the end of the stack.
            survivors: Mapping from the name of a part to a description of its processes that could
                not be ended.

        Returns:
            0 if the stack was stopped and no process survived, otherwise 1.
        """
        if survivors:
            listed = "; ".join(f"{name}: {join_commas(texts)}" for name, texts in survivors.items())
            message = f"{message}; Muster could not end these processes: {listed}"
        if failure is None and not survivors:
            self._save(state="stopped", message=message)
            return 0

        if failure is not None and failure.kind is FailureKind.NOT_READY:
            message += ". If this machine is very busy, run `muster up` again later"
        self._save(state="failed", message=message)
        log = self._place.log(failure.component) if failure and failure.component else None
        tail = failure.log_tail if failure is not None else ""
        self._report.send("stack.failed", message=message, log=log, log_tail=tail)
        print(f"The stack failed: {message}", flush=True)
        return 1

    def _save(self, part: StackPart | None = None, **changes: Any) -> bool:
        """Change the stored state of the `muster up` stack, and write it to `stack.json`.

        Args:
            part: New state of a part, or None if no part has changed.
            changes: New values of other fields of the stack.

        Returns:
            False if the new state is `up` but the stack is already stopping; nothing is then
            changed. Otherwise True.
        """
        with self._lock:
            if changes.get("state") == "up" and self._stack.state != "starting":
                return False
            if part is not None:
                other_parts = [other for other in self._stack.parts if other.name != part.name]
                changes["parts"] = (*other_parts, part)
            self._stack = self._stack.model_copy(update=changes)
            self._place.save(self._stack)
            return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.stack.supervisor")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--ray-dashboard", type=int, help="Port of Ray's dashboard. 0: any free port"
    )
    parser.add_argument(
        "--gpus",
        type=Fleet.parsed,
        help="Simulated Ray nodes, as NxG: N nodes with G logical GPUs each",
    )
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument(
        "--lock-fd",
        type=int,
        required=True,
        help="File descriptor of the lock, which must stay open",
    )
    options = parser.parse_args()
    # Block the stop signals in all threads. One thread receives them with `sigwait`. The kernel
    # keeps signals that arrive before this thread calls `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    report = ReportPipe(options.report_fd)
    for fd in (options.report_fd, options.lock_fd):
        os.set_inheritable(fd, False)
    place = StackPlace.of_home()
    try:
        place.server_home.mkdir(parents=True, exist_ok=True)
        blueprint = build_blueprint(place, options.port, options.ray_dashboard, options.gpus)
        return Supervisor(place, blueprint, report).run()
    except OSError as error:
        report.send(
            "stack.failed", message=f"the stack could not start: {error}", log=None, log_tail=""
        )
        raise


if __name__ == "__main__":
    raise SystemExit(main())
