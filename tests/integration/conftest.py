"""What the integration tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support.stage", "tests.support.witness")

from tests.support.stage import Stage, stage_in  # noqa: E402
from tests.support.wheel import built_wheel, program_in_venv  # noqa: E402
from tests.support.witness import Witness  # noqa: E402


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout."""
    return built_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def muster(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program `muster` of a venv that has the wheel."""
    return program_in_venv(wheel, tmp_path_factory.mktemp("muster") / "venv")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Real components in a directory of the test's own; nothing of them outlives the test."""
    with stage_in(tmp_path) as stage:
        yield stage


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Callable[..., Witness]]:
    """Makes supervising processes, each under an oracle, and ends those that a test has left."""
    made: list[Witness] = []

    def make(*components: object, **more: object) -> Witness:
        made.append(Witness(tmp_path, *components, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.clear()
