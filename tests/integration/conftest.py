"""What the integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support.stage")

from tests.support.stage import Stage, stage_in


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Real components in a directory of the test's own; nothing of them outlives the test."""
    with stage_in(tmp_path) as stage:
        yield stage
