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

#: A program of the project, which imports `muster` between its own packages.
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
    """A project with packages that have the names of Muster's packages."""
    root = tmp_path / "project"
    for module in ("tasks/__init__", "tasks/data", "flows/__init__", "deployments/__init__"):
        path = root / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("OWNER = 'project'\n")
    (root / "notebook.py").write_text(PROGRAM)
    return root


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder that contains only the package `muster`, with the content of the wheel."""
    folder = tmp_path / "site-packages"
    (folder / "muster").mkdir(parents=True)
    shutil.copy(ROOT / "deployments" / "muster_package.py", folder / "muster" / "__init__.py")
    return folder


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
