"""Tests of `replace_nul`: the server's database refuses text with NUL characters."""

from __future__ import annotations

import json

import httpx
import pytest
from prefect.client.base import PrefectHttpxSyncClient

import tasks.server  # noqa: F401  (changes Prefect's clients)
from tasks.server.storable_text import replace_nul


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bad header \0\0 in shard 3", "bad header \ufffd\ufffd in shard 3"),
        ("\\\0", "\\\ufffd"),
        ("\\\\\0end", "\\\\\ufffdend"),
        ("the six characters \\u0000 stay", "the six characters \\u0000 stay"),
        ("a backslash before them: \\\\u0000", "a backslash before them: \\\\u0000"),
        ("nothing to replace", "nothing to replace"),
    ],
)
def test_each_nul_in_json_is_replaced_and_no_other_text_changes(text: str, expected: str) -> None:
    stored = json.loads(replace_nul(json.dumps({text: [text]}).encode()))

    assert stored == {expected: [expected]}


@pytest.mark.parametrize("how", ["json", "content"])
def test_clients_of_prefect_send_no_nul(how: str) -> None:
    bodies: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        assert int(request.headers["Content-Length"]) == len(request.content)
        return httpx.Response(200)

    message = {"message": "ValueError: \0"}
    body = {"json": message} if how == "json" else {"content": json.dumps(message)}
    # When Prefect creates a client, Muster replaces the client's transport, to check which user
    # owns the server. So the test sets its own transport afterwards.
    with PrefectHttpxSyncClient(base_url="http://server", enable_csrf_support=False) as client:
        client._transport = httpx.MockTransport(answer)
        client.post("/flow_runs", **body)  # type: ignore[arg-type]

    assert bodies == [{"message": "ValueError: \ufffd"}]
