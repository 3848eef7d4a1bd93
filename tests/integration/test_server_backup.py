"""The Prefect server's database is saved while the server runs, lost, and brought back: the queue
and its runs are there again. By the script that operators use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.gang_pool import gang_pool
from tests.support.ground import Server
from tests.support.postgres import postgres, why_no_postgres
from tests.support.production import PRODUCTION, migrate, settings_of

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

URL = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


def backup(url: str, *arguments: str) -> str:
    """What the script says. Raises: AssertionError."""
    done = subprocess.run(
        (PRODUCTION / "backup.sh", *arguments),
        env={**os.environ, URL: url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(bool(why_no_postgres()), reason=why_no_postgres() or "it is there")
def test_a_queue_on_postgresql_comes_back_from_its_backup(tmp_path: Path) -> None:
    with postgres() as database:
        settings = {**settings_of("server.env"), URL: database.url}
        migrate(settings, tmp_path / "server")
        server = Server(tmp_path / "server", settings=settings)
        with gang_pool(tmp_path, server=server) as pool:
            runs = {pool.submit(pool.spec(gpus=number)).flow_run_id for number in (1, 2, 3)}
            saved = backup(database.url, "save", str(tmp_path / "backups"))
            lost = pool.submit(pool.spec(gpus=4)).flow_run_id
            server.kill()
            database.run("dropdb", f"--host={database.sockets}", "--force", "prefect")
            database.run("createdb", f"--host={database.sockets}", "prefect")

            backup(database.url, "restore", saved)
            migrate(settings, tmp_path / "server")
            server.start()

            found = pool.flow_runs()
            pools = pool.ground.post("/work_pools/filter")
            after = pool.submit(pool.spec(gpus=5)).flow_run_id
            has_room_for_more = after in pool.flow_runs()
    assert set(found) == runs and lost not in found
    assert {run["state_type"] for run in found.values()} == {"SCHEDULED"}
    assert [one["name"] for one in pools] == ["gang"]
    assert has_room_for_more


def test_a_queue_on_sqlite_comes_back_from_its_backup(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    database = tmp_path / "server" / "prefect.db"
    url = f"sqlite+aiosqlite:///{database}"
    with gang_pool(tmp_path, server=server) as pool:
        runs = {pool.submit(pool.spec(gpus=number)).flow_run_id for number in (1, 2, 3)}
        saved = backup(url, "save", str(tmp_path / "backups"))
        pool.submit(pool.spec(gpus=4))
        server.kill()
        database.write_bytes(b"lost")

        backup(url, "restore", saved)
        server.start()

        found = pool.flow_runs()
    assert set(found) == runs


def test_only_the_newest_backups_stay(tmp_path: Path) -> None:
    database = tmp_path / "prefect.db"
    database.touch()
    url = f"sqlite+aiosqlite:///{database}"
    folder = tmp_path / "backups"
    folder.mkdir()
    for number in range(4):
        old = folder / f"prefect-2026010{number}T000000Z.db"
        old.write_text("old")
        os.utime(old, (number, number))

    saved = backup(url, "save", str(folder), "3")

    names = {path.name for path in folder.iterdir()}
    assert names == {"prefect-20260102T000000Z.db", "prefect-20260103T000000Z.db", Path(saved).name}
