"""Tests of the warning about modules that a training imports, but that are not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tasks.spec.run import RunSpec
from tasks.train.missing_modules import describe_missing_modules


def list_warnings(root: Path, script: str, *command: str, **keys: object) -> list[str]:
    """Return the warnings for a run whose trainer runs the script `train.py` with this source.

    Args:
        root: Root folder of the project.
        script: Source text of the script.
        *command: Command of the trainer. Without it, the command is `python train.py`.
        **keys: Further keys of the run spec.
    """
    (root / "train.py").write_text(script)
    argv = [*command] or [sys.executable, "train.py"]
    spec = {"name": "x", "workload": "sft", "components": {"trainer": {"command": argv}}, **keys}
    return [*describe_missing_modules(RunSpec.model_validate(spec), root)]


def test_warning_names_the_missing_module_and_the_environment(tmp_path: Path) -> None:
    [warning] = list_warnings(tmp_path, "import no_such_torch.nn as nn\nimport json\n")

    assert warning.startswith("train.py imports the module no_such_torch, but the Python")
    assert sys.executable in warning
    # This is Muster's own interpreter. Users should not install packages in Muster's environment.
    assert f"Create a Python environment for the training in {tmp_path / '.venv'}" in warning


def test_warning_about_an_environment_of_the_user_advises_to_install_the_module(
    tmp_path: Path,
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    [warning] = list_warnings(tmp_path, "import no_such_torch\n", "python", "train.py")

    assert f"{python} (of the project's .venv). Install the module in this environment" in warning


def test_warning_names_all_missing_modules(tmp_path: Path) -> None:
    source = "from no_such_torch import nn\nimport no_such_numpy, yaml\n"

    [warning] = list_warnings(tmp_path, source)

    assert "imports the modules no_such_numpy and no_such_torch, but" in warning


@pytest.mark.parametrize(
    "source",
    [
        "import json, os.path, yaml\n",
        "import helper\nfrom lib import model\nfrom . import x\n",
        "try:\n    import no_such_wandb\nexcept ImportError:\n    no_such_wandb = None\n",
        "def plot():\n    import no_such_plot\n",
        "import no_such_torch as (\n",
    ],
)
def test_modules_that_exist_or_are_optional_cause_no_warning(tmp_path: Path, source: str) -> None:
    (tmp_path / "helper.py").touch()
    (tmp_path / "lib").mkdir()

    assert list_warnings(tmp_path, source) == []


@pytest.mark.parametrize(
    ("file", "module", "path"),
    [
        ("lib/pretrain.py", "lib.pretrain", ""),
        ("lib/pretrain/__main__.py", "lib.pretrain", ""),
        ("src/lib/pretrain.py", "lib.pretrain", "src"),
        ("pretrain.py", "pretrain", ""),
    ],
)
def test_module_that_python_runs_by_its_name_is_checked(
    tmp_path: Path, file: str, module: str, path: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("import no_such_torch, own\n")
    (tmp_path / "own.py").touch()
    command = [sys.executable, "-m", module, "--steps", "3"]

    [warning] = list_warnings(tmp_path, "", *command, env={"PYTHONPATH": path})

    name = file.rpartition("/")[2]
    assert warning.startswith(f"{name} imports the module no_such_torch, but the Python")


def test_module_in_pythonpath_of_the_spec_causes_no_warning(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own_package.py").touch()

    assert list_warnings(tmp_path, "import own_package\n") != []
    assert list_warnings(tmp_path, "import own_package\n", env={"PYTHONPATH": "src"}) == []


def test_unknown_pythonpath_causes_no_warning(tmp_path: Path) -> None:
    env = {"PYTHONPATH": "${run.dir}/src"}

    assert list_warnings(tmp_path, "import own_package\n", env=env) == []


@pytest.mark.parametrize(
    "change",
    [
        "import sys\nsys.path.insert(0, 'lib')\n",
        "import os, sys\ndef prepare():\n    sys.path.append('lib')\nprepare()\n",
        "from sys import path\npath.append('lib')\n",
        "import site\nsite.addsitedir('lib')\n",
    ],
)
def test_modules_in_folders_that_the_script_adds_cause_no_warning(
    tmp_path: Path, change: str
) -> None:
    assert list_warnings(tmp_path, f"{change}import own_package\n") == []

    [warning] = list_warnings(tmp_path, f"'Doc.'\nimport no_such_torch\n{change}import own\n")
    assert "imports the module no_such_torch, but" in warning


def test_modules_next_to_the_target_of_a_linked_script_cause_no_warning(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    root = tmp_path / "project"
    shared.mkdir()
    root.mkdir()
    (shared / "own_module.py").touch()
    (shared / "train.py").touch()
    (root / "train.py").symlink_to(shared / "train.py")

    assert list_warnings(root, "import own_module\n") == []


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-m", "other"),
        ("sh", "train.py"),
        (sys.executable, "other.py"),
        ("/no/such/python", "train.py"),
    ],
)
def test_commands_that_run_no_python_script_are_not_examined(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert list_warnings(tmp_path, "import no_such_torch\n", *command) == []


def test_modules_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("open('imported', 'w')\n")

    assert list_warnings(tmp_path, "import slow\n") == []

    assert not (tmp_path / "imported").exists()
