"""The zygote: a process that has imported everything, and that forks the processes of runs.

    worker --- request ----> zygote == fork ==> middle == fork ==> run
       ^----------------- "pid" / "go" ---------------------------/

A forked process starts faster, because it need not import Prefect and Muster again. These are the
steps of a start:

1. The worker sends the zygote one byte and three open files: a socket and two output files.
2. The zygote forks a process, which forks the process of the run and ends at once. The worker has
   become a subreaper for this time, so the kernel makes the run a child of the worker.
3. The process of the run reads its command, environment and working directory from the socket.
4. It sends the worker its pid, and begins only after the worker has answered.

If the worker, the zygote or the process of the run is killed between these steps, there is one
process of the run or none. Runs continue after their zygote was killed.
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

#: Start of the command of a flow run's process; the flow run's id follows. See flows/__main__.py.
ENGINE = (sys.executable, "-P", "-m", "flows")
#: Argument of `ENGINE` that starts a zygote instead of a flow run.
TEMPLATE = "--template"
#: Number of bytes that the environment of a run may have in addition to the zygote's environment.
_SPARE_BYTES = 1 << 15
#: Environment variable of the zygote that reserves these bytes.
_SPARE_VARIABLE = "MUSTER_ROOM"
#: Start of the names of environment variables that the Python interpreter, the loader or the C
#: library reads when a program starts. A forked process does not read them again.
_READ_AT_START = ("PYTHON", "LD_", "LANG", "LC_", "MALLOC_", "GLIBC_", "OPENSSL_")
#: Environment variables that are read when a program starts, but whose values make no difference
#: to a run.
_WITHOUT_EFFECT = ("PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
#: Longest time, in seconds, from the request to the pid of the new process. After that time the
#: worker starts the run without the zygote.
_FORKS_WITHIN_S = 10.0
#: Modules that runs import after their start. The zygote imports them in advance.
_LATE_MODULES = (
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
#: Folder that contains Muster's packages.
_ROOT = Path(tasks.__file__).parents[1]
#: Muster's packages.
_PACKAGES = ("deployments", "flows", "tasks")
#: Files of the working directory from which Prefect reads its settings.
_PROJECT_SETTINGS = (".env", "prefect.toml", "pyproject.toml")
#: Import path at the import of this module. Ray changes the path later when the worker imports Ray,
#: but the zygote does not import Ray.
_IMPORT_PATH = (*sys.path,)


# This part runs in the zygote and in the processes that it forks.


def serve(control: int, made_of: str) -> Caller | None:
    """Be the zygote: fork a process for each request, until the worker ends.

    This function returns only in a forked process, which then does the work of the request. The
    process already has the environment, working directory, files and command line of the request.

    Args:
        control: File descriptor of the socket to the worker.
        made_of: The fingerprint of the imported files, which the worker took, see `fingerprint`.

    Returns:
        The `muster train` command that sent the request, or None if the request came from the
        worker. In the latter case `sys.argv` contains the id of the flow run.
    """
    # A zygote that is stopped by SIGSTOP cannot notice the end of the worker, so the kernel kills
    # it. Forked processes do not inherit this setting.
    tree.die_with_parent(os.getppid())
    worker = socket.socket(fileno=control)
    process_texts = _ProcessTexts()
    zygote_pid = os.getpid()
    # With its original command line the zygote would look like a flow run in a list of processes.
    process_texts.show(["muster: imports what runs need"])
    for name in _LATE_MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        # A fork copies only one thread. Locks that other threads hold would never be released in
        # the forked process.
        raise SystemExit("something that is imported starts threads")
    zygote_logging = _read_logging_settings()
    gc.collect()
    gc.freeze()
    process_texts.show(["muster: ready to start runs"])
    worker.send(b"%d" % process_texts.environment_bytes)

    sockets = [worker, *filter(None, [listening()])]
    while True:
        ready_socket = select.select(sockets, [], [])[0][0]
        if ready_socket is worker:
            message, files, *_ = socket.recv_fds(worker, 1, 3)
            if not message:
                raise SystemExit
        else:
            files = [ready_socket.accept()[0].detach()]

        if middle_pid := os.fork():
            for file in files:
                os.close(file)
            os.waitpid(middle_pid, 0)
            continue

        try:
            for open_socket in sockets:
                open_socket.close()
            _leave_zygote()
            channel, *outputs = files
            if outputs:
                caller = None
                _become_flow_run(process_texts, channel, *outputs)
            else:
                caller = _become_training(process_texts, channel, zygote_pid, made_of)
            prefect.context.refresh_global_settings_context()
            if _read_logging_settings() != zygote_logging:
                for name in get_current_settings().logging.extra_loggers or ():
                    logging.getLogger(name).handlers.clear()
                setup_logging(incremental=False)
            return caller
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)


def _leave_zygote() -> None:
    """Fork once more, end the parent, and continue in the child.

    The kernel gives the child a new parent, the worker if it is a subreaper. So the child is no
    child process of the zygote. The child also gets its own session.
    """
    middle = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    select.select([middle], [], [])
    os.close(middle)
    os.setsid()


def _become_flow_run(process_texts: _ProcessTexts, channel: int, *outputs: int) -> None:
    """Turn this forked process into the process of a flow run.

    The process ends here if the worker does not answer to the pid.

    Args:
        process_texts: Command line and environment of this process in `/proc`.
        channel: File descriptor of the socket to the worker.
        outputs: File descriptors for standard output and standard error.
    """
    with open(os.devnull, "rb") as empty_input:
        _replace_standard_files(empty_input.fileno(), *outputs)
    for file in outputs:
        os.close(file)
    with socket.socket(fileno=channel) as worker:
        order = json.loads(worker.makefile("rb").readline())
        _apply_order(process_texts, order)
        sys.argv[1:] = order["argv"][len(ENGINE) :]
        worker.send(b"%d" % os.getpid())
        if not worker.recv(1):
            os._exit(1)


def _become_training(
    process_texts: _ProcessTexts, channel: int, zygote_pid: int, made_of: str
) -> Caller:
    """Turn this forked process into the process that does the work of a `muster train` command.

    The process ends here if it does not fit the command, or if the command does the work itself.

    Args:
        process_texts: Command line and environment of this process in `/proc`.
        channel: File descriptor of the socket to the command.
        zygote_pid: Process id of the zygote.
        made_of: Fingerprint of the files that the zygote has imported.

    Returns:
        The command.
    """
    try:
        caller = Caller.heard(socket.socket(fileno=channel))
        if fingerprint() != made_of:
            # An imported file has changed. The worker replaces a zygote that was killed.
            os.kill(zygote_pid, signal.SIGKILL)
            os._exit(0)
        is_suitable = may_be_forked(caller.env, os.environ, process_texts.environment_bytes)
        if not is_suitable or not caller.receive_permission():
            os._exit(0)
    except (OSError, ValueError):
        os._exit(0)
    caller.take_signals()
    _replace_standard_files(*caller.files)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    _apply_order(process_texts, caller.order)
    return caller


def _replace_standard_files(*files: int) -> None:
    """Make these file descriptors the standard input, output and error of this process."""
    for number, file in enumerate(files):
        os.dup2(file, number)


def _apply_order(process_texts: _ProcessTexts, order: Mapping[str, Any]) -> None:
    """Take over the environment, command line and working directory of a request."""
    # The C library stores the new variables in new memory. Afterwards it no longer uses the memory
    # of the original variables, which `show` overwrites.
    os.environ.clear()
    os.environ.update(order["env"])
    process_texts.show(order["argv"], order["env"])
    os.chdir(order["cwd"])
    # These two depend on the environment variables TZ and TMPDIR.
    time.tzset()
    tempfile.tempdir = None


def _read_logging_settings() -> tuple[Any, ...]:
    """Return Prefect's settings and environment variables for logging."""
    variables = sorted(item for item in os.environ.items() if item[0].startswith("PREFECT_LOGGING"))
    return get_current_settings().logging.model_dump(), variables


class _ProcessTexts:
    """The memory in which the kernel finds `/proc/self/cmdline` and `/proc/self/environ`."""

    def __init__(self) -> None:
        # Source: proc_pid_stat(5). The fields are counted from the end of the command's name, since
        # that name may contain spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        arguments_start, arguments_end, environment_start, environment_end = map(int, fields[45:49])
        self._arguments_start = arguments_start
        self._arguments_bytes = arguments_end - arguments_start
        self._environment_start = environment_start
        #: Size of the memory for the environment in bytes.
        self.environment_bytes = environment_end - environment_start

    def show(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Overwrite the command line and the environment that the kernel shows of this process.

        A text that is too long is cut.

        Args:
            argv: The new command line.
            env: The new environment, or None to keep the current environment. The C library must
                not use the original variables any more.
        """
        arguments = _encode_strings(argv)[: self._arguments_bytes - 1]
        ctypes.memmove(
            self._arguments_start,
            arguments.ljust(self._arguments_bytes, b"\0"),
            self._arguments_bytes,
        )
        if env is not None:
            size = self.environment_bytes
            variables = _encode_variables(env)[:size].ljust(size, b"\0")
            ctypes.memmove(self._environment_start, variables, size)


def _encode_strings(texts: Iterable[str]) -> bytes:
    """Return the texts as bytes, each with a zero byte at its end."""
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _encode_variables(env: Mapping[str, str]) -> bytes:
    """Return an environment as the kernel stores it: `NAME=value`, with zero bytes between."""
    return _encode_strings(f"{name}={value}" for name, value in env.items())


# This part runs in the worker.


def find_own_flow(deployment: DeploymentResponse) -> tuple[str | None, Path | None]:
    """Return the entrypoint of a deployment whose flow is one of Muster's own flows.

    Such a flow needs no pull steps, because the zygote has imported it already.

    Returns:
        The entrypoint `flows.MODULE.FUNCTION`, and the directory that the deployment's pull step
        would enter or None. Both are None if the flow is another flow.
    """
    entrypoint = deployment.entrypoint or ""
    if ":" not in entrypoint:
        is_own = entrypoint.startswith("flows.") and not deployment.pull_steps
        return (entrypoint if is_own else None), None
    match deployment.pull_steps:
        case [{"prefect.deployments.steps.set_working_directory": {"directory": str(directory)}}]:
            file, _, name = entrypoint.rpartition(":")
            path = (Path(directory) / file).resolve()
            if path.parent == (_ROOT / "flows").resolve():
                return f"flows.{path.stem}.{name}", Path(directory)
    return None, None


class ForkedRun:
    """A flow run's process that the zygote has forked, with the attributes that Prefect reads.

    The process must be a child of this process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        #: Exit code as in `subprocess.Popen`, or None while the process runs.
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    async def wait(self, outputs: Mapping[int, TextIO]) -> None:
        """Wait for the end of the process, and copy its output. If cancelled, kill the process.

        Args:
            outputs: `outputs[file descriptor]` is the stream that receives a copy of the output.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        for file, stream in outputs.items():
            os.set_blocking(file, False)
            loop.add_reader(file, _copy_output, loop, file, stream)
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            for file in (self._pidfd, *outputs):
                loop.remove_reader(file)
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            assert result is not None
            is_exit = result.si_code == os.CLD_EXITED
            self.returncode = result.si_status if is_exit else -result.si_status
            os.close(self._pidfd)
            # Copy the last output. Other processes may still hold the pipes open, so the end of the
            # pipes is not awaited.
            for file, stream in outputs.items():
                _copy_output(loop, file, stream)


def _copy_output(loop: asyncio.AbstractEventLoop, file: int, stream: TextIO) -> None:
    """Copy available bytes from a pipe to a stream. At the end of the pipe, stop watching it."""
    try:
        content = os.read(file, 1 << 16)
    except BlockingIOError:
        return
    if not content:
        loop.remove_reader(file)
    stream.buffer.write(content)
    stream.flush()


class Zygote:
    """The zygote of a worker, which is replaced if it ends or if an imported file has changed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        #: Socket to the zygote, or None without a zygote.
        self._control: socket.socket | None = None
        #: Fingerprint of the files that the zygote has imported.
        self._made_of = ""
        #: Largest size of the environment of a forked process in bytes, or 0 if the zygote is not
        #: ready.
        self._environment_bytes = 0
        #: Number of forks that are in progress.
        self._forks_in_progress = 0

    @property
    def is_ready(self) -> bool:
        """True if the zygote has finished its imports and can fork processes."""
        return self._environment_bytes > 0

    def make(self) -> None:
        """Start a new zygote, and return at once.

        The zygote is ready after some seconds. Until then, runs start without it.
        """
        self.close()
        self._made_of = fingerprint()
        own_socket, zygote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_socket.setblocking(False)
        with zygote_socket:
            # The command line of a forked process must fit into the memory of the zygote's command
            # line, so that line is filled up with 80 characters.
            self._process = subprocess.Popen(
                [*ENGINE, TEMPLATE, self._made_of, f"{zygote_socket.fileno():80}"],
                env={**_current_environment(), _SPARE_VARIABLE: "x" * _SPARE_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[zygote_socket.fileno()],
                start_new_session=True,
            )
        self._control = own_socket
        asyncio.get_running_loop().add_reader(own_socket, self._read_message)

    def close(self) -> None:
        """Kill the zygote. The runs that it has forked continue."""
        self._environment_bytes = 0
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _read_message(self) -> None:
        """Read the zygote's message that it is ready, or notice its end.

        A zygote that was ready is replaced at once. A zygote that ended during its imports is
        replaced when the next run starts.
        """
        assert self._control is not None
        was_ready = self.is_ready
        message = b""
        with suppress(OSError):
            message = self._control.recv(64)
        self._environment_bytes = int(message or 0)
        if not message:
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
        **options: Any,
    ) -> None:
        """Run a command and wait for its end, as Prefect's function `run_process` does.

        If possible, the process is forked from the zygote. Otherwise Prefect's function starts it.

        Args:
            command: The command line.
            env: The complete environment of the process.
            cwd: Working directory of the process.
            stream_output: True to copy the output of the process to the output of the worker.
            task_status: Gets the result of `task_status_handler` when the process has started.
            task_status_handler: Converts the process for `task_status`.
            options: Further arguments of Prefect's function.
        """
        # The exit stack closes the reading ends of the pipes.
        with ExitStack() as stack:
            outputs: dict[int, TextIO] = {}
            files: list[int] = []
            forked_run = None
            if tuple(command[: len(ENGINE)]) == ENGINE and self._can_fork(env):
                for stream in (sys.stdout, sys.stderr):
                    if stream_output:
                        read_end, file = os.pipe()
                        stack.callback(os.close, read_end)
                        outputs[read_end] = stream
                    else:
                        file = os.open(os.devnull, os.O_WRONLY)
                    files.append(file)
                order = {"argv": command, "env": dict(env), "cwd": str(cwd)}
                forked_run = await self._fork(order, files)
            if forked_run is not None:
                task_status.started(task_status_handler(forked_run))
                return await forked_run.wait(outputs)
        await run_process(
            command,
            env=env,
            cwd=cwd,
            stream_output=stream_output,
            task_status=task_status,
            task_status_handler=task_status_handler,
            **options,
        )

    def _can_fork(self, env: Mapping[str, str]) -> bool:
        """Return True if a run with the given environment can be forked now.

        If there is no zygote, or if an imported file has changed, a new zygote is started.
        """
        if self._control is None or self._made_of != fingerprint():
            self.make()
        return may_be_forked(env, os.environ, self._environment_bytes)

    async def _fork(self, order: Mapping[str, Any], files: Sequence[int]) -> ForkedRun | None:
        """Let the zygote fork the process of a flow run.

        If the zygote does not answer, it is replaced.

        Args:
            order: Command line, environment and working directory of the process.
            files: File descriptors for standard output and standard error. They are closed.

        Returns:
            The process, or None if there is none.
        """
        loop = asyncio.get_running_loop()
        control = self._control
        forked_run = None
        own_socket, run_socket = socket.socketpair()
        own_socket.setblocking(False)
        self._count_fork(1)
        try:
            with run_socket, own_socket:
                with ExitStack() as sent_files:
                    for file in files:
                        sent_files.callback(os.close, file)
                    assert control is not None
                    socket.send_fds(control, [b"f"], [run_socket.fileno(), *files])
                    run_socket.close()
                async with asyncio.timeout(_FORKS_WITHIN_S):
                    await loop.sock_sendall(own_socket, json.dumps(order).encode() + b"\n")
                    forked_run = ForkedRun(int(await loop.sock_recv(own_socket, 32)))
                    own_socket.send(b"g")
        except (OSError, ValueError, TimeoutError) as error:
            _log.warning("A run starts slower: %r", error)
            if self._control is control:
                self.make()
        finally:
            self._count_fork(-1)
        return forked_run

    def _count_fork(self, change: int) -> None:
        """Change the number of forks in progress, and be a subreaper while it is above 0.

        As a subreaper this process becomes the parent of forked runs. It must not stay a subreaper:
        it would also become the parent of the orphans of runs, and would have to reap them.

        Args:
            change: 1 at the beginning of a fork, -1 at its end.
        """
        self._forks_in_progress += change
        tree.become_subreaper(self._forks_in_progress > 0)


def _current_environment() -> dict[str, str]:
    """Return the environment of this process, with Prefect's current settings as variables."""
    return {**os.environ, **get_current_settings().to_environment_variables(exclude_unset=True)}


def may_be_forked(env: Mapping[str, str], own: Mapping[str, str], room: int) -> bool:
    """Return True if a run with a given environment can be forked from a process.

    Variables that a program reads only at its start must have the same values in both.

    Args:
        env: Environment of the run.
        own: Environment with which the process was started.
        room: Largest size of the run's environment in bytes.
    """

    def select_read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(_READ_AT_START) and name not in _WITHOUT_EFFECT
        }

    return len(_encode_variables(env)) <= room and (
        select_read_at_start(env) == select_read_at_start(own)
    )


def fingerprint() -> str:
    """Return a hash of the size and time of every file that a zygote reads or imports.

    These are Muster's modules, the files with Prefect's settings, and the list of installed
    packages. If such a file changes, the hash changes.
    """
    settings = get_current_settings()
    paths: list[str | Path] = [settings.profiles_path, settings.logging.config_path]
    paths += _PROJECT_SETTINGS
    folders = [_ROOT / package for package in _PACKAGES]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".toml")):
                    paths.append(entry.path)
                elif "." not in entry.name and not entry.name.startswith("__"):
                    folders.append(Path(entry.path))
    for import_folder in _IMPORT_PATH:
        with suppress(OSError), os.scandir(import_folder or ".") as entries:
            paths += (entry.path for entry in entries if entry.name.endswith(".dist-info"))

    states: dict[str, tuple[int, int]] = {}
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            states[str(path)] = (status.st_mtime_ns, status.st_size)
    return hashlib.sha256(repr(sorted(states.items())).encode()).hexdigest()
