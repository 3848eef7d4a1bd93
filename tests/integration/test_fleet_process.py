"""The process of a fleet, with real servers below real guardians."""

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
from tasks.processes.registry import claimed, finish, registered_runs
from tasks.rollout.component import FleetPlan
from tasks.spec.probes import ReadyProbe
from tests.support.stage import DEADLINE_S, RUN_ID, Stage, free_port, is_alive, wait_until

SERVER = Path(__file__).parents[1] / "support" / "dummy_server.py"
COMMAND = [sys.executable, str(SERVER), "--port", "${server.port}", "--rank", "${server.rank}"]
#: A server with a daemon of its own, in a session that no signal to its group reaches.
WITH_A_DAEMON = ["sh", "-c", f"setsid sleep 600 & exec {' '.join(COMMAND)}"]
#: Holds the register of the run, as its flow process does.
OWNER = f"""
import sys
from tasks.processes.registry import RunRegister
print(RunRegister.opened("{RUN_ID}").directory, flush=True)
sys.stdin.read()
"""


ARGV = (sys.executable, "-P", "-m", "tasks.rollout.process")


class FleetProcess:
    """One process of a fleet that a test starts, asks and kills."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def plan(self, **changes: Any) -> FleetPlan:
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
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return (self.directory / "rollout.log").read_text(errors="replace")

    def snapshot(self) -> dict[str, Any]:
        with suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{self.port}/muster/rollout"
            answer: dict[str, Any] = httpx.get(url, trust_env=False, timeout=DEADLINE_S).json()
            return answer
        return {}

    def until_ready(self, epoch: int = 1) -> dict[str, Any]:
        """The fleet, once every engine serves and one of them is of this incarnation."""
        wait_until(lambda: self._is_ready(epoch), f"the fleet serves; its log: {self.tail()}")
        return self.snapshot()

    def _is_ready(self, epoch: int) -> bool:
        seen = self.snapshot()
        return bool(seen.get("ready")) and max(one["epoch"] for one in seen["engines"]) >= epoch

    def until_states(self, *states: str, epoch: int = 1) -> None:
        def is_so() -> bool:
            engines = self.snapshot().get("engines", [])
            found = [one["state"] for one in engines]
            return found == [*states] and max(one["epoch"] for one in engines) >= epoch

        wait_until(is_so, f"the engines are {states}; the fleet's log: {self.tail()}")

    def post(self, url: str, **body: Any) -> dict[str, Any]:
        """The answer, which is not an error."""
        answer = httpx.post(url, json=body, trust_env=False, timeout=DEADLINE_S)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def push(self, version: int) -> None:
        """Weights, to each server by its own URL."""
        for server in self.snapshot()["servers"]:
            self.post(f"{server['url']}/weights", version=version)

    def commit_what_servers_say(self) -> dict[str, Any]:
        """A sync that sends nothing: engines with the newest version are committed."""
        url = f"http://127.0.0.1:{self.port}/muster/rollout/sync"
        url = f"{url}/{self.post(url)['sync']}"
        answers = self.post(f"{url}/broadcast", method="GET", path="/health")["answers"]
        versions = {one["engine"]: json.loads(one["body"])["version"] for one in answers}
        newest = max(versions.values())
        epochs = {
            one["engine"]: one["epoch"] for one in answers if versions[one["engine"]] == newest
        }
        return self.post(f"{url}/commit", version=newest, epochs=epochs)

    def generated_by(self) -> int:
        """The version of the weights that answered."""
        body = self.post(f"http://127.0.0.1:{self.port}/generate", prompt="1", max_tokens=1)
        return int(body["meta_info"]["version"])

    def tail(self) -> str:
        with suppress(OSError):
            return self.log[-2000:]
        return ""

    def pids(self) -> list[int]:
        """Of its servers."""
        return [pid_on(server["port"]) for server in self.snapshot()["servers"]]

    def events(self) -> list[dict[str, Any]]:
        lines = (self.directory / "rollout.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def fleet(tmp_path: Path, stage: Stage) -> Iterator[FleetProcess]:
    """Nothing of it is left at the end, by the word of the kernel."""
    tree.become_subreaper()
    made = FleetProcess(tmp_path)
    yield made
    made.end()
    wait_until(lambda: _reaped(stage) == {}, "nothing of the fleet is left")


def _reaped(stage: Stage) -> dict[int, str]:
    for pid in stage.left():
        if not is_alive(pid):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return stage.left()


def pid_on(port: int) -> int:
    [listener] = listeners(port)
    return listener.pid


def test_servers_answer_through_the_gateway_until_it_is_told_to_end(fleet: FleetProcess) -> None:
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


def test_servers_get_their_own_variables_and_those_of_the_run(fleet: FleetProcess) -> None:
    said = "import os; print(os.environ['A'], os.environ['B'], 'ROLLOUT_PLAN' in str(os.environ))"
    command = ["sh", "-c", f'{sys.executable} -c "{said}"; exec {" ".join(COMMAND)}']

    env = {"B": "of rank ${server.rank}"}
    fleet.start(fleet.plan(fleet={"command": command, "env": env}), A="of the run")
    fleet.until_ready()

    assert (fleet.directory / "rollout-r1.log").read_text().startswith("of the run of rank 1 False")


def test_a_servers_guardian_says_whose_it_is(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan())
    fleet.until_ready()

    guardian = tree.parent_of(fleet.pids()[0])
    environ = Path(f"/proc/{guardian}/environ").read_text().split("\0")

    assert {f"MUSTER_RUN_ID={RUN_ID}", "MUSTER_ATTEMPT=1", "MUSTER_COMPONENT=rollout"} <= {*environ}


def test_a_server_that_dies_is_started_again_and_told_to_the_run(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan())
    fleet.until_ready()

    os.kill(fleet.pids()[1], signal.SIGKILL)
    again = fleet.until_ready(epoch=2)

    assert [group["epoch"] for group in again["engines"]] == [1, 2]
    assert [group["recoveries"] for group in again["engines"]] == [0, 1]
    told = [event for event in fleet.events() if event["event"].startswith("rollout.recovery")]
    assert [event["event"] for event in told] == [
        "rollout.recovery.begun",
        "rollout.recovery.ended",
    ]
    assert told[0]["cause"] == "rank 1 died: killed by SIGKILL"
    assert told[1]["outcome"] == "recovered"


def test_what_a_trainer_pushes_to_the_servers_itself_serves_once_it_is_committed(
    fleet: FleetProcess,
) -> None:
    # As slime does, whose engines are external: it knows their URLs, and not the transaction.
    fleet.start(fleet.plan(serves_as_loaded=False))
    fleet.until_states("stale", "stale")

    fleet.push(1)
    committed = [fleet.commit_what_servers_say()]
    os.kill(fleet.pids()[1], signal.SIGKILL)
    fleet.until_states("active", "stale", epoch=2)
    answers = [fleet.generated_by() for _ in range(8)]
    committed.append(fleet.commit_what_servers_say())
    fleet.push(2)
    committed.append(fleet.commit_what_servers_say())

    # What was started again has version 0, and never answers.
    assert set(answers) == {1}
    assert [(one["version"], one["serving"]) for one in committed] == [
        (1, [0, 1]),
        (1, [0]),
        (2, [0, 1]),
    ]


@pytest.mark.thorough
def test_a_server_whose_port_is_taken_gets_another_one(fleet: FleetProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        taken = thief.getsockname()[1]
        ports = {"server.0": free_port(), "server.1": taken}

        fleet.start(fleet.plan(ports=ports))
        found = {one["rank"]: one["port"] for one in fleet.until_ready(epoch=2)["servers"]}

    assert found[0] == ports["server.0"]
    assert found[1] != taken


def test_a_fleet_that_cannot_go_on_says_why_and_quotes_the_culprit(fleet: FleetProcess) -> None:
    command = ["sh", "-c", "echo 'no such model: ${server.port}'; exit 3"]

    fleet.start(fleet.plan(fleet={"command": command}))

    assert fleet.wait() == 1
    *_, quoted, last = fleet.log.splitlines()
    assert quoted.startswith("no such model")
    assert last.startswith("FleetError: ")
    assert "exit code 3" in last


def test_a_fleet_under_its_floor_ends_the_run_and_all_its_servers(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan(fleet={"recovery": {"min_active": 2}}))
    fleet.until_ready()
    first, second = fleet.pids()

    os.kill(first, signal.SIGKILL)

    assert fleet.wait() == 1
    last = fleet.log.splitlines()[-1]
    assert last.startswith("FleetError: 1 of 2 engines serve, min_active is 2")
    assert "rank 0 died: killed by SIGKILL" in last
    assert not is_alive(second)


def test_a_gateway_whose_port_is_taken_is_exit_2_and_starts_nothing(fleet: FleetProcess) -> None:
    with socket.create_server(("127.0.0.1", fleet.port)):
        fleet.start(fleet.plan())

        assert fleet.wait() == 2

    assert f"the gateway can't listen on 127.0.0.1:{fleet.port}" in fleet.log
    assert not (fleet.directory / "rollout-r0.log").exists()


@pytest.mark.thorough
def test_it_can_be_told_to_end_while_servers_load(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan(fleet={"command": [*COMMAND, "--up-after-s", "600"]}))
    wait_until(lambda: "server.started rank=1" in fleet.tail(), "both are started")

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
        # of a recovery, for which a server is killed first
        "recovery.begun",
    ],
)
def test_a_process_killed_at_this_moment_leaves_nothing(fleet: FleetProcess, moment: str) -> None:
    fleet.start(fleet.plan(fleet={"command": WITH_A_DAEMON}))
    if moment == "recovery.begun":
        fleet.until_ready()
        os.kill(fleet.pids()[0], signal.SIGKILL)

    wait_until(lambda: moment in fleet.tail(), moment)
    fleet.end()

    # The fixture waits until nothing is left.


@pytest.mark.thorough
def test_a_request_under_way_at_the_end_gets_an_error_to_retry_on(fleet: FleetProcess) -> None:
    fleet.start(fleet.plan())
    for server in fleet.until_ready()["servers"]:
        order = {"kind": "hang"}
        httpx.post(f"{server['url']}/misbehave", json=order, trust_env=False, timeout=DEADLINE_S)
    url = f"http://127.0.0.1:{fleet.port}/generate"

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(httpx.post, url, json={}, trust_env=False, timeout=DEADLINE_S)
        wait_until(
            lambda: any(server["outstanding"] for server in fleet.snapshot()["servers"]),
            "a server has it",
        )
        assert fleet.process is not None
        fleet.process.send_signal(signal.SIGTERM)
        answer = asked.result()

    assert answer.status_code in (502, 503)
    assert answer.json()["error"]
    assert fleet.wait() == 0


@pytest.mark.thorough
def test_a_killed_guardian_takes_the_whole_fleet_with_it(fleet: FleetProcess, stage: Stage) -> None:
    health = f"http://127.0.0.1:{fleet.port}/muster/health"
    ready = ReadyProbe.model_validate({"http": health, "json": {"ready": True}})
    plan = fleet.plan(fleet={"command": WITH_A_DAEMON})
    supervisor = stage.running(stage.component("rollout", ARGV, ready=ready, env=plan.env))
    servers = fleet.pids()

    os.kill(stage.guardian_of("rollout"), signal.SIGKILL)
    verdict = stage.verdict_of(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "rollout"
    assert not any(map(is_alive, servers))


def test_what_all_killed_left_is_in_the_register(fleet: FleetProcess, muster_home: Path) -> None:
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
    guardians = [tree.parent_of(server) for server in servers]
    below = [pid for pid in tree.descendants(*guardians) if pid not in servers]

    # None of them gets to do anything about it.
    assert fleet.process is not None
    for pid in (fleet.process.pid, *guardians):
        os.kill(pid, signal.SIGSTOP)
    for pid in (owner.pid, *guardians, fleet.process.pid):
        os.kill(pid, signal.SIGKILL)
    owner.communicate()
    fleet.wait()
    daemons = [pid for pid in below if is_alive(pid)]

    with claimed(RUN_ID) as lost:
        assert lost is not None
        assert {entry.component for entry in lost.entries} == {"rollout.r0", "rollout.r1"}
        remains = finish(lost)
        lost.forget()

    assert daemons, "what the test is about"
    assert set(daemons) <= set(remains.killed)
    assert remains.is_clean
    assert not any(map(is_alive, [*servers, *below]))
    assert registered_runs() == []
