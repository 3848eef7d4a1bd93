"""Read the address of the Prefect server from the configuration, without importing Prefect.

The import of Prefect takes seconds, and Prefect keeps the settings that it has read at its import.
"""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from pathlib import Path

#: Files in the working directory that can contain Prefect's settings. Each file name is mapped to
#: the path of the TOML table with the settings. The path is empty if the whole file is the table.
_SETTINGS_FILES: dict[str, tuple[str, ...]] = {
    "prefect.toml": (),
    "pyproject.toml": ("tool", "prefect"),
}


def find_configured_server() -> str | None:
    """Return the server address from the environment or from Prefect's active profile.

    Returns:
        The address, or None if neither of the two contains an address.
    """
    if "PREFECT_API_URL" in os.environ:
        return os.environ["PREFECT_API_URL"]
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    with suppress(OSError, ValueError, KeyError, TypeError):
        profiles = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
        active = os.environ.get("PREFECT_PROFILE") or profiles["active"]
        return str(profiles["profiles"][active]["PREFECT_API_URL"])
    return None


def may_have_server() -> bool:
    """Return True if a Prefect server is configured, or if this is not certain."""
    if find_configured_server() or "PREFECT_PROFILES_PATH" in os.environ:
        return True
    try:
        if "PREFECT_" in _read(".env").upper():
            return True
        for name, table in _SETTINGS_FILES.items():
            settings = tomllib.loads(_read(name))
            for key in table:
                settings = settings.get(key, {})
            if {"api", "profiles_path"} & settings.keys():
                return True
    except (OSError, ValueError, AttributeError):
        return True
    return False


def _read(name: str) -> str:
    """Return the text of a file in the working directory, or "" if the file does not exist."""
    with suppress(FileNotFoundError):
        return Path(name).read_text(encoding="utf-8")
    return ""
