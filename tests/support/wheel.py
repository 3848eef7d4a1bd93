"""Muster as a wheel, in a venv of its own, as a user has it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path, stdin: str = "", env: dict[str, str] | None = None) -> str:
    """Stdout of a command that must succeed; pytest's deadline is the test's, 100 s is its own."""
    done = subprocess.run(
        command, cwd=cwd, input=stdin, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def built_wheel(directory: Path) -> Path:
    """The wheel of the checkout, built offline with the hatchling that is installed."""
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir")
    run(*build, str(directory), str(ROOT), cwd=directory)
    (built,) = directory.glob("*.whl")
    return built


def program_in_venv(wheel: Path, venv: Path) -> Path:
    """The program `muster` of a venv that has the wheel, and of the tests' own venv the packages
    that it depends on, but not the checkout, which is installed there by a link."""
    run(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=venv.parent)
    python = venv / "bin" / "python"
    site = run(
        *(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"),
        cwd=venv.parent,
    ).strip()
    # Of a folder that a .pth names, no .pth is read.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
        *("--disable-pip-version-check", "--no-index", "--no-deps", str(wheel)),
        cwd=venv.parent,
    )
    return venv / "bin" / "muster"
