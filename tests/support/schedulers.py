"""Start scheduler processes for tests of the scheduler lease.

Such a process takes the lease on the Prefect server again and again, and decides nothing. Tests
kill and suspend these processes. To start them fast, a nursery process that has already imported
all modules forks them:

    python -m tests.support.schedulers

The nursery reads one JSON value per line from stdin: an object with the settings of a process to
fork, or a list of the process ids to end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.host_environment import DEADLINE_S, ROOT

#: Time limit of one try to take the scheduler lease, in seconds.
_TAKE_WITHIN_S = 1.0


class Nursery:
    """The nursery process, which forks the scheduler processes of a test."""

    def __init__(self, api: str, log: Path) -> None:
        """
        Args:
            api: URL of the Prefect server's API.
            log: File for stderr of the scheduler processes, and of the process that forks them.
        """
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.schedulers"],
                cwd=ROOT,
                env={**os.environ, "PREFECT_API_URL": api},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def fork(self, settings: dict[str, Any]) -> int:
        """Fork a scheduler process with these settings, and return its process id."""
        return int(self._send(settings))

    def end(self, pids: list[int]) -> None:
        """Send SIGTERM to scheduler processes, and wait until they have ended.

        The processes may be suspended or already dead.
        """
        self._send(pids)

    def close(self) -> None:
        """End this nursery's process and all scheduler processes that it has forked."""
        self._process.communicate(timeout=DEADLINE_S)

    def _send(self, request: Any) -> str:
        """Send a JSON value to the process that forks the schedulers; return its one-line answer.

        A JSON object has the settings of a scheduler process to fork. A JSON list has the ids of
        the processes to end.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()


class Schedulers:
    """Scheduler processes that compete for the scheduler lease on one Prefect server.

    The processes write to a common journal file.
    """

    def __init__(self, directory: Path, nursery: Nursery) -> None:
        """
        Args:
            directory: Directory for the journal file and for the MUSTER_HOME of each host.
            nursery: Process that forks the scheduler processes.
        """
        self._directory = directory
        self._nursery = nursery
        #: Process ids of all scheduler processes that this object has started.
        self._pids: list[int] = []
        self.journal = directory / "journal"
        self.journal.touch()

    @staticmethod
    @contextmanager
    def of(directory: Path, nursery: Nursery) -> Iterator[Schedulers]:
        """Yield an object that starts scheduler processes, and end these processes afterwards."""
        schedulers = Schedulers(directory, nursery)
        try:
            yield schedulers
        finally:
            nursery.end(schedulers._pids)

    def start(
        self,
        host: str = "here",
        *,
        hold_s: float = 30.0,
        expire_s: float = 45.0,
        writes: int = 4,
        pause_s: float = 0.01,
    ) -> int:
        """Start a scheduler process that takes the scheduler lease repeatedly; return its pid.

        Args:
            host: Name of the simulated host of the process. Processes of a host share a
                MUSTER_HOME.
            hold_s: Longest time that the process may keep the lease, in seconds.
            expire_s: Time until the server ends a lease that is not renewed, in seconds.
            writes: Number of lines that the process writes to the journal during each lease.
            pause_s: Pause after each of these lines, in seconds.
        """
        settings: dict[str, Any] = {
            "home": str(self._directory / host),
            "journal": str(self.journal),
            "hold_s": hold_s,
            "expire_s": expire_s,
            "writes": writes,
            "pause_s": pause_s,
        }
        self._pids.append(self._nursery.fork(settings))
        return self._pids[-1]

    def lines(self) -> list[tuple[int, str, str]]:
        """Return the complete lines of the journal as `(pid, lease id, event)`, the oldest first.

        The lease id identifies one period in which a process had the lease. The event `write` means
        a line that the process wrote in this period. The event `back` means that the process gave
        the lease back. The event `lost` means that the process lost the lease.
        """
        complete_lines = self.journal.read_text().rpartition("\n")[0].splitlines()
        return [
            (int(pid), f"{pid}.{number}", event)
            for pid, number, event in map(str.split, complete_lines)
        ]

    def holder(self) -> int:
        """Wait until a scheduler process has the scheduler lease, and return its process id."""

        def find_holder() -> int:
            lines = self.lines()
            return lines[-1][0] if lines and lines[-1][2] == "write" else 0

        return self._until(find_holder, "a scheduler decides")

    def until_decided_without(self, *pids: int) -> None:
        """Wait until a process not in `pids` has taken and given back the scheduler lease."""
        line_count = len(self.lines())

        def has_decided() -> bool:
            new_lines = self.lines()[line_count:]
            return any(pid not in pids and event == "back" for pid, _, event in new_lines)

        self._until(has_decided, f"a scheduler decides that is not of {pids}")

    def _until(self, condition: Callable[[], int], description: str) -> int:
        """Wait until a condition returns a true value, and return the value.

        The condition is checked every 3 ms, because a process may have the lease for only a short
        time.

        Raises:
            AssertionError: The condition was not true within `DEADLINE_S`.
        """
        deadline = time.monotonic() + DEADLINE_S
        while not (result := condition()):
            log = self._nursery.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"never: {description}\n{log}"
            time.sleep(0.003)
        return result


def overlaps(lines: list[tuple[int, str, str]]) -> list[str]:
    """Return the ids of leases during which a second process wrote to the journal.

    The list is empty if no two processes had the lease at the same time.

    Args:
        lines: Lines of the journal, as `Schedulers.lines` returns them.
    """
    writers = [lease_id for _, lease_id, event in lines if event == "write"]
    # Merge consecutive lines with the same lease id into one block. If a lease has two blocks,
    # another process wrote lines between them.
    uninterrupted = [lease_id for lease_id, _ in itertools.groupby(writers)]
    return sorted({lease_id for lease_id in uninterrupted if uninterrupted.count(lease_id) > 1})


async def _take_lease_repeatedly(settings: dict[str, Any]) -> None:
    """Take the scheduler lease and write to the journal file, again and again until SIGTERM.

    The settings are those of `Schedulers.start`.
    """
    import httpx
    from prefect.client.orchestration import get_client

    from tasks.queue.lease import LeaseLost, SchedulingLease

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    journal = os.open(settings["journal"], os.O_WRONLY | os.O_APPEND)
    async with get_client() as client:
        times = {"hold_s": settings["hold_s"], "expire_s": settings["expire_s"]}
        lease = SchedulingLease(client, home=Path(settings["home"]), **times)
        for number in itertools.count():

            def write(event: str, number: int = number) -> None:
                os.write(journal, f"{os.getpid()} {number} {event}\n".encode())

            try:
                async with lease.acquire(within_s=_TAKE_WITHIN_S) as holding:
                    for _ in range(settings["writes"] if holding is not None else 0):
                        assert holding is not None
                        holding.check()
                        write("write")
                        await asyncio.sleep(settings["pause_s"])
                if holding is not None:
                    write("back")
            except LeaseLost:
                write("lost")
            except httpx.HTTPError as error:
                print(os.getpid(), repr(error), file=sys.stderr, flush=True)
            await asyncio.sleep(random.uniform(0, 0.01))


def _fork(settings: dict[str, Any]) -> int:
    """Fork a scheduler process with the settings of `Schedulers.start`, and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.close(0)
        os.close(1)
        with suppress(asyncio.CancelledError):
            asyncio.run(_take_lease_repeatedly(settings))
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """Run the nursery process: fork or end scheduler processes, as the requests on stdin say."""
    import prefect.client.orchestration  # noqa: F401

    import tasks.queue.lease  # noqa: F401

    living: set[int] = set()
    for line in sys.stdin:
        match json.loads(line):
            case dict() as settings:
                pid = _fork(settings)
                living.add(pid)
                print(pid, flush=True)
            case pids:
                _end(pids)
                living -= set(pids)
                print(flush=True)
    _end(living)


def _end(pids: Collection[int]) -> None:
    """Send SIGTERM to scheduler processes, and wait for their ends."""
    # The process ids are still valid: the kernel reuses a process id only after the waitpid below
    # has reaped the process.
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
