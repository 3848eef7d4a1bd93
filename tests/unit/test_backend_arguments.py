"""The commands of a fleet's servers are valid for the real command lines of the backends.

The options of each backend are in tests/peers/backends/<backend>-<version>.json. `make
backends-check` writes these files from the backends' packages. The tests need no package.
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
    """Return the options that an inference backend knows, and the command that starts a server.

    Args:
        layout: Name of an example fleet in `check.LAYOUTS`.

    Returns:
        The options of the backend's command line, as read from tests/peers/backends, and the
        command that Muster plans for the last server of the fleet.
    """
    fleet = check.LAYOUTS[layout]
    return KNOWN[fleet["backend"]], check.plan_of(fleet).servers[-1].argv


@pytest.mark.parametrize("layout", check.LAYOUTS)
def test_backend_accepts_the_command_of_every_server(layout: str) -> None:
    fleet = check.LAYOUTS[layout]

    servers = check.plan_of(fleet).servers

    known = KNOWN[fleet["backend"]]
    faults = [fault for server in servers for fault in facts.faults_in(server.argv, known)]
    assert faults == []


def list_shapes() -> list[dict[str, Any]]:
    """Return all valid combinations of backend, nodes per engine and kinds of parallelism."""
    numbers = (1, 2, 3, 4, 8, 16)
    keys = ("backend", "nodes_per_engine", "tensor_parallel", "expert_parallel", "data_parallel")
    shapes = [
        {**dict(zip(keys, values, strict=True)), "dp_attention": dp_attention}
        for values in itertools.product(sorted(KNOWN), (1, 2, 4), numbers, numbers, numbers)
        for dp_attention in ((False, True) if values[0] == "sglang" else (False,))
    ]
    return [
        shape
        for shape in shapes
        if (sizes := Sizes.of(shape)) is not None and not list(check_sizes(sizes))
    ]


SHAPES = list_shapes()


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Any]:
    """Generate valid specs of inference fleets, for the backends whose options are known."""
    fleet = {
        **draw(st.sampled_from(SHAPES)),
        "engines": draw(st.integers(1, 3)),
        "args": draw(st.sampled_from([(), ("--dtype", "bfloat16"), ("--dtype=bfloat16",)])),
    }
    return {key: value for key, value in fleet.items() if value != ()}


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_backend_accepts_the_command_of_every_server_of_any_fleet(fleet: dict[str, Any]) -> None:
    plan = check.plan_of(fleet)

    faults = [
        fault
        for server in plan.servers
        for fault in facts.faults_in(server.argv, KNOWN[fleet["backend"]])
    ]

    assert faults == []


@pytest.mark.parametrize(
    ("layout", "word", "replacement", "fault"),
    [
        # the backend does not know the option: it is misspelt, or belongs to another backend
        ("SGLang TP16 over 2x8", "--nnodes", "--nnode", "has no argument --nnode"),
        ("LMDeploy TP16", "--server-port", "--port", "has no argument --port"),
        # vLLM reads the option -rank as -r with the value "ank"
        ("vLLM TP16 over 2 nodes", "-r", "-rank", "invalid int value: 'ank'"),
        # the option `--headless` takes no value
        ("vLLM DP16 EP over 2 nodes", "--headless", "--headless=1", "ignored explicit argument"),
        # the value of an option is missing: the next word is another option
        ("SGLang TP16 over 2x8", "node-0:30000", "--verbose", "expected one argument"),
        # the name of the option is shortened
        ("SGLang DP attention over 2x4", "--enable-dp-attention", "--enable-dp", "has no argument"),
        # an option for a number gets a text
        ("SGLang TP16 over 2x8", "16", "many", "invalid int value: 'many'"),
        # the command starts another program than the inference server
        ("LMDeploy TP16", "api_server", "gradio", "does not start a server"),
    ],
)
def test_invalid_arguments_are_detected(
    layout: str, word: str, replacement: str, fault: str
) -> None:
    known, argv = server_of(layout)
    assert word in argv
    invalid_argv = [replacement if argument == word else argument for argument in argv]

    faults = list(facts.faults_in(invalid_argv, known))

    assert any(fault in text for text in faults), faults


@pytest.mark.parametrize("backend", facts.VERSIONS)
def test_written_facts_equal_the_stored_facts(backend: str) -> None:
    path = facts.path_of(backend)
    stored = json.loads(path.read_text(encoding="utf-8"))

    text = facts.as_text(backend, stored["version"], stored["from"], KNOWN[backend].options)

    assert text == path.read_text(encoding="utf-8")


def test_check_command_reports_the_faults_of_each_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = check.main([])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines == [
        f"{backend} {version}: no faults, by its facts"
        for backend, version in facts.VERSIONS.items()
    ]


def test_lmdeploy_launcher_serves_only_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, Any, dict[str, Any]]] = []
    launcher = ModuleType("launch_server")
    config = SimpleNamespace(dp_rank=0)

    def serve(model_path: str, *, backend_config: Any, **rest: Any) -> None:
        served.append((model_path, backend_config, rest))

    def run() -> None:
        # Call the function as LMDeploy's command line does: look up `launch_server` in the module
        # at the time of the call. Muster has put its own function there.
        launcher.launch_server(16, 9, "m", backend_config=config, server_port=7, server_name="h")

    modules = {
        "lmdeploy": ModuleType("lmdeploy"),
        "lmdeploy.serve": ModuleType("lmdeploy.serve"),
        "lmdeploy.serve.openai": ModuleType("lmdeploy.serve.openai"),
        "lmdeploy.serve.openai.launch_server": launcher,
        "lmdeploy.serve.openai.api_server": SimpleNamespace(serve=serve),
        "lmdeploy.cli": SimpleNamespace(run=run),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    lmdeploy_replica.main()

    assert served == [("m", config, {"server_port": 7, "server_name": "h"})]
    assert config.dp_rank == 9
