"""Probes: check with a time limit whether a component works, and wait for the first success."""

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
from tasks.processes.place_reader import PlaceReader, PlaceTimeout
from tasks.processes.shortage import NotChecked, has_no_files_left, is_own_shortage
from tasks.record.log_bound import ZEROS
from tasks.record.log_file import HeldLog
from tasks.record.tail import BLOCK_BYTES, Tail
from tasks.spec.probes import find_unmet_conditions

#: Layout of `struct ucred`: pid, uid, gid. Source: unix(7).
_CREDENTIALS = struct.Struct("3i")


#: Seconds between two calls of `ComponentProbe.glance`.
_GLANCE_S = 0.01
#: Interval between two readiness checks, as a share of the time since the first check.
_SHARE_OF_WAIT = 0.1
#: Largest interval in seconds between two readiness checks. The interval grows with the time since
#: the first check.
_EVERY_S_AT_MOST = 1.0
#: Time limit in seconds of one readiness check.
_ANSWERS_WITHIN_S = 5.0
#: Largest number of messages of NOTIFY_SOCKET that are read at once. Without this limit, a
#: component that sends messages without a pause would block all other tasks.
_MESSAGES_AT_ONCE = 1024
#: Length in characters after which a STATUS message from NOTIFY_SOCKET is cut.
_STATUS_LENGTH = 500
#: Seconds until the sender of NOTIFY_SOCKET messages is checked again, because the kernel may have
#: reused the sender's pid.
_KNOWN_FOR_S = 1.0
#: First characters of the host names and addresses that mean this machine.
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")


class ComponentProbe(ABC):
    """A check of one component that can be repeated."""

    #: Text that names the check in error messages, for example `GET http://127.0.0.1:8000/health`.
    question: str
    #: TCP port on this machine to which the probe connects. None if the probe connects to no port
    #: of this machine.
    local_port: int | None = None

    async def ask(self, timeout_s: float) -> str | None:
        """Check the component once. Raises no error.

        Args:
            timeout_s: Time limit in seconds.

        Returns:
            None if the check succeeded; otherwise the description of the check and the reason for
            its failure. The text is a `NotChecked` if this process had no resources for the check.
        """
        try:
            reason = await self.why_not(timeout_s)
        except PlaceTimeout as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
            if is_own_shortage(error):
                return NotChecked(
                    f"{self.question}: not checked, because Muster itself lacks resources: {reason}"
                )
        return f"{self.question}: {reason}" if reason else None

    @abstractmethod
    async def why_not(self, timeout_s: float) -> str:
        """Check the component once.

        Args:
            timeout_s: Time limit in seconds.

        Returns:
            An empty string if the check succeeded; otherwise the reason for its failure.

        Raises:
            OSError: The check ended with an error, for example because the connection was refused.
            TimeoutError: The time limit is over.
        """

    @abstractmethod
    def glance(self) -> object:
        """Return a value that changes when a new check of the component may have another result.

        The call takes little time and never waits. For example, `TcpProbe.glance` returns whether
        the port of the component accepts connections.
        """


async def wait_for_success(
    probe: ComponentProbe, *, every_s: float, on_no: Callable[[str], None] = lambda reason: None
) -> None:
    """Repeat the check of a probe until it succeeds. The caller must set a time limit.

    Between two checks, `probe.glance` is called every 10 ms. If the result of `glance` changes, the
    next check follows at once.

    Args:
        probe: The probe.
        every_s: Smallest interval between two checks, in seconds. The interval grows with the time
            since the first check, up to one second.
        on_no: Called with the reason why a check has failed. Not called again for the same reason.
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
    """Wait until `probe.glance()` returns another value than now, but at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    before = probe.glance()
    while (left := deadline - time.monotonic()) > 0:
        await asyncio.sleep(min(_GLANCE_S, left))
        if probe.glance() != before:
            return


class HttpProbe(ComponentProbe):
    """Succeeds if a GET request returns a status 2xx and a JSON body that meets `conditions`.

    If `conditions` is empty, the body is not checked.
    """

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
            # Set a time limit for the whole request. The timeouts of httpx apply to single steps of
            # a request, so a server that sends one byte at a time would never exceed them.
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
        return self._reached or _accepts_connections(self.local_port)


class TcpProbe(ComponentProbe):
    """Succeeds if the component accepts a TCP connection."""

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
        return _accepts_connections(self.local_port)


class LogProbe(ComponentProbe):
    """Succeeds if a line of the component's log matches a pattern.

    If log rotation truncates the log, the new content is read from its beginning. After the first
    success, the probe always succeeds.
    """

    def __init__(
        self, log: HeldLog, pattern: str, since: int = 0, reader: PlaceReader | None = None
    ) -> None:
        """
        Args:
            log: The log.
            pattern: Regular expression.
            since: Number of bytes at the start of the log that an earlier process has written.
                These bytes are skipped.
            reader: Reader of the log. None to create a reader.
        """
        self._reader = reader or PlaceReader(log.path)
        #: Size of the log in bytes at the last call of `glance`.
        self._size = -1
        self._has_matched = False
        self.question = f"/{pattern}/ in {log.path.name}"
        self._log = log
        self._pattern = re.compile(pattern)
        self._tail = Tail(since)
        self._partial = b""

    async def why_not(self, timeout_s: float) -> str:
        async with asyncio.timeout(timeout_s):
            while await self._reader.ask(self._search_part, timeout_s):
                pass
        return "" if self._has_matched else "no line of the log matches yet"

    def _search_part(self) -> bool:
        """Search the next part of the log for the pattern. Runs in the reader's thread.

        Returns:
            True if no line has matched yet and the log has further parts.
        """
        self._reader.place = str(self._log.path)
        if self._has_matched:
            return False
        with self._log.source.open("rb") as f:
            data = self._tail.read(f.fileno())
            if data is None:
                # The log was truncated. Read it from its beginning.
                self._partial = b""
                self._tail.restart()
                data = self._tail.read(f.fileno()) or b""
        self._tail.advance(data)
        self._has_matched = self._matches(data)
        return len(data) == BLOCK_BYTES and not self._has_matched

    def _matches(self, data: bytes) -> bool:
        # The last line may be incomplete. Search it for the pattern now, and again when more of the
        # line was read.
        data = ZEROS.sub(b"\n", data) if b"\0" in data else data
        lines = (self._partial + data).split(b"\n")
        self._partial = lines[-1][-BLOCK_BYTES:]
        return any(self._pattern.search(line.decode("utf-8", "replace")) for line in lines)

    def glance(self) -> object:
        self._reader.poll(self._measure)
        return self._size

    def _measure(self) -> None:
        self._reader.place = str(self._log.path)
        self._size = self._log.size()


class FileProbe(ComponentProbe):
    """Succeeds if a file exists that was created or changed after the component's start.

    The inode, size and times of the file are compared with their values before the start. The times
    are not compared with this machine's clock, because a network file system may have another
    clock.
    """

    def __init__(self, path: Path, before: object, reader: PlaceReader | None = None) -> None:
        """
        Args:
            path: The file.
            before: Result of `identity_of(path)` before the component's start. If the file is
                created or changed, later results differ from this result.
            reader: Reader of the file. None to create a reader.
        """
        self.question = f"file {path}"
        self._path = path
        self._before = before
        self._reader = reader or PlaceReader(path)
        #: Value that `glance` returns: the last result of `identity_of` for the file. Set in the
        #: thread of the reader. None before the first read, or if the file does not exist.
        self._seen: object = None

    async def why_not(self, timeout_s: float) -> str:
        identity = await self._reader.ask(lambda: _identity(self._path.stat()), timeout_s)
        return (
            "the file was last changed before the component started"
            if identity == self._before
            else ""
        )

    def glance(self) -> object:
        self._reader.poll(self._look)
        return self._seen

    def _look(self) -> None:
        self._seen = identity_of(self._path)


class FileChangeProbe(ComponentProbe):
    """Liveness probe that succeeds if a file was changed or replaced since the last check.

    The inode, size and times of the file are compared with those at the last check. The times are
    not compared with the present time, because a network file system may have another clock.
    """

    def __init__(self, path: Path, reader: PlaceReader) -> None:
        """
        Args:
            path: File that the component changes regularly while it works.
            reader: Reads the file in a thread, because its file system may not answer.
        """
        self.question = f"file {path}"
        self._path = path
        self._reader = reader
        #: Device, inode, size and times of the file at the last check; None before the first
        #: check.
        self._seen: object = None

    async def why_not(self, timeout_s: float) -> str:
        identity = await self._reader.ask(lambda: _identity(self._path.stat()), timeout_s)
        has_changed = identity != self._seen
        self._seen = identity
        return "" if has_changed else "has not changed since the last check"

    def glance(self) -> object:
        return self._seen


def identity_of(path: Path) -> object:
    """Return a value that changes if a file is replaced or written; None if it does not exist."""
    try:
        return _identity(path.stat())
    except OSError:
        return None


def _identity(stat: os.stat_result) -> object:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class NotifyProbe(ComponentProbe):
    """Succeeds if a process of the component has sent READY=1 to its NOTIFY_SOCKET.

    The socket is in the kernel's abstract namespace, so it leaves no file. Any process of the
    machine can send messages to the socket. The kernel reports the pid of each sender, so that
    messages from processes outside the component are ignored. All messages are read until `close`,
    because a full socket would block the component.

    Source: sd_notify(3); SCM_CREDENTIALS in unix(7).
    """

    question = "READY=1 on NOTIFY_SOCKET"

    def __init__(self, is_ours: Callable[[int], bool]) -> None:
        """
        Args:
            is_ours: Returns True for the pid of a process that belongs to the component.
        """
        self._is_ours = is_ours
        #: Mapping from the pid of each recent sender to True if the sender belongs to the
        #: component.
        self._checked_senders: dict[int, bool] = {}
        #: Time at which `_checked_senders` was last emptied, in CLOCK_MONOTONIC seconds.
        self._cache_emptied_s = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        name = f"muster/notify/{os.getpid()}/{os.urandom(8).hex()}"
        self._socket.bind(f"\0{name}")
        #: Value of the environment variable NOTIFY_SOCKET for the component.
        self.address = f"@{name}"
        #: Text of the component's last STATUS message; empty if there was none.
        self.status = ""
        #: asyncio event that is set when `status` changes. The reader of `status` clears the event.
        self.has_news = asyncio.Event()
        self._is_ready = False
        #: Number of WATCHDOG=1 messages that the component has sent.
        self.watchdog_count = 0
        asyncio.get_running_loop().add_reader(self._socket, self.glance)

    async def why_not(self, timeout_s: float) -> str:
        if self.glance():
            return ""
        return f"not yet (STATUS: {self.status})" if self.status else "not yet"

    def glance(self) -> object:
        # Read all messages that have arrived on NOTIFY_SOCKET. An OSError means that there is no
        # further message.
        with contextlib.suppress(OSError):
            for _ in range(_MESSAGES_AT_ONCE):
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
                if self._is_from_component(ancillary):
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
            elif key == "WATCHDOG" and value == "1":
                self.watchdog_count += 1
            elif key == "STATUS" and (status := value.strip()[:_STATUS_LENGTH]) != self.status:
                self.status = status
                self.has_news.set()

    def _is_from_component(self, ancillary: list[tuple[int, int, bytes]]) -> bool:
        """Return True if a process of the component has sent a message.

        Args:
            ancillary: Ancillary data of the message, which contain the sender's pid and user.
        """
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
                if time.monotonic() - self._cache_emptied_s > _KNOWN_FOR_S:
                    self._checked_senders = {}
                    self._cache_emptied_s = time.monotonic()
                if pid not in self._checked_senders:
                    # A short-lived sender such as `systemd-notify` may have ended already. Accept
                    # its message if the sender belonged to this user.
                    is_gone = tree.read_parent(pid) == 0
                    self._checked_senders[pid] = self._is_ours(pid) or (
                        is_gone and uid == os.getuid()
                    )
                return self._checked_senders[pid]
        return False


class WatchdogProbe(ComponentProbe):
    """Liveness probe that succeeds if the component has sent WATCHDOG=1 since the last check.

    Source: sd_notify(3), sd_watchdog_enabled(3).
    """

    question = "WATCHDOG=1 on NOTIFY_SOCKET"

    def __init__(self, notify: NotifyProbe) -> None:
        """
        Args:
            notify: Probe that receives the messages that the component sends to NOTIFY_SOCKET.
        """
        self._notify = notify
        #: Number of WATCHDOG=1 messages that had arrived at the last check.
        self._seen = 0

    async def why_not(self, timeout_s: float) -> str:
        self._notify.glance()
        count = self._notify.watchdog_count
        has_new = count != self._seen
        self._seen = count
        return "" if has_new else "no WATCHDOG=1 since the last check"

    def glance(self) -> object:
        self._notify.glance()
        return self._notify.watchdog_count


class AliveProbe(ComponentProbe):
    """Succeeds if the component has been alive for some time. Use it if no other probe fits."""

    def __init__(self, alive_s: float, since_monotonic_s: float) -> None:
        """
        Args:
            alive_s: Seconds from the component's start to the success of the probe.
            since_monotonic_s: Time of the component's start, in CLOCK_MONOTONIC seconds.
        """
        self.question = f"alive for {alive_s:g} s"
        self._at = since_monotonic_s + alive_s

    async def why_not(self, timeout_s: float) -> str:
        return "" if self.glance() else "not yet"

    def glance(self) -> object:
        return time.monotonic() >= self._at


def make_client() -> httpx.AsyncClient:
    """Return a new HTTP client for probes.

    The client uses no proxy, follows no redirect and opens a new connection for each request. It
    does not verify certificates, because the certificates of components are usually self-signed.
    Source: Kubernetes, HTTP probes.
    """
    return httpx.AsyncClient(
        trust_env=False,
        verify=False,
        timeout=None,
        limits=httpx.Limits(max_keepalive_connections=0),
    )


def _local_port(url: str) -> int | None:
    """Return the port of a URL that points to this machine; None if it points elsewhere."""
    parts = urlsplit(url)
    if not (parts.hostname or "").startswith(_LOOPBACK):
        return None
    return parts.port or (443 if parts.scheme == "https" else 80)


def _accepts_connections(port: int | None) -> bool:
    """Return True if a process accepts connections on a port of 127.0.0.1. Does not wait.

    Returns False if `port` is None or this process cannot open another file.
    """
    if port is None or has_no_files_left():
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setblocking(False)
        # A non-blocking connect returns "in progress". On the loopback interface, the result is
        # then available at once.
        error = s.connect_ex(("127.0.0.1", port))
        if error == errno.EINPROGRESS and tree.is_ready(s.fileno(), select.POLLOUT):
            error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error == 0
