"""End a pending or running Ray job, and interpret the final state that Ray reports.

After the end of a job, Muster reports its leftovers: actors and placement groups of the job's Ray
drivers, processes on the nodes, and nodes that could not be checked for processes.

A *driver* is a process that has connected to the Ray cluster. The program of one job may start
several drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from tasks.ray import control_store
from tasks.ray.dashboard import (
    Actor,
    Dashboard,
    Denied,
    JobState,
    LiveNode,
    NoAnswer,
    PlacementGroup,
)
from tasks.ray.nodes import SweepReport, make_nodes_ready, sweep
from tasks.ray.submission import QUOTED_LOG, SETTLES_WITHIN_S, SubmissionFile
from tasks.ray.unchecked_nodes import UncheckedNodesNote, split_departed_nodes
from tasks.record.events import Emit
from tasks.record.outcome import Exit
from tasks.record.places import AttemptPlace
from tasks.spec.formatting import join_words

#: The living actors and the placement groups of a job, which hold resources of the Ray cluster.
ActorsAndGroups = tuple[list[Actor], list[PlacementGroup]]


async def list_actors_and_groups(dashboard: Dashboard, drivers: Iterable[str]) -> ActorsAndGroups:
    """Return the living actors and the placement groups of Ray drivers.

    Args:
        dashboard: The dashboard of the cluster.
        drivers: Ray job ids of the drivers, in hex.

    Raises:
        NoAnswer, Denied: The cluster did not answer.
    """
    actors: list[Actor] = []
    groups: list[PlacementGroup] = []
    for driver in sorted(drivers):
        actors += await dashboard.actors_of(driver)
        groups += await dashboard.groups_of(driver)
    return actors, groups


def describe_actors_and_groups(
    actors_and_groups: ActorsAndGroups, nodes: Iterable[LiveNode]
) -> tuple[str, ...]:
    """Return texts that say how many GPUs each actor and placement group holds on which node.

    Args:
        actors_and_groups: The actors and placement groups.
        nodes: The living nodes of the cluster. The texts contain the addresses of the nodes.
    """
    ips = {node.node_id: node.ip for node in nodes}
    actors, groups = actors_and_groups
    holders = [
        (
            actor.node_id,
            f", pid {actor.pid}: actor {actor.class_name}, which is {actor.state},",
            actor.gpus,
        )
        for actor in actors
    ]
    for group in groups:
        for node_id, gpus in (group.gpus_on or {"": 0.0}).items():
            holders.append((node_id, f": placement group {group.group_id[:8]}", gpus))
    return tuple(
        f"node {ips.get(node_id, node_id[:8] or 'unknown')}{description} holds {gpus:g} GPUs"
        for node_id, description, gpus in holders
    )


async def count_held_gpus(dashboard: Dashboard, drivers: Iterable[str]) -> float:
    """Return the number of GPUs that Ray drivers hold now.

    The number includes the GPUs of the drivers' actors, placement groups and tasks. Requests for
    GPUs that Ray has not fulfilled yet do not count.

    Args:
        dashboard: The dashboard of the cluster.
        drivers: Ray job ids of the drivers, in hex.

    Raises:
        NoAnswer, Denied: The cluster did not answer.
    """
    driver_ids = sorted(drivers)
    actors, groups = await list_actors_and_groups(dashboard, driver_ids)
    gpus_of_actors = [actor.gpus for actor in actors]
    gpus_of_bundles = [gpus for group in groups for gpus in group.gpus_on.values()]
    gpus_of_tasks = [await dashboard.gpus_of_tasks(driver_id) for driver_id in driver_ids]
    return sum([*gpus_of_bundles, *gpus_of_tasks, *gpus_of_actors])


#: Longest time until Ray notices that the driver of a job has exited, in seconds.
#: Source: ray 2.60, JobSupervisor.SUBPROCESS_POLL_PERIOD_S.
RAY_POLLS_EACH_S = 0.1
#: Longest time until Ray notices that the supervisor actor of a job has died, in seconds. Ray
#: checks the actor once a second, and delays of 0.7 to 2 s were measured.
#: Source: ray 2.60, JobManager.JOB_MONITOR_LOOP_PERIOD_S.
_SUPERVISOR_DELAY_S = 2.5
#: Longest time until Ray notices that a node has died, in seconds. With Ray's default health
#: checks, delays of up to 66 s were measured.
_NODE_DELAY_S = 70.0
#: Largest rounding error of a job's end time, in seconds. Ray rounds the time to milliseconds.
_ROUNDING_S = 0.001
#: Ray repeats the command of a job in the job's log. The line with the command begins with this
#: text.
#: Source: ray 2.60, JobSupervisor._exec_entrypoint.
_COMMAND_ECHO = "Running entrypoint for job "


def job_exit(
    job: JobState, *, at_monotonic_s: float, was_stopped_by_us: bool, lost_node: str = ""
) -> Exit:
    """Convert the final state of a Ray job into the `Exit` of a component.

    Args:
        job: The final state of the job.
        at_monotonic_s: Earliest possible time of the job's end, in CLOCK_MONOTONIC seconds.
        was_stopped_by_us: True if Muster asked Ray to stop the job.
        lost_node: Description of the driver's node if the cluster has lost that node. Otherwise, an
            empty string.

    Returns:
        An exit with the exit code or the signal, if Ray knows how the program ended. Otherwise, an
        exit with a note about the reason.
    """
    code = job.driver_exit_code
    if code is None and job.status == "SUCCEEDED":
        code = 0
    if code is not None:
        # Do not interpret an exit code of 128 + n as signal n. If a signal had killed the program,
        # Muster's wrapper process would have reported the signal. So the program itself has exited
        # with this code.
        return Exit.from_return_code(code, at_monotonic_s)
    if job.status == "STOPPED" and was_stopped_by_us:
        note = "stopped by Muster"
    elif job.status == "STOPPED":
        note = (
            "stopped by a person or a program other than Muster (with `ray job stop` or in the Ray "
            "dashboard)"
        )
    else:
        # Ray's message may have many lines. The first line names the cause.
        lines = [line.strip() for line in job.message.splitlines() if line.strip()]
        no_reason = f"the Ray job is {job.status}, and Ray gives no reason"
        note = lines[0][:500] if lines else no_reason
        if job.error_type:
            note += f" ({job.error_type})"
        if lost_node:
            note = f"{lost_node} left the cluster; {note}"
    return Exit.from_return_code(None, at_monotonic_s, note)


def read_last_job_lines(log_end: str, job: JobState | None) -> str:
    """Return the last lines of a job's output, in which Muster searches for the cause of a failure.

    Args:
        log_end: The last lines of the job's log.
        job: The final state of the job, or None. The message and the error type in the state are
            appended to the lines.
    """
    # Remove the line in which Ray repeats the command. Words of the command could look like the
    # cause of a failure.
    lines = [line for line in log_end.splitlines() if not line.startswith(_COMMAND_ECHO)]
    if job is not None:
        # Ray's message about a failed job quotes the end of the log. Remove the quote, because
        # `log_end` contains the same lines.
        message, _, _ = job.message.partition(QUOTED_LOG)
        lines += [message.rstrip(" ,"), job.error_type]
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
    """Return the earliest time at which a Ray job can have ended, in CLOCK_MONOTONIC seconds.

    Muster compares this time with the ends of other components, to find the component that failed
    first.

    Args:
        job: The final state of the job. Its end time comes from the clock of another machine.
        wall_s: The current time, in UTC epoch seconds.
        monotonic_s: The current time, in CLOCK_MONOTONIC seconds.
        seen_running_s: Time of the last request that found the job pending or running, in
            CLOCK_MONOTONIC seconds. None if no request found the job pending or running.
        wrapper_s: Longest time in seconds that Muster's wrapper process can outlive the job's
            program.
        is_node_lost: True if the node of the job's driver is no longer in the cluster.
    """
    max_delay_s = RAY_POLLS_EACH_S + wrapper_s + _ROUNDING_S
    if job.status == "FAILED" and job.driver_exit_code is None:
        # The driver or its node has died. Until Ray notices the death, Ray reports the job
        # as running. So the job can have ended earlier than Ray's reports show.
        max_delay_s += _NODE_DELAY_S if is_node_lost else _SUPERVISOR_DELAY_S

    lower_bounds = [] if seen_running_s is None else [seen_running_s - max_delay_s]
    if job.ended_at is not None:
        lower_bounds.append(monotonic_s - (wall_s - job.ended_at) - max_delay_s)
    return min(max(lower_bounds, default=monotonic_s), monotonic_s)


#: Longest time in seconds that a stop may take in addition to the grace period. The time covers 5 s
#: that Ray waits after the grace period, and the delay until Ray notices the end of the job. After
#: this time, Muster kills the supervisor actor of the job.
_STOP_MARGIN_S = 8.0
#: Longest wait in seconds for Ray to report a final state of the job after the SIGKILL of its
#: supervisor actor. After this time, the job is reported as a leftover.
_KILL_TIMEOUT_S = 30.0
#: Seconds to wait before Muster removes the actors and placement groups of an ended job. Most
#: actors and placement groups end together with the job's driver, but not the detached ones.
_REMOVAL_DELAY_S = 3.0
#: Seconds to wait for the end of a job's actors and placement groups. After this time, the
#: remaining actors and placement groups are reported as leftovers.
_FREE_TIMEOUT_S = 30.0
#: Largest number of nodes that a message about unchecked nodes lists.
_MAX_LISTED_NODES = 5
#: Pause between two requests to the cluster during the wait for a job's end, as a share of the time
#: since the start of the wait. So the pauses grow.
_PAUSE_SHARE = 0.1
#: Shortest pause between two requests to the cluster during the wait for a job's end, in seconds.
_MIN_PAUSE_S = 0.04
#: Longest pause between two requests to the cluster during the wait for a job's end, in seconds.
_MAX_PAUSE_S = 0.25

_T = TypeVar("_T")


def _pause_s(since: float) -> float:
    """Return the pause before the next request to the cluster during a wait, in seconds.

    Args:
        since: Start of the wait, in CLOCK_MONOTONIC seconds.
    """
    pause_s = _PAUSE_SHARE * (time.monotonic() - since)
    return min(max(_MIN_PAUSE_S, pause_s), _MAX_PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """Result of ending a Ray job."""

    #: Final state of the job, or the last known state if the job could not be ended. None if the
    #: cluster has no such job or does not answer.
    state: JobState | None
    #: Descriptions of the job's leftovers: resources and processes that still exist or may still
    #: exist. Empty if the job has no leftovers.
    left: tuple[str, ...]
    #: Descriptions of the nodes that could not be checked for leftover processes of the job. Nodes
    #: that are no longer in the cluster are included.
    unseen: tuple[str, ...] = ()
    #: True if the job was pending or running when Muster began to end it.
    was_alive: bool = False


@dataclass(slots=True, kw_only=True)
class TakeDown:
    """Ends one Ray job, frees its resources in the cluster, and kills its leftover processes."""

    #: Dashboard of the cluster. The caller must close the dashboard.
    dashboard: Dashboard
    #: Submission id of the job.
    submission_id: str
    #: Seconds from the stop signal to SIGKILL.
    grace_s: float
    #: Function that writes an event of the attempt.
    emit: Emit
    #: Function that is called with the state of the job after each report of the cluster, until the
    #: job has ended.
    on_state: Callable[[JobState], None]
    #: Longest wait for a cluster that does not answer, in seconds.
    unknown_after_s: float = 60.0
    #: Function that starts Muster's agent on each node of the cluster. With a running agent on each
    #: node, killing leftover processes is fast. The argument is the URL of Ray's dashboard.
    make_ready: Callable[[str], Coroutine[Any, Any, None]] = make_nodes_ready
    #: Function that kills leftover processes of the job on the nodes.
    sweep: Callable[..., Awaitable[SweepReport]] = sweep
    #: If True, the rest of the grace period is skipped. The attribute may be set to True while the
    #: job is being ended.
    is_hurried: bool = False
    #: Earliest time of SIGKILL for a job that saves a checkpoint after its stop signal, in
    #: CLOCK_MONOTONIC seconds. 0 if the job saves no checkpoint. The attribute may be set while the
    #: job is being ended.
    kill_not_before: float = 0.0
    #: True if the cluster has reported the job as pending or running since the call of `run`.
    _was_alive: bool = False

    async def run(self, file: SubmissionFile) -> JobEnd:
        """End the job of a submission file, and record the result in the file.

        Returns:
            The result. If the cluster does not answer, the result's `left` contains a sentence
            about the missing answer.
        """
        try:
            ended = await self._end(file)
        except (NoAnswer, Denied) as error:
            file.note(status="unknown", message=str(error))
            left = (
                f"the Ray cluster does not answer. So the state of job {self.submission_id} is "
                f"unknown, and its processes may still run: {error}"
            )
            return JobEnd(state=None, left=(left,))
        file.note(left=list(ended.left), unseen=list(ended.unseen))
        return ended

    async def _end(self, file: SubmissionFile) -> JobEnd:
        """End the job of a submission file, and return the result.

        Raises:
            NoAnswer, Denied: The cluster did not answer for `unknown_after_s` seconds.
        """
        # If the cluster has not confirmed the submission of the job, the submit request may still
        # be on its way. In that case, wait some seconds for the job to appear in the cluster.
        was_known = file.content.submitted_at is not None
        settle_s = 0.0 if was_known else SETTLES_WITHIN_S
        preparing = asyncio.create_task(self.make_ready(self.dashboard.address))
        try:
            state = await self._make_final(settles_within_s=settle_s)
            if state is None and not was_known:
                return JobEnd(state=None, left=())
            gcs_address = await self.ask(self.dashboard.gcs_address)
            left: list[str] = []
            # If the state is None, the cluster was restarted and no longer knows the job. The
            # restart has ended the job's actors, so `_free` is not necessary. Other processes of
            # the job may still run, so `_sweep_nodes` is always necessary.
            if state is not None:
                if not state.is_final:
                    place = f"node {state.driver_ip or 'unknown'}"
                    left.append(f"{place}: job {self.submission_id} is still {state.status}")
                left += await self._free(gcs_address)
            await asyncio.wait([preparing])
            survivors, unchecked_nodes = await self._sweep_nodes(gcs_address, file)
            return JobEnd(
                state=state,
                left=(*left, *survivors),
                unseen=unchecked_nodes,
                was_alive=self._was_alive,
            )
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _make_final(self, *, settles_within_s: float) -> JobState | None:
        """Stop the job with its grace period, wait until Ray reports a final state, and return it.

        Args:
            settles_within_s: Seconds to wait for the job to appear in the cluster, because the
                submit request may still be on its way.

        Returns:
            The final state of the job. If the job has not ended although its supervisor actor was
            killed, the last known state. None if the cluster has no such job.

        Raises:
            NoAnswer, Denied: The cluster did not answer for `unknown_after_s` seconds.
        """
        began = time.monotonic()
        stop_asked_at: float | None = None
        killed_at: float | None = None
        stop_timeout_s = self.grace_s + _STOP_MARGIN_S
        while True:
            state = await self.ask(lambda: self.dashboard.job(self.submission_id))
            now = time.monotonic()
            if state is None:
                if now - began >= settles_within_s:
                    return None
                await asyncio.sleep(_MAX_PAUSE_S)
                continue
            self.on_state(state)
            if state.is_final or (killed_at is not None and now - killed_at > _KILL_TIMEOUT_S):
                return state
            self._was_alive = True
            is_late = stop_asked_at is not None and now - stop_asked_at > stop_timeout_s
            is_late = is_late and now >= self.kill_not_before
            if state.status == "PENDING" or self.is_hurried or is_late:
                # Kill the job's supervisor actor, which ends the job at once. A stop request has no
                # effect on a pending job (ray#58353), and does not skip the grace period.
                await self.ask(self._kill_supervisor)
                killed_at = killed_at or now
            elif stop_asked_at is None:
                await self.ask(lambda: self.dashboard.stop(self.submission_id))
                stop_asked_at = now
            await asyncio.sleep(_pause_s(stop_asked_at or killed_at or now))

    async def _kill_supervisor(self) -> None:
        """Kill the supervisor actor with which Ray manages the job.

        The job's program runs under a wrapper process of Muster. When the supervisor actor dies,
        the wrapper process kills the process tree of the program.

        Raises:
            NoAnswer, Denied: The cluster did not answer.
        """
        supervisor = await self.dashboard.supervisor_of(self.submission_id)
        if supervisor is not None:
            gcs_address = await self.dashboard.gcs_address()
            await control_store.kill_actors(gcs_address, [supervisor.actor_id])

    async def ask(self, request: Callable[[], Awaitable[_T]]) -> _T:
        """Send a request, repeat it until the cluster answers, and return the answer.

        Args:
            request: Function that sends the request.

        Raises:
            NoAnswer, Denied: The cluster did not answer for `unknown_after_s` seconds.
        """
        deadline = time.monotonic() + self.unknown_after_s
        while True:
            try:
                return await request()
            except (NoAnswer, Denied):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_MAX_PAUSE_S * 2)

    async def _free(self, gcs_address: str) -> tuple[str, ...]:
        """Wait until the job's actors and placement groups have ended.

        Actors and placement groups that do not end by themselves within a few seconds are removed.

        Returns:
            Descriptions of the actors and placement groups that still exist at the end of the wait.
        """
        since = time.monotonic()
        drivers = await self.ask(
            lambda: control_store.list_drivers(gcs_address, self.submission_id)
        )
        while True:
            actors_and_groups = await self.ask(
                lambda: list_actors_and_groups(self.dashboard, drivers)
            )
            actors, groups = actors_and_groups
            if not actors and not groups:
                return ()
            waited_s = time.monotonic() - since
            if waited_s > _FREE_TIMEOUT_S:
                nodes = await self.ask(self.dashboard.nodes)
                return describe_actors_and_groups(actors_and_groups, nodes)
            if waited_s > _REMOVAL_DELAY_S:
                with contextlib.suppress(NoAnswer, Denied):
                    actor_ids = [actor.actor_id for actor in actors]
                    await control_store.kill_actors(gcs_address, actor_ids)
                    group_ids = [group.group_id for group in groups]
                    await control_store.remove_groups(gcs_address, group_ids)
            await asyncio.sleep(_pause_s(since))

    async def _sweep_nodes(
        self, gcs_address: str, file: SubmissionFile
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Kill leftover processes of the job on all nodes of the cluster.

        Unreachable nodes that still belong to the cluster are recorded in a file. `muster
        reconcile` reads the file and checks the nodes later.

        Returns:
            Descriptions of the processes that survived SIGKILL, and descriptions of the nodes that
            could not be checked.
        """
        job = file.content
        report = await self.sweep(
            gcs_address, run_id=job.run_id, attempt=job.attempt, component=job.component
        )
        if report.killed or not report.is_clean:
            self.emit("job.swept", **report.fields(str))
        since = job.submit_began_at
        unchecked_nodes, departures = await split_departed_nodes(
            self.dashboard, report.unreached, since=since
        )
        place = AttemptPlace(directory=file.path.parent, number=job.attempt)
        note = UncheckedNodesNote(job=job, events=place.events)
        descriptions = []
        if unchecked_nodes:
            note.with_nodes(unchecked_nodes).write()
            node_list = join_words(unchecked_nodes, at_most=_MAX_LISTED_NODES)
            descriptions = [f"{node_list}; to check these nodes again, run `muster reconcile`"]
        else:
            note.forget()
        if departures:
            descriptions.append(join_words(departures, at_most=_MAX_LISTED_NODES))
        survivors = tuple(f"{process}, which outlived SIGKILL" for process in report.left)
        return survivors, tuple(descriptions)
