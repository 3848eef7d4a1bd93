"""Who may use the gateway."""

from __future__ import annotations

import json

import pytest

from tasks.rollout.gateway import Access
from tasks.rollout.topology import is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),  # all of 127/8
        ("::1", True),
        ("[::1]", True),  # as in a URL
        ("LocalHost", True),
        ("0.0.0.0", False),  # everywhere
        ("", False),  # everywhere, for a socket
        ("10.0.0.7", False),
        ("localhost.example.org", False),  # a name that anybody may own
        ("node-7", False),
    ],
)
def test_only_what_this_machine_alone_reaches_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_gateway_that_others_reach_is_refused_without_a_token() -> None:
    with pytest.raises(ValueError, match=r"on 0\.0\.0\.0 can be reached .* needs a token"):
        Access("0.0.0.0", None)


@pytest.mark.parametrize(
    ("authorization", "may"),
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
def test_the_token_is_needed_on_every_request(authorization: str | None, may: bool) -> None:
    access = Access("0.0.0.0", "secret")
    headers = {} if authorization is None else {"Authorization": authorization}

    found = [access.find_refusal(headers, is_order=is_order) for is_order in (False, True)]

    assert [one is None for one in found] == [may, may]
    assert all(one.status == 401 for one in found if one)


@pytest.mark.parametrize(
    ("token", "request_status", "order_status"),
    [("orders", None, None), ("requests", None, 403), ("other", 401, 401)],
)
def test_orders_have_a_token_of_their_own(
    token: str, request_status: int | None, order_status: int | None
) -> None:
    access = Access("127.0.0.1", "requests", "orders")
    headers = {"Authorization": f"Bearer {token}"}

    found = [access.find_refusal(headers, is_order=is_order) for is_order in (False, True)]

    assert [one and one.status for one in found] == [request_status, order_status]


def test_a_refusal_says_what_to_send() -> None:
    found = Access("0.0.0.0", "secret").find_refusal({})

    assert found is not None
    assert found.headers["WWW-Authenticate"] == "Bearer"
    error = json.loads(found.body)["error"]
    assert error["type"] == "unauthorized" and error["retryable"] is False
    assert "Authorization: Bearer" in error["message"] and "secret" not in error["message"]


def test_without_a_token_other_users_of_the_machine_may_nothing() -> None:
    access = Access("127.0.0.1", None)

    for is_order in (False, True):
        found = access.find_refusal({}, is_order=is_order, is_own=False)
        assert found is not None
        assert (found.status, "`require_token: true`" in (found.text or "")) == (403, True)
    assert Access("127.0.0.1", "secret").find_refusal({"Authorization": "Bearer secret"}) is None


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({"Host": "127.0.0.1:8000"}, True),
        ({"Host": "localhost:8000"}, True),
        ({"Host": "[::1]:8000"}, True),
        ({}, True),  # HTTP/1.0
        ({"Host": "evil.example:8000"}, False),  # a name that was rebound to this machine
        ({"Host": "127.0.0.1:8000.evil.example"}, False),
        ({"Host": "127.0.0.1:9000"}, False),  # somebody else's port
        ({"Host": "0.0.0.0:8000"}, False),  # reaches loopback from a browser, too
        ({"Host": "evil@127.0.0.1:8000"}, False),
        ({"Host": ""}, False),
        ({"Host": "[127.0.0.1"}, False),  # no host at all
        ({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}, True),
        # a page of another server of this machine, which may be another user's
        ({"Host": "127.0.0.1:8000", "Origin": "http://localhost:4200"}, False),
        ({"Host": "127.0.0.1:8000", "Origin": "https://evil.example"}, False),  # a page elsewhere
        ({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000.evil.example"}, False),
        ({"Host": "127.0.0.1:8000", "Origin": "null"}, False),  # ... that hides where
        # a page that asks without an Origin, as for a picture
        ({"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "same-site"}, False),
        ({"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "none"}, True),  # typed by a person
    ],
)
def test_without_a_token_no_foreign_page_may_ask(headers: dict[str, str], may: bool) -> None:
    access = Access("127.0.0.1", None)
    access.port = 8000

    assert (access.find_refusal(headers, is_order=True) is None) is may
    assert (access.find_refusal(headers) is None) is may


def test_a_connection_of_which_the_user_is_unknown_is_refused() -> None:
    access = Access("127.0.0.1", None)

    found = access.find_refusal({}, is_own=False, unknown_because="[Errno 24] Too many open files")

    assert found is not None
    assert (found.status, "Too many open files" in found.text) == (503, True)
