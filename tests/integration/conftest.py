"""What the integration tests share."""

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
    """The wheel of the checkout."""
    with _made_once(tmp_path_factory, "dist") as (place, is_made):
        return next(place.glob("*.whl")) if is_made else built_wheel(place)


@pytest.fixture(scope="session")
def muster(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program `muster` of a venv that has the wheel."""
    with _made_once(tmp_path_factory, "muster") as (place, is_made):
        venv = place / "venv"
        return venv / "bin/muster" if is_made else program_in_venv(wheel, venv)


@contextmanager
def _made_once(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """A directory for all workers of the session, and whether one of them has made what is in it;
    the others wait."""
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place, (place / "made").exists()
        (place / "made").touch()


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Real components in a directory of the test's own; nothing of them outlives the test."""
    if "witness" in request.fixturenames:
        request.getfixturevalue("forkserver")  # which is of all tests, so older than the stage
    with stage_in(tmp_path) as stage:
        yield stage


@pytest.fixture
def witness(tmp_path: Path, forkserver: ForkServer) -> Iterator[Callable[..., Witness]]:
    """Makes processes of flow runs, each under an oracle, and ends those that a test has left."""
    made: list[Witness] = []

    def make(*components: object, **more: object) -> Witness:
        made.append(Witness(forkserver, tmp_path, *components, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.clear()
