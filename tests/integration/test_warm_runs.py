"""Runs whose flow process is forked from the fork server of the worker.

The tests compare the kernel's view of these processes with ordinary flow processes, and kill the
worker's fork server, the run's process or the command.
"""

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

from tasks.processes import own_modules
from tasks.processes.tree import descendants, read_environment
from tasks.queue.fork_server import ENGINE, ForkServer
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.host_environment import Run, make_sleeping_spec, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLOW_RUN = "7712f819-7b19-4723-bcbf-b5067028ec50"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[GangPool]:
    """Yield a pool with its own Prefect server and its own MUSTER_HOME."""
    with gang_pool(tmp_path) as pool:
        yield pool


def read_auxiliary_vector(pid: int) -> bytes:
    """Return the auxiliary vector of a process, which shows whether the process was forked.

    The vector contains random addresses of the process. A forked process inherits these addresses,
    but a new program gets others.
    """
    return Path(f"/proc/{pid}/auxv").read_bytes()


def list_children(pid: int) -> set[int]:
    """Return the pids of the child processes of a process."""
    return {*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}


def wait_for_fork_server(worker: int) -> int:
    """Wait until the worker has a fork server that is ready, and return the fork server's pid.

    The fork server is a process with all imports loaded. The flow processes are forked from this
    process.
    """

    def find_fork_server() -> int:
        for pid in list_children(worker):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"muster: ready"):
                return pid
        return 0

    return wait_for(find_fork_server, "the worker has a ready fork server")


def read_parent(pid: int) -> int:
    """Return the pid of the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start_run(pool: GangPool, lasts_s: float = 60.0) -> tuple[Run, int]:
    """Start a run through the worker; return the run and the pid of its flow process."""
    run = pool.submit(pool.spec(lasts_s=lasts_s)).wait_until_running()
    return run, run.flow_pid()


def count_crashes(run: Run) -> int:
    """Return how often the flow run had the state Crashed."""
    states = run.host_env.get(f"/flow_run_states/?flow_run_id={run.flow_run_id}")
    return sum(state["type"] == "CRASHED" for state in states)


@pytest.mark.thorough
def test_forked_flow_process_looks_like_a_started_flow_process(pool: GangPool) -> None:
    worker = pool.start_worker()
    fork_server = wait_for_fork_server(worker.pid)
    run, pid = start_run(pool)
    proc_directory = Path(f"/proc/{pid}")

    assert read_auxiliary_vector(pid) == read_auxiliary_vector(fork_server)
    assert len(os.listdir(f"/proc/{fork_server}/task")) == 1
    # The forked process must have the same parent and command line as an ordinary process, because
    # Muster and `ps` find flow processes by these values.
    assert read_parent(pid) == worker.pid
    assert run.processes() == [pid]
    assert proc_directory.joinpath("cmdline").read_text().rstrip("\0").split("\0")[1:] == [
        "-P",
        own_modules.__file__,
        "-m",
        "flows",
        run.flow_run_id,
    ]
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert proc_directory.joinpath("fd/0").readlink() == Path("/dev/null")
    assert (
        proc_directory.joinpath("cgroup").read_text()
        == Path(f"/proc/{worker.pid}/cgroup").read_text()
    )

    # Flow processes are forked from the fork server, a process with all imports loaded. The death
    # of the fork server must not disturb the running flow process. The next flow process is forked
    # from a new fork server.
    os.kill(fork_server, signal.SIGKILL)
    new_fork_server = wait_for(
        lambda: (
            wait_for_fork_server(worker.pid) != fork_server and wait_for_fork_server(worker.pid)
        ),
        "the worker has a new fork server",
    )
    os.kill(pid, signal.SIGKILL)
    run.wait_for_state("CRASHED")
    next_run, next_pid = start_run(pool, lasts_s=5.0)

    assert read_auxiliary_vector(next_pid) == read_auxiliary_vector(new_fork_server)
    assert count_crashes(run) == 1
    assert next_run.wait_for_state("COMPLETED")


#: Program that runs `muster ls --json`, and reports on stderr whether the process has imported
#: Prefect.
LIST_PROGRAM = """
import sys
from tasks.command import main
code = main(["ls", "--json"])
print("prefect" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.thorough
def test_list_command_uses_the_fork_server_instead_of_importing_prefect(pool: GangPool) -> None:
    worker = pool.start_worker()
    wait_for_fork_server(worker.pid)
    wait_for((pool.host_env.home / "zygote").is_socket, "the fork server accepts commands")
    run, _ = start_run(pool, lasts_s=5.0)

    def list_with(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", LIST_PROGRAM],
            env={**os.environ, **pool.host_env.env, **variables},
            capture_output=True,
            text=True,
        )

    listed = list_with()
    refused = list_with(PREFECT_API_REQUEST_TIMEOUT="soon")

    assert (listed.returncode, listed.stderr) == (0, "False\n")
    assert [entry["flow_run_id"] for entry in json.loads(listed.stdout)] == [run.flow_run_id]
    assert refused.returncode == 2
    assert "PREFECT_API_REQUEST_TIMEOUT has the value 'soon'" in refused.stderr
    assert refused.stderr.endswith("False\n")


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_train_command_forwards_its_signals_to_the_forked_process(
    pool: GangPool, tmp_path: Path, signum: int
) -> None:
    worker = pool.start_worker()
    fork_server = wait_for_fork_server(worker.pid)
    wait_for((pool.host_env.home / "zygote").is_socket, "the fork server accepts commands")
    spec_file = tmp_path / "spec.yaml"
    spec_file.write_text(yaml.safe_dump(make_sleeping_spec()))

    def list_forked() -> list[int]:
        """Return the pids of processes that were forked from the fork server.

        A fork server is a process with all imports loaded, from which flow processes are forked.
        """
        pids = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            with suppress(OSError):
                if read_auxiliary_vector(pid) == read_auxiliary_vector(
                    fork_server
                ) and fork_server not in (
                    pid,
                    read_parent(pid),
                ):
                    pids.append(pid)
        return pids

    command = subprocess.Popen(
        [Path(sys.executable).with_name("muster"), "train", spec_file],
        env={**os.environ, **pool.host_env.env},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    wait_for(lambda: "trainer: ready" in command.stdout.readline(), "the trainer is ready")
    [pid] = list_forked()
    components = descendants(pid)
    os.kill(command.pid, signum)

    output = command.stdout.read()
    assert command.wait() == (130 if signum == signal.SIGINT else -signum)
    wait_for(lambda: not list_forked(), "the process of the run has ended")
    wait_for(
        lambda: not any(Path(f"/proc/{component_pid}").exists() for component_pid in components),
        "all components have ended",
    )
    assert components
    assert ("cancelled: interrupted by SIGINT" in output) == (signum == signal.SIGINT)
    assert worker.poll() is None


@pytest.mark.thorough
def test_forked_process_ignores_the_signals_that_its_command_ignores(
    pool: GangPool, tmp_path: Path
) -> None:
    pool.start_worker()
    wait_for((pool.host_env.home / "zygote").is_socket, "the fork server accepts commands")
    trained = tmp_path / "trained.txt"
    stop = tmp_path / "stop"
    code = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.05)"
    )
    command = [sys.executable, "-c", code, str(trained), str(stop)]
    spec = {"name": "t", "workload": "sft", "components": {"trainer": {"command": command}}}
    spec_file = tmp_path / "spec.yaml"
    spec_file.write_text(yaml.safe_dump(spec))
    muster = str(Path(sys.executable).with_name("muster"))
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", muster, "train", str(spec_file)],
        env={**os.environ, **pool.host_env.env},
        stdout=subprocess.DEVNULL,
    )
    wait_for(trained.exists, "the run trains")
    [owner] = (pool.host_env.home / "live").glob("t-sft-*/owner.json")
    flow_pid = int(json.loads(owner.read_text())["process"]["pid"])

    os.kill(process.pid, signal.SIGHUP)
    os.kill(flow_pid, signal.SIGHUP)
    stop.touch()

    assert process.wait(60) == 0
    assert flow_pid != process.pid


@contextmanager
def held_server() -> Iterator[tuple[str, threading.Event, list[str]]]:
    """Yield an HTTP server that answers every GET with 404 after the test has set an event.

    The yielded values are the address of the server, the event, and the requested paths.
    """
    permit = threading.Event()
    requested_paths = list[str]()

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested_paths.append(self.path)
            permit.wait(60)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/api", permit, requested_paths
        finally:
            permit.set()
            server.shutdown()
            thread.join()


async def start_process(
    fork_server: ForkServer, env: Mapping[str, str], cwd: Path
) -> tuple[asyncio.Task[None], Any]:
    """Start the flow process of a run through the fork server.

    The fork server is a process that has already imported all modules. If possible, the fork server
    forks the flow process. Otherwise, an ordinary process is started.

    Returns:
        `(task, process)`: `process` is the flow process, and `task` ends when the process ends.
    """
    started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ended_task = asyncio.create_task(
        fork_server.run_process(
            [*ENGINE, FLOW_RUN],
            env={**os.environ, **env},
            cwd=cwd,
            stream_output=False,
            task_status=SimpleNamespace(started=started.set_result),
            task_status_handler=lambda process: process,
        )
    )
    return ended_task, await started


async def _until(is_true: Callable[[], object]) -> None:
    """Wait until the function returns a true value; raise TimeoutError after 100 s."""
    async with asyncio.timeout(100):
        while not is_true():
            await asyncio.sleep(0.02)


def test_process_of_a_run_is_forked_and_survives_its_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.queue.fork_server._FORKS_WITHIN_S", 2.0)
    children_before = list_children(os.getpid())

    async def scenario() -> None:
        fork_server = ForkServer()
        fork_server.start()
        try:
            await _until(lambda: fork_server.is_ready)
            first_fork_server = wait_for_fork_server(os.getpid())
            assert len(os.listdir(f"/proc/{first_fork_server}/task")) == 1
            with held_server() as (api, permit, requested_paths):
                variables = {"PREFECT_API_URL": api, "PREFECT__FLOW_RUN_ID": FLOW_RUN, "OWN": "1"}
                ended_task, process = await start_process(fork_server, variables, tmp_path)
                await _until(lambda: requested_paths)
                pid = process.pid
                proc_directory = Path(f"/proc/{process.pid}")

                # Equal auxiliary vectors show that the process was forked from the fork server.
                assert read_auxiliary_vector(pid) == read_auxiliary_vector(first_fork_server)
                # Muster and `ps` find flow processes by parent, command line and environment. So
                # these values must be the same for a forked process as for an ordinary process.
                assert read_parent(pid) == os.getpid()
                assert proc_directory.joinpath("cmdline").read_text().rstrip("\0").split("\0") == [
                    *ENGINE,
                    FLOW_RUN,
                ]
                assert read_environment(pid) == {**os.environ, **variables}
                assert os.getsid(pid) == os.getpgid(pid) == pid
                assert proc_directory.joinpath("cwd").readlink() == tmp_path
                assert proc_directory.joinpath("fd/0").readlink() == Path("/dev/null")

                # The forked process survives the death of the fork server from which it was forked.
                # Without a fork server, the next run starts an ordinary process. A new fork server
                # is then made for later runs.
                os.kill(first_fork_server, signal.SIGKILL)
                await _until(lambda: not fork_server.is_ready)
                cold_ended, cold = await start_process(fork_server, variables, tmp_path)
                assert read_auxiliary_vector(cold.pid) != read_auxiliary_vector(pid)
                await _until(lambda: fork_server.is_ready)
                assert wait_for_fork_server(os.getpid()) != first_fork_server
                os.kill(cold.pid, signal.SIGKILL)
                await cold_ended
                permit.set()
                await ended_task
                assert (process.returncode, cold.returncode) == (1, -signal.SIGKILL)
                assert f"/api/flow_runs/{FLOW_RUN}" in requested_paths

                # The suspended fork server, from which flow processes are forked, does not answer.
                # So exactly one ordinary process is started instead.
                os.kill(wait_for_fork_server(os.getpid()), signal.SIGSTOP)
                cold_ended, cold = await start_process(fork_server, variables, tmp_path)
                await cold_ended
                assert cold.returncode == 1
        finally:
            fork_server.close()
        assert not list_children(os.getpid()) - children_before

    asyncio.run(scenario())
