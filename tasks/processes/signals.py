"""Handle the signals that request the end of a program of Muster: SIGINT, SIGTERM and SIGHUP.

A signal that is ignored at the start of a program stays ignored. For example, `nohup` starts a
program with SIGHUP ignored, and a shell without job control starts background programs with SIGINT
ignored.

A program that executes one run treats these signals differently before, during and after the run.
Before the run, a signal raises KeyboardInterrupt. During the run, it ends the run. After the run,
a signal changes neither the result of the run nor the exit code, except that a second Ctrl-C ends
the program.
"""

from __future__ import annotations

import contextvars
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

#: Signals that request the end of a program.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Several SIGINTs within this number of seconds count as one Ctrl-C. A terminal sends SIGINT to all
#: processes in the foreground, and one of these processes may send a second SIGINT to its child
#: process.
ONE_PRESS_S = 0.1

#: Signals that Python itself ignores in every program.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
#: Signals that no program can ignore or handle.
_CANNOT_BE_HANDLED = {signal.SIGKILL, signal.SIGSTOP}


class CtrlC:
    """Detects a second press of Ctrl-C, although one press may cause several SIGINTs."""

    def __init__(self) -> None:
        self._last_at_s: float | None = None

    def is_second(self, at_s: float) -> bool:
        """Record a SIGINT, and return True if it is a second press of Ctrl-C.

        Args:
            at_s: Time of the signal's arrival, in CLOCK_MONOTONIC seconds.
        """
        previous_s = self._last_at_s
        self._last_at_s = at_s
        return previous_s is not None and at_s - previous_s >= ONE_PRESS_S


class _Program:
    """State of this program: whether it executes one run, and whether that run has ended."""

    def __init__(self) -> None:
        #: True if the program executes one run and ends after it.
        self.has_one_run = False
        #: True after the program's run has ended.
        self.has_run_ended = False
        #: Signals that were ignored when the program started.
        self.ignored: frozenset[int] = frozenset()
        #: Used by `on_signal` to detect a second press of Ctrl-C. During the run, `receive_signals`
        #: handles the signals instead.
        self.ctrl_c = CtrlC()

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal that arrives before or after the run.

        Before the run, every signal raises KeyboardInterrupt. After the run, only a second press of
        Ctrl-C raises KeyboardInterrupt, and other signals are ignored.
        """
        # A second Ctrl-C ends the program even after the end of the run. So a person need not wait
        # for a server that does not answer.
        is_second_press = signum == signal.SIGINT and self.ctrl_c.is_second(time.monotonic())
        if is_second_press or not self.has_run_ended:
            raise KeyboardInterrupt


_program = _Program()


def ignored_signals() -> frozenset[int]:
    """Return the signals that this program ignores now.

    Signals that Python itself ignores in every program are not included.
    """
    numbers = signal.valid_signals() - _IGNORED_BY_PYTHON
    return frozenset(number for number in numbers if signal.getsignal(number) == signal.SIG_IGN)


def ignore_exactly(ignored: Iterable[int]) -> None:
    """Ignore exactly the given signals, and reset all others to their default.

    Afterwards, this process behaves like a program that was started with these signals ignored.

    Args:
        ignored: Numbers of the signals.
    """
    wanted = frozenset(ignored) - _CANNOT_BE_HANDLED - _IGNORED_BY_PYTHON
    current = ignored_signals()
    for number in wanted - current:
        signal.signal(number, signal.SIG_IGN)
    for number in current - wanted:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def interrupt_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt.

    A signal that is ignored at the time of this call stays ignored.
    """
    for signum in ENDING_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _program.on_signal)


def expect_one_run() -> None:
    """Declare that this program executes one run and ends after it.

    Signals that are ignored now stay ignored during the run, even if a library installs a handler
    for them before the run.
    """
    _program.has_one_run = True
    _program.ignored = ignored_signals()


@contextmanager
def receive_signals(receive: Callable[[int, float], None]) -> Iterator[None]:
    """Call a function for each SIGINT, SIGTERM and SIGHUP while the context is open.

    The function is called in a separate thread, which reads the signal numbers from Python's wakeup
    file descriptor. A Python signal handler would not be enough: it only runs in the main thread,
    which may wait for a lock. The kernel may deliver a signal to another thread, and the main
    thread then does not wake up.

    Signals that were ignored at the start of the program or are ignored now stay ignored. The
    context has no effect outside the main thread, because Python cannot handle signals there.

    When the context closes, the former handlers are restored. There is one exception: in a program
    that executes one run, signals then have no effect, except for a second Ctrl-C.

    Args:
        receive: Called with the signal number and the time of its arrival, in CLOCK_MONOTONIC
            seconds. It runs in a copy of the caller's context.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    wakeup_fd_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    handlers_before = {}
    for signum in ENDING_SIGNALS:
        is_ignored = signum in _program.ignored or signal.getsignal(signum) == signal.SIG_IGN
        handler = signal.SIG_IGN if is_ignored else _ignore_in_handler
        handlers_before[signum] = signal.signal(signum, handler)

    def read_signals() -> None:
        while numbers := receiver.recv(1024):
            at_s = time.monotonic()
            for signum in numbers:
                # Skip other signals. Python writes the number of every signal that has a handler
                # to the wakeup file descriptor.
                if signum in ENDING_SIGNALS:
                    receive(signum, at_s)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(read_signals,), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _program.has_run_ended = _program.has_one_run
        for signum, former in handlers_before.items():
            if _program.has_run_ended and signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, _program.on_signal)
            elif not _program.has_run_ended:
                # If `former` is None, C code had installed the former handler. Python cannot
                # restore such a handler, so set the default action.
                signal.signal(signum, signal.SIG_DFL if former is None else former)
        signal.set_wakeup_fd(wakeup_fd_before)
        sender.close()
        thread.join()
        receiver.close()


def _ignore_in_handler(signum: int, frame: FrameType | None) -> None:
    """Do nothing.

    The signals need a handler, even an empty one. Without a handler, Python does not write the
    number of a signal to the wakeup file descriptor. The thread of `receive_signals` reads the
    numbers from this file descriptor.
    """


def ignore_until_exit() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP until this program exits.

    Call it when the result of the run is final. A handler that does nothing would not be enough:
    Python removes handlers before it exits, and a signal after that would change the exit code.
    """
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
