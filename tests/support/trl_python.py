"""A Python interpreter that can import TRL, for tests of real trainings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def find_trl_python(directory: Path, *packages: str) -> str:
    """Return the path of a Python interpreter that can import `torch`, `trl` and further packages.

    The environment variable MUSTER_TEST_TORCH_PYTHON may name the interpreter. Otherwise a virtual
    environment is created. The test is skipped if the packages cannot be installed.

    Args:
        directory: Directory for the virtual environment. The directory must not exist yet.
        packages: Names of the further packages.
    """
    if interpreter := os.environ.get("MUSTER_TEST_TORCH_PYTHON", ""):
        return interpreter
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    program = str(directory / "bin" / "python")
    command = [program, "-m", "pip", "install", "-q", "torch", "trl", *packages]
    if subprocess.run(command).returncode:
        pytest.skip("TRL cannot be installed here")
    return program
