"""A test environment that simulates one host: a Prefect server, a MUSTER_HOME, and programs.

Tests start runs in the ways of users: directly by `python -m flows.train`, or through a work pool
and a worker. `HostEnvironment.clear` ends all programs that a test leaves behind.
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
from tasks.server.server import make_server_command
from tests.support.prefect_api import send_request
from tests.support.supervised_components import processes_with

ROOT = Path(__file__).resolve().parents[2]
#: Time limit of every wait, in seconds. Only failing tests wait that long.
DEADLINE_S = 120.0
#: Types of final states of a flow run.
FINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})

T = TypeVar("T")


def with_absolute_cwd(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with an absolute `cwd`. A relative `cwd` starts at the root of the project.

    Then a test can store the spec in a file of any folder.
    """
    return {**spec, "cwd": str(ROOT / spec.get("cwd", "."))}


def wait_for(found: Callable[[], T], what: str, within_s: float = DEADLINE_S) -> T:
    """Call a function until it returns a true value, and return the value.

    Args:
        found: Function that is called every 0.1 s.
        what: Description of the value, for the error message.
        within_s: Time limit in seconds.

    Raises:
        AssertionError: The function returned no true value within the time limit.
    """
    deadline = time.monotonic() + within_s
    while not (result := found()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
    return result


def make_sleeping_spec(*names: str, code: str = "") -> dict[str, Any]:
    """Return a spec whose components are ready at once and then sleep for 10 minutes.

    Args:
        *names: Names of the components. Default: `trainer`.
        code: Python code that each component executes first.
    """
    program = f"import time\n{code}\nprint('up', flush=True)\ntime.sleep(600)"
    component = {
        "command": ["python", "-c", program],
        "ready": {"log": "up"},
        "stop": {"grace_s": 1},
    }
    components = {name: component for name in names or ("trainer",)}
    return {"name": "trial", "workload": "grpo", "components": components}


class Server:
    """A Prefect server that a test can kill and start again with the same database and port."""

    def __init__(
        self, home: Path, *, address: str = "127.0.0.1", settings: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            home: Directory of the server's files.
            address: Address on which the server listens.
            settings: Settings of Prefect, in addition to the settings of Muster's own server.
        """
        with closing(PortsReserved(["server"])) as ports:
            self._port = ports.numbers["server"]
        self._home = home
        self._address = address
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.api = f"http://{address}:{self._port}/api"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self._home.mkdir(parents=True, exist_ok=True)
        command = make_server_command(self._home, self._port, self._address, self._settings)
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
        wait_for(self._answers, f"{self.api} answers")

    def kill(self) -> None:
        """Kill the server by SIGKILL, as the out-of-memory killer of the kernel does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        """Return True if the server answers its health check."""
        try:
            return httpx.get(f"{self.api}/health", trust_env=False, timeout=5).is_success
        except httpx.HTTPError:
            return False


@dataclass(kw_only=True)
class HostEnvironment:
    """A simulated host with its own MUSTER_HOME, on which tests start programs of the project."""

    #: MUSTER_HOME of the host.
    home: Path
    #: URL of the Prefect server's API.
    api: str
    #: Environment variables that the host's programs get in addition to the variables in `env`.
    extra_env: dict[str, str] = field(default_factory=dict)
    #: Programs that the test has started on the host.
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of all programs of the host."""
        return {
            **os.environ,
            "PREFECT_HOME": str(self.home / "prefect"),
            "MUSTER_HOME": str(self.home),
            "PREFECT_API_URL": self.api,
            # With these intervals, a worker starts a run within about a second.
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_PREFETCH_SECONDS": "0",
            **self.extra_env,
        }

    def start(self, *arguments: str, log: str) -> subprocess.Popen[bytes]:
        """Start a Python program of the project on the host, and return its process.

        Args:
            *arguments: Arguments of the Python interpreter.
            log: Name of the log file for stdout and stderr, without `.log`.
        """
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
        """Return the text of a log file of the host, or an empty string if there is no file."""
        path = self.home / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_run(self, spec: Mapping[str, Any], *program: str) -> Run:
        """Start a run without a worker, and return it when its flow run exists.

        Args:
            spec: Spec of the run.
            *program: Arguments of the Python interpreter before the path of the spec's file.
                Default: `-m flows.train`.
        """
        path = self.home / "spec.yaml"
        self.home.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(with_absolute_cwd(spec), sort_keys=False))
        earlier_ids = {run["id"] for run in self.flow_runs()}
        self.start(*(program or ("-m", "flows.train")), str(path), log="train")

        def find_new_id() -> str:
            ids = (run["id"] for run in self.flow_runs())
            return next((id_ for id_ in ids if id_ not in earlier_ids), "")

        description = f"a flow run; so far:\n{self.log('train')}"
        return Run(host_env=self, flow_run_id=wait_for(find_new_id, description))

    def set_up(self) -> None:
        """Create the work pool and the deployments on the Prefect server."""
        exit_code = self.start("-m", "deployments.stack.setup", log="setup").wait(DEADLINE_S)
        assert exit_code == 0, self.log("setup")
        # Pause the deployment. Otherwise its schedule would run the flow `reconcile` every 15
        # minutes, also in the middle of a test.
        deployment = self.get("/deployments/name/reconcile/by-worker")["id"]
        send_request("PATCH", f"{self.api}/deployments/{deployment}", {"paused": True})

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker, and wait until it accepts runs."""
        earlier_starts = self.log("worker").count("started!")
        options = ("--pool", "gang", "--name", host_name(), "--install-policy", "never")
        worker = self.start("-m", "deployments.worker", *options, log="worker")
        wait_for(lambda: self.log("worker").count("started!") > earlier_starts, "a worker")
        return worker

    def start_upkeep(self) -> subprocess.Popen[bytes]:
        """Start the upkeep process, and wait until it is ready.

        The upkeep process runs the flow `reconcile` every minute.
        """
        upkeep = self.start("-m", "deployments.upkeep", log="upkeep")
        wait_for(lambda: "is being served" in self.log("upkeep"), "upkeep")
        return upkeep

    def submit(self, spec: Mapping[str, Any], **job_variables: str) -> Run:
        """Submit a run to the work pool, and return it.

        Args:
            spec: Spec of the run.
            **job_variables: Job variables of the flow run.
        """
        deployment = self.get("/deployments/name/train/quickstart")["id"]
        flow_run = self.post(
            f"/deployments/{deployment}/create_flow_run",
            parameters={"spec": dict(spec)},
            job_variables=job_variables,
        )
        return Run(host_env=self, flow_run_id=flow_run["id"])

    def reconcile(self) -> str:
        """Run the flow `reconcile` in a new process, and return the message of its final state.

        The flow finds runs whose flow process has died, and ends their leftover processes.
        """
        return self._python(
            "from flows.reconcile import reconcile; print(reconcile(return_state=True).message)"
        )

    def reconcile_without_flow(self) -> str:
        """Clean up the lost runs of the host without the flow `reconcile`; return the summary.

        A worker does the same when it starts. A lost run is a run whose flow process has died.
        """
        return self._python(
            "from tasks.upkeep.reconcile import publish, reconcile_host; "
            "report = reconcile_host(); publish(report); print(report.summary)"
        )

    def run_module(self, module: str, *arguments: str) -> str:
        """Run a module of the project as a program, and return its stdout."""
        return self._run_python("-m", module, *arguments)

    def _python(self, code: str) -> str:
        """Run Python code in a new process, and return the last line of its stdout."""
        return self._run_python("-c", code).splitlines()[-1]

    def _run_python(self, *arguments: str) -> str:
        """Run the Python interpreter with these arguments, and return its stdout.

        Raises:
            AssertionError: The program failed.
        """
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def get(self, path: str) -> Any:
        """Send a GET request to the Prefect server's API, and return the JSON of the answer."""
        return send_request("GET", f"{self.api}{path}")

    def post(self, path: str, **content: Any) -> Any:
        """Send a POST request to the Prefect server's API, and return the JSON of the answer."""
        return send_request("POST", f"{self.api}{path}", content)

    def flow_runs(self) -> list[dict[str, Any]]:
        """Return the flow runs of the flow `train`."""
        flow_runs = self.post("/flow_runs/filter", flows={"name": {"any_": ["train"]}})
        return list(flow_runs)

    def artifacts(self) -> list[dict[str, Any]]:
        """Return the artifacts of the flow `reconcile`, the oldest first."""
        artifacts = self.post("/artifacts/filter", artifacts={"key": {"any_": ["reconcile"]}})
        return sorted(artifacts, key=lambda artifact: artifact["created"])

    def events(self, flow_run_id: str, name: str = "muster.run.reconciled") -> list[dict[str, Any]]:
        """Return a flow run's events with the name `name`, as stored on the Prefect server."""
        event_filter = {
            "event": {"name": [name]},
            "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]},
        }
        return list(self.post("/events/filter", filter=event_filter)["events"])

    def clear(self) -> None:
        """End all programs that were started on the host, and their leftover processes."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                # A worker waits for its runs before it ends. 10 s are enough for a test.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
        for pid in processes_with("MUSTER_HOME", str(self.home)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def host_with_worker(server_home: Path, home: Path) -> Iterator[HostEnvironment]:
    """Start a Prefect server, and a host with a worker, while the context is open.

    Args:
        server_home: Directory for the files of the server.
        home: MUSTER_HOME of the host.
    """
    server = Server(server_home)
    host_env = HostEnvironment(home=home, api=server.api)
    try:
        server.start()
        host_env.set_up()
        host_env.start_worker()
        yield host_env
    finally:
        host_env.clear()
        server.kill()


@dataclass(kw_only=True)
class Run:
    """A run of a simulated host, observed through the Prefect server and through its files."""

    #: Simulated host on which the process of the run was started.
    host_env: HostEnvironment
    flow_run_id: str
    #: Name of the flow run. Empty until the property `name` stores it.
    _name: str = ""

    @property
    def name(self) -> str:
        """Name of the flow run.

        The name may change until the run has a directory. From then on, this object stores the
        name, so that a test can read the name even while the Prefect server is stopped.
        """
        if not self._name:
            name = str(self.flow_run()["name"])
            if not (self.host_env.home / "runs" / name).exists():
                return name
            self._name = name
        return self._name

    def flow_run(self) -> dict[str, Any]:
        """Return the run's flow run as JSON, from the Prefect server."""
        flow_run: dict[str, Any] = self.host_env.get(f"/flow_runs/{self.flow_run_id}")
        return flow_run

    def state(self) -> tuple[str, str]:
        """Return the type and the message of the flow run's state on the Prefect server."""
        state = self.flow_run()["state"]
        return state["type"], state["message"] or ""

    def record_path(self) -> Path:
        """Return the path of the run's record file, `run.json`."""
        return self.host_env.home / "runs" / self.name / "run.json"

    def record(self) -> dict[str, Any]:
        """Return the content of the run's record file, `run.json`."""
        record: dict[str, Any] = json.loads(self.record_path().read_text())
        return record

    def events(self) -> list[dict[str, Any]]:
        """Return the events in `events.jsonl` of the first attempt."""
        path = self.record_path().parent / "attempt-01" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def is_running(self) -> bool:
        """Return True if the run's state on the Prefect server says that all components are ready.

        Raises:
            AssertionError: The run has ended.
        """
        state_type, message = self.state()
        assert state_type not in FINAL, (state_type, message)
        return state_type == "RUNNING" and message.startswith("running:")

    def wait_until_running(self) -> Run:
        """Wait until the state on the server says that all components are ready."""
        wait_for(self.is_running, f"{self.flow_run_id} runs")
        # The first use of the property `name` reads the name from the Prefect server and stores it.
        # A test may stop the server afterwards.
        assert self.name and self._name
        return self

    def wait_for_state(self, *types: str) -> str:
        """Wait until the flow run has a state of one of these types; return the state's message."""
        wait_for(lambda: self.state()[0] in types, f"{self.flow_run_id} is {' or '.join(types)}")
        return self.state()[1]

    def flow_pid(self) -> int:
        """Return the process id of the flow process that supervises the run."""
        path = self.host_env.home / "live" / self.name / "owner.json"
        return int(json.loads(path.read_text())["process"]["pid"])

    def pids(self) -> list[int]:
        """Return the process ids of the run's components and of their guardians.

        A guardian is the small process that owns the process tree of one component.
        """
        return processes_with("MUSTER_RUN_ID", self.name)

    def kill_flow(self) -> None:
        """Kill the flow process of the run by SIGKILL."""
        os.kill(self.flow_pid(), signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the ids of the processes whose variable PREFECT__FLOW_RUN_ID names this flow run.

        A worker sets this variable in the process of a run, and child processes inherit the
        variable.
        """
        return processes_with("PREFECT__FLOW_RUN_ID", self.flow_run_id)

    def wait_until_gone(self) -> None:
        """Wait until no process of the run's components is alive."""
        wait_for(lambda: not self.pids(), f"all processes of {self.name} have ended")
