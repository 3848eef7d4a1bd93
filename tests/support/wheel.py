"""Muster as a wheel, in a venv of its own, as a user has it."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Runs `muster` once for each line of words, in a process that has imported what it takes.
_EACH = """
import importlib, json, os, sys, tempfile
os.environ["DO_NOT_TRACK"] = "1"
import prefect.context, tasks.command
for verbs in tasks.command._VERBS.values():
    for _, function, _ in verbs:
        importlib.import_module(function.partition(":")[0])
for line in sys.stdin:
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for fd, file in enumerate(files, 1):
            os.dup2(file.fileno(), fd)
        sys.stdin = open(os.devnull)
        sys.argv = ["muster", *json.loads(line)]
        try:
            # What it finds is read as Prefect is imported, which is done here.
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


def each(
    program: Path, lines: Iterable[tuple[str, ...]], *, cwd: Path, env: Mapping[str, str]
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of `muster` with these words, one after the other; each in a
    process of its own, which imports nothing anew."""
    done = subprocess.run(
        (program.parent / "python", "-P", "-c", _EACH),
        cwd=cwd,
        env=env,
        input="".join(f"{json.dumps(words)}\n" for words in lines),
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    return [(code, out, said) for code, out, said in map(json.loads, done.stdout.splitlines())]
