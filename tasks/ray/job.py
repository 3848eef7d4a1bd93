"""A Ray job as supervision sees it: one submission, from before it is made until nothing is left.

It has the verbs of supervision's `RemoteJob`, and does not know of it.

The log of a driver, copied byte by byte into a local file while it grows.

How a job ended, from what Ray says of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tasks.ray import control_store
from tasks.ray.dashboard import Contact, Dashboard, Denied, JobState, NoAnswer
from tasks.ray.end import OutOfReach, Sweep, TakeDown, gpus_of, room_in_words
from tasks.ray.submission import JobPlan, SubmissionFile
from tasks.ray.submit import STRAGGLERS_S, Submitter
from tasks.record.events import Emit
from tasks.record.outcome import Exit, JobLoss, JobRefused
from tasks.spec.failure_kinds import FailureKind

_AGAIN_AFTER_S = 0.5
#: For the node's agent to answer, once the job has ended.
_TRIES = 5


class LogCopy:
    """Ray offers a log from its first byte on. The local file says how much of it is there
    already, so neither a lost connection nor a new process leaves a gap or a repeat in it.
    """

    def __init__(self, dashboard: Dashboard, submission_id: str, path: Path) -> None:
        self._dashboard = dashboard
        self._submission_id = submission_id
        self._path = path
        self._is_writing = asyncio.Lock()

    async def follow(self, node_id: str) -> None:
        """Copy while the job runs, for ever; a cancel ends it.

        Args:
            node_id: The driver's node.
        """
        while True:
            # A disk that is full may have room again, and `complete` says what is missing.
            with contextlib.suppress(NoAnswer, Denied, OSError):
                await self._copy(node_id, follow=True)
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def complete(self, node_id: str) -> str:
        """Fetch what is missing of a log that grows no more.

        Returns: why the end of it may be missing; empty when it is whole.
        """
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_AGAIN_AFTER_S)
            try:
                await self._copy(node_id, follow=False)
                return ""
            except (NoAnswer, Denied, OSError) as error:
                problem = str(error)
        return f"the end of {self._path.name} may be missing: {problem}"

    async def _copy(self, node_id: str, *, follow: bool) -> None:
        async with self._is_writing:
            log = await asyncio.to_thread(_open, self._path)
            try:
                skip = os.fstat(log).st_size
                chunks = self._dashboard.log(self._submission_id, node_id, follow=follow)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        fresh, skip = beyond(chunk, skip)
                        if fresh:
                            await _finish(asyncio.to_thread(_write, log, fresh))
            finally:
                os.close(log)


def beyond(chunk: bytes, skip: int) -> tuple[bytes, int]:
    """What of a chunk is new, and how much is to be skipped after it.

    Args:
        skip: how many bytes from the chunk's first on are known already.
    """
    return chunk[skip:], max(0, skip - len(chunk))


async def _finish(writing: Coroutine[Any, Any, None]) -> None:
    """A thread's write is not undone by a cancel, so it is waited for."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


#: How long Ray needs to notice that the driver has ended.
#: Source: ray 2.60, JobSupervisor.SUBPROCESS_POLL_PERIOD_S.
RAY_POLLS_EACH_S = 0.1
#: How long Ray needs to notice that its own supervisor of the job has died: its monitor looks each
#: second. Source: ray 2.60, JobManager.JOB_MONITOR_LOOP_PERIOD_S; measured, 0.7 to 2 s.
_SUPERVISOR_LATE_S = 2.5
#: The same for a node. Source: measured with Ray's default health checks, up to 66 s.
_NODE_LATE_S = 70.0
#: The clock of the driver's node writes milliseconds.
_ROUNDING_S = 0.001
#: Source: ray 2.60, JobSupervisor._exec_entrypoint and JobSupervisor.run.
_ECHO, _QUOTED_LOG = "Running entrypoint for job ", "last available logs"


def exit_of(
    job: JobState, *, at_monotonic_s: float, was_stopped_by_us: bool, lost_node: str = ""
) -> Exit:
    """
    Args:
        job: a final state.
        at_monotonic_s: the earliest moment at which it can have ended.
        lost_node: the driver's node in words, where it has gone.
    """
    code = job.driver_exit_code
    if code is None and job.status == "SUCCEEDED":
        code = 0
    if code is not None:
        # A shell's 128+n stays what it is: the wrapper passes real signals on, so that a program
        # has returned it by itself.
        return Exit(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            at_monotonic_s=at_monotonic_s,
        )
    if job.status == "STOPPED":
        by_us = "stopped as asked"
        note = by_us if was_stopped_by_us else "stopped from outside (ray job stop, the dashboard)"
    else:
        note = reason_of(job)
        if lost_node:
            note = f"{lost_node} has left the cluster; {note}"
    return Exit(exit_code=None, signal=None, at_monotonic_s=at_monotonic_s, note=note)


def reason_of(job: JobState) -> str:
    """Ray's own reason in one line."""
    lines = [line.strip() for line in job.message.splitlines() if line.strip()]
    first = lines[0][:500] if lines else f"{job.status} without a reason"
    return f"{first} ({job.error_type})" if job.error_type else first


def last_words(log_end: str, job: JobState | None) -> str:
    """What a job said at its end, for people and for the rules that look for causes.

    Args:
        log_end: the end of its driver's log.
        job: a final state; None where there is none.
    """
    # It quotes the command, in which any word may stand.
    lines = [line for line in log_end.splitlines() if not line.startswith(_ECHO)]
    if job is not None:
        # The log that it quotes is the one that is here.
        told, _, _ = job.message.partition(_QUOTED_LOG)
        lines += [told.rstrip(" ,"), job.error_type]
    return "\n".join(line for line in lines if line)


def earliest_end(
    job: JobState,
    *,
    wall_s: float,
    monotonic_s: float,
    seen_running_s: float | None,
    wrapper_s: float,
    is_node_lost: bool = False,
) -> float:
    """The earliest moment at which the job can have ended, CLOCK_MONOTONIC seconds of this machine.

    Args:
        job: a final state; its end is by the clock of another machine.
        wall_s, monotonic_s: now, by both clocks of this machine.
        seen_running_s: when the last question that it answered as not final was sent; None if
            there was none.
        wrapper_s: for how long the wrapper may have outlived the driver.
        is_node_lost: the driver's node has left the cluster.
    """
    late_s = RAY_POLLS_EACH_S + wrapper_s + _ROUNDING_S
    if job.status == "FAILED" and job.driver_exit_code is None:
        # Nobody saw the driver end, and Ray called it running until it noticed.
        late_s += _NODE_LATE_S if is_node_lost else _SUPERVISOR_LATE_S
    floor = None if seen_running_s is None else seen_running_s - late_s
    if job.ended_at is None:
        return monotonic_s if floor is None else min(floor, monotonic_s)
    at = monotonic_s - (wall_s - job.ended_at) - late_s
    return min(at if floor is None else max(at, floor), monotonic_s)


_log = logging.getLogger(__name__)

_POLL_EACH_S = 0.5
_GPUS_EACH_S = 2.0
#: For the last lines of the log, before the end is told: they say what it died of.
_LAST_LINES_WITHIN_S = 0.8
#: For `exited`, once the job is final.
_TOLD_WITHIN_S = 10.0


class RayJob:
    """One submission. Lives in one asyncio loop; nothing in it blocks that loop."""

    def __init__(
        self,
        plan: JobPlan,
        *,
        sweep: Sweep,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            sweep: ends the processes of the job on every node; returns what is left.
            emit: told job.submitted, job.attached, job.state, job.final, job.ended, contact.lost,
                contact.back, log.incomplete.
        """
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._plan = plan
        self._emit = emit
        self._clock = clock
        self._wall_clock = wall_clock
        self._dashboard = Dashboard(plan.address)
        self._contact = Contact(plan.address, emit, clock)
        self._log = LogCopy(self._dashboard, plan.submission_id, plan.log)
        self._take_down = TakeDown(
            self._dashboard,
            plan.submission_id,
            grace_s=plan.grace_s,
            sweep=sweep,
            on_state=self._saw,
            clock=clock,
        )
        self._submitter: Submitter | None = None
        self._file: SubmissionFile | None = None
        self._state: JobState | None = None
        self._seen_running_s: float | None = None
        self._asked_s = clock()
        self._is_forgotten = False
        self._has_gpus = plan.gpus <= 0
        self._was_stopped = False
        #: When this process asked it to end; before everything while it has not.
        self._stopped_s = 0.0
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._is_ending = asyncio.Lock()
        self._is_clear = False

    @property
    def submission_id(self) -> str:
        return self._plan.submission_id

    def last_words(self, log_end: str) -> str:
        """The end of its log without what Ray itself wrote there, and Ray's word on the end."""
        state = self._state if self._state is not None and self._state.is_final else None
        return last_words(log_end, state)

    @property
    def place(self) -> str:
        return f"node {self._state.driver_ip}" if self._state and self._state.driver_ip else ""

    async def launch(self) -> None:
        """Submit it, or attach to it where it was submitted before, and wait until it runs.

        Returns once its driver runs, or it is final. Raises: JobRefused. A cancel leaves it to
        `end`.
        """
        self._file = await asyncio.to_thread(SubmissionFile.begin, self._plan)
        self._was_stopped = self._file.get("stop_asked_at") is not None
        self._has_gpus = self._has_gpus or self._file.get("gpus_taken_at") is not None
        self._submitter = Submitter(
            self._plan, self._dashboard, self._file, self._emit, self._clock, self._wall_clock
        )
        state = await self._submitter.run()
        self._asked_s = self._clock()
        if state is not None:
            self._saw(state)
        self._begin("watch", self._watch())
        submitted_at = self._file.get("submitted_at", self._wall_clock())
        pending_for_s = max(0.0, self._wall_clock() - submitted_at)
        deadline = self._clock() + self._plan.start_within_s - pending_for_s
        while self._state is None or self._state.status == "PENDING":
            if loss := await self._loss():
                raise JobRefused(loss)
            if self._clock() > deadline:
                raise JobRefused(await self._never_started())
            await asyncio.sleep(0.1)

    async def until_lost(self) -> JobLoss:
        """Watch a job that was launched, for ever: contact with its cluster, the GPUs that it is
        to take by its start deadline.

        Returns: why it is given up. A cancel ends it.
        """
        ask_gpus_at = self._clock()
        while True:
            if loss := await self._loss():
                return loss
            if not self._has_gpus and self._clock() >= ask_gpus_at:
                if loss := await self._gpus_not_taken():
                    return loss
                ask_gpus_at = self._clock() + _GPUS_EACH_S
            await asyncio.sleep(_POLL_EACH_S)

    def stop(self) -> None:
        """Ask it to end, in its grace period. Returns at once; any number of times."""
        self._ask_to_end("stop", self._take_down.ask_to_end)

    def kill(self) -> None:
        """End it now, without a grace period. Returns at once."""

        async def kill() -> None:
            await self._take_down.ask(self._take_down.kill_supervisor)

        self._ask_to_end("kill", kill)

    async def end(self) -> tuple[str, ...]:
        """Stop it and wait until it is final, its actors are gone, its GPUs are free, no process
        of it is left on any node, and its log is whole.

        Returns: what did not come free in time, by node and pid; empty when all is free. Safe
        after a `launch` that failed or was cancelled, and before any.
        """
        async with self._is_ending:
            if self._is_clear:
                return ()
            if self._submitter is not None:
                await self._submitter.settle()
            self._file = self._file or await asyncio.to_thread(
                SubmissionFile.read, self._plan.submission_file
            )
            if self._file is None or self._file.get("submit_began_at") is None:
                return await self._cleared()
            self._note_stop()
            try:
                ended = await self._take_down.run(
                    self._file.get("ray_job_ids", ()),
                    was_known=self._file.get("submitted_at") is not None,
                )
            except OutOfReach as error:
                self._file.note(status="unknown", message=str(error))
                return (
                    f"job {self.submission_id}: its cluster does not answer, so nobody can say "
                    f"what is left of it: {error}",
                )
            if ended.state is not None:
                if "watch" not in self._tasks:
                    self._begin("watch", self._watch())
                await asyncio.wait([self._tasks["watch"]], timeout=_TOLD_WITHIN_S)
                if problem := await self._whole_log():
                    self._emit("log.incomplete", message=problem)
            self._file.note(left=list(ended.left))
            self._emit("job.ended", submission_id=self.submission_id, left=list(ended.left))
            return await self._cleared(ended.left)

    async def let_go(self) -> None:
        """Leave the job running, and stop watching it: the next process attaches to it."""
        for name in tuple(self._tasks):
            await self._drop(name)
        await self._dashboard.close()

    async def _cleared(self, left: tuple[str, ...] = ()) -> tuple[str, ...]:
        if not left:
            self._is_clear = True
            await self.let_go()
        return left

    def _ask_to_end(self, name: str, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        under_way = self._tasks.get(name)
        if self._is_clear or self.exited.done() or (under_way and not under_way.done()):
            return
        self._note_stop()

        async def run() -> None:
            with contextlib.suppress(OutOfReach):  # `end` says so.
                if self._submitter is not None:
                    await self._submitter.settle()
                await ask()

        self._begin(name, run())

    def _note_stop(self) -> None:
        if self._state is None or not self._state.is_final:
            if not self._was_stopped:
                self._was_stopped, self._stopped_s = True, self._clock()
            if self._file is not None and self._file.get("stop_asked_at") is None:
                self._file.note(stop_asked_at=self._wall_clock())

    async def _watch(self) -> None:
        """Ask for its state until it is final, tell each change, and then its end."""
        while self._state is None or not self._state.is_final:
            asked_s = self._clock()
            try:
                state = await self._dashboard.job(self.submission_id)
            except (NoAnswer, Denied) as error:
                self._contact.failed(str(error))
            except Exception as error:  # An answer that this was not written for.
                _log.exception("job %s could not be asked for", self.submission_id)
                self._contact.failed(repr(error))
            else:
                self._contact.answered()
                self._is_forgotten = state is None
                if state is not None:
                    self._asked_s = asked_s
                    self._saw(state)
            if self._state is None or not self._state.is_final:
                await asyncio.sleep(_POLL_EACH_S)
        await self._tell_end(self._state)

    def _saw(self, state: JobState) -> None:
        """Take in an answer of the cluster, whoever asked for it. A final one stays."""
        before = self._state
        if before is not None and before.is_final:
            return
        self._state = state
        if not state.is_final:
            self._seen_running_s = self._asked_s
        assert self._file is not None
        known: dict[str, object] = {"status": state.status.lower()}
        if state.driver_ip:
            known |= {"driver_ip": state.driver_ip, "driver_node_id": state.driver_node_id}
        if state.ray_job_id:
            ids = {*self._file.get("ray_job_ids", ()), state.ray_job_id}
            known["ray_job_ids"] = sorted(ids)
        if state.status == "RUNNING" and self._file.get("running_at") is None:
            known["running_at"] = self._wall_clock()
        if state.is_final:
            known |= {"message": state.message[-2000:], "ended_at": state.ended_at}
        self._file.note(**known)
        if before is None or before.status != state.status:
            self._emit("job.state", status=state.status, place=self.place)
        if state.status == "RUNNING" and "follow" not in self._tasks:
            self._begin("follow", self._log.follow(state.driver_node_id))

    async def _tell_end(self, state: JobState) -> None:
        lost_node = ""
        if state.driver_exit_code is None and state.driver_node_id:
            with contextlib.suppress(NoAnswer, Denied):
                nodes = await self._dashboard.nodes()
                if state.driver_node_id not in {node.node_id for node in nodes}:
                    lost_node = self.place
        at_monotonic_s = earliest_end(
            state,
            wall_s=self._wall_clock(),
            monotonic_s=self._clock(),
            seen_running_s=self._seen_running_s,
            wrapper_s=STRAGGLERS_S,
            is_node_lost=bool(lost_node),
        )
        if self._was_stopped and state.driver_exit_code is None:
            # It is our doing, so nothing else can be blamed on it.
            at_monotonic_s = max(at_monotonic_s, self._stopped_s)
        await self._drop("follow")
        if state.driver_node_id:
            self._begin("last", self._log.complete(state.driver_node_id))
            await asyncio.wait([self._tasks["last"]], timeout=_LAST_LINES_WITHIN_S)
        exit_ = exit_of(
            state,
            at_monotonic_s=at_monotonic_s,
            was_stopped_by_us=self._was_stopped,
            lost_node=lost_node,
        )
        assert self._file is not None
        self._file.note(exit_code=exit_.exit_code, signal=exit_.signal)
        self._emit("job.final", status=state.status, message=str(exit_))
        if not self.exited.done():
            self.exited.set_result(exit_)

    async def _whole_log(self) -> str:
        """Returns: why the end of the log may be missing; empty when it is whole."""
        assert self._state is not None
        if (last := self._tasks.pop("last", None)) is not None:
            await asyncio.wait([last])
        await self._drop("follow")
        if not self._state.driver_node_id:  # It never ran.
            return ""
        # Once more: what wrote on after the end that Ray saw has been swept meanwhile.
        return await self._log.complete(self._state.driver_node_id)

    async def _loss(self) -> JobLoss | None:
        if self._contact.lost_for_s > self._plan.lost_after_s:
            return JobLoss(
                kind=FailureKind.LOST_CONTACT,
                rule="contact-lost",
                message=f"{self._plan.address} has not answered for "
                f"{self._contact.lost_for_s:.0f} s: {self._contact.problem}; what became of job "
                f"{self.submission_id} is not known",
            )
        if not self._is_forgotten or self._submitter is None:
            return None
        return await self._submitter.forgotten()

    async def _gpus_not_taken(self) -> JobLoss | None:
        if self._file is None or self._state is None or self._state.status != "RUNNING":
            return None
        ran_for_s = self._wall_clock() - self._file.get("running_at", self._wall_clock())
        try:
            held = await gpus_of(self._dashboard, self._file.get("ray_job_ids", ()))
            if held >= self._plan.gpus:
                self._has_gpus = True
                self._file.note(gpus_taken_at=self._wall_clock())
                return None
            if ran_for_s <= self._plan.start_within_s:
                return None
            gcs_address = await self._dashboard.gcs_address()
            free = await control_store.free_gpus(gcs_address)
            room = room_in_words(await self._dashboard.nodes(), free)
        except (NoAnswer, Denied):
            return None
        return JobLoss(
            kind=FailureKind.START_TIMEOUT,
            rule="gpus-not-taken",
            message=f"job {self.submission_id} runs since {ran_for_s:.0f} s and has {held:g} of "
            f"the {self._plan.gpus:g} GPUs that it is to take (ray.start_within_s is "
            f"{self._plan.start_within_s:g}); {room}",
        )

    async def _never_started(self) -> JobLoss:
        reason = self._state.message if self._state else ""
        left = await self.end()
        message = f"job {self.submission_id} was pending for {self._plan.start_within_s:g} s: "
        message += " ".join(reason.split())[:500] or "the cluster gives no reason"
        kind = FailureKind.START_TIMEOUT
        if left:
            message += f"; not all of it is gone: {'; '.join(left)}"
            kind = FailureKind.LOST_CONTACT
        return JobLoss(kind=kind, rule="start-deadline", message=message)

    def _begin(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=f"{name} {self.submission_id}")

    async def _drop(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
