"""LMDeploy's command line for one replica: `python -c TEXT serve api_server MODEL --dp N ...`.

LMDeploy itself starts all replicas of a node under one process, and chooses their devices and host.
This program starts a single replica, on the devices and the host that the caller has chosen. The
option `--node-rank` selects the replica.
"""

from importlib import import_module
from typing import Any


def serve_one_replica(
    num_nodes: int, node_rank: int, model_path: str, *, backend_config: Any, **rest: Any
) -> None:
    """Serve one replica of an engine. This function replaces LMDeploy's `launch_server`.

    The original function would start all replicas of a node.

    Args:
        num_nodes: Unused, but passed by LMDeploy.
        node_rank: Index of the replica.
        model_path: Path or name of the model.
        backend_config: LMDeploy's settings of the engine.
        rest: Further arguments of LMDeploy's `serve`.
    """
    backend_config.dp_rank = node_rank
    api_server: Any = import_module("lmdeploy.serve.openai.api_server")
    api_server.serve(model_path, backend_config=backend_config, **rest)


def main() -> None:
    """Run LMDeploy's command line, with `serve_one_replica` in place of `launch_server`."""
    launcher: Any = import_module("lmdeploy.serve.openai.launch_server")
    launcher.launch_server = serve_one_replica
    import_module("lmdeploy.cli").run()


if __name__ == "__main__":
    main()
