"""The supervisor: a thread that watches an attempt while the caller does other work."""

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

#: Number of files that this process needs to open. Each component needs two or three.
_OPEN_FILES = 1 << 16


class Supervisor:
    """Supervises one attempt from its own thread.

    The caller's thread may wait for a request or be interrupted by a signal at any time. The
    supervisor still notices deaths and completes a teardown. Leaving the context ends everything.
    This process becomes a subreaper permanently.
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
            plan: The components and their settings.
            ports: The ports of the run.
            emit: Publishes events.
            register: The run's registry on disk. None: the run is not registered, so that
                `reconcile` cannot end its leftovers.
            template: Template for the guardians; it is closed when they are forked. None: one is
                made.
            replan: See `SupervisedAttempt`; it is called in another thread.
        """
        with contextlib.suppress(OSError):  # Containment level L1 has no subreapers.
            tree.become_subreaper()
        tree.allow_files(_OPEN_FILES)
        self._attempt = SupervisedAttempt(plan, ports, emit, register, template, replan)
        self._loop = LoopThread("supervisor", self._attempt.crash)
        # Prepare first, in parallel to the caller.
        self._loop.soon(self._attempt.prepare)
        self._verdict: Verdict | None = None

    def start(self, component: str) -> None:
        """Start a component and wait until it is ready.

        Raises:
            RunEnded: The end of the run was decided before the component was ready.
        """
        self._loop.call(self._attempt.start(component))

    def wait_decided(self) -> None:
        """Wait until the end of the run is decided."""
        self._loop.call(self._attempt.decided.wait())

    @property
    def decision(self) -> Decision | None:
        """The decision on the end of the run; an earlier event may still replace it. None:
        undecided.
        """
        return self._attempt.earliest.decision

    def describe(self, component: str) -> str:
        """Return the component's name, with its pid if the component has started: `trainer (pid
        812)`.
        """
        return str(self._attempt.members.get(component, component))

    def interrupt(self, why: str, state: RunState = RunState.CANCELLED) -> None:
        """End the attempt. With state RUNNING, its jobs continue until the run is resumed."""
        self._loop.soon(self._attempt.interrupt, why, state)

    def crash(self, error: BaseException) -> None:
        """End the run as failed after an error in the caller."""
        self._loop.soon(self._attempt.crash, error)

    def fail(self, failure: Failure) -> None:
        """End the run as failed for a reason that is not a component's."""
        self._loop.soon(self._attempt.fail, failure)

    def hurry(self) -> None:
        """End all components without a grace period."""
        self._loop.soon(self._attempt.hurry)

    def teardown(self) -> Verdict:
        """Stop everything in reverse order and wait until no process remains.

        May be called any number of times.

        Returns:
            The verdict on the attempt.
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
