"""The command `muster plan SPEC.yaml` shows the plan of a fleet and starts nothing."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App

from tasks.rollout.__main__ import plan as plan_verb
from tasks.show.arguments import run

PLAN = App(name="plan", default_command=plan_verb)
FLEET = {"backend": "sglang", "model": "m", "tensor_parallel": 16, "nodes_per_engine": 2}
RAY = {"address": "http://127.0.0.1:8265"}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """Return the spec file of a run on Ray with an SGLang engine on two nodes."""
    return write_spec(tmp_path, {**FLEET, "placement": "ray"})


def write_spec(folder: Path, fleet: dict[str, Any] | None, **keys: Any) -> Path:
    """Write a run spec with a fleet and further keys, and return the path of the file."""
    components = {"trainer": {"command": ["python", "train.py", "${run.dir}"]}}
    if fleet is not None:
        components = {"rollout": fleet, **components}
    run = {"name": "run", "workload": "grpo", "ray": RAY, "components": components, **keys}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run `muster plan` with `--json`, and return the parsed plan."""
    assert run(PLAN, [*arguments, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_plan_as_json_has_all_keys(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_plan(capsys, str(spec))

    assert list(plan) == ["engines", "servers", "groups", "training_mesh"]
    assert plan["engines"] == [{"ranks": list(range(16)), "nodes": [0, 1]}]
    assert plan["groups"] == [[0, 8]]
    assert plan["training_mesh"] == [list(range(16))]
    assert [
        (server["rank"], server["node"], server["entrypoint"]) for server in plan["servers"]
    ] == [
        (0, 0, True),
        (8, 1, False),
    ]
    assert plan["servers"][1] == {
        "rank": 8,
        "node": 1,
        "argv": shlex.split(
            "python -m sglang.launch_server --model-path m --tp-size 16 --nnodes 2 --node-rank 1 "
            "--dist-init-addr node-0:30000 --host node-1 --port 30002"
        ),
        "env": {"SGLANG_HEALTH_CHECK_TIMEOUT": "12"},
        "entrypoint": False,
        "group": 0,
        "bundles": list(range(8, 16)),
    }


def test_set_overrides_a_value_of_the_spec(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_plan(capsys, str(spec), "--set", "components.rollout.engines=2")

    assert plan["groups"] == [[0, 8], [16, 24]]


def test_secrets_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"HF_TOKEN": "hf_abcdefgh", "HF_HOME": "/hub"}
    fleet = {"backend": "vllm", "model": "m", "env": env, "args": ["--hf-token", "hf_abcdefgh"]}

    [server] = run_plan(capsys, str(write_spec(tmp_path, fleet)))["servers"]

    assert "hf_abcdefgh" not in json.dumps(server)
    assert server["env"]["HF_TOKEN"] == "***"
    assert server["env"]["HF_HOME"] == "/hub"


def test_plan_as_text_names_nodes_and_ranks(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(PLAN, [str(spec)])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0] == "engine 0: ranks 0-15 on node 0, 1, rendezvous at node-0:30000"
    assert lines[1] == "  server 0: node 0, http://node-0:30001, entrypoint, GPU bundles 0-7"
    assert lines[2].startswith("    SGLANG_HEALTH_CHECK_TIMEOUT=12 python -m sglang.launch_server")
    assert lines[3] == "  server 8: node 1, http://node-1:30002, no entrypoint, GPU bundles 8-15"
    assert lines[-1] == "training mesh: [0-15]"


@pytest.mark.parametrize(
    ("fleet", "gang", "faults"),
    [
        # the spec has two faults, which are reported together
        (
            {"backend": "vllm", "args": ["-tp", "2"]},
            None,
            [
                "components.rollout.model: missing",
                "components.rollout.args.0: Muster itself sets -tp",
            ],
        ),
        # the spec has no fleet
        (
            None,
            None,
            [
                "components: the spec has no component `rollout`, so there are no inference "
                "servers to plan (write"
            ],
        ),
        # an engine needs more GPUs than a node has
        (
            {"backend": "sglang", "model": "m", "tensor_parallel": 8},
            {"gpus_per_node": 4},
            [
                "components.rollout: an engine needs 8 GPUs on one node, but each node of the run "
                "has only 4"
            ],
        ),
        # an engine needs two nodes, but a local fleet has only one
        (
            {**FLEET, "placement": "local"},
            None,
            [
                "components.rollout.nodes_per_engine: with `placement: local`, an engine runs "
                "only on"
            ],
        ),
    ],
)
def test_invalid_fleets_exit_with_status_2_and_name_the_faults(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fleet: dict[str, Any] | None,
    gang: dict[str, Any] | None,
    faults: list[str],
) -> None:
    spec = write_spec(tmp_path, fleet, **({"gang": gang} if gang else {}))

    code = run(PLAN, [str(spec)])

    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert all(fault in captured.err for fault in faults), captured.err


def test_command_imports_neither_ray_nor_prefect(spec: Path) -> None:
    program = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('tasks.rollout', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print(end.code, sorted({'ray', 'prefect', 'torch'} & set(sys.modules)))\n"
    )

    completed = subprocess.run(
        (sys.executable, "-c", program, "plan", str(spec)),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).resolve().parents[2],
    )

    assert completed.stdout.splitlines()[-1] == "0 []", completed.stderr
