"""What the users of a machine share, `/tmp` and a virtual environment, keeps none of them out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import prefect
import pytest

from tests.support.ground import ROOT, until
from tests.support.prefect_api import ask
from tests.support.shared_places import attack, needs_another_user, shared_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like `/tmp`, in which the attacker has taken the name of Prefect's runner."""
    with shared_folder() as place:
        # A file: root could go on in a folder of anybody.
        attack("touch", place / "runner_storage")
        yield place


@needs_another_user
@pytest.mark.parametrize(
    ("words", "started"),
    [
        (("deployments.upkeep",), "is being served"),
        (("deployments.worker", "--pool", "POOL", "--name", "n1"), "Worker .* started!"),
    ],
    ids=["upkeep", "worker"],
)
def test_a_name_in_tmp_that_another_user_has_taken_keeps_no_process_of_muster_from_its_work(
    shared: Path,
    muster_home: Path,
    prefect_url: str,
    tmp_path: Path,
    words: tuple[str, ...],
    started: str,
) -> None:
    pool, log = f"shared-{uuid4().hex[:8]}", tmp_path / "log"
    ask("POST", f"{prefect_url}/work_pools/", {"name": pool, "type": "process"})
    command = [pool if word == "POOL" else word for word in words]
    with log.open("w") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", *command),
            cwd=ROOT,
            env={**os.environ, "PREFECT_API_URL": prefect_url, "TMPDIR": str(shared)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        # The runner makes its folder before the process says so, or ends, or tries again.
        until(
            lambda: re.search(f"{started}|Error|served no more", log.read_text()),
            "it has started",
            within_s=120,
        )
        storage = until(
            lambda: [*muster_home.glob("temp/*/*/runner_storage")], "its storage", within_s=30
        )

        assert "Error" not in log.read_text() and "served no more" not in log.read_text()
        assert process.poll() is None
        assert len(storage) == 1
    finally:
        process.terminate()
        process.wait(60)
        ask("DELETE", f"{prefect_url}/work_pools/{pool}")
    assert [*muster_home.glob("temp/*/*/")] == []
    assert [path.name for path in shared.iterdir()] == ["runner_storage"]


def test_the_pages_of_a_server_come_from_its_home(prefect_url: str) -> None:
    # That of the session: its server was started in it.
    home = Path(os.environ["MUSTER_HOME"])

    page = httpx.get(prefect_url.removesuffix("/api"), follow_redirects=True, trust_env=False)

    assert page.status_code == 200 and "<html" in page.text
    places = {path.parent.name for path in home.glob("cache/prefect-ui-*/*/UI_SERVE_BASE")}
    assert places == {"v1", "v2"}
    [cache] = home.glob("cache/prefect-ui-*")
    assert cache.name == f"prefect-ui-{prefect.__version__}"
