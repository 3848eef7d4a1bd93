"""Supervise an attempt in a separate thread, while the caller does other work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tasks.processes import tree
from tasks.processes.attempt import Decision, SupervisedAttempt
from tasks.processes.component import AttemptPlan
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.loop_thread import LoopThread
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegistration
from tasks.record.events import Emit
from tasks.record.outcome import Failure, Verdict
from tasks.record.states import RunState

#: Limit of open files that this process requests. This process keeps two or three files open for
#: each component.
_OPEN_FILES = 1 << 16


class Supervisor:
    """Supervises one attempt in a separate thread.

    The separate thread notices the end of components and completes a teardown even while the
    caller's thread is blocked, or is interrupted by a signal. Use the object in a `with` statement.
    At the end of the statement, all components are ended. The calling process becomes a subreaper
    and stays one.
    """

    def __init__(
        self,
        plan: AttemptPlan,
        ports: PortsReserved,
        emit: Emit,
        register: RunRegistration | None = None,
        template: GuardianTemplate | None = None,
        replan: Callable[[str], AttemptPlan] | None = None,
    ) -> None:
        """
        Args:
            plan: The components and their settings.
            ports: The ports of the run.
            emit: Publishes events.
            register: The run's registry on disk. None if the run is not registered. In this case,
                `muster reconcile` cannot end the leftover processes of the run.
            template: Helper process that forks the guardian processes. Each component runs under
                its own guardian process. The helper process is closed when all guardians were
                forked. If None, a new helper process is started when it is needed.
            replan: See `SupervisedAttempt`. Called in another thread.
        """
        # Some kernels have no subreapers and refuse this call. Muster then uses the containment
        # level L1, which needs no subreaper, see `containment.Level`.
        with contextlib.suppress(OSError):
            tree.become_subreaper()
        tree.allow_files(_OPEN_FILES)
        self._attempt = SupervisedAttempt(plan, ports, emit, register, template, replan)
        self._loop = LoopThread("supervisor", self._attempt.crash)
        # Start the guardian processes now, in the thread of the loop. The caller continues in the
        # meantime, so the components can start sooner.
        self._loop.soon(self._attempt.prepare)
        self._verdict: Verdict | None = None

    def start(self, component: str) -> None:
        """Start a component and wait until it is ready.

        Raises:
            RunEnded: The end of the run was decided before the component was ready.
        """
        self._loop.call(self._attempt.start(component))

    def wait_decided(self) -> None:
        """Wait until an event has decided how the attempt ends."""
        self._loop.call(self._attempt.decided.wait())

    @property
    def decision(self) -> Decision | None:
        """The event that decides how the attempt ends; None if there is none yet.

        An event that happened earlier but is noticed later may still replace this event.
        """
        return self._attempt.earliest.decision

    def describe(self, component: str) -> str:
        """Return the name of a component, with its pid if it has started: `trainer (pid 812)`."""
        return str(self._attempt.components.get(component, component))

    def interrupt(self, why: str, state: RunState = RunState.CANCELLED) -> None:
        """Request the end of the attempt. Returns at once.

        Args:
            why: Reason for the end, in one line for the user.
            state: State of the run after the attempt. RUNNING means that the Ray jobs of the
                attempt continue until another process resumes the run.
        """
        self._loop.soon(self._attempt.interrupt, why, state)

    def crash(self, error: BaseException) -> None:
        """Fail the attempt because of an error in Muster's own code. Returns at once."""
        self._loop.soon(self._attempt.crash, error)

    def fail(self, failure: Failure) -> None:
        """Fail the attempt for a reason outside its components. Returns at once."""
        self._loop.soon(self._attempt.fail, failure)

    def hurry(self) -> None:
        """Request that all components are killed without a grace period. Returns at once."""
        self._loop.soon(self._attempt.hurry)

    def teardown(self) -> Verdict:
        """Stop all components in the reverse order of their start, and wait for their end.

        May be called any number of times.

        Returns:
            The verdict: the final state of the attempt, with a message and the failure.
        """
        if self._verdict is None:
            self._verdict = self._loop.call(self._attempt.teardown())
        return self._verdict

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_open:
            try:
                self.teardown()
            finally:
                self._loop.close()
