"""Build Muster as a wheel, install it into a new virtual environment, and run its commands."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Code of a program that runs `muster` once for each line of stdin, a JSON list of arguments. The
#: program imports all modules of Muster only once, and forks a process for each command. For each
#: command, the program prints a JSON list of the exit code, stdout and stderr.
_RUN_COMMANDS = """
import importlib, json, os, sys, tempfile
os.environ["DO_NOT_TRACK"] = "1"
import prefect.context, tasks.command
for verbs in tasks.command.VERBS.values():
    for verb in verbs:
        importlib.import_module(verb.function.partition(":")[0])
for line in sys.stdin:
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for fd, file in enumerate(files, 1):
            os.dup2(file.fileno(), fd)
        sys.stdin = open(os.devnull)
        sys.argv = ["muster", *json.loads(line)]
        try:
            # Prefect reads its settings when it is imported, which has already happened here. So
            # set the server's address, and then let Prefect read its settings again.
            tasks.command.find_server()
            prefect.context.refresh_global_settings_context()
            code = tasks.command.main()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    print(json.dumps([code, *(file.read() for file in files)]), flush=True)
"""


def run(*command: str, cwd: Path, stdin: str = "", env: dict[str, str] | None = None) -> str:
    """Run a command for at most 100 s, and return its stdout.

    Raises:
        AssertionError: The command failed.
    """
    result = subprocess.run(
        command, cwd=cwd, input=stdin, env=env, capture_output=True, text=True, timeout=100
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{command} exited {result.returncode}:\n{output}"
    return result.stdout


def build_wheel(directory: Path) -> Path:
    """Build the wheel of the project into a directory, without network; return its path."""
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir")
    run(*build, str(directory), str(ROOT), cwd=directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


def install_in_venv(wheel: Path, venv: Path) -> Path:
    """Create a virtual environment with the wheel, and return the path of its program `muster`.

    The dependencies come from the virtual environment of the tests. Muster itself comes from the
    wheel, not from the editable install in the tests' environment.

    Args:
        wheel: Path of the wheel.
        venv: Path of the new virtual environment.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=venv.parent)
    python = venv / "bin" / "python"
    site = run(
        str(python),
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=venv.parent,
    ).strip()
    # This .pth file adds the packages of the tests' environment, except Muster. Muster is installed
    # in the tests' environment as another .pth file (an editable install). Python ignores .pth
    # files in a folder that a .pth file has added. So Muster comes only from the wheel.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        str(wheel),
        cwd=venv.parent,
    )
    return venv / "bin" / "muster"


def run_each(
    program: Path, lines: Iterable[tuple[str, ...]], *, cwd: Path, env: Mapping[str, str]
) -> list[tuple[int, str, str]]:
    """Run several `muster` commands, one after the other, each in a new forked process.

    Args:
        program: Path of the program `muster`.
        lines: Arguments of each command.
        cwd: Working directory of the commands.
        env: Environment variables of the commands.

    Returns:
        Exit code, stdout and stderr of each command.
    """
    result = subprocess.run(
        (program.parent / "python", "-P", "-c", _RUN_COMMANDS),
        cwd=cwd,
        env=env,
        input="".join(f"{json.dumps(words)}\n" for words in lines),
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    answers = map(json.loads, result.stdout.splitlines())
    return [(code, stdout, stderr) for code, stdout, stderr in answers]
