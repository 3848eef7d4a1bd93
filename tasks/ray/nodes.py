"""Asking the nodes of a Ray cluster from a process that is no part of it.

A node's agent answers in milliseconds (`visits`). Where one is missing, a child process puts it
there: a Ray driver takes 100 MB and threads, and waits for minutes, or aborts, when its cluster is
gone. Whatever becomes of a node or of its cluster, there is an answer by the deadline.

Asked are they to end what a run has left on them, and what its processes hang in. As a command, for
what a preflight has found: `muster sweep --address URL --run-id ID`.
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
from tasks.processes.machine import code_here
from tasks.ray import control_store
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer, accelerators, driver_env
from tasks.ray.unseen import UnseenNode
from tasks.ray.visits import NAMESPACE, OF_MACHINES, signed_text
from tasks.record.places import kept_secret, muster_home
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED

_log = logging.getLogger(__name__)

#: An answer may be late by so much: the driver keeps the deadline itself.
_LATE_S = 5.0
#: For an agent to say who it is.
_GREETS_WITHIN_S = 3.0
#: The longest line: as long as a cluster is large.
_LINE_BYTES = 1 << 26
#: They would make the visit a part of the run that it looks for.
_NOT_INHERITED = frozenset(
    {
        *("MUSTER_RUN_ID", "MUSTER_ATTEMPT", "MUSTER_COMPONENT", "MUSTER_ROLE"),
        *("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One living node, as the cluster knows it."""

    #: Ray's, in hex.
    node_id: str
    #: Its address; with the beginning of its id where several nodes have that address.
    name: str
    #: Its address.
    host: str
    #: GPUs that Ray counts.
    gpus: float
    #: Ray's session directory there.
    ray_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited:
    """What came back from a visit."""

    #: By node id.
    answers: Mapping[str, Any]
    #: `why[node id]`.
    unreached: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AgentKey:
    """By which agents know whose orders they take. It stays in a file for this user alone."""

    private: Any
    #: In hex.
    modulus: str
    #: Of its agents' names, before the id of their node: whose they are, and of which code.
    prefix: str

    @staticmethod
    @cache
    def of(home: Path) -> AgentKey:
        """Raises: OSError, ValueError."""
        from cryptography.hazmat.primitives import serialization as how
        from cryptography.hazmat.primitives.asymmetric import rsa

        def make() -> str:
            form = (how.Encoding.PEM, how.PrivateFormat.PKCS8, how.NoEncryption())
            return rsa.generate_private_key(65537, 2048).private_bytes(*form).decode()

        text = kept_secret(home / "agents.key", make).encode()
        private: Any = how.load_pem_private_key(text, None, unsafe_skip_rsa_key_validation=True)
        modulus = f"{private.public_key().public_numbers().n:x}"
        whose = hashlib.sha256(modulus.encode()).hexdigest()[:12]
        return AgentKey(private, modulus, f"agent-{whose}-{code_here()['digest'] or 'unknown'}-")

    def sign(self, text: bytes) -> str:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        return str(self.private.sign(text, padding.PKCS1v15(), hashes.SHA256()).hex())


@dataclass(slots=True)
class AgentLine:
    """A connection to an agent, which has said who it is, and takes one order."""

    node_id: str
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _nonce: str
    #: Equal for nodes on which the same processes are seen, and may be ended.
    sees: str
    #: Its clock against this machine's, and by how much that may be wrong, seconds.
    clock: tuple[float, float]

    @staticmethod
    async def open(node_id: str, address: str) -> AgentLine | None:
        """None where no agent of this node answers."""
        host, _, port = address.rpartition(":")
        with suppress(OSError, ValueError, KeyError, TypeError):
            async with asyncio.timeout(_GREETS_WITHIN_S):
                began, began_s = time.time(), time.monotonic()
                reader, writer = await asyncio.open_connection(host, int(port), limit=_LINE_BYTES)
                try:
                    said = json.loads(await reader.readline())
                    error_s = (time.monotonic() - began_s) / 2
                    clock = (said["at"] - began - error_s, error_s)
                    if said["node_id"] != node_id:
                        raise ValueError(said)
                    return AgentLine(node_id, reader, writer, said["nonce"], said["sees"], clock)
                except BaseException:
                    writer.transport.abort()
                    raise
        return None

    async def order(self, key: AgentKey, what: str, given: Any, within_s: float) -> Any:
        """What `perform` gives; None where the agent, or its node, has gone meanwhile."""
        order = json.dumps({"what": what, "given": given}).encode() + b"\n"
        signature = key.sign(signed_text(self.node_id, self._nonce, order)).encode()
        try:
            async with asyncio.timeout(within_s):
                self._writer.write(order + signature + b"\n")
                said = await self._reader.readline()
            return json.loads(said) | {"clock": self.clock}
        except TimeoutError:
            return {"why": f"no answer within {within_s:g} s"}
        except (OSError, ValueError):
            return None
        finally:
            self.close()

    def close(self) -> None:
        self._writer.transport.abort()


@dataclass(slots=True)
class NodeVisitor:
    """Asks the nodes of a cluster, one question at a time; `visiting` gives one."""

    #: Those that live.
    nodes: tuple[Node, ...]
    _gcs_address: str
    _key: AgentKey
    #: `HOST:PORT`, by node id.
    _agents: dict[str, str]
    #: What the driver says besides.
    _errors: IO[bytes]
    #: Best so far: a node's clock against this machine's, and by how much that may be wrong.
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    _driver: asyncio.subprocess.Process | None = None

    async def visit(self, what: str, each: Mapping[str, Any], within_s: float) -> Visited:
        """Have one of ORDERS done on nodes, all at the same time: by their agents; where there is
        none, or it can't be reached, by one that is asked by way of Ray.

        Args:
            each: `arguments[node id]`.
        """
        deadline = time.monotonic() + within_s
        found = await self._by_agents(what, each, deadline)
        unreached = dict.fromkeys(each.keys() - found, f"no answer within {within_s:g} s")
        # Of an agent that has just died Ray may not know yet.
        for _ in range(2):
            rest = {node: each[node] for node in each.keys() - found}
            if rest and time.monotonic() < deadline:
                by_ray = await self._ask_driver(what, rest, deadline)
                found |= by_ray.answers
                unreached = dict(by_ray.unreached)
        for node, answer in found.items():
            if clock := answer.get("clock"):
                best = min(self.clocks.get(node, clock), clock, key=lambda one: one[1])
                self.clocks[node] = (best[0], best[1])
            if "why" in answer:
                unreached[node] = answer["why"]
        answers = {node: one["answer"] for node, one in found.items() if "answer" in one}
        return Visited(answers=answers, unreached=unreached)

    async def _by_agents(
        self, what: str, each: Mapping[str, Any], deadline: float
    ) -> dict[str, Any]:
        asked = [(node, self._agents[node]) for node in each if node in self._agents]
        lines = await asyncio.gather(*(AgentLine.open(*one) for one in asked))
        # Those that do the same, of which the next one is asked where one has gone.
        groups: dict[str, list[AgentLine]] = {}
        for line in filter(None, lines):
            same = line.sees if what in OF_MACHINES else line.node_id
            groups.setdefault(same, []).append(line)
        found: dict[str, Any] = {}

        async def ask(group: list[AgentLine]) -> None:
            try:
                for line in group:
                    left_s = max(1.0, deadline - time.monotonic())
                    said = await line.order(self._key, what, each[line.node_id], left_s)
                    if said is not None:
                        found.update({one.node_id: said for one in group})
                        return
            finally:
                for line in group:
                    line.close()

        await asyncio.gather(*map(ask, groups.values()))
        return found

    async def _ask_driver(self, what: str, each: Mapping[str, Any], deadline: float) -> Visited:
        try:
            if self._driver is None:
                self._driver = await self._start_driver()
                # An agent's answers are not encrypted.
                modulus = "0" if control_store.uses_tls() else self._key.modulus
                hello = {"gcs_address": self._gcs_address, "modulus": modulus}
                hello["prefix"] = self._key.prefix
                await self._answered(hello, max(1.0, deadline - time.monotonic()))
            within_s = max(1.0, deadline - time.monotonic())
            question = {"what": what, "each": dict(each), "within_s": within_s}
            visited = Visited(**await self._answered(question, within_s + _LATE_S))
        except NoAnswer as error:
            # What it may say later would be taken for the answer to the next question.
            await self.end()
            return Visited(answers={}, unreached=dict.fromkeys(each, str(error)))
        self._agents |= {node: one["address"] for node, one in visited.answers.items()}
        return visited

    async def _start_driver(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tasks.ray.visits"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            limit=_LINE_BYTES,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env={
                **{k: v for k, v in os.environ.items() if k not in _NOT_INHERITED},
                **{"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"},
                **driver_env(self._gcs_address),
            },
        )

    async def _answered(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
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
            said = self._errors.read().decode(errors="replace").strip()[-1000:]
            raise NoAnswer(f"the driver that visits the nodes has ended: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """Nothing of the driver is left."""
        driver, self._driver = self._driver, None
        if driver is not None:
            if driver.returncode is None:
                tree.signal_descendants(driver.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            await driver.wait()


@asynccontextmanager
async def visiting(gcs_address: str) -> AsyncIterator[NodeVisitor]:
    """A visitor of the living nodes of a cluster. A cancel kills its driver.

    To have agents put where there are none, this machine must be a node of the cluster, be it one
    that runs no work.

    Raises: NoAnswer, Denied; OSError and ValueError, where the key of the agents can't be had.
    """
    key = await asyncio.to_thread(AgentKey.of, muster_home())
    living, agents = await asyncio.gather(
        control_store.living_nodes(gcs_address),
        control_store.entries(gcs_address, NAMESPACE, key.prefix),
    )
    if not (nodes := _named(living)):
        raise NoAnswer(f"no node of the cluster of {gcs_address} lives")
    # Any job can write there: a node is asked at its own address only.
    hosts = {node.node_id: node.host for node in nodes}
    agents = {id: at for id, at in agents.items() if at.rpartition(":")[0] == hosts.get(id)}
    with tempfile.TemporaryFile() as errors:
        visitor = NodeVisitor(nodes, gcs_address, key, agents, errors)
        try:
            yield visitor
        finally:
            await visitor.end()


def _named(found: Iterable[Any]) -> tuple[Node, ...]:
    """Of what the control store says of nodes."""
    ids = {one.node_id.hex(): one for one in found}
    count = Counter(one.node_manager_address for one in ids.values())
    return tuple(
        Node(
            node_id=id,
            name=host if count[host] == 1 else f"{host}/{id[:8]}",
            host=host,
            gpus=accelerators(one.resources_total),
            # .../session_2026-.../sockets/raylet
            ray_dir=os.path.dirname(os.path.dirname(one.raylet_socket_name)),
        )
        for id, one in ids.items()
        for host in [one.node_manager_address]
    )


SWEEP_WITHIN_S = 60.0
#: For agents to be put where there are none.
_READY_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """One process that carried the run's id."""

    #: The node that found it first, of those that share its machine.
    node: str
    pid: int
    #: Its command line, shortened.
    command: str

    def __str__(self) -> str:
        return f"{self.place} ({self.command})"

    @property
    def place(self) -> str:
        """Without its command line, in which secrets may stand."""
        return f"node {self.node}: pid {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep of a cluster came to."""

    killed: tuple[Swept, ...] = ()
    #: They outlived SIGKILL.
    left: tuple[Swept, ...] = ()
    unreached: tuple[UnseenNode, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Every node was asked, and nothing is left on any."""
        return not self.left and not self.unreached

    def fields(self, shown: Callable[[Swept], str]) -> dict[str, Any]:
        """Of the event that tells of it."""
        return {
            "killed": [shown(one) for one in self.killed],
            "left": [shown(one) for one in self.left],
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
    """End, on every living node, what was started with MUSTER_RUN_ID of this run and lives.

    Ray's own workers of the run's jobs carry it too: a node refuses where one of these jobs has not
    ended. Where this machine is a node, so do the run's local components: name the component. A
    process that has scrubbed its environment before its program began is not found. Idempotent.
    This process does not become a Ray driver.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store.
        attempt: Only what also has this MUSTER_ATTEMPT.
        component: Only what also has this MUSTER_COMPONENT.
        only: Only these nodes, `name[node id]`; empty, or None: all.
        within_s: For all of it. What has not answered by then is `unreached`.
    """
    wanted = _marks(run_id, attempt, component)
    names = dict(only or {})
    try:
        async with visiting(gcs_address) as visitor:
            each = {
                node.node_id: {"wanted": wanted}
                for node in visitor.nodes
                if not only or node.node_id in only
            }
            visited = await visitor.visit("sweep", each, within_s)
            names |= {node.node_id: node.name for node in visitor.nodes}
    except Exception as error:
        # Whatever a cluster in trouble makes of it: nothing is known of its nodes then.
        why = str(error) if isinstance(error, NoAnswer | Denied) else repr(error)
        return SweepReport(unreached=(UnseenNode(node_id="", name=gcs_address, why=why),))
    unreached = dict.fromkeys({*(only or ())} - each.keys(), "it is not of the cluster")
    unreached |= visited.unreached
    answers = {names[node]: answer for node, answer in sorted(visited.answers.items())}
    return SweepReport(
        killed=_once(answers, "killed"),
        left=_once(answers, "left"),
        unreached=tuple(
            UnseenNode(node_id=node, name=names[node], why=why)
            for node, why in sorted(unreached.items())
        ),
    )


def _marks(run_id: str, attempt: int | None, component: str | None) -> dict[str, str]:
    named = {"RUN_ID": run_id, "ATTEMPT": attempt, "COMPONENT": component}
    return {f"MUSTER_{name}": str(value) for name, value in named.items() if value is not None}


def _once(answers: Mapping[str, Any], key: str) -> tuple[Swept, ...]:
    """Each process once, though several nodes may share its machine."""
    found: dict[tuple[str, int, int], Swept] = {}
    for node, answer in answers.items():
        for one in answer[key]:
            swept = Swept(node=node, pid=one["pid"], command=one["command"])
            found.setdefault((answer["machine"], one["pid"], one["start"]), swept)
    return tuple(found.values())


def sweep_run(*, address: str, run_id: str, within_s: float = SWEEP_WITHIN_S) -> int:
    """End what a run that has ended has left on the nodes of a Ray cluster: every process that was
    started with its MUSTER_RUN_ID, by SIGKILL. The run must have ended.

    Exit: 0 nothing is left; 1 something is, or a node could not be asked; 2 the arguments are
    wrong.

    Args:
        address: The URL of the Ray dashboard.
        run_id: Of the run.
        within_s: For all of it, in seconds.
    """
    gcs_address = asyncio.run(gcs_address_of(address))
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


async def gcs_address_of(address: str) -> str:
    """`HOST:PORT` of a cluster's control store, by its dashboard. Raises: NoAnswer, Denied."""
    async with aclosing(Dashboard(address)) as dashboard:
        return await dashboard.gcs_address()


async def make_nodes_ready(address: str) -> None:
    """Have every node of a cluster answer at once from now on, by the URL of its dashboard; where
    one can't be made to, whoever asks it sees to it."""
    try:
        async with visiting(await gcs_address_of(address)) as visitor:
            each: dict[str, Any] = {node.node_id: {} for node in visitor.nodes}
            await visitor.visit("greet", each, _READY_WITHIN_S)
    except (NoAnswer, Denied, OSError, ValueError) as error:
        _log.info("the nodes of %s have no agents yet: %s", address, error)


#: Of the time for an examination, what each node has.
_LOOK_SHARE = 0.3


async def examine(
    gcs_address: str, *, run_id: str, attempt: int, component: str, within_s: float
) -> tuple[dict[str, HangEvidence], dict[str, str]]:
    """What all processes of a job that hangs do on every node, and why nothing is known of other
    nodes, both by the name of the node.

    Raises: NoAnswer, Denied, OSError, ValueError.
    """
    async with visiting(gcs_address) as visitor:
        wanted = _marks(run_id, attempt, component)
        given = {"wanted": wanted, "within_s": within_s * _LOOK_SHARE}
        each = {node.node_id: given for node in visitor.nodes}
        visited = await visitor.visit("examine", each, within_s)
        names = {node.node_id: node.name for node in visitor.nodes}
    # Several nodes may share a machine.
    answers = {one["machine"]: (names[id], one) for id, one in visited.answers.items()}
    unreached = {names[id]: why for id, why in visited.unreached.items()}
    return dict(sorted(one for one in answers.values() if one[1]["processes"])), unreached
