"""A supervising process under an independent oracle, for tests that kill it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.processes import tree
from tasks.processes.component import ComponentPlan
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tests.support.stage import DEADLINE_S, processes_with
from tests.support.supervising import Part

_ROOT = Path(__file__).parents[2]
_ORACLE = Path(__file__).with_name("oracle.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony:
    """What the oracle saw."""

    #: Of the supervising process; negative for a signal.
    exit_code: int
    #: Processes that outlived it until the deadline: `PID COMMAND`.
    left: tuple[str, ...]
    #: From its end to an empty tree; -1 where it never was.
    empty_after_s: float
    #: When the tree was empty, UTC epoch seconds; 0 where it never was.
    empty_at: float
    #: Whose word it is: `ECHILD`, and `populated` where there was a cgroup to look at.
    oracles: tuple[str, ...]
    #: Cgroups that were still there.
    cgroups: tuple[str, ...]


class Witness:
    """A supervising process, what it says, and what the oracle says of it."""

    def __init__(
        self,
        directory: Path,
        *components: ComponentPlan,
        run_id: str = "",
        oddity: str = "",
        at: str = "",
        level: str = "",
        gates: tuple[str, ...] = (),
        record_bytes: int = 0,
        wrapper: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        deadline_s: float = 30.0,
        **more: Any,
    ) -> None:
        """
        Args:
            run_id: a new one by default.
            oddity: one of `supervising.ODDITIES`; with `at`, `level`, `gates` and `record_bytes`
                see its `Part`.
            wrapper: a command that executes the rest of its command line.
            env: of the supervising process, beside this one's; its MUSTER_HOME is `home` in the
                directory.
            deadline_s: how long the oracle waits for an empty tree.
        """
        self._testimony: Testimony | None = None
        self.directory = directory
        self.home = Path((env or {}).get("MUSTER_HOME", directory / "home"))
        self.run_id = run_id or f"run-{os.urandom(4).hex()}"
        plan = {"run_id": self.run_id, "number": 1, "cwd": directory, "components": components}
        part = Part(
            plan={**plan, **more},
            oddity=oddity,
            at=at,
            level=level,
            gates=gates,
            record_bytes=record_bytes,
        )
        (directory / "part.pickle").write_bytes(pickle.dumps(part))
        program = [*wrapper, sys.executable, "-m", "tests.support.supervising", str(directory)]
        with (directory / "supervising.log").open("wb") as log:
            self._oracle = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_ORACLE), str(deadline_s), *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env={**os.environ, "MUSTER_HOME": str(self.home), **(env or {})},
                text=True,
            )
        assert self._oracle.stdout is not None
        #: Of the supervising process.
        self.pid = int(self._oracle.stdout.readline().split()[1])

    def events(self) -> list[dict[str, Any]]:
        try:
            lines = (self.directory / "events.jsonl").read_text().split("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1]]

    def seen(self, name: str, component: str | None = None) -> list[dict[str, Any]]:
        return [
            event
            for event in self.events()
            if event["event"] == name and component in (None, event.get("component"))
        ]

    def until(self, name: str, component: str | None = None) -> dict[str, Any]:
        """Wait for an event; the first one of its kind."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := self.seen(name, component)):
            assert time.monotonic() < deadline, f"no {name} of {component}: {self.said()}"
            time.sleep(0.005)
        return found[0]

    def said(self) -> str:
        """What it wrote to stderr, a traceback for example."""
        return (self.directory / "supervising.log").read_text()

    def state(self) -> str:
        """Of the supervising process: `T` while it is stopped. Source: proc_pid_stat(5)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]

    def is_there(self) -> bool:
        """Whether the supervising process lives; seen without the oracle."""
        try:
            # One whose threads are still ending shows Z.
            return self.state() not in "ZX" or len(os.listdir(f"/proc/{self.pid}/task")) > 1
        except (FileNotFoundError, ProcessLookupError):
            return False

    def tree(self) -> list[int]:
        """The supervising process and all that is below the oracle."""
        return tree.descendants(self._oracle.pid)

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, signum)

    def end(self) -> None:
        """End the run as cancelled; again: without grace."""
        assert self._oracle.stdin is not None
        self._oracle.stdin.write("stop\n")
        self._oracle.stdin.flush()

    def testimony(self) -> Testimony:
        """Wait until the supervising process has ended, and its tree is empty or never will be;
        any number of times."""
        if self._testimony is not None:
            return self._testimony
        assert self._oracle.stdout is not None
        try:
            self._oracle.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"goes on; events: {self.events()}; {self.said()}") from None
        lines = [line.partition(" ") for line in self._oracle.stdout]
        [exit_code] = [int(rest) for word, _, rest in lines if word == "ended"]
        left = tuple(rest.strip() for word, _, rest in lines if word == "left")
        empty = [rest.split() for word, _, rest in lines if word == "empty"] or [["-1", "0"]]
        after_s, at = map(float, empty[0])
        self._testimony = Testimony(
            exit_code=exit_code,
            left=left,
            empty_after_s=after_s,
            empty_at=at,
            oracles=tuple(
                name for word, _, rest in lines if word == "oracles" for name in rest.split()
            ),
            cgroups=tuple(rest.strip() for word, _, rest in lines if word == "cgroup"),
        )
        return self._testimony

    def verdict(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory / "verdict.json").read_text())
        return content

    def record(self) -> RunJson:
        return RunJson.read(RunPlace.of(self.run_id, self.home).record)

    def processes_of_run(self) -> list[int]:
        """What carries the run's id in its environment."""
        return processes_with("MUSTER_RUN_ID", self.run_id)

    def clear(self) -> None:
        """End what a test that failed has left."""
        if self._oracle.poll() is None:
            # It has not been reaped by the oracle yet, so the number is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            (self.directory / "release").touch()
            with contextlib.suppress(AssertionError):
                self.testimony()
        for pipe in (self._oracle.stdin, self._oracle.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def bystander() -> Iterator[tuple[int, ...]]:
    """A process tree that has nothing to do with any run: its pids."""
    with subprocess.Popen(
        ["sh", "-c", "setsid sleep 601 & echo $!; exec sleep 602"],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": os.environ["PATH"]},
    ) as leader:
        assert leader.stdout is not None
        pids = (leader.pid, int(leader.stdout.readline()))
        try:
            yield pids
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
