"""Start a flow process under an independent oracle, for tests that kill the flow process."""

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
from tests.support.prefect_api import send_request
from tests.support.supervised_components import DEADLINE_S, processes_with
from tests.support.supervising import FlowInstructions


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleResult:
    """The result of the oracle: how a flow process and its descendants ended.

    The oracle is a process that checks through the kernel whether descendants survive.
    """

    #: Exit code of the flow process. If a signal killed the process, the negative signal number.
    exit_code: int
    #: `PID COMMAND` of each descendant of the flow process that was alive at the deadline, some
    #: seconds after the end of the flow process.
    left: tuple[str, ...]
    #: Seconds from the end of the flow process to the end of its last descendant. -1 if a process
    #: was alive at the deadline.
    empty_after_s: float
    #: Time at which the last descendant ended, in UTC epoch seconds. 0 if a process was alive at
    #: the deadline.
    empty_at: float
    #: Kernel interfaces that confirmed that no process survived. "ECHILD": waitpid(2) found no
    #: child. "populated": the file cgroup.events of the run's cgroup, if the run had a cgroup.
    oracles: tuple[str, ...]
    #: Paths of the cgroups that the flow process created but did not remove.
    cgroups: tuple[str, ...]


class ObservedFlow:
    """A flow process that a test may kill.

    The parent of the flow process is another process, the oracle. The oracle checks whether
    descendants survive the flow process.
    """

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
        **fields: Any,
    ) -> None:
        """Start the flow process as a child of an oracle, which checks for surviving descendants.

        Args:
            forkserver: Starts the process of the oracle.
            directory: Directory for the files of the flow process.
            *components: Components of the run.
            oddity: Name of an unusual condition of the flow process, a key of
                `supervising.CONDITIONS`.
            at: Moment at which the condition begins, as in `supervising.FlowInstructions`.
            level: Highest containment level to use: `L2`, `L3` or `L4`. Empty for the normal level.
            gates: Names of the components whose start waits until the test creates a file.
            record_bytes: Number of bytes that are added to the record file of the run.
            wrapper: Command prefix of the flow process, for example `unshare` with its options.
            env: Environment variables of the flow process, in addition to the variables of the
                test. If MUSTER_HOME is not set, it is the folder `home` in `directory`.
            deadline_s: Seconds that descendants may survive the flow process.
            **fields: Further fields of the `AttemptPlan`.
        """
        self._testimony: OracleResult | None = None
        self._forkserver = forkserver
        self.directory = directory
        self.home = Path((env or {}).get("MUSTER_HOME", directory / "home"))
        self._part = FlowInstructions(
            plan={"cwd": directory, "components": components, **fields},
            oddity=oddity,
            at=at,
            level=level,
            gates=gates,
            record_bytes=record_bytes,
        )
        (directory / "part.pickle").write_bytes(pickle.dumps(self._part))
        self._oracle = forkserver.start(
            "supervising",
            str(deadline_s),
            str(directory),
            *wrapper,
            env={"MUSTER_HOME": str(self.home), **(env or {})},
            stderr=directory / "supervising.log",
        )
        #: Process id of the flow process.
        self.pid = int(self._oracle.stdout.readline().split()[1])

    @property
    def run_id(self) -> str:
        """Id of the run. Available after the flow process has emitted the event `run.opened`."""
        run_id: str = self.wait_for_event("run.opened")["run_id"]
        return run_id

    def flow_run(self) -> dict[str, Any]:
        """Return the run's flow run as JSON, from the Prefect server."""
        with_name = {"flow_runs": {"name": {"any_": [self.run_id]}}}
        flow_run: dict[str, Any]
        [flow_run] = send_request("POST", f"{self._forkserver.api}/flow_runs/filter", with_name)
        return flow_run

    def reconcile(self) -> dict[str, Any]:
        """Clean up the runs whose flow process has died; return `{RUN ID: RESULT}`.

        A new process with the program `tests.support.reconciling` does the clean-up. The docstring
        of the program describes the results.
        """
        log = self.directory / "reconciling.log"
        env = {"MUSTER_HOME": str(self.home)}
        process = self._forkserver.start("reconciling", env=env, stderr=log)
        try:
            assert process.has_ended(DEADLINE_S), log.read_text()
            output = process.stdout.read()
            assert output, log.read_text()
            results: dict[str, Any] = json.loads(output)
            return results
        finally:
            process.clear()

    def events(self) -> list[dict[str, Any]]:
        """Return the events that the flow process has emitted, the oldest first."""
        try:
            lines = (self.directory / "events.jsonl").read_text().split("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1]]

    def list_events(self, name: str, component: str | None = None) -> list[dict[str, Any]]:
        """Return the events with this name, of one component or of all components."""
        return [
            event
            for event in self.events()
            if event["event"] == name and component in (None, event.get("component"))
        ]

    def wait_for_event(self, name: str, component: str | None = None) -> dict[str, Any]:
        """Wait for an event with this name, and return the first of these events."""
        deadline = time.monotonic() + DEADLINE_S
        while not (events := self.list_events(name, component)):
            assert time.monotonic() < deadline, f"no {name} of {component}: {self.read_stderr()}"
            time.sleep(0.005)
        return events[0]

    def read_stderr(self) -> str:
        """Return the output of the flow process to stderr, for example a traceback."""
        return (self.directory / "supervising.log").read_text()

    def state(self) -> str:
        """Return the kernel's letter for the state of the flow process, such as `T` (stopped).

        Source: proc_pid_stat(5).
        """
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]

    def exists(self) -> bool:
        """Return True until the oracle process has reaped the flow process.

        A flow process whose main thread is a zombie still exists, because its other threads may
        hold files.
        """
        return Path(f"/proc/{self.pid}").exists()

    def list_descendants(self) -> list[int]:
        """Return the process ids of the flow process and of all its descendants.

        All these processes are descendants of the oracle process, which observes the flow process.
        """
        return tree.descendants(self._oracle.pid)

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the flow process."""
        os.kill(self.pid, signum)

    def end(self) -> None:
        """Cancel the run."""
        if self._part.oddity == "signals-blocked":
            state = {"type": "CANCELLING"}
            url = f"{self._forkserver.api}/flow_runs/{self.flow_run()['id']}/set_state"
            send_request("POST", url, {"state": state})
        else:
            self.kill(signal.SIGTERM)

    def oracle_result(self) -> OracleResult:
        """Return the exit code of the flow process, and the descendants that survived.

        The oracle is the parent of the flow process and adopts its orphans. The method waits until
        the flow process and all descendants have ended, or until a deadline. Further calls return
        the same result.
        """
        if self._testimony is not None:
            return self._testimony
        has_ended = self._oracle.has_ended(DEADLINE_S)
        assert has_ended, f"goes on; events: {self.events()}; {self.read_stderr()}"

        values: dict[str, list[str]] = {}
        for line in self._oracle.stdout:
            word, _, rest = line.partition(" ")
            values.setdefault(word, []).append(rest.strip())
        [exit_code] = values["ended"]
        [empty] = values.get("empty", ["-1 0"])
        empty_after_s, empty_at = map(float, empty.split())
        self._testimony = OracleResult(
            exit_code=int(exit_code),
            left=tuple(values.get("left", ())),
            empty_after_s=empty_after_s,
            empty_at=empty_at,
            oracles=tuple(name for names in values.get("oracles", ()) for name in names.split()),
            cgroups=tuple(values.get("cgroup", ())),
        )
        return self._testimony

    def verdict(self) -> dict[str, Any]:
        """Return the verdict that the flow process wrote before its end.

        The verdict has the final state of the attempt, the failure and a message.
        """
        content: dict[str, Any] = json.loads((self.directory / "verdict.json").read_text())
        return content

    def record(self) -> RunJson:
        """Return the record of the run."""
        return RunJson.read(RunPlace.of(self.run_id, self.home).record)

    def processes_of_run(self) -> list[int]:
        """Return the ids of the processes whose variable MUSTER_RUN_ID is the id of this run."""
        return processes_with("MUSTER_RUN_ID", self.run_id)

    def clear(self) -> None:
        """Kill the processes that a failed test did not stop, and delete the flow run."""
        if not self._oracle.has_ended():
            # The flow process is not reaped yet, so no other process can have the same pid.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            (self.directory / "release").touch()
            with contextlib.suppress(AssertionError):
                self.oracle_result()
        self._oracle.clear()
        if self.list_events("run.opened"):
            send_request("DELETE", f"{self._forkserver.api}/flow_runs/{self.flow_run()['id']}")


@contextlib.contextmanager
def run_unrelated_processes() -> Iterator[tuple[int, ...]]:
    """Start two processes that belong to no run, yield their pids, and kill them afterwards.

    Muster must not stop these two processes.
    """
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
