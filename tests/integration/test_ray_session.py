"""A program that cleans up temporary files deletes the Ray session of a running stack."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.host_environment import wait_for
from tests.support.own_stack import OwnStack

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1500)]

FINAL_STATUSES = ("SUCCEEDED", "FAILED", "STOPPED")


@pytest.fixture
def stack() -> Iterator[OwnStack]:
    # The paths of Ray's sockets must be short, so the stack does not use the directory of the test.
    place = Path(tempfile.mkdtemp(prefix="m-", dir="/var/tmp"))
    stack = OwnStack(place=place, variables={"MUSTER_GPUS": "0-1"})
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
        shutil.rmtree(place)


def run_ray_job(stack: OwnStack) -> str:
    """Run a Ray job with the token of the cluster, wait for its end, and return its status."""
    token = Path(stack.stack.ray_auth["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    jobs = f"{stack.stack.ray_dashboard}/api/jobs/"
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(headers=headers, trust_env=False, timeout=60) as client:
        submitted = client.post(jobs, json={"entrypoint": "true"}).raise_for_status().json()

        def find_final_status() -> str:
            job = client.get(f"{jobs}{submitted['submission_id']}").raise_for_status().json()
            return str(job["status"]) if job["status"] in FINAL_STATUSES else ""

        return wait_for(find_final_status, "the Ray job ends", 300)


def is_skipped_by_tmpfiles(directory: Path) -> bool:
    """Return True if the directory is locked. systemd-tmpfiles skips locked directories."""
    locked = subprocess.run(["flock", "--exclusive", "--nonblock", str(directory), "true"])
    return locked.returncode == 1


def test_deleted_ray_session_is_named_and_repaired(stack: OwnStack) -> None:
    directory = stack.stack.ray_temp
    is_in_home = directory.parent == stack.home
    is_locked = is_skipped_by_tmpfiles(directory)
    code_before, _ = stack.muster("status")
    shutil.rmtree(directory)

    code_of_broken, report = stack.muster("status")
    code_of_up, output = stack.muster("up", within_s=400)

    assert is_in_home
    assert is_locked
    assert code_before == 0
    assert code_of_broken == 1
    assert "Ray session" in report
    assert f"its directory {directory}/r/session_" in report
    assert "To restart the Ray cluster, run `muster up`" in report
    assert code_of_up == 0, output
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert is_skipped_by_tmpfiles(directory)
    assert stack.muster("status")[0] == 0
    assert run_ray_job(stack) == "SUCCEEDED"
