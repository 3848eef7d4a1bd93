"""Fixtures of all integration tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support.stage", "tests.support.witness")

from tests.support.forkserver import ForkServer  # noqa: E402
from tests.support.stage import Stage, stage_in  # noqa: E402
from tests.support.wheel import built_wheel, program_in_venv  # noqa: E402
from tests.support.witness import Witness  # noqa: E402


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a wheel that was built from the checkout."""
    with _shared_directory(tmp_path_factory, "dist") as (directory, is_ready):
        return next(directory.glob("*.whl")) if is_ready else built_wheel(directory)


@pytest.fixture(scope="session")
def muster(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of `muster` in a virtual environment in which the wheel is installed."""
    with _shared_directory(tmp_path_factory, "muster") as (directory, is_ready):
        venv = directory / "venv"
        return venv / "bin/muster" if is_ready else program_in_venv(wheel, venv)


@contextmanager
def _shared_directory(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a directory that all pytest workers of the session share, and whether it is filled.

    The second value is True if another pytest worker has already filled the directory.

    The caller that gets False must fill the directory. A file lock makes the other callers wait
    until the directory is filled.
    """
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory, (directory / "made").exists()
        (directory / "made").touch()


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Yield a `Stage`, which runs components and supervisors in this test's directory.

    After the test, the stage ends all of their processes.
    """
    if "witness" in request.fixturenames:
        # Pytest tears fixtures down in reverse order. The fork server must outlive the fixture
        # `stage`, so it must be created first.
        request.getfixturevalue("forkserver")
    with stage_in(tmp_path) as stage:
        yield stage


@pytest.fixture
def witness(tmp_path: Path, forkserver: ForkServer) -> Iterator[Callable[..., Witness]]:
    """Yield a function that starts a flow process under an oracle, which is a `Witness`.

    The oracle is a process that checks whether a descendant of the flow process survives. All
    processes end with the test.
    """
    witnesses: list[Witness] = []

    def make(*components: object, **options: object) -> Witness:
        witnesses.append(Witness(forkserver, tmp_path, *components, **options))  # type: ignore[arg-type]
        return witnesses[-1]

    yield make
    for witness in witnesses:
        witness.clear()
