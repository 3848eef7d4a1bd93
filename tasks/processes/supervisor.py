"""The supervisor's thread: an attempt is watched there, whatever the caller is busy with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tasks.processes import tree
from tasks.processes.attempt import Decision, SupervisedAttempt
from tasks.processes.component import AttemptPlan
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.loop_thread import LoopThread
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegister
from tasks.record.events import Emit
from tasks.record.outcome import Failure, Verdict
from tasks.record.states import RunState

#: Each component takes two or three.
_OPEN_FILES = 1 << 16


class Supervisor:
    """Supervises one attempt from a thread of its own.

    The caller's thread may hang in a request or be interrupted by a signal at any instruction;
    deaths are seen, and a teardown runs on, all the same. Leaving the context ends everything.
    Makes this process a subreaper, for good.
    """

    def __init__(
        self,
        plan: AttemptPlan,
        ports: PortsReserved,
        emit: Emit,
        register: RunRegister | None = None,
        template: GuardianTemplate | None = None,
        replan: Callable[[str], AttemptPlan] | None = None,
    ) -> None:
        """
        Args:
            replan: see `SupervisedAttempt`; called in a thread.
            register: where what runs is noted on disk; None: nowhere, so that nobody can finish
                what a double kill leaves.
            template: to fork the guardians from, closed once that is done; None: it makes one.
        """
        with contextlib.suppress(OSError):  # At level L1.
            tree.become_subreaper()
        tree.allow_files(_OPEN_FILES)
        self._attempt = SupervisedAttempt(plan, ports, emit, register, template, replan)
        self._loop = LoopThread("supervisor", self._attempt.crash)
        # Before all that is asked of it, and beside what the caller does until then.
        self._loop.soon(self._attempt.prepare)
        self._verdict: Verdict | None = None

    def start(self, component: str) -> None:
        """Start a component and wait until it is ready.

        Raises: RunEnded, when how the run ends is decided, by this component's failure or before.
        """
        self._loop.call(self._attempt.start(component))

    def wait_decided(self) -> None:
        """Wait until how the run ends is decided."""
        self._loop.call(self._attempt.decided.wait())

    @property
    def decision(self) -> Decision | None:
        """What how the run ends was decided to be, unless something earlier comes to light."""
        return self._attempt.earliest.decision

    def describe(self, component: str) -> str:
        """`trainer (pid 812)`, once it has a pid."""
        return str(self._attempt.members.get(component, component))

    def interrupt(self, why: str, state: RunState = RunState.CANCELLED) -> None:
        """End the attempt; as RUNNING, its jobs are left to the next process of the run."""
        self._loop.soon(self._attempt.interrupt, why, state)

    def crash(self, error: BaseException) -> None:
        """End the run as failed, by an error of the caller's."""
        self._loop.soon(self._attempt.crash, error)

    def fail(self, failure: Failure) -> None:
        """End the run as failed, by what no component did."""
        self._loop.soon(self._attempt.fail, failure)

    def hurry(self) -> None:
        """Cut every grace period short."""
        self._loop.soon(self._attempt.hurry)

    def teardown(self) -> Verdict:
        """Stop everything in reverse order and wait until nothing is left; any number of times.

        Returns: the verdict on the attempt.
        """
        if self._verdict is None:
            self._verdict = self._loop.call(self._attempt.teardown())
        return self._verdict

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_open:
            self.teardown()
            self._loop.close()
