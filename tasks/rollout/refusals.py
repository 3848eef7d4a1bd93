"""What the gateway itself answers when it can't pass on a server's answer."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error answer of the gateway's own."""

    status: int
    #: For programs: `no_active_server`, `draining`, `server_lost`, `bad_request`, ...
    type: str
    #: What was found, and what to do.
    message: str
    #: The same request may be sent again as it is: nothing of an answer to it was lost.
    is_retryable: bool = False
    #: When a client may come again, in seconds; None: not said.
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    @property
    def body(self) -> bytes:
        """JSON in the form of OpenAI's errors, which its clients show."""
        error = {"type": self.type, "message": self.message, "retryable": self.is_retryable}
        return json.dumps({"error": error}).encode()

    def as_event(self) -> bytes:
        """The same within a stream of events whose last event may be incomplete."""
        return b"\n\nevent: error\ndata: " + self.body + b"\n\n"


def nobody(reason: str, *, is_draining: bool) -> Refusal:
    """There is no server to send a request to just now."""
    kind = "draining" if is_draining else "no_active_server"
    return Refusal(status=503, type=kind, message=reason, is_retryable=True, retry_after_s=1)


def lost(message: str) -> Refusal:
    """A server took the request and did not answer it to the end."""
    return Refusal(status=502, type="server_lost", message=message, is_retryable=True)


def overloaded(message: str) -> Refusal:
    """The gateway has no connection left for a request."""
    remedy = "send fewer at once, or raise its limit of open files (ulimit -n)"
    return Refusal(
        status=503,
        type="overloaded",
        message=f"{message}: {remedy}",
        is_retryable=True,
        retry_after_s=1,
    )


def bad(message: str) -> Refusal:
    """The request itself has to be mended."""
    return Refusal(status=400, type="bad_request", message=message)
