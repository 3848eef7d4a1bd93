"""Muster notices the death of a service's worker process, even if the service still answers 200.

The first tests are the cases of SGLang's own tests of its watchdog. The others are cases that
SGLang does not test.
"""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import pytest

from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.support.supervised_components import (
    DEADLINE_S,
    ComponentHarness,
    free_port,
    python,
    sh,
    wait_until,
)

UP = ReadyProbe(log="up", within_s=DEADLINE_S)
WATCHED = LiveProbe(processes="^sh -c .* scheduler", every_s=0.05, misses=3)

#: Template of a service that starts workers, and then answers any GET with 200. `SERVICE %
#: (workers, port, reaps)` is the program.
#:
#: If `reaps` is true, the service reaps ended workers. The service never reports the end of a
#: worker.
SERVICE = """
import os, socket, subprocess
workers = [subprocess.Popen(["sh", "-c", code, "scheduler"]) for code in %r]
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.settimeout(0.01)
server.bind(("127.0.0.1", %d))
server.listen(50)
os.write(1, b"up\\n")
while True:
    if %r:
        [worker.poll() for worker in workers]
    try:
        connection, _ = server.accept()
    except TimeoutError:
        continue
    connection.recv(65536)
    connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
    connection.close()
"""


def wait_for_file(file: str, exit_code: int = 0) -> str:
    """Return a worker's shell script, which waits for a file and exits with the exit code."""
    return f"while [ ! -e {file} ]; do sleep 0.01; done; exit {exit_code}"


def build_service(*workers: str, port: int | None = None, reaps: bool = True) -> tuple[str, ...]:
    """Return the command of a service that starts worker processes.

    Args:
        workers: Shell script of each worker.
        port: Port of the service, or None for any free port.
        reaps: True if the service reaps the workers that have ended.
    """
    return python(SERVICE % (workers, port or free_port(), reaps))


def wait_for_watched_pids(harness: ComponentHarness, count: int = 1) -> list[int]:
    """Wait until Muster watches `count` workers of a component, and return the workers' pids."""
    wait_until(lambda: len(harness.list_events("process.watched")) >= count, f"{count} are watched")
    return [event.fields["pid"] for event in harness.list_events("process.watched")]


def list_pidfds() -> list[Path]:
    """Return the open descriptors of this process that refer to processes."""
    pidfds = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if "pidfd" in os.readlink(fd):
                pidfds.append(fd)
        except FileNotFoundError:
            continue
    return pidfds


def test_healthy_worker_raises_no_alarm(harness: ComponentHarness) -> None:
    live = LiveProbe(processes="^sh -c .* scheduler", every_s=0.01)
    late = "while [ ! -e late ]; do sleep 0.01; done; sh -c 'sleep 600; exit' scheduler; exit"
    supervisor = harness.start_all(
        harness.component("rollout", build_service("sleep 600; exit", late), ready=UP, live=live)
    )
    wait_for_watched_pids(harness, 2)

    (harness.directory / "late").touch()
    wait_for_watched_pids(harness, 3)
    supervisor.interrupt("enough")

    assert harness.end(supervisor).state is RunState.CANCELLED


@pytest.mark.parametrize(
    ("exit_code", "reaps"), [(42, True), (42, False), (0, False)], ids=["reaped", "zombie", "zero"]
)
def test_exited_worker_is_a_failure_with_its_exit_code(
    harness: ComponentHarness, exit_code: int, reaps: bool
) -> None:
    rollout = build_service(wait_for_file("die", exit_code), reaps=reaps)
    supervisor = harness.start_all(harness.component("rollout", rollout, ready=UP, live=WATCHED))
    [worker] = wait_for_watched_pids(harness)

    (harness.directory / "die").touch()
    verdict = harness.wait_for_verdict(supervisor)

    failure = verdict.failure
    assert failure is not None and failure.component == "rollout"
    assert (failure.rule, failure.exit_code, failure.signal) == ("process-died", exit_code, None)
    assert (
        f"rollout (pid {harness.wait_for_pid('rollout')}): lost its process {worker}"
        in failure.message
    )
    assert "scheduler" in failure.message and f"exit code {exit_code}" in failure.message


def test_worker_that_exits_at_once_is_a_failure(harness: ComponentHarness) -> None:
    rollout = build_service("exit 1")

    verdict = harness.run(harness.component("rollout", rollout, ready=UP, live=WATCHED))

    assert verdict.failure is not None and verdict.failure.component == "rollout"
    assert verdict.failure.rule in ("process-died", "process-missing")


def test_death_of_an_unwatched_worker_process_is_no_failure(harness: ComponentHarness) -> None:
    rollout = build_service(f"echo worker $$; {wait_for_file('die', 42)}")
    supervisor = harness.start_all(harness.component("rollout", rollout, ready=UP))
    wait_until(lambda: "worker " in harness.read_log("rollout"), "the worker runs")
    worker = int(harness.read_log("rollout").split("worker ")[1].split()[0])

    (harness.directory / "die").touch()
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the worker has ended")

    assert harness.end(supervisor).state is RunState.CANCELLED


def test_missing_worker_is_a_failure_that_names_the_pattern(harness: ComponentHarness) -> None:
    live = LiveProbe(processes="no-such-worker", every_s=0.01, misses=3)

    verdict = harness.run(
        harness.component("rollout", build_service("sleep 600; exit"), ready=UP, live=live)
    )

    pid = harness.wait_for_pid("rollout")
    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    assert f"rollout (pid {pid}): none of its processes matches /no-such-worker/" in verdict.message


@pytest.mark.parametrize(
    ("signum", "kind", "reaps"),
    [
        (signal.SIGKILL, FailureKind.UNKNOWN, False),
        (signal.SIGABRT, FailureKind.RUNTIME_ERROR, True),
    ],
)
def test_killed_worker_is_a_failure_although_its_service_answers(
    harness: ComponentHarness, signum: signal.Signals, kind: FailureKind, reaps: bool
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/health"
    live = LiveProbe(http=url, processes="^sh -c .* scheduler", every_s=0.05)
    rollout = build_service("sleep 600; exit", port=port, reaps=reaps)
    supervisor = harness.start_all(harness.component("rollout", rollout, ready=UP, live=live))
    [worker] = wait_for_watched_pids(harness)
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        assert answer.status == 200

    os.kill(worker, signum)
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None and verdict.failure.kind is kind
    assert (verdict.failure.rule, verdict.failure.signal) == ("process-died", signum.name)
    assert "live" not in [
        event.fields.get("probe") for event in harness.list_events("probe.failed")
    ]


def test_second_crash_changes_no_cause_and_leaks_no_descriptor(harness: ComponentHarness) -> None:
    count_before = len(list_pidfds())
    rollout = build_service(wait_for_file("die", 42), wait_for_file("die", 43))
    supervisor = harness.start_all(
        harness.component("rollout", rollout, ready=UP, live=WATCHED), harness.component("trainer")
    )
    wait_for_watched_pids(harness, 2)

    (harness.directory / "die").touch()
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None and verdict.failure.exit_code in (42, 43)
    assert verdict.message.count("lost its process") == 1
    assert len(list_pidfds()) == count_before
    assert harness.list_event_names().count("teardown.begun") == 1


def test_component_that_ends_its_workers_can_complete(harness: ComponentHarness) -> None:
    worker = "sh -c 'sleep 600; exit' scheduler & worker=$!; echo up"
    exit_script = "while [ ! -e done ]; do sleep 0.01; done; kill $worker; wait $worker; exit 0"
    supervisor = harness.start_all(
        harness.component(
            "trainer",
            sh(f"{worker}; {exit_script}"),
            ready=UP,
            live=WATCHED,
            on_exit_zero="complete",
        )
    )
    wait_for_watched_pids(harness)

    (harness.directory / "done").touch()
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.state is RunState.COMPLETED


def test_workers_that_end_with_a_drained_component_are_no_failure(
    harness: ComponentHarness,
) -> None:
    worker = "sh -c 'sleep 600; exit' scheduler & echo up"
    exit_script = "while [ ! -e done ]; do sleep 0.01; done; exit 0"
    supervisor = harness.start_all(
        harness.component(
            "environment",
            sh(f"{worker}; {exit_script}"),
            ready=UP,
            live=WATCHED,
            on_exit_zero="drain",
        ),
        harness.component("trainer"),
    )
    [worker_pid] = wait_for_watched_pids(harness)

    (harness.directory / "done").touch()
    harness.wait_for_event("component.drained", "environment")
    wait_until(lambda: not Path(f"/proc/{worker_pid}").exists(), "the worker has ended")

    assert harness.end(supervisor).state is RunState.CANCELLED


def test_fork_that_becomes_another_program_is_not_watched(harness: ComponentHarness) -> None:
    compiling_program = python(
        "import os, time\n"
        "os.write(1, b'up\\n')\n"
        "if os.fork() == 0:\n"
        "    time.sleep(0.3)\n"
        "    os.execvp('touch', ['touch', 'compiled'])\n"
        "os.wait()\n"
        "time.sleep(600)\n"
        "# scheduler"
    )
    live = LiveProbe(processes="# scheduler$", every_s=0.01)
    leader = python(f"import subprocess; subprocess.run({compiling_program!r})")
    supervisor = harness.start_all(harness.component("rollout", leader, ready=UP, live=live))

    wait_until(lambda: (harness.directory / "compiled").exists(), "the other program ran")
    pids = wait_for_watched_pids(harness)

    assert harness.end(supervisor).state is RunState.CANCELLED
    assert len(pids) == 1
