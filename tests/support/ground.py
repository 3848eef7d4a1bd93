"""A Prefect server, a MUSTER_HOME and what is started on them, as on a host of its own.

Runs are started as users start them: directly (`python -m flows.train`), or through the pool by a
worker. Whatever a test leaves is ended with the ground.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from tasks.processes.identity import host_name
from tasks.processes.ports import PortsReserved
from tasks.server.server import server_command
from tests.support.prefect_api import ask
from tests.support.stage import processes_with

ROOT = Path(__file__).resolve().parents[2]
#: How long anything may take before a test gives up; never waited for in full unless it is broken.
DEADLINE_S = 120.0
FINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})

T = TypeVar("T")


def in_checkout(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec, wherever its file is written, with the checkout as what `cwd` starts from."""
    return {**spec, "cwd": str(ROOT / spec.get("cwd", "."))}


def until(found: Callable[[], T], what: str, within_s: float = DEADLINE_S) -> T:
    """What is found, once it is something. Raises: AssertionError, when it is not in time."""
    deadline = time.monotonic() + within_s
    while not (result := found()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
    return result


def sleepers(*names: str, code: str = "") -> dict[str, Any]:
    """A spec of components that are ready at once and then stay."""
    stay = f"import time\n{code}\nprint('up', flush=True)\ntime.sleep(600)"
    component = {"command": ["python", "-c", stay], "ready": {"log": "up"}, "stop": {"grace_s": 1}}
    components = {name: component for name in names or ("trainer",)}
    return {"name": "trial", "workload": "grpo", "components": components}


class Server:
    """A Prefect server that can be killed, and comes back with the same database and port."""

    def __init__(
        self, home: Path, *, address: str = "127.0.0.1", settings: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            settings: of Prefect, beside those of Muster's own server.
        """
        with closing(PortsReserved(["server"])) as ports:
            self._port = ports.numbers["server"]
        self._home = home
        self._address = address
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.api = f"http://{address}:{self._port}/api"

    def start(self) -> None:
        """Returns: once it answers."""
        self._home.mkdir(parents=True, exist_ok=True)
        command = server_command(self._home, self._port, self._address, self._settings)
        with command.log.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv,
                cwd=command.cwd,
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers, f"{self.api} answers")

    def kill(self) -> None:
        """At once, as by the out-of-memory killer."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health", trust_env=False, timeout=5).is_success
        except httpx.HTTPError:
            return False


@dataclass(kw_only=True)
class Ground:
    """One host, as far as Muster can tell."""

    #: MUSTER_HOME.
    home: Path
    #: Of the Prefect server.
    api: str
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        own = {"MUSTER_HOME": str(self.home), "PREFECT_API_URL": self.api}
        quick = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "0"}
        return {**os.environ, "PREFECT_HOME": str(self.home / "prefect"), **own, **quick}

    def start(self, *arguments: str, log: str) -> subprocess.Popen[bytes]:
        """A Python program of the project."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.home / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_run(self, spec: Mapping[str, Any], *program: str) -> Run:
        """Directly, without a worker; by `python -m flows.train`, unless told otherwise."""
        path = self.home / "spec.yaml"
        self.home.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(in_checkout(spec), sort_keys=False))
        seen = {run["id"] for run in self.flow_runs()}
        self.start(*(program or ("-m", "flows.train")), str(path), log="train")

        def new() -> str:
            return next((run["id"] for run in self.flow_runs() if run["id"] not in seen), "")

        return Run(ground=self, flow_run_id=until(new, f"a flow run; so far:\n{self.log('train')}"))

    def set_up(self) -> None:
        """The work pool and the deployments."""
        done = self.start("-m", "deployments.stack.setup", log="setup").wait(DEADLINE_S)
        assert done == 0, self.log("setup")
        # Its schedule would reconcile in the midst of a test, at each quarter of an hour.
        deployment = self.get("/deployments/name/reconcile/by-worker")["id"]
        ask("PATCH", f"{self.api}/deployments/{deployment}", {"paused": True})

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Returns: once it takes runs."""
        before = self.log("worker").count("started!")
        options = ("--pool", "gang", "--name", host_name(), "--install-policy", "never")
        worker = self.start("-m", "deployments.worker", *options, log="worker")
        until(lambda: self.log("worker").count("started!") > before, "a worker")
        return worker

    def start_upkeep(self) -> subprocess.Popen[bytes]:
        """What reconciles each minute. Returns: once it does."""
        upkeep = self.start("-m", "deployments.upkeep", log="upkeep")
        until(lambda: "is being served" in self.log("upkeep"), "upkeep")
        return upkeep

    def submit(self, spec: Mapping[str, Any], **job_variables: str) -> Run:
        """Through the pool."""
        deployment = self.get("/deployments/name/train/quickstart")["id"]
        flow_run = self.post(
            f"/deployments/{deployment}/create_flow_run",
            parameters={"spec": dict(spec)},
            job_variables=job_variables,
        )
        return Run(ground=self, flow_run_id=flow_run["id"])

    def reconcile(self) -> str:
        """The flow, in a process of its own; its final message."""
        return self._python(
            "from flows.reconcile import reconcile; print(reconcile(return_state=True).message)"
        )

    def reconcile_without_flow(self) -> str:
        """The same, as at the start of a worker; its summary."""
        return self._python(
            "from tasks.upkeep.reconcile import publish, reconcile_host; "
            "report = reconcile_host(); publish(report); print(report.summary)"
        )

    def ask(self, module: str, *arguments: str) -> str:
        """A command of the project; its output."""
        return self._output("-m", module, *arguments)

    def _python(self, code: str) -> str:
        """The last line of its output."""
        return self._output("-c", code).splitlines()[-1]

    def _output(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def get(self, path: str) -> Any:
        return ask("GET", f"{self.api}{path}")

    def post(self, path: str, **content: Any) -> Any:
        return ask("POST", f"{self.api}{path}", content)

    def flow_runs(self) -> list[dict[str, Any]]:
        """Those of the flow `train`."""
        found = self.post("/flow_runs/filter", flows={"name": {"any_": ["train"]}})
        return list(found)

    def artifacts(self) -> list[dict[str, Any]]:
        """Those of reconciles, the oldest first."""
        found = self.post("/artifacts/filter", artifacts={"key": {"any_": ["reconcile"]}})
        return sorted(found, key=lambda artifact: artifact["created"])

    def events(self, flow_run_id: str, name: str = "muster.run.reconciled") -> list[dict[str, Any]]:
        """Those of this name that the server was told of a flow run."""
        wanted = {
            "event": {"name": [name]},
            "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]},
        }
        return list(self.post("/events/filter", filter=wanted)["events"])

    def clear(self) -> None:
        """End what is left."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                # A worker leaves once it has nothing under way, which a test need not wait for.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
        for pid in processes_with("MUSTER_HOME", str(self.home)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def host_with_worker(server_home: Path, home: Path) -> Iterator[Ground]:
    """A host with a worker, on a server of its own; nothing of either is left after it."""
    server = Server(server_home)
    ground = Ground(home=home, api=server.api)
    try:
        server.start()
        ground.set_up()
        ground.start_worker()
        yield ground
    finally:
        ground.clear()
        server.kill()


@dataclass(kw_only=True)
class Run:
    """One run of a ground, seen from outside."""

    ground: Ground
    flow_run_id: str
    _name: str = ""

    @property
    def name(self) -> str:
        """The flow run's, asked once the run has begun: the server need not answer after that."""
        if not self._name:
            name = str(self.flow_run()["name"])
            if not (self.ground.home / "runs" / name).exists():
                return name
            self._name = name
        return self._name

    def flow_run(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ground.get(f"/flow_runs/{self.flow_run_id}")
        return found

    def state(self) -> tuple[str, str]:
        """Type and message, on the server."""
        state = self.flow_run()["state"]
        return state["type"], state["message"] or ""

    def record_path(self) -> Path:
        return self.ground.home / "runs" / self.name / "run.json"

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.record_path().read_text())
        return found

    def events(self) -> list[dict[str, Any]]:
        path = self.record_path().parent / "attempt-01" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def is_running(self) -> bool:
        kind, message = self.state()
        assert kind not in FINAL, (kind, message)
        return kind == "RUNNING" and message.startswith("running:")

    def until_running(self) -> Run:
        """All of its components are ready, and the server has been told."""
        until(self.is_running, f"{self.flow_run_id} runs")
        assert self.name and self._name
        return self

    def until_state(self, *types: str) -> str:
        """The message of the state."""
        until(lambda: self.state()[0] in types, f"{self.flow_run_id} is {' or '.join(types)}")
        return self.state()[1]

    def flow_pid(self) -> int:
        """Of the process that supervises it."""
        path = self.ground.home / "live" / self.name / "owner.json"
        return int(json.loads(path.read_text())["process"]["pid"])

    def pids(self) -> list[int]:
        """What belongs to its components, guardians included; the flow process not."""
        return processes_with("MUSTER_RUN_ID", self.name)

    def kill_flow(self) -> None:
        os.kill(self.flow_pid(), signal.SIGKILL)

    def processes(self) -> list[int]:
        """What a worker has started for it, with what came of that and kept its environment."""
        return processes_with("PREFECT__FLOW_RUN_ID", self.flow_run_id)

    def until_gone(self) -> None:
        until(lambda: not self.pids(), f"nothing is left of {self.name}")
