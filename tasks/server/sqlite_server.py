"""The process of a Prefect server on SQLite: `python -m tasks.server.sqlite_server OPTION...` takes
uvicorn's options.

Garbage is collected in a thread of its own. Where Python collects it, in whatever thread comes to
allocate next, that is mostly the event loop's; and among the garbage may be a cursor of a query
that failed. To free it takes the lock of its connection, whose thread may be waiting for another
connection's transaction to end, and that one waits for the event loop: for a minute, after which
SQLite gives up, the server answers nobody.

Transactions wait for each other. Prefect begins most of them as readers; one that goes on to write
after another has written is refused by SQLite at once, whatever the busy timeout: 503, "database is
locked". Prefect's own clients ask again after seconds, a browser does not, and the click on *Run*
is lost.
"""

from __future__ import annotations

import asyncio
import gc
import runpy
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

_YOUNG_EVERY_S = 2.0
#: Every 30th collection is a full one. It visits all objects, which takes some tenths of a second.
_ALL_EVERY = 30

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_has_turn: ContextVar[bool] = ContextVar("has_turn", default=False)


def main() -> None:
    write_in_turn()
    gc.disable()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()
    runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)


def write_in_turn() -> None:
    """Make each SQLite transaction take the write lock at its start, in order of arrival.

    This module keeps the order. SQLite's own waiters poll for the lock, and some never get it.
    """
    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_in_turn(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncIterator[AsyncSessionTransaction]:
        if _has_turn.get():
            async with begin(self, session, with_for_update) as transaction:
                yield transaction
            return
        async with _turn(), begin(self, session, with_for_update=True) as transaction:
            await session.connection()
            # It has begun. Sessions that it opens meanwhile read, beside its lock.
            SQLITE_BEGIN_MODE.set("DEFERRED")
            yield transaction

    AioSqliteConfiguration.begin_transaction = begin_in_turn  # type: ignore[method-assign]


@asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    """Hold the turn of this event loop. Transactions get the turn in order of arrival."""
    async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        token = _has_turn.set(True)
        try:
            yield
        finally:
            _has_turn.reset(token)


def _collect() -> None:
    count = 0
    while True:
        time.sleep(_YOUNG_EVERY_S)
        count += 1
        gc.collect(2 if count % _ALL_EVERY == 0 else 1)


if __name__ == "__main__":
    main()
