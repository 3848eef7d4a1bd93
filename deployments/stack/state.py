"""What is known of the stack of a MUSTER_HOME, in `stack/stack.json`, and who its processes are."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.stack.env import AUTH, LOOPBACK, RAY_MODE, STACK_VARIABLE
from tasks.processes import tree
from tasks.processes.ending import can_be_of_own_run
from tasks.processes.identity import ProcessId
from tasks.record.disk import write_json
from tasks.record.places import is_at, muster_home, read_own_file, server_password
from tasks.spec.errors import MusterError
from tasks.spec.ownership import UntrustedPath

RAY_TEMP_PREFIX = "muster-ray-"
#: Where a node's agent says whether the cluster counts the node as alive.
RAYLET_HEALTH = "/api/local_raylet_healthz"

#: A stop is over by then, counted from the end of the runs' grace periods: each part's grace period
#: with what follows it.
STOP_WITHIN_S = 180.0
_POLL_EVERY_S = 0.1


class StackError(MusterError):
    """What was asked of the stack can't be done; its message says why and what to do."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StackNode(_Model):
    """A node of the stack's Ray cluster beside its head."""

    #: That of its component.
    name: str
    #: Logical ones.
    gpus: int
    cpus: int
    #: URL of its dashboard agent.
    agent: str

    @property
    def found(self) -> str:
        return f"{self.gpus} logical GPUs, {self.cpus} CPUs"

    @property
    def health(self) -> str:
        return f"{self.agent}{RAYLET_HEALTH}"


class StackPart(_Model):
    """One part of the stack: a program that is started again when it dies."""

    name: str
    #: See `services.ServiceState`.
    state: str
    #: None: no process of it runs.
    pid: int | None = None
    #: Of its process, and of what its earlier processes have left running.
    guardians: tuple[ProcessId, ...] = ()
    #: How often it has died.
    deaths: int = 0
    #: When it died last, UTC epoch seconds; None: never.
    died_at: float | None = None
    #: Why it died last.
    reason: str = ""


class Stack(_Model):
    """The stack as its supervisor, the one writer of the file, last described it."""

    stack_id: str
    #: stopped and failed are the supervisor's last words.
    state: Literal["starting", "up", "stopping", "stopped", "failed"]
    #: Why it failed, or was stopped.
    message: str = ""
    #: UTC epoch seconds.
    started_at: float
    supervisor: ProcessId
    #: In the order in which something last happened to each.
    parts: tuple[StackPart, ...] = ()
    #: Of the Prefect server.
    port: int
    api_url: str
    ui_url: str
    #: The password of its server is that of its MUSTER_HOME.
    has_own_password: bool = False
    ray_dashboard: str
    #: Variables of whoever asks its cluster; the token itself is in a file, or not known here.
    ray_auth: Mapping[str, str] = {}
    #: HOST:PORT for `ray.init`.
    ray_address: str
    #: Around the directory of Ray's sockets and logs, which Ray opens to everybody; gone with the
    #: stack.
    ray_temp: Path
    #: As it was asked for, `2x8`; empty where the head is alone.
    fleet: str = ""
    nodes: tuple[StackNode, ...] = ()
    worker: str
    #: Where the worker says whether it polls.
    worker_health: str

    @property
    def is_running(self) -> bool:
        return self.supervisor.is_alive()

    @property
    def guardians(self) -> tuple[ProcessId, ...]:
        """While one of them is there, so may be what it guards."""
        return tuple(guardian for part in self.parts for guardian in part.guardians)

    def part(self, name: str) -> StackPart | None:
        """The part of that name; None before its first start."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def ray_health(self) -> str:
        """Of the dashboard and the control store; it asks for no token."""
        return f"{self.ray_dashboard}/api/gcs_healthz"

    def is_reached_at(self, api_url: str) -> bool:
        """Whether that is the address of its Prefect server."""
        try:
            found = urlsplit(api_url)
            return found.hostname in LOOPBACK and found.port == self.port
        except ValueError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlace:
    """The files of a stack."""

    #: `$MUSTER_HOME/stack`, absolute.
    directory: Path

    @staticmethod
    def of_home() -> StackPlace:
        return StackPlace(directory=muster_home() / "stack")

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def server_home(self) -> Path:
        """The Prefect server's database and settings, which outlive the stack."""
        return self.directory.parent / "prefect"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def load(self) -> Stack | None:
        """The stack as last described; None where there is none. Raises: StackError."""
        try:
            return Stack.model_validate_json(read_own_file(self._state))
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise StackError(f"{self._state} can't be read: {error.strerror}") from None
        except (OSError, ValidationError) as error:
            raise StackError(
                f"{self._state} can't be read ({str(error).splitlines()[0]}): if no process of "
                f"the stack is left (`pgrep -af deployments.stack`), delete it"
            ) from None

    def save(self, stack: Stack) -> None:
        write_json(self._state, stack.model_dump(mode="json"))

    def begin_logs(self) -> None:
        """An empty directory for logs; those of the stack before are kept beside it."""
        before = self.directory / "logs-before"
        if self.logs.exists():
            shutil.rmtree(before, ignore_errors=True)
            self.logs.rename(before)
        self.logs.mkdir(parents=True)

    def clear(self) -> None:
        """End what is left of a stack without a supervisor (see `no_supervisor`), and forget it.

        Its guardians end what they guard by themselves, so mostly this only waits for them.

        Raises: StackError, where something can't be ended.
        """
        stack = self.load()
        if stack is None:
            return
        deadline = time.monotonic() + STOP_WITHIN_S
        for guardian in stack.guardians:
            if not guardian.is_gone_within(max(0.0, deadline - time.monotonic())):
                guardian.send(signal.SIGKILL)
        left = _end_all_of(stack.stack_id)
        if left:
            raise StackError(f"these processes of the stack outlived SIGKILL: {left}")
        if stack.ray_temp.name.startswith(RAY_TEMP_PREFIX):
            shutil.rmtree(stack.ray_temp, ignore_errors=True)
        self._state.unlink()

    def locked(self, on_wait: Callable[[], None], limit_s: float) -> AbstractContextManager[int]:
        """Alone among the commands that start and stop this stack.

        Args:
            on_wait: told once, when another has to be waited for.

        Raises: StackError, when the other does not end.
        """
        return self._flock("lock", on_wait, limit_s)

    def no_supervisor(self, limit_s: float = STOP_WITHIN_S) -> AbstractContextManager[int]:
        """While it is open no supervisor of this stack is alive, but one that inherits the lock.

        Returns: the file descriptor of the lock, which the next supervisor holds for its life.

        Raises: StackError, when the one that is there does not end.
        """
        return self._flock("supervisor.lock", lambda: None, limit_s)

    @contextmanager
    def _flock(self, name: str, on_wait: Callable[[], None], limit_s: float) -> Iterator[int]:
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + limit_s
        waiting = False
        path = self.directory / name
        while True:
            with path.open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_ours = is_at(lock.fileno(), path)
                except BlockingIOError:
                    is_ours = False
                    if not waiting:
                        on_wait()
                    waiting = True
                if is_ours:
                    yield lock.fileno()
                    return
            if time.monotonic() > deadline:
                held = f"{path} is held"
                raise StackError(f"{held}: another process has not ended in {limit_s:.0f} s")
            time.sleep(_POLL_EVERY_S)

    @property
    def _state(self) -> Path:
        return self.directory / "stack.json"


def to_reach_stack(api_url: str | None) -> dict[str, str]:
    """What the environment of a program lacks to talk to the stack that runs in this MUSTER_HOME:
    the address of its Prefect server, its password, and the token of its Ray cluster.

    The password is for the stack's own server alone: whoever else listens there is not given it.

    Args:
        api_url: of the server that is set; None: none is.
    """
    # Read by nearly every program, where mostly there is no stack.
    with suppress(StackError, OSError, UntrustedPath):
        stack = StackPlace.of_home().load()
        if (
            stack is not None
            and stack.is_running
            and (api_url is None or stack.is_reached_at(api_url))
        ):
            address = {} if api_url is not None else {"PREFECT_API_URL": stack.api_url}
            is_known = AUTH in os.environ or not stack.has_own_password
            ray = {} if RAY_MODE in os.environ else stack.ray_auth
            return {
                **address,
                **({} if is_known else {AUTH: server_password()}),
                **{key: value for key, value in ray.items() if key not in os.environ},
            }
    return {}


def processes_of(stack_id: str) -> list[int]:
    """Return the pids of the living processes that the stack has started.

    The environment of such a process contains the id of the stack, and it belongs to this user.
    """
    return [pid for pid in tree.all_pids() if _is_of(pid, stack_id)]


def _end_all_of(stack_id: str) -> list[int]:
    """SIGKILL what a stack has left; the pids that are still there after that."""
    deadline = time.monotonic() + 10.0
    while (pids := processes_of(stack_id)) and time.monotonic() < deadline:
        for pid in pids:
            tree.signal_if(pid, signal.SIGKILL, partial(_is_of, pid, stack_id))
        time.sleep(_POLL_EVERY_S)
    return pids


def _is_of(pid: int, stack_id: str) -> bool:
    with suppress(PermissionError):
        is_named = tree.environment_of(pid).get(STACK_VARIABLE) == stack_id
        return is_named and can_be_of_own_run(pid) and not tree.is_zombie(pid)
    return False
