"""What of a request and of an answer is passed on, and whose session a request belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import CIMultiDict
from pydantic_core import from_json

from tasks.rollout.router import Entrypoint

#: Concern one connection only. Source: RFC 9110, section 7.6.1, and the older Keep-Alive.
_HOP_BY_HOP = (
    "Connection",
    "Keep-Alive",
    "Proxy-Connection",
    "Proxy-Authenticate",
    "Proxy-Authorization",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
)
#: A session of the body is looked for in bodies up to this size, in bytes: a parse takes time.
SESSION_BODY_BYTES = 1024 * 1024
#: Without one of these keys a body is not parsed. `"user"` as a role is no key.
_SESSION_KEY = re.compile(rb'"(?:session_id|user)"\s*:')


def asked(headers: Mapping[str, str], *, with_authorization: bool) -> CIMultiDict[str]:
    """The headers for the server, of those of a client.

    Args:
        with_authorization: False where that header holds the gateway's own token.
    """
    passed = _end_to_end(headers)
    # The client speaks to the gateway, which has already said 100 where that was expected.
    passed.popall("Host", None)
    passed.popall("Expect", None)
    if not with_authorization:
        passed.popall("Authorization", None)
    return passed


def answered(headers: Mapping[str, str], entrypoint: Entrypoint) -> CIMultiDict[str]:
    """The headers for the client, of those of the server that has answered."""
    passed = _end_to_end(headers)
    passed["X-Muster-Rank"] = str(entrypoint.rank)
    passed["X-Muster-Epoch"] = str(entrypoint.epoch)
    return passed


def session_of(headers: Mapping[str, str], body: bytes | None) -> str | None:
    """What requests of one session have in common: a header, else a key of their JSON body."""
    if (session := headers.get("X-Session-Id")) is not None:
        return session or None
    if not body or len(body) > SESSION_BODY_BYTES or _SESSION_KEY.search(body) is None:
        return None
    if "json" not in headers.get("Content-Type", "").lower() or "Content-Encoding" in headers:
        return None
    try:
        content = from_json(body)
    except ValueError:
        return None  # the server says what is wrong with it
    if isinstance(content, dict):
        for key in ("session_id", "user"):
            found = content.get(key)
            if isinstance(found, (str, int)) and found != "":
                return str(found)
    return None


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    passed = CIMultiDict(headers)
    named = passed.getall("Connection", ())
    for name in _HOP_BY_HOP:
        passed.popall(name, None)
    for name in ",".join(named).split(",") if named else ():
        # What frames the body is no matter of the connection, whatever is said of it.
        if (bare := name.strip()).lower() not in ("", "content-length"):
            passed.popall(bare, None)
    return passed
