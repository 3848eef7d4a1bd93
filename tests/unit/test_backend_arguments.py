"""What a fleet starts, held against the command lines of the backends themselves.

What is known of them is in tests/peers/backends/<backend>-<version>.json, which `make
backends-check` makes from their packages; these tests do without the packages.
"""

from __future__ import annotations

import itertools
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rollout import lmdeploy_replica
from tasks.spec.rollout import Sizes, check_sizes
from tests.peers.backends import check, facts
from tests.peers.backends.facts import Facts

KNOWN = {backend: facts.load(backend) for backend in facts.VERSIONS}


def server_of(layout: str) -> tuple[Facts, tuple[str, ...]]:
    """The facts of a layout's backend, and what its last server runs."""
    written = check.LAYOUTS[layout]
    return KNOWN[written["backend"]], check.plan_of(written).servers[-1].argv


@pytest.mark.parametrize("layout", check.LAYOUTS)
def test_the_backend_takes_every_server_of_a_layout(layout: str) -> None:
    written = check.LAYOUTS[layout]

    servers = check.plan_of(written).servers

    known = KNOWN[written["backend"]]
    assert [fault for one in servers for fault in facts.faults_in(one.argv, known)] == []


def shapes() -> list[dict[str, Any]]:
    """The valid ones among the layouts of the backends whose command lines are known."""
    numbers = (1, 2, 3, 4, 8, 16)
    keys = ("backend", "nodes_per_engine", "tensor_parallel", "expert_parallel", "data_parallel")
    found = [
        {**dict(zip(keys, values, strict=True)), "dp_attention": dp_attention}
        for values in itertools.product(sorted(KNOWN), (1, 2, 4), numbers, numbers, numbers)
        for dp_attention in ((False, True) if values[0] == "sglang" else (False,))
    ]
    return [
        one
        for one in found
        if (sizes := Sizes.of(one)) is not None and not list(check_sizes(sizes))
    ]


SHAPES = shapes()


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Any]:
    """A valid fleet of one of the backends whose command lines are known."""
    written = {
        **draw(st.sampled_from(SHAPES)),
        "engines": draw(st.integers(1, 3)),
        "args": draw(st.sampled_from([(), ("--dtype", "bfloat16"), ("--dtype=bfloat16",)])),
    }
    return {key: value for key, value in written.items() if value != ()}


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_the_backend_takes_every_server_of_any_valid_fleet(written: dict[str, Any]) -> None:
    plan = check.plan_of(written)

    faults = [
        fault
        for server in plan.servers
        for fault in facts.faults_in(server.argv, KNOWN[written["backend"]])
    ]

    assert faults == []


@pytest.mark.parametrize(
    ("layout", "was", "becomes", "fault"),
    [
        # misspelt, and of another backend
        ("SGLang TP16 over 2x8", "--nnodes", "--nnode", "has no argument --nnode"),
        ("LMDeploy TP16", "--server-port", "--port", "has no argument --port"),
        ("vLLM TP16 over 2 nodes", "-r", "-rank", "invalid int value: 'ank'"),  # -r ank
        # a value where there is none, and none where there is one
        ("vLLM DP16 EP over 2 nodes", "--headless", "--headless=1", "ignored explicit argument"),
        ("SGLang TP16 over 2x8", "node-0:30000", "--verbose", "expected one argument"),
        ("SGLang DP attention over 2x4", "--enable-dp-attention", "--enable-dp", "has no argument"),
        # no number, and none of the choices
        ("SGLang TP16 over 2x8", "16", "many", "invalid int value: 'many'"),
        # another program
        ("LMDeploy TP16", "api_server", "gradio", "does not start a server"),
    ],
)
def test_a_spoilt_argument_is_found(layout: str, was: str, becomes: str, fault: str) -> None:
    known, argv = server_of(layout)
    assert was in argv

    found = list(facts.faults_in([becomes if word == was else word for word in argv], known))

    assert found and any(fault in one for one in found), found


@pytest.mark.parametrize("backend", facts.VERSIONS)
def test_the_facts_are_written_as_they_are_read(backend: str) -> None:
    path = facts.path_of(backend)
    written = json.loads(path.read_text(encoding="utf-8"))

    text = facts.as_text(backend, written["version"], written["from"], KNOWN[backend].options)

    assert text == path.read_text(encoding="utf-8")


def test_the_command_counts_the_faults_of_each_backend(capsys: pytest.CaptureFixture[str]) -> None:
    code = check.main([])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines == [
        f"{backend} {version}: no faults, by its facts"
        for backend, version in facts.VERSIONS.items()
    ]


def test_the_launcher_serves_its_replica_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, Any, dict[str, Any]]] = []
    launching = ModuleType("launch_server")
    config = SimpleNamespace(dp_rank=0)

    def serve(model_path: str, *, backend_config: Any, **rest: Any) -> None:
        served.append((model_path, backend_config, rest))

    def run() -> None:
        # LMDeploy takes it from the module when it has read its arguments.
        launching.launch_server(16, 9, "m", backend_config=config, server_port=7, server_name="h")

    modules = {
        "lmdeploy": ModuleType("lmdeploy"),
        "lmdeploy.serve": ModuleType("lmdeploy.serve"),
        "lmdeploy.serve.openai": ModuleType("lmdeploy.serve.openai"),
        "lmdeploy.serve.openai.launch_server": launching,
        "lmdeploy.serve.openai.api_server": SimpleNamespace(serve=serve),
        "lmdeploy.cli": SimpleNamespace(run=run),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    lmdeploy_replica.main()

    assert served == [("m", config, {"server_port": 7, "server_name": "h"})]
    assert config.dp_rank == 9
