"""The built wheel holds the whole of deployments, flows and tasks, and works without the checkout.

An editable install hides a module that the wheel lacks, so the wheel is imported elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.wheel import ROOT, run

PACKAGES = ("deployments", "flows", "tasks")
#: Imports each module named on stdin and says which file each came from.
IMPORT_ALL = """
import importlib, json, sys
files = {name: importlib.import_module(name).__file__ for name in json.load(sys.stdin)}
print("\\n" + json.dumps(files))
"""


def sources_of(root: Path) -> set[str]:
    """Paths of the Python files of the packages, relative to `root`."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return {path.relative_to(root).as_posix() for path in found}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing in it but the unpacked wheel."""
    target = tmp_path_factory.mktemp("target")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-index", "--no-deps", "--target", str(target), str(wheel)),
        cwd=target,
    )
    return target


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())

    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert sources_of(ROOT) <= names
    assert "deployments/prefect.yaml" in names


@pytest.mark.thorough
@pytest.mark.slow
def test_every_module_imports_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    # The quickstart's programs find each other in their own folder.
    found = {path for path in sources_of(installed) if "/quickstart/" not in path}
    modules = sorted(map(module_of, found))
    # before site-packages, where an editable install of the checkout may be
    env = os.environ | {"PYTHONPATH": str(installed)}

    output = run(
        *(sys.executable, "-P", "-c", IMPORT_ALL), cwd=tmp_path, stdin=json.dumps(modules), env=env
    )

    files = json.loads(output.splitlines()[-1])
    elsewhere = {
        name: file for name, file in files.items() if not Path(file).is_relative_to(installed)
    }
    assert elsewhere == {}
    assert "flows.train" in files
