"""Several writers at once on a Prefect server on SQLite, as browsers and curl ask: each is answered
at the first time of asking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

pytestmark = pytest.mark.slow

WRITERS, ROUNDS = 6, 15


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


@pytest.fixture
def client(api: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api, timeout=60, trust_env=False) as client:
        yield client


def test_no_writer_is_refused_for_another(client: httpx.Client) -> None:
    flow = client.post("/flows/", json={"name": "train"}).json()["id"]
    asked = {"name": "quickstart", "flow_id": flow}
    deployment = client.post("/deployments/", json=asked).json()["id"]
    writes = (
        partial(client.post, f"/deployments/{deployment}/create_flow_run", json={}),
        partial(client.post, "/artifacts/", json={"key": "summary", "data": "x"}),
        partial(client.post, "/flow_runs/", json={"flow_id": flow, "state": {"type": "RUNNING"}}),
    )

    def write(number: int) -> list[int]:
        return [writes[number % len(writes)]().status_code for _ in range(ROUNDS)]

    with ThreadPoolExecutor(WRITERS) as writers:
        codes = Counter(code for codes in writers.map(write, range(WRITERS)) for code in codes)

    assert codes == {201: WRITERS * ROUNDS}


def test_a_writer_may_read_beside_its_own_transaction(client: httpx.Client) -> None:
    """To pause a queue writes it, then reads its pool on another connection, for an event."""
    client.post("/work_pools/", json={"name": "gang", "type": "process"})

    answer = client.patch("/work_pools/gang/queues/default", json={"is_paused": True})

    assert answer.is_success
    assert client.get("/work_pools/gang/queues/default").json()["is_paused"]
