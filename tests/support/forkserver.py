"""Processes of a flow that begin at once: forked from one that has Prefect and the flow loaded,
which takes each of them seconds otherwise."""

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
_END_WITHIN_S = 60.0
#: What its processes need, with what Prefect imports first while a flow runs.
_LOADED = (
    *("tests.support.supervising", "tests.support.reconciling"),
    *("anyio._backends._asyncio", "prefect.engine", "prefect.telemetry.run_telemetry"),
    *("prefect.utilities.visualization", "fastapi"),
)


class Forked:
    """A process of the fork server, which it alone reaps, once it is asked for the next one."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin = stdin
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self.pid = int(self.stdout.readline())
        self._pidfd = os.pidfd_open(self.pid)

    def has_ended(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self._pidfd], [], [], within_s)[0])

    def clear(self) -> None:
        """End it, where it has not."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        os.close(self._stdin)
        self.stdout.close()


class ForkServer:
    """Starts processes that talk to the Prefect server of an address."""

    def __init__(self, api: str, asks: socket.socket) -> None:
        self.api = api
        self._asks = asks

    def start(self, module: str, *arguments: str, env: Mapping[str, str], stderr: Path) -> Forked:
        """`python -m tests.support.MODULE ARGUMENTS`, in the checkout's root.

        Args:
            env: beside the environment of the tests.
        """
        stdin, stdin_w = os.pipe()
        stdout_r, stdout = os.pipe()
        with stderr.open("ab") as log:
            what = json.dumps([module, arguments, {**os.environ, **env}]).encode()
            socket.send_fds(self._asks, [what], [stdin, stdout, log.fileno()])
        os.close(stdin)
        os.close(stdout)
        return Forked(stdin_w, stdout_r)


@contextmanager
def fork_server(api: str) -> Iterator[ForkServer]:
    """
    Args:
        api: address of the Prefect server's API.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forkserver", str(its.fileno())],
                cwd=_ROOT,
                env={**os.environ, "PREFECT_API_URL": api},
                pass_fds=[its.fileno()],
            )
        yield ForkServer(api, ours)
    process.wait(_END_WITHIN_S)


def _serve(asked: socket.socket) -> None:
    while True:
        what, fds, *_ = socket.recv_fds(asked, 1 << 18, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not what:
            return
        if os.fork() == 0:
            asked.close()
            module, arguments, env = json.loads(what)
            _be(module, arguments, env, fds)
        for fd in fds:
            os.close(fd)


def _be(module: str, arguments: list[str], env: dict[str, str], stdio: list[int]) -> NoReturn:
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
    # As Python ends, but for taking all of its modules apart, which takes half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    for name in _LOADED:
        importlib.import_module(name)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
