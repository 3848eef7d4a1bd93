"""Tests of `import muster` in a project with its own packages `tasks`, `flows`, `deployments`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.house import ROOT

pytestmark = pytest.mark.usefixtures("muster_home")

#: A user's program. The program imports packages of the user's project, and the package `muster`.
PROGRAM = """
import json, pickle, sys
import tasks
import muster
import flows
from tasks import data

facts = {"owners": [tasks.OWNER, data.OWNER, flows.OWNER]}
names = ("tasks", "flows", "deployments")
facts["modules"] = sorted(name for name in sys.modules if name.partition(".")[0] in names)
try:
    muster.submit({"name": "trial"})
except muster.InvalidSpec as error:
    facts["fault"] = str(error.faults[0])
try:
    muster.find("no-such-run")
except muster.MusterError as error:
    facts["missing"] = str(error)
run = muster.RunHandle("trial")
facts["handle"] = pickle.loads(pickle.dumps(run)).run_id
print(json.dumps(facts))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with packages of the same names as Muster's packages, for example `tasks`."""
    root = tmp_path / "project"
    for module in ("tasks/__init__", "tasks/data", "flows/__init__", "deployments/__init__"):
        path = root / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("OWNER = 'project'\n")
    (root / "notebook.py").write_text(PROGRAM)
    return root


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder that contains only the package `muster` of Muster's wheel."""
    folder = tmp_path / "site-packages"
    (folder / "muster").mkdir(parents=True)
    shutil.copy(ROOT / "deployments" / "muster_package.py", folder / "muster" / "__init__.py")
    return folder


#: Functions that contain an import of a Muster module, as pairs: module and function. The import of
#: the module `tasks.client` calls all these functions except `wait_for_stack`.
LATE_IMPORTS = {
    ("tasks.command", "find_server"),
    ("tasks.command", "wait_for_stack"),
    ("tasks.train.local_runs", "import_run_json"),
    ("tasks.train.server_imports", "import_server_runs"),
}

#: Program that finds all functions that contain an import of a Muster module. The program prints a
#: JSON list of pairs: module and function.
FIND_LATE_IMPORTS = """
import ast, json, sys
import tasks.client

def imports_muster(node):
    names = [node.module] if isinstance(node, ast.ImportFrom) else []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    return any((name or "").partition(".")[0] in PACKAGES for name in names)

PACKAGES = ("tasks", "flows", "deployments")
functions = set()
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] not in PACKAGES or not getattr(module, "__file__", None):
        continue
    for function in ast.walk(ast.parse(open(module.__file__).read())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any(map(imports_muster, ast.walk(function))):
                functions.add((name, function.name))
print(json.dumps(sorted(functions)))
"""


def test_client_imports_all_modules_of_muster_while_it_loads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIND_LATE_IMPORTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )

    assert {tuple(pair) for pair in json.loads(done.stdout)} == LATE_IMPORTS


def test_client_and_packages_of_the_project_work_in_one_process(
    project: Path, package: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["owners"] == ["project"] * 3
    assert facts["modules"] == ["flows", "tasks", "tasks.data"]
    assert facts["fault"].startswith("workload: missing")
    assert facts["missing"].startswith("there is no run yet")
    assert facts["handle"] == "trial"
