"""Muster works although other users of the machine share `/tmp` and the virtual environment."""

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

from tests.support.host_environment import ROOT, wait_for
from tests.support.prefect_api import send_request
from tests.support.shared_places import attack, needs_another_user, shared_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yield a folder like `/tmp` that contains a file of another user, the attacker.

    The file has the name of the folder that Prefect's runner wants to create there.
    """
    with shared_folder() as directory:
        # The attacker creates a file, because a folder would not disturb the runner: the runner
        # belongs to root in this test, and root can write to the folders of all users.
        attack("touch", directory / "runner_storage")
        yield directory


@needs_another_user
@pytest.mark.parametrize(
    ("module_and_arguments", "start_pattern"),
    [
        pytest.param(
            ("deployments.upkeep",), "is being served", id="upkeep", marks=pytest.mark.thorough
        ),
        pytest.param(
            ("deployments.worker", "--pool", "POOL", "--name", "n1"),
            "Worker .* started!",
            id="worker",
        ),
    ],
)
def test_processes_start_although_another_user_took_a_name_in_tmp(
    shared: Path,
    muster_home: Path,
    prefect_url: str,
    tmp_path: Path,
    module_and_arguments: tuple[str, ...],
    start_pattern: str,
) -> None:
    pool = f"shared-{uuid4().hex[:8]}"
    log = tmp_path / "log"
    send_request("POST", f"{prefect_url}/work_pools/", {"name": pool, "type": "process"})
    command = [pool if word == "POOL" else word for word in module_and_arguments]
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
        # The process reports its start or an error only after Prefect's runner has tried to create
        # a folder. So wait for the report, and then check the folder.
        wait_for(
            lambda: re.search(
                f"{start_pattern}|Error|Muster could not serve the flows", log.read_text()
            ),
            "the process reports its start or an error",
            within_s=120,
        )
        storage = wait_for(
            lambda: [*muster_home.glob("temp/*/*/runner_storage")],
            "the runner has made its folder",
            within_s=30,
        )

        assert (
            "Error" not in log.read_text()
            and "Muster could not serve the flows" not in log.read_text()
        )
        assert process.poll() is None
        assert len(storage) == 1
    finally:
        process.terminate()
        process.wait(60)
        send_request("DELETE", f"{prefect_url}/work_pools/{pool}")
    assert [*muster_home.glob("temp/*/*/")] == []
    assert [path.name for path in shared.iterdir()] == ["runner_storage"]


def test_pages_of_a_server_are_served_from_its_home(prefect_url: str) -> None:
    # The server of the test session was started with this MUSTER_HOME.
    home = Path(os.environ["MUSTER_HOME"])

    page = httpx.get(prefect_url.removesuffix("/api"), follow_redirects=True, trust_env=False)

    assert page.status_code == 200 and "<html" in page.text
    page_folders = {path.parent.name for path in home.glob("cache/prefect-ui-*/*/UI_SERVE_BASE")}
    assert page_folders == {"v1", "v2"}
    [cache] = home.glob("cache/prefect-ui-*")
    assert cache.name == f"prefect-ui-{prefect.__version__}"
