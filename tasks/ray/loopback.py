"""Clusters that listen on loopback only, as `make up` starts one: what their drivers need.

Ray replaces a loopback address by the machine's address in its network, where such a cluster does
not listen, and looks for it there for minutes. One switch of Ray's keeps it from that.
"""

from __future__ import annotations

import os

#: Source: ray/_private/ray_constants.py, ENABLE_RAY_CLUSTERS_ENV_VAR.
_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def driver_env(gcs_address: str) -> dict[str, str]:
    """What the environment of a driver of this cluster needs beside its own.

    Args:
        gcs_address: `host:port` of the cluster's control store.
    """
    return {_SWITCH: "0"} if gcs_address.startswith(("127.", "localhost:")) else {}


def ready_driver(gcs_address: str) -> None:
    """Make this process ready for `ray.init` at this cluster."""
    if not (more := driver_env(gcs_address)):
        return
    os.environ.update(more)
    # Ray has read its environment where something has imported it already.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
