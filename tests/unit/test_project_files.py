"""Tests of the project's files: they agree with each other and name no registry or local path."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.command_checks import make_targets

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"

#: Hosts of public package registries. The names are written in parts, so that this file does not
#: contain the name of a registry.
REGISTRIES = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("anaconda", "org"),
        ("npmjs", "org"),
        ("yarnpkg", "com"),
    )
)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> list[Requirement]:
    """Return all requirements in pyproject.toml, including those of the extras."""
    project = pyproject()["project"]
    texts = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        texts += extra
    return [Requirement(text) for text in texts]


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def project_files() -> list[Path]:
    """Return the files of the checkout that git tracks or does not ignore. Links are left out."""
    listing = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def configured_registries() -> list[str]:
    """Return the hosts and folders from which pip installs packages on this machine."""
    config = subprocess.run(
        (sys.executable, "-m", "pip", "config", "list"), capture_output=True, text=True, timeout=60
    )
    settings = config.stdout + " ".join(v for k, v in os.environ.items() if k.endswith("INDEX_URL"))
    hosts = re.findall(r"https?://(?:[^/@\s']*@)?([^/:\s']+)", settings)
    folders = re.findall(r"file://(/[^\s']+)", settings)
    return [host for host in hosts if host not in ("localhost", "127.0.0.1")] + folders


def forbidden(root: Path) -> re.Pattern[str]:
    """Return a pattern that matches the hosts of registries and the path `root` of the checkout.

    If `root` is directly under `/`, such as `/src`, the pattern does not contain `root`, because
    `/src` may also be a common word.
    """
    names = {*REGISTRIES, *configured_registries()}
    if len(root.parts) > 2:
        names.add(str(root))
    any_name = "|".join(re.escape(name) for name in sorted(names))
    return re.compile(rf"(?<![\w-])(?:{any_name})(?![\w-])")


def matching_lines(pattern: re.Pattern[str], text: str) -> list[int]:
    """Return the numbers of the lines that match the pattern."""
    lines = enumerate(text.splitlines(), start=1)
    return [number for number, line in lines if pattern.search(line)]


def test_no_file_names_a_registry_or_this_checkout() -> None:
    pattern = forbidden(ROOT)

    violations = {
        str(path.relative_to(ROOT)): lines
        for path in project_files()
        if (lines := matching_lines(pattern, path.read_text(encoding="utf-8", errors="ignore")))
    }

    assert not violations, (
        f"these lines name a package registry or a path of this machine: {violations}"
    )


def test_constraints_are_versions_only() -> None:
    wrong = [line for line in constraint_lines() if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)]

    assert not wrong


def test_constraints_satisfy_every_requirement() -> None:
    pairs = (line.split("==") for line in constraint_lines())
    versions = {canonicalize_name(name): version for name, version in pairs}

    wrong = [
        f"{requirement}: {version or 'not there'}"
        for requirement in requirements()
        if not (version := versions.get(canonicalize_name(requirement.name), ""))
        or version not in requirement.specifier
    ]

    assert not wrong


#: Programs that Muster runs with the Python interpreter of a component. These programs may import
#: packages that only the training needs.
PROGRAMS_OF_COMPONENTS = {"tasks/train/group_mlflow_runs.py"}
#: Extras of the project whose packages Muster imports only after a check that the packages are
#: installed.
CHECKED_EXTRAS = ("sweeps",)


def test_flows_and_tasks_import_only_what_the_project_depends_on() -> None:
    project = pyproject()["project"]
    extras = [text for extra in CHECKED_EXTRAS for text in project["optional-dependencies"][extra]]
    declared = {
        canonicalize_name(Requirement(text).name) for text in [*project["dependencies"], *extras]
    }
    owners = packages_distributions()
    # The guardian program imports modules by short names, for example `tree` instead of
    # `tasks.processes.tree`.
    guardian_modules = {path.stem for path in (ROOT / "tasks" / "processes").glob("*.py")}
    own_packages = {"deployments", "flows", "tasks", *guardian_modules}

    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in ("flows", "tasks")
        for path in (ROOT / package).rglob("*.py")
        if str(path.relative_to(ROOT)) not in PROGRAMS_OF_COMPONENTS
        for name in imported_packages(path)
        if name not in sys.stdlib_module_names | own_packages
        and not declared & {canonicalize_name(dist) for dist in owners.get(name, ())}
    }

    assert not undeclared


def imported_packages(path: Path) -> set[str]:
    """Return the top-level names of the absolute imports in a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_make_lists_every_target() -> None:
    listed = subprocess.run(
        ("make", "--no-print-directory"), cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout

    assert set(re.findall(r"^  make ([a-z-]+)", listed, re.MULTILINE)) == {*make_targets()}


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_session_with_a_leftover_process_fails_and_names_it(tmp_path: Path, workers: str) -> None:
    # This copy of conftest.py waits at most 0.2 s for leftover processes to exit.
    conftest = re.sub(r"(?m)^(_LEFTOVERS_WITHIN_S) = .*$", r"\1 = 0.2", CONFTEST.read_text())
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_it.py").write_text(
        "import subprocess\n"
        "def test_it(request):\n"
        "    process = subprocess.Popen(('sleep', '300'), start_new_session=True)\n"
        "    (request.config.rootpath / 'pid').write_text(str(process.pid))\n"
    )

    session = subprocess.run(
        (
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--rootdir={tmp_path}",
            workers,
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 9)
    assert session.returncode == 1, session.stdout
    assert "1 passed" in session.stdout
    assert f"pid {pid}: sleep 300" in session.stdout


def test_test_with_a_failing_listener_fails_and_shows_the_exception(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(
        "from tasks.record.events import EventLog\n"
        "def fail(event):\n"
        "    raise AttributeError('missing field')\n"
        "def test_it():\n"
        "    EventLog(None, (fail,)).emit('run.state')\n"
        "def test_next():\n"
        "    pass\n"
    )

    session = subprocess.run(
        (
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--rootdir={tmp_path}",
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert session.returncode == 1, session.stdout
    assert "2 passed, 1 error" in session.stdout
    assert "AttributeError: missing field" in session.stdout
