"""Start flow processes fast, by a fork of a process that has already imported Prefect and the flow.

Without the fork server, each flow process would need several seconds for its imports.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_ROOT = Path(__file__).parents[2]
#: Time limit in which the fork server must end, in seconds.
_END_WITHIN_S = 60.0
#: Modules that the fork server imports once, so that no forked program has to import them. The list
#: includes modules that Prefect imports only while a flow runs.
_PRELOADED_MODULES = (
    "tests.support.supervising",
    "tests.support.reconciling",
    "anyio._backends._asyncio",
    "prefect.engine",
    "prefect.telemetry.run_telemetry",
    "prefect.utilities.visualization",
    "fastapi",
)


class ForkedProcess:
    """A process that the fork server has started.

    The fork server is the parent of the process. Before each start of another process, the fork
    server reaps the processes that have ended.
    """

    def __init__(self, stdin: int, stdout: int) -> None:
        """
        Args:
            stdin: Descriptor of the pipe to the process's stdin, for writing.
            stdout: Descriptor of the pipe from the process's stdout, for reading.
        """
        self._stdin = stdin
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self.pid = int(self.stdout.readline())
        self._pidfd = os.pidfd_open(self.pid)

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Wait up to `within_s` seconds, and return True if the process has ended."""
        return bool(select.select([self._pidfd], [], [], within_s)[0])

    def clear(self) -> None:
        """Kill the process if the process still runs, and close the pipes."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        os.close(self._stdin)
        self.stdout.close()


class ForkServer:
    """Starts programs of `tests/support` as forks of a process that has already imported modules.

    All programs use the same Prefect server.
    """

    def __init__(self, api: str, requests: socket.socket) -> None:
        """
        Args:
            api: URL of the Prefect server's API.
            requests: Socket to the process of the fork server.
        """
        self.api = api
        self._requests = requests

    def start(
        self, module: str, *arguments: str, env: Mapping[str, str], stderr: Path
    ) -> ForkedProcess:
        """Start a program like `python -m tests.support.MODULE ARGUMENTS` in the project's root.

        Args:
            module: Name of a module of `tests/support` with a function `main`.
            *arguments: Arguments of the program.
            env: Environment variables, in addition to the variables of the test's process.
            stderr: File for stderr of the program.
        """
        child_stdin, stdin = os.pipe()
        stdout, child_stdout = os.pipe()
        with stderr.open("ab") as log:
            request = json.dumps([module, arguments, {**os.environ, **env}]).encode()
            socket.send_fds(self._requests, [request], [child_stdin, child_stdout, log.fileno()])
        os.close(child_stdin)
        os.close(child_stdout)
        return ForkedProcess(stdin, stdout)


@contextmanager
def fork_server(api: str) -> Iterator[ForkServer]:
    """Run a fork server while the context is open.

    A fork server is a process that has imported many modules, and starts programs by forks.

    Args:
        api: URL of the Prefect server's API.
    """
    our_socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with our_socket:
        with server_socket:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forkserver", str(server_socket.fileno())],
                cwd=_ROOT,
                env={**os.environ, "PREFECT_API_URL": api},
                pass_fds=[server_socket.fileno()],
            )
        yield ForkServer(api, our_socket)
    process.wait(_END_WITHIN_S)


def _serve(requests: socket.socket) -> None:
    """Start the requested programs until the test closes its end of the socket."""
    while True:
        request, fds, *_ = socket.recv_fds(requests, 1 << 18, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            module, arguments, env = json.loads(request)
            _run_program(module, arguments, env, fds)
        for fd in fds:
            os.close(fd)


def _run_program(
    module: str, arguments: list[str], env: dict[str, str], stdio: list[int]
) -> NoReturn:
    """Run a program in this forked process, and exit with the exit code of the program.

    Args:
        module: Name of a module of `tests/support` with a function `main`.
        arguments: Arguments of the program.
        env: Environment variables of the program.
        stdio: Descriptors for stdin, stdout and stderr.
    """
    for number, fd in enumerate(stdio):
        os.dup2(fd, number)
        os.close(fd)
    print(os.getpid(), flush=True)
    os.environ.update(env)
    sys.argv[1:] = arguments
    code: object = 1
    try:
        importlib.import_module(f"tests.support.{module}").main()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    # End the process as the interpreter does, but skip the destruction of all modules, which would
    # take half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    for name in _PRELOADED_MODULES:
        importlib.import_module(name)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
