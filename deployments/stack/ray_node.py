"""`ray start` for one more node on this machine, on loopback: `python -m deployments.stack.ray_node
ADDRESS OPTIONS...`.

Ray stays on loopback only with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which everything that it starts
is to inherit; but with that set `ray start --address` refuses to add a node. So this process alone
believes that clusters are on, and answers with loopback where it would look for an interface.
Source: ray/scripts/scripts.py `start` and ray/_private/services.py `get_node_ip_address`, Ray 2.60.
"""

from __future__ import annotations

import os
import sys

from ray._private import ray_constants, services
from ray.scripts import scripts

from deployments.stack.env import HOST


def main() -> None:
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.get_node_ip_address = lambda address=None: HOST
    # Nodes of one machine share a session's directory: without one of its own for what runs need,
    # each takes away, and unpacks anew, what a job of another is running in.
    ray_constants.DEFAULT_RUNTIME_ENV_DIR_NAME = f"runtime_resources_{os.getpid()}"
    address, *options = sys.argv[1:]
    scripts.cli(["start", f"--address={address}", f"--node-ip-address={HOST}", *options])


if __name__ == "__main__":
    main()
