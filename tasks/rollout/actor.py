"""Ray actors on the nodes of a fleet: one actor per server, and one per node to reserve ports.

`ServerActor` starts and stops the process of one server. `PortKeeper` reserves ports of its node.

Ray pickles the code of this module by value and sends it to the nodes, so Muster need not be
installed there. The module imports only the standard library, Ray, and the modules of Muster that
are sent along (`SENT`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import ray

from tasks.processes import ports, sockets, tree
from tasks.processes.ports import PortsReserved
from tasks.processes.shortage import OWN_SHORTAGES
from tasks.processes.sockets import verified_listeners
from tasks.processes.tree import descendants
from tasks.record import log_bound
from tasks.record.log_bound import punch_hole

#: The modules of Muster that are pickled by value and sent to the nodes.
SENT = (sys.modules[__name__], ports, sockets, tree, log_bound)
#: Seconds that the wrapper process gets to kill the server and all descendants of the server, after
#: the grace period has passed.
_KILL_WITHIN_S = 10.0
#: If a server exits by itself, its descendants get this number of seconds to end. Then the wrapper
#: kills the descendants.
_STRAGGLERS_S = 2.0
#: Seconds between two checks whether the processes of a tree have ended.
_LOOK_EVERY_S = 0.02
#: Largest number of bytes of a server's log that Muster reports together with the server's exit
#: status.
_TAIL_BYTES = 16_384
#: Largest number of bytes that one call of `read_log` returns.
_LOG_AT_MOST_BYTES = 1 << 20
#: Largest number of bytes of an error response that are quoted.
_QUOTED_BYTES = 200


class ServerActor:
    """Starts and stops the process of one server, and sends health checks to it.

    Ray runs health checks even while another method of the actor waits, because they are in a
    separate concurrency group. The actor starts the server through a wrapper process, see
    `tasks/ray/wrapper.py`. If the actor ends for any reason, the wrapper process ends the whole
    process tree of the server.

    Args:
        rank: Rank of the server.
        wrapper: Mapping from file name to text, for all files of the wrapper. Python runs the
            directory of these files as a program.
    """

    def __init__(self, rank: int, wrapper: Mapping[str, str]) -> None:
        self._rank = rank
        self._directory = tempfile.mkdtemp(prefix=f"muster-server-{rank}-")
        self._package = os.path.join(self._directory, "wrapper")
        os.mkdir(self._package)
        for name, text in wrapper.items():
            with open(os.path.join(self._package, name), "w", encoding="utf-8") as f:
                f.write(text)
        self._log = os.path.join(self._directory, "log")
        #: Process of the wrapper that runs the server. None before the first start.
        self._process: subprocess.Popen[bytes] | None = None
        #: Task that waits for the end of the wrapper and returns its exit status, which is the exit
        #: status of the server. None before the first start.
        self._exit: asyncio.Task[int] | None = None

    async def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stop_signal: int,
        grace_s: float,
    ) -> int:
        """Start the server through a wrapper process, and return the pid of the wrapper process.

        Args:
            argv: Program of the server and its arguments.
            env: Environment variables, added to those of the actor.
            cwd: Working directory. If it does not exist on this node, the actor's temporary
                directory is used.
            stop_signal: Number of the signal that asks the server to stop.
            grace_s: Seconds from the stop signal to SIGKILL.

        Raises:
            OSError: The server is running already, or the wrapper cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            raise OSError(
                f"the server of rank {self._rank} is already running (pid {self._process.pid})"
            )
        options = ("--grace", grace_s, "--signal", stop_signal, "--stragglers", _STRAGGLERS_S)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", self._package, *map(str, options), "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd if os.path.isdir(cwd) else self._directory,
                # If RAY_JOB_STOP_SIGNAL named the stop signal, the wrapper would expect Ray to send
                # this signal to the server. With `none`, the wrapper itself sends the signal.
                env={**os.environ, **env, "RAY_JOB_STOP_SIGNAL": "none"},
                start_new_session=True,
            )
        self._exit = asyncio.create_task(asyncio.to_thread(self._process.wait))
        return self._process.pid

    async def wait_for_exit(self) -> tuple[int, str]:
        """Wait until the server has ended.

        Returns:
            The exit status in the form of `Popen.returncode`, and the end of the server's log.
        """
        assert self._exit is not None
        return await asyncio.shield(self._exit), self._read_log_tail()

    async def stop(self, grace_s: float) -> list[int]:
        """Stop the server. After the grace period, kill its remaining processes.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL. Both signals are sent to the wrapper
                process, which ends the server.

        Returns:
            The pids of the wrapper's processes that could not be ended.
        """
        process = self._process
        if process is None or self._exit is None:
            return []
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._exit], timeout=grace_s)
        if done:
            return []
        # The wrapper consists of a process and its child. After the kill of the process, the child
        # kills the server's process tree and exits. So wait for the end of both.
        wrapper_pids = [process.pid, *_list_children(process.pid)]
        process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_WITHIN_S):
                while any(os.path.exists(f"/proc/{pid}") for pid in wrapper_pids):
                    await asyncio.sleep(_LOOK_EVERY_S)
        return [pid for pid in wrapper_pids if os.path.exists(f"/proc/{pid}")]

    @ray.method(concurrency_group="questions")
    async def ask(
        self, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> str:
        """Send a request to the server from the server's own machine.

        If a process outside the server's process tree listens at the address, no request is sent.

        Args:
            method: HTTP method in upper case.
            url: URL of the request, with a port.
            body: Body of the request, which is sent as JSON. None to send no body.
            timeout_s: Seconds that the server gets to answer.

        Returns:
            An empty string if the server answered with a success status. Otherwise a description of
            the failure.

        Raises:
            OSError: This machine could not send the request.
        """
        host, _, port = urlsplit(url).netloc.rpartition(":")
        _, foreign_listener = await self._list_listeners(host.strip("[]"), int(port))
        if foreign_listener:
            return foreign_listener
        return await asyncio.to_thread(_send_request, method, url, body, timeout_s)

    @ray.method(concurrency_group="questions")
    async def list_listeners(self, host: str, port: int) -> tuple[list[str], str]:
        """Return the sockets of this actor's server that listen at an address.

        Args:
            host: An address of this machine.
            port: The port.

        Returns:
            The inodes of the sockets, and an empty string. If a process outside the server's
            process tree listens at the address: no inodes, and a description of that process.

        Raises:
            OSError: The owners of the sockets could not be determined.
        """
        return await self._list_listeners(host, port)

    async def _list_listeners(self, host: str, port: int) -> tuple[list[str], str]:
        inodes, foreign_listener = await asyncio.to_thread(
            verified_listeners, host, port, self._list_tree
        )
        return sorted(inodes), foreign_listener

    def _list_tree(self) -> list[int]:
        """Return the pids of the wrapper and all its descendants; empty if the server has ended."""
        process = self._process
        if process is None or process.poll() is not None:
            return []
        return [process.pid, *descendants(process.pid)]

    @ray.method(concurrency_group="questions")
    async def ping(self) -> bool:
        """Return True if the server's process is running."""
        return self._process is not None and self._process.poll() is None

    async def read_log(self, offset: int) -> bytes:
        """Return at most 1 MiB of the server's log, or empty bytes at the end of the log.

        The call also frees the disk space of the part before `offset`, but keeps the last 16 KiB of
        this part. So the log does not fill the disk of this node.

        Args:
            offset: Number of bytes at the start of the log that the caller has read already.
        """
        data = b""
        # A file system that cannot release a part of a file raises OSError at `punch_hole`. The log
        # then keeps its disk space, and the data is still returned.
        with contextlib.suppress(OSError), open(self._log, "r+b", buffering=0) as f:
            data = os.pread(f.fileno(), _LOG_AT_MOST_BYTES, offset)
            if offset > _TAIL_BYTES:
                punch_hole(f.fileno(), 0, offset - _TAIL_BYTES)
        return data

    async def remove_files(self) -> None:
        """Remove the actor's temporary directory. Call this after the server has ended."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _read_log_tail(self) -> str:
        """Return the end of the server's log, or an empty string if the log cannot be read."""
        with contextlib.suppress(OSError), open(self._log, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            return f.read().decode("utf-8", "replace")
        return ""


class PortKeeper:
    """Ray actor that reserves ports of one machine for the servers of a fleet.

    The actor binds a reserved port until the server starts, so that no other process can use the
    port. Until the actor ends, no other run of Muster can reserve the port.

    Args:
        key: Secret from which the names of the port locks are derived; see `ports.lock_name`. Two
            actors with the same secret never reserve the same port. None for a random secret.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or os.urandom(32)
        #: Mapping from the name of a server or engine, such as `server.0`, to its reserved port.
        self._reserved: dict[str, PortsReserved] = {}
        #: Ports that this actor binds until the servers that use the ports are started.
        self._bound: set[int] = set()

    async def hold(self, names: Sequence[str]) -> list[int]:
        """Reserve a port for each name and return the ports in the order of the names.

        A name that already has a port gets another port, and the earlier port becomes free.

        Raises:
            OSError: No port is free.
        """
        for name in names:
            reserved = PortsReserved([name], self._key)
            await self.release([name])
            if (earlier := self._reserved.get(name)) is not None:
                earlier.close()
            self._reserved[name] = reserved
            self._bound.update(reserved.numbers.values())
        return [self._reserved[name].numbers[name] for name in names]

    async def release(self, names: Sequence[str]) -> None:
        """Unbind the ports of some servers or engines, so that servers can bind these ports.

        Args:
            names: Names of servers or engines, such as `server.0`. Names without a reserved port
                are ignored.
        """
        for name in names:
            if (reserved := self._reserved.get(name)) is not None:
                reserved.release(name.partition(".")[0])
                self._bound.difference_update(reserved.numbers.values())

    async def list_taken(self, numbers: Sequence[int]) -> list[int]:
        """Return those of the port numbers that another process of this machine has bound."""
        return [port for port in numbers if port not in self._bound and not _can_be_bound(port)]


def _send_request(method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float) -> str:
    """Send a request to a server, and return an empty string if the response has a success status.

    If the request fails, return a description of the failure.

    Raises:
        OSError: This machine has no free file descriptor, port or memory for the request.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    # The server runs on this machine, so a proxy from the environment must not be used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    question = f"{method} {url}"
    try:
        with opener.open(request, timeout=timeout_s) as response:
            response.read()
    except urllib.error.HTTPError as error:
        text = error.read(_QUOTED_BYTES).decode("utf-8", "replace")
        return f"{question}: HTTP {error.code} {text!r}"
    except TimeoutError:
        return f"{question}: no answer within {timeout_s:g} s"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        number = getattr(reason, "errno", None)
        if number in OWN_SHORTAGES:
            raise OSError(
                number, f"{question}: this machine could not send the request: {reason}"
            ) from error
        return f"{question}: {reason}"
    return ""


def _list_children(pid: int) -> list[int]:
    """Return the pids of the children of a process, or an empty list if the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(word) for word in f.read().split()]
    return []


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe_socket:
        # Set SO_REUSEADDR, as servers do. Without this option, a port cannot be bound while
        # connections of an earlier server are in the state TIME_WAIT.
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port))
        except OSError:
            return False
    return True
