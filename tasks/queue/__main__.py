"""`python -m tasks.queue`: the queue for people at a terminal, and what an operator does to it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tasks.queue import settings
from tasks.queue.ledger import TYPE
from tasks.queue.look import QueueView, QueueViewer
from tasks.queue.reasons import one_line
from tasks.queue.settings import BadSetting, NotThere
from tasks.queue.tables import as_json, as_plain, as_rich, explain
from tasks.server.flow_runs import why_refused
from tasks.server.server import NoServer, quieten_prefect
from tasks.spec.words import commas

EXIT_DONE, EXIT_NOT_THERE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

#: Makes the view of a work pool's queue.
Look = Callable[[PrefectClient, str], Awaitable[QueueView]]
Connect = Callable[[], AbstractAsyncContextManager[PrefectClient]]

_POOL = "gang"
_DEFAULTS = {"command": "status", "pool": _POOL, "json": False, "watch": False, "every_s": 2.0}
_TIMEOUT_S = 10.0
_REMEDY = "start it (`make up`), or set PREFECT_API_URL to that of one that runs"
#: Lines of a terminal that are not the queue's.
_FRAME = 8


@asynccontextmanager
async def connected() -> AsyncIterator[PrefectClient]:
    """A client of the Prefect server of PREFECT_API_URL, which soon gives up.

    Raises: NoServer, for any call within that fails for want of an answer.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise NoServer(
            "no Prefect server is set, so there is no queue to look at: start one (`make up`, "
            "which says its address), and set PREFECT_API_URL to that"
        )
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):
        try:
            async with get_client(httpx_settings={"timeout": _TIMEOUT_S}) as client:
                yield client
        except httpx.HTTPStatusError as error:
            why = f"HTTP {error.response.status_code} to {error.request.url.path}"
            refusal = why_refused(url, error, is_set=bool(PREFECT_API_AUTH_STRING.value()))
            raise NoServer(refusal or f"the Prefect server at {url} refused: {why}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            where = f"PREFECT_API_URL={url} ({one_line(error) or type(error).__name__})"
            raise NoServer(f"no Prefect server answers at {where}: {_REMEDY}") from error


def main(
    arguments: Sequence[str] | None = None,
    *,
    look: Look | None = None,
    connect: Connect = connected,
) -> int:
    """Do what the arguments say.

    Returns: 0 done; 1 the server does not answer, or has nothing of the name that was given; 2 the
    arguments are wrong and nothing was done; 130 interrupted.
    """
    parser = _parser()
    options = parser.parse_args(arguments, argparse.Namespace(**_DEFAULTS))
    if options.json and options.watch:
        parser.error("--json shows one look: leave out --watch")
    quieten_prefect()
    try:
        asyncio.run(_run(options, look or QueueViewer(), connect))
    except (NoServer, NotThere) as error:
        print(error, file=sys.stderr)
        return EXIT_NOT_THERE
    except BadSetting as error:
        print(f"{error}\nNothing was done.", file=sys.stderr)
        return EXIT_USAGE
    except PrefectException as error:
        print(f"the Prefect server did not do it: {one_line(error)}", file=sys.stderr)
        return EXIT_NOT_THERE
    except KeyboardInterrupt:
        # The way out of --watch.
        return EXIT_DONE if options.watch else EXIT_INTERRUPTED
    return EXIT_DONE


async def _run(options: argparse.Namespace, look: Look, connect: Connect) -> None:
    async with connect() as client:
        match options.command:
            case "status":
                await settings.pool_of(client, options.pool)
                await _status(client, options, look)
            case "why":
                print(await explain(client, options.run, options.pool, lambda p: look(client, p)))
            case "drain" | "undrain":
                await _drain(client, options, look)
            case "pause" | "resume":
                pool = await settings.pool_of(client, options.pool)
                is_paused = options.command == "pause"
                await settings.pause(client, pool, options.queue, is_paused=is_paused)
                which = f"queue {options.queue} of the " if options.queue else ""
                print(f"The {which}work pool {pool.name} is {options.command}d.")
            case _:
                await _set(client, options)


async def _status(client: PrefectClient, options: argparse.Namespace, look: Look) -> None:
    view = await look(client, options.pool)
    console = Console(highlight=False)
    if options.watch:
        await _watch(lambda: look(client, options.pool), options.every_s, console, view)
    elif options.json:
        print(as_json(view))
    elif console.is_terminal:
        console.print(as_rich(view))
    else:
        print(as_plain(view))


async def _watch(
    look: Callable[[], Awaitable[QueueView]], every_s: float, console: Console, view: QueueView
) -> None:
    """Show look after look, until it is cancelled; an answer that does not come is told."""
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    trouble = ""
    if console.is_terminal:
        live.start()
    try:
        while True:
            if live.is_started:
                rows = max(3, (console.height - len(view.nodes) - _FRAME) // 2)
                live.update(Group(as_rich(view, rows), Text(trouble, style="red")), refresh=True)
            else:
                print(trouble or as_plain(view), end="\n\n", flush=True)
            await asyncio.sleep(every_s)
            try:
                view, trouble = await look(), ""
            except (httpx.HTTPError, PrefectException) as error:
                trouble = f"no answer, so this is as it was: {one_line(error) or repr(error)}"
    finally:
        live.stop()


async def _drain(client: PrefectClient, options: argparse.Namespace, look: Look) -> None:
    await settings.pool_of(client, options.pool)
    #: By node, of whatever cluster: several may have one of the same name.
    runs: dict[str, set[str]] = defaultdict(set)
    for node in (await look(client, options.pool)).nodes:
        runs[node.name] |= node.held.keys()
    # Read again just before it is written: the look takes its time.
    pool = await settings.pool_of(client, options.pool)
    before, is_drained = settings.settings_in(pool), options.command == "drain"
    known = None if options.force else [*runs]
    changed = settings.with_drained(before, options.node, known, is_drained=is_drained)
    await settings.change(client, pool, changed)
    for name in options.node:
        held = commas(sorted(runs[name]))
        goes_on = f" {held} goes on there." if held else ""
        print(name, f"gets no new gang.{goes_on}" if is_drained else "may get new gangs.")
    _note_type(pool.type)


async def _set(client: PrefectClient, options: argparse.Namespace) -> None:
    pool = await settings.pool_of(client, options.pool)
    edit = settings.with_values if options.command == "set" else settings.without_values
    changed = edit(settings.settings_in(pool), options.setting)
    await settings.change(client, pool, changed)
    print(f"The work pool {pool.name}: {settings.told(changed)}.")
    _note_type(pool.type)


def _note_type(kind: str) -> None:
    if kind != TYPE:
        print(
            f"Note: the pool is of type {kind}, and only one of type gang obeys.", file=sys.stderr
        )


def _parser() -> argparse.ArgumentParser:
    # What stands before the command counts where it is not said again after it.
    pool = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    pool.add_argument("--pool", metavar="NAME", help=f"the work pool; {_POOL} if left out")
    status = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    status.add_argument("--json", action="store_true", help="for programs; times are UTC epoch s")
    status.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    status.add_argument("--every-s", type=float, metavar="S", help="with --watch; 2 if left out")
    parser = argparse.ArgumentParser(
        prog="python -m tasks.queue",
        description="The gang queue of a work pool on the Prefect server of PREFECT_API_URL: who "
        "waits and why, who holds which GPUs; and what an operator does about it.",
        epilog="Exit: 0 done; 1 the server does not answer, or has nothing of the name that was "
        "given; 2 the arguments are wrong and nothing was done; 130 interrupted.",
        parents=[pool, status],
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        about = f"{text[0].upper()}{text[1:]}."
        return commands.add_parser(name, help=text, description=about, parents=[pool, *parents])

    add("status", "show the queue and the nodes (the default)", status)
    why = add("why", "say why a run waits, or what has become of it")
    why.add_argument("run", metavar="RUN", help="name or id of its flow run")
    for name, text in (
        ("drain", "give no new gang to nodes; what runs there goes on"),
        ("undrain", "give gangs to drained nodes again"),
    ):
        one = add(name, text)
        one.add_argument("node", metavar="NODE", nargs="+", help="name of the node")
        one.add_argument("--force", action="store_true", help="also a node that nobody knows")
    for name, text in (
        ("pause", "start no more runs of the pool, or of one of its queues"),
        ("resume", "start runs again"),
    ):
        add(name, text).add_argument(
            "--queue", metavar="NAME", default="", help="only this queue of the pool"
        )
    add("set", "change settings of the pool").add_argument(
        "setting",
        metavar="KEY=VALUE",
        nargs="+",
        help="policy=fifo, policy=backfill, or limit.TAG=N: at most N GPUs at once for the runs "
        "with that tag",
    )
    add("unset", "take settings of the pool back").add_argument(
        "setting", metavar="KEY", nargs="+", help="policy (fifo again), or limit.TAG"
    )
    return parser


# Prefect reads it when it is imported, and would report to its makers and say so.
os.environ.setdefault("DO_NOT_TRACK", "1")


if __name__ == "__main__":
    sys.exit(main())
