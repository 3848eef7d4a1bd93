"""Tests of `muster init`, which writes a spec for an existing training."""

from __future__ import annotations

from pathlib import Path

import pytest
from cyclopts import App

from tasks.show.arguments import run
from tasks.spec.draft import draft_spec
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_spec
from tasks.train.deploying import init

INIT = App(name="init", default_command=init)
VERL_YAML = "actor_rollout_ref:\n  model: {path: m}\ntrainer: {nnodes: 1}\n"
TRL_YAML = "model_name_or_path: m\ndataset_name: d\n"
PRIME_TOML = 'max_steps = 20\n[orchestrator]\nbatch_size = 8\n[trainer.model]\nname = "m"\n'
TORCHRUN = "import torch.distributed as dist\ndist.init_process_group()\n"
SAVED = "${run.dir}/checkpoints"
OVERRIDES = (
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=8",
    "trainer.logger=[console,file]",
    f"trainer.default_local_dir={SAVED}",
    "trainer.resume_mode=auto",
)


def project(tmp_path: Path, files: dict[str, str]) -> Path:
    """Create a folder `my-run` of a project, with these files."""
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "my-run"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "found", "workload", "command"),
    [
        ({"train.py": "print('x')\n"}, "a script", "sft", ("python", "train.py")),
        ({"run.sh": "python -u x.py\n"}, "a script", "sft", ("bash", "run.sh")),
        (
            {"train.py": TORCHRUN},
            "torchrun",
            "sft",
            ("torchrun", "--standalone", "--nproc-per-node=8", "train.py"),
        ),
        (
            {"launch.sh": "torchrun --nproc-per-node 8 train.py\n", "train.py": "import torch\n"},
            "torchrun",
            "sft",
            ("bash", "launch.sh"),
        ),
        (
            {"conf/grpo.yaml": VERL_YAML},
            "verl",
            "grpo",
            (
                *("python", "-m", "verl.trainer.main_ppo"),
                *("--config-path=FOLDER/conf", "--config-name=grpo", *OVERRIDES),
            ),
        ),
        (
            {"run_ppo.sh": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae $@\n"},
            "verl",
            "ppo",
            ("bash", "run_ppo.sh", *OVERRIDES),
        ),
        (
            {"sft.py": "from trl import SFTTrainer\n"},
            "TRL",
            "sft",
            ("accelerate", "launch", "sft.py", "--output_dir", SAVED),
        ),
        (
            {"grpo.yaml": TRL_YAML},
            "TRL",
            "grpo",
            ("trl", "grpo", "--config", "grpo.yaml", "--output_dir", SAVED),
        ),
        (
            {"run-qwen.sh": "python3 train.py --actor-num-nodes 1 --rollout-num-gpus 4\n"},
            "slime",
            "grpo",
            ("bash", "run-qwen.sh"),
        ),
        (
            {"configs/rl.toml": PRIME_TOML},
            "prime-rl",
            "grpo",
            ("uv", "run", "rl", "@", "configs/rl.toml", "--output-dir", "${run.dir}"),
        ),
        # the configuration of a framework is preferred to a plain script
        (
            {"train.py": "print()\n", "sub/grpo.py": "import trl\n"},
            "TRL",
            "grpo",
            ("accelerate", "launch", "sub/grpo.py", "--output_dir", SAVED),
        ),
        # a script whose name contains `train` is preferred
        (
            {"data.py": "print()\n", "train_it.py": "print()\n", "zz.py": "print()\n"},
            "a script",
            "sft",
            ("python", "train_it.py"),
        ),
        # installed packages and outputs are ignored
        (
            {"train.py": "print()\n", ".venv/x.py": "import trl\n", "wandb/y.py": "import trl\n"},
            "a script",
            "sft",
            ("python", "train.py"),
        ),
    ],
)
def test_draft_is_valid_and_starts_the_training(
    tmp_path: Path, files: dict[str, str], found: str, workload: str, command: tuple[str, ...]
) -> None:
    folder = project(tmp_path, files)

    summary, text = draft_spec(folder)

    (folder / "muster.yaml").write_text(text)
    spec = load_spec(folder / "muster.yaml")
    trainer = spec.processes["trainer"]
    assert summary.startswith(f"{found} (")
    assert (spec.name, str(spec.workload), spec.cwd) == ("my-run", workload, "my-run")
    assert trainer.command == tuple(word.replace("FOLDER", str(folder)) for word in command)
    assert (trainer.launcher == "ray_job") == (found == "verl")
    assert (spec.gang is None) == (found == "a script")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("My Run_2", "my-run-2"), ("2024-grpo", "grpo"), ("...", "training"), ("x" * 60, "x" * 32)],
)
def test_draft_name_is_derived_from_the_directory(tmp_path: Path, folder: str, name: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "train.py").write_text("print()\n")

    _said, text = draft_spec(tmp_path / folder)

    (tmp_path / folder / "muster.yaml").write_text(text)
    assert load_spec(tmp_path / folder / "muster.yaml").name == name


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"README.md": "torchrun"},
        {"empty.py": "\n"},
        {"muster.yaml": TRL_YAML},
        {"a/b/c/train.py": "print()\n"},
    ],
)
def test_directory_without_training_gives_no_draft(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path, files)
    before = sorted(folder.rglob("*"))

    with pytest.raises(InvalidSpec, match="contains no script"):
        draft_spec(folder)
    code = run(INIT, [str(folder)])

    assert code == 2
    assert "change to the directory of the training" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_existing_spec_is_replaced_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path, {"train.py": "print()\n", "muster.yaml": "mine"})

    refused = run(INIT, [str(folder)])
    kept = (folder / "muster.yaml").read_text()
    forced = run(INIT, [str(folder), "--force"])

    printed = capsys.readouterr()
    assert (refused, kept, forced) == (1, "mine", 0)
    assert "add --force to replace it" in printed.err
    assert f"muster train {folder / 'muster.yaml'}" in printed.out
    assert load_spec(folder / "muster.yaml").name == "my-run"
