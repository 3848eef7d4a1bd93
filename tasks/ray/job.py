"""Run a component as a job on a Ray cluster, from its submission until its complete end.

The job's *driver* is the process that runs the component's command on a node of the cluster. The
log of the driver is copied to a local file while it grows. The exit of the component is derived
from the final state that Ray reports for the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from tasks.processes import hang_report
from tasks.processes.component import AttemptContext, ComponentPlan, RunningComponent
from tasks.processes.planned_end import PlannedEnd
from tasks.ray import control_store
from tasks.ray.dashboard import Dashboard, Denied, JobState, NoAnswer
from tasks.ray.end import (
    JobEnd,
    TakeDown,
    count_held_gpus,
    earliest_end,
    job_exit,
    list_actors_and_groups,
    read_last_job_lines,
)
from tasks.ray.log_copy import LogCopy
from tasks.ray.nodes import examine, warn
from tasks.ray.submission import JobPlan, SubmissionFile
from tasks.ray.submit import STRAGGLERS_S, Submitter
from tasks.record.events import Emit
from tasks.record.outcome import ComponentFailed, GiveUpReason
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

#: Seconds between two requests for the state of a job.
_STATE_INTERVAL_S = 0.5
#: Seconds between two requests for the number of GPUs that a job holds.
_GPUS_INTERVAL_S = 2.0
#: Seconds to wait for the last lines of a job's log before the job's exit is reported. The last
#: lines usually name the cause of a failure.
_LAST_LINES_TIMEOUT_S = 0.8
#: Longest wait for the result of `RayJob.exited` after the job has reached a final state, in
#: seconds.
_EXIT_TIMEOUT_S = 10.0
#: Seconds to wait for the log line that shows that the component was ready. The log is copied from
#: another node, so the line can arrive later than the job's final state.
_LOG_TIMEOUT_S = 5.0
#: Seconds between two searches of the log for the line that shows that the component was ready.
_LOG_INTERVAL_S = 0.2
#: Deadline in seconds for sending the signal `stop.warn` of the spec to the processes of a job. The
#: signal warns the processes before the job is ended. In this time, Muster also starts its agent on
#: nodes without an agent.
_WARN_TIMEOUT_S = 30.0
#: Shortest time in seconds between two searches for processes that handle the signal `stop.warn`.
#: Each search contacts every node.
_WARN_INTERVAL_S = 10.0
#: Deadline for the examination of a hanging job on all nodes, in seconds. In this time, Muster also
#: starts its agent on nodes without an agent, which takes several seconds.
_EXAMINE_TIMEOUT_S = 60.0


class RayJob(RunningComponent):
    """A component that runs as a Ray job.

    The object manages the job from its submission until the GPUs of the job are free again.

    The future `exited` gets its result when the cluster reports a final state of the job. The
    future never has an exception. The result has the exit code or the signal of the job's driver if
    the cluster knows it. Otherwise, the result has a note with Ray's reason.

    The result's `at_monotonic_s` is the earliest time at which the job can have ended. If Muster
    used a later time, another component that failed because of the job could look like the first
    failure.

    The object belongs to one asyncio loop and never blocks it.
    """

    def __init__(self, plan: ComponentPlan, context: AttemptContext, *, job: JobPlan) -> None:
        super().__init__(plan, context)
        self.exited = asyncio.get_running_loop().create_future()
        self._job = job
        self._emit_event = partial(context.emit, component=plan.name)
        self._dashboard = Dashboard(job.address)
        #: Time of the first request that the cluster did not answer, in CLOCK_MONOTONIC seconds.
        #: None if the cluster has answered the last request.
        self._silent_since_s: float | None = None
        #: Error of the last request for the job's state, or an empty string.
        self._problem = ""
        self._log = LogCopy(self._dashboard, job.submission_id, plan.command.log)
        self._take_down = TakeDown(
            dashboard=self._dashboard,
            submission_id=job.submission_id,
            grace_s=plan.command.grace_s,
            emit=self._emit_event,
            on_state=self._record_state,
        )
        self._submitter: Submitter | None = None
        self._submitting: asyncio.Task[None] | None = None
        self._file: SubmissionFile | None = None
        #: State of the job in the last report of the cluster. None before the first report.
        self._state: JobState | None = None
        #: Time of the last request that found the job pending or running, in CLOCK_MONOTONIC
        #: seconds. None before the first such request.
        self._seen_running_s: float | None = None
        #: Time of the last answered request for the job's state, in CLOCK_MONOTONIC seconds.
        self._asked_s = time.monotonic()
        #: True if the cluster answered the last request with "no such job".
        self._is_forgotten = False
        #: True if the job has taken all of its GPUs, or needs no GPU.
        self._has_gpus = job.gpus <= 0
        #: Time in CLOCK_MONOTONIC seconds at which Muster first asked Ray to stop the job. 0 if the
        #: time is unknown, because an earlier process of the run asked Ray. None if Muster has not
        #: asked Ray to stop the job.
        self._stopped_s: float | None = None
        #: Mapping from name to running asyncio task: "watch" requests the state of the job,
        #: "follow" copies the job's log, and "last" copies the end of that log.
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._ending: asyncio.Task[tuple[str, ...]] | None = None
        #: True if the job has ended without leftovers.
        self._is_clear = False
        #: Mapping from a machine to its processes that got the signal `stop.warn`, which warns
        #: processes before the job is ended. Each process is a list of pid and start time.
        self._warned: dict[str, list[list[int]]] = {}
        #: Earliest time at which `warn` sends signals again, in CLOCK_MONOTONIC seconds.
        self._warn_again_s = 0.0

    def __str__(self) -> str:
        return f"{self.name} (job {self._job.submission_id})"

    def read_log_end(self, since: int = 0, until: int | None = None) -> str:
        """Return the end of the job's log and Ray's message about the end of the job.

        Lines that Ray has written to the log are removed.

        Args:
            since: Offset in the log, in bytes, at which reading begins.
            until: Offset in bytes at which reading ends. None to read to the end of the log.
        """
        log_end = super().read_log_end(since, until)
        return read_last_job_lines(log_end, self._state if self._is_final else None)

    @property
    def _is_final(self) -> bool:
        return self._state is not None and self._state.is_final

    async def launch(self) -> None:
        """Begin to submit the job, or attach to the job if it was submitted earlier.

        `until_running` waits until the job has been submitted and runs.

        Raises:
            OSError: The job could not be recorded on disk, and was therefore not submitted.
        """
        self._emit_event("component.starting")
        await self._note_start()
        self._context.ports.release(self.name)
        await self._context.enter_job(
            self.plan, submission_id=self._job.submission_id, log=self.plan.command.log
        )
        self.is_launched = True
        is_adopted = self._job.may_be_submitted_since is not None
        if is_adopted:
            # `_files` lists the files that existed before this launch. Usually, these files are too
            # old to prove that the component is ready. But here, an earlier process of the run may
            # have launched the job, and the job may have written the files. So clear the list.
            self._files.clear()
        self._emit_event(
            "component.spawned",
            pid=None,
            submission_id=self._job.submission_id,
            argv=list(self.plan.command.argv),
            is_adopted=is_adopted,
        )
        self._submitting = asyncio.create_task(self._submit())

    async def until_running(self) -> None:
        """Wait until the job's driver runs or the job has ended.

        If this call is cancelled, the job continues to run. Call `end` to stop the job.

        Raises:
            ComponentFailed: The job could not be submitted or did not start in time.
        """
        assert self._submitting is not None
        # `shield` lets the submission of the job continue if this call is cancelled. Only the
        # methods `end` and `detach` cancel the submission.
        await asyncio.shield(self._submitting)
        self.is_pending = False
        # The time limits of the component count from now, because the job may have been pending for
        # a long time.
        self._launched_monotonic_s = time.monotonic()

    async def was_ready_before_end(self) -> bool:
        deadline = time.monotonic() + _LOG_TIMEOUT_S
        while not await super().was_ready_before_end():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOG_INTERVAL_S)
        return True

    async def _submit(self) -> None:
        """Submit the job or attach to it, and wait until its driver runs or the job has ended."""
        self._file = await asyncio.to_thread(SubmissionFile.begin, self._job)
        self._file.disk = self._context.disk
        if self._file.content.stop_asked_at is not None:
            self._stopped_s = 0.0
        self._has_gpus = self._has_gpus or self._file.content.gpus_taken_at is not None
        self._submitter = Submitter(self._job, self._dashboard, self._file, self._emit_event)
        state = await self._submitter.run()
        self._asked_s = time.monotonic()
        if state is not None:
            self._record_state(state)
        self._start_task("watch", self._watch())
        submitted_at = self._file.content.submitted_at or time.time()
        pending_for_s = max(0.0, time.time() - submitted_at)
        deadline = time.monotonic() + self._job.start_within_s - pending_for_s
        while self._state is None or self._state.status == "PENDING":
            if loss := await self._check_loss():
                raise ComponentFailed(loss)
            if time.monotonic() > deadline:
                raise ComponentFailed(self._never_started())
            await asyncio.sleep(0.1)

    async def until_job_lost(self) -> GiveUpReason:
        """Wait until a launched job must be given up, and return the reason.

        There are three possible reasons:

        - The cluster does not answer for too long.
        - The cluster no longer knows the job.
        - The job does not take its GPUs in time.

        Without such a reason, this call waits until it is cancelled.
        """
        ask_gpus_at = time.monotonic()
        while True:
            if loss := await self._check_loss():
                return loss
            if not self._has_gpus and time.monotonic() >= ask_gpus_at:
                if loss := await self._check_gpus():
                    return loss
                ask_gpus_at = time.monotonic() + _GPUS_INTERVAL_S
            await asyncio.sleep(_STATE_INTERVAL_S)

    async def examine(self) -> None:
        """Write a report on a hanging job: stacks and states of its processes on every node.

        The report is a file next to the log of the job.
        """
        if self.is_pending:
            return
        job = self._job
        path = self.plan.command.log.with_name(f"{self.name}.hang.txt")
        try:
            evidence, unreached = await examine(
                await self._dashboard.gcs_address(),
                run_id=job.run_id,
                attempt=job.attempt,
                component=job.component,
                within_s=_EXAMINE_TIMEOUT_S,
            )
            hangs_in, text = hang_report.compose_report(self.name, str(self), evidence, unreached)
            self.hangs_in = job.mask(hangs_in)
            await asyncio.to_thread(path.write_text, job.mask(text), encoding="utf-8")
        except Exception as error:
            _log.warning(
                "Muster could not examine why the component %s hangs: %r", self.name, error
            )
        else:
            self._emit_event("component.diagnosed", pid=None, path=str(path))

    async def warn(self, signum: int) -> list[str]:
        """Send a signal to those processes of the job that have a handler for the signal.

        If the last call was less than ten seconds ago, nothing is sent.

        Returns:
            Texts that name the processes that got the signal: `node NAME, pid PID`.
        """
        now = time.monotonic()
        if self.is_pending or self._is_final or now < self._warn_again_s:
            return []
        self._warn_again_s = now + _WARN_INTERVAL_S
        job = self._job
        try:
            warned = await warn(
                await self._dashboard.gcs_address(),
                run_id=job.run_id,
                attempt=job.attempt,
                component=job.component,
                signum=signum,
                skip=self._warned,
                within_s=_WARN_TIMEOUT_S,
            )
        except (NoAnswer, Denied, OSError, ValueError) as error:
            _log.warning(
                "Muster could not send the warning signal (`stop.warn` in the spec) to the "
                "processes of %s: %s",
                self,
                error,
            )
            return []
        for result in warned.values():
            self._warned.setdefault(result["machine"], []).extend(result["processes"])
        return [
            f"node {name}, pid {pid}"
            for name, result in warned.items()
            for pid, _ in result["processes"]
        ]

    def forget_warnings(self) -> None:
        self._warned.clear()
        self._warn_again_s = 0.0

    async def read_planned_end(self) -> PlannedEnd | None:
        """Return the earliest planned end of a node of the job, and the reason.

        Only the nodes that the cluster drains have a planned end.

        Returns:
            None if the job does not run, if the cluster does not answer, or if the cluster drains
            no node of the job.
        """
        if self._state is None or self._is_final:
            return None
        try:
            gcs_address = await self._dashboard.gcs_address()
            deadlines = await control_store.read_drain_deadlines(gcs_address)
            if not deadlines:
                return None
            drivers = await control_store.list_drivers(gcs_address, self._job.submission_id)
            actors, groups = await list_actors_and_groups(self._dashboard, drivers)
        except (NoAnswer, Denied) as error:
            _log.debug(
                "Muster could not ask the Ray cluster %s which nodes Ray drains: %s",
                self._job.address,
                error,
            )
            return None
        nodes = {self._state.driver_node_id, *(actor.node_id for actor in actors)}
        nodes |= {node for group in groups for node in group.gpus_on}
        ends = [deadline for node, deadline in deadlines.items() if node in nodes]
        return PlannedEnd(at=min(ends), reason="Ray drains a node of the job") if ends else None

    def delay_kill(self, for_s: float) -> None:
        self._take_down.kill_not_before = time.monotonic() + for_s

    def stop(self) -> None:
        """Begin to end the job, and return at once. The job may use its whole grace period.

        Further calls are allowed. Calls that are made while the job is ending have no effect.
        """
        if self._ending is None or (self._ending.done() and not self._is_clear):
            self._note_stop()
            self._ending = asyncio.create_task(self._end())

    def kill(self) -> None:
        """Begin to end the job without a grace period, and return at once.

        If the job is already in its grace period, the rest of that period is skipped.
        """
        self._take_down.is_hurried = True
        self.stop()

    async def end(self) -> tuple[str, ...]:
        """End the job, and wait until it has ended completely.

        After a complete end, Ray reports a final state of the job, and the log is copied. The job's
        actors have ended, its GPUs are free, and none of its processes runs on any node. This
        method may also be called before a launch, and after a launch that failed or was cancelled.

        Returns:
            Descriptions of leftovers that did not end in time. The nodes that could not be checked
            are in the attribute `unseen` instead.
        """
        await self.tasks.cancel()
        if not self.is_launched:
            await self._close()
            return ()
        self.stop()
        assert self._ending is not None
        if leftovers := await asyncio.shield(self._ending):
            self._emit_event("component.stuck", pid=None, pids=leftovers)
            return leftovers
        self._context.leave_job(self.name)
        self._emit_event("component.stopped", pid=None)
        return ()

    async def _end(self) -> tuple[str, ...]:
        """End the job, and return descriptions of its leftovers."""
        await _cancel(self._submitting)
        path = self._job.submission_file
        self._file = self._file or await asyncio.to_thread(SubmissionFile.read, path)
        if self._file is None or self._file.content.submit_began_at is None:
            # No request to submit the job was sent, so the cluster has no job that must be ended.
            return await self._finish_end(())
        self._file.disk = self._context.disk
        self._note_stop()
        ended = await self._take_down.run(self._file)
        if ended.state is not None:
            if "watch" not in self._tasks:
                self._start_task("watch", self._watch())
            await asyncio.wait([self._tasks["watch"]], timeout=_EXIT_TIMEOUT_S)
            if problem := await self._complete_log():
                self._emit_event("log.incomplete", message=problem)
        self.unseen = ended.unseen
        self._emit_event(
            "job.ended",
            submission_id=self._job.submission_id,
            left=list(ended.left),
            unseen=list(ended.unseen),
        )
        return await self._finish_end(ended.left)

    async def detach(self) -> None:
        """Stop watching the job without ending the job.

        The next flow process of the run can attach to the job.
        """
        await self.tasks.cancel()
        await _cancel(self._submitting)
        await self._close()

    async def _close(self) -> None:
        """Cancel all background tasks, and close the connections to the cluster."""
        for name in tuple(self._tasks):
            await self._cancel_task(name)
        await self._dashboard.aclose()

    async def _finish_end(self, leftovers: tuple[str, ...]) -> tuple[str, ...]:
        """Close this object if the job has left nothing behind, and return `leftovers`.

        If there are leftovers, the object stays open, so that `end` can be called again.
        """
        if not leftovers:
            self._is_clear = True
            await self._close()
        return leftovers

    def _note_stop(self) -> None:
        """Record the time of the first stop request, unless the job has already ended."""
        if self._is_final:
            return
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
        if self._file is not None and self._file.content.stop_asked_at is None:
            self._file.note(stop_asked_at=time.time())

    async def _watch(self) -> None:
        """Request the job's state every half second until it is final, and then report the exit."""
        while self._state is None or not self._state.is_final:
            asked_s = time.monotonic()
            try:
                state = await self._dashboard.job(self._job.submission_id)
            except (NoAnswer, Denied) as error:
                self._note_contact(str(error))
            except Exception as error:
                # The loop must continue after every error, such as a reply in an unexpected format.
                _log.exception(
                    "Muster could not read the state of the Ray job %s.", self._job.submission_id
                )
                self._note_contact(repr(error))
            else:
                self._note_contact("")
                self._is_forgotten = state is None
                if state is not None:
                    self._asked_s = asked_s
                    self._record_state(state)
            if not self._is_final:
                await asyncio.sleep(_STATE_INTERVAL_S)
        await self._report_exit(self._state)

    def _note_contact(self, problem: str) -> None:
        """Record the result of a request to the cluster.

        An event is emitted if contact with the cluster was lost or restored.

        Args:
            problem: Error of the request, or an empty string if the cluster answered.
        """
        self._problem = problem
        address = self._job.address
        if problem and self._silent_since_s is None:
            self._silent_since_s = time.monotonic()
            self._emit_event("contact.lost", address=address, message=problem)
        elif not problem and self._silent_since_s is not None:
            after_s = round(time.monotonic() - self._silent_since_s, 1)
            self._silent_since_s = None
            self._emit_event("contact.back", address=address, after_s=after_s)

    def _record_state(self, state: JobState) -> None:
        """Record a job state from a report of the cluster. Ignore reports after a final state."""
        if self._is_final:
            return
        previous = self._state
        self._state = state
        if not state.is_final:
            self._seen_running_s = self._asked_s
        assert self._file is not None
        fields: dict[str, object] = {}
        if state.driver_ip:
            fields |= {"driver_ip": state.driver_ip, "driver_node_id": state.driver_node_id}
        if state.status == "RUNNING" and self._file.content.running_at is None:
            fields["running_at"] = time.time()
        self._file.note_state(state, **fields)
        if previous is None or previous.status != state.status:
            self._emit_event("job.state", status=state.status, place=self._driver_place())
        if state.status == "RUNNING" and "follow" not in self._tasks:
            self._start_task("follow", self._log.follow(state.driver_node_id))

    def _driver_place(self) -> str:
        """Return "node ADDRESS" for the node of the job's driver.

        Returns:
            The text, or an empty string if the driver has not started.
        """
        if self._state is None or not self._state.driver_ip:
            return ""
        return f"node {self._state.driver_ip}"

    async def _report_exit(self, state: JobState) -> None:
        """Set the result of the future `exited`, record the job's exit, and emit an event.

        Args:
            state: The final state of the job.
        """
        lost_node = ""
        if state.driver_exit_code is None and state.driver_node_id:
            with contextlib.suppress(NoAnswer, Denied):
                nodes = await self._dashboard.nodes()
                if state.driver_node_id not in {node.node_id for node in nodes}:
                    lost_node = self._driver_place()
        at_s = earliest_end(
            state,
            wall_s=time.time(),
            monotonic_s=time.monotonic(),
            seen_running_s=self._seen_running_s,
            wrapper_s=STRAGGLERS_S,
            is_node_lost=bool(lost_node),
        )
        if self._stopped_s is not None and state.driver_exit_code is None:
            # Muster's stop request has ended the job, so the end of the job cannot be earlier than
            # this request.
            at_s = max(at_s, self._stopped_s)
        await self._cancel_task("follow")
        if state.driver_node_id:
            self._start_task("last", self._log.complete(state.driver_node_id))
            await asyncio.wait([self._tasks["last"]], timeout=_LAST_LINES_TIMEOUT_S)
        exit_ = job_exit(
            state,
            at_monotonic_s=at_s,
            was_stopped_by_us=self._stopped_s is not None,
            lost_node=lost_node,
        )
        assert self._file is not None
        self._file.note(exit_code=exit_.exit_code, signal=exit_.signal)
        self._emit_event("job.final", status=state.status, message=str(exit_))
        if not self.exited.done():
            self.exited.set_result(exit_)

    async def _complete_log(self) -> str:
        """Copy the rest of the job's log.

        Returns:
            Reason why the end of the log may be missing, or an empty string for a complete log.
        """
        assert self._state is not None
        if (last := self._tasks.pop("last", None)) is not None:
            await asyncio.wait([last])
        await self._cancel_task("follow")
        if not self._state.driver_node_id:
            # The driver never started, so there is no log.
            return ""
        # Add the missing lines to the local copy of the log. Leftover processes of the job may have
        # written to the log until they were killed.
        return await self._log.complete(self._state.driver_node_id)

    async def _check_loss(self) -> GiveUpReason | None:
        """Return the reason why the job is lost, or None if the job is not lost.

        A job is lost if the cluster has not answered for too long or no longer knows the job.
        """
        silent_s = time.monotonic() - (self._silent_since_s or math.inf)
        if silent_s > self._job.lost_after_s:
            message = (
                f"the state of job {self._job.submission_id} is unknown, because the Ray dashboard "
                f"at {self._job.address} has not answered for {silent_s:.0f} s: {self._problem}"
            )
            return GiveUpReason(kind=FailureKind.LOST_CONTACT, rule="contact-lost", message=message)
        if not self._is_forgotten or self._submitter is None:
            return None
        return await self._submitter.forgotten()

    async def _check_gpus(self) -> GiveUpReason | None:
        """Return the reason for giving up a job that did not take its GPUs in time.

        Returns:
            The reason. None if the job has its GPUs, if the time to take them is not over, or if
            the cluster does not answer.
        """
        if self._file is None or self._state is None or self._state.status != "RUNNING":
            return None
        now = time.time()
        ran_for_s = now - (self._file.content.running_at or now)
        try:
            gcs_address = await self._dashboard.gcs_address()
            drivers = await control_store.list_drivers(gcs_address, self._job.submission_id)
            held_gpus = await count_held_gpus(self._dashboard, drivers)
            if held_gpus >= self._job.gpus:
                self._has_gpus = True
                self._file.note(gpus_taken_at=time.time())
            if self._has_gpus or ran_for_s <= self._job.start_within_s:
                return None
        except (NoAnswer, Denied):
            return None
        return GiveUpReason(
            kind=FailureKind.START_TIMEOUT,
            rule="gpus-not-taken",
            message=f"job {self._job.submission_id} has been running for {ran_for_s:.0f} s, but "
            f"holds {held_gpus:g} of its {self._job.gpus:g} GPUs. `muster queue` shows which runs "
            f"hold GPUs. {self._start_limit_hint()}",
        )

    def _start_limit_hint(self) -> str:
        """Return advice for the user: raise the time limit for the start of the job in the spec."""
        return (
            "If the job needs more time before it uses its GPUs, for example to copy its model, "
            f"raise ray.start_within_s (now {self._job.start_within_s:g} s). Note that the GPUs "
            "are idle until then"
        )

    def _never_started(self) -> GiveUpReason:
        """Return the reason for giving up a job that was pending for too long."""
        cluster_message = self._state.message if self._state else ""
        reason = " ".join(cluster_message.split())[:500]
        limit_s = self._job.start_within_s
        message = f"job {self._job.submission_id} was still pending after {limit_s:g} s: "
        message += f"{reason or 'the cluster gives no reason'}. {self._start_limit_hint()}"
        return GiveUpReason(kind=FailureKind.START_TIMEOUT, rule="start-deadline", message=message)

    def _start_task(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=f"{name} {self._job.submission_id}")

    async def _cancel_task(self, name: str) -> None:
        await _cancel(self._tasks.pop(name, None))


async def _cancel(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, and wait for its end. An exception of the task is ignored.

    Args:
        task: The task, or None to do nothing.
    """
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            # asyncio logs the exception of a task if no code has read it. So read the exception.
            task.exception()


async def stop_submission(
    file: SubmissionFile, *, emit: Emit, grace_s: float, unknown_after_s: float
) -> JobEnd:
    """End the Ray job of a submission file, and wait until the job has ended completely.

    Use this function for a job whose flow process was killed. A living flow process calls
    `RayJob.end` instead.

    Args:
        file: The submission file, in which the result is recorded.
        emit: Function that writes an event of the attempt.
        grace_s: Seconds from the stop signal to SIGKILL.
        unknown_after_s: Longest wait for a cluster that does not answer, in seconds.

    Returns:
        The final state of the job, its leftovers, and the nodes that could not be checked.
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
