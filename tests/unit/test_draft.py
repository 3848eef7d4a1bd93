"""Tests of `muster init`, which writes a spec for an existing training."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App

from tasks.record.checkpoint_folder import list_checkpoints
from tasks.record.places import CALLERS_UMASK
from tasks.show.arguments import run
from tasks.spec.draft import draft_spec, read_hook
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_spec
from tasks.spec.run import RunSpec
from tasks.train.deploying import init
from tests.support.checkpoint_files import plain_torch

INIT = App(name="init", default_command=init)
VERL_YAML = "actor_rollout_ref:\n  model: {path: m}\ntrainer: {nnodes: 1}\n"
TRL_YAML = "model_name_or_path: m\ndataset_name: d\n"
PRIME_TOML = 'max_steps = 20\n[orchestrator]\nbatch_size = 8\n[trainer.model]\nname = "m"\n'
TORCHRUN = "import torch.distributed as dist\ndist.init_process_group()\n"
SAVED = "${run.dir}/checkpoints"
OUTPUT = "${run.dir}/output"
METRICS = "${attempt.dir}/metrics.jsonl"
SCRIPT_WITH_OPTIONS = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-o", "--output-dir", default="out")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--resume-from", default="")
parser.add_argument("--max_steps", type=int, default=60)
parser.add_argument("--data", required=True)
parser.add_argument("model")
parser.add_argument("--lr", type=float, default=1e-3)
"""
OVERRIDES = (
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=8",
    "trainer.logger=[console,file]",
    f"trainer.default_local_dir={SAVED}",
    "trainer.resume_mode=auto",
)


def project(tmp_path: Path, files: dict[str, str]) -> Path:
    """Create the folder `my-run` in a project, and write these files to the folder."""
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
            {"align.py": "from trl import DPOConfig, DPOTrainer  # from an SFT checkpoint\n"},
            "TRL",
            "dpo",
            ("accelerate", "launch", "align.py"),
        ),
        (
            {"score.py": "from trl import RewardTrainer\n"},
            "TRL",
            "rm",
            ("accelerate", "launch", "score.py"),
        ),
        (
            {"train.py": "import lightning as L\nendpoint = 'http://example.org'\n"},
            "Lightning",
            "sft",
            ("python", "train.py"),
        ),
        (
            {"sft.py": "from trl import SFTTrainer\n"},
            "TRL",
            "sft",
            ("accelerate", "launch", "sft.py"),
        ),
        (
            {"sft.py": "from trl import SFTTrainer, TrlParser\n"},
            "TRL",
            "sft",
            ("accelerate", "launch", "sft.py", "--output_dir", SAVED),
        ),
        (
            {"fit.py": "from transformers import Trainer\nTrainer().train()\n"},
            "transformers",
            "sft",
            ("accelerate", "launch", "fit.py"),
        ),
        (
            {"fit.py": "import lightning as L\n"},
            "Lightning",
            "sft",
            ("python", "fit.py"),
        ),
        (
            {"fit.py": "from accelerate import Accelerator\n"},
            "accelerate",
            "sft",
            ("accelerate", "launch", "fit.py"),
        ),
        (
            {"fit.py": "import accelerate\naccelerate.Accelerator()\n"},
            "accelerate",
            "sft",
            ("accelerate", "launch", "fit.py"),
        ),
        (
            {"fit.py": "from accelerate.utils import set_seed\n"},
            "accelerate",
            "sft",
            ("accelerate", "launch", "fit.py"),
        ),
        (
            {"fit.sh": "accelerate launch --config_file zero3.yaml fit.py\n"},
            "accelerate",
            "sft",
            ("bash", "fit.sh"),
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
        # a script that imports a training framework is preferred to a plain script
        (
            {"train.py": "print()\n", "sub/grpo.py": "import trl\n"},
            "TRL",
            "grpo",
            ("accelerate", "launch", "sub/grpo.py"),
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

    draft = draft_spec(folder, gpus=8)

    (folder / "muster.yaml").write_text(draft.text)
    spec = load_spec(folder / "muster.yaml")
    trainer = spec.processes["trainer"]
    assert draft.framework == found
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

    draft = draft_spec(tmp_path / folder)

    (tmp_path / folder / "muster.yaml").write_text(draft.text)
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
    assert "change to the folder of the training" in capsys.readouterr().err
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


def load_draft(folder: Path, **options: Any) -> RunSpec:
    """Return the run spec that `draft_spec` writes for a folder."""
    (folder / "muster.yaml").write_text(draft_spec(folder, **options).text)
    return load_spec(folder / "muster.yaml")


def test_file_name_that_is_no_utf8_is_ignored_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = App(name="muster")
    app.command(init)
    name = os.fsdecode(b"caf\xe9.py")
    folder = project(tmp_path, {"train.py": SCRIPT_WITH_OPTIONS})
    (folder / name).write_text(SCRIPT_WITH_OPTIONS)

    assert run(app, ["init", str(folder)]) == 0
    assert load_spec(folder / "muster.yaml").processes["trainer"].command[1] == "train.py"

    assert run(app, ["init", str(folder / name), "--force"]) == 2
    assert "the path is no valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("\ufeff" + SCRIPT_WITH_OPTIONS, id="byte order mark"),
        pytest.param(
            "import re\nre.compile('\\d')\n" + SCRIPT_WITH_OPTIONS, id="invalid escape sequence"
        ),
        pytest.param(
            SCRIPT_WITH_OPTIONS
            + "".join(f"def f_{n}(a):\n    return (a +\n        {n})\n" for n in range(3000)),
            id="long script",
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_options_are_read_from_a_script_whose_text_is_unusual(tmp_path: Path, script: str) -> None:
    spec = load_draft(project(tmp_path, {"train.py": script}))

    assert "--output-dir" in spec.processes["trainer"].command


def test_options_of_the_script_are_used(tmp_path: Path) -> None:
    folder = project(tmp_path, {"train.py": SCRIPT_WITH_OPTIONS})

    draft = draft_spec(folder)
    spec = load_draft(folder)

    assert spec.processes["trainer"].command == (
        *("python", "train.py", "--output-dir", SAVED),
        *("--resume-from", "${attempt.resume_from}"),
        *("--max_steps", "${progress.total}"),
    )
    assert spec.progress is not None and spec.progress.total == 60
    assert "# success: {step: 60}\n" in draft.text
    assert draft.missing_arguments == ("--data", "model")


@pytest.mark.parametrize(
    ("keywords", "missing", "words"),
    [
        ("required=True", ("--steps", "--data"), ()),
        ("default=50", ("--data",), ("--steps", "${progress.total}")),
        ("default=None", ("--data",), ()),
    ],
)
def test_required_number_of_steps_is_passed_to_the_script_or_reported_as_missing(
    tmp_path: Path, keywords: str, missing: tuple[str, ...], words: tuple[str, ...]
) -> None:
    source = (
        f"parser.add_argument('--steps', type=int, {keywords})\n"
        "parser.add_argument('--data', required=True)\n"
    )
    folder = project(tmp_path, {"train.py": source})

    draft = draft_spec(folder)

    assert draft.missing_arguments == missing
    assert ("The script also requires: " + ", ".join(missing)) in draft.text
    assert load_draft(folder).processes["trainer"].command == ("python", "train.py", *words)


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        ('"--metrics", "metrics_path", default=""', ("--metrics", METRICS)),
        ('"metrics_path", "--metrics"', ("--metrics", METRICS)),
        ('"-m", "--metrics", "path_of_metrics_file"', ("--metrics", METRICS)),
        ('"--ckpts", "checkpoint_folder", default="ckpts"', ("--ckpts", SAVED)),
        ('"--resume", "checkpoint", default=""', ("--resume", "${attempt.resume_from}")),
    ],
)
def test_click_option_is_used_by_its_name_on_the_command_line(
    tmp_path: Path, declaration: str, words: tuple[str, ...]
) -> None:
    source = f"import click\n@click.option({declaration})\ndef main(): pass\nmain()\n"
    folder = project(tmp_path, {"train.py": source})

    assert load_draft(folder).processes["trainer"].command == ("python", "train.py", *words)


def test_required_click_option_is_reported_by_its_name_on_the_command_line(tmp_path: Path) -> None:
    source = 'import click\n@click.option("--data", "dataset_path", required=True)\n'
    folder = project(tmp_path, {"train.py": f"{source}def main(): pass\nmain()\n"})

    assert draft_spec(folder).missing_arguments == ("--data",)


@pytest.mark.parametrize(
    ("loop", "last_step"),
    [
        ("for step in range(args.steps):", 39),
        ("for step in tqdm(range(start, args.steps)):", 39),
        ("for i in range(40):", 39),
        ("for it in range(len(batches)):", 39),
        ("for step in range(1, args.steps + 1):", 40),
        ("for step in range(start + 1, args.steps + 1):", 40),
        ("for row in range(40):", 40),
        ("while step < args.steps:", 40),
    ],
)
def test_success_is_the_last_step_that_the_script_counts(
    tmp_path: Path, loop: str, last_step: int
) -> None:
    source = (
        "parser.add_argument('--steps', type=int, default=40)\n"
        f"parser.add_argument('--metrics')\n{loop}\n    print({{'step': 1}})\n"
    )
    folder = project(tmp_path, {"train.py": source})

    spec = load_draft(folder)

    assert spec.progress is not None and spec.progress.total == 40
    assert spec.success is not None and spec.success.step == last_step


@pytest.mark.parametrize(
    ("step", "last_step"), [("it", 19), ("it + 1", 20), ("1 + it", 20), ("it + 2", 19)]
)
@pytest.mark.parametrize("content", ["{'iter': STEP, 'loss': 1.0}", "dict(iter=STEP, loss=1.0)"])
def test_key_success_of_the_spec_names_the_last_step_that_the_script_writes(
    tmp_path: Path, content: str, step: str, last_step: int
) -> None:
    source = (
        "import json, torch\nparser.add_argument('--metrics')\n"
        "with open(args.metrics, 'w') as file:\n"
        f"    for it in range(20):\n        loss.backward()\n"
        f"        file.write(json.dumps({content.replace('STEP', step)}))\n"
    )

    spec = load_draft(project(tmp_path, {"train.py": source}))

    assert spec.progress is not None
    assert (spec.progress.step, spec.progress.total) == ("iter", 20)
    assert spec.success is not None and spec.success.step == last_step


@pytest.mark.parametrize(
    ("statements", "is_certain"),
    [
        ("write(json.dumps({'step': step}))", True),
        ("if step % 10 == 0: print(step)\n    write(json.dumps({'step': step}))", True),
        ("if step % 10 == 0: write(json.dumps({'step': step}))", False),
        ("if step and step % 10 == 0: log(step)", False),
    ],
)
def test_key_success_is_written_as_a_comment_if_the_script_writes_only_some_steps(
    tmp_path: Path, statements: str, is_certain: bool
) -> None:
    source = (
        "import argparse, json\np.add_argument('--metrics')\n"
        "def store(values):\n    write(json.dumps(values))\n"
        "def log(step):\n    write(json.dumps(dict(step=step)))\n"
        f"for step in range(60):\n    loss.backward()\n    {statements}\n"
    )

    spec = load_draft(project(tmp_path, {"train.py": source}))

    assert spec.progress is not None and spec.progress.total == 60
    assert (spec.success is not None) is is_certain


def test_script_that_writes_no_metrics_completes_without_success(tmp_path: Path) -> None:
    source = "parser.add_argument('--steps', type=int, default=40)\nfor step in range(40): pass\n"
    folder = project(tmp_path, {"train.py": source})

    text = draft_spec(folder).text

    assert yaml.safe_load(text).get("success") is None
    # After changing the script to write its steps to a metrics file, the user removes the # before
    # `success`.
    assert yaml.safe_load(text.replace("# success:", "success:"))["success"] == {"step": 39}


@pytest.mark.parametrize(
    ("loop", "last_step"), [("for step in range(1, 21):", 20), ("for step in range(20):", 19)]
)
def test_number_of_steps_is_read_from_the_loop_of_a_script_without_metrics(
    tmp_path: Path, loop: str, last_step: int
) -> None:
    folder = project(tmp_path, {"train.py": f"{loop}\n    loss.backward()\n"})

    text = draft_spec(folder).text

    assert yaml.safe_load(text)["progress"]["total"] == 20
    assert "NUMBER OF STEPS" not in text
    assert yaml.safe_load(text).get("success") is None
    assert yaml.safe_load(text.replace("# success:", "success:"))["success"] == {"step": last_step}


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("{'global_step': 1}", "global_step"),
        ("row['iter'] = 1", "iter"),
        ("pass", None),
        ("{'global_step': 1}; {'step': 1}", None),
    ],
)
def test_step_key_is_the_key_that_the_script_writes(
    tmp_path: Path, line: str, key: str | None
) -> None:
    source = (
        "parser.add_argument('--steps', type=int, default=40)\n"
        f"parser.add_argument('--metrics')\nfor step in range(1, 41):\n    {line}\n"
    )
    folder = project(tmp_path, {"train.py": source})

    spec = load_draft(folder)

    assert spec.progress is not None and spec.progress.step == (key or "step")
    # A run with `success` fails if Muster does not find the last training step in the metrics. So
    # the spec has `success` only if Muster knows the key of the step in the metrics.
    assert (spec.success is not None) is (key is not None)


def test_script_with_an_unknown_number_of_steps_has_no_success(tmp_path: Path) -> None:
    folder = project(tmp_path, {"train.py": "print()\n"})

    assert load_draft(folder).success is None


def test_script_with_a_metrics_option_needs_no_hook(tmp_path: Path) -> None:
    source = "parser.add_argument('--metrics-file')\n"
    folder = project(tmp_path, {"train.py": source})

    draft = draft_spec(folder)

    assert draft.hook is None
    assert '--metrics-file, "${attempt.dir}/metrics.jsonl"' in draft.text


#: Script that writes its own metrics for 40 steps. OPEN stands for the call that opens the file.
OWN_METRICS = """\
import argparse, json, os
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="output")
parser.add_argument("--log-dir", default="logs")
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
out = Path(args.output_dir)
logs = Path(args.log_dir)
f = OPEN
for step in range(1, args.steps + 1):
    f.write(json.dumps({"step": step, "loss": 1 / step}))
"""


@pytest.mark.parametrize(
    ("opened", "name"),
    [
        ('open(out / "metrics.jsonl", "a")', "metrics.jsonl"),
        ('open(out / "metrics.jsonl", "a") if True else None', "metrics.jsonl"),
        ('(out.resolve() / "logs" / "train_log.jsonl").open(mode="w")', "logs/train_log.jsonl"),
        ('open(os.path.join(args.output_dir, "metrics.jsonl"), "w")', "metrics.jsonl"),
        ('open(f"{args.output_dir}/metrics.jsonl", "w")', "metrics.jsonl"),
    ],
)
def test_metrics_that_a_script_writes_beside_its_checkpoints_are_read(
    tmp_path: Path, opened: str, name: str
) -> None:
    folder = project(tmp_path, {"train.py": OWN_METRICS.replace("OPEN", opened)})

    draft = draft_spec(folder)
    spec = load_draft(folder)

    assert draft.hook is None
    assert "muster_metrics" not in draft.text
    assert spec.progress is not None and spec.progress.jsonl == f"{SAVED}/{name}"
    assert spec.progress.step == "step"
    assert "METRICS" not in spec.env
    assert spec.success is not None and spec.success.step == 40


@pytest.mark.parametrize("content", ['{"iter": step, "loss": 1.0}', "dict(iter=step, loss=1.0)"])
def test_step_key_is_read_from_the_object_that_the_script_writes_as_json(
    tmp_path: Path, content: str
) -> None:
    source = OWN_METRICS.replace("OPEN", 'open(out / "metrics.jsonl", "a")')
    source = source.replace('{"step": step, "loss": 1 / step}', content)
    folder = project(
        tmp_path, {"train.py": f'{source}    torch.save({{"step": step}}, out / "x")\n'}
    )

    spec = load_draft(folder)

    assert spec.progress is not None and spec.progress.step == "iter"


@pytest.mark.parametrize(
    "assignment",
    [
        "args.out = os.path.join(args.out, args.plots)",
        'args.out = Path(args.out) / "run"',
        'args.out += "/run"',
        'args.out: str = f"{args.out}/run"',
        "args.out, n = find_folder(), 1",
        "if args.plots: args.out = args.plots",
        "if args.out is None: pass\n    else: args.out = args.plots",
        "for args.out in find_folders(): pass",
    ],
)
def test_folder_is_unknown_if_the_script_changes_the_option(
    tmp_path: Path, assignment: str
) -> None:
    save = 'torch.save({}, os.path.join(args.out, "checkpoints", f"{step}.pt"))'

    spec = load_with_saves(tmp_path, assignment, save)

    # The folder in which the script saves is unknown, so the spec names no subfolder.
    assert get_output_folders(spec) == (SAVED, SAVED)
    assert spec.progress is not None and spec.progress.jsonl == "${attempt.dir}/metrics.jsonl"


@pytest.mark.parametrize(
    "assignment",
    [
        "args.out = Path(args.out)",
        "args.out = os.path.abspath(os.path.expanduser(args.out))",
        "args.out = Path(args.out).resolve()",
        'args.out = args.out or "runs"',
        'if args.out is None: args.out = f"runs/{step}"',
        "if not args.out: args.out = find_folder()",
        "args.plots = find_folder()",
        "saver.out = args.out",
    ],
)
def test_option_with_the_same_meaning_after_an_assignment_is_the_output_folder(
    tmp_path: Path, assignment: str
) -> None:
    save = 'torch.save({}, os.path.join(args.out, "checkpoints", f"{step}.pt"))'

    spec = load_with_saves(tmp_path, assignment, save)

    assert get_output_folders(spec) == (OUTPUT, f"{OUTPUT}/checkpoints")
    assert spec.progress is not None and spec.progress.jsonl == f"{OUTPUT}/metrics.jsonl"


def test_training_that_may_end_early_completes_without_its_last_step(tmp_path: Path) -> None:
    source = OWN_METRICS.replace("OPEN", 'open(out / "metrics.jsonl", "a")')
    folder = project(tmp_path, {"train.py": f"{source}    if step > 9: break\n"})

    draft = draft_spec(folder)
    spec = load_draft(folder)

    assert spec.progress is not None and spec.progress.total == 40
    assert spec.success is None
    assert "# success: {step: 40}" in draft.text


def test_number_of_steps_in_a_comment_does_not_count(tmp_path: Path) -> None:
    source = '"""Usage: train.py with max_steps=10"""\n# total_steps = 20\nprint()\n'
    folder = project(tmp_path, {"train.py": source})

    spec = load_draft(folder)

    assert spec.progress is not None and spec.progress.total is None


@pytest.mark.parametrize(
    "opened",
    [
        'open(logs / "metrics.jsonl", "a")',
        'open("metrics.jsonl", "a")',
        'open(choose_folder() / "metrics.jsonl", "a")',
        'open(f"{args.output_dir}-x/metrics.jsonl", "a")',
    ],
)
def test_metrics_file_in_an_unknown_folder_is_named_in_a_comment(
    tmp_path: Path, opened: str
) -> None:
    folder = project(tmp_path, {"train.py": OWN_METRICS.replace("OPEN", opened)})

    draft = draft_spec(folder)

    assert "# The script seems to write its own metrics file metrics.jsonl." in draft.text
    assert draft.hook is not None


@pytest.mark.parametrize(
    "opened", ['open(out / "metrics.jsonl")', 'open(out / "samples.jsonl", "a")']
)
def test_files_that_contain_no_metrics_do_not_change_the_run_spec(
    tmp_path: Path, opened: str
) -> None:
    folder = project(tmp_path, {"train.py": OWN_METRICS.replace("OPEN", opened)})

    draft = draft_spec(folder)

    assert "own metrics file" not in draft.text
    assert draft.hook is not None


#: Script that writes its metrics to the folder that `--out` names. SAVE stands for the statements
#: that save a checkpoint.
OWN_SUBFOLDER = """\
import argparse, json, os, shutil, torch
from pathlib import Path
from transformers import Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--out", "--output", default="out")
parser.add_argument("--plots", default="plots")
args = parser.parse_args()
f = open(os.path.join(args.out, "metrics.jsonl"), "a")
for step in range(1, 41):
    f.write(json.dumps({"step": step}))
    SAVE
"""


def load_with_saves(tmp_path: Path, *statements: str) -> RunSpec:
    """Return the run spec for the script `OWN_SUBFOLDER` with these statements in its loop."""
    source = OWN_SUBFOLDER.replace("SAVE", "\n    ".join(statements))
    return load_draft(project(tmp_path, {"train.py": source}))


def get_output_folders(spec: RunSpec) -> tuple[str, str | None]:
    """Return the last argument of the script and the folder of the checkpoints in a run spec."""
    trainer = spec.processes["trainer"]
    return trainer.command[-1], trainer.checkpoints


@pytest.mark.parametrize(
    ("statements", "subfolder"),
    [
        (('os.path.join(args.out, "checkpoints", f"step-{step}")',), "checkpoints"),
        (('Path(args.out) / "ckpts" / f"step-{step}"',), "ckpts"),
        (('torch.save({}, f"{args.out}/checkpoints/step-{step}.pt")',), "checkpoints"),
        (('torch.save({}, args.out + "/ckpt/step-" + str(step))',), "ckpt"),
        (
            ('torch.save({}, Path(args.out).joinpath("a", "Checkpoints", str(step)))',),
            "a/Checkpoints",
        ),
        (('torch.save({}, os.path.join(args.out, "weights", f"{step}.pt"))',), "weights"),
        (
            (
                "out_dir = Path(args.out).resolve()",
                'ckpt_dir = out_dir / "checkpoints"',
                'torch.save({}, ckpt_dir / f"step-{step}.pt")',
                'torch.save({}, out_dir / "final.pt")',
            ),
            "checkpoints",
        ),
        (
            (
                'path = os.path.join(args.out, "checkpoints", f"step-{step}")',
                'temporary = path + ".tmp"',
                'torch.save({}, os.path.join(temporary, "state.pt"))',
            ),
            "checkpoints",
        ),
        (
            (
                "def save(folder, step):",
                "    folder = Path(folder)",
                '    torch.save({}, folder / "ckpt" / f"{step}.pt")',
                "save(args.out, step=step)",
            ),
            "ckpt",
        ),
        (
            (
                "class Saver:",
                "    def __init__(self, folder):",
                "        self.folder = folder",
                "    def save(self, step):",
                '        torch.save({}, f"{self.folder}/checkpoints/{step}.pt")',
                "Saver(args.out).save(step)",
            ),
            "checkpoints",
        ),
        (('TrainingArguments(output_dir=os.path.join(args.out, "model"))',), "model"),
        (('Checkpointer(folder=Path(args.out, "checkpoints"))',), "checkpoints"),
    ],
)
def test_checkpoints_are_searched_in_the_subfolder_in_which_the_script_saves(
    tmp_path: Path, statements: tuple[str, ...], subfolder: str
) -> None:
    spec = load_with_saves(tmp_path, *statements)

    assert get_output_folders(spec) == (OUTPUT, f"{OUTPUT}/{subfolder}")
    assert spec.progress is not None and spec.progress.jsonl == f"{OUTPUT}/metrics.jsonl"


@pytest.mark.parametrize(
    ("statement", "addition"),
    [
        ('torch.save({}, f"{args.out}-x/step-{step}.pt")', "-x"),
        ('torch.save({}, f"{args.out}_v2/step-{step}.pt")', "_v2"),
        ('torch.save({}, os.path.join(args.out + ".run", "ckpt", f"{step}.pt"))', ".run/ckpt"),
        ('TrainingArguments(output_dir=f"{args.out}-sft")', "-sft"),
    ],
)
def test_checkpoints_are_searched_in_a_folder_whose_name_begins_with_an_option(
    tmp_path: Path, statement: str, addition: str
) -> None:
    spec = load_with_saves(tmp_path, statement)

    assert get_output_folders(spec) == (OUTPUT, f"{OUTPUT}{addition}")
    assert spec.progress is not None and spec.progress.jsonl == f"{OUTPUT}/metrics.jsonl"


@pytest.mark.parametrize(
    "statements",
    [
        ('torch.save({}, os.path.join(args.out, f"step-{step}.pt"))',),
        ('torch.save({}, args.out + ".pt")',),
        ('torch.save({}, os.path.join(args.out, f"step-{step}", "model.pt"))',),
        ('torch.save({}, os.path.join(args.out, f"checkpoint-{step}"))',),
        ('torch.save({}, os.path.join(args.out, "checkpoint", "last.pt"))',),
        ('plt.savefig(os.path.join(args.plots, "checkpoints", f"{step}.png"))',),
        ('torch.save({}, os.path.join(args.out, "..", "checkpoints", f"{step}.pt"))',),
        ('torch.save({}, choose_folder(args.out) / "checkpoints" / f"{step}.pt")',),
        (
            'torch.save({}, os.path.join(args.out, "a", f"{step}.pt"))',
            'torch.save({}, os.path.join(args.out, "b", f"{step}.pt"))',
        ),
        (
            "Trainer(args=TrainingArguments(output_dir=args.out))",
            'model.save_pretrained(os.path.join(args.out, "final_checkpoint"))',
        ),
    ],
)
def test_output_folder_in_which_the_script_saves_is_the_folder_of_the_checkpoints(
    tmp_path: Path, statements: tuple[str, ...]
) -> None:
    spec = load_with_saves(tmp_path, *statements)

    assert get_output_folders(spec) == (SAVED, SAVED)
    assert spec.progress is not None and spec.progress.jsonl == f"{SAVED}/metrics.jsonl"


def draft_script(tmp_path: Path, source: str, **files: str) -> tuple[RunSpec, str]:
    """Return the run spec for a script, and the text of the run spec.

    Args:
        tmp_path: Empty folder for the project.
        source: Source text of the script.
        **files: Further files of the project. A double underscore stands for a slash, and the
            suffix is `.yaml`.
    """
    paths = {f"{name.replace('__', '/')}.yaml": text for name, text in files.items()}
    folder = project(tmp_path, {"train.py": source, **paths})
    return load_draft(folder), draft_spec(folder).text


@pytest.mark.parametrize(
    ("path", "checkpoints"),
    [
        ('os.path.expanduser(f"~/ckpts/step-{step}.pt")', "HOME/ckpts"),
        ('Path("~/ckpts").expanduser() / f"step-{step}.pt"', "HOME/ckpts"),
        # Muster would need the credentials of the bucket, so the folder is not proposed.
        ('f"s3://bucket/ckpts/step-{step}.pt"', SAVED),
    ],
)
def test_constant_folder_outside_the_project_is_named_correctly_in_the_spec(
    tmp_path: Path, path: str, checkpoints: str
) -> None:
    source = (
        f"import os, torch\nfrom pathlib import Path\nfor step in range(9):\n    save({path})\n"
    )

    spec, _ = draft_script(tmp_path, source)

    expected = checkpoints.replace("HOME", os.path.expanduser("~"))
    assert spec.processes["trainer"].checkpoints == expected


@pytest.mark.parametrize(
    "source",
    [
        'import argparse\np.add_argument("--save", type=int)\n',
        'import argparse\np.add_argument("--save", default=100)\n',
        'import argparse\np.add_argument("--load", type=float)\n',
        "import tyro\ndef main(save: int | None = None): pass\ntyro.cli(main)\n",
    ],
)
def test_option_with_a_number_gets_no_path(tmp_path: Path, source: str) -> None:
    spec, _ = draft_script(tmp_path, source)

    assert spec.processes["trainer"].command == ("python", "train.py")


#: Script with a dataclass of options. PARSE stands for the call that reads the command line.
FIELD_OPTIONS = """\
from dataclasses import dataclass, field
import simple_parsing, torch, tyro
from pathlib import Path

@dataclass
class Args:
    data: str
    run_dir: Path = Path("runs")
    num_steps: int = 40
    resume_from: str = field(default="", metadata={})
    tags: list[str] = field(default_factory=list)
    verbose: bool = False

def main(args):
    for step in range(1, args.num_steps + 1):
        torch.save({}, args.run_dir / "ckpts" / f"step_{step:06d}.pt")

main(PARSE)
"""


@pytest.mark.parametrize(
    ("parse", "separator"),
    [
        ("tyro.cli(Args)", "-"),
        ("simple_parsing.parse(Args)", "_"),
    ],
)
def test_options_that_a_library_makes_from_a_dataclass_are_used(
    tmp_path: Path, parse: str, separator: str
) -> None:
    folder = project(tmp_path, {"train.py": FIELD_OPTIONS.replace("PARSE", parse)})

    draft = draft_spec(folder)
    spec = load_draft(folder)

    names = ("run_dir", OUTPUT, "resume_from", "${attempt.resume_from}", "num_steps", "40")
    words = [f"--{word.replace('_', separator)}" for word in names[::2]]
    assert draft.missing_arguments == ("--data",)
    command = spec.processes["trainer"].command
    for word, value in zip(words, names[1::2], strict=True):
        assert command[command.index(word) + 1] in (value, "${progress.total}")
    assert spec.processes["trainer"].checkpoints == f"{OUTPUT}/ckpts"


def test_parameters_of_a_function_become_options_if_the_script_uses_tyro(tmp_path: Path) -> None:
    source = "import tyro\ndef main(data: str, out_dir: str = 'out', *, max_steps: int = 30): ...\n"

    folder = project(tmp_path, {"train.py": f"{source}tyro.cli(main)\n"})

    assert draft_spec(folder).missing_arguments == ("--data",)
    command = load_draft(folder).processes["trainer"].command
    assert command[:4] == ("python", "train.py", "--out-dir", SAVED)
    assert command[4] == "--max-steps"


#: Script with two options. Their names do not show which option is the folder of the checkpoints.
#: SAVE stands for the statement that saves a checkpoint.
UNCLEAR_OPTIONS = """\
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--root", default="logs")
parser.add_argument("--ckpt", default=None)
args = parser.parse_args()
if args.ckpt:
    state = torch.load(args.ckpt)
SAVE
"""


@pytest.mark.parametrize(
    ("save", "checkpoints", "root"),
    [
        ('torch.save({}, f"{args.root}/step-{step}.pt")', SAVED, SAVED),
        ('torch.save({}, f"{args.root}/ckpts/{step}.pt")', f"{OUTPUT}/ckpts", OUTPUT),
        ('torch.save({}, f"{args.root}-x/{step}.pt")', f"{OUTPUT}-x", OUTPUT),
        (
            'L.Trainer(callbacks=[ModelCheckpoint(dirpath=args.root + "/saved")])',
            f"{OUTPUT}/saved",
            OUTPUT,
        ),
    ],
)
def test_calls_that_save_and_load_show_the_purpose_of_an_option(
    tmp_path: Path, save: str, checkpoints: str, root: str
) -> None:
    spec, text = draft_script(tmp_path, UNCLEAR_OPTIONS.replace("SAVE", save))

    trainer = spec.processes["trainer"]
    assert trainer.checkpoints == checkpoints
    arguments = ("--root", root, "--ckpt", "${attempt.resume_from}")
    assert trainer.command == ("python", "train.py", *arguments)
    assert "# --ckpt: this value is empty if there is no checkpoint." in text


def test_option_for_the_folder_of_the_checkpoints_is_not_taken_for_a_checkpoint_to_load(
    tmp_path: Path,
) -> None:
    source = UNCLEAR_OPTIONS.replace("SAVE", 'torch.save({}, f"{args.ckpt}/{step}.pt")')

    spec, _ = draft_script(tmp_path, source)

    assert spec.processes["trainer"].command == ("python", "train.py", "--ckpt", SAVED)


@pytest.mark.parametrize(
    ("source", "checkpoints"),
    [
        ('torch.save({}, "out/ckpt.pt")', "out"),
        ('out_dir = "out"\ntorch.save({}, os.path.join(out_dir, f"ckpt-{step}.pt"))', "out"),
        ('model.save_pretrained(f"models/tiny/step-{step}")', "models/tiny"),
        ('torch.save({}, f"/data/run/{step}.pt")', "/data/run"),
    ],
)
def test_constant_folder_in_which_the_script_saves_is_used_and_named_in_a_message(
    tmp_path: Path, source: str, checkpoints: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path, {"train.py": f"import os, torch\n{source}\n"})

    assert run(INIT, (str(folder),)) == 0
    spec = load_draft(folder)

    assert spec.processes["trainer"].checkpoints == checkpoints
    assert "CHECKPOINTS" not in spec.env
    assert f"saves its checkpoints in {checkpoints}, according to" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["[x]*", "runs/[a-z]", "all*/ckpts"])
@pytest.mark.parametrize("parent", ["", f"{OUTPUT}/"])
def test_name_with_characters_of_a_pattern_stands_only_for_the_folder_with_this_name(
    tmp_path: Path, name: str, parent: str
) -> None:
    source = f'import torch\ntorch.save({{}}, f"{name}/step_{{step}}.pt")\n'
    if parent:
        option = 'import argparse\nparser.add_argument("--out", default="out")\n'
        source = option + source.replace(name, f"{{args.out}}/{name}")
    spec, _ = draft_script(tmp_path, source)
    written = (spec.processes["trainer"].checkpoints or "").removeprefix(parent)
    similar_folder = tmp_path / name.replace("[x]", "x").replace("[a-z]", "a").replace("*", "1")
    similar_folder.mkdir(parents=True)
    plain_torch(similar_folder, 20)

    assert list_checkpoints(written, tmp_path, is_running=False).checkpoints == ()

    (tmp_path / name).mkdir(parents=True)
    checkpoint = plain_torch(tmp_path / name, 10)
    listing = list_checkpoints(written, tmp_path, is_running=False)

    assert [each.path for each in listing.checkpoints] == [checkpoint]


@pytest.mark.parametrize(
    "source",
    [
        'torch.save({}, f"model-{step}.pt")',
        "torch.save({}, choose_path())",
        'torch.save({}, "a/1.pt")\ntorch.save({}, "b/1.pt")',
        'torch.save({}, f"runs/{date}/{step}.pt")',
    ],
)
def test_user_is_told_to_read_a_variable_if_the_folder_of_the_checkpoints_is_unclear(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path, {"train.py": f"import torch\n{source}\n"})

    assert run(INIT, (str(folder),)) == 0

    assert load_draft(folder).env["CHECKPOINTS"] == SAVED
    assert 'os.environ["CHECKPOINTS"]' in capsys.readouterr().out


def test_variable_for_the_parent_folder_of_the_checkpoints_is_set_to_an_output_folder(
    tmp_path: Path,
) -> None:
    source = (
        'import os, torch\nOUT = os.environ.get("OUTPUT_DIR", "out")\n'
        'torch.save({}, f"{OUT}/checkpoints/{step}.pt")\n'
        'f = open(f"{OUT}/metrics.jsonl", "a")\n'
    )

    spec, _ = draft_script(tmp_path, source)

    assert spec.env["OUTPUT_DIR"] == OUTPUT
    assert spec.processes["trainer"].checkpoints == f"{OUTPUT}/checkpoints"
    assert spec.progress is not None and spec.progress.jsonl == f"{OUTPUT}/metrics.jsonl"


def test_subfolder_and_metrics_file_are_used_if_a_configuration_file_names_their_folder(
    tmp_path: Path,
) -> None:
    source = (
        "import argparse, os, torch, yaml\n"
        'parser.add_argument("--config", default="configs/base.yaml")\n'
        "cfg = yaml.safe_load(open(args.config))\n"
        'torch.save({}, os.path.join(cfg["output_dir"], "ckpt", f"{step}.pt"))\n'
        'log = open(os.path.join(cfg["output_dir"], "log.jsonl"), "a")\n'
    )

    spec, text = draft_script(tmp_path, source, configs__base="output_dir: runs/base\n")

    assert spec.processes["trainer"].checkpoints == "runs/base/ckpt"
    assert spec.progress is not None and spec.progress.jsonl == "runs/base/log.jsonl"
    assert "muster_metrics" not in text


@pytest.mark.parametrize(
    ("declaration", "parameter"),
    [('"--out-dir", "folder"', "folder"), ('"-o", "--out-dir", "--output"', "out_dir")],
)
def test_subfolder_of_the_folder_that_a_click_option_names_is_found(
    tmp_path: Path, declaration: str, parameter: str
) -> None:
    source = (
        "import click, torch\n"
        f"@click.command()\n@click.option({declaration})\n"
        f"def main({parameter}):\n"
        f'    torch.save({{}}, f"{{{parameter}}}/ckpts/{{1 + 1}}.pt")\n'
        "main()\n"
    )

    spec = load_draft(project(tmp_path, {"train.py": source}))

    assert get_output_folders(spec) == (OUTPUT, f"{OUTPUT}/ckpts")


def test_subfolder_in_which_an_imported_module_saves_is_found(tmp_path: Path) -> None:
    module = (
        "import os, torch\n"
        "def save(folder, step):\n"
        '    torch.save({}, os.path.join(folder, "checkpoints", f"{step}.pt"))\n'
    )
    script = OWN_SUBFOLDER.replace("SAVE", "save(args.out, step)")
    files = {"train.py": f"from saving import save\n{script}", "saving.py": module}

    spec = load_draft(project(tmp_path, files))

    assert get_output_folders(spec) == (OUTPUT, f"{OUTPUT}/checkpoints")


@pytest.mark.parametrize(
    "source", ["import trl\n", "import torch\n", "import lightning\n", TORCHRUN, "print()\n"]
)
def test_draft_has_progress_checkpoints_resume_and_retries(tmp_path: Path, source: str) -> None:
    folder = project(tmp_path, {"train.py": source})

    spec = load_draft(folder)

    metrics = "${attempt.dir}/metrics.jsonl"
    assert spec.progress is not None and spec.progress.jsonl == metrics
    assert spec.processes["trainer"].checkpoints == SAVED
    assert spec.env == {
        "METRICS": metrics,
        "CHECKPOINTS": SAVED,
        "RESUME_FROM": "${attempt.resume_from}",
    }
    assert set(spec.retry) == {"NODE_LOST", "GPU_HARDWARE"}


@pytest.mark.parametrize(
    ("source", "gpus", "requested"),
    [
        (TORCHRUN, 4, 4),
        (TORCHRUN, 0, None),
        ("import torch\n", 4, 1),
        ("import torch\n", 0, None),
        ("print()\n", 4, None),
    ],
)
def test_draft_requests_the_gpus_of_the_machine(
    tmp_path: Path, source: str, gpus: int, requested: int | None
) -> None:
    folder = project(tmp_path, {"train.py": source})

    spec = load_draft(folder, gpus=gpus)

    assert (spec.gang.gpus_per_node if spec.gang else None) == requested
    if source == TORCHRUN:
        assert f"--nproc-per-node={gpus or 1}" in spec.processes["trainer"].command


def test_draft_says_how_torchrun_starts_one_process_per_gpu(tmp_path: Path) -> None:
    folder = project(tmp_path, {"train.py": TORCHRUN})

    without_gpus = draft_spec(folder, gpus=0).text
    with_gpus = draft_spec(folder, gpus=4).text

    assert '\n    # "--nproc-per-node=${gang.gpus_per_node}"' in without_gpus
    assert "${gang.gpus_per_node}" not in with_gpus
    (folder / "muster.yaml").write_text(
        without_gpus.replace("# gang:", "gang:").replace(
            "--nproc-per-node=1", '"--nproc-per-node=${gang.gpus_per_node}"'
        )
    )
    spec = load_spec(folder / "muster.yaml")
    assert "--nproc-per-node=${gang.gpus_per_node}" in spec.processes["trainer"].command
    assert spec.gang is not None


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_written_files_have_the_umask_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, mode: int
) -> None:
    folder = project(tmp_path, {"train.py": TORCHRUN})
    monkeypatch.setenv(CALLERS_UMASK, f"{umask:03o}")
    own_umask = os.umask(0o077)  # the umask of Muster's own files

    try:
        run(INIT, [str(folder)])
    finally:
        os.umask(own_umask)

    modes = {
        name: stat.S_IMODE((folder / name).stat().st_mode)
        for name in ("muster.yaml", "muster_metrics.py")
    }
    assert modes == {"muster.yaml": mode, "muster_metrics.py": mode}


def test_replaced_spec_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project(tmp_path, {"train.py": TORCHRUN, "muster.yaml": "mine"})
    (folder / "muster.yaml").chmod(0o640)
    monkeypatch.setenv(CALLERS_UMASK, "022")

    run(INIT, [str(folder), "--force"])

    assert stat.S_IMODE((folder / "muster.yaml").stat().st_mode) == 0o640


def test_init_requests_the_gpus_that_muster_gpus_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path, {"train.py": TORCHRUN})
    monkeypatch.setenv("MUSTER_GPUS", "0-1")

    code = run(INIT, [str(folder)])

    gang = load_spec(folder / "muster.yaml").gang
    assert code == 0
    assert gang is not None and gang.gpus_per_node == 2


def test_named_script_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"train.py": "print()\n", "jobs/other.py": "print()\n"}
    folder = project(tmp_path, files)
    monkeypatch.chdir(folder)

    code = run(INIT, ["jobs/other.py"])

    spec = load_spec(folder / "muster.yaml")
    assert code == 0
    assert spec.processes["trainer"].command[:2] == ("python", "jobs/other.py")
    assert (folder / "jobs" / "muster_metrics.py").is_file()
    assert "Found a script (jobs/other.py)" in capsys.readouterr().out


def test_other_scripts_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = dict.fromkeys(["a_main.py", "eval_train.py", "reward.py", "train.py"], "print()\n")
    folder = project(tmp_path, files)
    monkeypatch.chdir(folder)

    run(INIT, [])

    output = capsys.readouterr().out
    assert "Found a script (train.py)" in output
    assert "Other scripts: a_main.py, reward.py. To choose one: muster init a_main.py" in output


@pytest.mark.parametrize(
    ("content", "is_listed"),
    [
        ('"""Faults."""\nimport os\nLIMIT = 3\ndef inject():\n    loss.backward()\n', False),
        (
            "try:\n    import fast\nexcept ImportError:\n    fast = None\nclass A:\n    pass\n",
            False,
        ),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int = 3\n", False),
        ("def main():\n    pass\nif __name__ == '__main__':\n    main()\n", True),
        ("import trainer\nresult = trainer.train()\n", True),
        ("for step in range(3):\n    print(step)\n", True),
        ("print 'Python 2'\n", True),
    ],
)
def test_helper_modules_are_not_listed_as_scripts(
    tmp_path: Path, content: str, is_listed: bool
) -> None:
    folder = project(tmp_path, {"train.py": "print()\n", "faults.py": content})

    draft = draft_spec(folder)

    assert draft.file == Path("train.py")
    assert draft.other_scripts == ((Path("faults.py"),) if is_listed else ())


def test_script_is_preferred_to_a_helper_module(tmp_path: Path) -> None:
    helper = "import torch.distributed as dist\ndef train():\n    dist.init_process_group()\n"
    folder = project(tmp_path, {"train_lib.py": helper, "zz.py": TORCHRUN})

    assert draft_spec(folder).file == Path("zz.py")


@pytest.mark.parametrize(
    ("helper", "script"),
    [
        ("lib/engine.py", "run.py"),
        ("train_lib.py", "zz.py"),
        ("train.py", "lib/deep/start.py"),
        # `eval.py` is a usual name of a helper file. But `engine.py` only defines names, so
        # `eval.py` is chosen.
        ("engine.py", "eval.py"),
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        "import click\n@click.command()\ndef main():\n    pass\n"
        "if __name__ == '__main__':\n    main()\n",
        "for step in range(3):\n    print(step)\n",
    ],
)
@pytest.mark.parametrize(
    "definitions",
    [
        "import torch.distributed as dist\ndef train():\n    dist.init_process_group()\n",
        "from trl import SFTTrainer\nclass MyTrainer(SFTTrainer):\n    pass\n",
        "LAUNCHER = 'torchrun'\n",
        '"""Start the training with torchrun."""\n',
    ],
)
def test_module_that_only_defines_names_is_not_chosen_if_there_is_a_script(
    tmp_path: Path, helper: str, script: str, content: str, definitions: str
) -> None:
    folder = project(tmp_path, {helper: definitions, script: content})

    draft = draft_spec(folder)

    assert draft.file == Path(script)
    assert draft.framework == "a script"


def test_module_that_only_defines_names_is_chosen_if_it_is_the_only_file(tmp_path: Path) -> None:
    folder = project(tmp_path, {"engine.py": "import trl\ndef train():\n    pass\n"})

    assert draft_spec(folder).file == Path("engine.py")


@pytest.mark.parametrize(("name", "content"), [("notes.txt", "torchrun"), ("empty.py", "")])
def test_named_file_that_is_no_script_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    folder = project(tmp_path, {name: content})

    code = run(INIT, [str(folder / name)])

    assert code == 2
    assert "is no Python or shell script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "argv"),
    [
        ("train.py", "", ["train.py"]),
        ("jobs/train.py", "", ["jobs/train.py"]),
        # the script is a module of a package, so Python does not search for modules in its folder
        ("lib/train.py", "from .data import NUMBERS\n", ["-m", "lib.train"]),
        ("lib/core/train.py", "import lib.data\n", ["-m", "lib.core.train"]),
    ],
)
def test_import_statement_in_the_spec_finds_the_metrics_module(
    tmp_path: Path, file: str, text: str, argv: list[str]
) -> None:
    packages = {"lib/__init__.py": "", "lib/core/__init__.py": "", "lib/data.py": "NUMBERS = ()\n"}
    folder = project(tmp_path, {**packages, file: f"{text}print()\n"})

    draft = draft_spec(folder, file=Path(file))

    assert draft.hook is not None
    (folder / draft.hook).write_text(read_hook())
    [statement] = re.findall(r"^# +(.*import muster_metrics)$", draft.text, re.MULTILINE)
    (folder / file).write_text(f"{statement}\n{text}")
    subprocess.run([sys.executable, *argv], cwd=folder, check=True)


def test_missing_path_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(INIT, [str(tmp_path / "train.py")]) == 2

    assert "does not exist" in capsys.readouterr().err


def test_guide_that_the_spec_names_exists(tmp_path: Path) -> None:
    folder = project(tmp_path, {"train.py": "print()\n"})

    run(INIT, [str(folder)])

    guide = (folder / "muster.yaml").read_text().splitlines()[1].removeprefix("# ")
    assert Path(guide).is_file()


@pytest.mark.parametrize(
    ("file", "text", "script"),
    [
        ("lib/__main__.py", "from lib.data import load\n", ["-m", "lib"]),
        ("lib/train.py", "from .data import load\n", ["-m", "lib.train"]),
        ("lib/train.py", "import lib.data\n", ["-m", "lib.train"]),
        ("lib/train.py", "import data\n", ["lib/train.py"]),
    ],
)
def test_module_that_imports_its_package_is_started_as_a_module(
    tmp_path: Path, file: str, text: str, script: list[str]
) -> None:
    folder = project(
        tmp_path, {"lib/__init__.py": "", "lib/data.py": "", file: f"{text}{TORCHRUN}"}
    )

    draft = draft_spec(folder, file=Path(file))

    spec = yaml.safe_load(draft.text)
    command = spec["components"]["trainer"]["command"]
    assert command[0] == "torchrun"
    assert [word for word in command[1:] if not word.startswith("--")][: len(script)] == script


SPAWN = """\
import torch.distributed as dist
import torch.multiprocessing as mp
def worker(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
"""
PROCESSES = """\
import os
import torch.distributed as dist
from torch.multiprocessing import Process
def start(rank, size, function):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    function(rank)
for rank in range(2):
    Process(target=start, args=(rank, 2, print)).start()
"""
SUBPROCESS = """\
import os, subprocess, sys
import torch.distributed
for rank in range(2):
    env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2")
    subprocess.Popen([sys.executable, "train.py"], env=env)
"""


@pytest.mark.parametrize(
    "source",
    [
        SPAWN,
        SPAWN.replace("mp.spawn(", "mp.start_processes("),
        SPAWN.replace(
            "import torch.multiprocessing as mp", "from torch import multiprocessing as mp"
        ),
        "import torch.distributed\nfrom torch.multiprocessing import spawn\nspawn(print, (), 2)\n",
        "import torch\nimport torch.distributed\ntorch.multiprocessing.spawn(print, nprocs=2)\n",
        "import torch.multiprocessing as mp\nfrom lib import work\nmp.spawn(work, nprocs=2)\n",
        PROCESSES,
        PROCESSES.replace("Process(", 'get_context("spawn").Process('),
        SUBPROCESS,
        SUBPROCESS.replace(
            'dict(os.environ, RANK=str(rank), WORLD_SIZE="2")', "{'RANK': str(rank)}"
        ),
        SUBPROCESS.replace(
            "env = dict(", "env = dict(os.environ); env['RANK'] = str(rank); x = dict("
        ).replace("RANK=str(rank), ", ""),
        SUBPROCESS.replace(
            'env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2")',
            "os.environ['RANK'] = str(rank)",
        ).replace(", env=env", ""),
        'import os\nimport torch.distributed\nos.system(f"RANK={1} python train.py &")\n',
        'import subprocess\nsubprocess.run(["torchrun", "--nproc-per-node=2", "train.py"])\n',
        'import subprocess\nsubprocess.run("torchrun --nproc-per-node=2 train.py", shell=True)\n',
        'import subprocess\ncommand = ["python", "-m", "torch.distributed.run", "t.py"]\n'
        "subprocess.check_call(command)\n",
    ],
)
def test_script_that_starts_its_ranks_is_started_with_python(tmp_path: Path, source: str) -> None:
    compile(source, "train.py", "exec")
    folder = project(tmp_path, {"train.py": source})

    draft = draft_spec(folder, gpus=4)
    spec = load_draft(folder, gpus=4)

    assert spec.processes["trainer"].command == ("python", "train.py")
    assert spec.gang is not None and spec.gang.gpus_per_node == 4
    assert draft.framework == "a script"
    assert "The script starts its ranks itself" in draft.text


@pytest.mark.parametrize(
    "read", ['os.environ["{}"]', 'os.environ.get("{}")', 'os.getenv("{}", "")', 'getenv("{}")']
)
def test_variables_that_the_script_reads_get_the_paths_of_the_run(
    tmp_path: Path, read: str
) -> None:
    names = ("METRICS_FILE", "CHECKPOINT_DIR", "RESUME_FROM_CHECKPOINT")
    reads = "".join(f"x = {read.format(name)}\n" for name in names)
    (tmp_path / "train.py").write_text(
        f"import os, torch\nfrom os import getenv\n{reads}"
        'for step in range(60):\n    loss.backward()\n    log({"step": step})\n'
    )

    draft = draft_spec(tmp_path)

    assert yaml.safe_load(draft.text)["env"] == {
        "METRICS_FILE": "${attempt.dir}/metrics.jsonl",
        "CHECKPOINT_DIR": "${run.dir}/checkpoints",
        "RESUME_FROM_CHECKPOINT": "${attempt.resume_from}",
    }
    assert draft.hook is None
    assert "muster_metrics" not in draft.text


CONFIG_SCRIPT = """\
import argparse, torch
p = argparse.ArgumentParser()
p.add_argument("--config", default="configs/tiny.FORMAT")
p.parse_args()
loss.backward()
open(out / "metrics.jsonl", "a")
"""


@pytest.mark.parametrize(
    ("suffix", "config", "key"),
    [
        ("yaml", "lr: 0.1\noutput_dir: runs/out\n", "output_dir"),
        ("yml", "train:\n  save_dir: runs/out\nlog_dir: logs\n", "train.save_dir"),
        ("json", '{"ckpt_dir": "runs/out"}', "ckpt_dir"),
        ("toml", 'lr = 0.1\n[out]\ncheckpoint_dir = "runs/out"\n', "out.checkpoint_dir"),
        ("yaml", "save: best\noutput: json\nout_dir: runs/out\n", "out_dir"),
        ("yaml", "model: {checkpoint_path: org/base}\nsave-folder: runs/out\n", "save-folder"),
        (
            "yaml",
            "eval: {output_dir: eval}\nmodel: {outputDir: runs/x}\noutdir: runs/out\n",
            "outdir",
        ),
        ("yaml", "checkpoint_path: runs/out\n", "checkpoint_path"),
        # Words such as `ref`, `log` and `test` count only as whole words.
        ("yaml", "refine: {checkpoint_path: runs/out}\n", "refine.checkpoint_path"),
        ("yaml", "login: {checkpoint_dir: runs/out}\n", "login.checkpoint_dir"),
        ("yaml", "testbed: {checkpoint_dir: runs/out}\n", "testbed.checkpoint_dir"),
    ],
)
def test_checkpoints_are_searched_in_the_folder_that_a_configuration_file_names(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    config: str,
    key: str,
) -> None:
    script = CONFIG_SCRIPT.replace("FORMAT", suffix)
    folder = project(tmp_path, {"train.py": script, f"configs/tiny.{suffix}": config})
    monkeypatch.chdir(folder)

    code = run(INIT, [])

    text = (folder / "muster.yaml").read_text()
    spec = load_spec(folder / "muster.yaml")
    source = f"because of the key {key} in configs/tiny.{suffix}"
    assert code == 0
    assert spec.processes["trainer"].checkpoints == "runs/out"
    # The script ignores a variable CHECKPOINTS, so the spec does not set it.
    assert "CHECKPOINTS" not in spec.env
    assert f"# The script probably saves its checkpoints in this folder, {source}." in text
    assert f"probably saves its checkpoints in runs/out, {source}" in capsys.readouterr().out
    assert "#   progress: {jsonl: runs/out/metrics.jsonl, step: name-of-the-step}" in text


@pytest.mark.parametrize(
    "config", ["log_dir: logs\n", "output_dir: out/${now}\n", "output_dir: ~/out\n"]
)
def test_folder_that_the_configuration_file_only_suggests_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str,
) -> None:
    script = CONFIG_SCRIPT.replace("FORMAT", "yaml")
    folder = project(tmp_path, {"train.py": script, "configs/tiny.yaml": config})
    monkeypatch.chdir(folder)

    run(INIT, [])

    spec = load_spec(folder / "muster.yaml")
    key, _, path = config.strip().partition(": ")
    assert spec.processes["trainer"].checkpoints == SAVED
    assert spec.env["CHECKPOINTS"] == SAVED
    output = capsys.readouterr().out
    assert f"may save its checkpoints in {path}, because of the key {key} in" in output
    assert "# Either change the script" in (folder / "muster.yaml").read_text()


def test_folder_of_an_evaluation_is_no_certain_folder_of_checkpoints(tmp_path: Path) -> None:
    script = CONFIG_SCRIPT.replace("FORMAT", "yaml")
    config = "eval: {output_dir: results}\n"
    folder = project(tmp_path, {"train.py": script, "configs/tiny.yaml": config})

    draft = draft_spec(folder)

    assert draft.own_folder is not None
    assert (draft.own_folder.path, draft.own_folder.is_fixed) == ("results", False)
    assert load_draft(folder).processes["trainer"].checkpoints == SAVED


@pytest.mark.parametrize(
    ("script", "config"),
    [
        # An option of the script names the folder.
        (CONFIG_SCRIPT.replace("p.parse", 'p.add_argument("--out")\np.parse'), "output_dir: out"),
        (CONFIG_SCRIPT, "checkpoint: base.pt"),
        (CONFIG_SCRIPT, "save: true"),
        # These keys may name a model to load, a rule or a format.
        (CONFIG_SCRIPT, "checkpoint: meta-llama/Llama-3.1-8B"),
        (CONFIG_SCRIPT, "ckpt: x"),
        (CONFIG_SCRIPT, "save: best"),
        (CONFIG_SCRIPT, "save_to: hub"),
        (CONFIG_SCRIPT, "output: json"),
        (CONFIG_SCRIPT, "out: x"),
        # These keys name a folder or a file to load.
        (CONFIG_SCRIPT, "resume_path: runs/old"),
        (CONFIG_SCRIPT, "pretrained_path: org/base"),
        (CONFIG_SCRIPT, "model_path: org/base"),
        (CONFIG_SCRIPT, "load_dir: runs/old"),
        (CONFIG_SCRIPT, "ckpt_path: runs/old"),
        (CONFIG_SCRIPT, "model: {checkpoint_path: org/base}"),
        (CONFIG_SCRIPT, "train: {init_from: {checkpoint_dir: runs/old}}"),
        (CONFIG_SCRIPT, "refModel: {checkpoint_path: org/base}"),
        (CONFIG_SCRIPT, "dataset: {checkpoint_path: cache}"),
        (CONFIG_SCRIPT, "output_dir: ."),
        (CONFIG_SCRIPT, "output_dir: [malformed"),
        (CONFIG_SCRIPT.replace("tiny", "missing"), "output_dir: out"),
    ],
)
def test_configuration_file_without_a_folder_of_checkpoints_changes_nothing(
    tmp_path: Path, script: str, config: str
) -> None:
    files = {"train.py": script.replace("FORMAT", "yaml"), "configs/tiny.yaml": config}
    folder = project(tmp_path, files)

    draft = draft_spec(folder)

    assert draft.own_folder is None
    assert load_draft(folder).processes["trainer"].checkpoints == SAVED


def test_metrics_file_that_a_configuration_file_names_is_used(tmp_path: Path) -> None:
    script = CONFIG_SCRIPT.replace("FORMAT", "yaml") + 'log({"iter": 1})\n'
    config = "logging: {metrics_file: out/log.jsonl}\n"
    folder = project(tmp_path, {"train.py": script, "configs/tiny.yaml": config})

    draft = draft_spec(folder)
    spec = load_draft(folder)

    assert draft.hook is None
    assert spec.progress is not None
    assert (spec.progress.jsonl, spec.progress.step) == ("out/log.jsonl", "iter")
    assert "METRICS" not in spec.env
    assert "# The key logging.metrics_file in configs/tiny.yaml names this file." in draft.text


def test_variable_that_the_script_only_sets_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        'import os, torch\nos.environ["METRICS_FILE"] = "/dev/null"\nloss.backward()\n'
    )

    assert "METRICS_FILE" not in draft_spec(tmp_path).text


@pytest.mark.parametrize("flag", ["--auto-resume", "--resume_latest"])
def test_script_that_resumes_by_itself_gets_its_flag(tmp_path: Path, flag: str) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse, torch\np = argparse.ArgumentParser()\n"
        f'p.add_argument("{flag}", action="store_true")\n'
        'p.add_argument("--resume", action="store_true")\n'
        'p.add_argument("--out")\np.parse_args()\nloss.backward()\n'
    )

    text = draft_spec(tmp_path).text

    command = yaml.safe_load(text)["components"]["trainer"]["command"]
    assert command == ["python", "train.py", "--out", "${run.dir}/checkpoints", flag]
    assert "RESUME_FROM" not in text


@pytest.mark.parametrize(
    "option",
    [
        'p.add_argument("--resume", action="store_true")',
        'p.add_argument("--resume", action=argparse.BooleanOptionalAction)',
        '@click.option("--resume/--no-resume", default=False)\ndef main(): pass',
        '@click.option("--resume", is_flag=True)\ndef main(): pass',
    ],
)
def test_flag_that_makes_the_script_resume_is_passed_with_a_comment(
    tmp_path: Path, option: str
) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse, click, torch\np = argparse.ArgumentParser()\n"
        f'{option}\np.add_argument("--out")\np.parse_args()\nloss.backward()\n'
    )

    text = draft_spec(tmp_path).text

    command = yaml.safe_load(text)["components"]["trainer"]["command"]
    assert command == ["python", "train.py", "--out", "${run.dir}/checkpoints", "--resume"]
    assert "# --resume: without a checkpoint" in text
    assert "RESUME_FROM" not in text


def test_flag_is_not_passed_beside_an_option_for_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse, torch\np = argparse.ArgumentParser()\n"
        'p.add_argument("--resume", action="store_true")\np.add_argument("--resume-from")\n'
        "p.parse_args()\nloss.backward()\n"
    )

    text = draft_spec(tmp_path).text

    command = yaml.safe_load(text)["components"]["trainer"]["command"]
    assert command == ["python", "train.py", "--resume-from", "${attempt.resume_from}"]


def test_launcher_is_preferred_to_the_script_that_it_starts_for_each_rank(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(
        "import os, subprocess, sys\n"
        "for rank in range(2):\n"
        "    env = {**os.environ, 'RANK': str(rank), 'WORLD_SIZE': '2'}\n"
        "    subprocess.Popen([sys.executable, 'rank.py'], env=env)\n"
    )
    (tmp_path / "rank.py").write_text(
        "import os, torch\nfor step in range(60):\n    loss.backward()\n"
    )

    draft = draft_spec(tmp_path)

    assert "command: [python, launch.py]" in draft.text
    assert draft.other_scripts == (Path("rank.py"),)


def test_script_is_preferred_to_a_program_that_starts_it_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nloss.backward()\n")
    (tmp_path / "nightly.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'])\n"
    )

    assert "command: [python, train.py]" in draft_spec(tmp_path).text


def test_accelerate_does_not_start_a_script_that_starts_its_ranks(tmp_path: Path) -> None:
    folder = project(tmp_path, {"train.py": f"from accelerate import Accelerator\n{SPAWN}"})

    assert load_draft(folder).processes["trainer"].command == ("python", "train.py")


@pytest.mark.parametrize(
    "source",
    [
        # A process that loads data is no rank.
        f"import multiprocessing as mp\n{TORCHRUN}mp.Process(target=print).start()\n",
        f"import subprocess\n{TORCHRUN}subprocess.run(['git', 'rev-parse', 'HEAD'])\n",
        f'"""torchrun train.py"""\nimport subprocess\n{TORCHRUN}subprocess.run(["ls"])\n',
        # On a Slurm cluster, another program starts the ranks.
        "import os, subprocess\nimport torch.distributed as dist\ndef setup(rank):\n"
        "    os.environ['RANK'] = str(rank)\n    dist.init_process_group('nccl', rank=rank)\n"
        "setup(int(os.environ['SLURM_PROCID']))\nsubprocess.check_output(['scontrol'])\n",
        # A single process is rank 0.
        f"import os, subprocess\n{TORCHRUN}os.environ['RANK'] = '0'\nsubprocess.run(['ls'])\n",
        f"import os\nimport subprocess\n{TORCHRUN}rank = int(os.environ['RANK'])\n"
        "subprocess.run(['ls'])\n",
        # The rank comes from torchrun.
        "import os, multiprocessing\nimport torch.distributed as dist\nrank = os.environ['RANK']\n"
        "dist.init_process_group('nccl', rank=int(rank))\nmultiprocessing.Pool(4)\n",
        # The method `spawn` of a random number generator starts no process.
        f"import numpy as np\n{TORCHRUN}np.random.default_rng(0).spawn(2)\n",
    ],
)
def test_script_that_only_starts_other_processes_is_started_with_torchrun(
    tmp_path: Path, source: str
) -> None:
    folder = project(tmp_path, {"train.py": source})

    assert load_draft(folder).processes["trainer"].command[0] == "torchrun"


ENGINE = "import torch.distributed as dist\ndef train():\n    dist.init_process_group()\n"
CALL = "if __name__ == '__main__':\n    train()\n"


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize(
    ("script", "modules"),
    [
        ("from vit.engine import train\n", {"vit/engine.py": ENGINE}),
        ("from vit.engine import *\n", {"vit/engine.py": ENGINE}),
        ("import vit.engine as engine\n", {"vit/engine.py": ENGINE}),
        ("from vit import engine\n", {"vit/__init__.py": "", "vit/engine.py": ENGINE}),
        ("from engine import train\n", {"engine.py": ENGINE}),
        ("def main():\n    from engine import train\n", {"engine.py": ENGINE}),
        ("from engine import train\n", {"src/engine.py": ENGINE}),
        (
            "from vit import train\n",
            {"vit/__init__.py": "from .engine import train\n", "vit/engine.py": ENGINE},
        ),
        (
            "from vit.loops import train\n",
            {"vit/loops.py": "from vit.engine import train\n", "vit/engine.py": ENGINE},
        ),
        (
            "from vit.loops.sft import train\n",
            {"vit/loops/sft.py": "from .. import engine\n", "vit/engine.py": ENGINE},
        ),
        # modules that import each other
        (
            "import a\n",
            {"a.py": "import b\n", "b.py": "import a, c\n", "c.py": f"import a, run\n{ENGINE}"},
        ),
    ],
)
def test_torchrun_starts_a_script_that_imports_a_distributed_training(
    tmp_path: Path, script: str, modules: dict[str, str], is_named: bool
) -> None:
    folder = project(tmp_path, {"run.py": script + CALL, **modules})

    spec = load_draft(folder, gpus=2, file=Path("run.py") if is_named else None)

    command = spec.processes["trainer"].command
    assert command == ("torchrun", "--standalone", "--nproc-per-node=2", "run.py")
    assert spec.gang is not None and spec.gang.gpus_per_node == 2


@pytest.mark.parametrize("script", ["scripts/run.py", "src/jobs/run.py"])
def test_modules_in_the_folder_src_of_the_project_are_searched(tmp_path: Path, script: str) -> None:
    files = {script: f"from vit.engine import train\n{CALL}", "src/vit/engine.py": ENGINE}
    folder = project(tmp_path, files)

    assert load_draft(folder).processes["trainer"].command[0] == "torchrun"


def test_accelerate_starts_a_script_that_imports_a_training_with_accelerate(tmp_path: Path) -> None:
    engine = "from accelerate import Accelerator\ndef train():\n    Accelerator()\n"
    folder = project(tmp_path, {"run.py": f"from engine import train\n{CALL}", "engine.py": engine})

    draft = draft_spec(folder)

    assert (draft.framework, draft.file) == ("accelerate", Path("run.py"))


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        # The script does not import the module.
        ("import data\n", {"engine.py": ENGINE, "data.py": ""}),
        # Installed packages are no modules of the project.
        ("import fast\n", {".venv/lib/python3.11/site-packages/fast.py": ENGINE}),
        ("import fast\n", {"fast.txt": ENGINE, "fast/notes.txt": ENGINE}),
        ("import data\n", {"data.py": '"""Data.\n\nFor torchrun."""\n# accelerate launch\n'}),
        # Muster searches imported modules for the names of frameworks, but not its own module
        # `muster_metrics`: that module contains the names of several frameworks.
        ("import muster_metrics\n", {"muster_metrics.py": read_hook()}),
        # The import names a folder above the project.
        ("from .....engine import train\n", {"engine.py": ENGINE}),
    ],
)
def test_other_files_than_imported_modules_do_not_change_the_command(
    tmp_path: Path, script: str, modules: dict[str, str]
) -> None:
    folder = project(tmp_path, {"run.py": script + CALL, **modules})

    assert draft_spec(folder, file=Path("run.py")).framework == "a script"


def test_framework_of_the_script_counts_more_than_those_of_imported_modules(tmp_path: Path) -> None:
    helper = "from accelerate import init_empty_weights\ndef build():\n    pass\n"
    files = {"train.py": f"from build import build\n{TORCHRUN}", "build.py": helper}
    folder = project(tmp_path, files)

    assert load_draft(folder).processes["trainer"].command[0] == "torchrun"


@pytest.mark.parametrize(
    ("content", "chosen"),
    [
        (f"from lib.train import main\n{CALL}", "lib/train.py"),
        (
            f"from lib.train import main\nimport click\n@click.option('--lr')\n{CALL}",
            "run.py",
        ),
        ("from lib.train import setup\nloss.backward()\n", "run.py"),
    ],
)
def test_script_with_the_options_is_preferred_to_a_script_that_only_calls_it(
    tmp_path: Path, content: str, chosen: str
) -> None:
    training = f"{ENGINE}parser.add_argument('--steps')\n"
    content = content.replace(CALL, f"def main(): pass\n{CALL}")
    folder = project(tmp_path, {"run.py": content, "lib/train.py": training})

    draft = draft_spec(folder)

    assert (draft.framework, draft.file) == ("torchrun", Path(chosen))


def test_evaluation_that_imports_the_training_is_not_chosen(tmp_path: Path) -> None:
    files = {
        "eval.py": f"from engine import train\n{CALL}",
        "run.py": "for step in range(3):\n    print(step)\n",
        "engine.py": ENGINE,
    }
    folder = project(tmp_path, files)

    assert draft_spec(folder).file == Path("run.py")
    assert draft_spec(folder, file=Path("eval.py")).framework == "torchrun"


@pytest.mark.parametrize(("length", "framework"), [(4, "torchrun"), (5, "a script")])
def test_imports_are_followed_up_to_a_limit(tmp_path: Path, length: int, framework: str) -> None:
    chain = {f"m{i}.py": f"import m{i + 1}\n" for i in range(1, length)}
    files = {"run.py": f"import m1\n{CALL}", **chain, f"m{length}.py": ENGINE}
    folder = project(tmp_path, files)

    assert draft_spec(folder, file=Path("run.py")).framework == framework


@pytest.mark.parametrize(("number", "framework"), [(50, "torchrun"), (51, "a script")])
def test_number_of_imported_modules_that_are_read_is_limited(
    tmp_path: Path, number: int, framework: str
) -> None:
    modules = {f"m{i}.py": "" for i in range(1, number)}
    imports = "".join(f"import m{i}\n" for i in range(1, number + 1))
    files = {"run.py": imports + CALL, **modules, f"m{number}.py": ENGINE}
    folder = project(tmp_path, files)

    assert draft_spec(folder, file=Path("run.py")).framework == framework


@pytest.mark.parametrize(
    "files",
    [
        {
            "run.py": f"from lib.launch import start\n{CALL}",
            "lib/launch.py": SPAWN.replace('if __name__ == "__main__":', "def start():"),
        },
        {
            "run.py": f"from lib.launch import start\n{CALL}",
            "lib/launch.py": "from .ranks import start\n",
            "lib/ranks.py": PROCESSES.replace("for rank", "def start_all():\n  for rank"),
        },
        # The script starts the ranks. Each rank calls a function of the module `lib.engine`, which
        # joins the process group.
        {
            "run.py": "from multiprocessing import Process\nfrom lib.engine import worker\n"
            "for rank in range(2):\n    Process(target=worker, args=(rank, 2)).start()\n",
            "lib/engine.py": "import torch.distributed as dist\ndef worker(rank, size):\n"
            "    dist.init_process_group('gloo', rank=rank, world_size=size)\n",
        },
        {
            "run.py": "import multiprocessing as mp\nimport lib.engine\n"
            "for rank in range(2):\n"
            "    mp.Process(target=lib.engine.worker, args=(rank, 2)).start()\n",
            "lib/engine.py": "import torch.distributed as dist\ndef worker(rank, size):\n"
            "    dist.init_process_group('gloo', rank=rank, world_size=size)\n",
        },
    ],
)
def test_script_whose_modules_start_the_ranks_is_started_with_python(
    tmp_path: Path, files: dict[str, str]
) -> None:
    folder = project(tmp_path, files)

    draft = draft_spec(folder, gpus=2)
    spec = load_draft(folder, gpus=2)

    assert draft.file == Path("run.py")
    assert spec.processes["trainer"].command == ("python", "run.py")
    assert spec.gang is not None and spec.gang.gpus_per_node == 2
    assert "The script starts its ranks itself" in draft.text


def test_module_that_starts_processes_for_its_data_does_not_start_the_ranks(tmp_path: Path) -> None:
    files = {
        "run.py": f"import os\nimport data, engine\n{CALL}",
        "data.py": "from multiprocessing import Pool\ndef load():\n    Pool(4).map(print, [])\n",
        "engine.py": "import torch.distributed as dist\ndef setup(rank):\n"
        "    dist.init_process_group('nccl', rank=rank)\n",
    }
    folder = project(tmp_path, files)

    assert load_draft(folder).processes["trainer"].command[0] == "torchrun"


@pytest.mark.parametrize("base", ["", "src"])
@pytest.mark.parametrize(
    ("package_files", "folder", "script", "module"),
    [
        (["lib/__init__.py"], "lib", "from .data import load\n", "lib.train"),
        (["lib/__init__.py"], "lib", "import lib.data\n", "lib.train"),
        (["a/__init__.py", "a/b/__init__.py"], "a/b", "from ..data import load\n", "a.b.train"),
        (["a/__init__.py", "a/b/__init__.py"], "a/b", "from a import data\n", "a.b.train"),
        # a package needs no __init__.py
        ([], "lib", "from .data import load\n", "lib.train"),
        ([], "a/b", "from ..data import load\n", "a.b.train"),
    ],
)
def test_folder_of_a_package_gives_the_module_and_the_folder_above_the_package(
    tmp_path: Path,
    base: str,
    package_files: list[str],
    folder: str,
    script: str,
    module: str,
) -> None:
    files = {f"{base}/{name}": "" for name in package_files}
    files[f"{base}/{folder}/train.py"] = f"{script}print()\n"
    root = project(tmp_path, {})
    for name, text in files.items():
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    spec = load_draft(root / base / folder)

    assert spec.processes["trainer"].command == ("python", "-m", module)
    assert spec.cwd == str(Path("my-run") / base)


def test_package_that_is_itself_the_project_is_started_from_the_folder_above(
    tmp_path: Path,
) -> None:
    folder = project(tmp_path, {"__init__.py": "", "train.py": "from .data import load\n"})
    (tmp_path / ".git").rename(folder / ".git")

    spec = load_draft(folder)

    assert spec.processes["trainer"].command == ("python", "-m", "my-run.train")
    assert spec.cwd == str(tmp_path)


def test_script_in_a_package_that_imports_only_its_neighbours_is_started_by_its_path(
    tmp_path: Path,
) -> None:
    folder = project(tmp_path, {"__init__.py": "", "data.py": "", "train.py": "import data\n"})

    spec = load_draft(folder)

    assert spec.processes["trainer"].command == ("python", "train.py")
    assert spec.cwd == "my-run"


@pytest.mark.parametrize(
    ("script", "module", "expected"),
    [
        ("src/textgen/train.py", "src/textgen/data.py", "src"),
        ("scripts/train.py", "src/textgen/data.py", "src"),
        ("scripts/train.py", "src/textgen.py", "src"),
        ("scripts/train.py", "textgen/data.py", "."),
        # Python finds the module without PYTHONPATH
        ("scripts/train.py", "scripts/textgen.py", None),
        ("train.py", "textgen/data.py", None),
        # a folder without Python files is no package
        ("scripts/train.py", "src/textgen/data.txt", None),
    ],
)
def test_script_finds_the_modules_of_its_project(
    tmp_path: Path, script: str, module: str, expected: str | None
) -> None:
    folder = project(tmp_path, {module: "", script: "import textgen\nprint('trained')\n"})

    draft = draft_spec(folder, file=Path(script))

    env = yaml.safe_load(draft.text)["env"]
    assert env.get("PYTHONPATH") == expected
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={"PYTHONPATH": expected or ""},
        capture_output=True,
        text=True,
    )
    assert (done.stdout == "trained\n") is (not module.endswith(".txt")), done.stderr
