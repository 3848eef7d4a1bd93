"""Check on one node whether Ray ends the processes of a killed actor.

The functions of this module are sent to the node by value. They may therefore use only the standard
library, ray and `tasks.processes.tree`.

Source: the example of docs.ray.io, "Lifetimes of a user-spawned process": an actor spawns `sleep`,
gets SIGKILL, and the `sleep` process must end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tasks.processes.tree import (
    all_pids,
    belongs_to_own_user,
    is_zombie,
    read_environment,
    signal_if,
)

#: Duration of the spawned `sleep` processes, in seconds. No check takes so long.
_SLEEP_S = 10_000
#: Environment variable of every spawned process. Its value identifies the processes that one actor
#: has spawned, even after the actor has ended.
_MARK = "MUSTER_CHECK_ID"
#: Longest time, in seconds, from the start of a command until its `sleep` process runs.
_STARTED_WITHIN_S = 60.0
#: Python program that starts `sleep` as its child process.
_GRANDCHILD = f"import subprocess; subprocess.run(['sleep', '{_SLEEP_S}'])"
#: Python program that starts `sleep` as a daemon, in a new session and as a child of init.
_DAEMON = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{_SLEEP_S}"])
    os._exit(0)
os.wait()
"""
#: Commands that an actor may spawn. Each key is the name of a kind ("shape") of child process, for
#: example a daemon.
SHAPES: Mapping[str, tuple[str, ...]] = {
    "bash -c 'sleep 10000'": ("bash", "-c", f"sleep {_SLEEP_S}"),
    "child and grandchild": (sys.executable, "-c", _GRANDCHILD),
    "setsid": ("setsid", "sleep", str(_SLEEP_S)),
    "double-fork daemon": (sys.executable, "-c", _DAEMON),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeEnding:
    """Result for one node: whether one kind of child process ended after its actor was killed."""

    #: Kind of the child process, a key of `SHAPES`.
    shape: str
    #: Seconds from the kill of the actor until its last child process ended. None if a child
    #: process kept running.
    gone_after_s: float | None
    #: Pids of the processes that kept running until `try_shape` killed them.
    leaked: tuple[int, ...] = ()


class _Spawner:
    """Ray actor that spawns child processes. After that, `_kill_and_watch` kills the actor."""

    def spawn(self, argv: tuple[str, ...], mark: str) -> int:
        """Start a command that runs `sleep`, and wait until the `sleep` process runs.

        Args:
            argv: The command.
            mark: Value of the environment variable that identifies the spawned processes.

        Returns:
            Pid of this Ray actor's own process. `_kill_and_watch` kills the actor by this pid.

        Raises:
            TimeoutError: No `sleep` process was started in time.
        """
        subprocess.Popen(argv, env={**os.environ, _MARK: mark}, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _STARTED_WITHIN_S
        while not any(_is_sleep(pid) for pid in _find_marked(mark)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no `sleep` process was running {_STARTED_WITHIN_S:g} s after the start of "
                    f"the command {argv}"
                )
            time.sleep(0.02)
        return os.getpid()

    def exit_code_seen(self) -> int:
        """Return the exit code that this actor sees for a child that runs `exit 7`."""
        return subprocess.run("exit 7", shell=True).returncode


def try_shape(node_id: str, shape: str, within_s: float) -> ShapeEnding:
    """Spawn a child process in an actor, SIGKILL the actor, and wait for the child's end.

    Leaked processes are ended before the function returns.

    Args:
        node_id: Id of the Ray node.
        shape: Kind of the child process, a key of `SHAPES`.
        within_s: Seconds from the SIGKILL until a living process counts as leaked.
    """
    mark = os.urandom(8).hex()
    pid = 0
    actor = _start_spawner(node_id)
    try:
        pid = ray.get(actor.spawn.remote(SHAPES[shape], mark), timeout=2 * _STARTED_WITHIN_S)
    finally:
        # Call `_kill_and_watch` even after an error of `spawn`, which may already have started
        # processes. The function ends all processes whose environment contains `mark`.
        watch = ray.remote(**_node_options(node_id))(_kill_and_watch).remote(pid, mark, within_s)
        gone_after_s, leaked = ray.get(watch, timeout=within_s + _STARTED_WITHIN_S)
        ray.kill(actor)
    return ShapeEnding(shape=shape, gone_after_s=gone_after_s, leaked=tuple(leaked))


def exit_code_in_worker(node_id: str) -> int:
    """Return the exit code that a Ray worker of the node sees for a child that runs `exit 7`."""
    actor = _start_spawner(node_id)
    try:
        return int(ray.get(actor.exit_code_seen.remote(), timeout=_STARTED_WITHIN_S))
    finally:
        ray.kill(actor)


def _start_spawner(node_id: str) -> Any:
    """Start a `_Spawner` actor on a Ray node, and return the handle of the actor."""
    return ray.remote(**_node_options(node_id))(_Spawner).remote()


def _node_options(node_id: str) -> dict[str, Any]:
    """Return the options of a Ray task or actor that must run on a node and reserves no CPU."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def _kill_and_watch(actor_pid: int, mark: str, within_s: float) -> tuple[float | None, list[int]]:
    """Kill an actor, wait for its child processes to end, and kill the remaining child processes.

    Args:
        actor_pid: Process id of the actor, or 0 to kill no actor.
        mark: Value of the environment variable that identifies the spawned processes.
        within_s: Longest time to wait for the processes, in seconds.

    Returns:
        The seconds until the last child process ended, or None if a child process kept running; and
        the pids of the child processes that kept running.
    """
    if actor_pid:
        os.kill(actor_pid, signal.SIGKILL)
    killed_at_s = time.monotonic()
    while (leaked := _find_marked(mark)) and time.monotonic() - killed_at_s <= within_s:
        time.sleep(0.01)
    gone_after_s = time.monotonic() - killed_at_s
    for pid in leaked:
        signal_if(pid, signal.SIGKILL, partial(_is_marked, pid, mark))
    return (None, leaked) if leaked else (gone_after_s, [])


def _is_marked(pid: int, mark: str) -> bool:
    """Return True if `pid` is a living process of this user with `mark` in its environment."""
    with suppress(PermissionError):
        is_marked = read_environment(pid).get(_MARK) == mark
        return is_marked and belongs_to_own_user(pid) and not is_zombie(pid)
    return False


def _find_marked(mark: str) -> list[int]:
    """Return the pids of all living processes with the value `mark` in their environment."""
    return [pid for pid in all_pids() if _is_marked(pid, mark)]


def _is_sleep(pid: int) -> bool:
    """Return True if the process runs the program `sleep`."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
    return False
