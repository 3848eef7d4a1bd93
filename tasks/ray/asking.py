"""Questions about submissions whose own process is gone, for programs without a loop.

Each call opens a loop of its own: use them from a plain thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.ray.dashboard import Dashboard, JobState
from tasks.ray.end import OutOfReach, Sweep, TakeDown
from tasks.ray.submission import SubmissionFile


def ask_job(address: str, submission_id: str) -> JobState | None:
    """What a cluster says of a submission, None where it does not know it.

    Raises: NoAnswer when it was not reached: that says nothing of the job. Denied.
    """

    async def ask() -> JobState | None:
        dashboard = Dashboard(address)
        try:
            return await dashboard.job(submission_id)
        finally:
            await dashboard.close()

    return asyncio.run(ask())


def stop_submission(
    file: Path,
    *,
    sweep: Sweep,
    grace_s: float,
    unknown_after_s: float = 60.0,
    on_state: Callable[[JobState], None] = lambda state: None,
) -> tuple[str, ...]:
    """End the job that a `submission.json` names, in whatever phase it is, and wait until nothing
    of it is left; `RayJob.end` for a job whose own process is gone.

    Args:
        unknown_after_s: for how long a cluster that does not answer is asked again.

    Returns: what did not come free, by node and pid, or that it can't be known; the file says so
    too. Raises: OSError, ValueError when the file can't be read.
    """
    submission = SubmissionFile.read(file)
    if submission is None or submission.get("submit_began_at") is None:
        return ()

    def note(state: JobState) -> None:
        known: dict[str, Any] = {"status": state.status.lower()}
        if state.is_final:
            known |= {"message": state.message[-2000:], "ended_at": state.ended_at}
        submission.note(**known)
        on_state(state)

    async def stop() -> tuple[str, ...]:
        dashboard = Dashboard(submission.get("address"))
        take_down = TakeDown(
            dashboard,
            submission.get("submission_id"),
            grace_s=grace_s,
            sweep=sweep,
            on_state=note,
            unknown_after_s=unknown_after_s,
        )
        try:
            ended = await take_down.run(
                submission.get("ray_job_ids", ()),
                was_known=submission.get("submitted_at") is not None,
            )
        except OutOfReach as error:
            submission.note(status="unknown", message=str(error))
            return (
                f"job {submission.get('submission_id')}: its cluster does not answer, so nobody "
                f"can say what is left of it: {error}",
            )
        finally:
            await dashboard.close()
        submission.note(left=list(ended.left))
        return ended.left

    return asyncio.run(stop())
