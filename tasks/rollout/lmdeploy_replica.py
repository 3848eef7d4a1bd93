"""LMDeploy's command line for one replica: `python -c TEXT serve api_server MODEL --dp N ...`.

Of itself it starts all replicas of a node under one process, on devices and a host of its own
choice. Here `--node-rank` is the replica; the devices and the host are those that it was given.
"""

from importlib import import_module
from typing import Any


def one_replica(
    num_nodes: int, node_rank: int, model_path: str, *, backend_config: Any, **rest: Any
) -> None:
    """In place of `launch_server`, with its parameters."""
    backend_config.dp_rank = node_rank
    api_server: Any = import_module("lmdeploy.serve.openai.api_server")
    api_server.serve(model_path, backend_config=backend_config, **rest)


def main() -> None:
    launching: Any = import_module("lmdeploy.serve.openai.launch_server")
    launching.launch_server = one_replica
    import_module("lmdeploy.cli").run()


if __name__ == "__main__":
    main()
