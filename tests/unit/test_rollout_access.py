"""The gateway refuses requests of clients that may not use it."""

from __future__ import annotations

import json

import pytest

from tasks.rollout.gateway import Access
from tasks.rollout.topology import is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),  # 127.0.0.0/8 is loopback
        ("::1", True),
        ("[::1]", True),  # the form of a URL
        ("LocalHost", True),
        ("0.0.0.0", False),  # all interfaces
        ("", False),  # a socket without an address listens on all interfaces
        ("10.0.0.7", False),
        ("localhost.example.org", False),  # a public host name
        ("node-7", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_gateway_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(ValueError, match=r"other machines can reach the address 0\.0\.0\.0"):
        Access("0.0.0.0", None)


@pytest.mark.parametrize(
    ("authorization", "is_accepted"),
    [
        ("Bearer secret", True),
        ("bearer secret", True),  # the scheme is case-insensitive
        ("Bearer  secret ", True),
        ("Bearer Secret", False),
        ("Bearer secret2", False),
        ("Bearer", False),
        ("Basic secret", False),
        ("secret", False),
        ("Bearer secr\udce9t", False),  # bytes that are not UTF-8
        (None, False),
    ],
)
def test_every_request_needs_the_token(authorization: str | None, is_accepted: bool) -> None:
    access = Access("0.0.0.0", "secret")
    headers = {} if authorization is None else {"Authorization": authorization}

    refusals = [access.find_refusal(headers, is_order=is_order) for is_order in (False, True)]

    assert [refusal is None for refusal in refusals] == [is_accepted, is_accepted]
    assert all(refusal.status == 401 for refusal in refusals if refusal)


@pytest.mark.parametrize(
    ("token", "request_status", "order_status"),
    [("orders", None, None), ("requests", None, 403), ("other", 401, 401)],
)
def test_orders_need_the_order_token(
    token: str, request_status: int | None, order_status: int | None
) -> None:
    access = Access("127.0.0.1", "requests", "orders")
    headers = {"Authorization": f"Bearer {token}"}

    refusals = [access.find_refusal(headers, is_order=is_order) for is_order in (False, True)]

    statuses = [refusal and refusal.status for refusal in refusals]
    assert statuses == [request_status, order_status]


def test_refusal_names_the_authorization_header() -> None:
    refusal = Access("0.0.0.0", "secret").find_refusal({})

    assert refusal is not None
    assert refusal.headers["WWW-Authenticate"] == "Bearer"
    error = json.loads(refusal.body)["error"]
    assert error["type"] == "unauthorized" and error["retryable"] is False
    assert "Authorization: Bearer" in error["message"] and "secret" not in error["message"]


@pytest.mark.parametrize("is_order", [False, True])
def test_gateway_without_a_token_refuses_other_users(is_order: bool) -> None:
    access = Access("127.0.0.1", None)

    refusal = access.find_refusal({}, is_order=is_order, is_own=False)

    assert refusal is not None
    assert refusal.status == 403
    assert "`require_token: true`" in refusal.text


def test_gateway_with_a_token_accepts_the_token_on_loopback() -> None:
    access = Access("127.0.0.1", "secret")

    assert access.find_refusal({"Authorization": "Bearer secret"}) is None


@pytest.mark.parametrize(
    ("headers", "is_accepted"),
    [
        ({"Host": "127.0.0.1:8000"}, True),
        ({"Host": "localhost:8000"}, True),
        ({"Host": "[::1]:8000"}, True),
        ({}, True),  # in HTTP/1.0, Host may be missing
        ({"Host": "evil.example:8000"}, False),  # an attack by DNS rebinding
        ({"Host": "127.0.0.1:8000.evil.example"}, False),
        ({"Host": "127.0.0.1:9000"}, False),  # another program's port
        ({"Host": "0.0.0.0:8000"}, False),  # not a loopback address
        ({"Host": "evil@127.0.0.1:8000"}, False),
        ({"Host": ""}, False),
        ({"Host": "[127.0.0.1"}, False),  # malformed
        ({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}, True),
        # a web page of another server on this machine sent the request, so the request is refused
        ({"Host": "127.0.0.1:8000", "Origin": "http://localhost:4200"}, False),
        # a page of another website sent the request, so the request is refused
        (
            {"Host": "127.0.0.1:8000", "Origin": "https://evil.example"},
            False,
        ),
        ({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000.evil.example"}, False),
        ({"Host": "127.0.0.1:8000", "Origin": "null"}, False),  # a page that hides its origin
        # a page of another site loads this URL, for example as a picture. The request has no Origin
        # header, but is refused because of its Sec-Fetch-Site header
        ({"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "same-site"}, False),
        # a browser sends this header if a person has typed the URL, so the request is accepted
        (
            {"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "none"},
            True,
        ),
    ],
)
def test_gateway_without_a_token_refuses_foreign_pages(
    headers: dict[str, str], is_accepted: bool
) -> None:
    access = Access("127.0.0.1", None)
    access.port = 8000

    assert (access.find_refusal(headers, is_order=True) is None) is is_accepted
    assert (access.find_refusal(headers) is None) is is_accepted


def test_connection_of_an_unknown_user_is_refused() -> None:
    access = Access("127.0.0.1", None)
    reason = "[Errno 24] Too many open files"

    refusal = access.find_refusal({}, is_own=False, unknown_because=reason)

    assert refusal is not None
    assert refusal.status == 503
    assert "Too many open files" in refusal.text
