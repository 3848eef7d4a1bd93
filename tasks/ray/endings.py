"""How a job ended, from what Ray says of it."""

from __future__ import annotations

from tasks.ray.dashboard import JobState
from tasks.record.outcome import Exit

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
