"""Starting and stopping the process behind a stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from deployments.stack.answers import until_answering
from deployments.stack.env import ROOT
from deployments.stack.nodes import Fleet
from deployments.stack.state import STOP_WITHIN_S, Stack, StackError, StackPlace
from tasks.processes.registry import teardown_s
from tasks.record.causes import last_lines, read_tail


def launch(
    place: StackPlace,
    port: int,
    ray_dashboard: int | None,
    fleet: Fleet | None,
    lock_fd: int,
    say: Callable[[str], None],
) -> Stack:
    """Start a supervisor and wait until all answers.

    Args:
        port: of the Prefect server.
        ray_dashboard: its port; 0: any free one, None: 8265 where that is free.
        fleet: nodes with GPUs; None: Ray's head is alone.
        lock_fd: that of `StackPlace.no_supervisor`, which it inherits.
        say: told how it goes on, in words.

    Raises: StackError, with nothing left. An interrupt leaves nothing either.
    """
    read_fd, write_fd = os.pipe()
    dashboard = () if ray_dashboard is None else ("--ray-dashboard", str(ray_dashboard))
    gpus = () if fleet is None else ("--gpus", str(fleet))
    with (place.log("supervisor")).open("ab") as log:
        supervisor = subprocess.Popen(
            (
                *(sys.executable, "-m", "deployments.stack.supervisor"),
                *("--port", str(port), "--report-fd", str(write_fd), "--lock-fd", str(lock_fd)),
                *(*dashboard, *gpus),
            ),
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
            _follow(place, report, say)
        stack = place.load()
        assert stack is not None
        until_answering(stack)
    except BaseException:
        supervisor.terminate()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(STOP_WITHIN_S)
        supervisor.kill()  # for one that did not end; its guardians end the rest
        supervisor.wait()
        place.clear()
        say("The stack was not started; nothing of it is left.")
        raise
    return stack


def _follow(place: StackPlace, report: Iterable[str], say: Callable[[str], None]) -> None:
    """Show how the start goes on, until the stack is up; raises StackError."""
    for line in report:
        event = json.loads(line)
        match event["event"]:
            case "component.spawned":
                say(f"  {event['component']}: starting (pid {event['pid']})")
            case "component.ready":
                say(f"  {event['component']}: ready after {event['after_s']:.1f} s")
            case "part.died":
                say(f"  {event['message']}: it is started again")
            case "stack.up":
                return
            case "stack.failed":
                tail = f"\nLast lines of {event['log']}:\n{event['log_tail']}"
                raise StackError(f"{event['message']}{tail if event['log_tail'] else ''}")
    log = place.log("supervisor")
    raise StackError(f"its supervisor has ended; last lines of {log}:\n{tail_of(log)}")


def stop(stack: Stack) -> None:
    """Have the supervisor stop its stack, and wait for its end."""
    # Asked first: a component that has ended is registered no more.
    within_s = teardown_s() + STOP_WITHIN_S
    stack.supervisor.send(signal.SIGTERM)
    if not stack.supervisor.is_gone_within(within_s):
        # Its guardians see that, and end what they guard.
        stack.supervisor.send(signal.SIGKILL)
        stack.supervisor.is_gone_within(STOP_WITHIN_S)


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    return last_lines(read_tail(log))
