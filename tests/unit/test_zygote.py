"""When a run may be forked: of a flow of Muster's own, from what is still as it was imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.responses import DeploymentResponse

from tasks.queue import zygote
from tests.support.ground import ROOT

STEP = "prefect.deployments.steps.set_working_directory"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, a folder of packages and Prefect's files, of the test's own."""
    for folder in ("project/tasks/queue", "packages/prefect-3.8.8.dist-info", "home"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("project/tasks/queue/gate.py", "home/profiles.toml", "home/logging.yml"):
        (tmp_path / file).write_text("")
    home = tmp_path / "home"
    logging = SimpleNamespace(config_path=home / "logging.yml")
    settings = SimpleNamespace(profiles_path=home / "profiles.toml", logging=logging)
    monkeypatch.setattr(zygote, "get_current_settings", lambda: settings)
    monkeypatch.setattr(zygote, "_ROOT", tmp_path / "project")
    monkeypatch.setattr(zygote, "_IMPORT_PATH", [str(tmp_path / "packages")])
    monkeypatch.chdir(home)
    return tmp_path


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda at: touched(at / "project/tasks/queue/gate.py"), id="a file is edited"),
        pytest.param(lambda at: (at / "project/tasks/new.py").touch(), id="a file is added"),
        pytest.param(lambda at: (at / "project/tasks/queue/gate.py").unlink(), id="one is removed"),
        pytest.param(lambda at: (at / "packages/x-1.dist-info").mkdir(), id="a package is added"),
        pytest.param(
            lambda at: (at / "packages/prefect-3.8.8.dist-info").rename(
                at / "packages/prefect-3.9.1.dist-info"
            ),
            id="a package is upgraded",
        ),
        pytest.param(lambda at: touched(at / "home/profiles.toml"), id="another profile"),
        pytest.param(lambda at: touched(at / "home/logging.yml"), id="logged otherwise"),
        pytest.param(lambda at: (at / "home/prefect.toml").touch(), id="settings of the folder"),
    ],
)
def test_what_has_changed_since_it_was_imported_is_noticed(
    place: Path, change: Callable[[Path], object]
) -> None:
    before = zygote.fingerprint()
    assert zygote.fingerprint() == before

    change(place)

    assert zygote.fingerprint() != before


def test_what_a_run_leaves_in_a_checkout_is_no_change(place: Path) -> None:
    before = zygote.fingerprint()

    (place / "project/tasks/__pycache__").mkdir()
    (place / "project/tasks/__pycache__/gate.pyc").touch()
    (place / "project/run.log").touch()

    assert zygote.fingerprint() == before


@pytest.mark.parametrize(
    ("more", "may_be"),
    [
        ({"WANDB_MODE": "offline", "PREFECT_API_URL": "http://other/api", "TZ": "UTC"}, True),
        # Python and the loader have read them already.
        ({"PYTHONPATH": "/elsewhere"}, False),
        ({"LD_PRELOAD": "/libjemalloc.so"}, False),
        ({"LANG": "C"}, False),
        # There is no place to show it in.
        ({"HUGE": "x" * 5000}, False),
    ],
)
def test_environment_that_is_read_as_a_program_begins_needs_a_program(
    more: dict[str, str], may_be: bool
) -> None:
    own = {"PATH": "/bin", "LANG": "C.UTF-8", "PYTHONSAFEPATH": "1"}

    assert zygote.may_be_forked({**own, **more}, own, room=4096) is may_be


def deployment(entrypoint: str, *steps: dict[str, Any]) -> DeploymentResponse:
    return DeploymentResponse(
        id=uuid4(),
        name="any",
        flow_id=uuid4(),
        entrypoint=entrypoint,
        pull_steps=list(steps),
        labels={},
    )


@pytest.mark.parametrize(
    ("entrypoint", "steps", "expected"),
    [
        ("flows.train.train", [], ("flows.train.train", None)),
        ("flows/train.py:train", [{STEP: {"directory": str(ROOT)}}], ("flows.train.train", ROOT)),
        # Another checkout's, another project's, and what has to be fetched or prepared.
        ("flows/train.py:train", [{STEP: {"directory": "/elsewhere"}}], (None, None)),
        ("project.flow", [], (None, None)),
        ("flows/train.py:train", [{STEP: {"directory": "{{ fetched.directory }}"}}], (None, None)),
        ("flows/train.py:train", [{STEP: {"directory": str(ROOT)}}, {"x.run": {}}], (None, None)),
        ("flows.train.train", [{"x.run": {}}], (None, None)),
    ],
)
def test_flow_of_muster_itself_needs_no_pull_step(
    entrypoint: str, steps: list[dict[str, Any]], expected: tuple[str | None, Path | None]
) -> None:
    assert zygote.find_own_flow(deployment(entrypoint, *steps)) == expected
