"""The process of a flow run under an independent oracle, for tests that kill it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.processes import tree
from tasks.processes.component import ComponentPlan
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tests.support.forkserver import ForkServer
from tests.support.prefect_api import ask
from tests.support.stage import DEADLINE_S, processes_with
from tests.support.supervising import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony:
    """What the oracle saw."""

    #: Of the flow process; negative for a signal.
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
    """A flow process, what it says, and what the oracle and the Prefect server say of it."""

    def __init__(
        self,
        forkserver: ForkServer,
        directory: Path,
        *components: ComponentPlan,
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
            oddity: one of `supervising.ODDITIES`; with `at`, `level`, `gates` and `record_bytes`
                see its `Part`.
            wrapper: a command that executes the rest of its command line.
            env: of the flow process, beside this one's; its MUSTER_HOME is `home` in the
                directory.
            deadline_s: how long the oracle waits for an empty tree.
        """
        self._testimony: Testimony | None = None
        self._forkserver = forkserver
        self.directory = directory
        self.home = Path((env or {}).get("MUSTER_HOME", directory / "home"))
        self._part = Part(
            plan={"cwd": directory, "components": components, **more},
            oddity=oddity,
            at=at,
            level=level,
            gates=gates,
            record_bytes=record_bytes,
        )
        (directory / "part.pickle").write_bytes(pickle.dumps(self._part))
        self._oracle = forkserver.start(
            "supervising",
            *(str(deadline_s), str(directory), *wrapper),
            env={"MUSTER_HOME": str(self.home), **(env or {})},
            stderr=directory / "supervising.log",
        )
        #: Of the flow process.
        self.pid = int(self._oracle.stdout.readline().split()[1])

    @property
    def run_id(self) -> str:
        found: str = self.until("run.opened")["run_id"]
        return found

    def flow_run(self) -> dict[str, Any]:
        """By its Prefect server."""
        of_run = {"flow_runs": {"name": {"any_": [self.run_id]}}}
        [found] = ask("POST", f"{self._forkserver.api}/flow_runs/filter", of_run)
        flow_run: dict[str, Any] = found
        return flow_run

    def reconcile(self) -> dict[str, Any]:
        """What `tests.support.reconciling` did, in a process of its own."""
        log = self.directory / "reconciling.log"
        env = {"MUSTER_HOME": str(self.home)}
        process = self._forkserver.start("reconciling", env=env, stderr=log)
        try:
            assert process.has_ended(DEADLINE_S), log.read_text()
            said = process.stdout.read()
            assert said, log.read_text()
            done: dict[str, Any] = json.loads(said)
            return done
        finally:
            process.clear()

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
        """Of the flow process: `T` while it is stopped. Source: proc_pid_stat(5)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]

    def is_there(self) -> bool:
        """Whether anything of the flow process is there, until the oracle has reaped it: while its
        first thread is a zombie, others may still hold its files."""
        return Path(f"/proc/{self.pid}").exists()

    def tree(self) -> list[int]:
        """The flow process and all that is below the oracle."""
        return tree.descendants(self._oracle.pid)

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, signum)

    def end(self) -> None:
        """End the run as cancelled; again: without grace."""
        if self._part.oddity == "signals-blocked":
            state = {"type": "CANCELLING"}
            url = f"{self._forkserver.api}/flow_runs/{self.flow_run()['id']}/set_state"
            ask("POST", url, {"state": state})
        else:
            self.kill(signal.SIGTERM)

    def testimony(self) -> Testimony:
        """Wait until the flow process has ended, and its tree is empty or never will be; any number
        of times."""
        if self._testimony is not None:
            return self._testimony
        ended = self._oracle.has_ended(DEADLINE_S)
        assert ended, f"goes on; events: {self.events()}; {self.said()}"
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
        """End what a test that failed has left, and have the server forget the flow run."""
        if not self._oracle.has_ended():
            # It has not been reaped by the oracle yet, so the number is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            (self.directory / "release").touch()
            with contextlib.suppress(AssertionError):
                self.testimony()
        self._oracle.clear()
        if self.seen("run.opened"):
            ask("DELETE", f"{self._forkserver.api}/flow_runs/{self.flow_run()['id']}")


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
