"""How a job ended, from what Ray says of it; and how it is ended, in whatever phase it is.

What did not come free then is said: what the drivers of the job still use of the cluster, what runs
on of it on some node, and of which nodes nobody knows.
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
from tasks.ray.unseen import UnseenNote, told_apart
from tasks.record.events import Emit
from tasks.record.outcome import Exit
from tasks.record.places import AttemptPlace
from tasks.spec.words import listed

Held = tuple[list[Actor], list[PlacementGroup]]


async def held_by(dashboard: Dashboard, drivers: Iterable[str]) -> Held:
    """The living actors and the placement groups of drivers, by their ids at Ray. Raises: NoAnswer,
    Denied."""
    actors: list[Actor] = []
    groups: list[PlacementGroup] = []
    for driver in sorted(drivers):
        actors += await dashboard.actors_of(driver)
        groups += await dashboard.groups_of(driver)
    return actors, groups


def in_words(held: Held, nodes: Iterable[LiveNode]) -> tuple[str, ...]:
    """Each by node and pid, with its GPUs."""
    ips = {node.node_id: node.ip for node in nodes}
    actors, groups = held
    words = [
        (a.node_id, f", pid {a.pid}: actor {a.class_name} is {a.state}", a.gpus) for a in actors
    ]
    for group in groups:
        for node_id, gpus in (group.gpus_on or {"": 0.0}).items():
            words.append((node_id, f": placement group {group.group_id[:8]}", gpus))
    return tuple(
        f"node {ips.get(node_id, node_id[:8] or 'unknown')}{what} with {gpus:g} GPUs"
        for node_id, what, gpus in words
    )


async def gpus_of(dashboard: Dashboard, drivers: Iterable[str]) -> float:
    """GPUs that drivers hold now, running tasks included; what only waits for some has none.
    Raises: NoAnswer, Denied."""
    ids = sorted(drivers)
    actors, groups = await held_by(dashboard, ids)
    shares = [share for group in groups for share in group.gpus_on.values()]
    tasks = [await dashboard.gpus_of_tasks(driver) for driver in ids]
    return sum([*shares, *tasks, *(actor.gpus for actor in actors)])


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
#: Source: ray 2.60, JobSupervisor._exec_entrypoint.
_ECHO = "Running entrypoint for job "


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
        return Exit.of(code, at_monotonic_s)
    if job.status == "STOPPED" and was_stopped_by_us:
        note = "stopped as asked"
    elif job.status == "STOPPED":
        note = "stopped from outside (ray job stop, the dashboard)"
    else:
        # The first line of Ray's own reason.
        lines = [line.strip() for line in job.message.splitlines() if line.strip()]
        note = lines[0][:500] if lines else f"{job.status} without a reason"
        note += f" ({job.error_type})" if job.error_type else ""
        if lost_node:
            note = f"{lost_node} has left the cluster; {note}"
    return Exit.of(None, at_monotonic_s, note)


def last_words(log_end: str, job: JobState | None) -> str:
    """What a job said at its end, for people and for the rules that look for causes."""
    # It quotes the command, in which any word may stand.
    lines = [line for line in log_end.splitlines() if not line.startswith(_ECHO)]
    if job is not None:
        # The log that it quotes is the one that is here.
        told, _, _ = job.message.partition(QUOTED_LOG)
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
    not_before = [] if seen_running_s is None else [seen_running_s - late_s]
    if job.ended_at is not None:
        not_before.append(monotonic_s - (wall_s - job.ended_at) - late_s)
    return min(max(not_before, default=monotonic_s), monotonic_s)


#: Ray's own margin beyond the grace period, and that of its monitor.
_STOP_MARGIN_S = 8.0
#: SIGKILL to a supervisor, until the job is final.
_KILL_WITHIN_S = 30.0
#: A driver's actors and groups go with it; what is detached is ended after this long.
_GOES_BY_ITSELF_S = 3.0
_FREE_WITHIN_S = 30.0
_SHOWN_NODES = 5
#: What is about to end is asked for again after so much of the time that it has taken so far.
_ASK_PART, _ASK_AT_LEAST_S, _ASK_EACH_S = 0.1, 0.04, 0.25

_T = TypeVar("_T")


def _pause_s(since: float) -> float:
    return min(max(_ASK_AT_LEAST_S, _ASK_PART * (time.monotonic() - since)), _ASK_EACH_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a submission."""

    #: Its final state; None where the cluster does not know it; its last one if it would not end.
    state: JobState | None
    #: What did not come free, by node and pid, or is not known.
    left: tuple[str, ...]
    #: Nodes that were not seen, each in words: those to be asked again, and those that have left
    #: the cluster.
    unseen: tuple[str, ...] = ()
    #: It had not come to its end by itself.
    was_alive: bool = False


@dataclass(slots=True, kw_only=True)
class TakeDown:
    """The end of one submission. Holds nothing that would have to be closed."""

    dashboard: Dashboard
    submission_id: str
    grace_s: float
    emit: Emit
    #: Told each state that is seen on the way.
    on_state: Callable[[JobState], None]
    #: For how long a cluster that does not answer is asked again.
    unknown_after_s: float = 60.0
    #: Has the nodes of a cluster, by its dashboard, ready for the sweep.
    make_ready: Callable[[str], Coroutine[Any, Any, None]] = make_nodes_ready
    sweep: Callable[..., Awaitable[SweepReport]] = sweep
    #: It has no grace period any more.
    is_hurried: bool = False
    _was_alive: bool = False

    async def run(self, file: SubmissionFile) -> Ended:
        """End the job that a file tells of, and note there what came of it."""
        try:
            ended = await self._run(file)
        except (NoAnswer, Denied) as error:
            file.note(status="unknown", message=str(error))
            left = (
                f"job {self.submission_id}: its cluster does not answer, so nobody can say what "
                f"is left of it: {error}"
            )
            return Ended(state=None, left=(left,))
        file.note(left=list(ended.left), unseen=list(ended.unseen))
        return ended

    async def _run(self, file: SubmissionFile) -> Ended:
        """Raises: NoAnswer, Denied; then it is to be asked again."""
        # If the cluster has never said that it has the job, a submit may be on its way.
        was_known = file.content.submitted_at is not None
        preparing = asyncio.create_task(self.make_ready(self.dashboard.address))
        try:
            state = await self._make_final(settles_within_s=0.0 if was_known else SETTLES_WITHIN_S)
            if state is None and not was_known:
                return Ended(state=None, left=())
            gcs_address = await self.ask(self.dashboard.gcs_address)
            left: list[str] = []
            # Of a restarted cluster, only what ran on its nodes may run there still.
            if state is not None:
                if not state.is_final:
                    place = f"node {state.driver_ip or 'unknown'}"
                    left.append(f"{place}: job {self.submission_id} is {state.status} still")
                left += await self._free(gcs_address)
            await asyncio.wait([preparing])
            stuck, unseen = await self._swept(gcs_address, file)
            return Ended(
                state=state, left=(*left, *stuck), unseen=unseen, was_alive=self._was_alive
            )
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _make_final(self, *, settles_within_s: float) -> JobState | None:
        """Stop the job, with its grace period, and wait until Ray calls it final.

        Args:
            settles_within_s: for how long a job that the cluster does not know may appear.

        Returns: None where the cluster does not know it. Raises: NoAnswer, Denied.
        """
        began = time.monotonic()
        asked_at: float | None = None
        killed_at: float | None = None
        patience_s = self.grace_s + _STOP_MARGIN_S
        while True:
            state = await self.ask(lambda: self.dashboard.job(self.submission_id))
            now = time.monotonic()
            if state is None:
                if now - began >= settles_within_s:
                    return None
                await asyncio.sleep(_ASK_EACH_S)
                continue
            self.on_state(state)
            if state.is_final or (killed_at is not None and now - killed_at > _KILL_WITHIN_S):
                return state
            self._was_alive = True
            is_late = self.is_hurried or (asked_at is not None and now - asked_at > patience_s)
            if state.status == "PENDING" or is_late:
                # Ray's own stop does nothing for a pending job. Source: ray#58353.
                await self.ask(self._kill_supervisor)
                killed_at = killed_at or now
            elif asked_at is None:
                await self.ask(lambda: self.dashboard.stop(self.submission_id))
                asked_at = now
            await asyncio.sleep(_pause_s(asked_at or killed_at or now))

    async def _kill_supervisor(self) -> None:
        """End Ray's supervisor of the job; the wrapper of a driver that runs kills its tree then.

        Raises: NoAnswer, Denied.
        """
        supervisor = await self.dashboard.supervisor_of(self.submission_id)
        if supervisor is not None:
            gcs_address = await self.dashboard.gcs_address()
            await control_store.kill_actors(gcs_address, [supervisor.actor_id])

    async def ask(self, question: Callable[[], Awaitable[_T]]) -> _T:
        """Ask until there is an answer. Raises: NoAnswer, Denied, after a while."""
        deadline = time.monotonic() + self.unknown_after_s
        while True:
            try:
                return await question()
            except (NoAnswer, Denied):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_ASK_EACH_S * 2)

    async def _free(self, gcs_address: str) -> tuple[str, ...]:
        since = time.monotonic()
        drivers = await self.ask(lambda: control_store.drivers_of(gcs_address, self.submission_id))
        while True:
            held = actors, groups = await self.ask(lambda: held_by(self.dashboard, drivers))
            if not actors and not groups:
                return ()
            waited_s = time.monotonic() - since
            if waited_s > _FREE_WITHIN_S:
                return in_words(held, await self.ask(self.dashboard.nodes))
            if waited_s > _GOES_BY_ITSELF_S:
                with contextlib.suppress(NoAnswer, Denied):
                    await control_store.kill_actors(gcs_address, [a.actor_id for a in actors])
                    ids = [group.group_id for group in groups]
                    await control_store.remove_groups(gcs_address, ids)
            await asyncio.sleep(_pause_s(since))

    async def _swept(
        self, gcs_address: str, file: SubmissionFile
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What outlived SIGKILL, and which nodes were not seen, in words; those that are to be
        asked again are noted."""
        job = file.content
        its: dict[str, Any] = {"run_id": job.run_id, "attempt": job.attempt}
        report = await self.sweep(gcs_address, **its, component=job.component)
        if report.killed or not report.is_clean:
            self.emit("job.swept", **report.fields(str))
        since = job.submit_began_at
        unseen, lost = await told_apart(self.dashboard, report.unreached, since=since)
        place = AttemptPlace(directory=file.path.parent, number=job.attempt)
        note = UnseenNote(job=job, events=place.events)
        words = []
        if unseen:
            note.of(unseen).write()
            words = [f"{listed(unseen, at_most=_SHOWN_NODES)}; `muster reconcile` asks again"]
        else:
            note.forget()
        if lost:
            words.append(listed(lost, at_most=_SHOWN_NODES))
        return tuple(f"{one}, which outlived SIGKILL" for one in report.left), tuple(words)
