"""Who may use the gateway: everybody on its own machine, elsewhere whoever has the token."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from tasks.rollout.refusals import Refusal

_SCHEME = "bearer "


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name; any other name counts as elsewhere."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare.lower() == "localhost":
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False


class Access:
    """Judges requests by their headers.

    Args:
        host: where the gateway listens.
        token: what each request has to bring, as OpenAI's clients do with their `api_key`;
            None: nothing, which is refused unless `host` is loopback.

    Raises: ValueError, for a gateway that everybody could use, or a token that no header can hold.
    """

    def __init__(self, host: str, token: str | None) -> None:
        if token is None and not is_loopback(host):
            raise ValueError(
                f"a gateway on {host} can be reached from other machines, so it needs a token; "
                "give it one, or let it listen on 127.0.0.1"
            )
        if token is not None and (not token or not token.isascii() or not token.isprintable()):
            raise ValueError("the gateway's token must be printable ASCII and not empty")
        self._token = None if token is None else token.encode()

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def refusal(self, headers: Mapping[str, str], *, is_order: bool = False) -> Refusal | None:
        """Why a request with these headers is refused; None: it is not.

        Args:
            is_order: it would change the fleet. Without a token, a browser on this machine that
                shows a foreign page must not be able to send it: neither across origins nor by a
                foreign name that resolves to this machine.
        """
        if self._token is not None:
            return None if self._has_token(headers) else _UNAUTHORIZED
        if is_order:
            for name, found in (
                ("Origin", _host_of(headers.get("Origin", "http://localhost"))),
                ("Host", _host_of("//" + headers.get("Host", "localhost"))),
            ):
                if not is_loopback(found):
                    return _foreign(name, found)
        return None

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        assert self._token is not None
        found = headers.get("Authorization", "")
        if found[: len(_SCHEME)].lower() != _SCHEME:
            return False
        given = found[len(_SCHEME) :].strip().encode(errors="surrogateescape")
        return hmac.compare_digest(given, self._token)


_UNAUTHORIZED = Refusal(
    status=401,
    type="unauthorized",
    message="this gateway needs its token: send the header `Authorization: Bearer TOKEN`, "
    "with an OpenAI client as its api_key",
)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _foreign(name: str, found: str) -> Refusal:
    return Refusal(
        status=403,
        type="forbidden",
        message=f"the header {name} names {found or 'nobody'}: without a token, orders are taken "
        "from this machine only; use the gateway's URL with 127.0.0.1, or give it a token",
    )
