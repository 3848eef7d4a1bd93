"""Fake inference server that records each generation in a file before its answer is complete.

    python -m tests.faults.chaos_server --port P --rank R --ledger FILE

The records survive the process, even if the process is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time

from tests.support.dummy_server import DummyServer, Fault, Request, _Connection


class LedgerServer(DummyServer):
    """Fake inference server that appends one JSON line per finished generation to a file.

    The line is written just before the server sends the last bytes of the generation's answer.
    """

    def __init__(self, rank: int, *, token_s: float, ledger: str) -> None:
        super().__init__(rank, token_s=token_s)
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def _generate(self, request: Request, connection: _Connection, fault: Fault) -> None:
        await super()._generate(request, connection, fault)
        if connection._transport.is_closing():
            return
        line = {
            "id": request.header("x-request-id"),
            "rank": self.rank,
            "pid": os.getpid(),
            "version": self.version,
            "at": time.time(),
        }
        os.write(self._ledger, (json.dumps(line) + "\n").encode())


async def _serve(options: argparse.Namespace) -> None:
    server = LedgerServer(options.rank, token_s=options.token_s, ledger=options.ledger)
    await server.start(options.port)
    await asyncio.get_running_loop().create_future()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--token-s", type=float, default=0.01)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
