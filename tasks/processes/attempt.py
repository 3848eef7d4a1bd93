"""One supervised attempt at a run: start the components in order, notice failures, end them in
reverse.

The attempt runs in its own asyncio loop. `supervisor.Supervisor` provides the thread of that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from tasks.processes.component import PORT_TAKEN, AttemptContext, AttemptPlan, Member
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.hang_report import within
from tasks.processes.identity import host_name
from tasks.processes.machine import gpus_seen
from tasks.processes.ports import PortsReserved, listening_sockets
from tasks.processes.probes import size_of
from tasks.processes.process_component import ProcessMember
from tasks.processes.progress import (
    ProgressEnd,
    ProgressWatch,
    ReadStep,
    Silence,
    ever_more_seldom,
    source_of,
)
from tasks.processes.registry import RunRegister
from tasks.record.causes import find_cause, last_lines
from tasks.record.events import Emit
from tasks.record.outcome import Exit, Failure, GivenUp, GiveUpReason, Verdict, signal_name
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.watch import Alarms

_log = logging.getLogger(__name__)

#: Time limit in seconds of one check whether a component saves a checkpoint.
_SAVING_WITHIN_S = 2.0
#: Time limit in seconds of the search for the last checkpoint of a trainer that was killed.
_FIND_CHECKPOINT_WITHIN_S = 30.0
#: Line of a trainer that somebody else asked to end.
_SIGTERM_HEARD = re.compile(
    r"(?:receiv|caught|catch|got |handl|by )\w*[^\n]{0,30}?(?:SIGTERM|signal 15)"
    r"|SIGTERM[^\n]{0,30}?(?:receiv|caught|:)",
    re.IGNORECASE,
)
#: Number of lines at the end of a log in which such a line is looked for.
_LAST_LINES = 40
#: Seconds between two such checks.
_SAVING_EVERY_S = 0.2
#: How often components of one attempt may start again because their ports were taken.
_MOVES_AT_MOST = 5
#: Smallest number of seconds between two checks of the listeners on the run's ports.
_PORTS_EVERY_S = 1.0
#: Smallest pause after such a check, as a multiple of its duration.
_PORTS_PAUSE = 20.0
#: Time limit in seconds of a question to the GPU driver. After a timeout it is not asked again.
_DRIVER_WITHIN_S = 5.0
#: Signals that end a program after an error in the program itself.
_FATAL_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP"})
#: Kind of failure for each error number if a program could not be started.
_SPAWN_ERRORS: dict[int | None, FailureKind] = {
    # Error number 0 stands for errors that Python itself raises, such as a NUL in an argument.
    **dict.fromkeys((0, errno.ENOENT, errno.EACCES, errno.EPERM), FailureKind.USER_ERROR),
    **dict.fromkeys((errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR), FailureKind.USER_ERROR),
    **dict.fromkeys((errno.E2BIG, errno.ELOOP, errno.ENAMETOOLONG), FailureKind.USER_ERROR),
    **dict.fromkeys((errno.ENOSPC, errno.EROFS, errno.EDQUOT), FailureKind.STORAGE),
}


def failure_of(
    component: str,
    text: str,
    *,
    message: str,
    rule: str,
    kind: FailureKind | None = None,
    exit: Exit | None = None,
) -> Failure:
    """Return the failure of a component, with the cause that its output names.

    Args:
        component: Name of the component.
        message: One line that describes the failure.
        text: End of the component's log, and other messages about its end.
        rule: Name of the rule that noticed the failure. A cause found in the text replaces it.
        kind: Kind of the failure if it is certain. None: take it from the text, else from the
            signal.
        exit: Exit of the component, if it has ended.
    """
    cause = find_cause(text)
    signal = exit.signal_name if exit else None
    hint = cause.rule.hint if cause else ""
    line = cause.line if cause else ""
    if cause is not None and kind in (None, FailureKind.RUNTIME_ERROR):
        rule = cause.rule.id
        # A cause of kind UNKNOWN, such as "killed", adds nothing to the kind that is known.
        if cause.rule.kind is not FailureKind.UNKNOWN:
            kind = cause.rule.kind
    if kind is None:
        kind = FailureKind.RUNTIME_ERROR if signal in _FATAL_SIGNALS else FailureKind.UNKNOWN
    if signal == "SIGKILL" and not hint:
        hint = "SIGKILL comes from outside: the kernel's OOM killer (see dmesg) or a person"
    cause_line = line if cause is not None and cause.rule.id != "traceback" else ""
    return Failure(
        kind=kind,
        component=component,
        message=f"{message}: {cause_line}" if cause_line else message,
        exit_code=exit.exit_code if exit else None,
        signal=signal,
        rule=rule,
        line=line,
        hint=hint,
        log_tail=last_lines(text),
    )


def _signal_of_shell(exit: Exit) -> str | None:
    """Return the signal that ended a program below a shell, which exits with 128 more; or None."""
    code = exit.exit_code or 0
    return signal_name(code - 128) if 128 < code < 128 + 65 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An event that decides how an attempt ends."""

    #: Time of the event according to the kernel, in CLOCK_MONOTONIC seconds. It may be noticed
    #: later.
    at_monotonic_s: float
    #: COMPLETED, FAILED or CANCELLED; RUNNING if the run continues without this process.
    state: RunState
    #: Reason in one line, for people.
    reason: str
    #: Returns the verdict. It is called when all components have ended and their logs are complete.
    make_verdict: Callable[[], Verdict]
    #: Name of the component that failed first; None if no component failed.
    component: str | None = None

    @staticmethod
    def of(verdict: Verdict, at_monotonic_s: float | None = None) -> Decision:
        """Return a decision whose verdict is already known.

        Args:
            verdict: The verdict.
            at_monotonic_s: Time of the event. None: now.
        """
        return Decision(
            at_monotonic_s=time.monotonic() if at_monotonic_s is None else at_monotonic_s,
            state=verdict.state,
            reason=verdict.message,
            make_verdict=lambda: verdict,
        )


class EarliestDecision:
    """Keeps the decision with the earliest time. The order in which decisions arrive does not
    matter.

    A process that dies because of another failure, or because the teardown stopped it, dies later
    than that failure. So it is never blamed.
    """

    def __init__(self) -> None:
        #: The earliest decision; None while the attempt is undecided.
        self.decision: Decision | None = None
        #: Time of the earliest deciding event. Later events do not count.
        self.horizon_s = float("inf")

    def is_open_at(self, at_monotonic_s: float) -> bool:
        """Return True if no earlier event has decided the attempt or has been reserved."""
        return at_monotonic_s < self.horizon_s

    def reserve(self, at_monotonic_s: float) -> None:
        """Ignore events after this time, although the decision for this time is not known yet."""
        self.horizon_s = min(self.horizon_s, at_monotonic_s)

    def decide(self, decision: Decision) -> bool:
        """Keep a decision if it is the earliest so far. Return True if it was kept."""
        if decision.at_monotonic_s > self.horizon_s:
            return False
        if self.decision and decision.at_monotonic_s >= self.decision.at_monotonic_s:
            return False
        self.decision = decision
        self.reserve(decision.at_monotonic_s)
        return True


class SupervisedAttempt:
    """The components of one attempt, and its verdict.

    The teardown begins when the end of the attempt is decided. No component is started after that.
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
            register: The run's registry on disk. None: the run is not registered.
            template: Template for the guardians. None: one is made if it is needed.
            replan: Gives a component other ports and returns the changed plan; raises OSError if no
                port is free. None: a component whose port is taken ends the attempt.
        """
        self._plan = plan
        self._replan = replan
        self._moves_left = _MOVES_AT_MOST
        self._context = AttemptContext(plan, ports, emit, register, template)
        self._emit = emit
        #: All components by name, in the order of their start.
        self.members: dict[str, Member] = {}
        self._launched: list[Member] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._alarms = Alarms(plan.alarms) if plan.alarms else None
        silence = Silence(
            (component.command.log for component in plan.components),
            resumed_step=plan.resume.step if plan.resume else None,
        )
        self._progress = ProgressWatch(plan, self._step_source(), silence, emit, self._is_quiet)
        #: The decision so far.
        self.earliest = EarliestDecision()
        self._conclusion: asyncio.Task[None] | None = None
        self._teardown: asyncio.Task[Verdict] | None = None
        self._is_hurried = False
        #: Set when the end of the run is decided.
        self.decided = asyncio.Event()

    def prepare(self) -> None:
        """Prepare a guardian for each component. If that fails, the attempt fails."""
        try:
            self._context.begin()
            for plan in self._plan.components:
                make = plan.make_member or ProcessMember
                self.members[plan.name] = make(plan, self._context)
            self._context.settle()
        except OSError as error:
            message = f"no process can be started: {error.strerror or error}"
            kind = _SPAWN_ERRORS.get(error.errno, FailureKind.UNKNOWN)
            self.fail(Failure(kind=kind, message=message, rule="spawn"))
            return
        self._watch(self._follow_progress())
        self._watch(self._follow_load())
        self._watch(self._follow_ports())
        if self._plan.time_limit_s is not None:
            self._watch(self._follow_clock(self._plan.time_limit_s))

    async def start(self, name: str) -> None:
        """Start one component and wait until it is ready.

        Raises:
            RunEnded: The end of the run was decided before the component was ready.
        """
        self._check_undecided(name)
        while True:
            await self._check_ports()
            self._check_undecided(name)
            member = self.members[name]
            await self._launch(member)
            await self._until_settled(member)
            self._check_undecided(name)
            if not member.lost_port.is_set():
                break
            await self._move(member)
            self._check_undecided(name)
        self._progress.silence.restart()
        self._watch(self._follow(member, member.until_unresponsive))
        self._watch(self._follow(member, member.until_process_lost))
        if all(m.is_ready for m in self.members.values()):
            self._emit("attempt.ready", step=self._progress.step)

    async def _until_settled(self, member: Member) -> None:
        """Wait until a component is ready or has lost its port, or the attempt is decided."""
        ready = asyncio.create_task(self._await_ready(member))
        ready.add_done_callback(self._on_task_done)
        over = asyncio.create_task(self.decided.wait())
        lost = asyncio.create_task(member.lost_port.wait())
        try:
            await asyncio.wait({ready, over, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ready, over, lost):
                task.cancel()

    def _can_move(self, member: Member) -> bool:
        """Return True if a component that lost its port may start again on another port."""
        return (
            self._replan is not None
            and self._context.can_prepare_again
            and self._moves_left > 0
            and not member.is_ready
            and not self.decided.is_set()
            and bool(self._context.ports.of(member.name))
        )

    async def _move(self, member: Member) -> None:
        """End a component that lost its port, and prepare it again with another port.

        If a component that was started before knows the port, the attempt fails instead.
        """
        assert self._replan is not None
        self._moves_left -= 1
        message = member.port_loss.message
        try:
            plan = await asyncio.to_thread(self._replan, member.name)
        except OSError as error:
            self._fail_by_loss(member, replace(member.port_loss, message=f"{message}; {error}"))
            return
        changed = [
            component
            for before, component in zip(self._plan.components, plan.components, strict=True)
            if not before.is_same_start(component)
        ]
        launched = [
            component.name for component in changed if self.members[component.name].is_launched
        ]
        if others := [name for name in launched if name != member.name]:
            reason = f"{message}; {', '.join(others)} was given that port already"
            self._fail_by_loss(member, replace(member.port_loss, message=reason))
            return
        if member.name not in [component.name for component in changed]:
            # The component does not take its port from the plan, so it would use the same port
            # again.
            self._fail_by_loss(member, member.port_loss)
            return
        self._emit("component.moved", member.name, pid=member.pid, reason=message)
        if await member.end():
            self._fail_by_loss(member, member.port_loss)
            return
        for component in changed:
            if component.name != member.name:
                await self.members[component.name].end()
        if self.decided.is_set():
            return
        # No await from here on, so that a teardown finds either the old members or the new ones.
        self._launched.remove(member)
        try:
            for component in changed:
                make = component.make_member or ProcessMember
                self.members[component.name] = make(component, self._context)
        except OSError as error:
            self._fail(member, f"{member.name} can't be started again: {error}", "spawn")
            return
        self._plan = self._context.plan = self._progress.plan = plan
        self._progress.read_step = self._step_source()

    def _step_source(self) -> ReadStep | None:
        plan = self._plan
        return source_of(
            plan.progress, plan.cwd, plan.metrics, self._context.client, self._take_figures
        )

    async def _follow_ports(self) -> None:
        """Check repeatedly whether another user listens on a component's port."""
        while True:
            began_s = time.monotonic()
            await self._check_ports()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(_PORTS_EVERY_S, took_s * _PORTS_PAUSE))

    async def _check_ports(self) -> None:
        """Fail a component on whose reserved port another user's process listens."""
        try:
            table = await asyncio.to_thread(listening_sockets)
        except OSError as error:
            _log.warning("who listens on the run's ports is unknown: %s", error)
            return
        own_users = (0, os.getuid())
        others = {listener.port for listener in table if listener.uid not in own_users}
        if not others & {*self._context.ports.numbers.values()}:
            return
        for member in tuple(self._launched):
            if member.is_launched and member.exit is None and not member.lost_port.is_set():
                try:
                    member.refuse_foreign_ports(others)
                except GivenUp as error:
                    self._give_up(member, error.loss)

    def _give_up(self, member: Member, loss: GiveUpReason) -> None:
        """Have a component that lost its port started again, or end the attempt."""
        if loss.rule == PORT_TAKEN and self._can_move(member):
            member.port_loss = loss
            member.lost_port.set()
        else:
            self._fail_by_loss(member, loss)

    def interrupt(self, why: str, state: RunState = RunState.CANCELLED) -> None:
        """End the attempt. With state RUNNING, its jobs continue until the run is resumed."""
        self._decide(Decision.of(Verdict(state=state, message=why)))

    def crash(self, error: BaseException) -> None:
        """End the run as failed after an internal error, so that it does not continue unwatched."""
        _log.error("supervision of %s failed", self._plan.run_id, exc_info=error)
        message = f"Muster's own supervision failed: {error!r}"
        self.fail(Failure(kind=FailureKind.UNKNOWN, message=message, rule="internal-error"))

    def fail(self, failure: Failure) -> None:
        """End the run as failed for a reason that is not a component's."""
        # The failure always counts: an event whose examination is not finished may have failed by
        # it.
        at = min(time.monotonic(), self.earliest.horizon_s)
        self._decide(Decision.of(Verdict.failed(failure, at), at))

    def hurry(self) -> None:
        """End all components without a grace period."""
        self._is_hurried = True
        for member in self._launched:
            member.kill()

    async def teardown(self) -> Verdict:
        """Stop the running components in reverse order, and wait until no process remains.

        An undecided attempt is cancelled. Further calls return the same verdict.
        """
        if self._teardown is None:
            self.interrupt("the run was ended before its part was done")
        # An earlier end of a component may still be examined, and decides the attempt in a moment.
        await self.decided.wait()
        assert self._teardown is not None
        return await asyncio.shield(self._teardown)

    def _check_undecided(self, name: str) -> None:
        if self.decided.is_set():
            raise RunEnded(f"{name} is not started: how the run ends is decided")

    async def _launch(self, member: Member) -> None:
        """Start the program. This is never cancelled, so that a started process is always known."""
        self._launched.append(member)
        self._progress.silence.restart()
        try:
            await member.launch()
        except GivenUp as error:
            self._give_up(member, error.loss)
        except OSError as error:  # TimeoutError is one.
            reason = error.strerror or str(error) or "its guardian does not answer"
            message = f"{member.name} can't be started: {reason}"
            kind = _SPAWN_ERRORS.get(error.errno, FailureKind.UNKNOWN)
            self._fail(member, message, "spawn", kind=kind)
        else:
            member.exited.add_done_callback(lambda exited: self._on_exit(member, exited.result()))

    async def _await_ready(self, member: Member) -> None:
        if member.lost_port.is_set():
            return
        try:
            await member.until_running()
            if not self.decided.is_set():  # A teardown would not end a later watcher.
                self._watch(self._follow(member, member.until_job_lost))
            await member.until_ready()
        except GivenUp as error:
            self._give_up(member, error.loss)

    def _on_exit(self, member: Member, exit: Exit) -> None:
        member.exit = exit
        self._emit(
            "component.exited",
            member.name,
            pid=member.pid,
            exit_code=exit.exit_code,
            signal=exit.signal_name,
        )
        if member.lost_port.is_set() or not self.earliest.is_open_at(exit.at_monotonic_s):
            return
        if not exit.is_zero and self._can_move(member):
            self._watch(self._judge_failed_start(member, exit))
        elif not exit.is_zero and self._may_be_finished(member, exit):
            self._conclude(member, exit)
        elif not exit.is_zero:
            self._fail_by_exit(member, exit)
        elif not member.is_ready:
            self._watch(self._judge_early_exit(member, exit))
        else:
            self._judge_exit_zero(member, exit)

    async def _judge_failed_start(self, member: Member, exit: Exit) -> None:
        """Start a component again if it ended because its port was taken; otherwise fail the
        attempt.
        """
        try:
            line = await asyncio.to_thread(self._port_conflict_of, member)
        except asyncio.CancelledError:
            # A teardown cancels this check. The end of the component may still be its cause.
            self._fail_by_exit(member, exit)
            raise
        if line:
            message = f"{member.name} could not listen on its port: {line}"
            kind = FailureKind.PORT_CONFLICT
            loss = GiveUpReason(kind=kind, rule=PORT_TAKEN, message=message, exit=exit)
            if self._can_move(member):
                self._give_up(member, loss)
                return
        self._fail_by_exit(member, exit)

    def _port_conflict_of(self, member: Member) -> str:
        """Return the log line that says that a component's reserved port is in use.

        The line need not name the port if a process listens on it now.

        Returns:
            An empty string if there is no such line.
        """
        cause = find_cause(member.last_words())
        if cause is None or cause.rule.kind is not FailureKind.PORT_CONFLICT:
            return ""
        own = self._context.ports.of(member.name).values()
        named = {int(word) for word in re.findall(r"\b\d{4,5}\b", cause.line)}
        with contextlib.suppress(OSError):
            named |= {listener.port for listener in listening_sockets()}
        return cause.line if named & {*own} else ""

    async def _judge_early_exit(self, member: Member, exit: Exit) -> None:
        """Judge a program that ended before its probe succeeded: its log or files may prove
        readiness.
        """
        if await member.has_last_word():
            member.is_ready = True
            self._judge_exit_zero(member, exit)
        else:
            self._fail_by_exit(member, exit)

    def _judge_exit_zero(self, member: Member, exit: Exit) -> None:
        match member.plan.on_exit_zero:
            case "fail":
                self._fail_by_exit(member, exit)
            case "complete":
                self._conclude(member, exit)
            case "drain":
                member.is_drained = True
                self._emit("component.drained", member.name)
                if all(m.is_drained for m in self.members.values()):
                    self._conclude(member, exit)

    def _conclude(self, member: Member, exit: Exit) -> None:
        # The other components may end from now on, because they are no longer needed.
        self.earliest.reserve(exit.at_monotonic_s)
        self._conclusion = asyncio.create_task(self._check_success(member, exit))
        self._conclusion.add_done_callback(self._on_task_done)

    def _may_be_finished(self, member: Member, exit: Exit) -> bool:
        """Return True if a component that a signal ended may have done all its work before."""
        is_trainer = member.plan.on_exit_zero == "complete" and member.is_ready
        has_signal = exit.signal is not None or _signal_of_shell(exit) is not None
        return has_signal and is_trainer and self._plan.last_step is not None

    async def _check_success(self, member: Member, exit: Exit) -> None:
        """Decide how an attempt ended whose work may be done."""
        if not exit.is_zero:
            await self._check_killed(member, exit)
            return
        last = self._plan.last_step
        required = self._plan.success_step
        await self._progress.until_reached(required if required is not None else last)
        step = self._progress.highest_step
        is_finished = self._progress.is_finished or self._has_nothing_to_do(step)
        if required is not None and step is not None and step >= required:
            is_finished = True
        is_short = last is not None and not is_finished
        words = "\n".join(member.last_words().splitlines()[-_LAST_LINES:]) if is_short else ""
        if heard := _SIGTERM_HEARD.search(words):
            message = (
                f"{member} was asked to end from outside ({heard[0]}) and left with exit code 0"
                f"{self._short_of_end()}"
            )
            kind = FailureKind.UNKNOWN
            self._fail(member, message, "ended-from-outside", kind=kind, exit=exit)
            return
        if required is not None and not is_finished:
            reached = "no step is known" if step is None else f"step {step:g} was reached"
            message = f"{member} left with exit code 0, but {reached}: success is step {required:g}"
            kind = FailureKind.RUNTIME_ERROR
            self._fail(member, message, "success-not-reached", kind=kind, exit=exit)
            return
        message = str(self._progress) or f"{member.name} is done"
        if is_finished and step is None and last is not None:
            message = f"step {last:g} of {last:g}: nothing was left to do after the checkpoint"
        elif last is not None and is_short and (step is None or step < last - 1):
            # The last step may be one less, if a trainer counts from zero.
            warning = f"warning: {member.name} left with exit code 0{self._short_of_end()}"
            self._emit("run.warning", message=warning.removeprefix("warning: "))
            message = warning
        verdict = Verdict(state=RunState.COMPLETED, message=message)
        self._decide(Decision.of(verdict, exit.at_monotonic_s))

    def _has_nothing_to_do(self, step: float | None) -> bool:
        """Return True if the attempt made no step because its checkpoint is of the last step."""
        loaded = self._plan.resume.step if self._plan.resume else None
        is_last = loaded is not None and loaded in (self._plan.last_step, self._plan.success_step)
        return step in (None, loaded) and (is_last or self._plan.starts_finished)

    def _short_of_end(self) -> str:
        """Return the step that was reached, compared with the last step: ` at step 12 of 60`."""
        last = self._plan.last_step
        if last is None:
            return ""
        step = self._progress.highest_step
        return (
            f" at step {step:g} of {last:g}" if step is not None else f" before step 1 of {last:g}"
        )

    async def _check_killed(self, member: Member, exit: Exit) -> None:
        """Decide whether a component that a signal ended had done its work before.

        That is so if it had reached the last step, and a complete checkpoint has that step or was
        saved after it. A crash at the exit of a program that saves no checkpoints loses nothing.
        """
        await self._progress.until_reached(None)
        if not self._progress.is_finished:
            self._fail_by_exit(member, exit)
            return
        newest: tuple[int | None, float] | None = None
        find_checkpoint = member.plan.find_checkpoint
        if find_checkpoint is not None:
            with contextlib.suppress(OSError):
                newest = await within(_FIND_CHECKPOINT_WITHIN_S, find_checkpoint, None)
        last = self._plan.last_step or 0
        reached_at = self._progress.reached_at or math.inf
        is_saved = newest is not None and ((newest[0] or 0) >= last or newest[1] >= reached_at)
        signal = exit.signal_name or _signal_of_shell(exit)
        is_crash_at_exit = newest is None and signal in _FATAL_SIGNALS
        if not is_saved and not is_crash_at_exit:
            self._fail_by_exit(member, exit)
            return
        where = "after its last checkpoint" if is_saved else "at its exit"
        message = f"{self._progress.describe_end()}; {member.name} was killed by {signal} {where}"
        verdict = Verdict(state=RunState.COMPLETED, message=message)
        self._decide(Decision.of(verdict, exit.at_monotonic_s))

    def _fail_by_exit(self, member: Member, exit: Exit) -> None:
        ended = str(exit) if exit.signal is not None else f"ended with {exit}"
        before = "" if member.is_ready else " before it was ready"
        early = " while it should have stayed" if exit.is_zero else ""
        message = f"{member} {ended}{before or early} after {member.seconds_alive():.1f} s"
        if self._progress.is_finished:
            message += f"; {self._progress.describe_end()}"
        self._fail(member, message, "exit", exit=exit)

    def _fail_by_loss(self, member: Member, loss: GiveUpReason) -> None:
        message = f"{member}: {loss.message}"
        self._fail(member, message, loss.rule, kind=loss.kind, exit=loss.exit)

    def _fail(
        self,
        member: Member,
        message: str,
        rule: str,
        *,
        kind: FailureKind | None = None,
        exit: Exit | None = None,
    ) -> None:
        at = exit.at_monotonic_s if exit is not None else time.monotonic()
        log = member.plan.command.log
        since = self._progress.survived(log)
        until: int | None = None
        if kind is FailureKind.STALLED and self.earliest.is_open_at(at):
            member.is_hung = True
            # Later output is a result of the examination.
            until = max(0, size_of(log))

        def make_verdict() -> Verdict:
            text = member.last_words(since, until)
            full_message = message
            if member.hangs_in:
                full_message = f"{message}; it hangs in {member.hangs_in}"
            failure = failure_of(
                member.name, text, message=full_message, rule=rule, kind=kind, exit=exit
            )
            return Verdict.failed(failure, at)

        self._decide(
            Decision(
                at_monotonic_s=at,
                state=RunState.FAILED,
                reason=message,
                make_verdict=make_verdict,
                component=member.name,
            )
        )

    def _decide(self, decision: Decision) -> None:
        if not self.earliest.decide(decision) or self._teardown is not None:
            return
        if not decision.state.is_final:
            self._teardown = asyncio.create_task(self._hand_over(decision))
            self.decided.set()
            return
        last = self._launched[-1] if self._launched else None
        is_free = last is not None and last.exit is None and last.plan.is_saving is None
        if last is not None and is_free and not self._hung():
            # The last component is stopped first in any case. Signal it at once, before events are
            # written.
            last.stop()
        self._teardown = asyncio.create_task(self._take_down(decision))
        self.decided.set()

    async def _take_down(self, decision: Decision) -> Verdict:
        self._context.hurry()
        self._emit("teardown.begun", reason=decision.reason, cause=decision.component)
        for watcher in self._watchers:
            watcher.cancel()
        # Examine hung components while the others run, because they may wait for one of those.
        await asyncio.gather(*(member.examine() for member in self._hung().values()))
        left: dict[str, tuple[int | str, ...]] = {}
        for member in reversed(self._launched):
            await self._until_saved(member)
            if pids := await member.end():
                left[member.name] = pids
        await asyncio.gather(*(m.end() for m in self.members.values() if not m.is_launched))
        if self._conclusion is not None:
            await asyncio.wait({self._conclusion})
        if (pids := await self._context.close()) and not left:
            left[self._launched[-1].name if self._launched else "run"] = pids
        if self._plan.progress is not None and self._plan.progress.jsonl is not None:
            try:
                # The last step shows whether the attempt made progress.
                await self._progress.until_reached(None)
            except Exception:
                _log.exception("the last step of %s is not known", self._plan.run_id)
        self._emit("teardown.ended", left=left or None)
        # Searching a long log takes a second or two, so it is done in a thread.
        verdict = await asyncio.to_thread((self.earliest.decision or decision).make_verdict)
        if left:
            verdict = verdict.with_leftovers(left)
        return verdict.with_unseen({m.name: m.unseen for m in self._launched if m.unseen})

    async def _until_saved(self, member: Member) -> None:
        """Wait until a component has finished saving, at most for its grace period."""
        is_saving = member.plan.is_saving
        deadline = time.monotonic() + member.plan.command.grace_s
        while is_saving and not (member.is_hung or member.exit or self._is_hurried):
            if time.monotonic() > deadline or not await within(_SAVING_WITHIN_S, is_saving, False):
                return
            await asyncio.sleep(_SAVING_EVERY_S)

    async def _hand_over(self, decision: Decision) -> Verdict:
        self._emit("attempt.left", reason=decision.reason)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*(member.let_go() for member in self.members.values()))
        await self._context.close()
        return decision.make_verdict()

    def _watch(self, watching: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(watching)
        task.add_done_callback(self._on_task_done)
        self._watchers.append(task)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)

    async def _follow(
        self, member: Member, until_lost: Callable[[], Awaitable[GiveUpReason]]
    ) -> None:
        loss = await until_lost()
        if loss.kind is FailureKind.STALLED and self._progress.is_finished:
            # A trainer that has done its work may close its server before it ends.
            return
        self._fail_by_loss(member, loss)

    async def _follow_progress(self) -> None:
        end, why = await self._progress.until_over()
        if end is ProgressEnd.FINISHED:
            self._finish(why)
        else:
            self._fail(self._stalled_member(), why, "stall", kind=FailureKind.STALLED)

    def _finish(self, why: str) -> None:
        """Complete an attempt that has reached its last step but does not end."""
        member = self._stalled_member()
        # Its stacks show later why it did not end.
        member.is_hung = True
        within_s = self._plan.finish_within_s

        def make_verdict() -> Verdict:
            place = f" (it hangs in {member.hangs_in})" if member.hangs_in else ""
            message = (
                f"{why}; {member.name} did not end within {within_s:g} s and was stopped{place}"
            )
            return Verdict(state=RunState.COMPLETED, message=message)

        self._decide(
            Decision(
                at_monotonic_s=time.monotonic(),
                state=RunState.COMPLETED,
                reason=f"{why}; stopping what is left",
                make_verdict=make_verdict,
            )
        )

    def _take_figures(self, step: float, figures: Mapping[str, Any]) -> None:
        self._progress.note_line(step)
        for alarm in self._alarms.take(step, figures) if self._alarms else ():
            self._emit("run.alarm", **asdict(alarm), message=alarm.message)
            if alarm.then == "stop":
                rule = f"watch-{alarm.rule}"
                self._fail(self._stalled_member(), alarm.message, rule, kind=FailureKind.ALARM)

    async def _follow_load(self) -> None:
        """Publish the GPU utilisation of the run from time to time."""
        has_driver = True
        async for _ in ever_more_seldom():
            if self._is_quiet():
                continue
            use = dict[str, float]()
            seen: dict[str, Any] = {}
            if has_driver:
                seen = await within(_DRIVER_WITHIN_S, gpus_seen, seen)
            has_driver = bool(seen.get("gpus"))
            if (own := self._use_in(seen)) is not None:
                use[host_name()] = own
            try:
                use |= await self._plan.gpu_use() if self._plan.gpu_use else {}
            except Exception as error:
                # The utilisation is only informative, and the server that answers may be a foreign
                # one.
                _log.warning("%s: what its GPUs do is not known: %r", self._plan.run_id, error)
            if use:
                self._emit("run.load", gpus=use)

    def _use_in(self, seen: Mapping[str, Any]) -> float | None:
        """Return the mean utilisation, from 0 to 1, of this machine's GPUs that belong to the run.

        Without granted GPUs, the GPUs used by the run's processes count.

        Args:
            seen: Answer of `gpus_seen`.

        Returns:
            None if no utilisation is known.
        """
        granted = self._plan.devices
        gpu_processes = seen.get("processes", ())
        # A run may have thousands of processes, so they are listed only if they are needed.
        pids = self._context.own_pids() if gpu_processes and not granted else set[int]()
        used_uuids = {process["uuid"] for process in gpu_processes if process["pid"] in pids}

        def is_own(gpu: Mapping[str, Any]) -> bool:
            return gpu["index"] in granted if granted else gpu["uuid"] in used_uuids

        shares = [
            gpu["busy_percent"] / 100
            for gpu in seen.get("gpus", ())
            if is_own(gpu) and gpu["busy_percent"] is not None
        ]
        return fmean(shares) if shares else None

    async def _follow_clock(self, limit_s: float) -> None:
        # Another process of the run may have used a part of the time before this one resumed its
        # jobs.
        had_s = time.time() - self._plan.began_at if self._plan.began_at is not None else 0.0
        await asyncio.sleep(max(0.0, limit_s - had_s))
        if self._progress.is_finished:
            return
        message = f"it has run for its gang.max_hours, {limit_s / 3600:g}"
        failure = Failure(kind=FailureKind.TIME_LIMIT, message=message, rule="time-limit")
        self._decide(Decision.of(Verdict.failed(failure, time.monotonic())))

    def _is_quiet(self) -> bool:
        """Return True if no progress is expected: no component was started, or a job has not
        begun.
        """
        return not self._launched or any(member.is_pending for member in self._launched)

    def _stalled_member(self) -> Member:
        """Return the component to blame for a stall.

        That is a component that is not ready yet, else the trainer if it runs, else the component
        that was started last.
        """
        running = [member for member in self._launched if member.exit is None] or self._launched
        starting = [member for member in running if not member.is_ready]
        trainer = [member for member in running if member.name == "trainer"]
        return (starting or trainer or running)[-1]

    def _hung(self) -> dict[str, Member]:
        return {name: member for name, member in self.members.items() if member.is_hung}
