"""A run ends in its true state on a server with PostgreSQL, which stores no NUL characters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gang_pool import GangPool, gang_pool
from tests.support.host_environment import Run, Server
from tests.support.postgres import explain_missing_postgres, postgres
from tests.support.production import migrate, read_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(explain_missing_postgres()),
        reason=explain_missing_postgres() or "PostgreSQL is available",
    ),
]

#: Code of a training whose error contains two NUL characters.
FAILING = "raise ValueError('bad header \\0\\0 in shard 3')"
#: The error as the server stores it, with U+FFFD in place of each NUL character.
STORED_ERROR = "bad header \ufffd\ufffd in shard 3"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    """Yield a pool with a worker, on a server with PostgreSQL."""
    directory = tmp_path_factory.mktemp("postgresql")
    with postgres() as database:
        url = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database.url}
        settings = {**read_settings("server.env"), **url}
        migrate(settings, directory / "server")
        server = Server(directory / "server", settings=settings)
        with gang_pool(directory, server=server) as pool:
            pool.start_worker()
            yield pool


def make_spec(**keys: Any) -> dict[str, Any]:
    components = {"trainer": {"command": [sys.executable, "-c", FAILING]}}
    return {"name": "nul", "workload": "sft", "components": components, **keys}


def find_artifacts(pool: GangPool, run: Run) -> list[str]:
    """Return the texts of all artifacts of a run."""
    only_of_run = {"flow_run_id": {"any_": [run.flow_run_id]}}
    artifacts = pool.host_env.post("/artifacts/filter", limit=200, artifacts=only_of_run)
    return [str(artifact["data"]) for artifact in artifacts]


def test_run_that_fails_with_nul_in_its_error_is_failed_on_postgresql(pool: GangPool) -> None:
    run = pool.submit(make_spec())
    pool.wait_until_all_end(120)

    ended = run.flow_run()
    assert ended["state_type"] == "FAILED"
    assert "USER_ERROR" in ended["state"]["message"]
    assert STORED_ERROR in ended["state"]["message"]
    assert any(STORED_ERROR in text for text in find_artifacts(pool, run))


def test_retried_run_with_nul_in_its_error_is_failed_on_postgresql(pool: GangPool) -> None:
    retry = {"USER_ERROR": {"attempts": 2, "delay_s": 1}}
    run = pool.submit(make_spec(retry=retry))
    pool.wait_until_all_end(120)

    ended = run.flow_run()
    assert ended["state_type"] == "FAILED"
    assert len(run.record()["attempts"]) == 2
    assert any(STORED_ERROR in text for text in find_artifacts(pool, run))


def test_direct_run_with_nul_in_its_error_is_failed_on_postgresql(pool: GangPool) -> None:
    process, run = pool.start(make_spec())

    code = process.wait(120)

    state, message = run.state()
    assert code == 1
    assert state == "FAILED"
    assert STORED_ERROR in message
