"""The fork server of a worker: a process that has imported Prefect and Muster, and forks runs.

    worker --- request ----> fork server == fork ==> middle == fork ==> run
       ^----------------- "pid" / "go" ----------------------------------/

A process that is forked from the fork server starts faster, because it need not import Prefect and
Muster again. These are the steps of a start:

1. The worker sends the fork server one byte and three open files: a socket and two output files.
2. The fork server forks the process `middle`. This process forks the process of the run, and ends
   at once. The worker is a subreaper during this step, so the kernel makes the process of the run a
   child process of the worker.
3. The process of the run reads its command, environment and working directory from the socket.
4. The process of the run sends its pid to the worker, and begins only after the worker has
   answered.

If one of these processes is killed between two steps, there is one process of the run or none, and
never two. A run continues after the fork server was killed.
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
from pydantic import ValidationError

import tasks
from tasks.processes import tree
from tasks.processes.own_modules import make_own_command
from tasks.queue.forked_commands import Caller, open_listener
from tasks.show.arguments import EXIT_INVALID
from tasks.spec.service_links import describe_invalid_setting

_log = logging.getLogger(__name__)

#: Beginning of the command that runs a flow run. The id of the flow run follows. See
#: flows/__main__.py.
ENGINE = make_own_command("flows")
#: Argument after `ENGINE` that starts a fork server instead of a flow run.
TEMPLATE = "--template"
#: Number of bytes by which a run's environment may be larger than the worker's environment.
_SPARE_BYTES = 1 << 15
#: Name of an environment variable of the fork server. The value of the variable is a filler of
#: _SPARE_BYTES bytes. A forked process overwrites its copy of the fork server's environment with
#: the environment of the run. The filler reserves memory for a larger environment.
_SPARE_VARIABLE = "MUSTER_ROOM"
#: Prefixes of environment variables that the Python interpreter, the loader, the C library or the
#: module `ray` reads when a program starts. A forked process does not read these variables again.
#: So a run is forked only if these variables have the same values in the run and in the fork
#: server.
_READ_AT_START = ("PYTHON", "LD_", "LANG", "LC_", "MALLOC_", "GLIBC_", "OPENSSL_", "RAY_")
#: Environment variables with a prefix in _READ_AT_START that have no effect on a run. Their values
#: in the run and in the fork server may differ.
_WITHOUT_EFFECT = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONFAULTHANDLER",
    "PYTHONUNBUFFERED",
    "RAY_ADDRESS",
)
#: Longest time, in seconds, that the fork server may take to answer with the pid of a new process.
#: After that time, the worker starts the run without the fork server.
_FORKS_WITHIN_S = 10.0
#: Modules that the process of a run imports after its start. The fork server imports these modules
#: in advance.
_LATE_MODULES = (
    "encodings.idna",
    "flows.pipeline",
    "graphviz",
    "prefect._internal.observers",
    "prefect.concurrency._sync",
    "prefect.task_engine",
    "prefect.utilities.visualization",
    "pynvml",
    "ray.job_submission",
    "rich._emoji_codes",
    "tasks.queue.admission",
)
#: Folder that contains Muster's packages.
_ROOT = Path(tasks.__file__).parents[1]
#: Names of Muster's packages.
_PACKAGES = ("deployments", "flows", "tasks")
#: Files of the working directory from which Prefect reads its settings.
_PROJECT_SETTINGS = (".env", "prefect.toml", "pyproject.toml")
#: Python's import path at the import of this module. `fingerprint` uses this copy, because Ray
#: changes `sys.path` in the worker later.
_IMPORT_PATH = (*sys.path,)


# The following functions run in the fork server and in the processes that are forked from it.


def serve(control: int, code_fingerprint: str) -> Caller | None:
    """Run the fork server: fork a process for each request, until the worker ends.

    The function returns only in a forked process, which then does the work of the request. The
    forked process already has the request's environment, working directory, files and command line.

    Args:
        control: File descriptor of the socket to the worker.
        code_fingerprint: Result of `fingerprint` in the worker before this process was started.

    Returns:
        The `muster` command that sent the request. None if the worker sent the request; `sys.argv`
        then contains the id of the flow run.
    """
    # Make the kernel kill this process when the worker ends, even if this process is stopped by
    # SIGSTOP. Forked processes do not inherit this setting.
    tree.die_with_parent(os.getppid())
    worker = socket.socket(fileno=control)
    process_texts = _ProcessTexts()
    fork_server_pid = os.getpid()
    # Replace the command line of this process. Otherwise the fork server would look like a flow run
    # in the output of `ps`.
    process_texts.show(["muster: importing modules for runs"])
    for name in _LATE_MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        # A fork copies only one thread. In the forked process, locks that other threads held would
        # stay locked forever.
        raise SystemExit(
            "the fork server cannot start processes for runs, because an imported Python module "
            "has started a thread"
        )
    fork_server_logging = _read_logging_settings()
    gc.collect()
    gc.freeze()
    process_texts.show(["muster: ready to start runs"])
    worker.send(b"%d" % process_texts.environment_bytes)

    sockets = [worker, *filter(None, [open_listener()])]
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
            _leave_fork_server()
            channel, *outputs = files
            if outputs:
                caller = None
                _become_flow_run(process_texts, channel, *outputs)
            else:
                caller = _become_command(process_texts, channel, fork_server_pid, code_fingerprint)
            _read_settings_again(caller)
            if _read_logging_settings() != fork_server_logging:
                for name in get_current_settings().logging.extra_loggers or ():
                    logging.getLogger(name).handlers.clear()
                setup_logging(incremental=False)
            return caller
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)


def _leave_fork_server() -> None:
    """Fork this process, end this process, and continue in the new child process.

    This process is a child of the fork server. After the end of this process, the child process
    gets a new parent: the worker if the worker is a subreaper, otherwise the init process. The
    child process also gets a new session.
    """
    middle = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    select.select([middle], [], [])
    os.close(middle)
    os.setsid()


def _become_flow_run(process_texts: _ProcessTexts, channel: int, *outputs: int) -> None:
    """Turn this forked process into the process of a flow run.

    This function sends the pid of the process to the worker. If the worker does not answer, the
    function ends the process.

    Args:
        process_texts: Command line and environment of this process in `/proc`.
        channel: File descriptor of the socket to the worker.
        outputs: File descriptors of the standard output and the standard error of the run.
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


def _become_command(
    process_texts: _ProcessTexts, channel: int, fork_server_pid: int, code_fingerprint: str
) -> Caller:
    """Turn this forked process into the process that does the work of a `muster` command.

    The function ends this process in two cases: if this process is not suitable for the command,
    for example because an imported file has changed, or if the command does not allow this process
    to begin.

    Args:
        process_texts: Command line and environment of this process in `/proc`.
        channel: File descriptor of the socket to the command.
        fork_server_pid: Process id of the fork server.
        code_fingerprint: Fingerprint of the files that the fork server has imported.

    Returns:
        The command.
    """
    try:
        caller = Caller.receive(socket.socket(fileno=channel))
        if fingerprint() != code_fingerprint:
            # A file has changed since the fork server imported it. Kill this fork server. The
            # worker then starts a new fork server.
            os.kill(fork_server_pid, signal.SIGKILL)
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


def _read_settings_again(caller: Caller | None) -> None:
    """Let Prefect read its settings from the present environment and working directory.

    If a setting is invalid and `caller` is None, a ValidationError is raised. If a setting is
    invalid and `caller` is a command, the function reports the setting, sends an exit code to the
    command, and ends this process.

    Args:
        caller: The `muster` command whose work this process does, or None if this process becomes
            a flow run.
    """
    try:
        prefect.context.refresh_global_settings_context()
    except ValidationError as error:
        if caller is None:
            raise
        message = describe_invalid_setting(error.errors(include_url=False))
        print(f"{message}\nNothing was done.", file=sys.stderr, flush=True)
        os._exit(caller.send_exit_code(EXIT_INVALID))


def _replace_standard_files(*files: int) -> None:
    """Make the given file descriptors the standard input, output and error of this process."""
    for number, file in enumerate(files):
        os.dup2(file, number)


def _apply_order(process_texts: _ProcessTexts, order: Mapping[str, Any]) -> None:
    """Give this process the environment, command line and working directory of a request.

    Args:
        process_texts: Command line and environment of this process in `/proc`.
        order: The request.
    """
    # Make the C library store all variables in new memory, because `show` overwrites the memory of
    # the original variables.
    os.environ.clear()
    os.environ.update(order["env"])
    process_texts.show(order["argv"], order["env"])
    os.chdir(order["cwd"])
    # Python has cached the time zone and the temporary folder of the fork server. Discard both, so
    # that the variables TZ and TMPDIR of this process apply.
    time.tzset()
    tempfile.tempdir = None


def _read_logging_settings() -> tuple[Any, ...]:
    """Return all of Prefect's settings for logging, to compare the settings of two processes."""
    variables = sorted(item for item in os.environ.items() if item[0].startswith("PREFECT_LOGGING"))
    return get_current_settings().logging.model_dump(), variables


class _ProcessTexts:
    """The memory of this process that holds the original command line and environment.

    The kernel shows this memory in `/proc/self/cmdline` and `/proc/self/environ`. Programs such as
    `ps` read these files.
    """

    def __init__(self) -> None:
        # Source: proc_pid_stat(5). The second field, the name of the program, may contain spaces.
        # So the fields are counted from the end of that name.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        arguments_start, arguments_end, environment_start, environment_end = map(int, fields[45:49])
        self._arguments_start = arguments_start
        self._arguments_bytes = arguments_end - arguments_start
        self._environment_start = environment_start
        #: Size in bytes of the memory that holds the environment of this process.
        self.environment_bytes = environment_end - environment_start

    def show(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Change the command line and the environment that `/proc` shows for this process.

        Each new text overwrites the old text in memory. A new text that is longer than the old text
        is cut.

        Args:
            argv: The new command line.
            env: The new environment variables. None to leave the environment unchanged. New
                variables overwrite the memory that held the environment at the start of this
                process. So the caller must first clear and refill `os.environ`: the C library then
                keeps the environment in other memory.
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
    """Return strings as bytes, with a zero byte after each string."""
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _encode_variables(env: Mapping[str, str]) -> bytes:
    """Return environment variables in the kernel's format: `NAME=value`, then a zero byte."""
    return _encode_strings(f"{name}={value}" for name, value in env.items())


# The following functions run in the worker.


def find_own_flow(deployment: DeploymentResponse) -> tuple[str | None, Path | None]:
    """Return the entrypoint of a deployment, if its flow is one of Muster's own flows.

    Such a flow does not need the pull steps of the deployment, because the fork server has already
    imported the flow.

    Returns:
        Two values: the entrypoint `flows.MODULE.FUNCTION`, and the directory in the deployment's
            pull step. The directory is None without such a step. Both values are None if the flow
            is not one of Muster's flows.
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
    """The forked process of a flow run.

    Prefect reads the attributes `pid` and `returncode` of this object. The process must be a child
    of the calling process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        #: Exit code as in `subprocess.Popen`, or None while the process is running.
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    async def wait(self, outputs: Mapping[int, TextIO]) -> None:
        """Wait for the end of the process, and copy its output to streams.

        If this call is cancelled, the process is killed.

        Args:
            outputs: Mapping from the file descriptor of a pipe to the stream that receives the
                content of the pipe. The process writes its output into these pipes.
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
            # Copy the rest of the output. Do not wait for the end of the pipes, because leftover
            # processes of the run may keep the pipes open.
            for file, stream in outputs.items():
                _copy_output(loop, file, stream)


def _copy_output(loop: asyncio.AbstractEventLoop, file: int, stream: TextIO) -> None:
    """Copy the available bytes from a pipe to a stream, without waiting.

    Args:
        loop: The asyncio loop that watches the pipe. At the end of the pipe, the loop stops
            watching it.
        file: File descriptor of the pipe.
        stream: The stream.
    """
    try:
        content = os.read(file, 1 << 16)
    except BlockingIOError:
        return
    if not content:
        loop.remove_reader(file)
    stream.buffer.write(content)
    stream.flush()


class ForkServer:
    """Starts and uses the fork server of a worker.

    A new fork server is started if the old process has ended or if an imported file has changed.
    """

    def __init__(self) -> None:
        #: Process of the fork server, or None without a fork server.
        self._process: subprocess.Popen[bytes] | None = None
        #: Socket to the fork server, or None without a fork server.
        self._control: socket.socket | None = None
        #: Fingerprint of the files that the fork server has imported.
        self._code_fingerprint = ""
        #: Largest size, in bytes, of the environment of a forked process. 0 if the fork server is
        #: not ready.
        self._environment_bytes = 0
        #: Number of runs that are being forked from the fork server now.
        self._forks_in_progress = 0

    @property
    def is_ready(self) -> bool:
        """True if the fork server has finished its imports and can fork processes."""
        return self._environment_bytes > 0

    def start(self) -> None:
        """Start a new fork server, and return at once.

        The fork server is ready after some seconds. Until then, runs start without it.
        """
        self.close()
        self._code_fingerprint = fingerprint()
        own_socket, fork_server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_socket.setblocking(False)
        with fork_server_socket:
            # A forked run writes its command line over the memory of the fork server's command
            # line. The padding of the last argument to 80 characters makes this memory large
            # enough.
            self._process = subprocess.Popen(
                [*ENGINE, TEMPLATE, self._code_fingerprint, f"{fork_server_socket.fileno():80}"],
                env={**_current_environment(), _SPARE_VARIABLE: "x" * _SPARE_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fork_server_socket.fileno()],
                start_new_session=True,
            )
        self._control = own_socket
        asyncio.get_running_loop().add_reader(own_socket, self._read_message)

    def close(self) -> None:
        """Kill the fork server. Runs that were forked from the fork server continue."""
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
        """Read the message that the fork server is ready, or notice that the fork server has ended.

        If the fork server was ready before it ended, a new fork server is started at once. If the
        fork server ended during its imports, an immediate restart would probably fail, too. So the
        next run starts the new fork server.
        """
        assert self._control is not None
        was_ready = self.is_ready
        message = b""
        with suppress(OSError):
            message = self._control.recv(64)
        self._environment_bytes = int(message or 0)
        if not message:
            _log.warning(
                "The fork server of this worker has ended. The fork server makes the start of runs "
                "faster, so runs start more slowly until a new fork server is ready."
            )
            self.close()
            if was_ready:
                self.start()

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
        """Run a command and wait for its end, like Prefect's function `run_process`.

        If possible, the process is forked from the fork server. Otherwise Prefect's function
        `run_process` starts it.

        Args:
            command: The command line.
            env: The complete environment of the process.
            cwd: Working directory of the process.
            stream_output: True to copy the output of the process to the output of the worker.
            task_status: Object whose method `started` is called when the process has started.
            task_status_handler: Function that returns the argument of `task_status.started` for the
                process.
            options: Further arguments of Prefect's function.
        """
        # The output of the process arrives through pipes. The exit stack closes the read ends of
        # these pipes.
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
        """Return True if a run with the given environment variables can be forked now.

        If there is no fork server, or if an imported file has changed, the method starts a new fork
        server and returns False.
        """
        if self._control is None or self._code_fingerprint != fingerprint():
            self.start()
        return may_be_forked(env, os.environ, self._environment_bytes)

    async def _fork(self, order: Mapping[str, Any], files: Sequence[int]) -> ForkedRun | None:
        """Fork the process of a flow run from the fork server.

        If the fork server does not answer, a new one is started.

        Args:
            order: Command line, environment and working directory of the process.
            files: File descriptors of the standard output and the standard error of the process.
                This method closes them.

        Returns:
            The process, or None if no process was forked.
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
            _log.warning(
                "The fork server could not start a run. So the worker starts the run itself, "
                "which takes longer: %r",
                error,
            )
            if self._control is control:
                self.start()
        finally:
            self._count_fork(-1)
        return forked_run

    def _count_fork(self, change: int) -> None:
        """Change the number of runs that are being forked now.

        While the number is above 0, the worker is a subreaper. So a forked run becomes a child
        process of the worker. At other times, the worker is no subreaper: otherwise, leftover
        processes of runs would become child processes of the worker, too.

        Args:
            change: 1 at the beginning of a fork, -1 at its end.
        """
        self._forks_in_progress += change
        tree.become_subreaper(self._forks_in_progress > 0)


def _current_environment() -> dict[str, str]:
    """Return the environment variables of this process and Prefect's settings as variables."""
    return {**os.environ, **get_current_settings().to_environment_variables(exclude_unset=True)}


def may_be_forked(env: Mapping[str, str], own: Mapping[str, str], max_bytes: int) -> bool:
    """Return True if a run with a given environment can be forked from the fork server.

    Variables that a program reads only at its start must have the same values in the environments
    of the run and of the fork server.

    Args:
        env: Environment variables of the run.
        own: Environment variables with which the fork server was started.
        max_bytes: Largest size of the run's environment in bytes.
    """

    def select_read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(_READ_AT_START) and name not in _WITHOUT_EFFECT
        }

    return len(_encode_variables(env)) <= max_bytes and (
        select_read_at_start(env) == select_read_at_start(own)
    )


def fingerprint() -> str:
    """Return a hash of the sizes and modification times of the files that a fork server reads.

    The files are Muster's modules, the files with Prefect's settings, and the `.dist-info` folders
    of installed packages. A different hash means that one of these files has changed.
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
