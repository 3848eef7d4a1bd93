"""Runs that are forked from the worker's zygote: what the kernel says of them, and what is left of
them when one of the three is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tasks.processes.tree import descendants, environment_of
from tasks.queue.zygote import ENGINE, Zygote
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.ground import Run, sleepers, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLOW_RUN = "7712f819-7b19-4723-bcbf-b5067028ec50"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[GangPool]:
    with gang_pool(tmp_path) as pool:
        yield pool


def began_as(pid: int) -> bytes:
    """What is alike of processes that are forked from one program, and of no others: the kernel
    lays each program out at random."""
    return Path(f"/proc/{pid}/auxv").read_bytes()


def children_of(pid: int) -> set[int]:
    return {*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}


def zygote_of(worker: int) -> int:
    """Its pid, once it is ready."""

    def found() -> int:
        for pid in children_of(worker):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"muster: ready"):
                return pid
        return 0

    return until(found, "a zygote that is ready")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(pool: GangPool, lasts_s: float = 60.0) -> tuple[Run, int]:
    run = pool.submit(pool.spec(lasts_s=lasts_s)).until_running()
    return run, run.flow_pid()


def crashes(run: Run) -> int:
    states = run.ground.get(f"/flow_run_states/?flow_run_id={run.flow_run_id}")
    return sum(state["type"] == "CRASHED" for state in states)


@pytest.mark.thorough
def test_run_is_forked_and_looks_like_one_that_was_started(pool: GangPool) -> None:
    worker = pool.start_worker()
    zygote = zygote_of(worker.pid)
    run, pid = started(pool)
    at = Path(f"/proc/{pid}")

    assert began_as(pid) == began_as(zygote)
    assert len(os.listdir(f"/proc/{zygote}/task")) == 1
    # As `deployments.stack.runs`, `reconcile`, the queue and `ps` find it.
    assert parent_of(pid) == worker.pid
    assert run.processes() == [pid]
    assert at.joinpath("cmdline").read_text().rstrip("\0").split("\0")[1:] == [
        *("-P", "-m", "flows", run.flow_run_id)
    ]
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert at.joinpath("fd/0").readlink() == Path("/dev/null")
    assert at.joinpath("cgroup").read_text() == Path(f"/proc/{worker.pid}/cgroup").read_text()

    # Nothing of a run hangs on it; the next run has another one.
    os.kill(zygote, signal.SIGKILL)
    another = until(
        lambda: zygote_of(worker.pid) != zygote and zygote_of(worker.pid), "another zygote"
    )
    os.kill(pid, signal.SIGKILL)
    run.until_state("CRASHED")
    next_run, next_pid = started(pool, lasts_s=5.0)

    assert began_as(next_pid) == began_as(another)
    assert crashes(run) == 1
    assert next_run.until_state("COMPLETED")


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)]
)
def test_train_is_forked_too_and_the_command_is_what_is_signalled(
    pool: GangPool, tmp_path: Path, signum: int
) -> None:
    worker = pool.start_worker()
    zygote = zygote_of(worker.pid)
    until((pool.ground.home / "zygote").is_socket, "a zygote that is asked by commands")
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(sleepers()))

    def forked() -> list[int]:
        """Without what the zygote's own children are for a moment."""
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            with suppress(OSError):
                if began_as(pid) == began_as(zygote) and zygote not in (pid, parent_of(pid)):
                    found.append(pid)
        return found

    command = subprocess.Popen(
        [Path(sys.executable).with_name("muster"), "train", file],
        env={**os.environ, **pool.ground.env},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    until(lambda: "trainer: ready" in command.stdout.readline(), "a trainer that is ready")
    [pid] = forked()
    components = descendants(pid)
    os.kill(command.pid, signum)

    shown = command.stdout.read()
    assert command.wait() == (130 if signum == signal.SIGINT else -signum)
    until(lambda: not forked(), "the end of the run's process")
    until(lambda: not any(Path(f"/proc/{one}").exists() for one in components), "all to end")
    assert components
    assert ("cancelled: interrupted by SIGINT" in shown) == (signum == signal.SIGINT)
    assert worker.poll() is None


@pytest.mark.thorough
def test_train_that_is_forked_ignores_what_its_command_ignores(
    pool: GangPool, tmp_path: Path
) -> None:
    pool.start_worker()
    until((pool.ground.home / "zygote").is_socket, "a zygote that is asked by commands")
    trained, stop = tmp_path / "trained.txt", tmp_path / "stop"
    code = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.05)"
    )
    command = [sys.executable, "-c", code, str(trained), str(stop)]
    spec = {"name": "t", "workload": "sft", "components": {"trainer": {"command": command}}}
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    muster = str(Path(sys.executable).with_name("muster"))
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", muster, "train", str(file)],
        env={**os.environ, **pool.ground.env},
        stdout=subprocess.DEVNULL,
    )
    until(trained.exists, "the run trains")
    [owner] = (pool.ground.home / "live").glob("t-sft-*/owner.json")
    flow_pid = int(json.loads(owner.read_text())["process"]["pid"])

    os.kill(process.pid, signal.SIGHUP)
    os.kill(flow_pid, signal.SIGHUP)
    stop.touch()

    assert process.wait(60) == 0
    assert flow_pid != process.pid


@contextmanager
def held_server() -> Iterator[tuple[str, threading.Event, list[str]]]:
    """One that answers once it is let, that it knows no flow run: address, what lets it, paths."""
    let, asked = threading.Event(), list[str]()

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            let.wait(60)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/api", let, asked
        finally:
            let.set()
            server.shutdown()
            thread.join()


async def forked_or_started(
    zygote: Zygote, env: Mapping[str, str], cwd: Path
) -> tuple[asyncio.Task[None], Any]:
    """The task in which a run's process ends, and that process."""
    begun: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ended = asyncio.create_task(
        zygote.run_process(
            [*ENGINE, FLOW_RUN],
            env={**os.environ, **env},
            cwd=cwd,
            stream_output=False,
            task_status=SimpleNamespace(started=begun.set_result),
            task_status_handler=lambda process: process,
        )
    )
    return ended, await begun


async def _until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not is_so():
            await asyncio.sleep(0.02)


def test_process_of_a_run_is_forked_and_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.queue.zygote._FORKS_WITHIN_S", 2.0)
    before = children_of(os.getpid())

    async def scenario() -> None:
        zygote = Zygote()
        zygote.make()
        try:
            await _until(lambda: zygote.is_ready)
            first = zygote_of(os.getpid())
            assert len(os.listdir(f"/proc/{first}/task")) == 1
            with held_server() as (api, let, asked):
                more = {"PREFECT_API_URL": api, "PREFECT__FLOW_RUN_ID": FLOW_RUN, "OWN": "1"}
                ended, process = await forked_or_started(zygote, more, tmp_path)
                await _until(lambda: asked)
                pid, at = process.pid, Path(f"/proc/{process.pid}")

                # As `deployments.stack.runs`, `reconcile`, the queue and `ps` find it.
                assert began_as(pid) == began_as(first)
                assert parent_of(pid) == os.getpid()
                assert at.joinpath("cmdline").read_text().rstrip("\0").split("\0") == [
                    *ENGINE,
                    FLOW_RUN,
                ]
                assert environment_of(pid) == {**os.environ, **more}
                assert os.getsid(pid) == os.getpgid(pid) == pid
                assert at.joinpath("cwd").readlink() == tmp_path
                assert at.joinpath("fd/0").readlink() == Path("/dev/null")

                # It goes on without the zygote, which is made anew; and by that other runs.
                os.kill(first, signal.SIGKILL)
                await _until(lambda: not zygote.is_ready)
                cold_ended, cold = await forked_or_started(zygote, more, tmp_path)
                assert began_as(cold.pid) != began_as(pid)
                await _until(lambda: zygote.is_ready)
                assert zygote_of(os.getpid()) != first
                os.kill(cold.pid, signal.SIGKILL)
                await cold_ended
                let.set()
                await ended
                assert (process.returncode, cold.returncode) == (1, -signal.SIGKILL)
                assert f"/api/flow_runs/{FLOW_RUN}" in asked

                # One that does not answer is done without, and nothing begins twice.
                os.kill(zygote_of(os.getpid()), signal.SIGSTOP)
                cold_ended, cold = await forked_or_started(zygote, more, tmp_path)
                await cold_ended
                assert cold.returncode == 1
        finally:
            zygote.close()
        assert not children_of(os.getpid()) - before

    asyncio.run(scenario())
