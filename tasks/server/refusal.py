"""In words, a Prefect server that answers and lets nobody in who has not the right password."""

from __future__ import annotations

from http import HTTPStatus

import httpx

_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_REMEDY = "set PREFECT_API_AUTH_STRING to what its server has as PREFECT_SERVER_API_AUTH_STRING"


def why_refused(url: str, error: Exception, *, is_set: bool) -> str:
    """What the server of that URL refused, and what to do; empty where it did not refuse.

    Args:
        is_set: whether this process has an auth string, or an API key.
    """
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
    if status not in _REFUSALS:
        return ""
    what = "the PREFECT_API_AUTH_STRING of this process" if is_set else "anybody without a password"
    return f"the Prefect server at {url} does not let in {what} (HTTP {status:d}): {_REMEDY}"
