"""A second user of the machine, for tests that attack as one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

#: The user id and group id of the attacker, `nobody` on most systems.
ATTACKER = 65534

needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)


@contextmanager
def shared_folder(mode: int = 0o1777) -> Iterator[Path]:
    """A folder that the attacker can enter, as `/tmp` is one; removed at the end."""
    before = os.umask(0o022)
    try:
        place = Path(tempfile.mkdtemp(prefix="muster-shared-", dir="/tmp"))
        place.chmod(mode)
        yield place
    finally:
        os.umask(before)
        shutil.rmtree(place)


def attack(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as the attacker, to its end. Raises: CalledProcessError, if it fails."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd or "/",
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **(env or {})},
        user=ATTACKER,
        group=ATTACKER,
        extra_groups=(),
        umask=0o022,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
