"""Tests of the import rules: layers point down, no circles, unique class names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.house import ALONE, ROOT, measure, violations


def test_project_follows_the_import_rules() -> None:
    broken = violations(ROOT)

    assert not broken, "\n" + "\n".join(broken)


def test_modules_do_not_import_each_other_in_circles() -> None:
    figures = measure(ROOT)

    assert figures.circles == ()


def test_class_names_are_unique() -> None:
    figures = measure(ROOT)

    assert figures.names_borne_twice == ()


@pytest.mark.parametrize("path", ALONE)
def test_standalone_programs_exist(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(
    ("path", "source"),
    [
        # imports from a higher layer, in each form of Python's import statements and functions
        ("tasks/spec/a.py", "from tasks.record.events import Event"),
        ("tasks/record/a.py", "import tasks.show.page"),
        ("tasks/record/a.py", "def f():\n    from ..show import page"),
        ("tasks/record/a.py", "import importlib\nimportlib.import_module('tasks.show')"),
        ("deployments/stack.py", "import tests.unit"),
        ("tasks/train/a.py", "from tasks.command import main"),
        # an import from another folder of the same layer is forbidden
        ("tasks/show/a.py", "from tasks.processes import tree"),
        # the list of layers does not contain the folder `tasks/extra`
        ("tasks/extra/a.py", ""),
        # third-party packages that the module's folder must not import
        ("tasks/spec/a.py", "import psutil"),
        ("tasks/processes/a.py", "import prefect.client"),
        ("tasks/queue/a.py", "import ray"),
        # a standalone program may import only the standard library and modules of its own folder
        ("tasks/processes/guardian.py", "import psutil"),
        ("tasks/processes/tree.py", "from tasks.spec import errors"),
        # a flow must not use a clock
        ("flows/train.py", "import time"),
        # the programs of a user's run must not import Muster
        ("deployments/quickstart/a.py", "from tasks.spec import run"),
        ("deployments/quickstart-llm/a.py", "from tasks.spec import run"),
    ],
)
def test_broken_rules_are_detected(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")

    broken = violations(tmp_path)

    assert len(broken) == 1
    assert broken[0].startswith(path)


def test_lower_layers_may_be_imported(tmp_path: Path) -> None:
    (tmp_path / "tasks/queue").mkdir(parents=True)
    (tmp_path / "tasks/queue/a.py").write_text(
        "import prefect\nfrom tasks.queue import b\nfrom tasks.spec.run import RunSpec\n"
    )

    assert violations(tmp_path) == []


def test_files_named_on_the_architecture_page_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")

    named = re.findall(r"`(\w+/\w+\.py)`", page)

    assert len(named) > 20
    missing = [
        name for name in named if not any((ROOT / top / name).exists() for top in ("tasks", ""))
    ]
    assert not missing
