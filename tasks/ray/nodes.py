"""Send orders to the nodes of a Ray cluster, from a process outside the cluster.

An *order* is a request to a node to kill the leftover processes of a run, to examine processes that
hang, or to report facts about itself. The command `muster cleanup --address URL --run-id ID` orders
all nodes to kill the leftover processes of one run.

Each node has an *agent* of Muster (`tasks.ray.node_agent`), which carries out orders within
milliseconds. If a node has no agent, a child process of this process starts an agent through Ray.
This child process is called the *driver*, because it connects to Ray as a Ray driver. It is a
separate process for two reasons: a Ray driver needs 100 MB and many threads, and it hangs for
minutes or aborts if its cluster fails.

Every call ends by its deadline, even if a node or the cluster does not answer.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import signal
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
from tasks.processes.own_modules import make_own_command
from tasks.processes.warning_signal import WarnedProcesses
from tasks.ray import control_store
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer, count_accelerators, driver_env
from tasks.ray.node_agent import NAMESPACE, OF_MACHINES, signed_text
from tasks.ray.unchecked_nodes import UncheckedNode
from tasks.record.places import kept_secret, muster_home
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED

_log = logging.getLogger(__name__)

#: Seconds to wait, after the deadline of a request, for the reply of the driver process. The driver
#: process is the child process that sends requests through Ray.
_REPLY_MARGIN_S = 5.0
#: Seconds within which an agent must send its first message after a connection is opened.
_GREETING_TIMEOUT_S = 3.0
#: Longest line of a reply, in bytes. A reply grows with the number of nodes.
_MAX_LINE_BYTES = 1 << 26
#: Name of the lock file in MUSTER_HOME. A process holds the lock while it starts agents.
_START_LOCK = "agents.lock"
#: Seconds between two tries to take the lock `_START_LOCK`.
_LOCK_EVERY_S = 0.1
#: Longest wait for the lock `_START_LOCK`, as a fraction of the time limit for the whole request to
#: the agents.
_LOCK_SHARE = 0.5
#: Environment variables that the child process for requests through Ray must not inherit. With the
#: MUSTER variables, the child process would look like a leftover process of the run and would be
#: killed.
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
    """A living node of a Ray cluster."""

    #: Ray's node id, in hex.
    node_id: str
    #: Unique name of the node in messages: its IP address. If several nodes share the address, the
    #: start of the node id is appended.
    name: str
    #: IP address of the node.
    host: str
    #: Number of GPUs that Ray counts on the node.
    gpus: float
    #: Path of Ray's session directory on the node.
    ray_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswers:
    """Results of one order, which is a request to Muster's agents on several Ray nodes."""

    #: Mapping from node id to result, for the nodes that have carried out the request.
    answers: Mapping[str, Any]
    #: Mapping from node id to the reason why the node did not answer or did not carry out the
    #: request.
    unreached: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AgentKey:
    """RSA key pair of this user, which signs requests to Muster's agents on Ray nodes.

    Only this user can read the file with the key pair.
    """

    #: The RSA private key.
    private: Any
    #: Modulus of the RSA public key, in hex. The agents use the modulus to check signatures.
    modulus: str
    #: Prefix of the names of all agents of this user. The prefix contains a digest of the public
    #: key and a digest of the agents' code. The id of the agent's node follows the prefix.
    prefix: str

    @staticmethod
    @cache
    def of(home: Path) -> AgentKey:
        """Return the key pair of a Muster home directory. Create a key pair if none exists.

        Raises:
            OSError, ValueError: The file of the key pair cannot be read or written.
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
        """Return the signature of a text with the private key, in hex."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        return str(self.private.sign(text, padding.PKCS1v15(), hashes.SHA256()).hex())


@dataclass(slots=True)
class AgentConnection:
    """Connection over which one request can be sent to Muster's agent on a Ray node."""

    #: Ray's id of the agent's node, in hex.
    node_id: str
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    #: Random number from the first message of the agent. The signature of a request covers this
    #: number and the request, so the signature is valid only once.
    _nonce: str
    #: Machine and user of the agent. If several Ray nodes run on one machine, their agents have the
    #: same machine and user, and can kill the same processes.
    sees: str
    #: Tuple (difference, error), both in seconds. The difference is the node's clock minus this
    #: machine's clock. The error is the largest possible error of the difference.
    clock: tuple[float, float]

    @staticmethod
    async def open(node_id: str, address: str) -> AgentConnection | None:
        """Connect to the agent of a node, and read the first message that the agent sends.

        Args:
            node_id: Ray's id of the node, in hex.
            address: `HOST:PORT` of the agent.

        Returns:
            The connection, or None if the agent of this node does not answer at the address.
        """
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
        """Send a signed order (a request) to the agent. Return the reply, and close the connection.

        Args:
            key: The key pair that signs the order.
            what: Name of the order, such as `sweep`, from `tasks.ray.node_agent.ORDERS`.
            given: Arguments of the order, as JSON data.
            within_s: Deadline in seconds.

        Returns:
            The result of `tasks.ray.node_agent.execute_order`, with one more key: `clock`, whose
            value is the attribute `clock` of this object. If the deadline has passed,
            `{"why": reason}`. If the connection was lost, None.
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
        """Close the connection to the agent. The call may be repeated."""
        self._writer.transport.abort()


@dataclass(slots=True)
class NodeClient:
    """Sends requests to Muster's agents on the nodes of a Ray cluster, one request at a time.

    Such a request is called an order. Create a client with `connect_to_nodes`.
    """

    #: The living nodes of the cluster.
    nodes: tuple[Node, ...]
    #: `HOST:PORT` of the cluster's control store (GCS).
    _gcs_address: str
    #: Key pair that signs the requests to the nodes.
    _key: AgentKey
    #: Mapping from node id to the address `HOST:PORT` that the agent of the node has published.
    _agents: dict[str, str]
    #: Temporary file that receives stderr of the driver process.
    _errors: IO[bytes]
    #: Mapping from node id to two values in seconds: the difference between the node's clock and
    #: this machine's clock, and the largest error of this difference. If the difference is measured
    #: several times, the measurement with the smallest error is kept.
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: Child process that sends requests through Ray, or None before this process is needed.
    _driver: asyncio.subprocess.Process | None = None

    async def send_order(self, what: str, each: Mapping[str, Any], within_s: float) -> NodeAnswers:
        """Send an order, which is a request such as `sweep`, to several nodes at the same time.

        The order is sent directly to the agents of the nodes. If the agent of a node is missing or
        unreachable, the order is sent through Ray, which also starts missing agents.

        Args:
            what: Name of the order, from `tasks.ray.node_agent.ORDERS`.
            each: Mapping from node id to the arguments of the order, for all nodes that receive the
                order.
            within_s: Deadline for all nodes together, in seconds.
        """
        deadline = time.monotonic() + within_s
        replies = await self._ask_agents(what, each, deadline)
        has_missing_agents = bool(each.keys() - replies.keys() - self._agents.keys())
        async with _lock_agent_start(within_s * _LOCK_SHARE if has_missing_agents else 0.0):
            if has_missing_agents:
                # Another process may have started the missing agents while this process waited for
                # the lock. So ask the agents again.
                self._agents |= await _read_agents(self._gcs_address, self._key, self.nodes)
                remaining = {node: each[node] for node in each.keys() - replies}
                replies |= await self._ask_agents(what, remaining, deadline)
            unreached = dict.fromkeys(each.keys() - replies, f"no answer within {within_s:g} s")
            # Ray may send a request to an agent that has just died, and the request is then lost.
            # So try twice.
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
        """Send an order (a request such as `sweep`) directly to the agents of nodes.

        Args:
            what: Name of the order.
            each: Mapping from node id to the arguments of the order, for all nodes that receive the
                order.
            deadline: End of the wait for replies, in CLOCK_MONOTONIC seconds.

        Returns:
            Mapping from node id to reply. A node is missing if its agent could not be reached.
        """
        known_agents = [(node, self._agents[node]) for node in each if node in self._agents]
        connections = await asyncio.gather(
            *(AgentConnection.open(node, address) for node, address in known_agents)
        )

        # For some requests, all agents of one machine form a group, because all of them would give
        # the same answer. Only one agent of a group gets the request. If the connection to this
        # agent is lost, the next agent of the group gets the request.
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
        """Send an order (a request) through Ray, and start agents on nodes without an agent.

        Args:
            what: Name of the order.
            each: Mapping from node id to the arguments of the order, for all nodes that receive the
                order.
            deadline: End of the wait for replies, in CLOCK_MONOTONIC seconds.
        """
        try:
            if self._driver is None:
                self._driver = await self._start_driver()
                # Agents do not encrypt their replies. So if the operator has encrypted Ray's
                # connections, the agents must open no port, and receive requests only through Ray.
                # An agent opens no port if it receives 0 instead of the modulus of the RSA key.
                modulus = "0" if control_store.uses_tls() else self._key.modulus
                hello = {
                    "gcs_address": self._gcs_address,
                    "modulus": modulus,
                    "prefix": self._key.prefix,
                }
                await self._ask(hello, max(1.0, deadline - time.monotonic()))
            within_s = max(1.0, deadline - time.monotonic())
            question = {"what": what, "each": dict(each), "within_s": within_s}
            results = NodeAnswers(**await self._ask(question, within_s + _REPLY_MARGIN_S))
        except NoAnswer as error:
            # The driver process may still send a late reply, which would look like the reply to the
            # next request. So end the driver process.
            await self.end()
            return NodeAnswers(answers={}, unreached=dict.fromkeys(each, str(error)))
        self._agents |= {node: reply["address"] for node, reply in results.answers.items()}
        return results

    async def _start_driver(self) -> asyncio.subprocess.Process:
        """Start the child process for requests through Ray, with pipes to its stdin and stdout."""
        inherited = {
            name: value for name, value in os.environ.items() if name not in _NOT_INHERITED
        }
        own = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        return await asyncio.create_subprocess_exec(
            *make_own_command("tasks.ray.node_agent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env={**inherited, **own, **driver_env(self._gcs_address)},
        )

    async def _ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """Send one line of JSON to the driver process, and return the reply.

        The driver process is the child process that sends requests through Ray.

        Raises:
            NoAnswer: No reply came in time, or the driver process has ended.
        """
        assert self._driver is not None
        assert self._driver.stdin is not None and self._driver.stdout is not None
        try:
            self._driver.stdin.write(json.dumps(question).encode() + b"\n")
            async with asyncio.timeout(within_s):
                await self._driver.stdin.drain()
                line = await self._driver.stdout.readline()
        except TimeoutError:
            raise NoAnswer(f"the Ray cluster did not answer within {within_s:g} s") from None
        except OSError:
            line = b""
        if not line:
            self._errors.seek(0)
            error_text = self._errors.read().decode(errors="replace").strip()[-1000:]
            raise NoAnswer(
                "the process of Muster that sends requests to the Ray cluster has ended: "
                f"{error_text}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """Kill the driver process and its descendants. Do nothing if no driver process runs.

        The driver process is the child process that sends requests through Ray.
        """
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
    """Connect to the living nodes of a Ray cluster, as an async context manager.

    If a node has no agent, a driver process is started, which starts the agent through Ray. The
    driver process works only if this machine is a node of the cluster, for example a node without
    GPUs. The driver process is killed when the context closes, also after a cancellation.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store (GCS).

    Raises:
        NoAnswer, Denied: The control store did not answer, or the cluster has no living node.
        OSError, ValueError: The key pair of the agents cannot be read or created.
    """
    key = await asyncio.to_thread(AgentKey.of, muster_home())
    nodes = _parse_nodes(await control_store.list_living_nodes(gcs_address))
    if not nodes:
        raise NoAnswer(f"the Ray cluster with the control store {gcs_address} has no running node")
    agents = await _read_agents(gcs_address, key, nodes)
    with tempfile.TemporaryFile() as errors:
        client = NodeClient(nodes, gcs_address, key, agents, errors)
        try:
            yield client
        finally:
            await client.end()


async def _read_agents(gcs_address: str, key: AgentKey, nodes: Iterable[Node]) -> dict[str, str]:
    """Return a mapping from node id to the address that the agent of the node has published.

    Any job of the cluster can change these addresses. So an address is used only if its host is the
    host of the node.

    Raises:
        NoAnswer: The control store did not answer.
        Denied: The control store refused the request.
    """
    addresses = await control_store.read_entries(gcs_address, NAMESPACE, key.prefix)
    hosts = {node.node_id: node.host for node in nodes}
    return {
        node_id: address
        for node_id, address in addresses.items()
        if address.rpartition(":")[0] == hosts.get(node_id)
    }


@asynccontextmanager
async def _lock_agent_start(within_s: float) -> AsyncIterator[None]:
    """Hold this host's lock for the start of agents while the context is open.

    Many runs may end at the same moment. Without the lock, each run would start its own driver
    process for the same missing agents. These processes would occupy all cores for a minute.

    Args:
        within_s: Longest wait for the lock in seconds. After that, the context opens without the
            lock. 0 to take no lock.
    """
    if within_s <= 0:
        yield
        return
    deadline = time.monotonic() + within_s
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(muster_home() / _START_LOCK, flags, 0o600)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_EVERY_S)
            except OSError:
                # The file system of MUSTER_HOME has no file locks. Continue without a lock.
                break
        yield
    finally:
        os.close(descriptor)


def _parse_nodes(node_infos: Iterable[Any]) -> tuple[Node, ...]:
    """Convert the control store's GcsNodeInfo messages into nodes."""
    infos = {info.node_id.hex(): info for info in node_infos}
    nodes_per_host = Counter(info.node_manager_address for info in infos.values())

    nodes = []
    for node_id, info in infos.items():
        host = info.node_manager_address
        # The path of the raylet's socket is SESSION_DIRECTORY/sockets/raylet.
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


#: Default deadline for killing leftover processes on all nodes, in seconds.
SWEEP_WITHIN_S = 60.0
#: Deadline for the start of agents on all nodes without an agent, in seconds.
_PREPARE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverProcess:
    """A leftover process of a run on a node of a Ray cluster."""

    #: Name of the node. If several nodes run on one machine, the name of the node that was the
    #: first to report the process.
    node: str
    #: Process id on the node's machine.
    pid: int
    #: Command line of the process, shortened.
    command: str

    def __str__(self) -> str:
        return f"{self.place} ({self.command})"

    @property
    def place(self) -> str:
        """Node and pid as text, without the command line, which may contain secrets."""
        return f"node {self.node}: pid {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """Result of killing the leftover processes of a run on all nodes of a Ray cluster."""

    #: Processes that were killed.
    killed: tuple[LeftoverProcess, ...] = ()
    #: Processes that survived SIGKILL.
    left: tuple[LeftoverProcess, ...] = ()
    #: Nodes that could not be checked.
    unreached: tuple[UncheckedNode, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True if every node was checked and no leftover process runs on any node."""
        return not self.left and not self.unreached

    def fields(self, describe: Callable[[LeftoverProcess], str]) -> dict[str, Any]:
        """Return the fields of the event `job.swept`, which reports the killed processes.

        Args:
            describe: Function that returns the text with which the event describes a process.
        """
        return {
            "killed": [describe(process) for process in self.killed],
            "left": [describe(process) for process in self.left],
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
    """Send SIGKILL to the leftover processes of a run on the living nodes of a Ray cluster.

    A process belongs to the run if its environment has the MUSTER_RUN_ID of the run. A process that
    was started with a cleared environment is not found. The call may be repeated.

    Two rules protect living processes:

    - A node kills nothing while a Ray job of the run is active, because the Ray workers of that
      job have the same MUSTER_RUN_ID.
    - If this machine is a node of the cluster, the local components of the run have the same
      MUSTER_RUN_ID, too. The caller must name a component to protect the other components.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store (GCS).
        run_id: Id of the run.
        attempt: Number of an attempt. Only processes with this MUSTER_ATTEMPT are killed. None
            includes all attempts.
        component: Name of a component. Only processes with this MUSTER_COMPONENT are killed. None
            includes all components.
        only: Names of the nodes to check, by the id of the node. If empty or None, all nodes are
            checked.
        within_s: Deadline in seconds. Nodes that have not answered before the deadline count as
            `unreached`.
    """
    wanted = _marker_variables(run_id, attempt, component)
    names = dict(only or {})
    try:
        async with connect_to_nodes(gcs_address) as client:
            each = {
                node.node_id: {"wanted": wanted}
                for node in client.nodes
                if not only or node.node_id in only
            }
            results = await client.send_order("sweep", each, within_s)
            names |= {node.node_id: node.name for node in client.nodes}
    except Exception as error:
        # No node was checked. So report the whole cluster as unreached.
        why = str(error) if isinstance(error, NoAnswer | Denied) else repr(error)
        return SweepReport(unreached=(UncheckedNode(node_id="", name=gcs_address, why=why),))

    unreached = dict.fromkeys(
        {*(only or ())} - each.keys(), "the node does not belong to the cluster"
    )
    unreached |= results.unreached
    answers = {names[node]: answer for node, answer in sorted(results.answers.items())}
    return SweepReport(
        killed=_unique_processes(answers, "killed"),
        left=_unique_processes(answers, "left"),
        unreached=tuple(
            UncheckedNode(node_id=node, name=names[node], why=why)
            for node, why in sorted(unreached.items())
        ),
    )


def _marker_variables(run_id: str, attempt: int | None, component: str | None) -> dict[str, str]:
    """Return the environment variables that identify the processes of a run.

    Args:
        run_id: Id of the run.
        attempt: Number of an attempt, or None for all attempts.
        component: Name of a component, or None for all components.
    """
    values = {"RUN_ID": run_id, "ATTEMPT": attempt, "COMPONENT": component}
    return {f"MUSTER_{name}": str(value) for name, value in values.items() if value is not None}


def _unique_processes(answers: Mapping[str, Any], key: str) -> tuple[LeftoverProcess, ...]:
    """Return the processes that nodes have reported, without duplicates.

    If several Ray nodes run on one machine, each of them reports all processes of the machine.

    Args:
        answers: Mapping from node name to the report of the node.
        key: Key of the process list in each report: "killed" or "left".
    """
    processes: dict[tuple[str, int, int], LeftoverProcess] = {}
    for node, answer in answers.items():
        for entry in answer[key]:
            process = LeftoverProcess(node=node, pid=entry["pid"], command=entry["command"])
            processes.setdefault((answer["machine"], entry["pid"], entry["start"]), process)
    return tuple(processes.values())


def sweep_run(*, address: str, run_id: str, within_s: float = SWEEP_WITHIN_S) -> int:
    """Kill the leftover processes of a run on the nodes of a Ray cluster.

    Every process that was started with the run's MUSTER_RUN_ID is killed with SIGKILL. The run must
    have ended.

    Exit: 0 all leftover processes have ended; 1 a process survived, or a node could not be checked;
    2 the arguments are wrong.

    Args:
        address: URL of the Ray dashboard, for example http://10.0.0.1:8265.
        run_id: Id of the run.
        within_s: Deadline for all nodes together, in seconds.
    """
    gcs_address = asyncio.run(find_gcs_address(address))
    report = asyncio.run(sweep(gcs_address, run_id=run_id, within_s=within_s))
    for process in report.killed:
        print(f"killed: {process}")
    for process in report.left:
        print(f"outlived SIGKILL: {process}")
    for node in report.unreached:
        print(f"could not be checked: {node.name}: {node.why}")
    if report.is_clean and not report.killed:
        print("no leftover process was found")
    return EXIT_DONE if report.is_clean else EXIT_FAILED


async def find_gcs_address(address: str) -> str:
    """Return `HOST:PORT` of a Ray cluster's control store (GCS).

    Args:
        address: URL of the cluster's dashboard.

    Raises:
        NoAnswer: The dashboard did not return the address.
        Denied: The dashboard refused the request.
    """
    async with aclosing(Dashboard(address)) as dashboard:
        return await dashboard.gcs_address()


async def make_nodes_ready(address: str) -> None:
    """Start Muster's agent on each node of a Ray cluster, unless the node already has an agent.

    Later requests to the nodes are then fast. A failure is only logged, because a request to a node
    without an agent also starts the agent.

    Args:
        address: URL of the cluster's dashboard.
    """
    try:
        async with connect_to_nodes(await find_gcs_address(address)) as client:
            each: dict[str, Any] = {node.node_id: {} for node in client.nodes}
            await client.send_order("greet", each, _PREPARE_TIMEOUT_S)
    except (NoAnswer, Denied, OSError, ValueError) as error:
        _log.info(
            "Muster could not start its agent processes on the nodes of %s: %s", address, error
        )


async def warn(
    gcs_address: str,
    *,
    run_id: str,
    attempt: int,
    component: str,
    signum: int,
    skip: Mapping[str, list[list[int]]],
    within_s: float,
) -> dict[str, WarnedProcesses]:
    """Send a warning signal to those processes of a job that have a handler for the signal.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store (GCS).
        run_id: Id of the run.
        attempt: Number of the run's attempt.
        component: Name of the component that runs as the job.
        signum: Number of the signal.
        skip: Mapping from a machine to processes that do not get the signal again, each as pid and
            start time.
        within_s: Deadline for all nodes together, in seconds.

    Returns:
        The processes that got the signal now, by the name of the node. Nodes without such processes
        are not included.

    Raises:
        NoAnswer, Denied, OSError, ValueError: No node could be asked.
    """
    async with connect_to_nodes(gcs_address) as client:
        wanted = _marker_variables(run_id, attempt, component)
        arguments = {"wanted": wanted, "signum": signum, "skip": dict(skip)}
        each = {node.node_id: arguments for node in client.nodes}
        results = await client.send_order("warn", each, within_s)
        names = {node.node_id: node.name for node in client.nodes}
    # Several Ray nodes may run on one machine and give the same answer. Keep one answer for each
    # machine.
    by_machine = {
        answer["machine"]: (names[node_id], answer) for node_id, answer in results.answers.items()
    }
    return dict(sorted(entry for entry in by_machine.values() if entry[1]["processes"]))


#: Deadline for the examination of processes on one node, as a share of the deadline for all nodes.
#: The rest of the time is for starting missing agents and for sending the results.
_NODE_TIME_SHARE = 0.3


async def examine(
    gcs_address: str, *, run_id: str, attempt: int, component: str, within_s: float
) -> tuple[dict[str, HangEvidence], dict[str, str]]:
    """Examine the processes of a hanging job on every node, and return the evidence.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store (GCS).
        run_id: Id of the run.
        attempt: Number of the run's attempt.
        component: Name of the component that runs as the job.
        within_s: Deadline for all nodes together, in seconds.

    Returns:
        Two mappings. The first maps the name of each node that has processes of the job to the
        evidence from this node. If several nodes run on the same machine, the first mapping
        contains only one of these nodes. The second maps the name of each node that could not be
        examined to the reason.

    Raises:
        NoAnswer, Denied, OSError, ValueError: No node could be examined.
    """
    async with connect_to_nodes(gcs_address) as client:
        wanted = _marker_variables(run_id, attempt, component)
        arguments = {"wanted": wanted, "within_s": within_s * _NODE_TIME_SHARE}
        each = {node.node_id: arguments for node in client.nodes}
        results = await client.send_order("examine", each, within_s)
        names = {node.node_id: node.name for node in client.nodes}

    # Several Ray nodes may run on one machine and give the same answer. Keep one answer for each
    # machine.
    by_machine = {
        answer["machine"]: (names[node_id], answer) for node_id, answer in results.answers.items()
    }
    evidence = dict(sorted(entry for entry in by_machine.values() if entry[1]["processes"]))
    unreached = {names[node_id]: why for node_id, why in results.unreached.items()}
    return evidence, unreached
