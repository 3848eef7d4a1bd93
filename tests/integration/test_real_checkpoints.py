"""Muster finds complete checkpoints of the real libraries, and never uses damaged checkpoints.

The libraries are installed from the package registry into a separate environment. Set
`MUSTER_TEST_TORCH_PYTHON` to use a Python interpreter that has these libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.record.checkpoint_folder import list_checkpoints

WRITER = Path(__file__).parents[1] / "support" / "write_real_checkpoints.py"
PACKAGES = ("torch", "accelerate", "transformers", "lightning")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints that were written by real libraries, such as PyTorch."""
    root = tmp_path_factory.mktemp("real")
    python = os.environ.get("MUSTER_TEST_TORCH_PYTHON", "")
    if not python:
        environment = root / "environment"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        python = str(environment / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", *PACKAGES]
        if subprocess.run(install, timeout=1500).returncode:
            pytest.skip("the libraries cannot be installed here")
    subprocess.run([python, str(WRITER), str(root / "written")], check=True, timeout=600)
    return root / "written"


LAYOUTS = {
    "torch": "step_20.pt",
    "torch-old": "step_20.pt",
    "distributed": "step_20",
    "accelerate": "checkpoint_20",
    "transformers": "checkpoint-20",
    "lightning": "last.ckpt",
    "lightning-link": "0_20.ckpt",
}


@pytest.mark.parametrize(("layout", "newest"), LAYOUTS.items())
def test_newest_checkpoint_is_complete_while_its_trainer_runs(
    written: Path, layout: str, newest: str
) -> None:
    listing = list_checkpoints(layout, written, is_running=True)

    assert {checkpoint.step for checkpoint in listing.complete} == {10, 20}
    assert listing.complete[-1].path.name == newest
    assert listing.notes == ()


@pytest.mark.parametrize(("layout", "newest"), LAYOUTS.items())
@pytest.mark.parametrize("damage", ["empty", "half", "missing"])
def test_damaged_checkpoint_is_not_used(
    written: Path, tmp_path: Path, layout: str, newest: str, damage: str
) -> None:
    checkpoint = written / layout / newest
    parts = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*"))
    for part in parts:
        shutil.copytree(written / layout, tmp_path / layout, symlinks=True)
        target = tmp_path / part.relative_to(written)
        if damage == "missing":
            target.unlink()
        else:
            content = target.read_bytes()
            target.write_bytes(content[: len(content) // 2] if damage == "half" else b"")

        complete = list_checkpoints(layout, tmp_path, is_running=False).complete

        damaged = tmp_path / layout / newest
        assert damaged not in [found.path for found in complete], part.name
        assert complete, part.name
        shutil.rmtree(tmp_path / layout)
