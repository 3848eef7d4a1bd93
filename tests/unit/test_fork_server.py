"""Tests of the decision whether a run may be a fork of the fork server. They start no server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.responses import DeploymentResponse

from tasks.queue import fork_server
from tests.support.host_environment import ROOT

STEP = "prefect.deployments.steps.set_working_directory"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a checkout, a folder of packages and Prefect's settings files.

    This process uses these folders and files during the test.
    """
    for folder in ("project/tasks/queue", "packages/prefect-3.8.8.dist-info", "home"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("project/tasks/queue/scheduler.py", "home/profiles.toml", "home/logging.yml"):
        (tmp_path / file).write_text("")
    home = tmp_path / "home"
    logging = SimpleNamespace(config_path=home / "logging.yml")
    settings = SimpleNamespace(profiles_path=home / "profiles.toml", logging=logging)
    monkeypatch.setattr(fork_server, "get_current_settings", lambda: settings)
    monkeypatch.setattr(fork_server, "_ROOT", tmp_path / "project")
    monkeypatch.setattr(fork_server, "_IMPORT_PATH", [str(tmp_path / "packages")])
    monkeypatch.chdir(home)
    return tmp_path


def change_time(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda place: change_time(place / "project/tasks/queue/scheduler.py"),
            id="module edited",
        ),
        pytest.param(lambda place: (place / "project/tasks/new.py").touch(), id="module added"),
        pytest.param(
            lambda place: (place / "project/tasks/queue/scheduler.py").unlink(), id="module removed"
        ),
        pytest.param(
            lambda place: (place / "packages/x-1.dist-info").mkdir(), id="package installed"
        ),
        pytest.param(
            lambda place: (place / "packages/prefect-3.8.8.dist-info").rename(
                place / "packages/prefect-3.9.1.dist-info"
            ),
            id="package upgraded",
        ),
        pytest.param(
            lambda place: change_time(place / "home/profiles.toml"), id="Prefect profile edited"
        ),
        pytest.param(
            lambda place: change_time(place / "home/logging.yml"), id="logging settings edited"
        ),
        pytest.param(
            lambda place: (place / "home/prefect.toml").touch(), id="settings of the folder added"
        ),
    ],
)
def test_fingerprint_changes_with_each_imported_file(
    place: Path, change: Callable[[Path], object]
) -> None:
    before = fork_server.fingerprint()
    assert fork_server.fingerprint() == before

    change(place)

    assert fork_server.fingerprint() != before


def test_fingerprint_ignores_caches_and_logs_in_a_checkout(place: Path) -> None:
    before = fork_server.fingerprint()

    (place / "project/tasks/__pycache__").mkdir()
    (place / "project/tasks/__pycache__/gate.pyc").touch()
    (place / "project/run.log").touch()

    assert fork_server.fingerprint() == before


@pytest.mark.parametrize(
    ("variables", "is_allowed"),
    [
        ({"WANDB_MODE": "offline", "PREFECT_API_URL": "http://other/api", "TZ": "UTC"}, True),
        # Python and the dynamic loader read these variables only at the start of a program, so a
        # forked process would ignore them.
        ({"PYTHONPATH": "/elsewhere"}, False),
        ({"LD_PRELOAD": "/libjemalloc.so"}, False),
        ({"LANG": "C"}, False),
        # The forked process has only 4096 bytes for its environment, so this variable does not fit.
        ({"HUGE": "x" * 5000}, False),
    ],
)
def test_run_with_other_startup_variables_is_not_forked(
    variables: dict[str, str], is_allowed: bool
) -> None:
    fork_server_env = {"PATH": "/bin", "LANG": "C.UTF-8", "PYTHONSAFEPATH": "1"}

    result = fork_server.may_be_forked(
        {**fork_server_env, **variables}, fork_server_env, max_bytes=4096
    )

    assert result is is_allowed


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
        # The fork server cannot run these flows. The flows are from another checkout or project, or
        # their deployment has a pull step that does more than set the working directory.
        ("flows/train.py:train", [{STEP: {"directory": "/elsewhere"}}], (None, None)),
        ("project.flow", [], (None, None)),
        ("flows/train.py:train", [{STEP: {"directory": "{{ fetched.directory }}"}}], (None, None)),
        ("flows/train.py:train", [{STEP: {"directory": str(ROOT)}}, {"x.run": {}}], (None, None)),
        ("flows.train.train", [{"x.run": {}}], (None, None)),
    ],
)
def test_own_flow_of_a_deployment_is_found(
    entrypoint: str, steps: list[dict[str, Any]], expected: tuple[str | None, Path | None]
) -> None:
    assert fork_server.find_own_flow(deployment(entrypoint, *steps)) == expected
