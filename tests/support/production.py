"""The files of `deployments/production/`, as those who start from them read them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.ground import ROOT

PRODUCTION = ROOT / "deployments" / "production"
#: Where a server and its hosts are: a test's are elsewhere.
_PLACES = frozenset(
    {
        *("PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT", "PREFECT_SERVER_UI_API_URL"),
        *("PREFECT_API_URL", "MUSTER_HOME", "PREFECT_HOME"),
    }
)
_MIGRATED_WITHIN_S = 300.0


def variables_in(path: Path, *, switched_off: bool = False) -> dict[str, str]:
    """Of an environment file.

    Args:
        switched_off: with those that stand in a comment, `#NAME=value`.
    """
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#") if switched_off else line
        name, is_set, value = text.partition("=")
        if is_set and name.replace("_", "").isalnum() and name == name.upper():
            found[name] = value
    return found


def settings_of(name: str) -> dict[str, str]:
    """What one of the files sets, but for places."""
    found = variables_in(PRODUCTION / name)
    return {name: value for name, value in found.items() if name not in _PLACES}


def migrate(settings: Mapping[str, str], home: Path) -> None:
    """The server's database is of this release of Prefect. Raises: AssertionError."""
    home.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        (sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"),
        env={**os.environ, "PREFECT_HOME": str(home), **settings},
        capture_output=True,
        text=True,
        timeout=_MIGRATED_WITHIN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
