"""Program that runs a gateway for a fixed list of servers, and prints the port of the gateway.

python -m tests.benchmarks.gateway_process URL...
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tasks.rollout.gateway import Gateway
from tasks.rollout.process import run_serving
from tasks.rollout.router import Entrypoint, Router
from tasks.spec.rollout import Rollout


class FixedFleet:
    """Fake fleet whose servers never change and are always ready."""

    def __init__(self, urls: list[str]) -> None:
        self.router = Router()
        self.settings = Rollout.model_construct()
        self.router.set(Entrypoint(rank=i, epoch=1, url=url) for i, url in enumerate(urls))

    def note_failure(self, rank: int, epoch: int, why: str) -> None:
        print(f"rank {rank}: {why}", file=sys.stderr)

    def note_tokens(self, rank: int, epoch: int, count: int) -> None:
        pass

    def version_of(self, engine: int) -> int:
        return 0

    def snapshot(self) -> dict[str, Any]:
        return {}


async def serve(urls: list[str]) -> None:
    """Start the gateway, print its port, and serve until the process is ended."""
    gateway = Gateway(FixedFleet(urls))
    await gateway.start()
    print(gateway.url.rpartition(":")[2], flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    run_serving(serve(sys.argv[1:]))
