"""Orders to the agents on Ray nodes, and nodes that do not answer.

Ray is replaced by a fake. Sockets, signatures and processes are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.ray import control_store, node_agent
from tasks.ray.node_agent import NodeAgent, signed_text
from tasks.ray.nodes import AgentConnection, AgentKey, NodeAnswers, NodeClient, SweepReport, sweep

NODE, OTHER = "aa" * 28, "bb" * 28
RUN = "swept-by-an-agent"
WANTED = {"MUSTER_RUN_ID": RUN, "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}


class Cluster:
    """Fake of Ray's control store, with a key-value table and a list of living nodes."""

    def __init__(self) -> None:
        self.table: dict[tuple[str, str], str] = {}
        self.living = [NODE]

    def job(self, submission_id: str, status: str) -> None:
        self.table["job", f"_ray_internal_job_info_{submission_id}"] = json.dumps(
            {"status": status}
        )

    def _internal_kv_put(self, key: str, value: str, *, namespace: str) -> None:
        self.table[namespace, key] = value

    def _internal_kv_list(self, prefix: str, *, namespace: str) -> list[bytes]:
        return [
            key.encode() for of, key in self.table if of == namespace and key.startswith(prefix)
        ]

    def _internal_kv_get(self, key: bytes, *, namespace: str) -> bytes:
        return self.table[namespace, key.decode()].encode()

    async def living_nodes(self, _: str) -> list[Any]:
        return [
            SimpleNamespace(
                node_id=bytes.fromhex(one),
                node_manager_address="127.0.0.1",
                resources_total={},
                raylet_socket_name="/tmp/ray/s/sockets/raylet",
            )
            for one in self.living
        ]

    async def entries(self, _: str, namespace: str, prefix: str) -> dict[str, str]:
        return {
            key.removeprefix(prefix): value
            for (of, key), value in self.table.items()
            if of == namespace and key.startswith(prefix)
        }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(current_actor=None))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", cluster)
    monkeypatch.setattr(control_store, "list_living_nodes", cluster.living_nodes)
    monkeypatch.setattr(control_store, "read_entries", cluster.entries)

    async def no_driver(_: NodeClient, what: str, each: Any, deadline: float) -> NodeAnswers:
        return NodeAnswers(answers={}, unreached=dict.fromkeys(each, "no driver here"))

    monkeypatch.setattr(NodeClient, "_ask_driver", no_driver)
    return cluster


@pytest.fixture
def key(muster_home: Path) -> AgentKey:
    return AgentKey.of(muster_home)


@pytest.fixture
def address(cluster: Cluster, key: AgentKey) -> str:
    """Return the address at which Muster's agent on the node NODE listens."""
    agent = NodeAgent(NODE, "127.0.0.1", int(key.modulus, 16), f"{key.prefix}{NODE}")
    return agent.address


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that is left over from the run."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **WANTED}) as process:
        yield process
        process.kill()


async def send_order(address: str, key: AgentKey, what: str, **arguments: Any) -> dict[str, Any]:
    """Send a signed order to the agent at an address, and return the reply of the agent.

    Args:
        address: Address of the agent.
        key: Key with which the order is signed.
        what: Name of the order.
        **arguments: Arguments of the order.
    """
    connection = await AgentConnection.open(NODE, address)
    assert connection is not None
    answer: dict[str, Any] = await connection.order(key, what, arguments, 30.0)
    return answer


async def send_lines(address: str, make: Callable[[str], tuple[bytes, str]]) -> dict[str, Any]:
    """Send an order and its signature to the agent at an address, and return the reply.

    The function `make` makes the order and the signature from the nonce that the agent sends first.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        order, signature = make(json.loads(await reader.readline())["nonce"])
        writer.write(order + signature.encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
        return answer
    finally:
        writer.close()


def test_leftovers_of_an_ended_job_are_killed(
    cluster: Cluster, address: str, key: AgentKey, process: subprocess.Popen[bytes]
) -> None:
    cluster.job(f"{RUN}--a01", "STOPPED")
    cluster.job(f"{RUN}--a02", "RUNNING")
    cluster.job(f"{RUN}--a01-judge", "RUNNING")

    answer = asyncio.run(send_order(address, key, "sweep", wanted=WANTED))

    assert [one["pid"] for one in answer["answer"]["killed"]] == [process.pid]
    assert abs(answer["clock"][0]) <= answer["clock"][1] + 0.001


@pytest.mark.parametrize(
    ("wanted", "submission"),
    [
        (WANTED, f"{RUN}--a01"),
        (WANTED, f"{RUN}--a01-trainer"),
        # MUSTER_RUN_ID selects the processes of all attempts of the run, so the active job of
        # attempt 7 would be ended, too
        ({"MUSTER_RUN_ID": RUN}, f"{RUN}--a07-judge"),
    ],
)
@pytest.mark.parametrize("status", ["RUNNING", "PENDING"])
def test_sweep_of_an_active_job_is_refused(
    cluster: Cluster,
    address: str,
    key: AgentKey,
    process: subprocess.Popen[bytes],
    wanted: dict[str, str],
    submission: str,
    status: str,
) -> None:
    cluster.job(submission, status)

    answer = asyncio.run(send_order(address, key, "sweep", wanted=wanted))

    assert answer["why"] == f"refused: job {submission} of the run is still {status}"
    assert process.poll() is None


@pytest.mark.parametrize(("status", "is_left_over"), [("RUNNING", False), ("STOPPED", True)])
def test_order_look_lists_only_leftovers_of_ended_runs(
    cluster: Cluster,
    address: str,
    key: AgentKey,
    process: subprocess.Popen[bytes],
    tmp_path: Path,
    status: str,
    is_left_over: bool,
) -> None:
    cluster.job(f"{RUN}--a01", status)
    place = str(tmp_path)

    reply = asyncio.run(
        send_order(address, key, "look", shared=place, folder=place, name="node", ray_dir=place)
    )

    carriers = reply["answer"]["carriers"]
    pids = [carrier["pid"] for carrier in carriers if carrier["run_id"] == RUN]
    assert pids == ([process.pid] if is_left_over else [])


def test_sweep_is_refused_while_a_guardian_works(address: str, key: AgentKey) -> None:
    env = {**os.environ, **WANTED, "MUSTER_ROLE": "guardian"}
    with subprocess.Popen(["sleep", "600"], env=env) as guardian:
        answer = asyncio.run(send_order(address, key, "sweep", wanted=WANTED))
        alive = guardian.poll() is None
        guardian.kill()

    reason = f"refused: the component's guardian process (pid {guardian.pid}) is still running"
    assert alive and answer["why"] == reason


def test_forged_and_replayed_orders_are_refused(
    address: str, key: AgentKey, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    order = json.dumps({"what": "sweep", "given": {"wanted": WANTED}}).encode() + b"\n"
    another = AgentKey.of(tmp_path)

    def replayed(_: str) -> tuple[bytes, str]:
        return order, key.sign(signed_text(NODE, "00" * 16, order))

    forged: list[Callable[[str], tuple[bytes, str]]] = [
        lambda nonce: (order, ""),
        lambda nonce: (order, "00" * 256),
        lambda nonce: (order, another.sign(signed_text(NODE, nonce, order))),
        # the signature is for another node, for an earlier connection, or for another order, so the
        # order is refused
        lambda nonce: (order, key.sign(signed_text(OTHER, nonce, order))),
        replayed,
        lambda nonce: (order, key.sign(signed_text(NODE, nonce, order.replace(b"1", b"2")))),
    ]

    answers = [asyncio.run(send_lines(address, make)) for make in forged]

    assert {answer["why"] for answer in answers} == {
        "refused: the request is not signed with the key of Muster's agent on this node"
    }
    assert process.poll() is None


def test_published_address_of_another_host_is_ignored(
    cluster: Cluster, key: AgentKey, address: str
) -> None:
    cluster.table[node_agent.NAMESPACE, f"{key.prefix}{NODE}"] = address.replace(
        "127.0.0.1", "127.0.0.2"
    )

    report = asyncio.run(sweep("127.0.0.1:6379", run_id=RUN))

    assert [node.why for node in report.unreached] == ["no driver here"]


def test_cluster_without_nodes_counts_as_unreached(cluster: Cluster, key: AgentKey) -> None:
    cluster.living = []

    report = asyncio.run(sweep("127.0.0.1:6379", run_id=RUN))

    assert [node.why for node in report.unreached] == [
        "the Ray cluster with the control store 127.0.0.1:6379 has no running node"
    ]


def test_node_without_remaining_time_counts_as_unreached(
    cluster: Cluster, key: AgentKey, address: str
) -> None:
    cluster.living = [NODE, OTHER]

    report = asyncio.run(sweep("127.0.0.1:6379", run_id=RUN, within_s=0.0))

    # Whether the node NODE answers in time depends on the load of the machine. So check only the
    # node OTHER, which never answers.
    assert (OTHER, "no answer within 0 s") in [
        (node.node_id, node.why) for node in report.unreached
    ]


def test_node_lost_during_a_sweep_is_reported(
    cluster: Cluster, key: AgentKey, address: str, process: subprocess.Popen[bytes]
) -> None:
    cluster.living = [NODE, OTHER]

    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = {"node_id": OTHER, "nonce": "", "sees": "another machine", "at": 0.0}
        writer.write(json.dumps(hello).encode() + b"\n")
        if await reader.readline():
            cluster.living.remove(OTHER)
        writer.close()

    async def swept() -> SweepReport:
        async with await asyncio.start_server(leaves, "127.0.0.1", 0) as server:
            at = server.sockets[0].getsockname()[1]
            cluster.table[node_agent.NAMESPACE, f"{key.prefix}{OTHER}"] = f"127.0.0.1:{at}"
            return await sweep("127.0.0.1:6379", run_id=RUN)

    report = asyncio.run(swept())

    assert [one.pid for one in report.killed] == [process.pid]
    [lost] = report.unreached
    assert (lost.node_id, lost.name) == (OTHER, f"127.0.0.1/{OTHER[:8]}")


def test_many_sweeps_at_once_start_the_missing_agent_only_once(
    cluster: Cluster, key: AgentKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many runs end at the same moment on a node without an agent.

    Each end starts a sweep, which is a search for leftover processes of the run.
    """
    starts: list[str] = []

    async def start_agent(_: NodeClient, what: str, each: Any, deadline: float) -> NodeAnswers:
        starts.append(what)
        for _ in range(100):
            # Let the other calls of `sweep` continue until they wait for the agent.
            await asyncio.sleep(0)
        agent = NodeAgent(NODE, "127.0.0.1", int(key.modulus, 16), f"{key.prefix}{NODE}")
        cluster.table["muster", f"{key.prefix}{NODE}"] = agent.address
        replies = {NODE: await send_order(agent.address, key, what, **each[NODE])}
        return NodeAnswers(answers=replies, unreached={})

    monkeypatch.setattr(NodeClient, "_ask_driver", start_agent)

    async def sweep_often() -> list[SweepReport]:
        return await asyncio.gather(*(sweep("127.0.0.1:1", run_id=RUN) for _ in range(5)))

    reports = asyncio.run(sweep_often())

    assert all(report.is_clean for report in reports), reports
    assert starts == ["sweep"]
