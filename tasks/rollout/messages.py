"""What of a request and of an answer is passed on, and whose session a request belongs to."""

from __future__ import annotations

import re

from multidict import CIMultiDict, MultiMapping
from pydantic_core import from_json

from tasks.rollout.router import Entrypoint

#: Concern one connection only. Source: RFC 9110, section 7.6.1, and the older Keep-Alive.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
#: The client speaks to the gateway, which has already said 100 where that was expected.
_NOT_FOR_SERVERS = _HOP_BY_HOP | {"host", "expect"}
_WITHOUT_AUTHORIZATION = _NOT_FOR_SERVERS | {"authorization"}
#: A session of the body is looked for in bodies up to this size, in bytes: a parse takes time.
SESSION_BODY_BYTES = 1024 * 1024
#: Without one of these keys a body is not parsed. `"user"` as a role is no key.
_SESSION_KEY = re.compile(rb'"(?:session_id|user)"\s*:')


def asked(headers: MultiMapping[str], *, with_authorization: bool) -> CIMultiDict[str]:
    """The headers for the server, of those of a client.

    Args:
        with_authorization: False where that header holds the gateway's own token.
    """
    return _without(headers, _NOT_FOR_SERVERS if with_authorization else _WITHOUT_AUTHORIZATION)


def answered(headers: MultiMapping[str], entrypoint: Entrypoint) -> CIMultiDict[str]:
    """The headers for the client, of those of the server that has answered."""
    passed = _without(headers, _HOP_BY_HOP)
    passed["X-Muster-Rank"] = str(entrypoint.rank)
    passed["X-Muster-Epoch"] = str(entrypoint.epoch)
    return passed


def session_of(headers: MultiMapping[str], body: bytes | None) -> str | None:
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


def _without(headers: MultiMapping[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if "Connection" in headers:
        listed = ",".join(headers.getall("Connection"))
        named = {name.strip().lower() for name in listed.split(",")}
        # What frames the body is no matter of the connection, whatever is said of it.
        dropped |= named - {"content-length"}
    return CIMultiDict(pair for pair in headers.items() if pair[0].lower() not in dropped)
