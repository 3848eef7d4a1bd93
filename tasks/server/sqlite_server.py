"""The process of a Prefect server with an SQLite database, changed so that it does not block.

`python -m tasks.server.sqlite_server OPTION...` takes the options of uvicorn. Two things differ
from Prefect's own server process.

First, a separate thread collects garbage. By default, Python collects garbage in any thread, mostly
in the thread of the event loop. The garbage may include a cursor of a failed query. To free a
cursor, Python needs the lock of the cursor's database connection. The connection's thread may hold
this lock while it waits for a transaction of another connection, and that transaction may wait for
the event loop. The server would then answer no request until SQLite gives up after a minute.

Second, write transactions run one after the other. Prefect begins most transactions as read
transactions. If a read transaction begins to write after another transaction has written, SQLite
rejects the write at once, regardless of the busy timeout. The server then responds with status 503,
"database is locked". Prefect's own clients retry after some seconds. A browser does not retry, so a
click on *Run* in the Prefect UI would be lost.
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

#: Seconds between two garbage collections of young objects.
_COLLECT_EVERY_S = 2.0
#: Every 30th garbage collection also includes old objects, which takes some tenths of a second.
_FULL_COLLECTION_EVERY = 30

#: Mapping from an event loop to a lock. Each SQLite write transaction in this event loop holds the
#: lock from its start to its end.
_write_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
#: True if the current task holds the lock in `_write_locks` of its event loop.
_holds_write_lock: ContextVar[bool] = ContextVar("holds_write_lock", default=False)


def main() -> None:
    """Run the server with the command line options of this process, until it is stopped."""
    serialize_writes()
    gc.disable()
    threading.Thread(target=_collect_garbage, name="garbage", daemon=True).start()
    runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)


def serialize_writes() -> None:
    """Make each SQLite transaction of Prefect acquire the asyncio lock in `_write_locks` first.

    The asyncio lock is granted in the order of the requests. SQLite also has a lock for writes, but
    that lock has no order: waiting transactions poll for it, and some may never get it.
    """
    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_in_turn(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncIterator[AsyncSessionTransaction]:
        if _holds_write_lock.get():
            # This task already holds the write lock. Do not take the lock again: the task would
            # wait for itself forever.
            async with begin(self, session, with_for_update) as transaction:
                yield transaction
            return
        async with _write_lock(), begin(self, session, with_for_update=True) as transaction:
            await session.connection()
            # This is a write transaction. Other sessions of this task must now begin as read
            # transactions, because a second write transaction would wait forever for this
            # transaction.
            SQLITE_BEGIN_MODE.set("DEFERRED")
            yield transaction

    AioSqliteConfiguration.begin_transaction = begin_in_turn  # type: ignore[method-assign]


@asynccontextmanager
async def _write_lock() -> AsyncIterator[None]:
    """Hold the event loop's lock for SQLite write transactions during an `async with` block."""
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
