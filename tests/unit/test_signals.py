"""Tests of signals and cancellations of a run: repeated requests, end of the grace period."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from tasks.processes.signals import (
    ENDING_SIGNALS,
    CtrlC,
    ignore_exactly,
    ignored_signals,
    receive_signals,
)
from tasks.server import interruption
from tasks.server.interruption import (
    Change,
    ForwardedRequests,
    ObservedFlowRun,
    end_on_request,
)

TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP


class RecordingSession:
    """Fake session of a run. The session records the calls of its methods."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_handing_over = False
        self.calls = queue.SimpleQueue[str]()

    def interrupt(self, why: str) -> None:
        with self.lock:
            self.calls.put(f"interrupt: {why}")

    def hurry(self) -> None:
        self.calls.put("hurry")

    def hand_over(self, why: str) -> None:
        self.calls.put("let go")

    @property
    def verbs(self) -> list[str]:
        """Names of the called methods, in order. Each read of this property clears the list."""
        return [self.calls.get().partition(":")[0] for _ in range(self.calls.qsize())]


@pytest.fixture
def dispositions() -> Iterator[None]:
    """Restore this process's signal handlers after a test that changes them."""
    handlers = {signum: signal.getsignal(signum) for signum in ENDING_SIGNALS}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def requests_of_session(
    session: RecordingSession,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_worker: bool,
    may_be_left: bool = False,
) -> ForwardedRequests:
    """Return a `ForwardedRequests` object, which reports signals and cancellations to a session.

    Args:
        session: Fake session that receives the requests.
        monkeypatch: Replaces the search for the worker's flow run.
        has_worker: True if a worker has started the run.
        may_be_left: True if the next worker may continue the run after a SIGTERM. A cancelled run
            is not continued.
    """
    started_by = SimpleNamespace() if has_worker else None
    monkeypatch.setattr(interruption, "find_worker_flow_run", lambda: started_by)
    return ForwardedRequests(session, uuid4(), may_be_left=may_be_left)


@pytest.mark.parametrize(
    ("has_worker", "arrivals"),
    [
        # A run is cancelled: the worker sends SIGTERM, and the server reports the cancellation.
        # Both count as one request to end the run.
        (True, [TERM, Change.CANCELLED, Change.CANCELLED]),
        (True, [Change.CANCELLED, TERM]),
        # The program that stops the run may send SIGTERM to the process and also to its process
        # group. Several signals count as one request to end the run.
        (True, [TERM, TERM, TERM]),
        # A run under a worker has no terminal, so two SIGINTs are not two presses of Ctrl-C.
        (True, [(INT, 0.0), (INT, 5.0)]),
        # A terminal is closed: the kernel, the shell and an init system each send a signal. The
        # signals count as one request to end the run.
        (False, [HUP, HUP, TERM]),
        # One press of Ctrl-C counts once, although a wrapper program in the terminal's process
        # group sends the signal again.
        (False, [(INT, 10.0), (INT, 10.02), (INT, 10.05)]),
        # The user cancels the run in Prefect's UI, and presses Ctrl-C once. Both count as one
        # request to end the run.
        (False, [Change.CANCELLED, (INT, 3.0)]),
        (False, [TERM, (INT, 3.0)]),
    ],
)
def test_request_that_arrives_several_times_keeps_the_grace_period(
    monkeypatch: pytest.MonkeyPatch, has_worker: bool, arrivals: list[Any]
) -> None:
    session = RecordingSession()
    wishes = requests_of_session(session, monkeypatch, has_worker=has_worker)

    for arrival in arrivals:
        if isinstance(arrival, Change):
            wishes.take_observation(ObservedFlowRun(change=arrival))
        else:
            wishes.take_signal(*(arrival if isinstance(arrival, tuple) else (arrival, 0.0)))

    assert set(session.verbs) == {"interrupt"}


def test_second_ctrl_c_ends_the_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = RecordingSession()
    wishes = requests_of_session(session, monkeypatch, has_worker=False)

    wishes.take_signal(INT, 10.0)
    calls_after_first = session.verbs
    wishes.take_signal(INT, 10.5)
    calls_after_second = session.verbs

    assert calls_after_first == ["interrupt"]
    assert calls_after_second == ["interrupt", "hurry"]


@pytest.mark.parametrize("has_worker", [True, False])
def test_immediate_cancel_ends_the_grace_period(
    monkeypatch: pytest.MonkeyPatch, has_worker: bool
) -> None:
    session = RecordingSession()
    wishes = requests_of_session(session, monkeypatch, has_worker=has_worker)

    wishes.take_observation(ObservedFlowRun(change=Change.CANCELLED))
    calls_after_first = session.verbs
    wishes.take_observation(ObservedFlowRun(change=Change.CANCELLED_NOW))
    calls_after_second = session.verbs

    assert calls_after_first == ["interrupt"]
    assert calls_after_second == ["interrupt", "hurry"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Change.NONE, "let go"),
        (Change.SET_BACK, "let go"),
        (Change.CANCELLED, "interrupt"),
        (Change.DELETED, "interrupt"),
    ],
)
def test_stopped_worker_leaves_a_resumable_run_and_cancel_ends_it(
    monkeypatch: pytest.MonkeyPatch, change: Change, expected: str
) -> None:
    session = RecordingSession()
    observed = ObservedFlowRun(change=change)
    monkeypatch.setattr(interruption, "observe_flow_run", lambda flow_run_id: observed)
    wishes = requests_of_session(session, monkeypatch, has_worker=True, may_be_left=True)

    wishes.take_signal(TERM, 0.0)

    assert session.calls.get(timeout=10).partition(":")[0] == expected


def test_message_after_a_hangup_explains_runs_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = RecordingSession()

    requests_of_session(session, monkeypatch, has_worker=False).take_signal(HUP, 0.0)

    message = session.calls.get()
    assert message.startswith("interrupt: interrupted by SIGHUP")
    assert "nohup muster train" in message and "muster submit" in message


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0.0], [False]),
        ([0.0, 0.05], [False, False]),
        ([0.0, 0.1], [False, True]),
        # One press of Ctrl-C causes several signals, which follow each other within a moment.
        ([0.0, 0.06, 0.12], [False, False, False]),
        ([0.0, 1.0, 1.05], [False, True, False]),
    ],
)
def test_repeated_deliveries_of_one_press_count_once(
    times: list[float], expected: list[bool]
) -> None:
    ctrl_c = CtrlC()

    assert [ctrl_c.is_second(at_s) for at_s in times] == expected


@pytest.mark.timeout(30)
def test_signal_during_a_held_lock_is_handled_afterwards(dispositions: None) -> None:
    # Make sure that SIGINT is not ignored. A shell without job control starts a background program,
    # for example this test run, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    session = RecordingSession()

    with end_on_request(session, uuid4(), may_be_left=False):
        with session.lock:
            # Both signals arrive while this thread holds `session.lock`.
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        calls = [session.calls.get(timeout=10), session.calls.get(timeout=10)]

    assert calls == ["interrupt: interrupted by SIGTERM", "interrupt: interrupted by SIGINT"]


def test_handlers_are_restored_after_the_context() -> None:
    original_handler = signal.getsignal(signal.SIGTERM)

    with end_on_request(RecordingSession(), uuid4(), may_be_left=False):
        assert signal.getsignal(signal.SIGTERM) is not original_handler

    assert signal.getsignal(signal.SIGTERM) is original_handler
    assert "signals" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("signum", ENDING_SIGNALS)
def test_ignored_signal_stays_ignored_during_a_run(
    dispositions: None, signum: signal.Signals
) -> None:
    session = RecordingSession()
    signal.signal(signum, signal.SIG_IGN)
    other = TERM if signum == HUP else HUP

    with end_on_request(session, uuid4(), may_be_left=False):
        os.kill(os.getpid(), signum)
        os.kill(os.getpid(), other)
        first = session.calls.get(timeout=10)

    assert first.startswith(f"interrupt: interrupted by {other.name}")
    assert session.verbs == []
    assert signal.getsignal(signum) == signal.SIG_IGN


def test_ignored_signals_are_copied_from_another_program(dispositions: None) -> None:
    signal.signal(INT, signal.SIG_IGN)

    ignore_exactly([HUP])

    assert {INT, HUP} & ignored_signals() == {HUP}
    assert signal.getsignal(INT) is signal.default_int_handler


#: Program that executes one run and receives a signal before, during or after the run.
PROGRAM = """
import os, signal, sys
from tasks.processes.signals import *
stage, signum = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGHUP, signal.SIG_IGN) if "ignored" in stage else None
expect_one_run()
interrupt_on_signals()
def send(at):
    if at in stage:
        os.kill(os.getpid(), signum)
send("before")
taken = []
with receive_signals(lambda signum, at_s: taken.append(signum)):
    send("during")
send("between")
print(taken)
ignore_until_exit()
send("after")
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("stage", "signum", "expected"),
    [
        ("before", TERM, (1, "")),
        ("before ignored", HUP, (3, "[]")),
        ("during", HUP, (3, f"[{HUP:d}]")),
        ("during ignored", HUP, (3, "[]")),
        *[("between", signum, (3, "[]")) for signum in ENDING_SIGNALS],
        *[("after", signum, (3, "[]")) for signum in ENDING_SIGNALS],
    ],
)
def test_signal_after_the_run_changes_nothing(
    stage: str, signum: signal.Signals, expected: tuple[int, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, stage, str(int(signum))], capture_output=True, text=True
    )

    # After an unhandled KeyboardInterrupt, Python kills itself with SIGINT. The test counts this
    # end as exit code 1.
    code = 1 if done.returncode == -INT else done.returncode
    assert (code, done.stdout.strip()) == expected, done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (expected[0] == 1)


def test_signal_is_received_while_the_main_thread_waits_for_a_lock() -> None:
    """The main thread also blocks the signal, so the kernel delivers it to another thread."""
    is_received = threading.Event()
    results = []
    lock = threading.Lock()
    lock.acquire()

    def accept_signal() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [TERM])
        os.kill(os.getpid(), TERM)
        results.append(is_received.wait(10))
        lock.release()

    with receive_signals(lambda signum, at_s: is_received.set()):
        signal.pthread_sigmask(signal.SIG_BLOCK, [TERM])
        try:
            thread = threading.Thread(target=accept_signal)
            thread.start()
            lock.acquire()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [TERM])
        thread.join()

    assert results == [True]
