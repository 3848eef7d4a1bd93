"""A Ray job as supervision sees it: one submission, from before it is made until nothing is left.

It has the verbs of supervision's `RemoteJob`, and does not know of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tasks.ray import control_store
from tasks.ray.contact import Contact, Emit
from tasks.ray.dashboard import Dashboard, Denied, JobState, NoAnswer
from tasks.ray.end import OutOfReach, Sweep, TakeDown
from tasks.ray.endings import earliest_end, exit_of, last_words
from tasks.ray.holdings import gpus_of, room_in_words
from tasks.ray.log_copy import LogCopy
from tasks.ray.plan import JobPlan
from tasks.ray.submission import SubmissionFile
from tasks.ray.submit import STRAGGLERS_S
from tasks.ray.submitter import Submitter
from tasks.record.outcome import Exit, JobLoss, JobRefused
from tasks.spec.failure_kinds import FailureKind

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
