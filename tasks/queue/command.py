"""`muster queue`: show and change the queue of a work pool. `muster why`: explain one run."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated

from cyclopts import App, Parameter
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL

from tasks.processes import registry
from tasks.queue import settings
from tasks.queue.ledger import TYPE
from tasks.queue.pool_copies import read_copy
from tasks.queue.reasons import one_line
from tasks.queue.scheduling_pass import QueueView, read_queue_view
from tasks.queue.settings import PoolSettings
from tasks.queue.tables import QueueTables, as_json, explain
from tasks.server.events import override_client_settings
from tasks.server.flow_runs import (
    ProxyAway,
    ServerAway,
    ServerRefuses,
    convert_server_errors,
)
from tasks.server.server import NoServer, hide_prefect_logs
from tasks.show.arguments import EXIT_DONE, AsJson, Pool
from tasks.show.output import console_of, is_on_terminal
from tasks.spec.formatting import join_commas

#: Name of the work pool if the option `--pool` is not used.
_POOL = "gang"
#: Deadline of a request to the Prefect server, in seconds.
_TIMEOUT_S = 10.0
#: Width of the output in columns if the output goes to a file or a pipe. The value is large enough
#: that no line is cut.
_PIPE_WIDTH = 10_000
#: Advice for users if no Prefect server answers.
_REMEDY = "start a server with `muster up`, or set PREFECT_API_URL to the URL of a running server"


@asynccontextmanager
async def connected() -> AsyncIterator[PrefectClient]:
    """Open a client of the Prefect server of PREFECT_API_URL, for the body of a `with` statement.

    A request fails after 10 seconds without an answer.

    Raises:
        NoServer: PREFECT_API_URL is not set, or the server does not answer.
        ProxyAway: The proxy for the server does not answer.
        ServerRefuses: The server rejects the credentials, or its proxy cannot be used.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise NoServer(f"no Prefect server is set: {_REMEDY}")
    try:
        with convert_server_errors(url), override_client_settings(retries=1):
            async with get_client(httpx_settings={"timeout": _TIMEOUT_S}) as client:
                yield client
    except (ProxyAway, ServerRefuses):
        raise
    except ServerAway as error:
        raise NoServer(f"{error}: {_REMEDY}") from error


app = App(
    name="queue",
    help="Show the queue of a work pool and its nodes, or change its settings.\n\n"
    "Exit: 0 done; 1 the server does not answer, or the named pool or node does not exist; 2 the "
    "arguments are wrong and nothing was done; 130 interrupted.",
)

Node = Annotated[str, Parameter(name="NODE", required=True, help="Name of a node.")]


@app.default
def status(*, pool: Pool = _POOL, json: AsJson = False) -> int:
    """Show the waiting runs and the nodes of a work pool."""

    async def show(client: PrefectClient) -> None:
        view = await _read_view(client, pool)
        console = console_of(sys.stdout)
        if not is_on_terminal():
            console.width = _PIPE_WIDTH
        if json:
            print(as_json(view))
        else:
            # Do not crop, so that run ids wider than the terminal stay complete.
            console.print(QueueTables(view), crop=False)
        for line in registry.describe_unreadable_files():
            print(line, file=sys.stderr)

    return _run_with_client(show)


async def _read_view(client: PrefectClient, pool: str) -> QueueView:
    """Return the queue and the nodes of a work pool, even if the pool was deleted.

    Raises:
        MissingFromServer: The server has neither this work pool nor a copy of the pool's settings.
    """
    problems: tuple[str, ...] = ()
    try:
        await settings.read_pool(client, pool)
    except settings.MissingFromServer:
        if await read_copy(client, pool) is None:
            raise
        problems = (
            f"the work pool {pool} was deleted, so its waiting runs cannot start. To create the "
            "pool again, run `muster up`. If a worker of the pool is running, wait a minute "
            "instead: the worker creates the pool again",
        )
    view = await read_queue_view(client, pool)
    return replace(view, troubles=(*problems, *view.troubles))


def why(flow_run_id: str, *, pool: str = _POOL) -> int:
    """Print why a run waits. If the run does not wait, print its state and its GPUs.

    Args:
        flow_run_id: Id of the flow run.
        pool: Work pool whose queue is read if the run was started without a worker.
    """

    async def print_explanation(client: PrefectClient) -> None:
        print(await explain(client, flow_run_id, pool, partial(read_queue_view, client)))

    return _run_with_client(print_explanation)


@app.command
def drain(*node: Node, pool: Pool = _POOL) -> int:
    """Start no new runs on nodes. Running runs continue."""
    return _run_with_client(lambda client: _drain(client, node, pool, is_drained=True))


@app.command
def undrain(*node: Node, pool: Pool = _POOL) -> int:
    """Allow new runs on drained nodes again."""
    return _run_with_client(lambda client: _drain(client, node, pool, is_drained=False))


@app.command(name="set")
def set_(
    *setting: Annotated[str, Parameter(name="KEY=VALUE", required=True)], pool: Pool = _POOL
) -> int:
    """Change settings of a work pool.

    Args:
        setting: Settings to change. policy=fifo or policy=backfill: the scheduling policy.
            limit.TAG=N: largest number of GPUs for all runs with the tag. node.NAME=N: a node
            with N GPUs for runs without Ray. cluster.URL=N: a Ray cluster whose
            autoscaler may add nodes, up to N nodes with GPUs in total. N is 0 for a cluster
            without an autoscaler.
    """
    edit = partial(settings.with_values, assignments=setting)
    return _run_with_client(lambda client: _change(client, pool, edit))


@app.command
def unset(
    *setting: Annotated[str, Parameter(name="KEY", required=True)], pool: Pool = _POOL
) -> int:
    """Remove settings of a work pool.

    Args:
        setting: Settings to remove: limit.TAG, node.NAME, cluster.URL, or policy. If
            policy is removed, the scheduling policy is fifo.
    """
    edit = partial(settings.with_values, assignments=setting, unset=True)
    return _run_with_client(lambda client: _change(client, pool, edit))


def _run_with_client(action: Callable[[PrefectClient], Awaitable[None]]) -> int:
    """Run an asynchronous action with a client of the Prefect server, and return exit code 0.

    Raises:
        MusterError: The action failed, or the server did not answer.
    """

    async def run() -> None:
        async with connected() as client:
            await action(client)

    hide_prefect_logs()
    try:
        asyncio.run(run())
    except PrefectException as error:
        raise NoServer(f"the request to the Prefect server failed: {one_line(error)}") from error
    return EXIT_DONE


async def _drain(
    client: PrefectClient, nodes: Sequence[str], pool_name: str, *, is_drained: bool
) -> None:
    """Drain or undrain nodes of a work pool, and print the result for each node.

    No new runs start on a drained node.

    Args:
        client: Client of the Prefect server.
        nodes: Names of the nodes.
        pool_name: Name of the work pool.
        is_drained: True to drain the nodes, False to undrain them.
    """
    await settings.read_pool(client, pool_name)
    # Mapping from node name to the runs on the node. If nodes of different clusters have the same
    # name, their runs are combined.
    runs_on: dict[str, set[str]] = defaultdict(set)
    for node in (await read_queue_view(client, pool_name)).nodes:
        runs_on[node.name] |= node.held.keys()
    # Other users may change the settings while the nodes are read. So `_change` reads the settings
    # again just before writing them.
    edit = partial(settings.with_drained, names=nodes, present=[*runs_on], is_drained=is_drained)
    await _change(client, pool_name, edit)
    for node_name in nodes:
        if not is_drained:
            print(node_name, "may get new runs.")
            continue
        runs = join_commas(sorted(runs_on[node_name]))
        running_text = f" Still running there: {runs}." if runs else ""
        print(node_name, f"gets no new runs.{running_text}")


async def _change(
    client: PrefectClient, pool_name: str, edit: Callable[[PoolSettings], PoolSettings]
) -> None:
    """Change the settings of a work pool on the server, and print the new settings.

    Args:
        client: Client of the Prefect server.
        pool_name: Name of the work pool.
        edit: Function that gets the old settings and returns the new settings.
    """
    pool = await settings.read_pool(client, pool_name)
    new_settings = edit(settings.settings_in(pool))
    await settings.write_settings(client, pool, new_settings)
    print(f"Settings of the work pool {pool.name}: {settings.format_settings(new_settings)}")
    if pool.type != TYPE:
        note = (
            f"Note: these settings have no effect, because the work pool is of type {pool.type} "
            "and not of type gang."
        )
        print(note, file=sys.stderr)
