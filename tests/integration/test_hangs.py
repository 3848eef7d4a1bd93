"""A report about a hanging component is written next to its log before the component is ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tasks.processes import hang_report
from tasks.processes.component import ComponentPlan
from tasks.processes.identity import host_name
from tasks.record.outcome import Failure, Verdict
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.support.supervised_components import (
    DEADLINE_S,
    ComponentHarness,
    free_port,
    sh,
    wait_until,
)

UP = ReadyProbe(log="up", within_s=DEADLINE_S)
#: A liveness probe that always fails. Muster therefore soon treats the component as hanging, and
#: ends the component.
MISSED = LiveProbe(file="never-there", every_s=0.02, misses=2)

#: Template of a program that answers HTTP requests one by one. `SERVES % port` is the program.
SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
def serve_requests():
    http.server.HTTPServer(("127.0.0.1", %d), Handler).serve_forever()
serve_requests()
"""

#: Template of a program that waits forever for a lock. `STUCK % statements` is the program.
#:
#: The statements set the program's reaction to SIGTERM.
STUCK = """
import os, signal, sys, threading
lock = threading.Lock()
def wait_for_lock():
    lock.acquire()
    print("up", flush=True)
    lock.acquire()
%s
wait_for_lock()
"""
LEAVES_AT_SIGTERM = """
def leave(*_):
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
"""
IGNORES_SIGTERM_IN_A_HANDLER = "signal.signal(signal.SIGTERM, lambda *_: print('no'))"


def build_python_component(
    harness: ComponentHarness, name: str, code: str, **options: object
) -> ComponentPlan:
    """Return a Python component with Python's faulthandler enabled, as in a real run."""
    return harness.component(
        name,
        (sys.executable, "-c", code),
        env={"PYTHONFAULTHANDLER": "1"},
        **options,  # type: ignore[arg-type]
    )


def read_report(harness: ComponentHarness, name: str) -> str:
    """Return the report that Muster has written about the hang of a component."""
    return (harness.directory / f"{name}.hang.txt").read_text()


def read_log_end(harness: ComponentHarness, name: str) -> str:
    """Return the output that a component printed after Muster noticed that the component hangs.

    Muster makes a hanging component print its stacks. The report about the hang quotes this output.
    """
    _, _, log_end = read_report(harness, name).partition(f"New output in {name}.log:")
    return log_end


def check_stalled(verdict: Verdict) -> Failure:
    """Check that the attempt failed because a component hung, and return the failure."""
    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    return verdict.failure


def test_report_about_a_stopped_component_has_kernel_state_and_stacks(
    harness: ComponentHarness,
) -> None:
    port = free_port()
    live = LiveProbe(http=f"http://127.0.0.1:{port}/", every_s=0.05, timeout_s=0.2, misses=2)
    supervisor = harness.start_all(
        build_python_component(
            harness, "api", SERVES % port, ready=ReadyProbe(tcp=str(port)), live=live
        ),
        harness.component("trainer"),
    )
    pid = harness.wait_for_pid("api")

    os.kill(pid, signal.SIGSTOP)
    failure = check_stalled(harness.wait_for_verdict(supervisor))

    assert (failure.component, failure.rule, failure.signal) == ("api", "live", None)
    assert "Fatal Python error" not in failure.message + failure.log_tail
    report = read_report(harness, "api")
    assert f"pid {pid}, child of" in report and "http.server" in report
    assert "state: T (stopped)" in report
    assert f" 127.0.0.1:{port} LISTEN" in report
    assert "serve_requests" in read_log_end(harness, "api")
    assert not (harness.directory / "trainer.hang.txt").exists()


#: Mapping from a process state to the code of a program that hangs in this state. The state is the
#: letter that /proc shows.
SHAPES = {
    "S": """
import threading
first_lock, second_lock = threading.Lock(), threading.Lock()
def acquire_both(first, second, met=threading.Barrier(2)):
    with first:
        met.wait()
        print("up", flush=True)
        with second:
            pass
threading.Thread(target=acquire_both, args=(second_lock, first_lock), daemon=True).start()
def deadlock():
    acquire_both(first_lock, second_lock)
deadlock()
""",
    "R": """
def spin_forever():
    print("up", flush=True)
    while True:
        pass
spin_forever()
""",
    "T": """
import os, signal
def stop_itself():
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
stop_itself()
""",
}


@pytest.mark.parametrize(
    ("state", "frame"),
    [("S", "acquire_both (<string>:8)"), ("R", "spin_forever"), ("T", "stop_itself")],
)
def test_message_about_a_hang_names_rank_node_and_frame(
    harness: ComponentHarness, state: str, frame: str
) -> None:
    if hang_report._find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    component = harness.component(
        "trainer", (sys.executable, "-c", SHAPES[state]), env={"RANK": "3"}, ready=UP
    )
    supervisor = harness.start_all(component, stall_after_s=2.0)
    pid = harness.wait_for_pid("trainer")
    wait_until(lambda: read_process_state(pid) == state, f"state {state}")

    failure = check_stalled(harness.wait_for_verdict(supervisor))

    process_description = f"rank 3, node {host_name()}, pid {pid} ("
    assert f"hangs in {frame}" in failure.message and process_description in failure.message
    _, named_process, *_ = read_report(harness, "trainer").split("\n\n")
    assert (
        named_process.startswith(f"trainer, {process_description}")
        and frame in named_process
        and f"), {state} (" in named_process
    )


#: Programs whose child process hangs in `hang_in_child`, while the parent waits for the end of the
#: child. Each value contains only the lines that start the child.
PARENTS = {
    "join": """
        child = multiprocessing.get_context("spawn").Process(target=hang_in_child)
        child.start()
        child.join()
""",
    "pool": """
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(hang_in_child)
""",
    "executor": """
        from concurrent.futures import ProcessPoolExecutor
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            executor.submit(hang_in_child).result()
""",
    "subprocess": """
        import subprocess
        subprocess.run([sys.executable, __file__, "child"])
""",
}
PARENT = """
import multiprocessing, sys, threading

def hang_in_child():
    print("up", flush=True)
    threading.Event().wait()

def main():
    if sys.argv[1:]:
        hang_in_child()
    else:{start}
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "way",
    [
        "join",
        "executor",
        pytest.param("pool", marks=pytest.mark.thorough),
        pytest.param("subprocess", marks=pytest.mark.thorough),
    ],
)
def test_message_about_a_hang_names_the_child_that_its_parent_waits_for(
    harness: ComponentHarness, way: str
) -> None:
    if hang_report._find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    program = harness.directory / "program.py"
    program.write_text(PARENT.format(start=PARENTS[way]))
    component = harness.component("trainer", (sys.executable, str(program)), ready=UP)
    supervisor = harness.start_all(component, stall_after_s=3.0)

    failure = check_stalled(harness.wait_for_verdict(supervisor))

    assert "it hangs in hang_in_child (program.py:6), in " in failure.message


#: A program of rank 1 with two workers. One worker hangs in `hang_in_child`. The other worker waits
#: in library code, like an idle worker of PyTorch's data loader. If the start method is `fork`, the
#: call stack of each worker also shows `main`, which forked the worker.
IDLE_WORKER = """
import multiprocessing, threading
from multiprocessing import connection

def hang_in_child():
    print("up", flush=True)
    threading.Event().wait()

def main():
    context = multiprocessing.get_context("START_METHOD")
    reader, writer = context.Pipe()
    context.Process(target=connection.wait, args=([reader], 600)).start()
    worker = context.Process(target=hang_in_child)
    worker.start()
    worker.join()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "start_method",
    [
        "fork",
        pytest.param("forkserver", marks=pytest.mark.thorough),
        pytest.param("spawn", marks=pytest.mark.thorough),
    ],
)
def test_message_about_a_hang_names_no_idle_worker(
    harness: ComponentHarness, start_method: str
) -> None:
    if hang_report._find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    program = harness.directory / "program.py"
    program.write_text(IDLE_WORKER.replace("START_METHOD", start_method))
    component = harness.component(
        "trainer", (sys.executable, str(program)), ready=UP, env={"RANK": "1"}
    )
    supervisor = harness.start_all(component, stall_after_s=3.0)

    failure = check_stalled(harness.wait_for_verdict(supervisor))

    assert "it hangs in hang_in_child (program.py:7), in " in failure.message
    assert " or in " not in failure.message


def read_process_state(pid: int) -> str:
    """Return the letter that the kernel shows as the state of a process, such as "S"."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_report_about_a_deadlock_names_the_blocked_function(harness: ComponentHarness) -> None:
    verdict = harness.run(
        build_python_component(harness, "trainer", STUCK % "", ready=UP), stall_after_s=2.0
    )

    failure = check_stalled(verdict)
    assert (failure.component, failure.rule) == ("trainer", "stall")
    assert "in wait_for_lock" in read_log_end(harness, "trainer")
    diagnosed = harness.wait_for_event("component.diagnosed", "trainer")
    assert diagnosed.fields["path"] == str(harness.directory / "trainer.hang.txt")
    # Muster has made the hung component print its stack traces. The failure must not quote these
    # stack traces as the component's own log lines.
    assert "wait_for_lock" not in failure.log_tail


def test_component_that_hangs_during_its_start_is_named_and_examined(
    harness: ComponentHarness,
) -> None:
    never = ReadyProbe(log="never said", within_s=DEADLINE_S)

    verdict = harness.run(
        build_python_component(harness, "api", STUCK % "", ready=never),
        harness.component("trainer"),
        stall_after_s=2.0,
    )

    assert check_stalled(verdict).component == "api"
    assert "in wait_for_lock" in read_log_end(harness, "api")
    assert harness.list_events("component.starting", "trainer") == []


def test_py_spy_reports_the_stack_if_faulthandler_is_disabled(harness: ComponentHarness) -> None:
    if hang_report._find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    disable_faulthandler = "import faulthandler; faulthandler.disable()"
    verdict = harness.run(
        build_python_component(
            harness, "trainer", STUCK % disable_faulthandler, ready=UP, live=MISSED
        )
    )

    check_stalled(verdict)
    report = read_report(harness, "trainer")
    assert "py-spy of pid" in report and "wait_for_lock" in report
    assert read_log_end(harness, "trainer") == ""


def test_process_reports_its_own_frame_if_py_spy_is_unavailable(
    harness: ComponentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_report, "_find_py_spy", lambda: None)

    verdict = harness.run(
        build_python_component(harness, "trainer", STUCK % "", ready=UP, live=MISSED)
    )

    assert "it hangs in wait_for_lock (<string>:7) (on node " in check_stalled(verdict).message


def test_component_that_exits_at_sigterm_is_not_aborted(harness: ComponentHarness) -> None:
    script = (
        "import os, signal, time\n"
        f"{LEAVES_AT_SIGTERM}\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    time.sleep(600)\n"
    )

    verdict = harness.run(
        build_python_component(
            harness, "trainer", script, ready=UP, live=MISSED, grace_s=DEADLINE_S
        )
    )

    check_stalled(verdict)
    exit_event = harness.wait_for_event("component.exited", "trainer")
    assert (exit_event.fields["exit_code"], exit_event.fields["signal"]) == (0, None)
    assert read_log_end(harness, "trainer").strip() == "saved"


def test_component_that_ignores_sigterm_dumps_its_stacks_before_it_is_killed(
    harness: ComponentHarness,
) -> None:
    stays = STUCK % IGNORES_SIGTERM_IN_A_HANDLER

    verdict = harness.run(
        build_python_component(harness, "trainer", stays, ready=UP, live=MISSED, grace_s=2.0)
    )

    check_stalled(verdict)
    assert harness.wait_for_event("component.exited", "trainer").fields["signal"] == "SIGABRT"
    assert "in wait_for_lock" in read_log_end(harness, "trainer")


def test_hanging_child_processes_dump_their_stacks_too(harness: ComponentHarness) -> None:
    parent = (
        "import subprocess, sys\n"
        "def run_worker():\n"
        f"    subprocess.run([sys.executable, '-c', {STUCK % ''!r}])\n"
        "run_worker()\n"
    )

    verdict = harness.run(build_python_component(harness, "trainer", parent, ready=UP, live=MISSED))

    check_stalled(verdict)
    log_end = read_log_end(harness, "trainer")
    assert "in wait_for_lock" in log_end and "in run_worker" in log_end
    assert read_report(harness, "trainer").count(", child of ") == 2


def test_report_about_a_program_without_python_has_only_the_kernel_state(
    harness: ComponentHarness,
) -> None:
    verdict = harness.run(
        harness.component("trainer", sh("echo up; exec sleep 600"), ready=UP, live=MISSED)
    )

    check_stalled(verdict)
    report = read_report(harness, "trainer")
    assert "sleep 600" in report and "state: S (sleeping)" in report
    assert "py-spy" not in report
    assert harness.wait_for_event("component.exited", "trainer").fields["signal"] == "SIGTERM"


def test_secrets_are_masked_in_the_report(harness: ComponentHarness) -> None:
    script = "import sys; sys.stderr.write('hunter2hunter2')\n" + STUCK % ""
    component = harness.component(
        "trainer",
        (sys.executable, "-c", script, "--key=hunter2hunter2"),
        env={"PYTHONFAULTHANDLER": "1", "API_KEY": "hunter2hunter2", "PLAIN": "seen-nowhere"},
        ready=UP,
        live=MISSED,
    )

    verdict = harness.run(component, mask=lambda text: text.replace("hunter2hunter2", "***"))

    check_stalled(verdict)
    report = read_report(harness, "trainer")
    assert "--key=***" in report
    assert "hunter2" not in report and "seen-nowhere" not in report


def test_component_is_ended_even_if_the_report_cannot_be_written(harness: ComponentHarness) -> None:
    (harness.directory / "trainer.hang.txt").mkdir()

    verdict = harness.run(
        build_python_component(harness, "trainer", STUCK % "", ready=UP, live=MISSED)
    )

    check_stalled(verdict)
    assert harness.list_events("component.diagnosed") == []


def test_examination_that_never_finishes_does_not_prevent_the_end(
    harness: ComponentHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    never_set = threading.Event()
    monkeypatch.setattr("tasks.processes.hang_report._EXAMINED_WITHIN_S", 0.1)
    monkeypatch.setattr("tasks.processes.hang_report.kernel_view", lambda pids: never_set.wait())

    verdict = harness.run(
        build_python_component(harness, "trainer", STUCK % "", ready=UP, live=MISSED)
    )

    check_stalled(verdict)
    assert not never_set.is_set()
    never_set.set()
