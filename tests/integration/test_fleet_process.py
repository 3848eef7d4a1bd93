"""The process that supervises a fleet, with real server processes below real guardians."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.processes import tree
from tasks.processes.ports import listeners
from tasks.processes.registry import claim_lost_run, finish, registered_runs
from tasks.rollout.component import FleetPlan
from tasks.spec.probes import ReadyProbe
from tests.support.supervised_components import (
    DEADLINE_S,
    RUN_ID,
    ComponentHarness,
    free_port,
    is_alive,
    wait_until,
)

SERVER = Path(__file__).parents[1] / "support" / "dummy_server.py"
COMMAND = [sys.executable, str(SERVER), "--port", "${server.port}", "--rank", "${server.rank}"]
#: Command of a server that also starts a daemon in another session.
#:
#: A signal to the server's process group does not reach the daemon.
WITH_A_DAEMON = ["sh", "-c", f"setsid sleep 600 & exec {' '.join(COMMAND)}"]
#: A program that takes the place of a run's flow process. The program registers itself as the owner
#: of the run in Muster's registry of local processes.
OWNER = f"""
import sys
from tasks.processes.registry import RunRegistration
print(RunRegistration.opened("{RUN_ID}").directory, flush=True)
sys.stdin.read()
"""


ARGV = (sys.executable, "-P", "-m", "tasks.rollout.process")


class FleetProcess:
    """The process that supervises a fleet of inference servers.

    A test starts and kills this process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def plan(self, **changes: Any) -> FleetPlan:
        """Return a plan with two engines and free ports; `changes` replaces fields of the plan."""
        fleet = {
            "backend": "command",
            "engines": 2,
            "command": COMMAND,
            "health": {"interval_s": 0.5, "timeout_s": 5},
            "recovery": {"backoff_s": 0.1, "max_backoff_s": 0.2},
            "stop": {"grace_s": 2},
            "start_within_s": DEADLINE_S,
            **changes.pop("fleet", {}),
        }
        return FleetPlan(
            **{
                "run_id": RUN_ID,
                "attempt": 1,
                "fleet": fleet,
                "port": self.port,
                "ports": {f"server.{rank}": free_port() for rank in range(fleet["engines"])},
                "cwd": self.directory,
                "directory": self.directory,
                **changes,
            }
        )

    def start(self, plan: FleetPlan, **env: str) -> None:
        """Start the fleet process with the plan and additional environment variables."""
        with (self.directory / "rollout.log").open("ab") as log:
            self.process = subprocess.Popen(
                ARGV,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "MUSTER_RUN_ID": RUN_ID, **plan.env, **env},
                start_new_session=True,
            )

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def end(self) -> None:
        """Kill the fleet process if it still runs, and wait until it has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return (self.directory / "rollout.log").read_text(errors="replace")

    def snapshot(self) -> dict[str, Any]:
        """Return the gateway's description of the fleet, or {} if the gateway does not answer."""
        with suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{self.port}/muster/rollout"
            answer: dict[str, Any] = httpx.get(url, trust_env=False, timeout=DEADLINE_S).json()
            return answer
        return {}

    def until_ready(self, epoch: int = 1) -> dict[str, Any]:
        """Wait until all engines serve, and return the gateway's description of the fleet.

        Args:
            epoch: Number of starts that at least one engine must have reached.
        """
        wait_until(lambda: self._is_ready(epoch), f"the fleet serves; its log: {self.tail()}")
        return self.snapshot()

    def _is_ready(self, epoch: int) -> bool:
        snapshot = self.snapshot()
        return (
            bool(snapshot.get("ready"))
            and max(engine["epoch"] for engine in snapshot["engines"]) >= epoch
        )

    def until_states(self, *states: str, epoch: int = 1) -> None:
        """Wait until the engines have these states, and at least one engine has reached `epoch`.

        The epoch counts the starts of the engine.
        """

        def is_reached() -> bool:
            engines = self.snapshot().get("engines", [])
            engine_states = [engine["state"] for engine in engines]
            return (
                engine_states == [*states] and max(engine["epoch"] for engine in engines) >= epoch
            )

        wait_until(is_reached, f"the engines are {states}; the fleet's log: {self.tail()}")

    def post(self, url: str, **body: Any) -> dict[str, Any]:
        """Send a POST request and return the JSON object of the response; raise for an error."""
        answer = httpx.post(url, json=body, trust_env=False, timeout=DEADLINE_S)
        content: dict[str, Any] = answer.raise_for_status().json()
        return content

    def push(self, version: int) -> None:
        """Load a weight version into each server, by direct requests that bypass the gateway."""
        for server in self.snapshot()["servers"]:
            self.post(f"{server['url']}/weights", version=version)

    def commit_loaded_versions(self) -> dict[str, Any]:
        """Commit the newest weight version that an engine has loaded; return the gateway's answer.

        The commit request names all engines that have loaded this version.
        """
        url = f"http://127.0.0.1:{self.port}/muster/rollout/sync"
        url = f"{url}/{self.post(url)['sync']}"
        answers = self.post(f"{url}/broadcast", method="GET", path="/health")["answers"]
        versions = {reply["engine"]: json.loads(reply["body"])["version"] for reply in answers}
        newest = max(versions.values())
        epochs = {
            reply["engine"]: reply["epoch"]
            for reply in answers
            if versions[reply["engine"]] == newest
        }
        return self.post(f"{url}/commit", version=newest, epochs=epochs)

    def generated_by(self) -> int:
        """Send a request through the gateway; return the weight version that the answer names."""
        body = self.post(f"http://127.0.0.1:{self.port}/generate", prompt="1", max_tokens=1)
        return int(body["meta_info"]["version"])

    def tail(self) -> str:
        """Return the last 2,000 characters of the fleet's log, or "" if there is no log."""
        with suppress(OSError):
            return self.log[-2000:]
        return ""

    def pids(self) -> list[int]:
        """Return the process ids of the servers, in the order of their ranks."""
        return [pid_on(server["port"]) for server in self.snapshot()["servers"]]

    def events(self) -> list[dict[str, Any]]:
        """Return the events that the fleet process has written, oldest first."""
        lines = (self.directory / "rollout.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def fleet(tmp_path: Path, harness: ComponentHarness) -> Iterator[FleetProcess]:
    """Yield a fleet process that is not started yet.

    After the test, no process of the fleet may be alive.
    """
    tree.become_subreaper()
    fleet_process = FleetProcess(tmp_path)
    yield fleet_process
    fleet_process.end()
    wait_until(lambda: _reap_leftovers(harness) == {}, "no process of the fleet remains")


def _reap_leftovers(harness: ComponentHarness) -> dict[int, str]:
    """Reap ended child processes, and return the pid and command of each other child process."""
    for pid in harness.list_survivors():
        if not is_alive(pid):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return harness.list_survivors()


def pid_on(port: int) -> int:
    """Return the process id of the only process that listens on the port."""
    [listener] = listeners(port)
    return listener.pid


def test_servers_answer_through_the_gateway_until_sigterm(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan())
    fleet.until_ready()
    servers = fleet.pids()

    body = {"prompt": "1", "max_tokens": 1}
    url = f"http://127.0.0.1:{fleet.port}/generate"
    answer = httpx.post(url, json=body, trust_env=False, timeout=DEADLINE_S)
    assert fleet.process is not None
    fleet.process.send_signal(signal.SIGTERM)

    assert answer.status_code == 200
    assert fleet.wait() == 0
    assert not any(map(is_alive, servers))
    assert fleet.log.splitlines()[-1].endswith("INFO stopped")


def test_servers_get_their_own_variables_and_the_variables_of_the_run(fleet: FleetProcess) -> None:
    script = "import os; print(os.environ['A'], os.environ['B'], 'ROLLOUT_PLAN' in str(os.environ))"
    command = ["sh", "-c", f'{sys.executable} -c "{script}"; exec {" ".join(COMMAND)}']

    env = {"B": "of rank ${server.rank}"}
    fleet.start(fleet.plan(fleet={"command": command, "env": env}), A="of the run")
    fleet.until_ready()

    assert (fleet.directory / "rollout-r1.log").read_text().startswith("of the run of rank 1 False")


def test_guardian_of_a_server_has_the_variables_of_its_run(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan())
    fleet.until_ready()

    guardian = tree.read_parent(fleet.pids()[0])
    environ = Path(f"/proc/{guardian}/environ").read_text().split("\0")

    assert {f"MUSTER_RUN_ID={RUN_ID}", "MUSTER_ATTEMPT=1", "MUSTER_COMPONENT=rollout"} <= {*environ}


def test_dead_server_is_restarted_and_the_recovery_is_reported(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan())
    fleet.until_ready()

    os.kill(fleet.pids()[1], signal.SIGKILL)
    snapshot = fleet.until_ready(epoch=2)

    assert [group["epoch"] for group in snapshot["engines"]] == [1, 2]
    assert [group["recoveries"] for group in snapshot["engines"]] == [0, 1]
    recovery_events = [
        event for event in fleet.events() if event["event"].startswith("rollout.recovery")
    ]
    assert [event["event"] for event in recovery_events] == [
        "rollout.recovery.begun",
        "rollout.recovery.ended",
    ]
    assert recovery_events[0]["cause"] == "the server of rank 1 died: killed by SIGKILL"
    assert recovery_events[1]["outcome"] == "recovered"


def test_weights_that_a_trainer_loads_directly_serve_after_the_commit(
    fleet: FleetProcess,
) -> None:
    # The test acts as the trainer of slime, an RL framework. This trainer sends the weights to the
    # URLs of the engines, and does not use the weight updates of the gateway.
    fleet.start(fleet.plan(serves_as_loaded=False))
    fleet.until_states("stale", "stale")

    fleet.push(1)
    commits = [fleet.commit_loaded_versions()]
    os.kill(fleet.pids()[1], signal.SIGKILL)
    fleet.until_states("active", "stale", epoch=2)
    answers = [fleet.generated_by() for _ in range(8)]
    commits.append(fleet.commit_loaded_versions())
    fleet.push(2)
    commits.append(fleet.commit_loaded_versions())

    # The restarted server has weight version 0, but version 1 is committed. So the restarted server
    # must not have answered any request.
    assert set(answers) == {1}
    assert [(commit["version"], commit["serving"]) for commit in commits] == [
        (1, [0, 1]),
        (1, [0]),
        (2, [0, 1]),
    ]


@pytest.mark.thorough
def test_server_whose_port_is_taken_gets_another_port(fleet: FleetProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        taken = thief.getsockname()[1]
        ports = {"server.0": free_port(), "server.1": taken}

        fleet.start(fleet.plan(ports=ports))
        port_by_rank = {
            server["rank"]: server["port"] for server in fleet.until_ready(epoch=2)["servers"]
        }

    assert port_by_rank[0] == ports["server.0"]
    assert port_by_rank[1] != taken


def test_failed_fleet_reports_the_reason_and_quotes_the_failed_server(fleet: FleetProcess) -> None:
    command = ["sh", "-c", "echo 'no such model: ${server.port}'; exit 3"]

    fleet.start(fleet.plan(fleet={"command": command}))

    assert fleet.wait() == 1
    *_, quoted_line, last_line = fleet.log.splitlines()
    assert quoted_line.startswith("no such model")
    assert last_line.startswith("FleetError: ")
    assert "exit code 3" in last_line


def test_fleet_below_min_active_ends_with_all_its_servers(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan(fleet={"recovery": {"min_active": 2}}))
    fleet.until_ready()
    first, second = fleet.pids()

    os.kill(first, signal.SIGKILL)

    assert fleet.wait() == 1
    last_line = fleet.log.splitlines()[-1]
    assert last_line.startswith(
        "FleetError: only 1 of 2 engines serve requests, but recovery.min_active requires at least "
        "2"
    )
    assert "rank 0 died: killed by SIGKILL" in last_line
    assert not is_alive(second)


def test_taken_gateway_port_ends_the_fleet_with_exit_code_2_before_servers_start(
    fleet: FleetProcess,
) -> None:
    with socket.create_server(("127.0.0.1", fleet.port)):
        fleet.start(fleet.plan())

        assert fleet.wait() == 2

    assert f"the gateway can't listen on 127.0.0.1:{fleet.port}" in fleet.log
    assert not (fleet.directory / "rollout-r0.log").exists()


@pytest.mark.thorough
def test_fleet_can_be_stopped_while_servers_load(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan(fleet={"command": [*COMMAND, "--up-after-s", "600"]}))
    wait_until(lambda: "server.started rank=1" in fleet.tail(), "both servers are started")

    assert fleet.process is not None
    fleet.process.send_signal(signal.SIGTERM)

    assert fleet.wait() == 0


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("gateway on", marks=pytest.mark.thorough),
        "server.started rank=0",
        pytest.param("server.started rank=1", marks=pytest.mark.thorough),
        "after=active",
        # This event belongs to the recovery of a server. The test first kills a server to cause the
        # recovery.
        "recovery.begun",
    ],
)
def test_fleet_process_killed_at_any_moment_leaves_no_process(
    fleet: FleetProcess, moment: str
) -> None:
    fleet.start(fleet.plan(fleet={"command": WITH_A_DAEMON}))
    if moment == "recovery.begun":
        fleet.until_ready()
        os.kill(fleet.pids()[0], signal.SIGKILL)

    wait_until(lambda: moment in fleet.tail(), moment)
    fleet.end()

    # This test needs no assertion: the fixture `fleet` fails if a process of the fleet remains.


@pytest.mark.thorough
def test_request_in_flight_at_the_stop_gets_a_retryable_error(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan())
    for server in fleet.until_ready()["servers"]:
        order = {"kind": "hang"}
        httpx.post(f"{server['url']}/misbehave", json=order, trust_env=False, timeout=DEADLINE_S)
    url = f"http://127.0.0.1:{fleet.port}/generate"

    with ThreadPoolExecutor() as pool:
        pending_response = pool.submit(
            httpx.post, url, json={}, trust_env=False, timeout=DEADLINE_S
        )
        wait_until(
            lambda: any(server["outstanding"] for server in fleet.snapshot()["servers"]),
            "a server has received the request",
        )
        assert fleet.process is not None
        fleet.process.send_signal(signal.SIGTERM)
        answer = pending_response.result()

    assert answer.status_code in (502, 503)
    assert answer.json()["error"]
    assert fleet.wait() == 0


@pytest.mark.thorough
def test_killed_guardian_of_the_fleet_ends_all_servers(
    fleet: FleetProcess, harness: ComponentHarness
) -> None:
    health = f"http://127.0.0.1:{fleet.port}/muster/health"
    ready = ReadyProbe.model_validate({"http": health, "json": {"ready": True}})
    plan = fleet.plan(fleet={"command": WITH_A_DAEMON})
    supervisor = harness.start_all(harness.component("rollout", ARGV, ready=ready, env=plan.env))
    servers = fleet.pids()

    os.kill(harness.guardian_of("rollout"), signal.SIGKILL)
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "rollout"
    assert not any(map(is_alive, servers))


def test_leftovers_after_all_processes_were_killed_are_in_the_registry(
    fleet: FleetProcess, muster_home: Path
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MUSTER_HOME": str(muster_home)},
    )
    assert owner.stdout is not None
    register = Path(owner.stdout.readline().strip())
    fleet.start(fleet.plan(fleet={"command": WITH_A_DAEMON}, register_at=register))
    fleet.until_ready()
    servers = fleet.pids()
    guardians = [tree.read_parent(server) for server in servers]
    other_descendants = [pid for pid in tree.descendants(*guardians) if pid not in servers]

    # The processes are suspended first, so that none can react to the death of another process.
    assert fleet.process is not None
    for pid in (fleet.process.pid, *guardians):
        os.kill(pid, signal.SIGSTOP)
    for pid in (owner.pid, *guardians, fleet.process.pid):
        os.kill(pid, signal.SIGKILL)
    owner.communicate()
    fleet.wait()
    daemons = [pid for pid in other_descendants if is_alive(pid)]

    with claim_lost_run(RUN_ID) as lost_run:
        assert lost_run is not None
        assert {entry.component for entry in lost_run.entries} == {"rollout.r0", "rollout.r1"}
        cleanup = finish(lost_run)
        lost_run.forget()

    assert daemons, "no daemon remains, so the test checks nothing"
    assert set(daemons) <= set(cleanup.killed)
    assert cleanup.is_clean
    assert not any(map(is_alive, [*servers, *other_descendants]))
    assert registered_runs() == []
