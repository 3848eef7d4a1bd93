"""`muster queue`: show and change the queue of a work pool. `muster why`: explain one run."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated

from cyclopts import App, Parameter
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL

from tasks.queue import settings
from tasks.queue.ledger import TYPE
from tasks.queue.reasons import one_line
from tasks.queue.scheduling_pass import read_queue_view
from tasks.queue.settings import PoolSettings
from tasks.queue.tables import QueueTables, as_json, explain
from tasks.server.events import client_settings
from tasks.server.flow_runs import ServerAway, ServerRefuses, answered_by
from tasks.server.server import NoServer, quieten_prefect
from tasks.show.arguments import EXIT_DONE, AsJson, Pool
from tasks.show.output import console_of, is_on_terminal
from tasks.spec.formatting import join_commas

_POOL = "gang"
#: Deadline of a request to the Prefect server, in seconds.
_TIMEOUT_S = 10.0
#: Width of the output, in columns, if it goes to a file or a pipe, so that no line is cut.
_PIPE_WIDTH = 10_000
_REMEDY = "start one (`muster up`), or set PREFECT_API_URL to that of one that runs"


@asynccontextmanager
async def connected() -> AsyncIterator[PrefectClient]:
    """Connect to the Prefect server of PREFECT_API_URL, as a context manager.

    The client gives up soon if the server does not answer.

    Raises:
        NoServer: No server is set, or it does not answer.
        ServerRefuses: The server rejects the credentials.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise NoServer(f"no Prefect server is set, so there is no queue to look at: {_REMEDY}")
    try:
        with answered_by(url), client_settings(retries=1):
            async with get_client(httpx_settings={"timeout": _TIMEOUT_S}) as client:
                yield client
    except ServerRefuses:
        raise
    except ServerAway as error:
        raise NoServer(f"{error}: {_REMEDY}") from error


app = App(
    name="queue",
    help="Who waits for which GPUs and why; what an operator does about it.\n\n"
    "Exit: 0 done; 1 the server does not answer, or has nothing of the name that was given; 2 the "
    "arguments are wrong and nothing was done; 130 interrupted.",
)

Node = Annotated[str, Parameter(name="NODE", required=True, help="Name of a node.")]


@app.default
def status(*, pool: Pool = _POOL, json: AsJson = False) -> int:
    """Show the queue and the nodes."""

    async def show(client: PrefectClient) -> None:
        await settings.read_pool(client, pool)
        view = await read_queue_view(client, pool)
        console = console_of(sys.stdout)
        if not is_on_terminal():
            console.width = _PIPE_WIDTH
        if json:
            print(as_json(view))
        else:
            # A run id that is wider than the terminal is shown whole.
            console.print(QueueTables(view), crop=False)

    return _run_with_client(show)


def why(flow_run_id: str, *, pool: str = _POOL) -> int:
    """Explain why a run waits, or what it does."""

    async def say(client: PrefectClient) -> None:
        print(await explain(client, flow_run_id, pool, partial(read_queue_view, client)))

    return _run_with_client(say)


@app.command
def drain(*node: Node, pool: Pool = _POOL) -> int:
    """Start no new gang on nodes. Runs on them go on."""
    return _run_with_client(lambda client: _drain(client, node, pool, is_drained=True))


@app.command
def undrain(*node: Node, pool: Pool = _POOL) -> int:
    """Let gangs start on drained nodes again."""
    return _run_with_client(lambda client: _drain(client, node, pool, is_drained=False))


@app.command(name="set")
def set_(
    *setting: Annotated[str, Parameter(name="KEY=VALUE", required=True)], pool: Pool = _POOL
) -> int:
    """Change settings of the pool.

    Args:
        setting: policy=fifo, policy=backfill; limit.TAG=N: at most N GPUs at once for the runs
            with that tag; node.NAME=N: a host of processes, with N GPUs; or cluster.URL=N: a Ray
            cluster, of whose autoscaler N nodes may be had, 0: those that are there.
    """
    edit = partial(settings.with_values, assignments=setting)
    return _run_with_client(lambda client: _change(client, pool, edit))


@app.command
def unset(
    *setting: Annotated[str, Parameter(name="KEY", required=True)], pool: Pool = _POOL
) -> int:
    """Remove settings of the pool.

    Args:
        setting: policy (fifo again), limit.TAG, node.NAME or cluster.URL.
    """
    edit = partial(settings.with_values, assignments=setting, unset=True)
    return _run_with_client(lambda client: _change(client, pool, edit))


def _run_with_client(action: Callable[[PrefectClient], Awaitable[None]]) -> int:
    """Run an action with a client of the server, and return the exit code 0.

    Raises:
        MusterError: The action failed, or the server did not answer.
    """

    async def run() -> None:
        async with connected() as client:
            await action(client)

    quieten_prefect()
    try:
        asyncio.run(run())
    except PrefectException as error:
        raise NoServer(f"the Prefect server did not do it: {one_line(error)}") from error
    return EXIT_DONE


async def _drain(
    client: PrefectClient, nodes: Sequence[str], name: str, *, is_drained: bool
) -> None:
    await settings.read_pool(client, name)
    #: `runs[node name]`. Nodes of different clusters may have the same name.
    runs: dict[str, set[str]] = defaultdict(set)
    for node in (await read_queue_view(client, name)).nodes:
        runs[node.name] |= node.held.keys()
    # `_change` reads the pool again just before it writes, because the view took some time.
    edit = partial(settings.with_drained, names=nodes, seen=[*runs], is_drained=is_drained)
    await _change(client, name, edit)
    for node_name in nodes:
        if not is_drained:
            print(node_name, "may get new gangs.")
            continue
        holders = join_commas(sorted(runs[node_name]))
        goes_on = f" {holders} goes on there." if holders else ""
        print(node_name, f"gets no new gang.{goes_on}")


async def _change(
    client: PrefectClient, name: str, edit: Callable[[PoolSettings], PoolSettings]
) -> None:
    pool = await settings.read_pool(client, name)
    changed = edit(settings.settings_in(pool))
    await settings.write_settings(client, pool, changed)
    print(f"The work pool {pool.name} has {settings.format_settings(changed)}")
    if pool.type != TYPE:
        note = f"Note: the pool is of type {pool.type}, and only one of type gang obeys."
        print(note, file=sys.stderr)
