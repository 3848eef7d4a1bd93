"""Tests of the run specs that start verl, against verl's own configuration.

The file tests/peers/verl/verl-<version>.json has the configuration keys of verl. The command
`make verl-check` creates the file from verl's wheel, and also runs verl's code. These tests use
only the file.
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
    """Return the spec of a file with changes.

    Args:
        name: Name of the file in deployments/runs, without `.yaml`.
        overrides: Arguments of verl to append to the command of the component `trainer`.
        without: All arguments of verl that start with this text are removed. If empty, none is
            removed.
        changes: Top-level keys of the spec to replace.
    """
    path = ROOT / "deployments" / "runs" / f"{name}.yaml"
    content = copy.deepcopy(yaml.safe_load(path.read_text(encoding="utf-8"))) | changes
    command = content["components"]["trainer"]["command"]
    if without:
        command[:] = [word for word in command if not word.startswith(without)]
    command += overrides
    return RunSpec.model_validate(content)


def faults(spec: RunSpec) -> list[str]:
    return rules.faults_in(spec, VERL)


def test_every_workload_has_a_spec() -> None:
    workloads = {check.read(path).workload for path in SPECS}

    assert workloads == {"ppo", "grpo", "sft"}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_specs_are_valid_for_muster_and_verl(path: Path) -> None:
    spec = check.read(path)

    assert spec.name == path.stem
    assert not find_placeholder_faults(spec.written())
    assert len(list(rules.starts_in(spec))) == 1
    assert faults(spec) == []


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_specs_start_an_adoptable_ray_job_on_a_worker_node(path: Path) -> None:
    spec = check.read(path)

    assert spec.ray is not None and spec.ray.entrypoint_resources
    assert {process.launcher for process in spec.processes.values()} == {"ray_job"}
    assert spec.on_lost_flow == "adopt"


@pytest.mark.parametrize(
    ("name", "override", "fault"),
    [
        # a misspelt key: the message suggests the nearest key
        ("verl-grpo", "trainer.nnode=2", "no such key (did you mean `trainer.nnodes`?)"),
        # a key of verl's program for PPO, which the program for SFT does not have
        ("verl-sft", "algorithm.adv_estimator=grpo", "no such key"),
        # a key that existed in verl 0.3, but does not exist in newer releases
        ("verl-ppo", "critic.model.fsdp_config.param_offload=True", "no such key"),
        # a value of the wrong type is reported
        ("verl-grpo", "actor_rollout_ref.rollout.n=many", "must be int, found 'many'"),
        # an existing key with Hydra's prefix `+`, which is only for new keys
        ("verl-ppo", "+trainer.nnodes=2", "leave out the +"),
    ],
)
def test_invalid_overrides_are_detected(name: str, override: str, fault: str) -> None:
    detected = faults(spec_with(name, override))

    assert len(detected) == 1 and detected[0].startswith(f"trainer: {override}: ")
    assert fault in detected[0]


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
        # checkpoints must not be in the job's copy of the working directory, because Ray deletes
        # the copy after the job
        ("verl-ppo", "trainer.default_local_dir=checkpoints", "copy of the working directory"),
        ("verl-ppo", "trainer.logger=[console]", "nothing writes what progress reads"),
        ("verl-ppo", "trainer.total_training_steps=7", "but trainer.total_training_steps is 7"),
    ],
)
def test_contradicting_settings_are_detected(name: str, override: str, fault: str) -> None:
    detected = faults(spec_with(name, override))

    assert any(fault in text for text in detected), detected


def test_missing_inference_engine_is_detected() -> None:
    detected = faults(spec_with("verl-grpo", without="actor_rollout_ref.rollout.name="))

    assert detected == ["trainer: actor_rollout_ref.rollout.name is missing: vllm or sglang"]


@pytest.mark.parametrize(("name", "cpus"), [("verl-grpo", 2), ("verl-sft", 9)])
def test_too_few_cpus_for_placement_groups_of_verl_are_detected(name: str, cpus: int) -> None:
    gang = {"nodes": 2, "gpus_per_node": 8, "cpus_per_gpu": cpus}

    detected = faults(spec_with(name, gang=gang))

    assert detected == [f"trainer: gang.cpus_per_gpu is {cpus}, but verl asks Ray for {cpus + 1}"]


def test_command_prints_faults_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text(yaml.safe_dump(spec_with("verl-ppo", "trainer.nnode=2").written()))

    code = check.main([str(spec)])

    assert code == 1
    assert "mine.yaml: trainer: trainer.nnode=2: " in capsys.readouterr().out


def test_written_facts_equal_the_stored_file(tmp_path: Path) -> None:
    stored = json.loads(facts.path_of(VERL.version).read_text(encoding="utf-8"))
    sha256 = stored["from"].rpartition(" ")[2]

    text = facts.as_text(VERL.version, sha256, stored)

    assert text == facts.path_of(VERL.version).read_text(encoding="utf-8")
