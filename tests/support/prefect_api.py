"""Send requests to the HTTP API of a Prefect server, with the retries of Prefect's own client."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import httpx

#: Time limit of one request, in seconds. With SQLite, Prefect 3.8 delays a write by up to 60 s.
_REQUEST_TIMEOUT_S = 90.0
#: Time limit for repeating a failed request, in seconds since the first try.
_RETRY_WITHIN_S = 180.0
#: Pause before a request is repeated, in seconds.
_RETRY_DELAY_S = 0.2


def send_request(method: str, url: str, content: Any = None, *, password: str = "") -> Any:
    """Send a request to a Prefect server, and return the JSON of its answer.

    A server with SQLite answers with status 503 while another request locks the database. This
    function then repeats the request. A request with the answer 503 has no effect, so no request
    takes effect twice.

    Args:
        method: HTTP method.
        url: URL of the request.
        content: Body of the request, sent as JSON. None for no body.
        password: `user:password` of the server. Empty if the server has no password.

    Returns:
        The content of the answer. None if the answer has no body.

    Raises:
        httpx.HTTPStatusError: The answer has no 2xx status, or still has status 503 after 180 s.
        httpx.TransportError: The server did not answer.
    """
    deadline = time.monotonic() + _RETRY_WITHIN_S
    auth = httpx.BasicAuth(*password.split(":", 1)) if password else None
    with httpx.Client(trust_env=False, timeout=_REQUEST_TIMEOUT_S, auth=auth) as client:
        while True:
            answer = client.request(method, url, json=content)
            is_busy = answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
            if not is_busy or time.monotonic() > deadline:
                answer.raise_for_status()
                return answer.json() if answer.content else None
            time.sleep(_RETRY_DELAY_S)
