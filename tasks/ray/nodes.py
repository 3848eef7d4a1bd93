"""Asking the nodes of a Ray cluster from a process that is no part of the cluster.

The driver is a child process, `visits`; whatever becomes of it or of its cluster, the process
that asks has an answer by its deadline, or an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from prefect.context import FlowRunContext
from prefect.settings import get_current_settings

from tasks.processes import tree
from tasks.ray.loopback import driver_env
from tasks.spec.errors import MusterError

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


class NodeVisitor:
    """A driver in a child process; `visiting` gives one."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors
        #: Dead ones too.
        self.nodes: tuple[Node, ...] = ()

    @property
    def alive(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.is_alive)

    async def visit(self, what: str, each: Mapping[str, Any], within_s: float) -> Visited:
        """Run one of `node_tasks.VISITS`, or `clock`, on nodes, all at the same time.

        Args:
            each: `arguments[node id]`.

        Raises: NotVisited.
        """
        question = {"visit": what, "each": dict(each), "within_s": within_s}
        answer = await self._ask(question, within_s + _LATE_S)
        return Visited(answers=answer["answers"], unreached=answer["unreached"])

    async def connect(self, gcs_address: str, within_s: float) -> None:
        hello = {"gcs_address": gcs_address, "flow_run": _flow_run()}
        answer = await self._ask(hello, within_s)
        shared = [entry["ip"] for entry in answer["nodes"] if entry["is_alive"]]
        self.nodes = tuple(
            Node(
                node_id=entry["node_id"],
                name=_name(entry, is_alone=shared.count(entry["ip"]) == 1),
                is_alive=entry["is_alive"],
                gpus=entry["gpus"],
                ray_dir=entry["ray_dir"],
            )
            for entry in answer["nodes"]
        )

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
            *(sys.executable, "-m", "tasks.ray.visits"),
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


def _flow_run() -> dict[str, str] | None:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    run = context.flow_run
    return {"id": str(run.id), "flow_id": str(run.flow_id), "name": run.name}


def _name(entry: Mapping[str, Any], *, is_alone: bool) -> str:
    return entry["ip"] if is_alone else f"{entry['ip']}/{entry['node_id'][:8]}"
