"""The surroundings of a component: descriptors, log, limits of the machine, hostile programs."""

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
from tests.support.observed_flow import ObservedFlow
from tests.support.supervised_components import (
    DEADLINE_S,
    ComponentHarness,
    is_alive,
    sh,
    wait_until,
)

UP = ReadyProbe(log="up", within_s=DEADLINE_S)


def test_component_leads_its_own_session(harness: ComponentHarness) -> None:
    supervisor = harness.start_all(harness.component("trainer"))

    pid = harness.wait_for_pid("trainer")
    assert os.getsid(pid) == pid == os.getpgid(pid)

    harness.end(supervisor)


def test_component_gets_exactly_the_environment_of_its_plan(harness: ComponentHarness) -> None:
    component = harness.component("trainer", ("env",), on_exit_zero="complete")

    harness.run(component)

    variable_names = {line.partition("=")[0] for line in harness.read_log("trainer").splitlines()}
    assert variable_names - set(component.command.env) <= {""}
    assert "MUSTER_ROLE" not in variable_names


def test_large_environment_and_long_arguments_arrive_unchanged(harness: ComponentHarness) -> None:
    env = {f"LARGE_{i}": "x" * 100_000 for i in range(8)}
    count = sh("[ ${#LARGE_7} = 100000 ] && [ ${#1} = 100000 ] && echo up; exec sleep 600")

    supervisor = harness.start_all(
        harness.component("trainer", (*count, "sh", "y" * 100_000), ready=UP, env=env)
    )

    assert harness.end(supervisor).state is RunState.CANCELLED


def test_too_large_environment_is_named(harness: ComponentHarness) -> None:
    verdict = harness.run(harness.component("trainer", env={"LARGE": "x" * 1_000_000}))

    assert verdict.failure is not None
    assert "Argument list too long" in verdict.message


def test_environment_that_is_not_utf_8_arrives_unchanged(harness: ComponentHarness) -> None:
    undecodable = b"\xff\xfe".decode(errors="surrogateescape")

    harness.run(
        harness.component(
            "trainer", sh('printf %s "$ODD"'), env={"ODD": undecodable}, on_exit_zero="drain"
        )
    )

    assert harness.log_path("trainer").read_bytes() == b"\xff\xfe"


def test_fast_growing_log_needs_little_memory_and_its_end_is_read(
    harness: ComponentHarness,
) -> None:
    lines = "head -c 200000000 /dev/zero | tr '\\\\0' '\\\\n'; yes noise | head -c 30000000"
    ready = ReadyProbe(log="the end", within_s=DEADLINE_S)
    peak_before = read_peak_memory()

    verdict = harness.run(
        harness.component("api", ready=None),
        harness.component("trainer", sh(f"{lines}; echo the end; exit 5"), ready=ready),
    )

    assert verdict.failure is not None and verdict.failure.exit_code == 5
    assert verdict.failure.log_tail.endswith("noise\nthe end")
    assert harness.log_path("trainer").stat().st_size > 200_000_000
    assert read_peak_memory() - peak_before < 100_000_000
    harness.log_path("trainer").unlink()


def read_peak_memory() -> int:
    """Return the largest amount of memory that this process has used, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_run_whose_guardians_cannot_start_fails_and_leaves_no_process(
    harness: ComponentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "allow_files", lambda wanted: None)
    components = [harness.component(f"c{i}") for i in range(40)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with harness.supervise(*components) as run, pytest.raises(RunEnded):
            run.start("c0")
        verdict = run.teardown()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert verdict.failure is not None
    reason, _, limit = verdict.failure.message.partition("; ")
    assert reason == "Muster cannot start any process: Too many open files"
    assert limit.startswith(f"Muster's process {os.getpid()} has reached its limit of")
    assert harness.list_survivors() == {}


def test_run_with_a_low_limit_of_open_files_works(
    observed_flow: Callable[..., ObservedFlow], tmp_path: Path
) -> None:
    """The supervisor raises its own limit of open files. The components keep the original limit."""
    command = sh("echo $(ulimit -Sn); echo up; exec sleep 600")
    components = [
        ComponentHarness(tmp_path).component(f"c{i}", command, ready=UP) for i in range(15)
    ]
    wrapper = (*sh('ulimit -Sn 36 && exec "$@"'), "sh")

    run = observed_flow(*components, wrapper=wrapper)
    run.wait_for_event("attempt.ready")
    run.end()

    assert run.oracle_result().left == ()
    assert run.verdict()["state"] == "cancelled"
    assert (tmp_path / "c14.log").read_text().split() == ["36", "up"]


def test_many_attempts_leak_neither_descriptors_nor_threads(harness: ComponentHarness) -> None:
    def run_attempt() -> None:
        harness.run(
            harness.component("api", sh("echo up; exec sleep 600"), ready=UP),
            harness.component("trainer", sh("exit 0"), on_exit_zero="complete"),
        )

    rounds = 5
    run_attempt()
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(rounds):
        run_attempt()
    gc.collect()

    # A leak would add at least one descriptor or thread in each round. Other parts of this process
    # may also add a few descriptors or threads.
    assert len(os.listdir("/proc/self/fd")) < fds + rounds
    assert len(os.listdir("/proc/self/task")) < threads + rounds


#: Mapping from a description to the code of a program that could disturb its supervisor.
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


@pytest.mark.parametrize("harm", HOSTILE)
def test_hostile_component_is_ended(harness: ComponentHarness, harm: str) -> None:
    if harm == "changes its user" and os.getuid() != 0:
        pytest.skip("only root can change its user")
    code = f"import os\nos.write(1, b'up\\n')\n{HOSTILE[harm]}\nimport time\ntime.sleep(600)"
    program = (sys.executable, "-I", "-S", "-c", code)
    supervisor = harness.start_all(harness.component("api"), harness.component("trainer", program))
    wait_until(lambda: "up" in harness.read_log("trainer"), "the trainer has started")

    supervisor.interrupt("enough")
    verdict = harness.end(supervisor)

    assert verdict.state is not RunState.COMPLETED
    assert verdict.left == {}
    assert not is_alive(harness.wait_for_pid("trainer"))


def test_component_that_kills_its_process_group_harms_no_other_component(
    harness: ComponentHarness,
) -> None:
    verdict = harness.run(
        harness.component("api"), harness.component("trainer", sh("kill -KILL 0"))
    )

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.failure.signal == "SIGKILL"
    signal_by_component = {
        event.component: event.fields["signal"] for event in harness.list_events("component.exited")
    }
    assert signal_by_component["api"] == "SIGTERM"
