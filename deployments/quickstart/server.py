"""An inference server of the quickstart's policy, for a fleet whose weights a trainer updates.

    python server.py --port 8100

The server begins with the untrained policy. POST /update_weights_from_disk loads other weights.
SIGTERM ends the server.

Exit status: 1 if the server cannot serve, with the reason on stderr; 2 if the arguments are wrong.
"""

from __future__ import annotations

import os

# Use one thread, because the matrices are too small to profit from several threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import signal
import sys
from collections.abc import Sequence

import numpy as np
from policy import initial_policy
from sampler import Sampler
from serving import InferenceServer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends the process. If serving fails, return an exit status."""
    options = _parser().parse_args(argv)
    # Derive the seed as `trainer.py` does, so that server and trainer begin with the same weights.
    weights_seed, _ = np.random.SeedSequence(options.seed).spawn(2)
    policy = initial_policy(np.random.default_rng(weights_seed))
    sampler = Sampler(policy, step=0, rng=np.random.default_rng())
    try:
        with InferenceServer(
            sampler, host=options.host, port=options.port, takes_weights=True
        ) as server:
            print(f"inference on {server.url}, weights of step 0", flush=True)
            while True:
                signal.pause()
    except OSError as error:
        print(f"server: cannot serve on port {options.port}: {error}", file=sys.stderr, flush=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="An inference server of the quickstart's policy.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, required=True, help="Port to listen on. 0: a free port")
    add(
        "--seed",
        type=int,
        default=0,
        help="Seed of the initial weights. Use the seed of the trainer",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
