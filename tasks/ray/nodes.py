"""Asking the nodes of a Ray cluster from a process that is no part of the cluster, and ending what
a run has left on them.

The driver is a child process, `visits`; whatever becomes of it or of its cluster, the process
that asks has an answer by its deadline, or an error.

As a command, for what a preflight has found: `muster sweep --address URL --run-id ID`.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from prefect.context import FlowRunContext
from prefect.settings import get_current_settings

from tasks.processes import tree
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer, driver_env
from tasks.ray.submission import UnseenNote, unseen_file
from tasks.record.events import Emit, EventLog
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import MusterError
from tasks.spec.words import commas, listed

#: An answer may be late by so much: the driver keeps the deadline itself.
_LATE_S = 5.0
_END_WITHIN_S = 3.0
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
    """One node, as the cluster knows it."""

    #: Ray's, in hex.
    node_id: str
    #: Its address; with the beginning of its id where several nodes have that address.
    name: str
    #: False for one that has left the cluster.
    is_alive: bool
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


@dataclass(slots=True)
class NodeVisitor:
    """A driver in a child process; `visiting` gives one."""

    _process: asyncio.subprocess.Process
    _errors: IO[bytes]
    #: Dead ones too.
    nodes: tuple[Node, ...] = ()

    @property
    def alive(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.is_alive)

    async def visit(self, what: str, each: Mapping[str, Any], within_s: float) -> Visited:
        """Run one of `visits.VISITS`, or `clock`, on nodes, all at the same time.

        Args:
            each: `arguments[node id]`.

        Raises: NotVisited.
        """
        question = {"visit": what, "each": dict(each), "within_s": within_s}
        answer = await self._ask(question, within_s + _LATE_S)
        return Visited(answers=answer["answers"], unreached=answer["unreached"])

    async def connect(self, gcs_address: str, within_s: float) -> None:
        context, flow_run = FlowRunContext.get(), None
        if context is not None and context.flow_run is not None:
            flow_run = context.flow_run.model_dump(mode="json", include={"id", "flow_id", "name"})
        hello = {"gcs_address": gcs_address, "flow_run": flow_run}
        answer = await self._ask(hello, within_s)
        shared = [entry["ip"] for entry in answer["nodes"] if entry["is_alive"]]
        nodes = []
        for entry in answer["nodes"]:
            ip = entry.pop("ip")
            name = ip if shared.count(ip) == 1 else f"{ip}/{entry['node_id'][:8]}"
            nodes.append(Node(name=name, **entry))
        self.nodes = tuple(nodes)

    async def _ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            async with asyncio.timeout(within_s):
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
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
        """Nothing of the child is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                tree.signal_descendants(self._process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


@asynccontextmanager
async def visiting(gcs_address: str, *, within_s: float) -> AsyncIterator[NodeVisitor]:
    """A visitor of the nodes of a cluster; its task runs belong to the flow run of this context.

    This machine must be a node of the cluster, be it one that runs no work; or the address is one
    of a Ray Client server, `ray://HOST:PORT`. A cancel kills the child.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store.
        within_s: For the connection.

    Raises: NotVisited.
    """
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tasks.ray.visits"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            # A line is as long as a cluster is large.
            limit=1 << 26,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env=_environment(gcs_address),
        )
        visitor = NodeVisitor(process, errors)
        within = 0.0
        try:
            await visitor.connect(gcs_address, within_s)
            yield visitor
            within = _END_WITHIN_S
        finally:
            await visitor.end(within)


def _environment(gcs_address: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    more = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    return {**inherited, **settings, **more, **driver_env(gcs_address)}


SWEEP_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """One process that carried the run's id."""

    #: The node that found it first, of those that share its machine.
    node: str
    pid: int
    #: Its command line, shortened.
    command: str

    def __str__(self) -> str:
        return f"node {self.node}: pid {self.pid} ({self.command})"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenNode:
    """A node, or all of a cluster, of which nobody can say what runs there."""

    #: Ray's, in hex; empty for every node of the cluster.
    node_id: str
    #: Of the node; the control store's address for all of them.
    name: str
    why: str

    def __str__(self) -> str:
        return f"node {self.name} was not seen" if self.node_id else "no node was seen"


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


async def sweep(
    gcs_address: str,
    *,
    run_id: str,
    attempt: int | None = None,
    component: str | None = None,
    only: Collection[str] = (),
    within_s: float = SWEEP_WITHIN_S,
) -> SweepReport:
    """End, on every living node, what was started with MUSTER_RUN_ID of this run and lives.

    Ray's own workers of the run's jobs carry it too: sweep only what has ended. Where this machine
    is a node, so do the run's local components: name the component. A process that has scrubbed
    its environment before its program began is not found. Idempotent. This process does not become
    a Ray driver, and nothing of the sweep outlives a cancel.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store.
        attempt: Only what also has this MUSTER_ATTEMPT.
        component: Only what also has this MUSTER_COMPONENT.
        only: Only these nodes, by their ids; empty: all.
        within_s: For all of it. What has not answered by then is `unreached`.
    """
    named = {"RUN_ID": run_id, "ATTEMPT": attempt, "COMPONENT": component}
    wanted = {f"MUSTER_{name}": str(value) for name, value in named.items() if value is not None}
    deadline = time.monotonic() + within_s
    try:
        async with visiting(gcs_address, within_s=within_s) as visitor:
            asked = [node for node in visitor.alive if not only or node.node_id in only]
            each = {node.node_id: {"wanted": wanted} for node in asked}
            left_s = max(1.0, deadline - time.monotonic())
            visited = await visitor.visit("sweep", each, left_s)
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


def sweep_of(
    run_id: str, attempt: int, component: str, *, emit: Emit, within_s: float = SWEEP_WITHIN_S
) -> Callable[[str], Awaitable[SweepReport]]:
    """The sweep after a job: told the address of a cluster's control store, it ends what is left
    of the job on every node.

    Args:
        emit: told what was found.
    """
    context = contextvars.copy_context()

    async def swept(gcs_address: str) -> SweepReport:
        sweeping = sweep(
            gcs_address, run_id=run_id, attempt=attempt, component=component, within_s=within_s
        )
        report = await asyncio.create_task(sweeping, context=context)
        if report.killed or not report.is_clean:
            emit(
                "job.swept",
                killed=[str(swept) for swept in report.killed],
                left=[str(swept) for swept in report.left],
                unreached={node.name: node.why for node in report.unreached},
            )
        return report

    return swept


#: Of the time for an examination, what py-spy has.
_STACKS_SHARE = 0.3


def examination_of(
    run_id: str, attempt: int, component: str
) -> Callable[[str, float], Awaitable[str]]:
    """The look at a job that hangs: told the address of a cluster's control store, and how long it
    may take, it gives what all processes of the job do on every node, with their Python stacks.

    Raises: NotVisited, from what is given.
    """
    context = contextvars.copy_context()
    named = {"RUN_ID": run_id, "ATTEMPT": str(attempt), "COMPONENT": component}
    wanted = {f"MUSTER_{name}": value for name, value in named.items()}

    async def looked_at(gcs_address: str, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        async with visiting(gcs_address, within_s=within_s) as visitor:
            left_s = max(1.0, deadline - time.monotonic())
            given = {"wanted": wanted, "within_s": left_s * _STACKS_SHARE}
            each = {node.node_id: given for node in visitor.alive}
            visited = await visitor.visit("examine", each, left_s)
            names = {node.node_id: node.name for node in visitor.nodes}
        # Several nodes may share a machine.
        texts = {one["machine"]: (names[id], one["text"]) for id, one in visited.answers.items()}
        parts = [f"node {name}\n\n{text}" for name, text in sorted(texts.values()) if text]
        parts += [f"node {names[id]}: {why}" for id, why in sorted(visited.unreached.items())]
        return "\n\n".join(parts)

    async def in_context(gcs_address: str, within_s: float) -> str:
        return await asyncio.create_task(looked_at(gcs_address, within_s), context=context)

    return in_context


#: What is to be done about nodes that were not seen.
ASKS_AGAIN = "`muster reconcile` asks again"
_SHOWN_NODES = 5
_SHOWN_CHARACTERS = 200
#: For one more question: a node that answers at all does so in a few seconds.
_AGAIN_WITHIN_S = 20.0
#: A cluster of which no node could be asked for so long is not asked any more.
_GIVES_UP_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSeen:
    """The nodes that were not seen after a job's end."""

    #: Of the cluster still: they are to be asked again.
    unseen: tuple[UnseenNode, ...] = ()
    #: They have left the cluster, which can't reach them any more.
    lost: tuple[UnseenNode, ...] = ()

    @property
    def asked_again(self) -> dict[str, str]:
        """`name[node id]` of those to be asked again; empty for every node of the cluster."""
        if any(not node.node_id for node in self.unseen):
            return {}
        return {node.node_id: node.name for node in self.unseen}

    def in_words(self) -> tuple[str, ...]:
        """What is to be said of them; nothing of none."""
        unseen = [f"{node} ({node.why[:_SHOWN_CHARACTERS]})" for node in self.unseen]
        said = [f"{listed(unseen, at_most=_SHOWN_NODES)}; {ASKS_AGAIN}"] if unseen else []
        return (*said, *self.lost_in_words())

    def lost_in_words(self) -> tuple[str, ...]:
        lost = [
            f"node {node.name} has left the cluster"
            + (f" ({node.why[:_SHOWN_CHARACTERS]})" if node.why else "")
            for node in self.lost
        ]
        return (listed(lost, at_most=_SHOWN_NODES),) if lost else ()


async def told_apart(
    dashboard: Dashboard, unreached: Sequence[UnseenNode], *, since: float | None = None
) -> NotSeen:
    """Which of the nodes that were not reached are of the cluster still, by its own word.

    Args:
        since: the nodes that it has lost since then, UTC epoch seconds, count as well.
    """
    try:
        living = {node.node_id for node in await dashboard.nodes()}
        gone = [] if since is None else await dashboard.lost_nodes(since)
    except (NoAnswer, Denied):
        return NotSeen(unseen=tuple(unreached))
    lost = {
        node.node_id: UnseenNode(
            node_id=node.node_id, name=f"{node.ip}/{node.node_id[:8]}", why=node.why
        )
        for node in gone
    }
    unseen = []
    for node in unreached:
        if not node.node_id or node.node_id in living:
            unseen.append(node)
        else:
            lost.setdefault(node.node_id, replace(node, why=""))
    return NotSeen(unseen=tuple(unseen), lost=tuple(lost.values()))


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
    noted = [UnseenNode(node_id=one, name=name, why="") for one, name in note.nodes.items()]
    try:
        gcs_address = await dashboard.gcs_address()
        before = await told_apart(dashboard, noted)
        asked = {node.node_id for node in before.unseen}
        report = SweepReport()
        if asked or not noted:
            report = await sweep(
                gcs_address,
                run_id=note.run_id,
                attempt=note.attempt,
                component=note.component,
                only=asked,
                within_s=_AGAIN_WITHIN_S,
            )
        after = await told_apart(dashboard, report.unreached)
    except (NoAnswer, Denied) as error:
        return not_asked(note, str(error))
    finally:
        await dashboard.close()
    if away := [node for node in report.unreached if not node.node_id]:
        return not_asked(note, away[0].why)
    now = NotSeen(unseen=after.unseen, lost=(*before.lost, *after.lost))
    _tell(note, report)
    if report.left:
        open = f"outlived SIGKILL: {commas(_pids(report.left))}"
    elif now.unseen:
        open = commas(f"{node} ({node.why})" for node in now.unseen)
        note.model_copy(update={"nodes": now.asked_again}).write()
    else:
        open = ""
        unseen_file(note.submission_id).unlink(missing_ok=True)
    return AskedAgain(found=_found(asked, noted, report, now), open=open)


def _found(
    asked: Collection[str], noted: Sequence[UnseenNode], report: SweepReport, now: NotSeen
) -> tuple[str, ...]:
    """What is known now, and was not before."""
    silent = {node.node_id for node in (*now.unseen, *now.lost)}
    seen = [f"node {node.name}" for node in noted if node.node_id in {*asked} - silent]
    if not noted and not silent:
        seen = ["every node"]
    ended = [f"ended {one}" for one in _pids(report.killed)]
    if seen and not ended:
        ended = ["nothing of the job was left there"]
    return (*((f"{commas(seen)} was seen",) if seen else ()), *ended, *now.lost_in_words())


def _tell(note: UnseenNote, report: SweepReport) -> None:
    """Add to the events of the attempt."""
    if not report.killed:
        return
    EventLog(note.events).emit(
        "job.swept",
        note.component,
        killed=_pids(report.killed),
        left=_pids(report.left),
        unreached={node.name: node.why for node in report.unreached},
    )


def _pids(swept: Sequence[Swept]) -> list[str]:
    """Without their command lines, in which secrets may stand."""
    return [f"node {one.node}: pid {one.pid}" for one in swept]


def not_asked(note: UnseenNote, why: str) -> AskedAgain:
    """What is to be said where no node of the cluster could be asked."""
    if time.time() - note.since < _GIVES_UP_AFTER_S:
        return AskedAgain(open=f"no node was seen ({why})", away=why)
    unseen_file(note.submission_id).unlink(missing_ok=True)
    by_hand = f"muster sweep --address {note.address} --run-id {note.run_id}"
    said = f"no node was seen for a day ({why}), and none is asked any more: `{by_hand}` does"
    return AskedAgain(found=(said,), away=why)
