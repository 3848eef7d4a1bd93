"""Run `ray start` for one more Ray node on this machine, on the loopback interface.

    python -m deployments.stack.ray_node ADDRESS OPTIONS...

If RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0, Ray listens only on the loopback interface. Every process
of Ray must inherit this value. But with this value, `ray start --address` refuses to add a node.

So this process changes two things in Ray's modules. Clusters count as enabled, and the function
that chooses the IP address of the node returns the loopback address.

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
    # Give each Ray node its own subdirectory for runtime environments. In a shared subdirectory of
    # the Ray session, a node would delete files of jobs that run on another node of this machine.
    ray_constants.DEFAULT_RUNTIME_ENV_DIR_NAME = f"runtime_resources_{os.getpid()}"
    address, *options = sys.argv[1:]
    scripts.cli(["start", f"--address={address}", f"--node-ip-address={HOST}", *options])


if __name__ == "__main__":
    main()
