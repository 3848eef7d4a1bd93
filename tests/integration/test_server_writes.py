"""Several clients, which do not retry, write at the same time to a Prefect server on SQLite.

Every request must succeed at the first try.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

pytestmark = pytest.mark.slow

WRITERS = 6
ROUNDS = 15


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    """Yield the address of the Prefect server that all clients in this process use."""
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


@pytest.fixture
def client(api: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api, timeout=60, trust_env=False) as client:
        yield client


def test_simultaneous_writes_all_succeed(client: httpx.Client) -> None:
    flow = client.post("/flows/", json={"name": "train"}).json()["id"]
    deployment_fields = {"name": "quickstart", "flow_id": flow}
    deployment = client.post("/deployments/", json=deployment_fields).json()["id"]
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


def test_server_can_read_during_its_own_write_transaction(client: httpx.Client) -> None:
    """The server pauses a queue in a write transaction, and meanwhile reads the pool.

    The read uses a second connection to the database.
    """
    client.post("/work_pools/", json={"name": "gang", "type": "process"})

    answer = client.patch("/work_pools/gang/queues/default", json={"is_paused": True})

    assert answer.is_success
    assert client.get("/work_pools/gang/queues/default").json()["is_paused"]
