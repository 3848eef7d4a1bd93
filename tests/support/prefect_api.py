"""Asking a Prefect server over HTTP, as its own client does."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import httpx

#: Of one request. On SQLite, Prefect 3.8 keeps a writer waiting for as long as 60 s at times.
_ANSWER_WITHIN_S = 90.0
#: For all requests together.
_WITHIN_S = 180.0
_AGAIN_AFTER_S = 0.2


def ask(method: str, url: str, content: Any = None, *, password: str = "") -> Any:
    """The server's answer, from JSON; None where it is empty.

    A server on SQLite answers 503 while another of its writers holds the database, and Prefect's
    own client then asks again. So does this, for any method: what was answered with 503 has been
    rolled back, so that it is not done twice.

    Args:
        content: sent as JSON; None: nothing is sent.
        password: `user:password` of the server; empty: it has none.

    Raises: httpx.HTTPStatusError, for an answer that is no 2xx, or is still 503 after 180 s;
        httpx.TransportError, when there is none.
    """
    deadline = time.monotonic() + _WITHIN_S
    auth = httpx.BasicAuth(*password.split(":", 1)) if password else None
    with httpx.Client(trust_env=False, timeout=_ANSWER_WITHIN_S, auth=auth) as client:
        while True:
            answer = client.request(method, url, json=content)
            is_busy = answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
            if not is_busy or time.monotonic() > deadline:
                answer.raise_for_status()
                return answer.json() if answer.content else None
            time.sleep(_AGAIN_AFTER_S)
