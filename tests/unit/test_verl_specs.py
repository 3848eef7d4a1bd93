"""The run specs that start verl, held against verl's own configuration.

What is known of verl is in tests/peers/verl/verl-<version>.json, which `make verl-check` makes from
its wheel; that target also asks verl's own code, which these tests do without.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.spec.placeholders import find_placeholder_faults
from tasks.spec.run import RunSpec
from tests.peers.verl import check, facts, rules

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted((ROOT / "deployments" / "runs").glob("verl-*.yaml"))
VERL = facts.load()


def spec_with(name: str, *overrides: str, without: str = "", **changes: Any) -> RunSpec:
    """The spec of a file with overrides put last, one left out, and top-level keys replaced."""
    path = ROOT / "deployments" / "runs" / f"{name}.yaml"
    written = copy.deepcopy(yaml.safe_load(path.read_text(encoding="utf-8"))) | changes
    command = written["components"]["trainer"]["command"]
    if without:
        command[:] = [word for word in command if not word.startswith(without)]
    command += overrides
    return RunSpec.model_validate(written)


def faults(spec: RunSpec) -> list[str]:
    return rules.faults_in(spec, VERL)


def test_there_is_a_spec_for_each_workload() -> None:
    workloads = {check.read(path).workload for path in SPECS}

    assert workloads == {"ppo", "grpo", "sft"}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_is_valid_and_verl_has_nothing_against_it(path: Path) -> None:
    spec = check.read(path)

    assert spec.name == path.stem
    assert not find_placeholder_faults(spec.written())
    assert len(list(rules.starts_in(spec))) == 1
    assert faults(spec) == []


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_is_a_ray_job_off_the_head_that_outlives_its_flow(path: Path) -> None:
    spec = check.read(path)

    assert spec.ray is not None and spec.ray.entrypoint_resources
    assert {one.launcher for one in spec.processes.values()} == {"ray_job"}
    assert spec.on_lost_flow == "adopt"


@pytest.mark.parametrize(
    ("name", "override", "fault"),
    [
        # misspelt, with the key that was meant
        ("verl-grpo", "trainer.nnode=2", "no such key (did you mean `trainer.nnodes`?)"),
        # of the other program's configuration
        ("verl-sft", "algorithm.adv_estimator=grpo", "no such key"),
        # of an earlier verl: 0.3 had it here
        ("verl-ppo", "critic.model.fsdp_config.param_offload=True", "no such key"),
        # wrong types
        ("verl-grpo", "actor_rollout_ref.rollout.n=many", "must be int, found 'many'"),
        # added though it is there
        ("verl-ppo", "+trainer.nnodes=2", "leave out the +"),
    ],
)
def test_a_wrong_override_is_found(name: str, override: str, fault: str) -> None:
    found = faults(spec_with(name, override))

    assert len(found) == 1 and found[0].startswith(f"trainer: {override}: ")
    assert fault in found[0]


@pytest.mark.parametrize(
    ("name", "override", "fault"),
    [
        ("verl-ppo", "trainer.nnodes=4", "trainer.nnodes is 4, but gang.nodes is 2"),
        ("verl-ppo", "algorithm.adv_estimator=grpo", "but workload is ppo"),
        ("verl-grpo", "actor_rollout_ref.rollout.n=1", "GRPO compares"),
        ("verl-ppo", "data.train_batch_size=1000", "1000 answers do not divide by 16 GPUs"),
        ("verl-ppo", "data.train_batch_size=128", "is above data.train_batch_size, 128"),
        (
            "verl-ppo",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
            "tensor_model_parallel_size, 3",
        ),
        # where the job's copy of the working directory is removed with it
        ("verl-ppo", "trainer.default_local_dir=checkpoints", "copy of the working directory"),
        ("verl-ppo", "trainer.logger=[console]", "nothing writes what progress reads"),
        ("verl-ppo", "trainer.total_training_steps=7", "but trainer.total_training_steps is 7"),
    ],
)
def test_what_does_not_go_together_is_found(name: str, override: str, fault: str) -> None:
    found = faults(spec_with(name, override))

    assert any(fault in one for one in found), found


def test_a_missing_inference_engine_is_found() -> None:
    found = faults(spec_with("verl-grpo", without="actor_rollout_ref.rollout.name="))

    assert found == ["trainer: actor_rollout_ref.rollout.name is missing: vllm or sglang"]


@pytest.mark.parametrize(("name", "cpus"), [("verl-grpo", 2), ("verl-sft", 9)])
def test_too_few_cpus_for_verls_placement_groups_are_found(name: str, cpus: int) -> None:
    gang = {"nodes": 2, "gpus_per_node": 8, "cpus_per_gpu": cpus}

    found = faults(spec_with(name, gang=gang))

    assert found == [f"trainer: gang.cpus_per_gpu is {cpus}, but verl asks Ray for {cpus + 1}"]


def test_the_command_names_what_is_wrong_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text(yaml.safe_dump(spec_with("verl-ppo", "trainer.nnode=2").written()))

    code = check.main([str(spec)])

    assert code == 1
    assert "mine.yaml: trainer: trainer.nnode=2: " in capsys.readouterr().out


def test_the_facts_are_written_as_they_are_read(tmp_path: Path) -> None:
    written = json.loads(facts.path_of(VERL.version).read_text(encoding="utf-8"))
    sha256 = written["from"].rpartition(" ")[2]

    text = facts.as_text(VERL.version, sha256, written)

    assert text == facts.path_of(VERL.version).read_text(encoding="utf-8")
