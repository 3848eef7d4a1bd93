"""What the gate tells under Logs of flow runs that have no process to tell it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import LogCreate
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED

_log = logging.getLogger(__name__)

#: The name of the logger, as the page of a flow run shows it.
NAME: Final = "muster.queue"
#: While they can't be sent, the oldest are dropped.
_KEPT_AT_MOST = 500
#: Of one request: what is told of the queue next waits for it.
_WITHIN_S = 10.0


class RunLogs:
    """Lines of flow runs, kept until they are sent in one request.

    What they tell is in the states, too: a line that is lost changes nothing.
    """

    def __init__(self, client: PrefectClient) -> None:
        self._client = client
        self._lines: deque[LogCreate] = deque(maxlen=_KEPT_AT_MOST)

    def note(self, flow_run_id: UUID, text: str, level: int = logging.INFO) -> None:
        """Returns at once; the line has the time of now."""
        now = datetime.now(UTC)
        self._lines.append(
            LogCreate(name=NAME, level=level, message=text, timestamp=now, flow_run_id=flow_run_id)
        )

    async def send(self) -> None:
        """Send what was noted; a failure costs a warning, and the lines."""
        lines = [*self._lines]
        self._lines.clear()
        if not lines or not PREFECT_LOGGING_TO_API_ENABLED.value():
            return
        try:
            async with asyncio.timeout(_WITHIN_S):
                await self._client.create_logs(lines)
        except (TimeoutError, httpx.HTTPError, PrefectException) as error:
            _log.warning("%d log lines of flow runs are lost: %r", len(lines), error)
