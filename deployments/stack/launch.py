"""Start and stop the supervisor process of a stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from deployments.stack.env import ROOT
from deployments.stack.nodes import Fleet
from deployments.stack.part_checks import wait_until_answering
from deployments.stack.state import (
    RAY,
    STOP_WITHIN_S,
    Stack,
    StackError,
    StackPlace,
    signal_process_of,
)
from tasks.processes.own_modules import make_own_command
from tasks.processes.registry import teardown_s
from tasks.record.causes import last_lines, read_tail

#: Longest time, in seconds, that the Ray head may take to end after SIGINT. After this time, the
#: Ray head gets SIGKILL.
_RAY_STOP_WITHIN_S = 20.0
#: Longest time, in seconds, until a restarted Ray cluster with all of its nodes answers.
_RAY_RESTART_WITHIN_S = 240.0


def launch(
    place: StackPlace,
    port: int,
    ray_dashboard: int | None,
    fleet: Fleet | None,
    lock_fd: int,
    say: Callable[[str], None],
) -> Stack:
    """Start the supervisor of a new `muster up` stack. Return the stack when all parts answer.

    After an error or an interrupt, all programs that were started are stopped.

    Args:
        place: Directory of the stack.
        port: Port of the Prefect server.
        ray_dashboard: Port of the Ray dashboard. 0 for any free port. None for 8265 if free,
            otherwise any free port.
        fleet: Ray nodes with logical GPUs. None for a cluster that consists only of the Ray head.
        lock_fd: File descriptor of the lock that `StackPlace.no_supervisor` yields. The supervisor
            inherits this descriptor.
        say: Shows the user a line of text about the progress.

    Raises:
        StackError: A part did not start or does not answer.
    """
    read_fd, write_fd = os.pipe()
    command = [
        *make_own_command("deployments.stack.supervisor"),
        "--port",
        str(port),
        "--report-fd",
        str(write_fd),
        "--lock-fd",
        str(lock_fd),
    ]
    if ray_dashboard is not None:
        command += ["--ray-dashboard", str(ray_dashboard)]
    if fleet is not None:
        command += ["--gpus", str(fleet)]

    with (place.log("supervisor")).open("ab") as log:
        supervisor = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "MUSTER_HOME": str(place.directory.parent)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[write_fd, lock_fd],
            start_new_session=True,
        )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd, encoding="utf-8") as report:
            _show_progress(place, report, say)
        stack = place.load()
        assert stack is not None
        wait_until_answering(stack)
    except BaseException:
        supervisor.terminate()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(STOP_WITHIN_S)
        # After the end of the supervisor, the guardian process of each program ends the program.
        supervisor.kill()
        supervisor.wait()
        place.clear()
        say(
            "The Muster stack could not be started. All processes that Muster had started for it "
            "have ended."
        )
        raise
    return stack


def _show_progress(place: StackPlace, report: Iterable[str], say: Callable[[str], None]) -> None:
    """Show the user the supervisor's reports until the `muster up` stack is up.

    Args:
        place: Directory of the stack.
        report: The JSON lines that the supervisor writes to the file descriptor `--report-fd`.
        say: Shows the user a line of text.

    Raises:
        StackError: The supervisor reported a failure, or ended before the stack was up.
    """
    for line in report:
        event = json.loads(line)
        match event["event"]:
            case "component.spawned":
                say(f"  {event['component']}: starting (pid {event['pid']})")
            case "component.ready":
                say(f"  {event['component']}: ready after {event['after_s']:.1f} s")
            case "part.died":
                say(f"  {event['message']}: restarting it")
            case "stack.up":
                return
            case "stack.failed":
                tail = f"\nLast lines of {event['log']}:\n{event['log_tail']}"
                raise StackError(f"{event['message']}{tail if event['log_tail'] else ''}")
    log = place.log("supervisor")
    raise StackError(
        f"the supervisor of the stack has ended; last lines of {log}:\n{read_last_lines(log)}"
    )


def stop(stack: Stack) -> None:
    """Send SIGTERM to the supervisor of the `muster up` stack, and wait for the end of all
    programs.

    If the supervisor does not end in time, it is killed. The guardian process of each program of
    the stack then ends the program.
    """
    # Compute the time limit before sending the signal, because the registry of components forgets
    # the grace periods of components that have ended.
    within_s = teardown_s() + STOP_WITHIN_S
    stack.supervisor.send(signal.SIGTERM)
    if not stack.supervisor.is_gone_within(within_s):
        stack.supervisor.send(signal.SIGKILL)
        stack.supervisor.is_gone_within(STOP_WITHIN_S)


def restart_ray(place: StackPlace, stack: Stack) -> None:
    """End the Ray head, and wait until the supervisor has started the Ray cluster again.

    The nodes of the cluster are restarted, too. All Ray jobs of the cluster end.

    Args:
        place: Directory of the `muster up` stack.
        stack: The running stack.

    Raises:
        StackError: The Ray cluster did not end, or does not answer after the restart.
    """
    head = stack.part(RAY)
    if head is not None and head.pid is not None:
        for signum in (signal.SIGINT, signal.SIGKILL):
            signal_process_of(stack.stack_id, head.pid, signum)
            if _has_died_within(place, head.deaths + 1, _RAY_STOP_WITHIN_S):
                break
        else:
            raise StackError(
                f"the head process of Ray (pid {head.pid}) did not end: see {place.log(RAY)}"
            )
    wait_until_answering(stack, _RAY_RESTART_WITHIN_S)


def _has_died_within(place: StackPlace, deaths: int, limit_s: float) -> bool:
    """Wait until the Ray head has died `deaths` times. Return False after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        stack = place.load()
        head = stack.part(RAY) if stack is not None else None
        if head is not None and head.deaths >= deaths:
            return True
        time.sleep(0.1)
    return False


def read_last_lines(log: Path) -> str:
    """Return the last lines of a log file as one text."""
    return last_lines(read_tail(log))
