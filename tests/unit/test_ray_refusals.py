"""Error statuses of a Ray dashboard: which requests may be repeated."""

from __future__ import annotations

import pytest

from tasks.ray.dashboard import Dashboard, Denied, NoAnswer
from tests.support.web import serving


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, Denied), (404, Denied), (408, NoAnswer), (429, NoAnswer), (500, NoAnswer)],
)
@pytest.mark.asyncio
async def test_busy_dashboard_may_be_asked_again(status: int, error: type[Exception]) -> None:
    with serving(lambda *_: (status, {"msg": "Max number of in-progress requests"})) as address:
        dashboard = Dashboard(address)
        with pytest.raises(error, match=f"answered {status}"):
            await dashboard.nodes()
        await dashboard.aclose()
