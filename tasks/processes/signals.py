"""The signals that ask a program of Muster to end: SIGINT, SIGTERM and SIGHUP.

A signal that is ignored when a program starts stays ignored: `nohup` ignores SIGHUP, and a shell
without job control ignores SIGINT for its background programs.

A program that carries out one run goes through three stages. Before the run, a signal raises
KeyboardInterrupt. During the run, a signal ends the run. After the run, a signal changes neither
the verdict nor the exit code.
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

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds within which several SIGINTs count as one Ctrl-C. A terminal sends SIGINT to the whole
#: foreground group, and a wrapper in that group may pass it on as well.
ONE_PRESS_S = 0.1

#: Signals that Python itself handles: it ignores SIGPIPE and SIGXFSZ in every program.
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_CANNOT_BE_SET = {signal.SIGKILL, signal.SIGSTOP}


class CtrlC:
    """Distinguishes the presses of Ctrl-C: one press may be delivered more than once."""

    def __init__(self) -> None:
        self._last_at_s: float | None = None

    def is_second(self, at_s: float) -> bool:
        """Record a SIGINT, and return True if an earlier press preceded it.

        Args:
            at_s: Time of the signal's arrival, in CLOCK_MONOTONIC seconds.
        """
        previous_s = self._last_at_s
        self._last_at_s = at_s
        return previous_s is not None and at_s - previous_s >= ONE_PRESS_S


class _Program:
    """The current stage of this program: before, during or after its run."""

    def __init__(self) -> None:
        #: True if the program carries out one run and ends after it.
        self.has_one_run = False
        self.has_run_ended = False
        #: Signals that were ignored when the program started.
        self.ignored: frozenset[int] = frozenset()
        #: Presses of Ctrl-C before and after the run.
        self.ctrl_c = CtrlC()

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal that arrives before or after the run."""
        # A second press always works, so that a person can leave a program that waits for a server.
        is_second_press = signum == signal.SIGINT and self.ctrl_c.is_second(time.monotonic())
        if is_second_press or not self.has_run_ended:
            raise KeyboardInterrupt


_program = _Program()


def ignored_signals() -> frozenset[int]:
    """Return the signals that this program ignores, except the signals that Python always
    ignores.
    """
    numbers = signal.valid_signals() - _OF_PYTHON
    return frozenset(number for number in numbers if signal.getsignal(number) == signal.SIG_IGN)


def take_dispositions(ignored: Iterable[int]) -> None:
    """Ignore exactly these signals, like a program that was started with them ignored."""
    wanted = frozenset(ignored) - _CANNOT_BE_SET - _OF_PYTHON
    current = ignored_signals()
    for number in wanted - current:
        signal.signal(number, signal.SIG_IGN)
    for number in current - wanted:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def interrupt_on_signals() -> None:
    """Have SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt. Ignored signals stay ignored."""
    for signum in ENDING_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _program.on_signal)


def expect_one_run() -> None:
    """Declare that this program carries out one run and ends after it.

    Signals that are ignored now stay ignored during the run, even if a library installs a handler.
    """
    _program.has_one_run = True
    _program.ignored = ignored_signals()


@contextmanager
def received_by(receive: Callable[[int, float], None]) -> Iterator[None]:
    """Have a run's function receive SIGINT, SIGTERM and SIGHUP while the context is open.

    The function is called in a thread of its own. That thread reads the signal numbers from the
    interpreter's wakeup descriptor, because a Python signal handler may come too late: it runs in
    the main thread only. If two signals arrive at once, the kernel may deliver both to another
    thread. A main thread that waits for a lock is then not woken.

    Ignored signals stay ignored, even if a library has installed a handler since. Outside the main
    thread, where Python cannot handle signals, the context has no effect.

    After the context, the former handlers are restored. In a program that carries out one run,
    signals then have no effect, except a second Ctrl-C.

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
        handler = signal.SIG_IGN if is_ignored else _leave_to_thread
        handlers_before[signum] = signal.signal(signum, handler)

    def read_signals() -> None:
        while numbers := receiver.recv(1024):
            at_s = time.monotonic()
            for signum in numbers:
                # The interpreter also writes the numbers of other signals that have a handler.
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
                # None stands for a handler that was not installed from Python.
                signal.signal(signum, signal.SIG_DFL if former is None else former)
        signal.set_wakeup_fd(wakeup_fd_before)
        sender.close()
        thread.join()
        receiver.close()


def _leave_to_thread(signum: int, frame: FrameType | None) -> None:
    """Do nothing. With a handler, the interpreter writes the number to the wakeup descriptor."""


def ignore_until_exit() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP from now on, because the verdict of this program is final.

    A handler would not be enough. The interpreter removes handlers before it exits, and a later
    signal would then change the exit code.
    """
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
