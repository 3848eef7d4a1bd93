"""Tests of the import rules: layers point down, no circles, unique class names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.house import ALONE, ROOT, measure, violations


def test_the_project_holds_its_order() -> None:
    broken = violations(ROOT)

    assert not broken, "\n" + "\n".join(broken)


def test_modules_do_not_import_each_other_in_circles() -> None:
    figures = measure(ROOT)

    assert figures.circles == ()


def test_class_names_are_unique() -> None:
    figures = measure(ROOT)

    assert figures.names_borne_twice == ()


@pytest.mark.parametrize("path", ALONE)
def test_what_runs_alone_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(
    ("path", "source"),
    [
        # upwards, in each way to write it
        ("tasks/spec/a.py", "from tasks.record.events import Event"),
        ("tasks/record/a.py", "import tasks.show.page"),
        ("tasks/record/a.py", "def f():\n    from ..show import page"),
        ("tasks/record/a.py", "import importlib\nimportlib.import_module('tasks.show')"),
        ("deployments/stack.py", "import tests.unit"),
        ("tasks/train/a.py", "from tasks.command import main"),
        # a sibling
        ("tasks/show/a.py", "from tasks.processes import tree"),
        # a folder that has no place
        ("tasks/extra/a.py", ""),
        # packages of others
        ("tasks/spec/a.py", "import psutil"),
        ("tasks/processes/a.py", "import prefect.client"),
        ("tasks/queue/a.py", "import ray"),
        # what runs alone has no site-packages and no package
        ("tasks/processes/guardian.py", "import psutil"),
        ("tasks/processes/tree.py", "from tasks.spec import errors"),
        # flows decide
        ("flows/train.py", "import time"),
        # a user's programs
        ("deployments/quickstart/a.py", "from tasks.spec import run"),
        ("deployments/quickstart-llm/a.py", "from tasks.spec import run"),
    ],
)
def test_a_break_is_named(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")

    broken = violations(tmp_path)

    assert len(broken) == 1
    assert broken[0].startswith(path)


def test_what_stands_below_may_be_imported(tmp_path: Path) -> None:
    (tmp_path / "tasks/queue").mkdir(parents=True)
    (tmp_path / "tasks/queue/a.py").write_text(
        "import prefect\nfrom tasks.queue import b\nfrom tasks.spec.run import RunSpec\n"
    )

    assert violations(tmp_path) == []


def test_the_architecture_page_names_files_that_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")

    named = re.findall(r"`(\w+/\w+\.py)`", page)

    assert len(named) > 20
    assert not [
        name for name in named if not any((ROOT / top / name).exists() for top in ("tasks", ""))
    ]
