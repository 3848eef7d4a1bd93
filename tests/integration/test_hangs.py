"""A component that hangs leaves its state beside its log before it is ended."""

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
from tests.support.stage import DEADLINE_S, Stage, free_port, sh, wait_until

UP = ReadyProbe(log="up", within_s=DEADLINE_S)
#: Finds whatever is ready to hang.
MISSED = LiveProbe(file="never-there", every_s=0.02, misses=2)

#: Answers one request after the other; `SERVES % port`.
SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
def serves_for_ever():
    http.server.HTTPServer(("127.0.0.1", %d), Handler).serve_forever()
serves_for_ever()
"""

#: Waits for a lock that nobody gives back; `STUCK % what it does about SIGTERM`.
STUCK = """
import os, signal, sys, threading
lock = threading.Lock()
def waits_for_ever():
    lock.acquire()
    print("up", flush=True)
    lock.acquire()
%s
waits_for_ever()
"""
LEAVES_AT_SIGTERM = """
def leave(*_):
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
"""
IGNORES_SIGTERM_IN_A_HANDLER = "signal.signal(signal.SIGTERM, lambda *_: print('no'))"


def program(stage: Stage, name: str, code: str, **more: object) -> ComponentPlan:
    """A Python component as a run has it: faulthandler on."""
    return stage.component(
        name,
        (sys.executable, "-c", code),
        env={"PYTHONFAULTHANDLER": "1"},
        **more,  # type: ignore[arg-type]
    )


def report_of(stage: Stage, name: str) -> str:
    return (stage.directory / f"{name}.hang.txt").read_text()


def last_words(stage: Stage, name: str) -> str:
    """What the component itself wrote once it was examined."""
    _, _, said = report_of(stage, name).partition(f"{name}.log from then on:")
    return said


def stalled(verdict: Verdict) -> Failure:
    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    return verdict.failure


def test_stopped_component_leaves_the_kernels_view_and_its_stacks(stage: Stage) -> None:
    port = free_port()
    live = LiveProbe(http=f"http://127.0.0.1:{port}/", every_s=0.05, timeout_s=0.2, misses=2)
    supervisor = stage.running(
        program(stage, "api", SERVES % port, ready=ReadyProbe(tcp=str(port)), live=live),
        stage.component("trainer"),
    )
    pid = stage.pid_of("api")

    os.kill(pid, signal.SIGSTOP)
    failure = stalled(stage.verdict_of(supervisor))

    assert (failure.component, failure.rule, failure.signal) == ("api", "live", None)
    assert "Fatal Python error" not in failure.message + failure.log_tail
    report = report_of(stage, "api")
    assert f"pid {pid}, child of" in report and "http.server" in report
    assert "state: T (stopped)" in report
    assert f" 127.0.0.1:{port} LISTEN" in report
    assert "serves_for_ever" in last_words(stage, "api")
    assert not (stage.directory / "trainer.hang.txt").exists()


#: By the state that the kernel gives to each.
SHAPES = {
    "S": """
import threading
one, other = threading.Lock(), threading.Lock()
def locks(first, second, met=threading.Barrier(2)):
    with first:
        met.wait()
        print("up", flush=True)
        with second:
            pass
threading.Thread(target=locks, args=(other, one), daemon=True).start()
def deadlocked_here():
    locks(one, other)
deadlocked_here()
""",
    "R": """
def spinning_here():
    print("up", flush=True)
    while True:
        pass
spinning_here()
""",
    "T": """
import os, signal
def stopped_here():
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
stopped_here()
""",
}


@pytest.mark.parametrize(
    ("state", "frame"),
    [("S", "locks (<string>:8)"), ("R", "spinning_here"), ("T", "stopped_here")],
)
def test_each_hang_is_named_by_rank_node_and_frame(stage: Stage, state: str, frame: str) -> None:
    if hang_report._py_spy() is None:
        pytest.skip("py-spy is not installed")
    hangs = stage.component(
        "trainer", (sys.executable, "-c", SHAPES[state]), env={"RANK": "3"}, ready=UP
    )
    supervisor = stage.running(hangs, stall_after_s=2.0)
    pid = stage.pid_of("trainer")
    wait_until(lambda: state_of(pid) == state, f"state {state}")

    failure = stalled(stage.verdict_of(supervisor))

    who = f"rank 3, node {host_name()}, pid {pid} ("
    assert f"hangs in {frame}" in failure.message and who in failure.message
    _, named, *_ = report_of(stage, "trainer").split("\n\n")
    assert named.startswith(f"trainer, {who}") and frame in named and f"), {state} (" in named


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_component_stuck_in_a_lock_names_the_function_it_hangs_in(stage: Stage) -> None:
    verdict = stage.run(program(stage, "trainer", STUCK % "", ready=UP), stall_after_s=2.0)

    failure = stalled(verdict)
    assert (failure.component, failure.rule) == ("trainer", "stall")
    assert "in waits_for_ever" in last_words(stage, "trainer")
    diagnosed = stage.until("component.diagnosed", "trainer")
    assert diagnosed.fields["path"] == str(stage.directory / "trainer.hang.txt")
    # What it says when asked by us is not why it was ended.
    assert "waits_for_ever" not in failure.log_tail


def test_a_component_that_hangs_while_it_starts_is_named_and_examined(stage: Stage) -> None:
    never = ReadyProbe(log="never said", within_s=DEADLINE_S)

    verdict = stage.run(
        program(stage, "api", STUCK % "", ready=never),
        stage.component("trainer"),
        stall_after_s=2.0,
    )

    assert stalled(verdict).component == "api"
    assert "in waits_for_ever" in last_words(stage, "api")
    assert stage.seen("component.starting", "trainer") == []


def test_py_spy_tells_the_stack_of_a_process_that_cannot_speak(stage: Stage) -> None:
    if hang_report._py_spy() is None:
        pytest.skip("py-spy is not installed")
    deaf = "import faulthandler; faulthandler.disable()"
    verdict = stage.run(program(stage, "trainer", STUCK % deaf, ready=UP, live=MISSED))

    stalled(verdict)
    report = report_of(stage, "trainer")
    assert "py-spy of pid" in report and "waits_for_ever" in report
    assert last_words(stage, "trainer") == ""


def test_where_py_spy_may_not_look_the_process_names_its_frame_itself(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_report, "_py_spy", lambda: None)

    verdict = stage.run(program(stage, "trainer", STUCK % "", ready=UP, live=MISSED))

    assert "it hangs in waits_for_ever (<string>:7) (node " in stalled(verdict).message


def test_component_that_leaves_in_good_order_is_not_aborted(stage: Stage) -> None:
    hangs_elsewhere = (
        "import os, signal, time\n"
        f"{LEAVES_AT_SIGTERM}\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    time.sleep(600)\n"
    )

    verdict = stage.run(
        program(stage, "trainer", hangs_elsewhere, ready=UP, live=MISSED, grace_s=DEADLINE_S)
    )

    stalled(verdict)
    exited = stage.until("component.exited", "trainer")
    assert (exited.fields["exit_code"], exited.fields["signal"]) == (0, None)
    assert last_words(stage, "trainer").strip() == "saved"


def test_component_that_outlives_sigterm_is_asked_before_it_is_killed(stage: Stage) -> None:
    stays = STUCK % IGNORES_SIGTERM_IN_A_HANDLER

    verdict = stage.run(program(stage, "trainer", stays, ready=UP, live=MISSED, grace_s=2.0))

    stalled(verdict)
    assert stage.until("component.exited", "trainer").fields["signal"] == "SIGABRT"
    assert "in waits_for_ever" in last_words(stage, "trainer")


def test_children_that_hang_are_asked_too(stage: Stage) -> None:
    parent = (
        "import subprocess, sys\n"
        "def minds_its_worker():\n"
        f"    subprocess.run([sys.executable, '-c', {STUCK % ''!r}])\n"
        "minds_its_worker()\n"
    )

    verdict = stage.run(program(stage, "trainer", parent, ready=UP, live=MISSED))

    stalled(verdict)
    said = last_words(stage, "trainer")
    assert "in waits_for_ever" in said and "in minds_its_worker" in said
    assert report_of(stage, "trainer").count(", child of ") == 2


def test_program_that_is_not_python_leaves_the_kernels_view_alone(stage: Stage) -> None:
    verdict = stage.run(
        stage.component("trainer", sh("echo up; exec sleep 600"), ready=UP, live=MISSED)
    )

    stalled(verdict)
    report = report_of(stage, "trainer")
    assert "sleep 600" in report and "state: S (sleeping)" in report
    assert "py-spy" not in report
    assert stage.until("component.exited", "trainer").fields["signal"] == "SIGTERM"


def test_secrets_are_masked_in_what_is_written_down(stage: Stage) -> None:
    tells = "import sys; sys.stderr.write('hunter2hunter2')\n" + STUCK % ""
    component = stage.component(
        "trainer",
        (sys.executable, "-c", tells, "--key=hunter2hunter2"),
        env={"PYTHONFAULTHANDLER": "1", "API_KEY": "hunter2hunter2", "PLAIN": "seen-nowhere"},
        ready=UP,
        live=MISSED,
    )

    verdict = stage.run(component, mask=lambda text: text.replace("hunter2hunter2", "***"))

    stalled(verdict)
    report = report_of(stage, "trainer")
    assert "--key=***" in report
    assert "hunter2" not in report and "seen-nowhere" not in report


def test_report_that_cannot_be_written_hinders_nothing(stage: Stage) -> None:
    (stage.directory / "trainer.hang.txt").mkdir()

    verdict = stage.run(program(stage, "trainer", STUCK % "", ready=UP, live=MISSED))

    stalled(verdict)
    assert stage.seen("component.diagnosed") == []


def test_look_that_never_ends_delays_the_end_and_no_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forever = threading.Event()
    monkeypatch.setattr("tasks.processes.hang_report._EXAMINED_WITHIN_S", 0.1)
    monkeypatch.setattr("tasks.processes.hang_report.kernel_view", lambda pids: forever.wait())

    verdict = stage.run(program(stage, "trainer", STUCK % "", ready=UP, live=MISSED))

    stalled(verdict)
    assert not forever.is_set()
    forever.set()
