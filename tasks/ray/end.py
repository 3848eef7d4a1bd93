"""How a Ray job ends: interpret its final state, and end it in whatever phase it is.

After the end, Muster reports what is still in use: actors and placement groups of the job's
drivers, leftover processes on the nodes, and nodes that could not be checked.
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

#: Living actors and placement groups.
Held = tuple[list[Actor], list[PlacementGroup]]


async def list_held(dashboard: Dashboard, drivers: Iterable[str]) -> Held:
    """Return the living actors and the placement groups of drivers.

    Args:
        dashboard: The dashboard of the cluster.
        drivers: Ray job ids of the drivers.

    Raises:
        NoAnswer, Denied: The cluster did not answer.
    """
    actors: list[Actor] = []
    groups: list[PlacementGroup] = []
    for driver in sorted(drivers):
        actors += await dashboard.actors_of(driver)
        groups += await dashboard.groups_of(driver)
    return actors, groups


def describe_held(held: Held, nodes: Iterable[LiveNode]) -> tuple[str, ...]:
    """Describe each actor and placement group with its node, its pid and its GPUs."""
    ips = {node.node_id: node.ip for node in nodes}
    actors, groups = held
    holders = [
        (
            actor.node_id,
            f", pid {actor.pid}: actor {actor.class_name} is {actor.state}",
            actor.gpus,
        )
        for actor in actors
    ]
    for group in groups:
        for node_id, gpus in (group.gpus_on or {"": 0.0}).items():
            holders.append((node_id, f": placement group {group.group_id[:8]}", gpus))
    return tuple(
        f"node {ips.get(node_id, node_id[:8] or 'unknown')}{description} with {gpus:g} GPUs"
        for node_id, description, gpus in holders
    )


async def count_held_gpus(dashboard: Dashboard, drivers: Iterable[str]) -> float:
    """Return the number of GPUs that actors, placement groups and tasks of drivers hold now.

    Requests for GPUs that are still pending do not count.

    Raises:
        NoAnswer, Denied: The cluster did not answer.
    """
    driver_ids = sorted(drivers)
    actors, groups = await list_held(dashboard, driver_ids)
    gpus_of_actors = [actor.gpus for actor in actors]
    gpus_of_bundles = [gpus for group in groups for gpus in group.gpus_on.values()]
    gpus_of_tasks = [await dashboard.gpus_of_tasks(driver_id) for driver_id in driver_ids]
    return sum([*gpus_of_bundles, *gpus_of_tasks, *gpus_of_actors])


#: Seconds until Ray notices that the driver has ended.
#: Source: ray 2.60, JobSupervisor.SUBPROCESS_POLL_PERIOD_S.
RAY_POLLS_EACH_S = 0.1
#: Seconds until Ray notices that its supervisor actor of the job has died. A monitor checks every
#: second. Source: ray 2.60, JobManager.JOB_MONITOR_LOOP_PERIOD_S; 0.7 to 2 s were measured.
_SUPERVISOR_DELAY_S = 2.5
#: Seconds until Ray notices that a node has died. Source: up to 66 s were measured with Ray's
#: default health checks.
_NODE_DELAY_S = 70.0
#: Ray rounds the end time of a job to milliseconds.
_ROUNDING_S = 0.001
#: Beginning of the log line in which Ray repeats the command.
#: Source: ray 2.60, JobSupervisor._exec_entrypoint.
_COMMAND_ECHO = "Running entrypoint for job "


def job_exit(
    job: JobState, *, at_monotonic_s: float, was_stopped_by_us: bool, lost_node: str = ""
) -> Exit:
    """Return how a job ended, as the exit of a component.

    The exit has an exit code or a signal if Ray knows it, and otherwise a note with Ray's reason.

    Args:
        job: A final state.
        at_monotonic_s: Earliest possible time of the end, in CLOCK_MONOTONIC seconds.
        was_stopped_by_us: True if Muster asked Ray to stop the job.
        lost_node: Description of the driver's node if it has left the cluster, else empty.
    """
    code = job.driver_exit_code
    if code is None and job.status == "SUCCEEDED":
        code = 0
    if code is not None:
        # A code of the form 128+n is not converted into signal n. The wrapper reports real signals
        # as such, so the program itself returned this code.
        return Exit.from_return_code(code, at_monotonic_s)
    if job.status == "STOPPED" and was_stopped_by_us:
        note = "stopped as asked"
    elif job.status == "STOPPED":
        note = "stopped from outside (ray job stop, the dashboard)"
    else:
        # Ray's reason may have many lines; the first line says enough.
        lines = [line.strip() for line in job.message.splitlines() if line.strip()]
        note = lines[0][:500] if lines else f"{job.status} without a reason"
        if job.error_type:
            note += f" ({job.error_type})"
        if lost_node:
            note = f"{lost_node} has left the cluster; {note}"
    return Exit.from_return_code(None, at_monotonic_s, note)


def job_last_words(log_end: str, job: JobState | None) -> str:
    """Return the end of a job's output, for people and for the rules that name the cause.

    Args:
        log_end: The last lines of the job's log.
        job: The final state, whose message is appended. None: append nothing.
    """
    # The echo of the command is no output, and its words could match a rule.
    lines = [line for line in log_end.splitlines() if not line.startswith(_COMMAND_ECHO)]
    if job is not None:
        # Ray's message quotes the log, which is already in `log_end`.
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
    """Return the earliest time at which the job can have ended, in CLOCK_MONOTONIC seconds.

    Args:
        job: A final state. Its end time comes from the clock of another machine.
        wall_s: The current time, in UTC epoch seconds.
        monotonic_s: The current time, in CLOCK_MONOTONIC seconds.
        seen_running_s: Time of the last request that found the job not final, in CLOCK_MONOTONIC
            seconds. None if there was no such request.
        wrapper_s: Seconds that the wrapper may have outlived the driver.
        is_node_lost: True if the driver's node has left the cluster.
    """
    max_delay_s = RAY_POLLS_EACH_S + wrapper_s + _ROUNDING_S
    if job.status == "FAILED" and job.driver_exit_code is None:
        # Ray did not see the driver's exit. It reported the job as running until it noticed.
        max_delay_s += _NODE_DELAY_S if is_node_lost else _SUPERVISOR_DELAY_S

    lower_bounds = [] if seen_running_s is None else [seen_running_s - max_delay_s]
    if job.ended_at is not None:
        lower_bounds.append(monotonic_s - (wall_s - job.ended_at) - max_delay_s)
    return min(max(lower_bounds, default=monotonic_s), monotonic_s)


#: Seconds that a stop may take beyond the grace period: Ray's own margin and its monitor's delay.
_STOP_MARGIN_S = 8.0
#: Seconds from the SIGKILL of the job's supervisor until Ray must report a final state.
_KILL_TIMEOUT_S = 30.0
#: Seconds after which actors and placement groups are removed. Most end together with their driver;
#: detached ones do not.
_REMOVAL_DELAY_S = 3.0
#: Seconds after which actors and placement groups that still exist are reported.
_FREE_TIMEOUT_S = 30.0
#: Largest number of nodes that a message lists.
_MAX_LISTED_NODES = 5
#: Pause between two requests while something ends: this share of the time waited so far, ...
_PAUSE_SHARE = 0.1
#: ... but at least and at most this many seconds.
_MIN_PAUSE_S = 0.04
_MAX_PAUSE_S = 0.25

_T = TypeVar("_T")


def _pause_s(since: float) -> float:
    """Return the pause before the next request, in seconds. `since` is the start of the wait."""
    pause_s = _PAUSE_SHARE * (time.monotonic() - since)
    return min(max(_MIN_PAUSE_S, pause_s), _MAX_PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """What is known about a submission after Muster has ended it."""

    #: Final state of the job. None if the cluster does not know the job or does not answer. If the
    #: job could not be ended, its last state.
    state: JobState | None
    #: Descriptions of leftovers: resources and processes that still exist or may still exist.
    left: tuple[str, ...]
    #: Descriptions of nodes that could not be checked for leftover processes, including nodes that
    #: have left the cluster.
    unseen: tuple[str, ...] = ()
    #: True if the job was still active when Muster began to end it.
    was_alive: bool = False


@dataclass(slots=True, kw_only=True)
class TakeDown:
    """Ends one submission and frees what it holds. The object itself needs no closing."""

    dashboard: Dashboard
    submission_id: str
    #: Seconds from the stop signal to SIGKILL.
    grace_s: float
    emit: Emit
    #: Called with each state that the cluster reports meanwhile.
    on_state: Callable[[JobState], None]
    #: Seconds after which a cluster that does not answer is given up.
    unknown_after_s: float = 60.0
    #: Prepares the nodes of the cluster for the sweep; called with the dashboard's URL.
    make_ready: Callable[[str], Coroutine[Any, Any, None]] = make_nodes_ready
    #: Ends leftover processes on the nodes, as `tasks.ray.nodes.sweep` does.
    sweep: Callable[..., Awaitable[SweepReport]] = sweep
    #: Set to True to skip the rest of the grace period.
    is_hurried: bool = False
    _was_alive: bool = False

    async def run(self, file: SubmissionFile) -> JobEnd:
        """End the job of a submission file and record the result in the file.

        Returns:
            The result. If the cluster does not answer, `left` says so.
        """
        try:
            ended = await self._end(file)
        except (NoAnswer, Denied) as error:
            file.note(status="unknown", message=str(error))
            left = (
                f"job {self.submission_id}: its cluster does not answer, so nobody can say what "
                f"is left of it: {error}"
            )
            return JobEnd(state=None, left=(left,))
        file.note(left=list(ended.left), unseen=list(ended.unseen))
        return ended

    async def _end(self, file: SubmissionFile) -> JobEnd:
        """End the job.

        Raises:
            NoAnswer, Denied: The cluster did not answer for `unknown_after_s` seconds.
        """
        # If the cluster never confirmed the job, a submit request may still be on its way.
        was_known = file.content.submitted_at is not None
        settle_s = 0.0 if was_known else SETTLES_WITHIN_S
        preparing = asyncio.create_task(self.make_ready(self.dashboard.address))
        try:
            state = await self._make_final(settles_within_s=settle_s)
            if state is None and not was_known:
                return JobEnd(state=None, left=())
            gcs_address = await self.ask(self.dashboard.gcs_address)
            left: list[str] = []
            # A restarted cluster knows no state of the job, but its nodes may still run processes.
            if state is not None:
                if not state.is_final:
                    place = f"node {state.driver_ip or 'unknown'}"
                    left.append(f"{place}: job {self.submission_id} is {state.status} still")
                left += await self._free(gcs_address)
            await asyncio.wait([preparing])
            stuck, unseen = await self._sweep_nodes(gcs_address, file)
            return JobEnd(
                state=state, left=(*left, *stuck), unseen=unseen, was_alive=self._was_alive
            )
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _make_final(self, *, settles_within_s: float) -> JobState | None:
        """Stop the job, with its grace period, and wait until Ray reports a final state.

        Args:
            settles_within_s: Seconds during which a job that the cluster does not know may still
                appear.

        Returns:
            None if the cluster does not know the job. A state that is not final if the job did
            not end although its supervisor was killed.

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
            if state.status == "PENDING" or self.is_hurried or is_late:
                # Ray's own stop request is ignored for a pending job. Source: ray#58353.
                await self.ask(self._kill_supervisor)
                killed_at = killed_at or now
            elif stop_asked_at is None:
                await self.ask(lambda: self.dashboard.stop(self.submission_id))
                stop_asked_at = now
            await asyncio.sleep(_pause_s(stop_asked_at or killed_at or now))

    async def _kill_supervisor(self) -> None:
        """Kill Ray's supervisor actor of the job.

        The wrapper of a running driver notices this and kills its process tree.

        Raises:
            NoAnswer, Denied: The cluster did not answer.
        """
        supervisor = await self.dashboard.supervisor_of(self.submission_id)
        if supervisor is not None:
            gcs_address = await self.dashboard.gcs_address()
            await control_store.kill_actors(gcs_address, [supervisor.actor_id])

    async def ask(self, question: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a request until the cluster answers.

        Raises:
            NoAnswer, Denied: The cluster did not answer for `unknown_after_s` seconds.
        """
        deadline = time.monotonic() + self.unknown_after_s
        while True:
            try:
                return await question()
            except (NoAnswer, Denied):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_MAX_PAUSE_S * 2)

    async def _free(self, gcs_address: str) -> tuple[str, ...]:
        """Wait until the job's actors and placement groups are gone, and remove detached ones.

        Returns:
            Descriptions of those that still exist after the timeout.
        """
        since = time.monotonic()
        drivers = await self.ask(
            lambda: control_store.list_drivers(gcs_address, self.submission_id)
        )
        while True:
            held = await self.ask(lambda: list_held(self.dashboard, drivers))
            actors, groups = held
            if not actors and not groups:
                return ()
            waited_s = time.monotonic() - since
            if waited_s > _FREE_TIMEOUT_S:
                return describe_held(held, await self.ask(self.dashboard.nodes))
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
        """Kill leftover processes of the job on all nodes.

        Nodes that could not be reached but are still in the cluster are noted on disk, so that
        `muster reconcile` checks them later.

        Returns:
            Descriptions of processes that survived SIGKILL, and of nodes that were not checked.
        """
        job = file.content
        report = await self.sweep(
            gcs_address, run_id=job.run_id, attempt=job.attempt, component=job.component
        )
        if report.killed or not report.is_clean:
            self.emit("job.swept", **report.fields(str))
        since = job.submit_began_at
        unseen, lost = await split_departed_nodes(self.dashboard, report.unreached, since=since)
        place = AttemptPlace(directory=file.path.parent, number=job.attempt)
        note = UncheckedNodesNote(job=job, events=place.events)
        unseen_words = []
        if unseen:
            note.with_nodes(unseen).write()
            shown = join_words(unseen, at_most=_MAX_LISTED_NODES)
            unseen_words = [f"{shown}; `muster reconcile` asks again"]
        else:
            note.forget()
        if lost:
            unseen_words.append(join_words(lost, at_most=_MAX_LISTED_NODES))
        stuck = tuple(f"{process}, which outlived SIGKILL" for process in report.left)
        return stuck, tuple(unseen_words)
