"""The process of a Prefect server with an SQLite database, changed so that it does not block.

`python -m tasks.server.sqlite_server OPTION...` takes the options of uvicorn. Two things differ
from Prefect's own server process.

A separate thread collects garbage. By default, Python collects garbage in any thread, in most cases
in that of the event loop. The garbage may include a cursor of a failed query. Freeing a cursor
needs the lock of its database connection. That connection's thread may wait for a transaction of
another connection, and that transaction may wait for the event loop. The server would then answer
no request until SQLite gives up after a minute.

Write transactions run one after the other. Prefect begins most transactions as readers. If such a
transaction writes after another transaction has written, SQLite rejects it at once, regardless of
the busy timeout: status 503, "database is locked". Prefect's own clients retry after some seconds.
A browser does not retry, and a click on *Run* in the Prefect UI would be lost.
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

#: Seconds between two collections of young objects.
_COLLECT_EVERY_S = 2.0
#: Each 30th collection includes old objects. It takes some tenths of a second.
_FULL_COLLECTION_EVERY = 30

#: Lock that a write transaction holds, by event loop. asyncio grants it in the order of arrival.
_write_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
#: True if the current task holds the write lock of its event loop.
_holds_write_lock: ContextVar[bool] = ContextVar("holds_write_lock", default=False)


def main() -> None:
    """Run the server with the command line options of this process, until it is stopped."""
    serialize_writes()
    gc.disable()
    threading.Thread(target=_collect_garbage, name="garbage", daemon=True).start()
    runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)


def serialize_writes() -> None:
    """Make each SQLite transaction of Prefect take the write lock at its start.

    Transactions get the lock in the order of arrival. SQLite's own lock keeps no order: waiting
    transactions poll for the lock, and some of them never get it.
    """
    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_in_turn(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncIterator[AsyncSessionTransaction]:
        if _holds_write_lock.get():
            # A nested transaction would wait for its own task without end.
            async with begin(self, session, with_for_update) as transaction:
                yield transaction
            return
        async with _write_lock(), begin(self, session, with_for_update=True) as transaction:
            await session.connection()
            # The transaction has begun as a writer. Other sessions that this task opens during the
            # transaction must begin as readers, because a second writer would wait for the first.
            SQLITE_BEGIN_MODE.set("DEFERRED")
            yield transaction

    AioSqliteConfiguration.begin_transaction = begin_in_turn  # type: ignore[method-assign]


@asynccontextmanager
async def _write_lock() -> AsyncIterator[None]:
    """Hold the write lock of the current event loop while the context is open."""
    async with _write_locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        token = _holds_write_lock.set(True)
        try:
            yield
        finally:
            _holds_write_lock.reset(token)


def _collect_garbage() -> None:
    """Collect garbage at regular intervals. This function never returns."""
    count = 0
    while True:
        time.sleep(_COLLECT_EVERY_S)
        count += 1
        is_full = count % _FULL_COLLECTION_EVERY == 0
        gc.collect(2 if is_full else 1)


if __name__ == "__main__":
    main()
