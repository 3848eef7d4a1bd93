"""A service whose worker has died is found, though it goes on answering that all is well.

The first part holds the cases of SGLang's own tests of its watchdog, the second what they leave
out. Source: shared/facts/rollout.md.
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
from tests.support.stage import DEADLINE_S, Stage, free_port, python, sh, wait_until

UP = ReadyProbe(log="up", within_s=DEADLINE_S)
WATCHED = LiveProbe(processes="^sh -c .* scheduler", every_s=0.05, misses=3)

#: Starts its workers, then answers any GET with 200 for ever and looks after no worker, or reaps
#: those that end; `SERVICE % (workers, port, reaps)`.
SERVICE = """
import os, socket, subprocess
workers = [subprocess.Popen(["sh", "-c", code, "scheduler"]) for code in %r]
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.settimeout(0.01)
s.bind(("127.0.0.1", %d))
s.listen(50)
os.write(1, b"up\\n")
while True:
    if %r:
        [worker.poll() for worker in workers]
    try:
        c, _ = s.accept()
    except TimeoutError:
        continue
    c.recv(65536)
    c.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
    c.close()
"""


def until_told(file: str, exit_code: int = 0) -> str:
    """A worker that lives until there is such a file."""
    return f"while [ ! -e {file} ]; do sleep 0.01; done; exit {exit_code}"


def service(*workers: str, port: int | None = None, reaps: bool = True) -> tuple[str, ...]:
    return python(SERVICE % (workers, port or free_port(), reaps))


def watched_pids(stage: Stage, count: int = 1) -> list[int]:
    """The pids of the workers that are watched, once there are so many."""
    wait_until(lambda: len(stage.seen("process.watched")) >= count, f"{count} are watched")
    return [event.fields["pid"] for event in stage.seen("process.watched")]


def pidfds() -> list[Path]:
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if "pidfd" in os.readlink(fd):
                found.append(fd)
        except FileNotFoundError:
            continue
    return found


def test_healthy_worker_raises_no_alarm(stage: Stage) -> None:
    live = LiveProbe(processes="^sh -c .* scheduler", every_s=0.01)
    late = "while [ ! -e late ]; do sleep 0.01; done; sh -c 'sleep 600; exit' scheduler; exit"
    supervisor = stage.running(
        stage.component("rollout", service("sleep 600; exit", late), ready=UP, live=live)
    )
    watched_pids(stage, 2)

    (stage.directory / "late").touch()
    watched_pids(stage, 3)
    supervisor.interrupt("enough")

    assert stage.end(supervisor).state is RunState.CANCELLED


@pytest.mark.parametrize(
    ("exit_code", "reaps"), [(42, True), (42, False), (0, False)], ids=["reaped", "zombie", "zero"]
)
def test_worker_that_exits_alarms_with_its_code(stage: Stage, exit_code: int, reaps: bool) -> None:
    rollout = service(until_told("die", exit_code), reaps=reaps)
    supervisor = stage.running(stage.component("rollout", rollout, ready=UP, live=WATCHED))
    [worker] = watched_pids(stage)

    (stage.directory / "die").touch()
    verdict = stage.verdict_of(supervisor)

    failure = verdict.failure
    assert failure is not None and failure.component == "rollout"
    assert (failure.rule, failure.exit_code, failure.signal) == ("process-died", exit_code, None)
    assert f"rollout (pid {stage.pid_of('rollout')}): lost its process {worker}" in failure.message
    assert "scheduler" in failure.message and f"exit code {exit_code}" in failure.message


def test_worker_that_exits_at_once_is_missed(stage: Stage) -> None:
    rollout = service("exit 1")

    verdict = stage.run(stage.component("rollout", rollout, ready=UP, live=WATCHED))

    assert verdict.failure is not None and verdict.failure.component == "rollout"
    assert verdict.failure.rule in ("process-died", "process-missing")


def test_without_anything_to_watch_a_worker_may_crash(stage: Stage) -> None:
    rollout = service(f"echo worker $$; {until_told('die', 42)}")
    supervisor = stage.running(stage.component("rollout", rollout, ready=UP))
    wait_until(lambda: "worker " in stage.text_of("rollout"), "the worker runs")
    worker = int(stage.text_of("rollout").split("worker ")[1].split()[0])

    (stage.directory / "die").touch()
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the worker has gone")

    assert stage.end(supervisor).state is RunState.CANCELLED


def test_worker_that_never_comes_is_a_failure_that_says_so(stage: Stage) -> None:
    live = LiveProbe(processes="no-such-worker", every_s=0.01, misses=3)

    verdict = stage.run(stage.component("rollout", service("sleep 600; exit"), ready=UP, live=live))

    pid = stage.pid_of("rollout")
    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    assert f"rollout (pid {pid}): no process below it matches /no-such-worker/" in verdict.message


@pytest.mark.parametrize(
    ("signum", "kind", "reaps"),
    [
        (signal.SIGKILL, FailureKind.UNKNOWN, False),
        (signal.SIGABRT, FailureKind.RUNTIME_ERROR, True),
    ],
)
def test_worker_that_is_killed_is_an_alarm_though_its_service_answers(
    stage: Stage, signum: signal.Signals, kind: FailureKind, reaps: bool
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/health"
    live = LiveProbe(http=url, processes="^sh -c .* scheduler", every_s=0.05)
    rollout = service("sleep 600; exit", port=port, reaps=reaps)
    supervisor = stage.running(stage.component("rollout", rollout, ready=UP, live=live))
    [worker] = watched_pids(stage)
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        assert answer.status == 200

    os.kill(worker, signum)
    verdict = stage.verdict_of(supervisor)

    assert verdict.failure is not None and verdict.failure.kind is kind
    assert (verdict.failure.rule, verdict.failure.signal) == ("process-died", signum.name)
    assert "live" not in [event.fields.get("probe") for event in stage.seen("probe.failed")]


def test_second_crash_leaves_one_root_cause_and_no_descriptor(stage: Stage) -> None:
    before = len(pidfds())
    rollout = service(until_told("die", 42), until_told("die", 43))
    supervisor = stage.running(
        stage.component("rollout", rollout, ready=UP, live=WATCHED), stage.component("trainer")
    )
    watched_pids(stage, 2)

    (stage.directory / "die").touch()
    verdict = stage.verdict_of(supervisor)

    assert verdict.failure is not None and verdict.failure.exit_code in (42, 43)
    assert verdict.message.count("lost its process") == 1
    assert len(pidfds()) == before
    assert stage.story().count("teardown.begun") == 1


def test_component_that_ends_its_workers_and_completes_raises_no_alarm(stage: Stage) -> None:
    worker = "sh -c 'sleep 600; exit' scheduler & worker=$!; echo up"
    leave = "while [ ! -e done ]; do sleep 0.01; done; kill $worker; wait $worker; exit 0"
    supervisor = stage.running(
        stage.component(
            "trainer", sh(f"{worker}; {leave}"), ready=UP, live=WATCHED, on_exit_zero="complete"
        )
    )
    watched_pids(stage)

    (stage.directory / "done").touch()
    verdict = stage.verdict_of(supervisor)

    assert verdict.state is RunState.COMPLETED


def test_workers_that_end_with_a_drained_component_raise_no_alarm(stage: Stage) -> None:
    worker = "sh -c 'sleep 600; exit' scheduler & echo up"
    leave = "while [ ! -e done ]; do sleep 0.01; done; exit 0"
    supervisor = stage.running(
        stage.component(
            "environment", sh(f"{worker}; {leave}"), ready=UP, live=WATCHED, on_exit_zero="drain"
        ),
        stage.component("trainer"),
    )
    [worker_pid] = watched_pids(stage)

    (stage.directory / "done").touch()
    stage.until("component.drained", "environment")
    wait_until(lambda: not Path(f"/proc/{worker_pid}").exists(), "the worker has gone")

    assert stage.end(supervisor).state is RunState.CANCELLED


def test_fork_that_becomes_another_program_is_not_watched(stage: Stage) -> None:
    compiles = python(
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
    leader = python(f"import subprocess; subprocess.run({compiles!r})")
    supervisor = stage.running(stage.component("rollout", leader, ready=UP, live=live))

    wait_until(lambda: (stage.directory / "compiled").exists(), "the other program ran")
    watched = watched_pids(stage)

    assert stage.end(supervisor).state is RunState.CANCELLED
    assert len(watched) == 1
