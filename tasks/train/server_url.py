"""Read the address of the Prefect server, and import Prefect only if a server may be configured."""

from __future__ import annotations

import sys

from tasks.spec.prefect_address import may_have_server


def may_have_prefect_server() -> bool:
    """Return False if it is certain that no Prefect server is configured, otherwise True.

    If Prefect is already imported, the result is always True, because this process may have changed
    the settings of Prefect.
    """
    return "prefect" in sys.modules or may_have_server()


def read_server_url() -> str | None:
    """Return the address of the Prefect server, or None if no server is configured."""
    if not may_have_prefect_server():
        return None
    from prefect.settings import PREFECT_API_URL

    url: str | None = PREFECT_API_URL.value()
    return url
