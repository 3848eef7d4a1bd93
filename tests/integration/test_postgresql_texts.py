"""A run ends in its true state on a server with PostgreSQL, which stores no NUL characters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.gang_pool import gang_pool
from tests.support.host_environment import Server
from tests.support.postgres import explain_missing_postgres, postgres
from tests.support.production import migrate, read_settings

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.mark.skipif(
    bool(explain_missing_postgres()), reason=explain_missing_postgres() or "PostgreSQL is available"
)
def test_run_that_fails_with_nul_in_its_error_is_failed_on_postgresql(tmp_path: Path) -> None:
    error = "raise ValueError('bad header \\0\\0 in shard 3')"
    with postgres() as database:
        url = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database.url}
        settings = {**read_settings("server.env"), **url}
        migrate(settings, tmp_path / "server")
        server = Server(tmp_path / "server", settings=settings)
        with gang_pool(tmp_path, server=server) as pool:
            pool.start_worker()
            spec = {
                "name": "nul",
                "workload": "sft",
                "components": {"trainer": {"command": [sys.executable, "-c", error]}},
            }
            run = pool.submit(spec)
            pool.wait_until_all_end(120)
            ended = run.flow_run()
            artifacts = pool.host_env.post("/artifacts/filter", limit=200)

    assert ended["state_type"] == "FAILED"
    assert "USER_ERROR" in ended["state"]["message"]
    assert "bad header \ufffd\ufffd in shard 3" in ended["state"]["message"]
    pages = [str(artifact["data"]) for artifact in artifacts]
    assert any("bad header \ufffd\ufffd in shard 3" in page for page in pages)
