"""Connections of Prefect's clients to a server that ends while a connection is opened."""

from __future__ import annotations

import asyncio

import pytest
from prefect._internal.websockets import websocket_connect
from prefect.client.orchestration import get_client
from prefect.events.clients import PrefectEventsClient
from prefect.runner._event_emitter import EventEmitter
from prefect.settings import PREFECT_API_URL, temporary_settings
from websockets.exceptions import InvalidMessage

from tasks.server.trusted_clients import guard_prefect_clients

guard_prefect_clients()


class EndingServer:
    """A server that receives the request for a websocket, answers with some bytes, and ends."""

    def __init__(self, answer: bytes = b"") -> None:
        self.connections = 0
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answer)
        writer.close()

    async def listen(self) -> tuple[asyncio.Server, int]:
        """Start to listen on a free port, and return the listening server and the port."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]


def test_server_that_ends_during_the_handshake_resets_the_connection() -> None:
    async def connect() -> None:
        listener, port = await EndingServer().listen()
        async with listener:
            await websocket_connect(f"ws://127.0.0.1:{port}")

    with pytest.raises(ConnectionResetError, match="did not receive a valid HTTP response"):
        asyncio.run(connect())


def test_answer_that_is_not_http_is_no_reset() -> None:
    async def connect() -> None:
        listener, port = await EndingServer(b"220 mail.example ESMTP\r\n\r\n").listen()
        async with listener:
            await websocket_connect(f"ws://127.0.0.1:{port}")

    with pytest.raises(InvalidMessage):
        asyncio.run(connect())


def test_server_that_ends_during_the_handshake_does_not_stop_the_start_of_a_run() -> None:
    server = EndingServer()

    async def enter() -> None:
        listener, port = await server.listen()
        url = f"http://127.0.0.1:{port}/api"
        async with listener:
            with temporary_settings({PREFECT_API_URL: url}):
                async with (
                    get_client() as client,
                    # When a worker starts the process of a flow run, the worker opens an
                    # `EventEmitter`, which connects to the server.
                    EventEmitter(
                        runner_name="worker",
                        client=client,
                        get_events_client=lambda: PrefectEventsClient(reconnection_attempts=1),
                    ),
                ):
                    pass

    asyncio.run(enter())

    assert server.connections >= 1
