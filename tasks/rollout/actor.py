"""What stands on a node of a Ray cluster for a fleet: the owner of each server's process, and who
keeps ports for them. It is sent to the cluster by value (`SENT`), so no code of Muster needs to be
there: it uses the standard library only, and of the project only what is sent along.
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

#: The modules that are sent by value.
SENT = (sys.modules[__name__], ports, sockets, tree)
#: What the wrapper needs after the grace period to end a whole tree.
_KILL_WITHIN_S = 10.0
_STRAGGLERS_S = 2.0
_LOOK_EVERY_S = 0.02
_TAIL_BYTES = 16_384
_LOG_AT_MOST_BYTES = 1 << 20
_SAID_AT_MOST = 200


class ServerActor:
    """Starts the process of one server, waits for its end, and asks it from its own machine.

    Questions are answered whatever else is under way. The process has a wrapper above it, which
    ends its whole tree when the actor ends, by whatever cause.
    """

    def __init__(self, rank: int, wrapper: Mapping[str, str]) -> None:
        # `text[file name]` of the wrapper, a package that Python runs by its folder.
        self._rank = rank
        self._own = tempfile.mkdtemp(prefix=f"muster-server-{rank}-")
        self._package = os.path.join(self._own, "wrapper")
        os.mkdir(self._package)
        for name, text in wrapper.items():
            with open(os.path.join(self._package, name), "w", encoding="utf-8") as f:
                f.write(text)
        self._log = os.path.join(self._own, "log")
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Task[int] | None = None

    async def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stop_signal: int,
        grace_s: float,
    ) -> int:
        """Start the process; the pid of its wrapper. Raises: OSError."""
        if self._process is not None and self._process.poll() is None:
            raise OSError(f"rank {self._rank} runs already (pid {self._process.pid})")
        own = ("--grace", grace_s, "--signal", stop_signal, "--stragglers", _STRAGGLERS_S)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", self._package, *map(str, own), "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd if os.path.isdir(cwd) else self._own,
                # It would take the actor's own stop signal for one that Ray has sent to the whole
                # tree by itself, as Ray does with a job.
                env={**os.environ, **env, "RAY_JOB_STOP_SIGNAL": "none"},
                start_new_session=True,
            )
        self._ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        return self._process.pid

    async def end_of(self) -> tuple[int, str]:
        """Waits for the end of the process: its status as `Popen.returncode` gives it, and its last
        words."""
        assert self._ended is not None
        return await asyncio.shield(self._ended), self._tail()

    async def stop(self, grace_s: float) -> list[int]:
        """Ask the process to end; what is left of its tree after the grace period is killed.

        Returns: the pids of the wrapper, where it could not be ended.
        """
        process = self._process
        if process is None or self._ended is None:
            return []
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._ended], timeout=grace_s)
        if done:
            return []
        # Its front is killed: its keeper ends the tree at once, and leaves.
        tree = [process.pid, *_children(process.pid)]
        process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_WITHIN_S):
                while any(os.path.exists(f"/proc/{pid}") for pid in tree):
                    await asyncio.sleep(_LOOK_EVERY_S)
        return [pid for pid in tree if os.path.exists(f"/proc/{pid}")]

    @ray.method(concurrency_group="questions")
    async def ask(
        self, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> str:
        """Ask the server from its own machine, if it is the server.

        Returns: empty for a yes, else why not.

        Raises: OSError, when this machine cannot ask.
        """
        host, _, port = urlsplit(url).netloc.rpartition(":")
        _, foreign = await self._listening(host.strip("[]"), int(port))
        return foreign or await asyncio.to_thread(_asked, method, url, body, timeout_s)

    @ray.method(concurrency_group="questions")
    async def listening(self, host: str, port: int) -> tuple[list[str], str]:
        """The sockets that listen at an address of this machine, if all are the server's own.

        Returns: their inodes and an empty text; or no inodes, and who else listens there.

        Raises: OSError, when it cannot be told.
        """
        return await self._listening(host, port)

    async def _listening(self, host: str, port: int) -> tuple[list[str], str]:
        found, foreign = await asyncio.to_thread(verified_listeners, host, port, self._tree)
        return sorted(found), foreign

    def _tree(self) -> list[int]:
        """The pids of the process, its wrapper, and all that descends from them."""
        process = self._process
        if process is None or process.poll() is not None:
            return []
        return [process.pid, *descendants(process.pid)]

    @ray.method(concurrency_group="questions")
    async def ping(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    async def log_from(self, offset: int) -> bytes:
        """The log from there on, a piece at a time."""
        with contextlib.suppress(OSError), open(self._log, "rb") as f:
            f.seek(offset)
            return f.read(_LOG_AT_MOST_BYTES)
        return b""

    async def forget(self) -> None:
        """Remove what it has left on its node; the process has ended."""
        shutil.rmtree(self._own, ignore_errors=True)

    def _tail(self) -> str:
        with contextlib.suppress(OSError), open(self._log, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            return f.read().decode("utf-8", "replace")
        return ""


class PortKeeper:
    """Keeps ports of one machine for the servers of a fleet: from everybody until the server is
    started, and from other runs of Muster as long as this lives."""

    def __init__(self, key: bytes | None = None) -> None:
        """
        Args:
            key: of the home that the fleet's run belongs to, see `ports.lock_name`; None: its
                locks are known to no other keeper.
        """
        self._key = key or os.urandom(32)
        self._held: dict[str, PortsReserved] = {}
        #: Whose server has not been started.
        self._bound: set[int] = set()

    async def hold(self, names: Sequence[str]) -> list[int]:
        """A port for each name, and not the one that it had. Raises: OSError, when none is free."""
        for name in names:
            held = PortsReserved([name], self._key)
            await self.release([name])
            if (before := self._held.get(name)) is not None:
                before.close()
            self._held[name] = held
            self._bound.update(held.numbers.values())
        return [self._held[name].numbers[name] for name in names]

    async def release(self, names: Sequence[str]) -> None:
        """Let servers bind what is held by these names, of which others may know nothing."""
        for name in names:
            if (held := self._held.get(name)) is not None:
                held.release(name.partition(".")[0])
                self._bound.difference_update(held.numbers.values())

    async def taken(self, numbers: Sequence[int]) -> list[int]:
        """The ports that somebody listens on, on this machine."""
        return [port for port in numbers if port not in self._bound and not _can_be_bound(port)]


def _asked(method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    # Nothing is between this machine and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    said = f"{method} {url}"
    try:
        with opener.open(request, timeout=timeout_s) as response:
            response.read()
    except urllib.error.HTTPError as error:
        text = error.read(_SAID_AT_MOST).decode("utf-8", "replace")
        return f"{said}: HTTP {error.code} {text!r}"
    except TimeoutError:
        return f"{said}: no answer within {timeout_s:g} s"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        number = getattr(reason, "errno", None)
        if number in OWN_SHORTAGES:
            raise OSError(number, f"{said}: this machine cannot ask: {reason}") from error
        return f"{said}: {reason}"
    return ""


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(word) for word in f.read().split()]
    return []


def _can_be_bound(port: int) -> bool:
    with socket.socket() as one:
        # As servers do: connections of the server before that linger are no conflict.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True
