"""What surrounds a component: its descriptors, its log, the machine's limits, hostile programs."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.processes import tree
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tasks.spec.probes import ReadyProbe
from tests.support.stage import DEADLINE_S, Stage, is_alive, sh, wait_until
from tests.support.witness import Witness

UP = ReadyProbe(log="up", within_s=DEADLINE_S)


def test_component_leads_a_session_of_its_own(stage: Stage) -> None:
    supervisor = stage.running(stage.component("trainer"))

    pid = stage.pid_of("trainer")
    assert os.getsid(pid) == pid == os.getpgid(pid)

    stage.end(supervisor)


def test_component_gets_the_environment_it_is_given_and_no_other(stage: Stage) -> None:
    component = stage.component("trainer", ("env",), on_exit_zero="complete")

    stage.run(component)

    said = {line.partition("=")[0] for line in stage.text_of("trainer").splitlines()}
    assert said - set(component.command.env) <= {""}
    assert "MUSTER_ROLE" not in said


def test_large_environment_and_long_arguments_arrive_whole(stage: Stage) -> None:
    env = {f"LARGE_{i}": "x" * 100_000 for i in range(8)}
    count = sh("[ ${#LARGE_7} = 100000 ] && [ ${#1} = 100000 ] && echo up; exec sleep 600")

    supervisor = stage.running(
        stage.component("trainer", (*count, "sh", "y" * 100_000), ready=UP, env=env)
    )

    assert stage.end(supervisor).state is RunState.CANCELLED


def test_environment_that_is_too_large_is_named(stage: Stage) -> None:
    verdict = stage.run(stage.component("trainer", env={"LARGE": "x" * 1_000_000}))

    assert verdict.failure is not None
    assert "Argument list too long" in verdict.message


def test_environment_that_is_not_text_arrives_as_it_is(stage: Stage) -> None:
    odd = b"\xff\xfe".decode(errors="surrogateescape")

    stage.run(
        stage.component("trainer", sh('printf %s "$ODD"'), env={"ODD": odd}, on_exit_zero="drain")
    )

    assert stage.log_of("trainer").read_bytes() == b"\xff\xfe"


def test_log_that_grows_fast_costs_no_memory_and_keeps_its_end(stage: Stage) -> None:
    lines = "head -c 200000000 /dev/zero | tr '\\\\0' '\\\\n'; yes noise | head -c 30000000"
    ready = ReadyProbe(log="the end", within_s=DEADLINE_S)
    before = peak_bytes()

    verdict = stage.run(
        stage.component("api", ready=None),
        stage.component("trainer", sh(f"{lines}; echo the end; exit 5"), ready=ready),
    )

    assert verdict.failure is not None and verdict.failure.exit_code == 5
    assert verdict.failure.log_tail.endswith("noise\nthe end")
    assert stage.log_of("trainer").stat().st_size > 200_000_000
    assert peak_bytes() - before < 100_000_000
    stage.log_of("trainer").unlink()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_run_whose_guardians_cannot_be_made_has_failed_and_leaves_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "allow_files", lambda wanted: None)
    components = [stage.component(f"c{i}") for i in range(40)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with stage.supervise(*components) as run, pytest.raises(RunEnded):
            run.start("c0")
        verdict = run.teardown()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert verdict.failure is not None
    assert verdict.failure.message == "no process can be started: Too many open files"
    assert stage.left() == {}


def test_components_need_no_more_files_than_there_may_be(
    witness: Callable[..., Witness], tmp_path: Path
) -> None:
    """The supervisor raises its own limit, and theirs is the one that there was."""
    command = sh("echo $(ulimit -Sn); echo up; exec sleep 600")
    cast = [Stage(tmp_path).component(f"c{i}", command, ready=UP) for i in range(15)]
    wrapper = (*sh('ulimit -Sn 36 && exec "$@"'), "sh")

    run = witness(*cast, wrapper=wrapper)
    run.until("attempt.ready")
    run.end()

    assert run.testimony().left == ()
    assert run.verdict()["state"] == "cancelled"
    assert (tmp_path / "c14.log").read_text().split() == ["36", "up"]


def test_many_attempts_leak_neither_descriptors_nor_threads(stage: Stage) -> None:
    def one() -> None:
        stage.run(
            stage.component("api", sh("echo up; exec sleep 600"), ready=UP),
            stage.component("trainer", sh("exit 0"), on_exit_zero="complete"),
        )

    rounds = 5
    one()
    gc.collect()
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(rounds):
        one()
    gc.collect()

    # One to spare: what else this process has may open one meanwhile.
    assert len(os.listdir("/proc/self/fd")) < fds + rounds
    assert len(os.listdir("/proc/self/task")) < threads + rounds


#: Each does harm to who guards it, then goes on for ever.
HOSTILE = {
    "kills its guardian": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "stops its guardian, then leaves": (
        "import os, signal; os.kill(os.getppid(), signal.SIGSTOP); os._exit(3)"
    ),
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "closes its log": "import os; [os.close(fd) for fd in (0, 1, 2)]",
    "becomes a subreaper": (
        "import ctypes, os, time; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    time.sleep(600)\n"
        "time.sleep(0.05)"
    ),
    "defuses its parent's death": (
        "import ctypes, os, signal; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "os.kill(os.getppid(), signal.SIGKILL)"
    ),
    "changes its user": "import os; os.setuid(65534)",
    "ignores everything": (
        "import signal\nfor n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)"
    ),
    "main thread ends before the others": (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    ),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_component_is_ended_all_the_same(stage: Stage, how: str) -> None:
    if how == "changes its user" and os.getuid() != 0:
        pytest.skip("only root may")
    code = f"import os\nos.write(1, b'up\\n')\n{HOSTILE[how]}\nimport time\ntime.sleep(600)"
    program = (sys.executable, "-I", "-S", "-c", code)
    supervisor = stage.running(stage.component("api"), stage.component("trainer", program))
    wait_until(lambda: "up" in stage.text_of("trainer"), "it has begun")

    supervisor.interrupt("enough")
    verdict = stage.end(supervisor)

    assert verdict.state is not RunState.COMPLETED
    assert verdict.left == {}
    assert not is_alive(stage.pid_of("trainer"))


def test_component_that_kills_its_process_group_takes_nobody_along(stage: Stage) -> None:
    verdict = stage.run(stage.component("api"), stage.component("trainer", sh("kill -KILL 0")))

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.failure.signal == "SIGKILL"
    ends = {event.component: event.fields["signal"] for event in stage.seen("component.exited")}
    assert ends["api"] == "SIGTERM"
