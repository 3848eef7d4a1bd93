"""Check the commands of a fleet's servers against the command lines of the backends.

    python -m tests.peers.backends.check                        with the facts in this checkout
    python -m tests.peers.backends.check --packages [--write]   and with the packages themselves

The facts are the arguments that a version of a backend accepts. `--packages` downloads the packages
with pip and compares the facts with them. `--newest` uses the newest packages instead of the known
versions. `--write` writes new facts. The packages are parsed, and no code of them runs.

Exit status: 0 without faults; 1 with faults, which are printed one per line; 2 for wrong arguments;
3 if a package could not be downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.rollout.topology import Addresses, TopologyPlan, build, nodes_needed, ports_needed
from tasks.spec.rollout import Rollout
from tests.peers import pip
from tests.peers.backends import facts, reading

#: Mapping from the name of an example fleet to its settings. The examples differ in backend and
#: parallelism, so Muster starts the servers of each example with different commands.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "SGLang": {"backend": "sglang", "tensor_parallel": 8, "expert_parallel": 8, "engines": 2},
    "SGLang replicas": {"backend": "sglang", "tensor_parallel": 2, "data_parallel": 4},
    "SGLang TP16 over 2x8": {"backend": "sglang", "tensor_parallel": 16, "nodes_per_engine": 2},
    "SGLang DP attention over 2x4": {
        "backend": "sglang",
        "tensor_parallel": 8,
        "data_parallel": 8,
        "dp_attention": True,
        "nodes_per_engine": 2,
    },
    "LMDeploy TP16": {"backend": "lmdeploy", "tensor_parallel": 16, "nodes_per_engine": 2},
    "LMDeploy EP16": {"backend": "lmdeploy", "expert_parallel": 16, "nodes_per_engine": 2},
    "vLLM": {"backend": "vllm", "tensor_parallel": 4, "data_parallel": 2},
    "vLLM TP16 over 2 nodes": {"backend": "vllm", "tensor_parallel": 16, "nodes_per_engine": 2},
    "vLLM DP16 EP over 2 nodes": {
        "backend": "vllm",
        "data_parallel": 16,
        "expert_parallel": 16,
        "nodes_per_engine": 2,
    },
}


def main(argv: list[str] | None = None) -> int:
    """Check the recorded command-line arguments of each backend; print the faults and a summary.

    Returns:
        Exit code 0 without faults, 1 with faults, or 3 if a backend could not be downloaded.
    """
    options = _parser().parse_args(argv)
    is_wrong = False
    for backend, version in facts.VERSIONS.items():
        faults: list[str] = []
        source = "its facts"
        if options.packages:
            try:
                faults, version = compare_with_package(
                    backend, None if options.newest else version, write=options.write
                )
            except pip.NoWheel as error:
                print(f"{backend} could not be downloaded: {error}", file=sys.stderr)
                return 3
            source = "its package and its facts"
        faults += layout_faults(facts.load(backend, version))
        for fault in faults:
            print(fault)
        print(f"{backend} {version}: {len(faults) or 'no'} faults, by {source}")
        is_wrong = is_wrong or bool(faults)
    return 1 if is_wrong else 0


def plan_of(written: Mapping[str, Any]) -> TopologyPlan:
    """Return the planned servers of a fleet with these settings, on made-up hosts and ports."""
    fleet = Rollout.model_validate({"model": "model", "placement": "ray", **written})
    ports = {name: 30000 + index for index, name in enumerate(ports_needed(fleet))}
    hosts = tuple(f"node-{index}" for index in range(nodes_needed(fleet)))
    return build(fleet, Addresses(hosts=hosts, ports=ports))


def layout_faults(known: facts.Facts) -> Iterator[str]:
    """Yield a line for each command-line argument that Muster plans but the backend rejects.

    The arguments are those of the inference servers in the example fleets of LAYOUTS.
    """
    for name, written in LAYOUTS.items():
        if written["backend"] == known.backend:
            for server in plan_of(written).servers:
                for fault in facts.faults_in(server.argv, known):
                    yield f"{name}, rank {server.rank}: {fault}"


def compare_with_package(
    backend: str, version: str | None, *, write: bool
) -> tuple[list[str], str]:
    """Compare the known arguments of a backend with the arguments in its package.

    The known arguments are in a JSON file of this checkout. pip downloads the package.

    Return the differences, and the version of the package.

    Args:
        backend: Name of the backend.
        version: Version of the package, or None for the newest version.
        write: If True, do not compare. Instead, write the arguments of the package to the JSON
            file.

    Raises:
        NoWheel: pip could not download the package.
    """
    with tempfile.TemporaryDirectory(prefix=f"{backend}-") as folder:
        requirement = f"{backend}=={version}" if version else backend
        fetched = pip.fetch(requirement, Path(folder), only=".py")
        options = reading.options_of(backend, fetched.folder)
    path = facts.path_of(backend, fetched.version)
    source = f"{fetched.name}, sha256 {fetched.sha256}"
    text = facts.as_text(backend, fetched.version, source, options)
    if write:
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: written")
        return [], fetched.version
    if not path.exists():
        return [f"{path.name}: missing; --write makes it"], facts.VERSIONS[backend]
    known = set(facts.load(backend, fetched.version).options)
    return [
        *(f"{path.name}: lacks {option.names[0]}" for option in options if option not in known),
        *(f"{path.name}: has {option.names[0]}, unlike it" for option in known - set(options)),
    ], fetched.version


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers.backends.check",
        description="Check the arguments of a fleet's servers against the command lines of the "
        "backends SGLang, LMDeploy and vLLM.",
        epilog="Exit: 0 without faults; 1 with faults; 2 for wrong arguments; 3 if a package could "
        "not be downloaded.",
    )
    add_argument = parser.add_argument
    add_argument(
        "--packages", action="store_true", help="compare the facts with the packages from pip"
    )
    add_argument("--newest", action="store_true", help="with --packages: use the newest versions")
    add_argument("--write", action="store_true", help="with --packages: write new facts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
