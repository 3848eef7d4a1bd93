"""Ask the nodes of a Ray cluster something, from a process that is not part of the cluster.

Each node has an agent (`tasks.ray.node_agent`), which answers within milliseconds. If a node has no
agent, a child process starts one through Ray. It is a separate process because a Ray driver needs
100 MB and many threads, and hangs for minutes or aborts if its cluster is gone. Every call ends by
its deadline, whatever happens to a node or to the cluster.

The nodes are asked to end leftover processes of a run and to examine processes that hang. The
command `muster sweep --address URL --run-id ID` ends leftovers that a preflight has found.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from tasks.processes import tree
from tasks.processes.hang_report import HangEvidence
from tasks.processes.machine import digest_code
from tasks.ray import control_store
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer, count_accelerators, driver_env
from tasks.ray.node_agent import NAMESPACE, OF_MACHINES, signed_text
from tasks.ray.unchecked_nodes import UncheckedNode
from tasks.record.places import kept_secret, muster_home
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED

_log = logging.getLogger(__name__)

#: Seconds that a reply of the driver may come after the deadline, which the driver itself keeps.
_REPLY_MARGIN_S = 5.0
#: Seconds for an agent to send its greeting.
_GREETING_TIMEOUT_S = 3.0
#: Longest line that is read. A reply grows with the number of nodes.
_MAX_LINE_BYTES = 1 << 26
#: Environment variables that the driver must not inherit. With them, a sweep would take the driver
#: for a process of the run and kill it.
_NOT_INHERITED = frozenset(
    {
        "MUSTER_RUN_ID",
        "MUSTER_ATTEMPT",
        "MUSTER_COMPONENT",
        "MUSTER_ROLE",
        "RAY_ADDRESS",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node, as the cluster describes it."""

    #: Ray's node id, in hex.
    node_id: str
    #: Address of the node. If several nodes share the address, the start of the id is appended.
    name: str
    #: Address of the node.
    host: str
    #: Number of GPUs that Ray counts on the node.
    gpus: float
    #: Path of Ray's session directory on the node.
    ray_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswers:
    """Replies of the nodes to one order."""

    #: `answer[node id]`.
    answers: Mapping[str, Any]
    #: `reason[node id]` for each node without an answer.
    unreached: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AgentKey:
    """Key pair that signs the orders to agents. Only this user can read its file."""

    #: RSA private key.
    private: Any
    #: Modulus of the public key, in hex. The agents know it.
    modulus: str
    #: Start of the names of this user's agents. A node id follows. It contains a digest of the key
    #: and a digest of the agents' code.
    prefix: str

    @staticmethod
    @cache
    def of(home: Path) -> AgentKey:
        """Return the key pair of a Muster home directory; create the file if it does not exist.

        Raises:
            OSError, ValueError: The file cannot be read or written.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        def make() -> str:
            private_key = rsa.generate_private_key(65537, 2048)
            pem = private_key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            return pem.decode()

        pem = kept_secret(home / "agents.key", make).encode()
        private: Any = serialization.load_pem_private_key(
            pem, None, unsafe_skip_rsa_key_validation=True
        )
        modulus = f"{private.public_key().public_numbers().n:x}"
        key_digest = hashlib.sha256(modulus.encode()).hexdigest()[:12]
        code_digest = digest_code()["digest"] or "unknown"
        return AgentKey(private, modulus, f"agent-{key_digest}-{code_digest}-")

    def sign(self, text: bytes) -> str:
        """Return the signature of a text, in hex."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        return str(self.private.sign(text, padding.PKCS1v15(), hashes.SHA256()).hex())


@dataclass(slots=True)
class AgentConnection:
    """Connection to an agent that has sent its greeting. It takes one order."""

    node_id: str
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    #: Random number of the greeting. The signature of the order covers it.
    _nonce: str
    #: Machine and user of the agent. Agents with equal values see and may end the same processes.
    sees: str
    #: Difference of the node's clock to this machine's, and its largest error, both in seconds.
    clock: tuple[float, float]

    @staticmethod
    async def open(node_id: str, address: str) -> AgentConnection | None:
        """Connect to the agent of a node. Returns None if that agent does not answer."""
        host, _, port = address.rpartition(":")
        with suppress(OSError, ValueError, KeyError, TypeError):
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                started_at = time.time()
                started_s = time.monotonic()
                reader, writer = await asyncio.open_connection(
                    host, int(port), limit=_MAX_LINE_BYTES
                )
                try:
                    greeting = json.loads(await reader.readline())
                    error_s = (time.monotonic() - started_s) / 2
                    clock = (greeting["at"] - started_at - error_s, error_s)
                    if greeting["node_id"] != node_id:
                        raise ValueError(greeting)
                    return AgentConnection(
                        node_id, reader, writer, greeting["nonce"], greeting["sees"], clock
                    )
                except BaseException:
                    writer.transport.abort()
                    raise
        return None

    async def order(self, key: AgentKey, what: str, given: Any, within_s: float) -> Any:
        """Send the signed order and close the connection.

        Args:
            key: The key that signs the order.
            what: Name of the order, see `tasks.ray.node_agent.ORDERS`.
            given: Arguments of the order.
            within_s: Deadline in seconds.

        Returns:
            The result of `tasks.ray.node_agent.execute_order`, with the `clock` added.
            After the deadline, `{"why": reason}`. None if the agent or its node has gone.
        """
        order = json.dumps({"what": what, "given": given}).encode() + b"\n"
        signature = key.sign(signed_text(self.node_id, self._nonce, order)).encode()
        try:
            async with asyncio.timeout(within_s):
                self._writer.write(order + signature + b"\n")
                reply = await self._reader.readline()
            return json.loads(reply) | {"clock": self.clock}
        except TimeoutError:
            return {"why": f"no answer within {within_s:g} s"}
        except (OSError, ValueError):
            return None
        finally:
            self.close()

    def close(self) -> None:
        self._writer.transport.abort()


@dataclass(slots=True)
class NodeClient:
    """Sends orders to the nodes of a cluster, one order at a time.

    `connect_to_nodes` creates it.
    """

    #: The living nodes.
    nodes: tuple[Node, ...]
    _gcs_address: str
    _key: AgentKey
    #: `HOST:PORT` of each known agent, by node id.
    _agents: dict[str, str]
    #: Temporary file that receives stderr of the driver.
    _errors: IO[bytes]
    #: For each node id: the most exact difference of the node's clock to this machine's, and its
    #: largest error, both in seconds.
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    _driver: asyncio.subprocess.Process | None = None

    async def send_order(self, what: str, each: Mapping[str, Any], within_s: float) -> NodeAnswers:
        """Send an order to nodes, to all at the same time.

        The agents of the nodes are asked directly. A node whose agent is missing or unreachable is
        asked through Ray.

        Args:
            what: Name of the order, see `tasks.ray.node_agent.ORDERS`.
            each: `arguments[node id]` for each node to ask.
            within_s: Deadline for all nodes, in seconds.
        """
        deadline = time.monotonic() + within_s
        replies = await self._ask_agents(what, each, deadline)
        unreached = dict.fromkeys(each.keys() - replies, f"no answer within {within_s:g} s")

        # Ray may not know yet that an agent has just died, so try twice.
        for _ in range(2):
            remaining = {node: each[node] for node in each.keys() - replies}
            if remaining and time.monotonic() < deadline:
                by_ray = await self._ask_driver(what, remaining, deadline)
                replies |= by_ray.answers
                unreached = dict(by_ray.unreached)

        for node, reply in replies.items():
            if clock := reply.get("clock"):
                known_clock = self.clocks.get(node, clock)
                difference_s, error_s = min(known_clock, clock, key=lambda reading: reading[1])
                self.clocks[node] = (difference_s, error_s)
            if "why" in reply:
                unreached[node] = reply["why"]
        answers = {node: reply["answer"] for node, reply in replies.items() if "answer" in reply}
        return NodeAnswers(answers=answers, unreached=unreached)

    async def _ask_agents(
        self, what: str, each: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        """Return the replies of the agents that can be reached, by node id."""
        known_agents = [(node, self._agents[node]) for node in each if node in self._agents]
        connections = await asyncio.gather(
            *(AgentConnection.open(node, address) for node, address in known_agents)
        )

        # The agents of a group give the same answer. If one has gone, the next one is asked.
        groups: dict[str, list[AgentConnection]] = {}
        for connection in filter(None, connections):
            group_key = connection.sees if what in OF_MACHINES else connection.node_id
            groups.setdefault(group_key, []).append(connection)
        replies: dict[str, Any] = {}

        async def ask_group(group: list[AgentConnection]) -> None:
            try:
                for connection in group:
                    left_s = max(1.0, deadline - time.monotonic())
                    arguments = each[connection.node_id]
                    reply = await connection.order(self._key, what, arguments, left_s)
                    if reply is not None:
                        replies.update({member.node_id: reply for member in group})
                        return
            finally:
                for connection in group:
                    connection.close()

        await asyncio.gather(*map(ask_group, groups.values()))
        return replies

    async def _ask_driver(self, what: str, each: Mapping[str, Any], deadline: float) -> NodeAnswers:
        """Ask nodes through Ray. This also starts an agent on each of them that has none."""
        try:
            if self._driver is None:
                self._driver = await self._start_driver()
                # The replies of agents are not encrypted. If Ray's connections are, the agents get
                # no key. They then open no port and are asked through Ray only.
                modulus = "0" if control_store.uses_tls() else self._key.modulus
                hello = {
                    "gcs_address": self._gcs_address,
                    "modulus": modulus,
                    "prefix": self._key.prefix,
                }
                await self._ask(hello, max(1.0, deadline - time.monotonic()))
            within_s = max(1.0, deadline - time.monotonic())
            question = {"what": what, "each": dict(each), "within_s": within_s}
            visited = NodeAnswers(**await self._ask(question, within_s + _REPLY_MARGIN_S))
        except NoAnswer as error:
            # A late reply would be mistaken for the reply to the next question.
            await self.end()
            return NodeAnswers(answers={}, unreached=dict.fromkeys(each, str(error)))
        self._agents |= {node: reply["address"] for node, reply in visited.answers.items()}
        return visited

    async def _start_driver(self) -> asyncio.subprocess.Process:
        inherited = {
            name: value for name, value in os.environ.items() if name not in _NOT_INHERITED
        }
        own = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "tasks.ray.node_agent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env={**inherited, **own, **driver_env(self._gcs_address)},
        )

    async def _ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """Send one question to the driver and return its reply.

        Raises:
            NoAnswer: No reply came in time, or the driver has ended.
        """
        assert self._driver is not None
        assert self._driver.stdin is not None and self._driver.stdout is not None
        try:
            self._driver.stdin.write(json.dumps(question).encode() + b"\n")
            async with asyncio.timeout(within_s):
                await self._driver.stdin.drain()
                line = await self._driver.stdout.readline()
        except TimeoutError:
            raise NoAnswer(f"the cluster did not answer within {within_s:g} s") from None
        except OSError:
            line = b""
        if not line:
            self._errors.seek(0)
            error_text = self._errors.read().decode(errors="replace").strip()[-1000:]
            raise NoAnswer(f"the driver that visits the nodes has ended: {error_text}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """Kill the driver and all processes that it started."""
        driver = self._driver
        self._driver = None
        if driver is not None:
            if driver.returncode is None:
                tree.signal_descendants(driver.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            await driver.wait()


@asynccontextmanager
async def connect_to_nodes(gcs_address: str) -> AsyncIterator[NodeClient]:
    """Connect to the living nodes of a cluster, as an async context manager.

    The driver that may be started is killed at the end, also after a cancel. Agents can be started
    on nodes only if this machine is itself a node of the cluster; it need not run any work.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store.

    Raises:
        NoAnswer, Denied: The control store did not answer.
        OSError, ValueError: The key of the agents cannot be read or created.
    """
    key = await asyncio.to_thread(AgentKey.of, muster_home())
    node_infos, addresses = await asyncio.gather(
        control_store.list_living_nodes(gcs_address),
        control_store.read_entries(gcs_address, NAMESPACE, key.prefix),
    )
    nodes = _parse_nodes(node_infos)
    if not nodes:
        raise NoAnswer(f"no node of the cluster of {gcs_address} lives")

    # Any job of the cluster can write this table, so entries with a foreign address are ignored.
    hosts = {node.node_id: node.host for node in nodes}
    agents = {
        node_id: address
        for node_id, address in addresses.items()
        if address.rpartition(":")[0] == hosts.get(node_id)
    }
    with tempfile.TemporaryFile() as errors:
        visitor = NodeClient(nodes, gcs_address, key, agents, errors)
        try:
            yield visitor
        finally:
            await visitor.end()


def _parse_nodes(node_infos: Iterable[Any]) -> tuple[Node, ...]:
    """Convert the GcsNodeInfo messages of the control store."""
    infos = {info.node_id.hex(): info for info in node_infos}
    nodes_per_host = Counter(info.node_manager_address for info in infos.values())

    nodes = []
    for node_id, info in infos.items():
        host = info.node_manager_address
        # The raylet's socket is .../session_2026-.../sockets/raylet
        session_dir = os.path.dirname(os.path.dirname(info.raylet_socket_name))
        nodes.append(
            Node(
                node_id=node_id,
                name=host if nodes_per_host[host] == 1 else f"{host}/{node_id[:8]}",
                host=host,
                gpus=count_accelerators(info.resources_total),
                ray_dir=session_dir,
            )
        )
    return tuple(nodes)


#: Deadline of a sweep of all nodes, in seconds.
SWEEP_WITHIN_S = 60.0
#: Deadline for starting agents on all nodes that have none, in seconds.
_PREPARE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A process that a sweep found because its environment contains the run's id."""

    #: Name of the node that reported the process first. Nodes can share a machine.
    node: str
    pid: int
    #: Shortened command line.
    command: str

    def __str__(self) -> str:
        return f"{self.place} ({self.command})"

    @property
    def place(self) -> str:
        """Return node and pid without the command line, which may contain secrets."""
        return f"node {self.node}: pid {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """Result of a sweep of a cluster."""

    #: Processes that ended.
    killed: tuple[Swept, ...] = ()
    #: Processes that survived SIGKILL.
    left: tuple[Swept, ...] = ()
    #: Nodes that could not be asked.
    unreached: tuple[UncheckedNode, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True if every node was asked and no process is left on any of them."""
        return not self.left and not self.unreached

    def fields(self, shown: Callable[[Swept], str]) -> dict[str, Any]:
        """Return the fields of the event that reports the sweep.

        Args:
            shown: Function that describes a process.
        """
        return {
            "killed": [shown(process) for process in self.killed],
            "left": [shown(process) for process in self.left],
            "unreached": {node.name: node.why for node in self.unreached},
        }


async def sweep(
    gcs_address: str,
    *,
    run_id: str,
    attempt: int | None = None,
    component: str | None = None,
    only: Mapping[str, str] | None = None,
    within_s: float = SWEEP_WITHIN_S,
) -> SweepReport:
    """Kill the leftover processes of a run on every living node of a cluster.

    A process belongs to the run if it was started with its MUSTER_RUN_ID. A process that cleared
    its environment before it started its program is not found. A sweep may be repeated.

    Ray's own workers of the run's jobs carry the id, too, so a node refuses a sweep while one of
    these jobs is active. If this machine is a node, the run's local components also carry the id:
    name a component to spare the others. This process does not become a Ray driver.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store.
        run_id: Id of the run.
        attempt: If given, only processes that also have this MUSTER_ATTEMPT.
        component: If given, only processes that also have this MUSTER_COMPONENT.
        only: Nodes to sweep, `name[node id]`. Empty or None: all nodes.
        within_s: Deadline in seconds. Nodes that have not answered by then are `unreached`.
    """
    wanted = _marker_variables(run_id, attempt, component)
    names = dict(only or {})
    try:
        async with connect_to_nodes(gcs_address) as visitor:
            each = {
                node.node_id: {"wanted": wanted}
                for node in visitor.nodes
                if not only or node.node_id in only
            }
            visited = await visitor.send_order("sweep", each, within_s)
            names |= {node.node_id: node.name for node in visitor.nodes}
    except Exception as error:
        # The cluster is in trouble. Report that no node could be checked.
        why = str(error) if isinstance(error, NoAnswer | Denied) else repr(error)
        return SweepReport(unreached=(UncheckedNode(node_id="", name=gcs_address, why=why),))

    unreached = dict.fromkeys({*(only or ())} - each.keys(), "it is not of the cluster")
    unreached |= visited.unreached
    answers = {names[node]: answer for node, answer in sorted(visited.answers.items())}
    return SweepReport(
        killed=_unique_processes(answers, "killed"),
        left=_unique_processes(answers, "left"),
        unreached=tuple(
            UncheckedNode(node_id=node, name=names[node], why=why)
            for node, why in sorted(unreached.items())
        ),
    )


def _marker_variables(run_id: str, attempt: int | None, component: str | None) -> dict[str, str]:
    """Return the environment variables by which processes of a run are recognised."""
    values = {"RUN_ID": run_id, "ATTEMPT": attempt, "COMPONENT": component}
    return {f"MUSTER_{name}": str(value) for name, value in values.items() if value is not None}


def _unique_processes(answers: Mapping[str, Any], key: str) -> tuple[Swept, ...]:
    """Return each process of the answers once, although several nodes may share its machine."""
    processes: dict[tuple[str, int, int], Swept] = {}
    for node, answer in answers.items():
        for entry in answer[key]:
            swept = Swept(node=node, pid=entry["pid"], command=entry["command"])
            processes.setdefault((answer["machine"], entry["pid"], entry["start"]), swept)
    return tuple(processes.values())


def sweep_run(*, address: str, run_id: str, within_s: float = SWEEP_WITHIN_S) -> int:
    """End the leftover processes of a run on the nodes of a Ray cluster.

    Every process that was started with the run's MUSTER_RUN_ID is killed with SIGKILL. The run must
    have ended.

    Exit: 0 nothing is left; 1 a process is left, or a node could not be asked; 2 the arguments are
    wrong.

    Args:
        address: The URL of the Ray dashboard.
        run_id: The id of the run.
        within_s: Deadline for all nodes, in seconds.
    """
    gcs_address = asyncio.run(find_gcs_address(address))
    report = asyncio.run(sweep(gcs_address, run_id=run_id, within_s=within_s))
    for swept in report.killed:
        print(f"ended: {swept}")
    for swept in report.left:
        print(f"outlived SIGKILL: {swept}")
    for node in report.unreached:
        print(f"not reached: {node.name}: {node.why}")
    if report.is_clean and not report.killed:
        print("nothing was there")
    return EXIT_DONE if report.is_clean else EXIT_FAILED


async def find_gcs_address(address: str) -> str:
    """Return `HOST:PORT` of a cluster's control store.

    Args:
        address: URL of the cluster's dashboard.

    Raises:
        NoAnswer, Denied: The dashboard did not answer.
    """
    async with aclosing(Dashboard(address)) as dashboard:
        return await dashboard.gcs_address()


async def make_nodes_ready(address: str) -> None:
    """Start an agent on every node of a cluster that has none, so that later orders are fast.

    A failure is only logged: whoever asks a node without an agent starts it then.

    Args:
        address: URL of the cluster's dashboard.
    """
    try:
        async with connect_to_nodes(await find_gcs_address(address)) as visitor:
            each: dict[str, Any] = {node.node_id: {} for node in visitor.nodes}
            await visitor.send_order("greet", each, _PREPARE_TIMEOUT_S)
    except (NoAnswer, Denied, OSError, ValueError) as error:
        _log.info("the nodes of %s have no agents yet: %s", address, error)


#: Share of the time for an examination that each node gets.
_NODE_TIME_SHARE = 0.3


async def examine(
    gcs_address: str, *, run_id: str, attempt: int, component: str, within_s: float
) -> tuple[dict[str, HangEvidence], dict[str, str]]:
    """Examine on every node what the processes of a hanging job do.

    Returns:
        The evidence by node name, and the reason by node name for each node that did not answer.

    Raises:
        NoAnswer, Denied, OSError, ValueError: No node could be asked.
    """
    async with connect_to_nodes(gcs_address) as visitor:
        wanted = _marker_variables(run_id, attempt, component)
        arguments = {"wanted": wanted, "within_s": within_s * _NODE_TIME_SHARE}
        each = {node.node_id: arguments for node in visitor.nodes}
        visited = await visitor.send_order("examine", each, within_s)
        names = {node.node_id: node.name for node in visitor.nodes}

    # Several nodes may share a machine. Keep one answer for each machine.
    by_machine = {
        answer["machine"]: (names[node_id], answer) for node_id, answer in visited.answers.items()
    }
    evidence = dict(sorted(entry for entry in by_machine.values() if entry[1]["processes"]))
    unreached = {names[node_id]: why for node_id, why in visited.unreached.items()}
    return evidence, unreached
