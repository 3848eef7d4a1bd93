"""Asking the nodes of a Ray cluster from a process that is no part of it: to end what a run has
left on them, and what its processes hang in.

A node's agent answers in milliseconds (`visits`). Where one is missing, a child process puts it
there: a Ray driver takes 100 MB and threads, and waits for minutes, or aborts, when its cluster is
gone. Whatever becomes of a node or of its cluster, there is an answer by the deadline.

As a command, for what a preflight has found: `muster sweep --address URL --run-id ID`.
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
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

from tasks.processes import tree
from tasks.processes.hang_report import HangEvidence
from tasks.processes.machine import code_here
from tasks.ray import control_store
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer, accelerators, driver_env
from tasks.ray.end import NotSeen, SweepReport, Swept, UnseenNode, told_apart
from tasks.ray.submission import UnseenNote, unseen_file
from tasks.ray.visits import NAMESPACE, signed_text
from tasks.record.events import Emit, EventLog
from tasks.record.places import kept_secret, muster_home
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import MusterError
from tasks.spec.words import commas

_log = logging.getLogger(__name__)

#: An answer may be late by so much: the driver keeps the deadline itself.
_LATE_S = 5.0
_END_WITHIN_S = 3.0
#: For an agent to say who it is.
_GREETS_WITHIN_S = 3.0
#: Of the time for a visit, what agents have to be there before it.
_READY_SHARE = 0.5
#: The longest line: as long as a cluster is large.
_LINE_BYTES = 1 << 26
#: They would make the visit a part of the run that it looks for.
_NOT_INHERITED = frozenset(
    {
        *("MUSTER_RUN_ID", "MUSTER_ATTEMPT", "MUSTER_COMPONENT", "MUSTER_ROLE"),
        *("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"),
    }
)


class NotVisited(MusterError):
    """The nodes could not be asked at all: the cluster is away, or its driver failed."""


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
    """Asks the nodes of a cluster; `visiting` gives one."""

    _gcs_address: str
    _key: AgentKey
    #: What the driver says besides.
    _errors: IO[bytes]
    #: Those that live, by `look`.
    nodes: tuple[Node, ...] = ()
    #: Best so far: a node's clock against this machine's, and by how much that may be wrong.
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: `HOST:PORT`, by node id.
    _agents: dict[str, str] = field(default_factory=dict)
    _driver: asyncio.subprocess.Process | None = None
    #: Why the driver is of no use any more.
    _failed: str = ""
    _is_asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self) -> None:
        """Which nodes live, and where their agents listen; a driver that has failed is forgotten.

        Raises: NotVisited.
        """
        if self._failed:
            await self.end(0.0)
            self._driver, self._failed = None, ""
        try:
            found, agents = await asyncio.gather(
                control_store.living_nodes(self._gcs_address),
                control_store.entries(self._gcs_address, NAMESPACE, self._key.prefix),
            )
        except (NoAnswer, Denied) as error:
            raise NotVisited(str(error)) from error
        if not (nodes := _named(found)):
            raise NotVisited(f"no node of the cluster of {self._gcs_address} lives")
        self.nodes = nodes
        # Any job can write there: a node is asked at its own address only.
        hosts = {node.node_id: node.host for node in self.nodes}
        self._agents |= {
            id: at for id, at in agents.items() if at.rpartition(":")[0] == hosts.get(id)
        }

    async def make_ready(self, within_s: float) -> None:
        """Have every node have an agent, as far as can be. Raises: NotVisited."""
        await self.look()
        await self.visit("greet", {node.node_id: {} for node in self.nodes}, within_s)

    async def visit(
        self,
        what: str,
        each: Mapping[str, Any],
        within_s: float,
        *,
        is_of_machine: bool = False,
    ) -> Visited:
        """Have one of ORDERS done on nodes, all at the same time: by their agents; where there is
        none, or it can't be reached, by one that is asked by way of Ray.

        Args:
            each: `arguments[node id]`.
            is_of_machine: nodes that see the same processes do the same: one of them is enough.
        """
        deadline = time.monotonic() + within_s
        known = self._agents.copy()
        found = await self._by_agents(what, each, deadline, is_of_machine)
        unreached: dict[str, str] = {}
        if each.keys() - found:
            async with self._is_asking:
                # Those that have been put there meanwhile.
                new = {node: each[node] for node in each.keys() - found}
                new = {n: its for n, its in new.items() if self._agents.get(n) != known.get(n)}
                found |= await self._by_agents(what, new, deadline, is_of_machine)
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
        if unreached:
            unreached |= await self._lost(unreached)
        answers = {node: one["answer"] for node, one in found.items() if "answer" in one}
        return Visited(answers=answers, unreached=unreached)

    async def _lost(self, unreached: Mapping[str, str]) -> dict[str, str]:
        """What is to be said of those that have left the cluster since this began."""
        with suppress(NoAnswer, Denied):
            living = await control_store.living_nodes(self._gcs_address)
            gone = unreached.keys() - {node.node_id.hex() for node in living}
            for node in self.nodes:
                if node.node_id in gone:
                    _log.warning("node %s was lost while it was asked", node.name)
            return dict.fromkeys(gone, "it was lost while it was asked")
        return {}

    async def _greeted(self, nodes: Iterable[str]) -> dict[str, AgentLine]:
        asked = [(node, self._agents[node]) for node in nodes if node in self._agents]
        lines = await asyncio.gather(*(AgentLine.open(*one) for one in asked))
        return {line.node_id: line for line in lines if line is not None}

    async def _by_agents(
        self, what: str, each: Mapping[str, Any], deadline: float, is_of_machine: bool
    ) -> dict[str, Any]:
        lines = await self._greeted(each)
        # Those that do the same, of which the next one is asked where one has gone.
        groups: dict[str, list[AgentLine]] = {}
        for node, line in lines.items():
            groups.setdefault(line.sees if is_of_machine else node, []).append(line)
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
        """By one at a time."""
        try:
            if self._driver is None:
                await self._start_driver(deadline)
            if not self._failed:
                within_s = max(1.0, deadline - time.monotonic())
                question = {"what": what, "each": dict(each), "within_s": within_s}
                visited = Visited(**await self._answered(question, within_s + _LATE_S))
                self._agents |= {node: one["address"] for node, one in visited.answers.items()}
                return visited
        except NotVisited as error:
            self._failed = str(error)
        return Visited(answers={}, unreached=dict.fromkeys(each, self._failed))

    async def _start_driver(self, deadline: float) -> None:
        self._driver = await asyncio.create_subprocess_exec(
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
        # An agent's answers are not encrypted.
        modulus = "0" if control_store.uses_tls() else self._key.modulus
        hello = {"gcs_address": self._gcs_address, "modulus": modulus, "prefix": self._key.prefix}
        await self._answered(hello, max(1.0, deadline - time.monotonic()))

    async def _answered(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        assert self._driver is not None
        assert self._driver.stdin is not None and self._driver.stdout is not None
        try:
            self._driver.stdin.write(json.dumps(question).encode() + b"\n")
            async with asyncio.timeout(within_s):
                await self._driver.stdin.drain()
                line = await self._driver.stdout.readline()
        except TimeoutError:
            raise NotVisited(f"the cluster did not answer within {within_s:g} s") from None
        except OSError:
            line = b""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()[-1000:]
            raise NotVisited(f"the driver that visits the nodes has ended: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self, within_s: float) -> None:
        """Nothing of the driver is left."""
        driver = self._driver
        if driver is None:
            return
        assert driver.stdin is not None
        driver.stdin.close()
        try:
            async with asyncio.timeout(within_s):
                await driver.wait()
        except TimeoutError:
            pass
        finally:
            if driver.returncode is None:
                tree.signal_descendants(driver.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            await driver.wait()


@asynccontextmanager
async def visiting(
    gcs_address: str, *, ready_within_s: float | None = None
) -> AsyncIterator[NodeVisitor]:
    """A visitor of the living nodes of a cluster. A cancel kills its driver.

    To have agents put where there are none, this machine must be a node of the cluster, be it one
    that runs no work.

    Args:
        ready_within_s: look at them later; meanwhile, every node is to have an agent.

    Raises: NotVisited.
    """
    try:
        key = await asyncio.to_thread(AgentKey.of, muster_home())
    except (OSError, ValueError) as error:
        raise NotVisited(f"agents of nodes need a key, which can't be had: {error}") from error
    with tempfile.TemporaryFile() as errors:
        visitor = NodeVisitor(gcs_address, key, errors)
        ready: list[asyncio.Task[None]] = []
        if ready_within_s is None:
            await visitor.look()
        else:
            ready_within_s *= _READY_SHARE
            ready = [asyncio.create_task(visitor.make_ready(ready_within_s))]
        within_s = 0.0
        try:
            yield visitor
            within_s = _END_WITHIN_S
        finally:
            for task in ready:
                task.cancel()
            await asyncio.gather(*ready, return_exceptions=True)
            await visitor.end(within_s)


def _named(found: Iterable[Any]) -> tuple[Node, ...]:
    nodes = [
        Node(
            node_id=one.node_id.hex(),
            name=one.node_manager_address,
            host=one.node_manager_address,
            gpus=accelerators(one.resources_total),
            # .../session_2026-.../sockets/raylet
            ray_dir=os.path.dirname(os.path.dirname(one.raylet_socket_name)),
        )
        for one in found
    ]
    shared = [node.host for node in nodes]
    return tuple(
        replace(node, name=f"{node.host}/{node.node_id[:8]}")
        if shared.count(node.host) > 1
        else node
        for node in nodes
    )


SWEEP_WITHIN_S = 60.0


async def sweep(
    gcs_address: str,
    *,
    run_id: str,
    attempt: int | None = None,
    component: str | None = None,
    only: Collection[str] = (),
    within_s: float = SWEEP_WITHIN_S,
    over: Awaitable[object] | None = None,
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
        only: Only these nodes, by their ids; empty: all.
        within_s: For all of it. What has not answered by then is `unreached`.
        over: The end of what is swept, where that is still to come; the time counts from it, and
            before it the nodes are made ready.
    """
    wanted = _marks(run_id, attempt, component)
    try:
        async with visiting(gcs_address, ready_within_s=within_s if over else None) as visitor:
            if over is not None:
                await over
                await visitor.look()
            asked = [node for node in visitor.nodes if not only or node.node_id in only]
            each = {node.node_id: {"wanted": wanted} for node in asked}
            visited = await visitor.visit("sweep", each, within_s, is_of_machine=True)
            names = {node.node_id: node.name for node in visitor.nodes}
    except NotVisited as error:
        return SweepReport(unreached=(UnseenNode(node_id="", name=gcs_address, why=str(error)),))
    left_out = dict.fromkeys({*only} - each.keys(), "it is not of the cluster")
    answers = {names[node]: answer for node, answer in sorted(visited.answers.items())}
    return SweepReport(
        killed=_once(answers, "killed"),
        left=_once(answers, "left"),
        unreached=tuple(
            UnseenNode(node_id=node, name=names.get(node, node[:8]), why=why)
            for node, why in sorted({**visited.unreached, **left_out}.items())
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
    try:
        gcs_address = asyncio.run(gcs_address_of(address))
    except (NoAnswer, Denied) as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
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
    dashboard = Dashboard(address)
    try:
        return await dashboard.gcs_address()
    finally:
        await dashboard.close()


def make_nodes_ready(address: str) -> None:
    """Have every node of a cluster answer at once from now on, by the URL of its dashboard; where
    one can't be made to, whoever asks it sees to it."""

    async def make_ready() -> None:
        async with visiting(await gcs_address_of(address)) as visitor:
            await visitor.make_ready(SWEEP_WITHIN_S)

    try:
        asyncio.run(make_ready())
    except (NotVisited, NoAnswer, Denied) as error:
        _log.info("the nodes of %s have no agents yet: %s", address, error)


def sweep_of(
    run_id: str, attempt: int, component: str, *, emit: Emit, within_s: float = SWEEP_WITHIN_S
) -> Callable[[str, Awaitable[object]], Awaitable[SweepReport]]:
    """The sweep after a job: told the address of a cluster's control store, and the job's end to
    wait for, it ends what is left of the job on every node.
    """

    async def swept(gcs_address: str, over: Awaitable[object]) -> SweepReport:
        its: dict[str, Any] = {"run_id": run_id, "attempt": attempt, "component": component}
        report = await sweep(gcs_address, **its, within_s=within_s, over=over)
        if report.killed or not report.is_clean:
            _tell(emit, report, str)
        return report

    return swept


def _tell(emit: Emit, report: SweepReport, words: Callable[[Swept], str], **of: Any) -> None:
    killed, left = ([words(one) for one in these] for these in (report.killed, report.left))
    unreached = {node.name: node.why for node in report.unreached}
    emit("job.swept", killed=killed, left=left, unreached=unreached, **of)


#: Of the time for an examination, what each node has.
_LOOK_SHARE = 0.3


async def examine(
    gcs_address: str, *, run_id: str, attempt: int, component: str, within_s: float
) -> tuple[dict[str, HangEvidence], dict[str, str]]:
    """What all processes of a job that hangs do on every node, and why nothing is known of other
    nodes, both by the name of the node.

    Raises: NotVisited.
    """
    async with visiting(gcs_address) as visitor:
        wanted = _marks(run_id, attempt, component)
        given = {"wanted": wanted, "within_s": within_s * _LOOK_SHARE}
        each = {node.node_id: given for node in visitor.nodes}
        visited = await visitor.visit("examine", each, within_s, is_of_machine=True)
        names = {node.node_id: node.name for node in visitor.nodes}
    # Several nodes may share a machine.
    answers = {one["machine"]: (names[id], one) for id, one in visited.answers.items()}
    unreached = {names[id]: why for id, why in visited.unreached.items()}
    return dict(sorted(one for one in answers.values() if one[1]["processes"])), unreached


#: For one more question: a node that answers at all does so in a few seconds.
_AGAIN_WITHIN_S = 20.0
#: A cluster of which no node could be asked for so long is not asked any more.
_GIVES_UP_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAgain:
    """What asking again came to."""

    #: By node, in words; empty while nothing new is known.
    found: tuple[str, ...] = ()
    #: Why it is to be asked once more, in words; empty where it is not.
    open: str = ""
    #: Why no node of the cluster could be asked; empty where one was.
    away: str = ""


def ask_again(note: UnseenNote) -> AskedAgain:
    """End what the noted nodes still run of the job, where they answer now. Those that do, and
    those that have left the cluster, are noted no more."""
    return asyncio.run(_ask_again(note))


async def _ask_again(note: UnseenNote) -> AskedAgain:
    dashboard = Dashboard(note.address)
    try:
        gcs_address = await dashboard.gcs_address()
        report = await sweep(
            gcs_address,
            run_id=note.run_id,
            attempt=note.attempt,
            component=note.component,
            only=note.nodes,
            within_s=_AGAIN_WITHIN_S,
        )
        names = {node.node_id: node.name for node in report.unreached} | dict(note.nodes)
        unreached = [replace(node, name=names[node.node_id]) for node in report.unreached]
        now = await told_apart(dashboard, unreached)
    except (NoAnswer, Denied) as error:
        return not_asked(note, str(error))
    finally:
        await dashboard.close()
    if away := [node for node in report.unreached if not node.node_id]:
        return not_asked(note, away[0].why)
    if report.killed:
        _tell(EventLog(note.events).emit, report, _pid, component=note.component)
    if report.left:
        open = f"outlived SIGKILL: {commas(map(_pid, report.left))}"
    elif now.unseen:
        open = commas(f"{node} ({node.why})" for node in now.unseen)
        note.model_copy(update={"nodes": now.asked_again}).write()
    else:
        open = ""
        unseen_file(note.submission_id).unlink(missing_ok=True)
    return AskedAgain(found=_found(note, report, now), open=open)


def _found(note: UnseenNote, report: SweepReport, now: NotSeen) -> tuple[str, ...]:
    """What is known now, and was not before."""
    silent = {node.node_id for node in (*now.unseen, *now.lost)}
    seen = [f"node {name}" for node_id, name in note.nodes.items() if node_id not in silent]
    if not note.nodes and not silent:
        seen = ["every node"]
    ended = [f"ended {_pid(one)}" for one in report.killed]
    if seen and not ended:
        ended = ["nothing of the job was left there"]
    return (*((f"{commas(seen)} was seen",) if seen else ()), *ended, *now.lost_in_words())


def _pid(one: Swept) -> str:
    """Without its command line, in which secrets may stand."""
    return f"node {one.node}: pid {one.pid}"


def not_asked(note: UnseenNote, why: str) -> AskedAgain:
    """What is to be said where no node of the cluster could be asked."""
    if time.time() - note.since < _GIVES_UP_AFTER_S:
        return AskedAgain(open=f"no node was seen ({why})", away=why)
    unseen_file(note.submission_id).unlink(missing_ok=True)
    by_hand = f"muster sweep --address {note.address} --run-id {note.run_id}"
    said = f"no node was seen for a day ({why}), and none is asked any more: `{by_hand}` does"
    return AskedAgain(found=(said,), away=why)
