"""The wheel contains all of deployments, flows and tasks, and works without the checkout.

An editable installation would hide a module that is missing in the wheel. So the tests unpack the
wheel and import it in another folder.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.wheel import ROOT, install_in_venv, run

PACKAGES = ("deployments", "flows", "tasks")
#: A program that imports the modules in its standard input, and prints the file of each module.
IMPORT_ALL = """
import importlib, json, sys
files = {name: importlib.import_module(name).__file__ for name in json.load(sys.stdin)}
print("\\n" + json.dumps(files))
"""


def list_sources(root: Path) -> set[str]:
    """Return the paths of the packages' Python files, relative to `root`."""
    paths = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return {path.relative_to(root).as_posix() for path in paths}


def convert_to_module(path: str) -> str:
    """Return the name of the module that a relative path belongs to."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains only the unpacked wheel."""
    target = tmp_path_factory.mktemp("target")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
        cwd=target,
    )
    return target


#: A program of a user's project. The program imports Muster's Python client and the project's own
#: package `tasks`, which has the same name as a package of Muster.
NOTEBOOK = """
import muster, tasks
try:
    muster.submit("muster.yaml")
except muster.InvalidSpec as error:
    print(tasks.OWNER, error)
"""


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())

    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {
        *PACKAGES,
        "muster",
    }
    # Only one source file has another path in the wheel than in the checkout. In the wheel, this
    # file is `muster/__init__.py`.
    assert list_sources(ROOT) - names == {"deployments/muster_package.py"}
    assert "muster/__init__.py" in names
    assert "deployments/prefect.yaml" in names


def test_wheel_installs_the_documents(installed: Path) -> None:
    # With the option --target, pip installs the folder `share` into the target folder.
    documents = installed / "share" / "doc" / "muster"

    pages = {path.relative_to(documents).as_posix() for path in documents.rglob("*.md")}
    assert pages >= {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert "README.md" in pages
    assert (documents / "docs" / "images" / "run.png").is_file()


@pytest.mark.thorough
@pytest.mark.slow
def test_every_module_imports_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    # Leave out the programs of the quickstart. These programs import each other from their own
    # folder, so they cannot be imported as modules of a package.
    paths = {path for path in list_sources(installed) if "/quickstart/" not in path}
    modules = sorted(map(convert_to_module, paths))
    # Python searches PYTHONPATH before site-packages. So Python imports the modules of the wheel,
    # even if site-packages contains the checkout as an editable package.
    env = os.environ | {"PYTHONPATH": str(installed)}

    output = run(
        sys.executable, "-P", "-c", IMPORT_ALL, cwd=tmp_path, stdin=json.dumps(modules), env=env
    )

    files = json.loads(output.splitlines()[-1])
    elsewhere = {
        name: file for name, file in files.items() if not Path(file).is_relative_to(installed)
    }
    assert elsewhere == {}
    assert "flows.train" in files


@pytest.mark.thorough
def test_project_with_its_own_packages_imports_the_client(wheel: Path, tmp_path: Path) -> None:
    python = install_in_venv(wheel, tmp_path / "venv").with_name("python")
    project = tmp_path / "project"
    for package in PACKAGES:
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("OWNER = 'project'\n")
    (project / "muster.yaml").write_text("name: trial\nworkload: sft\n")
    (project / "notebook.py").write_text(NOTEBOOK)

    output = run(
        str(python),
        "notebook.py",
        cwd=project,
        env=os.environ | {"MUSTER_HOME": str(tmp_path / "home")},
    )

    assert output.startswith("project muster.yaml has 1 fault:\n  - components: missing")
