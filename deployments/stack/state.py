"""The stack of a MUSTER_HOME: its file `stack/stack.json`, its locks, and its processes."""

from __future__ import annotations

import errno
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
from deployments.stack.ray_directory import delete_ray_directory
from tasks.processes import tree
from tasks.processes.ending import can_be_of_own_run
from tasks.processes.full_disks import describe_file_system
from tasks.processes.identity import ProcessId
from tasks.record.disk import write_json
from tasks.record.places import is_at, muster_home, read_own_file, server_password
from tasks.spec.errors import MusterError
from tasks.spec.ownership import UntrustedPath

#: Name of the `muster up` stack's Ray head.
RAY = "ray-head"
#: URL path of the health check on the dashboard agent of a Ray node. The response is a success if
#: the Ray cluster counts the node as alive.
RAYLET_HEALTH = "/api/local_raylet_healthz"

#: Time limit, in seconds, for stopping all parts of the `muster up` stack, and for the cleanup. If
#: runs are active, the time limit for stopping these runs is added.
STOP_WITHIN_S = 180.0
#: Longest time, in seconds, that a command waits for a stack that `muster up` is starting. A usual
#: start takes less than a minute.
_START_WITHIN_S = 600.0
#: Time, in seconds, between two checks in a loop that waits.
_POLL_EVERY_S = 0.1
#: Errors of flock(2) on a file system without locks, for example some network file systems.
_ERRORS_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class StackError(MusterError):
    """A command for the `muster up` stack failed. The message gives the reason and a remedy."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StackNode(_Model):
    """A Ray node of the `muster up` stack. The Ray head is not included."""

    #: Name of the Ray node, which is also the name of its part of the `muster up` stack.
    name: str
    #: Number of logical GPUs of the Ray node.
    gpus: int
    #: Number of logical CPUs of the Ray node.
    cpus: int
    #: URL of the dashboard agent of the Ray node.
    agent: str

    @property
    def description(self) -> str:
        """The GPUs and CPUs of the Ray node, as `muster status` shows them."""
        return f"{self.gpus} logical GPUs, {self.cpus} CPUs"

    @property
    def health(self) -> str:
        """URL that responds with success if the Ray cluster counts the node as alive."""
        return f"{self.agent}{RAYLET_HEALTH}"


class StackPart(_Model):
    """One part of the `muster up` stack: a program that the supervisor restarts after a crash."""

    #: Name of the program, for example `prefect-server`.
    name: str
    #: State of the program: the value of a `tasks.processes.services.ServiceState`.
    state: str
    #: Process id of the program, or None if the program does not run.
    pid: int | None = None
    #: Guardian processes of the program. A guardian process owns one process of the program and all
    #: descendants of that process. After a restart, the program has several guardian processes if
    #: descendants of an earlier process still run.
    guardians: tuple[ProcessId, ...] = ()
    #: Number of times that the program has died.
    deaths: int = 0
    #: Time of the last death in UTC epoch seconds, or None if the program never died.
    died_at: float | None = None
    #: Reason for the last death, or an empty string if the program never died.
    reason: str = ""


class Stack(_Model):
    """Content of `stack.json`, which only the `muster up` stack's supervisor process writes."""

    #: Random id of this start of the `muster up` stack.
    stack_id: str
    #: State of the `muster up` stack. `stopped` and `failed` are final states.
    state: Literal["starting", "up", "stopping", "stopped", "failed"]
    #: Reason for the stop or the failure of the `muster up` stack, or an empty string.
    message: str = ""
    #: Start time of the `muster up` stack in UTC epoch seconds.
    started_at: float
    #: The process that starts, watches and stops the parts of the `muster up` stack.
    supervisor: ProcessId
    #: Parts of the `muster up` stack that were started. The last entry is the part with the latest
    #: change of its state.
    parts: tuple[StackPart, ...] = ()
    #: Port of the Prefect server.
    port: int
    #: URL of the API of the Prefect server.
    api_url: str
    #: URL of the UI of the Prefect server.
    ui_url: str
    #: True if the Prefect server uses the password file of this MUSTER_HOME. False if the user set
    #: another password in an environment variable.
    has_own_password: bool = False
    #: URL of the Ray dashboard.
    ray_dashboard: str
    #: Environment variables with which a client of the Ray cluster finds the access token of the
    #: cluster. No variable contains the token itself.
    ray_auth: Mapping[str, str] = {}
    #: Address of the Ray cluster for `ray.init`, in the form HOST:PORT.
    ray_address: str
    #: Directory with Ray's sockets and logs, see `deployments.stack.ray_directory`. The directory
    #: is deleted when the `muster up` stack stops.
    ray_temp: Path
    #: Value of the option `--gpus`, for example `2x8`, or an empty string if it was not set.
    fleet: str = ""
    #: Ray nodes with logical GPUs, without the Ray head.
    nodes: tuple[StackNode, ...] = ()
    #: Name of the Prefect worker of the `muster up` stack.
    worker: str
    #: URL of the worker's health check, which succeeds if the worker polls the Prefect server.
    worker_health: str

    @property
    def is_running(self) -> bool:
        """True if the `muster up` stack's supervisor process is alive."""
        return self.supervisor.is_alive()

    @property
    def guardians(self) -> tuple[ProcessId, ...]:
        """Guardian processes of all programs of the `muster up` stack.

        As long as the guardian process of a program lives, the program may still run.
        """
        return tuple(guardian for part in self.parts for guardian in part.guardians)

    def part(self, name: str) -> StackPart | None:
        """Return the named part of the `muster up` stack, or None if it was never started."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def ray_health(self) -> str:
        """URL of the health check of Ray's dashboard and control store.

        A request to this URL needs no access token.
        """
        return f"{self.ray_dashboard}/api/gcs_healthz"

    def is_reached_at(self, api_url: str) -> bool:
        """Return True if the URL leads to the Prefect server of this `muster up` stack."""
        return _is_on_loopback(api_url, self.port)


class StackStart(_Model):
    """Content of `starting.json`: a `muster up` command that is starting the stack."""

    #: Process of the `muster up` command.
    process: ProcessId
    #: Port of the Prefect server that the `muster up` command starts.
    port: int

    def is_start_of(self, api_url: str) -> bool:
        """Return True if the URL leads to the Prefect server that `muster up` is starting."""
        return _is_on_loopback(api_url, self.port)


def _is_on_loopback(api_url: str, port: int) -> bool:
    """Return True if a URL leads to `port` on the loopback interface of this machine."""
    try:
        url = urlsplit(api_url)
        return url.hostname in LOOPBACK and url.port == port
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlace:
    """The directory `$MUSTER_HOME/stack`, with the state file, locks and logs of a stack."""

    #: Absolute path of the directory `$MUSTER_HOME/stack`.
    directory: Path

    @staticmethod
    def of_home() -> StackPlace:
        """Return the directory `stack` in the MUSTER_HOME of this process."""
        return StackPlace(directory=muster_home() / "stack")

    @property
    def logs(self) -> Path:
        """Directory of the log files of the current stack."""
        return self.directory / "logs"

    @property
    def server_home(self) -> Path:
        """Directory of the Prefect server's database and settings, which are kept after a stop."""
        return self.directory.parent / "prefect"

    def log(self, name: str) -> Path:
        """Return the log file of the named program of the `muster up` stack."""
        return self.logs / f"{name}.log"

    def load(self) -> Stack | None:
        """Return the content of `stack.json`, or None if the file does not exist.

        Raises:
            StackError: The file cannot be read, or its content is not valid.
        """
        try:
            return Stack.model_validate_json(read_own_file(self._state_file))
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise StackError(f"{self._state_file} can't be read: {error.strerror}") from None
        except (OSError, ValidationError) as error:
            raise StackError(
                f"{self._state_file} can't be read ({str(error).splitlines()[0]}). If `pgrep -af "
                "deployments.stack` shows no process of the stack, delete this file"
            ) from None

    def save(self, stack: Stack) -> None:
        """Write `stack.json`."""
        write_json(self._state_file, stack.model_dump(mode="json"))

    @contextmanager
    def announce_start(self, port: int) -> Iterator[None]:
        """During the `with` block, let other commands see that this process is starting the stack.

        Args:
            port: Port of the Prefect server that this process starts.
        """
        start = StackStart(process=ProcessId.of(os.getpid()), port=port)
        write_json(self._start_file, start.model_dump(mode="json"))
        try:
            yield
        finally:
            self._start_file.unlink(missing_ok=True)

    def load_start(self) -> StackStart | None:
        """Return the `muster up` command that is starting the stack now, or None."""
        try:
            start = StackStart.model_validate_json(read_own_file(self._start_file))
        except (OSError, ValidationError):
            return None
        # Check that the process of `muster up` is alive, because a killed `muster up` leaves the
        # file `starting.json` behind.
        return start if start.process.is_alive() else None

    def begin_logs(self) -> None:
        """Create an empty log directory. The previous logs are kept in `logs-before`."""
        previous_logs = self.directory / "logs-before"
        if self.logs.exists():
            shutil.rmtree(previous_logs, ignore_errors=True)
            self.logs.rename(previous_logs)
        self.logs.mkdir(parents=True)

    def clear(self) -> None:
        """End the leftover processes of a stack, and delete its `stack.json` and Ray's files.

        Call this only while no supervisor process of the `muster up` stack runs; see
        `no_supervisor`. Usually, the method only waits until the guardian processes have ended all
        parts of the stack.

        Raises:
            StackError: Some processes of the stack survived SIGKILL.
        """
        stack = self.load()
        if stack is None:
            return
        deadline = time.monotonic() + STOP_WITHIN_S
        for guardian in stack.guardians:
            if not guardian.is_gone_within(max(0.0, deadline - time.monotonic())):
                guardian.send(signal.SIGKILL)
        surviving_pids = _kill_processes_of(stack.stack_id)
        if surviving_pids:
            raise StackError(
                f"these processes of the stack are still running after SIGKILL: {surviving_pids}"
            )
        delete_ray_directory(stack.ray_temp, self.directory.parent)
        self._state_file.unlink()

    def locked(self, on_wait: Callable[[], None], limit_s: float) -> AbstractContextManager[int]:
        """Hold the lock that lets only one `muster up` or `muster down` run at a time.

        Args:
            on_wait: Called once if another process holds the lock.
            limit_s: Longest time to wait for the lock, in seconds.

        Returns:
            A context manager that yields the file descriptor of the lock.

        Raises:
            StackError: Another process held the lock for longer than the limit.
        """
        return self._flock("lock", on_wait, limit_s)

    def no_supervisor(self, limit_s: float = STOP_WITHIN_S) -> AbstractContextManager[int]:
        """Wait until no supervisor process of this stack runs, and prevent a new supervisor.

        Every supervisor process holds an exclusive lock on a file until the process ends. The
        returned context manager takes this lock. While the context is open, only a child process
        that inherits the file descriptor of the lock can become a supervisor.

        Args:
            limit_s: Longest time to wait for the end of the current supervisor, in seconds.

        Returns:
            A context manager that yields the file descriptor of the lock. The next supervisor
            process inherits the descriptor.

        Raises:
            StackError: The current supervisor did not end within the limit.
        """
        return self._flock("supervisor.lock", lambda: None, limit_s)

    @contextmanager
    def _flock(self, name: str, on_wait: Callable[[], None], limit_s: float) -> Iterator[int]:
        """Hold an exclusive lock on the file with the given name in the stack directory.

        Args:
            name: Name of the lock file.
            on_wait: Called once if another process holds the lock.
            limit_s: Longest time to wait for the lock, in seconds.

        Yields:
            The file descriptor of the lock file.

        Raises:
            StackError: Another process held the lock for longer than the limit, or the file system
                has no locks.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + limit_s
        has_called_on_wait = False
        path = self.directory / name
        while True:
            with path.open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Check that the locked file is still the file at `path`. If another process has
                    # replaced the file, the lock on the old file has no effect, because other
                    # processes lock the new file. In this case, try again with the new file.
                    is_locked = is_at(lock.fileno(), path)
                except BlockingIOError:
                    is_locked = False
                    if not has_called_on_wait:
                        on_wait()
                    has_called_on_wait = True
                except OSError as error:
                    if error.errno not in _ERRORS_WITHOUT_LOCKS:
                        raise
                    file_system = describe_file_system(self.directory)
                    raise StackError(
                        f"{path} cannot be locked ({error.strerror}), because {file_system} has no "
                        "locks. Set MUSTER_HOME to a directory on a local disk"
                    ) from error
                if is_locked:
                    yield lock.fileno()
                    return
            if time.monotonic() > deadline:
                raise StackError(
                    f"another `muster up` or `muster down` has locked {path}, and has not ended "
                    f"within {limit_s:.0f} s"
                )
            time.sleep(_POLL_EVERY_S)

    @property
    def _state_file(self) -> Path:
        return self.directory / "stack.json"

    @property
    def _start_file(self) -> Path:
        return self.directory / "starting.json"


def wait_while_starting(
    api_url: str | None, say: Callable[[str], None], limit_s: float = _START_WITHIN_S
) -> None:
    """Wait while a `muster up` command starts the stack, and return when the stack is up.

    The function returns at once if no command is starting the stack, or if this program does not
    use the stack's Prefect server. The function also returns after a failed start, or at the time
    limit.

    Args:
        api_url: Address of the Prefect server that this program uses. None if no address is set.
        say: Shows the user a line of text.
        limit_s: Longest time to wait, in seconds.
    """
    place = StackPlace.of_home()
    start = place.load_start()
    if start is None or (api_url is not None and not start.is_start_of(api_url)):
        return
    say(
        f"`muster up` (pid {start.process.pid}) is starting the Muster stack of this machine. This "
        f"command waits for the stack for at most {limit_s:g} s."
    )
    deadline = time.monotonic() + limit_s
    while place.load_start() is not None:
        if time.monotonic() > deadline:
            say(f"The stack is not up after {limit_s:g} s. To see its parts: muster status")
            return
        time.sleep(_POLL_EVERY_S)


def to_reach_stack(api_url: str | None) -> dict[str, str]:
    """Return the environment variables that this process lacks for access to the `muster up` stack.

    The variables contain the address and the password of the stack's Prefect server, and the path
    of the file with the access token of the stack's Ray cluster.

    Args:
        api_url: Address of the Prefect server that this program already uses, or None. For the
            address of another server, no variables are returned, so that the other server does not
            get the password.

    Returns:
        Names and values of the missing variables. The dictionary is empty if no stack runs.
    """
    # Ignore a missing or unreadable stack.json, because nearly every program calls this function,
    # usually without a stack.
    with suppress(StackError, OSError, UntrustedPath):
        stack = StackPlace.of_home().load()
        if (
            stack is not None
            and stack.is_running
            and (api_url is None or stack.is_reached_at(api_url))
        ):
            variables: dict[str, str] = {}
            if api_url is None:
                variables["PREFECT_API_URL"] = stack.api_url
            if AUTH not in os.environ and stack.has_own_password:
                variables[AUTH] = server_password()
            if RAY_MODE not in os.environ:
                variables |= {
                    key: value for key, value in stack.ray_auth.items() if key not in os.environ
                }
            return variables
    return {}


def processes_of(stack_id: str) -> list[int]:
    """Return the pids of the living processes that the `muster up` stack has started.

    These processes belong to this user, and their environment contains the id of the stack.
    """
    return [pid for pid in tree.all_pids() if _belongs_to_stack(pid, stack_id)]


def signal_process_of(stack_id: str, pid: int, signum: int) -> bool:
    """Send a signal to a process that the `muster up` stack has started.

    Returns:
        True if the signal was sent, False if no process of the stack has this pid.
    """
    return tree.signal_if(pid, signum, partial(_belongs_to_stack, pid, stack_id))


def _kill_processes_of(stack_id: str) -> list[int]:
    """Send SIGKILL to all processes of a stack until they are gone, for at most 10 seconds.

    Returns:
        The pids of the processes that survived.
    """
    deadline = time.monotonic() + 10.0
    while (pids := processes_of(stack_id)) and time.monotonic() < deadline:
        for pid in pids:
            signal_process_of(stack_id, pid, signal.SIGKILL)
        time.sleep(_POLL_EVERY_S)
    return pids


def _belongs_to_stack(pid: int, stack_id: str) -> bool:
    """Return True if `pid` is a living process of this user with `stack_id` in its environment."""
    with suppress(PermissionError):
        has_stack_id = tree.read_environment(pid).get(STACK_VARIABLE) == stack_id
        return has_stack_id and can_be_of_own_run(pid) and not tree.is_zombie(pid)
    return False
