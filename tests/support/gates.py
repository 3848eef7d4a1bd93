"""Gates that do nothing but decide: real processes, which may be killed and suspended.

They are forked from a process that has imported all they need, so that a new one costs nothing:

    python -m tests.support.gates < a JSON value a line: what to fork, or the pids that are to end
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

from tests.support.ground import DEADLINE_S, ROOT

#: How long a gate asks for the lease, before it asks anew.
_WITHIN_S = 1.0


class Nursery:
    """The process from which gates are forked."""

    def __init__(self, api: str, log: Path) -> None:
        """
        Args:
            api: of their Prefect server.
        """
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.gates"],
                cwd=ROOT,
                env={**os.environ, "PREFECT_API_URL": api},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def fork(self, asked: dict[str, Any]) -> int:
        return int(self._say(asked))

    def end(self, pids: list[int]) -> None:
        """By a SIGTERM; also those that are suspended, or dead already."""
        self._say(pids)

    def close(self) -> None:
        self._process.communicate(timeout=DEADLINE_S)

    def _say(self, what: Any) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()


class Gates:
    """Some gates of one Prefect server, and the journal that all of them write."""

    def __init__(self, directory: Path, nursery: Nursery) -> None:
        self._directory = directory
        self._nursery = nursery
        self._pids: list[int] = []
        self.journal = directory / "journal"
        self.journal.touch()

    @staticmethod
    @contextmanager
    def of(directory: Path, nursery: Nursery) -> Iterator[Gates]:
        """All of them end with the context."""
        gates = Gates(directory, nursery)
        try:
            yield gates
        finally:
            nursery.end(gates._pids)

    def start(
        self,
        host: str = "here",
        *,
        hold_s: float = 10.0,
        expire_s: float = 15.0,
        writes: int = 4,
        pause_s: float = 0.01,
    ) -> int:
        """The pid of a gate that takes the lease again and again, until a SIGTERM.

        Args:
            host: those of one host share a MUSTER_HOME.
            writes: so many while it has the lease, with as long a pause after each.
        """
        asked: dict[str, Any] = {
            **{"home": str(self._directory / host), "journal": str(self.journal)},
            **{"hold_s": hold_s, "expire_s": expire_s, "writes": writes, "pause_s": pause_s},
        }
        self._pids.append(self._nursery.fork(asked))
        return self._pids[-1]

    def lines(self) -> list[tuple[int, str, str]]:
        """`(pid, taking, what)`, in the order in which they were written."""
        whole = self.journal.read_text().rpartition("\n")[0].splitlines()
        return [(int(pid), f"{pid}.{n}", what) for pid, n, what in map(str.split, whole)]

    def holder(self) -> int:
        """The pid of a gate that has just written and has not yet given back."""

        def found() -> int:
            lines = self.lines()
            return lines[-1][0] if lines and lines[-1][2] == "write" else 0

        return self._until(found, "a gate decides")

    def until_decided_without(self, *pids: int) -> None:
        """Wait until a gate has gone through that is none of these, from now on."""
        seen = len(self.lines())

        def found() -> bool:
            new = self.lines()[seen:]
            return any(pid not in pids and what == "back" for pid, _taking, what in new)

        self._until(found, f"a gate decides that is not of {pids}")

    def _until(self, found: Callable[[], int], what: str) -> int:
        """Looks more often than a gate takes to decide."""
        deadline = time.monotonic() + DEADLINE_S
        while not (result := found()):
            log = self._nursery.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"never: {what}\n{log}"
            time.sleep(0.003)
        return result


def overlaps(lines: list[tuple[int, str, str]]) -> list[str]:
    """Takings into which another gate has written: two had the lease at once."""
    writers = [taking for _pid, taking, what in lines if what == "write"]
    runs = [taking for taking, _group in itertools.groupby(writers)]
    return sorted({taking for taking in runs if runs.count(taking) > 1})


async def _decide(asked: dict[str, Any]) -> None:
    import httpx
    from prefect.client.orchestration import get_client

    from tasks.queue.lease import GateLease, LeaseLost

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    journal = os.open(asked["journal"], os.O_WRONLY | os.O_APPEND)
    async with get_client() as client:
        times = {"hold_s": asked["hold_s"], "expire_s": asked["expire_s"]}
        lease = GateLease(client, home=Path(asked["home"]), **times)
        for number in itertools.count():

            def write(what: str, number: int = number) -> None:
                os.write(journal, f"{os.getpid()} {number} {what}\n".encode())

            try:
                async with lease.held(within_s=_WITHIN_S) as holding:
                    for _ in range(asked["writes"] if holding is not None else 0):
                        assert holding is not None
                        holding.check()
                        write("write")
                        await asyncio.sleep(asked["pause_s"])
                if holding is not None:
                    write("back")
            except LeaseLost:
                write("lost")
            except httpx.HTTPError as error:
                print(os.getpid(), repr(error), file=sys.stderr, flush=True)
            await asyncio.sleep(random.uniform(0, 0.01))


def _fork(asked: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.close(0)
        os.close(1)
        with suppress(asyncio.CancelledError):
            asyncio.run(_decide(asked))
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    import prefect.client.orchestration  # noqa: F401

    import tasks.queue.lease  # noqa: F401

    living: set[int] = set()
    for line in sys.stdin:
        match json.loads(line):
            case dict() as asked:
                living.add(pid := _fork(asked))
                print(pid, flush=True)
            case pids:
                _end(pids)
                living -= set(pids)
                print(flush=True)
    _end(living)


def _end(pids: Collection[int]) -> None:
    # Nobody reaps them before, so each pid is still its own.
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
