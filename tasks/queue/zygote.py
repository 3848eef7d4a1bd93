"""A process that has everything imported, and from which the worker forks the processes of runs.

    worker --- an order ---> zygote == fork ==> middle == fork ==> run
       ^----------------- "pid" / "go" ---------------------------/

A byte with three files makes the zygote fork. What to run, the run's process reads from the worker,
to whom it says its pid, and it begins only when the worker says so: whoever of the three is killed
in between, there is one process of the run or none. The one in the middle ends at once, so that the
kernel makes the run a child of the worker; a zygote that is killed takes nothing along.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

import prefect.context
from prefect.client.schemas.responses import DeploymentResponse
from prefect.logging.configuration import setup_logging
from prefect.settings import get_current_settings
from prefect.utilities.processutils import run_process

import tasks
from tasks.processes import tree
from tasks.queue.warm import Caller, listening

_log = logging.getLogger(__name__)

#: A command of the process of a flow run; see flows/__main__.py.
ENGINE = (sys.executable, "-P", "-m", "flows")
TEMPLATE = "--template"
#: What the environment of a run may have beyond that of the zygote, in bytes.
_ROOM = 1 << 15
_ROOM_VARIABLE = "MUSTER_ROOM"
#: Read by the interpreter, the loader or the C library as a program begins.
_AT_START = ("PYTHON", "LD_", "LANG", "LC_", "MALLOC_", "GLIBC_", "OPENSSL_")
#: Of a machine that is very busy; then the run starts without it.
_FORKS_WITHIN_S = 10.0
#: Of these, what changes nothing that a run would miss.
_NO_MATTER = ("PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
#: What runs import as they go.
_LATE = (
    "encodings.idna",
    "flows.pipeline",
    "graphviz",
    "prefect._internal.observers",
    "prefect.concurrency._sync",
    "prefect.task_engine",
    "prefect.utilities.visualization",
    "pynvml",
    "rich._emoji_codes",
    "tasks.queue.admission",
)
_ROOT = Path(tasks.__file__).parents[1]
_PACKAGES = ("deployments", "flows", "tasks")
_PROJECT_SETTINGS = (".env", "prefect.toml", "pyproject.toml")
#: Where packages are; Ray adds to it as it is imported, which the worker does and the zygote not.
_PACKAGES_IN = (*sys.path,)


# The zygote and what becomes of it.


def serve(control: int, made_of: str) -> Caller | None:
    """Be the zygote, until the worker is gone.

    Args:
        made_of: what the worker has found that it imports, see `fingerprint`.

    Returns: in the process of a run, whose environment, working directory, files and command line
        are those of the order: the command that it does the work of; None for a flow run, of which
        the command line says which.
    """
    # Where it is stopped it could not see that the worker is gone. No run has that of it.
    tree.die_with_parent(os.getppid())
    worker, areas, zygote = socket.socket(fileno=control), _Areas(), os.getpid()
    # A command line of the engine's would be taken for a flow run's.
    areas.show(["muster: imports what runs need"])
    for name in _LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        # What another thread holds is locked for ever in a forked process.
        raise SystemExit("something that is imported starts threads")
    logged = _logged_by()
    gc.collect()
    gc.freeze()
    areas.show(["muster: ready to start runs"])
    worker.send(b"%d" % areas.room)
    doors = [worker, *filter(None, [listening()])]
    while True:
        door = select.select(doors, [], [])[0][0]
        if door is worker:
            message, files, *_ = socket.recv_fds(worker, 1, 3)
            if not message:
                raise SystemExit
        else:
            files = [door.accept()[0].detach()]
        if middle := os.fork():
            for file in files:
                os.close(file)
            os.waitpid(middle, 0)
            continue
        try:
            for one in doors:
                one.close()
            _leave_parent()
            channel, *output = files
            if output:
                caller = None
                _become_flow_run(areas, channel, *output)
            else:
                caller = _become_callers(areas, channel, zygote, made_of)
            prefect.context.refresh_global_settings_context()
            if _logged_by() != logged:
                for name in get_current_settings().logging.extra_loggers or ():
                    logging.getLogger(name).handlers.clear()
                setup_logging(incremental=False)
            return caller
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)


def _leave_parent() -> None:
    """Go on in a child whose parent is gone, and not a child of the zygote any more."""
    middle = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    select.select([middle], [], [])
    os.close(middle)
    os.setsid()


def _become_flow_run(areas: _Areas, channel: int, *output: int) -> None:
    with open(os.devnull, "rb") as nothing:
        _take_files(nothing.fileno(), *output)
    for file in output:
        os.close(file)
    with socket.socket(fileno=channel) as worker:
        order = json.loads(worker.makefile("rb").readline())
        _take_over(areas, order)
        sys.argv[1:] = order["argv"][len(ENGINE) :]
        worker.send(b"%d" % os.getpid())
        if not worker.recv(1):
            os._exit(1)


def _become_callers(areas: _Areas, channel: int, zygote: int, made_of: str) -> Caller:
    """Leaves where that can't be, or where its command has gone on by itself."""
    try:
        caller = Caller.heard(socket.socket(fileno=channel))
        if fingerprint() != made_of:
            # The worker makes another one.
            os.kill(zygote, signal.SIGKILL)
            os._exit(0)
        fits = may_be_forked(caller.env, os.environ, areas.room)
        if not fits or not caller.is_let_begin():
            os._exit(0)
    except (OSError, ValueError):
        os._exit(0)
    caller.take_signals()
    _take_files(*caller.files)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    _take_over(areas, caller.order)
    return caller


def _take_files(*files: int) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)


def _take_over(areas: _Areas, order: Mapping[str, Any]) -> None:
    # The C library copies each: what it began with lies where the new ones are shown.
    os.environ.clear()
    os.environ.update(order["env"])
    areas.show(order["argv"], order["env"])
    os.chdir(order["cwd"])
    time.tzset()
    tempfile.tempdir = None


def _logged_by() -> tuple[Any, ...]:
    variables = sorted(item for item in os.environ.items() if item[0].startswith("PREFECT_LOGGING"))
    return get_current_settings().logging.model_dump(), variables


class _Areas:
    """Where the kernel reads cmdline and environ of this process."""

    def __init__(self) -> None:
        # Source: proc_pid_stat(5), from the field after the command's name, which may hold spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._arguments, arguments_end, self._environment, end = map(int, fields[45:49])
        self._for_arguments = arguments_end - self._arguments
        self.room = end - self._environment

    def show(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        # None of the old variables may be in use where there are others.
        line, room = _block(argv)[: self._for_arguments - 1], self._for_arguments
        ctypes.memmove(self._arguments, line.ljust(room, b"\0"), room)
        if env is not None:
            variables = _variables(env)[: self.room].ljust(self.room, b"\0")
            ctypes.memmove(self._environment, variables, self.room)


def _block(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _variables(env: Mapping[str, str]) -> bytes:
    return _block(f"{name}={value}" for name, value in env.items())


# The worker's side.


def own_flow(deployment: DeploymentResponse) -> tuple[str | None, Path | None]:
    """Where the flow of a deployment can be imported from as it is, and the directory that its
    pull step would enter; None where the pull steps have to say."""
    entrypoint = deployment.entrypoint or ""
    if ":" not in entrypoint:
        is_own = entrypoint.startswith("flows.") and not deployment.pull_steps
        return (entrypoint if is_own else None), None
    match deployment.pull_steps:
        case [{"prefect.deployments.steps.set_working_directory": {"directory": str(place)}}]:
            file, _, name = entrypoint.rpartition(":")
            found = (Path(place) / file).resolve()
            if found.parent == (_ROOT / "flows").resolve():
                return f"flows.{found.stem}.{name}", Path(place)
    return None, None


class ForkedRun:
    """A flow run's process, a child of this one, as far as Prefect's worker asks about it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    async def end(self, outputs: Mapping[int, TextIO]) -> None:
        """Wait for it, and pass on what it writes meanwhile; cancelled, it is killed."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        for file, sink in outputs.items():
            os.set_blocking(file, False)
            loop.add_reader(file, _pass_on, loop, file, sink)
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            for file in (self._pidfd, *outputs):
                loop.remove_reader(file)
            how = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            assert how is not None
            is_exit = how.si_code == os.CLD_EXITED
            self.returncode = how.si_status if is_exit else -how.si_status
            os.close(self._pidfd)
            # Whoever else still writes is not waited for.
            for file, sink in outputs.items():
                _pass_on(loop, file, sink)


def _pass_on(loop: asyncio.AbstractEventLoop, file: int, sink: TextIO) -> None:
    try:
        written = os.read(file, 1 << 16)
    except BlockingIOError:
        return
    if not written:
        loop.remove_reader(file)
    sink.buffer.write(written)
    sink.flush()


class Zygote:
    """That of a worker, made anew where it is gone or what it has imported has changed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._made_of = ""
        #: What the environment of a run may take; 0: it is not ready.
        self._room = 0
        self._forking = 0

    @property
    def is_ready(self) -> bool:
        return self._room > 0

    def make(self) -> None:
        """Returns: at once; it needs some seconds, for which runs start without it."""
        self.close()
        self._made_of = fingerprint()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            # Its command line is what a run shows its own in.
            self._process = subprocess.Popen(
                [*ENGINE, TEMPLATE, self._made_of, f"{theirs.fileno():80}"],
                env={**_environment(), _ROOM_VARIABLE: "x" * _ROOM},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def close(self) -> None:
        self._room = 0
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _hear(self) -> None:
        assert self._control is not None
        was_ready, said = self.is_ready, b""
        with suppress(OSError):
            said = self._control.recv(64)
        self._room = int(said or 0)
        if not said:
            _log.warning("The process that starts runs has ended: runs start slower.")
            self.close()
            if was_ready:
                self.make()

    async def run_process(
        self,
        command: list[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stream_output: bool,
        task_status: Any,
        task_status_handler: Callable[[Any], Any],
        **more: Any,
    ) -> None:
        """Prefect's `run_process`, but forked where that may be."""
        # Closed last: its reading ends.
        with ExitStack() as stack:
            outputs, files, forked = {}, [], None
            if tuple(command[: len(ENGINE)]) == ENGINE and self._fits(env):
                for sink in (sys.stdout, sys.stderr):
                    if stream_output:
                        end, file = os.pipe()
                        stack.callback(os.close, end)
                        outputs[end] = sink
                    else:
                        file = os.open(os.devnull, os.O_WRONLY)
                    files.append(file)
                order = {"argv": command, "env": dict(env), "cwd": str(cwd)}
                forked = await self._fork(order, files)
            if forked is not None:
                task_status.started(task_status_handler(forked))
                return await forked.end(outputs)
        await run_process(
            command,
            env=env,
            cwd=cwd,
            stream_output=stream_output,
            task_status=task_status,
            task_status_handler=task_status_handler,
            **more,
        )

    def _fits(self, env: Mapping[str, str]) -> bool:
        """Whether a run may be forked now. Makes the zygote where need be."""
        if self._control is None or self._made_of != fingerprint():
            self.make()
        return may_be_forked(env, os.environ, self._room)

    async def _fork(self, order: Mapping[str, Any], files: Sequence[int]) -> ForkedRun | None:
        loop, control, forked = asyncio.get_running_loop(), self._control, None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._adopt(1)
        try:
            with theirs, ours:
                with ExitStack() as sent:
                    for file in files:
                        sent.callback(os.close, file)
                    assert control is not None
                    socket.send_fds(control, [b"f"], [theirs.fileno(), *files])
                    theirs.close()
                async with asyncio.timeout(_FORKS_WITHIN_S):
                    await loop.sock_sendall(ours, json.dumps(order).encode() + b"\n")
                    forked = ForkedRun(int(await loop.sock_recv(ours, 32)))
                    ours.send(b"g")
        except (OSError, ValueError, TimeoutError) as error:
            _log.warning("A run starts slower: %r", error)
            if self._control is control:
                self.make()
        finally:
            self._adopt(-1)
        return forked

    def _adopt(self, more: int) -> None:
        # No longer than that takes: what runs leave is not for this process to reap.
        self._forking += more
        tree.become_subreaper(self._forking > 0)


def _environment() -> dict[str, str]:
    return {**os.environ, **get_current_settings().to_environment_variables(exclude_unset=True)}


def may_be_forked(env: Mapping[str, str], own: Mapping[str, str], room: int) -> bool:
    """Whether a run with the environment `env` may be forked from a process that began with `own`
    and has so much room for it, in bytes."""

    def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
        read = (item for item in env.items() if item[0].startswith(_AT_START))
        return {name: value for name, value in read if name not in _NO_MATTER}

    return len(_variables(env)) <= room and read_at_start(env) == read_at_start(own)


def fingerprint() -> str:
    """Of all that the zygote has read: another one where something of it has changed."""
    settings = get_current_settings()
    read: list[str | Path] = [settings.profiles_path, settings.logging.config_path]
    read += _PROJECT_SETTINGS
    folders = [_ROOT / package for package in _PACKAGES]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".toml")):
                    read.append(entry.path)
                elif "." not in entry.name and not entry.name.startswith("__"):
                    folders.append(Path(entry.path))
    for folder in _PACKAGES_IN:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            read += (entry.path for entry in entries if entry.name.endswith(".dist-info"))
    found: dict[str, tuple[int, int]] = {}
    for path in read:
        with suppress(OSError):
            status = os.stat(path)
            found[str(path)] = (status.st_mtime_ns, status.st_size)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
