"""What a component that hangs was doing: written down beside its log before it is ended.

Three witnesses, each less sure to speak than the one before, and of more use: the kernel; py-spy,
where it is installed; and the processes themselves, asked by SIGABRT.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from tasks.processes import kernel_view, stacks
from tasks.processes.identity import ProcessId

_log = logging.getLogger(__name__)

#: At most so long does each part keep a teardown: the look at the processes, of which py-spy may
#: take so much for all of them, ...
_EXAMINED_WITHIN_S, _STACKS_WITHIN_S = 3.0, 2.0
#: ... their own last words, and the copy of the log.
_ABORTED_WITHIN_S, _COPIED_WITHIN_S = 1.0, 1.0
#: So long before SIGKILL is what is left asked for its stacks; of a short grace period, half.
_BEFORE_KILL_S = 1.0
_LOG_BYTES_AT_MOST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A component that hangs."""

    name: str
    #: Its first process.
    pid: int | None
    #: Where its output goes, and beside it the diagnosis.
    log: Path
    stop_signal: int
    #: Seconds from the stop signal to SIGKILL.
    grace_s: float
    #: The pids of its tree, parents first, each time anew; none once they can't be told.
    processes: Callable[[], list[int]]
    #: Takes secrets out of a text.
    mask: Callable[[str], str]

    @property
    def report(self) -> Path:
        return self.log.with_name(f"{self.name}.hang.txt")


class Diagnosis:
    """Examines a component that hangs while it is ended.

    First `examine` it, with all it may wait for still there; then enter the context, stop it, and
    leave the context once it has ended. This takes a few seconds at most, whatever state the
    machine is in, and raises nothing: the work is done in daemon threads, which are left behind
    where a process or a file system keeps them.
    """

    def __init__(self, hung: Hung) -> None:
        self._hung = hung
        self._is_written = False
        self._log_began = 0
        self._late: asyncio.Task[None] | None = None

    async def examine(self) -> Path | None:
        """Write down the state of its processes; the file, None where there is none."""
        await _within(_EXAMINED_WITHIN_S, self._examine)
        return self._hung.report if self._is_written else None

    async def __aenter__(self) -> None:
        await _within(_ABORTED_WITHIN_S, self._abort_early)
        self._late = asyncio.create_task(self._abort_late())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._is_written:
            await _within(_COPIED_WITHIN_S, self._copy_log)

    def _examine(self) -> None:
        pids = self._hung.processes()
        if not pids:
            return
        with _told_if_it_fails():
            self._log_began = self._hung.log.stat().st_size
        with _told_if_it_fails():
            at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            self._write(f"{self._hung.name} (pid {self._hung.pid}) hangs, {at}\n")
            for text in kernel_view.describe(pids):
                self._write(text)
        for text in stacks.python_stacks(pids, _STACKS_WITHIN_S):
            self._write(text)

    def _abort_early(self) -> None:
        """Ask those for their stacks that the stop signal will just end."""
        # The first process last: once it has gone, the guardian tells the rest to stop.
        unheard = [pid for pid in reversed(self._hung.processes()) if self._dies_unheard(pid)]
        stacks.abort(map(ProcessId.of, unheard), _ABORTED_WITHIN_S)

    def _dies_unheard(self, pid: int) -> bool:
        """The stop signal would end the process without a chance to do anything, such as saving."""
        if self._catches_stop(pid):
            return False
        # Out of reach of the first signal, it may be needed by a first process that does save.
        first = self._hung.pid or 0
        return not self._catches_stop(first) or _group_of(pid) == _group_of(first)

    def _catches_stop(self, pid: int) -> bool:
        status = kernel_view.status_of(pid)
        return kernel_view.has_signal(status, "SigCgt", self._hung.stop_signal)

    async def _abort_late(self) -> None:
        """Ask those for their stacks that the stop signal has not ended, before SIGKILL does."""
        grace_s = self._hung.grace_s
        before_kill_s = min(_BEFORE_KILL_S, grace_s / 2)
        await asyncio.sleep(grace_s - before_kill_s)

        def abort() -> None:
            stacks.abort(map(ProcessId.of, reversed(self._hung.processes())), before_kill_s)

        await _within(before_kill_s, abort)

    def _copy_log(self) -> None:
        log = self._hung.log
        with log.open("rb") as f:
            f.seek(self._log_began)
            said = f.read(_LOG_BYTES_AT_MOST).decode(errors="replace")
        if said:
            self._write(f"{log.name} from then on:\n{said}")

    def _write(self, text: str) -> None:
        with self._hung.report.open("a", encoding="utf-8") as f:
            f.write(self._hung.mask(text) + "\n")
        self._is_written = True


async def _within(limit_s: float, work: Callable[[], None]) -> None:
    """Do what may block for ever, in a thread that nothing waits for longer than this."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        with _told_if_it_fails():
            work()
        with contextlib.suppress(RuntimeError):  # The loop has gone on without us, and is closed.
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="diagnosis", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()


@contextlib.contextmanager
def _told_if_it_fails() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("a component that hangs can't be examined")


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
