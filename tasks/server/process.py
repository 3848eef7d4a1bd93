"""The process of a Prefect server on SQLite: `python -m tasks.server.process OPTION...` takes
uvicorn's options.

Garbage is collected in a thread of its own. Where Python collects it, in whatever thread comes to
allocate next, that is mostly the event loop's; and among the garbage may be a cursor of a query
that failed. To free it takes the lock of its connection, whose thread may be waiting for another
connection's transaction to end, and that one waits for the event loop: for a minute, after which
SQLite gives up, the server answers nobody.
"""

from __future__ import annotations

import gc
import runpy
import threading
import time

_YOUNG_EVERY_S = 2.0
#: A full collection looks at every object there is, some tenths of a second long.
_ALL_EVERY = 30


def main() -> None:
    gc.disable()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()
    runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)


def _collect() -> None:
    count = 0
    while True:
        time.sleep(_YOUNG_EVERY_S)
        count += 1
        gc.collect(2 if count % _ALL_EVERY == 0 else 1)


if __name__ == "__main__":
    main()
