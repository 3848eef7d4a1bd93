"""Fixtures of all integration tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support.supervised_components", "tests.support.observed_flow")

from tests.support.forkserver import ForkServer  # noqa: E402
from tests.support.observed_flow import ObservedFlow  # noqa: E402
from tests.support.supervised_components import ComponentHarness, create_harness  # noqa: E402
from tests.support.wheel import build_wheel, install_in_venv  # noqa: E402


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of Muster from the checkout, and return the path of the wheel."""
    with _shared_directory(tmp_path_factory, "dist") as (directory, is_ready):
        return next(directory.glob("*.whl")) if is_ready else build_wheel(directory)


@pytest.fixture(scope="session")
def muster(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a virtual environment, and return the path of the command `muster`."""
    with _shared_directory(tmp_path_factory, "muster") as (directory, is_ready):
        venv = directory / "venv"
        return venv / "bin/muster" if is_ready else install_in_venv(wheel, venv)


@contextmanager
def _shared_directory(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a directory that all pytest workers share, and True if the directory is already filled.

    The caller that gets False must fill the directory. Meanwhile, a file lock makes all other
    callers wait.
    """
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory, (directory / "made").exists()
        (directory / "made").touch()


@pytest.fixture
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ComponentHarness]:
    """Yield a `ComponentHarness`, which runs components and supervisors in this test's directory.

    After the test, the harness ends all processes of the components and supervisors.
    """
    if "observed_flow" in request.fixturenames:
        # Create the fork server before the harness. Pytest ends fixtures in reverse order of their
        # creation, so the fork server then outlives the harness.
        request.getfixturevalue("forkserver")
    with create_harness(tmp_path) as harness:
        yield harness


@pytest.fixture
def observed_flow(tmp_path: Path, forkserver: ForkServer) -> Iterator[Callable[..., ObservedFlow]]:
    """Yield a function that starts a flow process, and returns an `ObservedFlow` to control it.

    The flow process is the child of an oracle: a process that checks whether descendants of the
    flow process remain after its end. All these processes are ended after the test.
    """
    witnesses: list[ObservedFlow] = []

    def make(*components: object, **options: object) -> ObservedFlow:
        witnesses.append(ObservedFlow(forkserver, tmp_path, *components, **options))  # type: ignore[arg-type]
        return witnesses[-1]

    yield make
    for observed_flow in witnesses:
        observed_flow.clear()
