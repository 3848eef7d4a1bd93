"""Read the example configuration files of `deployments/production/`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.host_environment import ROOT

PRODUCTION = ROOT / "deployments" / "production"
#: Environment variables with addresses and directories. `read_settings` ignores these variables in
#: the example files, because tests use their own addresses and directories.
_ADDRESSES_AND_DIRECTORIES = frozenset(
    {
        "PREFECT_SERVER_API_HOST",
        "PREFECT_SERVER_API_PORT",
        "PREFECT_SERVER_UI_API_URL",
        "PREFECT_API_URL",
        "MUSTER_HOME",
        "PREFECT_HOME",
    }
)
#: Time limit of the migration of a database, in seconds.
_MIGRATION_TIMEOUT_S = 300.0


def read_variables(path: Path, *, switched_off: bool = False) -> dict[str, str]:
    """Return a mapping from name to value, with the variables in an environment file.

    Args:
        path: The environment file.
        switched_off: True to include the variables that are commented out, `#NAME=value`.
    """
    variables = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#") if switched_off else line
        name, equals_sign, value = text.partition("=")
        if equals_sign and name.replace("_", "").isalnum() and name == name.upper():
            variables[name] = value
    return variables


def read_settings(name: str) -> dict[str, str]:
    """Return the variables of an example environment file.

    The result does not contain the variables with addresses and directories, which are listed in
    `_ADDRESSES_AND_DIRECTORIES`.
    """
    variables = read_variables(PRODUCTION / name)
    return {
        variable: value
        for variable, value in variables.items()
        if variable not in _ADDRESSES_AND_DIRECTORIES
    }


def migrate(settings: Mapping[str, str], home: Path) -> None:
    """Migrate the database of a Prefect server to the installed release of Prefect.

    Args:
        settings: Environment variables of the server.
        home: PREFECT_HOME of the server.

    Raises:
        AssertionError: The migration failed.
    """
    home.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        (sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"),
        env={**os.environ, "PREFECT_HOME": str(home), **settings},
        capture_output=True,
        text=True,
        timeout=_MIGRATION_TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
