"""A component that a Ray cluster runs as a job: one submission, from before it is made until
nothing of it is left.

Its driver's log is copied byte by byte while it grows. How it ended is told from what Ray says.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tasks.processes import hang_report
from tasks.processes.component import AttemptContext, ComponentPlan, Member
from tasks.processes.registry import JobEntry
from tasks.ray import control_store
from tasks.ray.dashboard import Dashboard, Denied, JobState, NoAnswer
from tasks.ray.end import Ended, TakeDown, earliest_end, exit_of, gpus_of, last_words
from tasks.ray.nodes import examine
from tasks.ray.submission import JobPlan, SubmissionFile
from tasks.ray.submit import STRAGGLERS_S, Submitter, finished
from tasks.record.events import Emit
from tasks.record.outcome import GivenUp, Trouble
from tasks.spec.failure_kinds import FailureKind

_AGAIN_AFTER_S = 0.5
#: For the node's agent to answer, once the job has ended.
_TRIES = 5


@dataclass(slots=True)
class LogCopy:
    """Ray offers a log from its first byte on. The local file says how much of it is there
    already, so neither a lost connection nor a new process leaves a gap or a repeat in it.
    """

    _dashboard: Dashboard
    _submission_id: str
    _path: Path
    _is_writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def follow(self, node_id: str) -> None:
        """Copy while the job runs, for ever; a cancel ends it."""
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
        for _ in range(_TRIES):
            try:
                await self._copy(node_id, follow=False)
                return ""
            except (NoAnswer, Denied, OSError) as error:
                problem = str(error)
            await asyncio.sleep(_AGAIN_AFTER_S)
        return f"the end of {self._path.name} may be missing: {problem}"

    async def _copy(self, node_id: str, *, follow: bool) -> None:
        async with self._is_writing:
            with await asyncio.to_thread(self._path.open, "ab", buffering=0) as log:
                known = log.tell()
                chunks = self._dashboard.log(self._submission_id, node_id, follow=follow)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        if fresh := chunk[known:]:
                            await finished(asyncio.to_thread(_write, log, fresh))
                        known = max(0, known - len(chunk))


def _write(log: io.FileIO, data: bytes) -> None:
    while data:
        data = data[log.write(data) :]


_log = logging.getLogger(__name__)

_POLL_EACH_S = 0.5
_GPUS_EACH_S = 2.0
#: For the last lines of the log, before the end is told: they say what it died of.
_LAST_LINES_WITHIN_S = 0.8
#: For `exited`, once the job is final.
_TOLD_WITHIN_S = 10.0
#: A log that is on its way from another node comes later than the news of its job's end.
_LOG_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.2
#: For a look at all nodes where it hangs, of which a driver that visits them takes seconds.
_EXAMINED_WITHIN_S = 60.0


class RayJob(Member):
    """A component and its job, from before its submission until its GPUs are free again.

    `exited` resolves once the job is final by the cluster's word, and is never rejected. It has a
    signal or an exit code where the cluster knows it, else neither, with the cluster's reason as
    the note; its `at_monotonic_s` is the earliest moment at which the job can have ended: what died
    of its end must not look as if it had died first.

    Lives in one asyncio loop; nothing in it blocks that loop.
    """

    def __init__(self, plan: ComponentPlan, context: AttemptContext, *, job: JobPlan) -> None:
        super().__init__(plan, context)
        self.exited = asyncio.get_running_loop().create_future()
        self._job = job
        self._say = partial(context.emit, component=plan.name)
        self._dashboard = Dashboard(job.address)
        #: Since when its cluster does not answer, and what the last question met.
        self._silent_since_s: float | None = None
        self._problem = ""
        self._log = LogCopy(self._dashboard, job.submission_id, plan.command.log)
        self._take_down = TakeDown(
            dashboard=self._dashboard,
            submission_id=job.submission_id,
            grace_s=plan.command.grace_s,
            emit=self._say,
            on_state=self._saw,
        )
        self._submitter: Submitter | None = None
        self._submitting: asyncio.Task[None] | None = None
        self._file: SubmissionFile | None = None
        self._state: JobState | None = None
        self._seen_running_s: float | None = None
        self._asked_s = time.monotonic()
        self._is_forgotten = False
        self._has_gpus = job.gpus <= 0
        #: When it was asked to end, by this process or one before; None while it was not.
        self._stopped_s: float | None = None
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._ending: asyncio.Task[tuple[str, ...]] | None = None
        self._is_clear = False

    def __str__(self) -> str:
        return f"{self.name} (job {self._job.submission_id})"

    def last_words(self, since: int = 0, until: int | None = None) -> str:
        """The end of its log without what Ray itself wrote there, and Ray's word on the end."""
        said = super().last_words(since, until)
        return last_words(said, self._state if self._is_final else None)

    @property
    def _is_final(self) -> bool:
        return self._state is not None and self._state.is_final

    async def launch(self) -> None:
        """Have it submitted, or attached to where it was before; `until_running` tells what came
        of it.

        Raises: OSError, when the registry can't be written: nothing is submitted then.
        """
        self._say("component.starting")
        self._context.ports.release(self.name)
        await self._context.enter(
            JobEntry, self.plan, submission_id=self._job.submission_id, log=self.plan.command.log
        )
        self.is_launched = True
        is_adopted = self._job.may_be_submitted_since is not None
        self._note_start()
        if is_adopted:
            # What is there may be its own.
            self._files.clear()
        self._say(
            "component.spawned",
            pid=None,
            submission_id=self._job.submission_id,
            argv=list(self.plan.command.argv),
            is_adopted=is_adopted,
        )
        self._submitting = asyncio.create_task(self._submit())

    async def until_running(self) -> None:
        """Wait until its driver runs, or it is final. Raises: GivenUp. A cancel leaves it to
        `end`."""
        assert self._submitting is not None
        await self._submitting
        self.is_pending = False
        # What is asked of its age counts from here: it may have waited for long.
        self._launched_monotonic_s = time.monotonic()

    async def has_last_word(self) -> bool:
        deadline = time.monotonic() + _LOG_WITHIN_S
        while not await super().has_last_word():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    async def _submit(self) -> None:
        self._file = await asyncio.to_thread(SubmissionFile.begin, self._job)
        self._file.disk = self._context.disk
        if self._file.content.stop_asked_at is not None:
            self._stopped_s = 0.0
        self._has_gpus = self._has_gpus or self._file.content.gpus_taken_at is not None
        self._submitter = Submitter(self._job, self._dashboard, self._file, self._say)
        state = await self._submitter.run()
        self._asked_s = time.monotonic()
        if state is not None:
            self._saw(state)
        self._begin("watch", self._watch())
        submitted_at = self._file.content.submitted_at or time.time()
        pending_for_s = max(0.0, time.time() - submitted_at)
        deadline = time.monotonic() + self._job.start_within_s - pending_for_s
        while self._state is None or self._state.status == "PENDING":
            if loss := await self._loss():
                raise GivenUp(loss)
            if time.monotonic() > deadline:
                raise GivenUp(self._never_started())
            await asyncio.sleep(0.1)

    async def until_job_lost(self) -> Trouble:
        """Watch a job that was launched, for ever: contact with its cluster, the GPUs that it is
        to take by its start deadline.

        Returns: why it is given up. A cancel ends it.
        """
        ask_gpus_at = time.monotonic()
        while True:
            if loss := await self._loss():
                return loss
            if not self._has_gpus and time.monotonic() >= ask_gpus_at:
                if loss := await self._gpus_not_taken():
                    return loss
                ask_gpus_at = time.monotonic() + _GPUS_EACH_S
            await asyncio.sleep(_POLL_EACH_S)

    async def examine(self) -> None:
        """Write down what its processes hang in, on every node."""
        if self.is_pending:
            return
        job = self._job
        path = self.plan.command.log.with_name(f"{self.name}.hang.txt")
        try:
            found, unreached = await examine(
                await self._dashboard.gcs_address(),
                run_id=job.run_id,
                attempt=job.attempt,
                component=job.component,
                within_s=_EXAMINED_WITHIN_S,
            )
            hangs_in, text = hang_report.report(self.name, str(self), found, unreached)
            self.hangs_in = job.mask(hangs_in)
            await asyncio.to_thread(path.write_text, job.mask(text), encoding="utf-8")
        except Exception as error:
            _log.warning("%s, which hangs, can't be examined: %r", self.name, error)
        else:
            self._say("component.diagnosed", pid=None, path=str(path))

    def stop(self) -> None:
        """Begin its end, with its grace period. Returns at once; any number of times."""
        if self._ending is None or (self._ending.done() and not self._is_clear):
            self._note_stop()
            self._ending = asyncio.create_task(self._end())

    def kill(self) -> None:
        """Begin its end, or go on with it, without a grace period. Returns at once."""
        self._take_down.is_hurried = True
        self.stop()

    async def end(self) -> tuple[int | str, ...]:
        """Stop it and wait until it is final, its actors are gone, its GPUs are free, no process
        of it is left on any node, and its log is whole.

        Returns: what did not come free in time, by node and pid; empty when all is free, as far as
        its nodes were seen (`unseen`). Safe after a launch that failed or was cancelled, and before
        any.
        """
        if not self.is_launched:
            await self._close()
            return ()
        self.stop()
        assert self._ending is not None
        if left := await asyncio.shield(self._ending):
            self._say("component.stuck", pid=None, pids=left)
            return left
        self._context.release(self.name)
        self._say("component.stopped", pid=None)
        return ()

    async def _end(self) -> tuple[str, ...]:
        await _cancelled(self._submitting)
        path = self._job.submission_file
        self._file = self._file or await asyncio.to_thread(SubmissionFile.read, path)
        if self._file is None or self._file.content.submit_began_at is None:
            return await self._cleared(())
        self._file.disk = self._context.disk
        self._note_stop()
        ended = await self._take_down.run(self._file)
        if ended.state is not None:
            if "watch" not in self._tasks:
                self._begin("watch", self._watch())
            await asyncio.wait([self._tasks["watch"]], timeout=_TOLD_WITHIN_S)
            if problem := await self._whole_log():
                self._say("log.incomplete", message=problem)
        self.unseen = ended.unseen
        self._say(
            "job.ended",
            submission_id=self._job.submission_id,
            left=list(ended.left),
            unseen=list(ended.unseen),
        )
        return await self._cleared(ended.left)

    async def let_go(self) -> None:
        """Leave the job running, and stop watching it: the next process attaches to it."""
        await _cancelled(self._submitting)
        await self._close()

    async def _close(self) -> None:
        for name in tuple(self._tasks):
            await self._drop(name)
        await self._dashboard.aclose()

    async def _cleared(self, left: tuple[str, ...]) -> tuple[str, ...]:
        if not left:
            self._is_clear = True
            await self._close()
        return left

    def _note_stop(self) -> None:
        if self._is_final:
            return
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
        if self._file is not None and self._file.content.stop_asked_at is None:
            self._file.note(stop_asked_at=time.time())

    async def _watch(self) -> None:
        """Ask for its state until it is final, tell each change, and then its end."""
        while self._state is None or not self._state.is_final:
            asked_s = time.monotonic()
            try:
                state = await self._dashboard.job(self._job.submission_id)
            except (NoAnswer, Denied) as error:
                self._note_contact(str(error))
            except Exception as error:  # An answer that this was not written for.
                _log.exception("job %s could not be asked for", self._job.submission_id)
                self._note_contact(repr(error))
            else:
                self._note_contact("")
                self._is_forgotten = state is None
                if state is not None:
                    self._asked_s = asked_s
                    self._saw(state)
            if not self._is_final:
                await asyncio.sleep(_POLL_EACH_S)
        await self._tell_end(self._state)

    def _note_contact(self, problem: str) -> None:
        """Whether its cluster answers is told once each time that it changes."""
        self._problem, address = problem, self._job.address
        if problem and self._silent_since_s is None:
            self._silent_since_s = time.monotonic()
            self._say("contact.lost", address=address, message=problem)
        elif not problem and self._silent_since_s is not None:
            after_s = round(time.monotonic() - self._silent_since_s, 1)
            self._silent_since_s = None
            self._say("contact.back", address=address, after_s=after_s)

    def _saw(self, state: JobState) -> None:
        """Take in an answer of the cluster, whoever asked for it. A final one stays."""
        if self._is_final:
            return
        before, self._state = self._state, state
        if not state.is_final:
            self._seen_running_s = self._asked_s
        assert self._file is not None
        known: dict[str, object] = {}
        if state.driver_ip:
            known |= {"driver_ip": state.driver_ip, "driver_node_id": state.driver_node_id}
        if state.status == "RUNNING" and self._file.content.running_at is None:
            known["running_at"] = time.time()
        self._file.note_state(state, **known)
        if before is None or before.status != state.status:
            self._say("job.state", status=state.status, place=self._place())
        if state.status == "RUNNING" and "follow" not in self._tasks:
            self._begin("follow", self._log.follow(state.driver_node_id))

    def _place(self) -> str:
        """Where its driver runs, in words; empty while it runs nowhere."""
        return f"node {self._state.driver_ip}" if self._state and self._state.driver_ip else ""

    async def _tell_end(self, state: JobState) -> None:
        lost_node = ""
        if state.driver_exit_code is None and state.driver_node_id:
            with contextlib.suppress(NoAnswer, Denied):
                nodes = await self._dashboard.nodes()
                if state.driver_node_id not in {node.node_id for node in nodes}:
                    lost_node = self._place()
        at_s = earliest_end(
            state,
            wall_s=time.time(),
            monotonic_s=time.monotonic(),
            seen_running_s=self._seen_running_s,
            wrapper_s=STRAGGLERS_S,
            is_node_lost=bool(lost_node),
        )
        if self._stopped_s is not None and state.driver_exit_code is None:
            # It is our doing, so nothing else can have come of it.
            at_s = max(at_s, self._stopped_s)
        await self._drop("follow")
        if state.driver_node_id:
            self._begin("last", self._log.complete(state.driver_node_id))
            await asyncio.wait([self._tasks["last"]], timeout=_LAST_LINES_WITHIN_S)
        exit_ = exit_of(
            state,
            at_monotonic_s=at_s,
            was_stopped_by_us=self._stopped_s is not None,
            lost_node=lost_node,
        )
        assert self._file is not None
        self._file.note(exit_code=exit_.exit_code, signal=exit_.signal)
        self._say("job.final", status=state.status, message=str(exit_))
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

    async def _loss(self) -> Trouble | None:
        silent_s = time.monotonic() - (self._silent_since_s or math.inf)
        if silent_s > self._job.lost_after_s:
            message = (
                f"{self._job.address} has not answered for {silent_s:.0f} s: {self._problem}; "
                f"what became of job {self._job.submission_id} is not known"
            )
            return Trouble(kind=FailureKind.LOST_CONTACT, rule="contact-lost", message=message)
        if not self._is_forgotten or self._submitter is None:
            return None
        return await self._submitter.forgotten()

    async def _gpus_not_taken(self) -> Trouble | None:
        if self._file is None or self._state is None or self._state.status != "RUNNING":
            return None
        now = time.time()
        ran_for_s = now - (self._file.content.running_at or now)
        try:
            gcs_address = await self._dashboard.gcs_address()
            drivers = await control_store.drivers_of(gcs_address, self._job.submission_id)
            held = await gpus_of(self._dashboard, drivers)
            if held >= self._job.gpus:
                self._has_gpus = True
                self._file.note(gpus_taken_at=time.time())
            if self._has_gpus or ran_for_s <= self._job.start_within_s:
                return None
        except (NoAnswer, Denied):
            return None
        return Trouble(
            kind=FailureKind.START_TIMEOUT,
            rule="gpus-not-taken",
            message=f"job {self._job.submission_id} runs since {ran_for_s:.0f} s and has {held:g} "
            f"of the {self._job.gpus:g} GPUs that it is to take; `muster queue` says who has them. "
            f"{self._raise_key()}",
        )

    def _raise_key(self) -> str:
        return (
            f"Where it needs longer, to copy its model for example, raise ray.start_within_s "
            f"({self._job.start_within_s:g} s): meanwhile its gang stands idle"
        )

    def _never_started(self) -> Trouble:
        reason = " ".join((self._state.message if self._state else "").split())[:500]
        message = f"job {self._job.submission_id} was pending for {self._job.start_within_s:g} s: "
        message += f"{reason or 'the cluster gives no reason'}. {self._raise_key()}"
        return Trouble(kind=FailureKind.START_TIMEOUT, rule="start-deadline", message=message)

    def _begin(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=f"{name} {self._job.submission_id}")

    async def _drop(self, name: str) -> None:
        await _cancelled(self._tasks.pop(name, None))


async def _cancelled(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait for its end; what it raised is known by now to whoever waited."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()


async def stop_submission(
    file: SubmissionFile, *, emit: Emit, grace_s: float, unknown_after_s: float
) -> Ended:
    """End the job that a `submission.json` names, in whatever phase it is, and wait until nothing
    of it is left; `RayJob.end` for a job whose own process is gone.

    Args:
        unknown_after_s: for how long a cluster that does not answer is asked again.

    Returns: what became of it; the file says so too.
    """
    async with contextlib.aclosing(Dashboard(file.content.address)) as dashboard:
        take_down = TakeDown(
            dashboard=dashboard,
            submission_id=file.content.submission_id,
            grace_s=grace_s,
            emit=emit,
            on_state=file.note_state,
            unknown_after_s=unknown_after_s,
        )
        return await take_down.run(file)
