"""The queue and its runs return after the Prefect server's database was lost and restored.

The backup is made while the server runs, with the script that operators use.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.gang_pool import gang_pool
from tests.support.host_environment import Server
from tests.support.postgres import explain_missing_postgres, postgres
from tests.support.production import PRODUCTION, migrate, read_settings

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

URL = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


def run_backup_script(url: str, *arguments: str) -> str:
    """Run the backup script with arguments, and return its output; fail if the script fails."""
    result = subprocess.run(
        (PRODUCTION / "backup.sh", *arguments),
        env={**os.environ, URL: url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(
    bool(explain_missing_postgres()), reason=explain_missing_postgres() or "PostgreSQL is available"
)
def test_queue_on_postgresql_is_restored_from_its_backup(tmp_path: Path) -> None:
    with postgres() as database:
        settings = {**read_settings("server.env"), URL: database.url}
        migrate(settings, tmp_path / "server")
        server = Server(tmp_path / "server", settings=settings)
        with gang_pool(tmp_path, server=server) as pool:
            runs = {pool.submit(pool.spec(gpus=number)).flow_run_id for number in (1, 2, 3)}
            backup_file = run_backup_script(database.url, "save", str(tmp_path / "backups"))
            lost_run = pool.submit(pool.spec(gpus=4)).flow_run_id
            server.kill()
            database.run("dropdb", f"--host={database.sockets}", "--force", "prefect")
            database.run("createdb", f"--host={database.sockets}", "prefect")

            run_backup_script(database.url, "restore", backup_file)
            migrate(settings, tmp_path / "server")
            server.start()

            restored_runs = pool.flow_runs()
            pools = pool.host_env.post("/work_pools/filter")
            new_run = pool.submit(pool.spec(gpus=5)).flow_run_id
            accepts_new_runs = new_run in pool.flow_runs()
    assert set(restored_runs) == runs and lost_run not in restored_runs
    assert {run["state_type"] for run in restored_runs.values()} == {"SCHEDULED"}
    assert [pool_record["name"] for pool_record in pools] == ["gang"]
    assert accepts_new_runs


def test_queue_on_sqlite_is_restored_from_its_backup(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    database = tmp_path / "server" / "prefect.db"
    url = f"sqlite+aiosqlite:///{database}"
    with gang_pool(tmp_path, server=server) as pool:
        runs = {pool.submit(pool.spec(gpus=number)).flow_run_id for number in (1, 2, 3)}
        backup_file = run_backup_script(url, "save", str(tmp_path / "backups"))
        pool.submit(pool.spec(gpus=4))
        server.kill()
        database.write_bytes(b"lost")

        run_backup_script(url, "restore", backup_file)
        server.start()

        restored_runs = pool.flow_runs()
    assert set(restored_runs) == runs


def test_only_the_newest_backups_are_kept(tmp_path: Path) -> None:
    database = tmp_path / "prefect.db"
    database.touch()
    url = f"sqlite+aiosqlite:///{database}"
    folder = tmp_path / "backups"
    folder.mkdir()
    for number in range(4):
        old_backup = folder / f"prefect-2026010{number}T000000Z.db"
        old_backup.write_text("old")
        os.utime(old_backup, (number, number))

    backup_file = run_backup_script(url, "save", str(folder), "3")

    names = {path.name for path in folder.iterdir()}
    assert names == {
        "prefect-20260102T000000Z.db",
        "prefect-20260103T000000Z.db",
        Path(backup_file).name,
    }
