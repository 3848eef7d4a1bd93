"""Holds the servers that a fleet starts against the command lines of the backends themselves.

    python -m tests.peers.backends.check                        against the facts in this checkout
    python -m tests.peers.backends.check --packages [--write]   and those against the packages

`--newest` takes the newest packages in place of the known versions; `--write` writes the facts
anew. The packages are got by pip and parsed; nothing of them is run.

Exit status: 0 nothing is wrong · 1 something is, a line each · 2 the arguments are wrong · 3 a
package cannot be had.
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

#: A layout of each kind that is planned differently, by name.
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
    """The exit status, after a line for each fault and for each backend."""
    options = _parser().parse_args(argv)
    is_wrong = False
    for backend, version in facts.VERSIONS.items():
        found: list[str] = []
        source = "its facts"
        if options.packages:
            try:
                found, version = ask_package(
                    backend, None if options.newest else version, write=options.write
                )
            except pip.NoWheel as error:
                print(f"{backend} cannot be had: {error}", file=sys.stderr)
                return 3
            source = "its package and its facts"
        found += layout_faults(facts.load(backend, version))
        for fault in found:
            print(fault)
        print(f"{backend} {version}: {len(found) or 'no'} faults, by {source}")
        is_wrong = is_wrong or bool(found)
    return 1 if is_wrong else 0


def plan_of(written: Mapping[str, Any]) -> TopologyPlan:
    """The plan of a fleet on hosts and ports that stand in for real ones."""
    fleet = Rollout.model_validate({"model": "model", "placement": "ray", **written})
    ports = {name: 30000 + index for index, name in enumerate(ports_needed(fleet))}
    hosts = tuple(f"node-{index}" for index in range(nodes_needed(fleet)))
    return build(fleet, Addresses(hosts=hosts, ports=ports))


def layout_faults(known: facts.Facts) -> Iterator[str]:
    """What a backend has against any server of the layouts, a line each."""
    for name, written in LAYOUTS.items():
        if written["backend"] == known.backend:
            for server in plan_of(written).servers:
                for fault in facts.faults_in(server.argv, known):
                    yield f"{name}, rank {server.rank}: {fault}"


def ask_package(backend: str, version: str | None, *, write: bool) -> tuple[list[str], str]:
    """Where the facts differ from a package, and its version; with `write`, its facts on disk.

    Raises:
        NoWheel: pip cannot get it.
    """
    with tempfile.TemporaryDirectory(prefix=f"{backend}-") as folder:
        wanted = f"{backend}=={version}" if version else backend
        fetched = pip.fetch(wanted, Path(folder), only=".py")
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
        *(f"{path.name}: has {one.names[0]}, unlike it" for one in known - set(options)),
    ], fetched.version


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers.backends.check",
        description="The arguments that a fleet's servers are started with against what is known "
        "of their backends: SGLang, LMDeploy and vLLM.",
        epilog="Exit: 0 nothing is wrong; 1 something is; 2 the arguments are wrong; 3 a package "
        "could not be had.",
    )
    add = parser.add_argument
    add(
        "--packages", action="store_true", help="hold the facts against the packages; pip gets them"
    )
    add("--newest", action="store_true", help="with --packages: the newest ones")
    add("--write", action="store_true", help="with --packages: write the facts anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
