"""Ray jobs whose cluster is unreachable, answers only some requests, or is another server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tasks.ray import submit
from tasks.record.outcome import ComponentFailed
from tasks.spec.failure_kinds import FailureKind
from tests.support.ray_cluster import RayCluster
from tests.support.ray_jobs import WITHIN_S, BreakableProxy, Jobs, run_proxy, wait_until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


@pytest_asyncio.fixture
async def dashboard_proxy(ray_cluster: RayCluster) -> AsyncIterator[BreakableProxy]:
    """Yield a proxy for the Ray dashboard. A test can stop and restart the proxy."""
    async with run_proxy(ray_cluster.address) as dashboard_proxy:
        yield dashboard_proxy


@pytest_asyncio.fixture
async def jobs(
    dashboard_proxy: BreakableProxy, tmp_path: Path, muster_home: Path
) -> AsyncIterator[Jobs]:
    """Yield an object that starts Ray jobs through the proxy.

    After the test, check that no process of a job remains.
    """
    jobs = Jobs(dashboard_proxy.address, tmp_path)
    yield jobs
    await jobs.clear()
    assert jobs.list_processes() == []


@pytest.mark.thorough
async def test_short_loss_of_the_connection_harms_neither_job_nor_log(
    jobs: Jobs, dashboard_proxy: BreakableProxy
) -> None:
    program = "import time\nfor i in range(80): print(i, flush=True); time.sleep(0.1)"
    plan, job = await jobs.launch("python", "-c", program)
    watch = asyncio.create_task(job.until_job_lost())
    await wait_until(
        lambda: plan.command.log.exists() and b"\n3\n" in plan.command.log.read_bytes()
    )

    await dashboard_proxy.stop()
    await wait_until(lambda: "contact.lost" in jobs.told.names)
    await dashboard_proxy.start()
    job_exit = await asyncio.wait_for(job.exited, WITHIN_S)
    leftovers = await job.end()

    is_lost = watch.done()
    watch.cancel()
    assert (job_exit.exit_code, leftovers, is_lost) == (0, (), False)
    assert plan.command.log.read_text().endswith("".join(f"{i}\n" for i in range(80)))
    assert plan.command.log.read_text().count("\n3\n") == 1
    assert jobs.told.names.count("contact.lost") == jobs.told.names.count("contact.back") == 1


async def test_long_loss_of_the_connection_is_lost_contact_and_the_job_is_ended_later(
    jobs: Jobs, dashboard_proxy: BreakableProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, job = await jobs.launch("sleep", "3600", lost_after_s=1.0)
    monkeypatch.setattr(job._take_down, "unknown_after_s", 1.0)

    await dashboard_proxy.stop()
    loss = await asyncio.wait_for(job.until_job_lost(), WITHIN_S)
    unknown_jobs = await job.end()
    status = json.loads(plan.submission_file.read_text())["status"]
    await dashboard_proxy.start()
    leftovers = await job.end()

    assert (loss.kind, loss.rule) == (FailureKind.LOST_CONTACT, "contact-lost")
    assert len(unknown_jobs) == 1 and "is unknown" in unknown_jobs[0]
    assert status == "unknown"
    assert leftovers == ()
    assert jobs.list_processes() == []


async def test_submission_with_a_lost_response_is_not_repeated(
    jobs: Jobs, dashboard_proxy: BreakableProxy
) -> None:
    dashboard_proxy.swallows = b"POST /api/jobs/"

    _, job = await jobs.launch("sleep", "3600")

    assert dashboard_proxy.passed[b"POST /api/jobs/"] == 1
    dashboard_proxy.swallows = b""
    assert jobs.told.names[:1] == ["job.submitted"]
    assert await job.end() == ()


async def test_launch_cancelled_during_the_submission_leaves_no_process(
    jobs: Jobs, dashboard_proxy: BreakableProxy
) -> None:
    job = jobs.job(jobs.plan("sleep", "3600"))
    await job.launch()
    launch = asyncio.create_task(job.until_running())
    await wait_until(
        lambda: any(line.startswith(b"POST /api/jobs/") for line in dashboard_proxy.passed)
    )

    launch.cancel()
    leftovers = await job.end()

    assert leftovers == ()
    await wait_until(lambda: not jobs.list_processes(), 10)


async def test_launch_is_refused_if_no_dashboard_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_FIRST_ANSWER_TIMEOUT_S", 0.5)
    jobs = Jobs("http://127.0.0.1:9", tmp_path)
    job = jobs.job(jobs.plan("sleep", "3600"))

    with pytest.raises(ComponentFailed, match="no Ray dashboard has answered") as refused:
        await job.launch()
        await job.until_running()
    leftovers = await job.end()

    assert (refused.value.reason.kind, leftovers) == (FailureKind.NETWORK, ())


async def test_server_that_is_no_dashboard_is_a_user_error(tmp_path: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    jobs = Jobs(f"http://127.0.0.1:{port}", tmp_path)
    job = jobs.job(jobs.plan("sleep", "3600"))

    with pytest.raises(ComponentFailed, match="403") as refused:
        await job.launch()
        await job.until_running()
    leftovers = await job.end()

    server.close()
    assert (refused.value.reason.kind, leftovers) == (FailureKind.USER_ERROR, ())


@pytest.mark.thorough
async def test_working_directory_that_is_too_large_is_a_user_error(jobs: Jobs) -> None:
    with (jobs.working_dir / "weights.bin").open("wb") as file:
        file.truncate(110 * 1024 * 1024)
    job = jobs.job(jobs.plan("sleep", "3600"))

    with pytest.raises(ComponentFailed, match="cannot send the working directory") as refused:
        await job.launch()
        await job.until_running()
    leftovers = await job.end()

    assert (refused.value.reason.kind, leftovers) == (FailureKind.USER_ERROR, ())
