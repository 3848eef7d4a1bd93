"""Probes: questions to a component with a time limit, and waiting for the first success."""

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

#: Layout of `struct ucred`: pid, uid, gid. Source: unix(7).
_CREDENTIALS = struct.Struct("3i")


#: Seconds between two checks of the cheap sign of a change, such as a port that opens.
_GLANCE_S = 0.01
#: The interval between questions, as a share of the time waited.
_SHARE_OF_WAIT = 0.1
#: Largest interval between questions, in seconds.
_EVERY_S_AT_MOST = 1.0
#: Time limit in seconds of one question about readiness.
_ANSWERS_WITHIN_S = 5.0
_CHUNK_BYTES = 1 << 20
#: Largest number of messages read at once, so that a component that sends without end does not
#: block other tasks.
_MESSAGES_AT_ONCE = 1024
_STATUS_LENGTH = 500
#: Seconds until the owner of a pid is read again, instead of for each message.
_KNOWN_FOR_S = 1.0
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")


class ComponentProbe(ABC):
    """A question to a component that can be asked repeatedly."""

    #: The question as text for messages, for example `GET http://127.0.0.1:8000/health`.
    question: str
    #: TCP port of this machine that the probe asks; None if it asks no local port.
    local_port: int | None = None

    async def ask(self, timeout_s: float) -> str | None:
        """Ask once. Raises nothing except for a cancel.

        Args:
            timeout_s: Time limit in seconds.

        Returns:
            None for success; otherwise the question and the reason for the failure. The reason is
            an `Unasked` if this process lacks resources for the question.
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
        """Return the reason for a failure; an empty string for success.

        Raises:
            OSError: The probe failed. TimeoutError is an OSError.
        """

    @abstractmethod
    def glance(self) -> object:
        """Return a cheap sign, without waiting. If it changes, the question should be asked at
        once.
        """


async def until_yes(
    probe: ComponentProbe, *, every_s: float, on_no: Callable[[str], None] = lambda reason: None
) -> None:
    """Ask until the probe succeeds. The caller must set a deadline.

    Between two questions, the probe's cheap sign is checked, so that success is usually noticed
    within 10 ms although questions are rare.

    Args:
        probe: The probe.
        every_s: The first interval in seconds. Later intervals are a tenth of the time waited, but
            at most one second.
        on_no: Called with each new reason for a failure.
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
    """Success: GET returns a status 2xx, and the JSON answer meets the conditions."""

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
            # httpx limits only single steps of a request. A server that sends single bytes would
            # never reach these limits.
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
    """Success: the component accepts a TCP connection."""

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
    """Success: a line of the component's log matches the pattern."""

    def __init__(self, log: Path, pattern: str, since: int = 0) -> None:
        """
        Args:
            log: The log file.
            pattern: Regular expression.
            since: Number of bytes at the start of the log that an earlier process wrote. They are
                skipped.
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
                await asyncio.sleep(0)  # Let other tasks run, even if the log grows fast.
        return "no such line yet"

    def _matches(self, data: bytes) -> bool:
        # The last line may be incomplete. It is matched now, and matched again when it has grown.
        lines = (self._partial + data).split(b"\n")
        self._partial = lines[-1][-_CHUNK_BYTES:]
        return any(self._pattern.search(line.decode("utf-8", "replace")) for line in lines)

    def glance(self) -> object:
        return size_of(self._log)


class FileProbe(ComponentProbe):
    """Success: the file exists and differs from the file that existed before the component's start.

    The files are compared by identity. Their times do not help, because the clock of a network file
    system may belong to another machine.
    """

    def __init__(self, path: Path, before: object) -> None:
        """
        Args:
            path: The file.
            before: `identity_of` the file before the component's start.
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
    """Return a value that changes if the file is replaced or written; None if it does not exist."""
    try:
        return _identity(path.stat())
    except OSError:
        return None


def _identity(stat: os.stat_result) -> object:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class NotifyProbe(ComponentProbe):
    """Success: a process of the component sent READY=1 to its NOTIFY_SOCKET.

    The socket is in the abstract namespace, so it leaves no file. Any process of the machine can
    send to it, so the pid of each sender, as the kernel reports it, is checked. Messages are read
    until `close`, because a full socket blocks its senders.

    Source: sd_notify(3); SCM_CREDENTIALS in unix(7).
    """

    question = "READY=1 on NOTIFY_SOCKET"

    def __init__(self, is_ours: Callable[[int], bool]) -> None:
        """
        Args:
            is_ours: Returns True if a pid belongs to the component.
        """
        self._is_ours = is_ours
        #: Whether each recent sender, by its pid, belongs to the component.
        self._genuine: dict[int, bool] = {}
        self._forgotten_s = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        name = f"muster/notify/{os.getpid()}/{os.urandom(8).hex()}"
        self._socket.bind(f"\0{name}")
        #: Value of NOTIFY_SOCKET for the component.
        self.address = f"@{name}"
        #: The component's last STATUS= line.
        self.status = ""
        #: Set when `status` changes.
        self.has_news = asyncio.Event()
        self._is_ready = False
        asyncio.get_running_loop().add_reader(self._socket, self.glance)

    async def why_not(self, timeout_s: float) -> str:
        if self.glance():
            return ""
        return f"not yet (STATUS: {self.status})" if self.status else "not yet"

    def glance(self) -> object:
        with contextlib.suppress(OSError):  # All messages were read.
            for _ in range(_MESSAGES_AT_ONCE):
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
                if self._is_genuine(ancillary):
                    self._handle_message(data.decode("utf-8", errors="replace"))
        return self._is_ready

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _handle_message(self, message: str) -> None:
        for line in message.splitlines():
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
                    self._genuine = {}
                    self._forgotten_s = time.monotonic()
                if pid not in self._genuine:
                    # A process such as `systemd-notify` has often ended by now. Then its user is
                    # checked instead.
                    is_gone = tree.parent_of(pid) == 0
                    self._genuine[pid] = self._is_ours(pid) or (is_gone and uid == os.getuid())
                return self._genuine[pid]
        return False


class AliveProbe(ComponentProbe):
    """Success: the component has been alive for some time. For components without a better
    probe.
    """

    def __init__(self, alive_s: float, since_monotonic_s: float) -> None:
        self.question = f"alive for {alive_s:g} s"
        self._at = since_monotonic_s + alive_s

    async def why_not(self, timeout_s: float) -> str:
        return "" if self.glance() else "not yet"

    def glance(self) -> object:
        return time.monotonic() >= self._at


def make_client() -> httpx.AsyncClient:
    """Make the HTTP client of probes: without proxies, redirects and kept connections.

    Certificates are not verified, because components usually use self-signed ones. Source:
    Kubernetes, HTTP probes.
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
    """Return True if a process accepts connections on the loopback port, without waiting.

    Returns False if this process cannot check.
    """
    if port is None or has_no_files_left():
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setblocking(False)
        # A non-blocking connect always returns "in progress". On loopback, the result is known at
        # once.
        error = s.connect_ex(("127.0.0.1", port))
        if error == errno.EINPROGRESS and tree.is_ready(s.fileno(), select.POLLOUT):
            error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error == 0


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; -1 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
