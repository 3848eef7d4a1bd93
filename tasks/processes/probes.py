"""Probes: one bounded question to a component, and waiting for its first yes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tasks.processes import tree
from tasks.processes.shortage import Unasked, has_no_files_left, is_own_shortage
from tasks.spec.probes import find_unmet_conditions

_CREDENTIALS = struct.Struct("3i")


#: How often the cheap sign of a change (a port that opens, a log that grows) is looked at.
_GLANCE_S = 0.01
#: Questions grow rarer with the time waited, so that a yes is late by a small share of it.
_SHARE_OF_WAIT = 0.1
_EVERY_S_AT_MOST = 1.0
#: For one answer about readiness.
_ANSWERS_WITHIN_S = 5.0
_CHUNK_BYTES = 1 << 20
#: Of a component that sends without end, others must get their turn; the kernel queues no more.
_MESSAGES_AT_ONCE = 1024
_STATUS_LENGTH = 500
#: Whose process a pid is, is not looked up for each message.
_KNOWN_FOR_S = 1.0
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")


class ComponentProbe(ABC):
    """A question that can be asked again and again."""

    #: What is asked, for messages: `GET http://127.0.0.1:8000/health`.
    question: str
    #: The TCP port of this machine whose answer it is; None where no port is asked.
    local_port: int | None = None

    async def ask(self, timeout_s: float) -> str | None:
        """Ask once. Never raises but for a cancel.

        Returns: None for a yes, else what was asked and why not; an `Unasked` where the reason is
            a shortage of this process.
        """
        try:
            reason = await self.why_not(timeout_s)
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
            if is_own_shortage(error):
                return Unasked(f"{self.question}: this process cannot ask: {reason}")
        return f"{self.question}: {reason}" if reason else None

    @abstractmethod
    async def why_not(self, timeout_s: float) -> str:
        """Empty for a yes. Raises: OSError, of which TimeoutError is one, for a no."""

    @abstractmethod
    def glance(self) -> object:
        """A cheap sign, without waiting: when it changes it is worth asking again at once."""


async def until_yes(
    probe: ComponentProbe, *, every_s: float, on_no: Callable[[str], None] = lambda reason: None
) -> None:
    """Ask until the answer is yes. It has no deadline of its own: the caller sets one.

    Between two questions the probe's cheap sign is watched, so that most yeses are seen some 10 ms
    after they became true, while the question itself is asked rarely.

    Args:
        every_s: the first interval; later it is a tenth of the time waited, up to a second.
    """
    reason = None
    began = time.monotonic()
    while (answer := await probe.ask(_ANSWERS_WITHIN_S)) is not None:
        if answer != reason:
            reason = answer
            on_no(reason)
        share_s = _SHARE_OF_WAIT * (time.monotonic() - began)
        await _until_changed(probe, max(every_s, min(share_s, _EVERY_S_AT_MOST)))


async def _until_changed(probe: ComponentProbe, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    before = probe.glance()
    while (left := deadline - time.monotonic()) > 0:
        await asyncio.sleep(min(_GLANCE_S, left))
        if probe.glance() != before:
            return


class HttpProbe(ComponentProbe):
    """GET answers 2xx, and the JSON of the answer fulfils the conditions."""

    def __init__(
        self, url: str, client: httpx.AsyncClient, conditions: Mapping[str, object] | None = None
    ) -> None:
        self.question = f"GET {url}"
        self.local_port = _local_port(url)
        self._url = url
        self._client = client
        self._conditions = conditions or {}
        self._reached = False

    async def why_not(self, timeout_s: float) -> str:
        try:
            # httpx bounds each step of a request; a server that drips bytes passes them all.
            async with asyncio.timeout(timeout_s):
                response = await self._client.get(self._url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if is_own_shortage(error):
                raise OSError(errno.EMFILE, str(error) or os.strerror(errno.EMFILE)) from error
            return str(error) or type(error).__name__
        self._reached = True
        if not response.is_success:
            return f"HTTP {response.status_code} {response.text[:200]!r}"
        if not self._conditions:
            return ""
        try:
            body = response.json()
        except (ValueError, RecursionError):
            return f"not JSON: {response.text[:200]!r}"
        return "; ".join(find_unmet_conditions(self._conditions, body))

    def glance(self) -> object:
        return self._reached or _accepts(self.local_port)


class TcpProbe(ComponentProbe):
    """A TCP connection is accepted."""

    def __init__(self, host: str, port: int) -> None:
        self.question = f"connect to {host}:{port}"
        self.local_port = port if host.startswith(_LOOPBACK) else None
        self._host = host
        self._port = port

    async def why_not(self, timeout_s: float) -> str:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(self._host, self._port)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return ""

    def glance(self) -> object:
        return _accepts(self.local_port)


class LogProbe(ComponentProbe):
    """A line of the component's log matches."""

    def __init__(self, log: Path, pattern: str, since: int = 0) -> None:
        """
        Args:
            since: bytes of the log that are not looked at, as an earlier process wrote them.
        """
        self.question = f"/{pattern}/ in {log.name}"
        self._log = log
        self._pattern = re.compile(pattern)
        self._offset = since
        self._partial = b""

    async def why_not(self, timeout_s: float) -> str:
        with self._log.open("rb") as f:
            f.seek(self._offset)
            while data := f.read(_CHUNK_BYTES):
                self._offset += len(data)
                if self._matches(data):
                    return ""
                await asyncio.sleep(0)  # A log that grows fast must not keep others waiting.
        return "no such line yet"

    def _matches(self, data: bytes) -> bool:
        # The last line may still grow, so it is matched now and looked at again.
        lines = (self._partial + data).split(b"\n")
        self._partial = lines[-1][-_CHUNK_BYTES:]
        return any(self._pattern.search(line.decode("utf-8", "replace")) for line in lines)

    def glance(self) -> object:
        return size_of(self._log)


class FileProbe(ComponentProbe):
    """A file is there, and is not the one that was there before the component: that proves nothing.

    What it was is told by its identity. Its times are by the clock of its file system, which may be
    another machine's.
    """

    def __init__(self, path: Path, before: object) -> None:
        """
        Args:
            before: its `identity_of` then.
        """
        self.question = f"file {path}"
        self._path = path
        self._before = before

    async def why_not(self, timeout_s: float) -> str:
        is_old = _identity(self._path.stat()) == self._before
        return "is older than the component" if is_old else ""

    def glance(self) -> object:
        return identity_of(self._path)


def identity_of(path: Path) -> object:
    """What tells a file from another one, and from itself once it is written to; None of one that
    is not there."""
    try:
        return _identity(path.stat())
    except OSError:
        return None


def _identity(stat: os.stat_result) -> object:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class NotifyProbe(ComponentProbe):
    """A process of the component sent READY=1 to its NOTIFY_SOCKET.

    That lives in the abstract namespace, so it leaves no file. Anyone on the machine can send to
    such a name, hence the sender's kernel-given pid is checked. It is read until it is closed,
    whether anybody asks or not: who sends to a full one blocks.

    Source: sd_notify(3); SCM_CREDENTIALS in unix(7).
    """

    question = "READY=1 on NOTIFY_SOCKET"

    def __init__(self, is_ours: Callable[[int], bool]) -> None:
        """
        Args:
            is_ours: whether a pid belongs to the component.
        """
        self._is_ours = is_ours
        #: `genuine[pid]` of those that have sent something of late.
        self._genuine: dict[int, bool] = {}
        self._forgotten_s = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        name = f"muster/notify/{os.getpid()}/{os.urandom(8).hex()}"
        self._socket.bind(f"\0{name}")
        #: What the component gets as NOTIFY_SOCKET.
        self.address = f"@{name}"
        #: Its last STATUS= line.
        self.status = ""
        #: Set when that changes.
        self.has_news = asyncio.Event()
        self._is_ready = False
        asyncio.get_running_loop().add_reader(self._socket, self.glance)

    async def why_not(self, timeout_s: float) -> str:
        if self.glance():
            return ""
        return f"not yet (STATUS: {self.status})" if self.status else "not yet"

    def glance(self) -> object:
        with contextlib.suppress(OSError):  # Nothing more has arrived.
            for _ in range(_MESSAGES_AT_ONCE):
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
                if self._is_genuine(ancillary):
                    self._take_in(data.decode("utf-8", errors="replace"))
        return self._is_ready

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _take_in(self, said: str) -> None:
        for line in said.splitlines():
            key, _, value = line.partition("=")
            if key == "READY" and value == "1":
                self._is_ready = True
            elif key == "STATUS" and (status := value.strip()[:_STATUS_LENGTH]) != self.status:
                self.status = status
                self.has_news.set()

    def _is_genuine(self, ancillary: list[tuple[int, int, bytes]]) -> bool:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
                if time.monotonic() - self._forgotten_s > _KNOWN_FOR_S:
                    self._genuine, self._forgotten_s = {}, time.monotonic()
                if pid not in self._genuine:
                    # `systemd-notify` has often left by now; then its user must do.
                    is_gone = tree.parent_of(pid) == 0
                    self._genuine[pid] = self._is_ours(pid) or (is_gone and uid == os.getuid())
                return self._genuine[pid]
        return False


class AliveProbe(ComponentProbe):
    """The component has been alive for some time: the old fixed wait, where nothing better is."""

    def __init__(self, alive_s: float, since_monotonic_s: float) -> None:
        self.question = f"alive for {alive_s:g} s"
        self._at = since_monotonic_s + alive_s

    async def why_not(self, timeout_s: float) -> str:
        return "" if self.glance() else "not yet"

    def glance(self) -> object:
        return time.monotonic() >= self._at


def make_client() -> httpx.AsyncClient:
    """The HTTP client of probes: no proxy, no redirect, no connection kept for a dead peer.

    A certificate is not verified: a component that serves https does so with one of its own.
    Source: Kubernetes, HTTP probes.
    """
    return httpx.AsyncClient(
        trust_env=False,
        verify=False,
        timeout=None,
        limits=httpx.Limits(max_keepalive_connections=0),
    )


def _local_port(url: str) -> int | None:
    parts = urlsplit(url)
    if not (parts.hostname or "").startswith(_LOOPBACK):
        return None
    return parts.port or (443 if parts.scheme == "https" else 80)


def _accepts(port: int | None) -> bool:
    """Whether a process accepts connections on loopback; False if this one cannot look.

    Never waits.
    """
    if port is None or has_no_files_left():
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setblocking(False)
        # It says "in progress" whatever is there; loopback has answered all the same by now.
        error = s.connect_ex(("127.0.0.1", port))
        if error == errno.EINPROGRESS and tree.is_ready(s.fileno(), select.POLLOUT):
            error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error == 0


def size_of(path: Path) -> int:
    """In bytes; -1 of a file that is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
