"""Submits a job once, whatever becomes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tasks.ray.contact import Emit
from tasks.ray.dashboard import Dashboard, Denied, JobState, NoAnswer
from tasks.ray.plan import JobPlan
from tasks.ray.submission import SETTLES_WITHIN_S, SubmissionFile
from tasks.ray.submit import submit
from tasks.record.outcome import JobLoss, JobRefused
from tasks.spec.failure_kinds import FailureKind

#: Where nothing was ever sent, a cluster that does not answer is given up soon: its address may
#: be wrong.
_FIRST_ANSWER_WITHIN_S = 20.0
_SUBMITS = 3
_ASK_EACH_S = 0.5


class Submitter:
    """One submission's way to the cluster. Its outcome is asked for by id, never guessed."""

    def __init__(
        self,
        plan: JobPlan,
        dashboard: Dashboard,
        file: SubmissionFile,
        emit: Emit,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._dashboard = dashboard
        self._file = file
        self._emit = emit
        self._clock = clock
        self._wall_clock = wall_clock
        self._sending: asyncio.Task[None] | None = None

    async def run(self) -> JobState | None:
        """Submit the job, or find that it was.

        Returns: its state, None where it was submitted just now. Raises: JobRefused.
        """
        was_begun = self._file.get("submit_began_at") is not None
        state = await self._asked(settle=was_begun and self._file.get("submitted_at") is None)
        if state is not None:
            self._known()
            self._emit("job.attached", submission_id=self._plan.submission_id)
            return state
        if self._file.get("submitted_at") is not None:
            raise JobRefused(await self.forgotten() or _unknown(self._plan, "it was known before"))
        for _ in range(_SUBMITS):
            problem = await self._send()
            if not problem:
                break
            state = await self._asked(settle=True)
            if state is not None:
                break
        else:
            raise self._refused(
                FailureKind.NETWORK,
                "submit-unanswered",
                f"{self._plan.address} answered no submit of job {self._plan.submission_id}, and "
                f"does not know the job: {problem}",
            )
        self._known()
        self._emit(
            "job.submitted", submission_id=self._plan.submission_id, address=self._plan.address
        )
        return state

    async def settle(self) -> None:
        """Wait for a submit that is under way, even if whoever began it was cancelled."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def forgotten(self) -> JobLoss | None:
        """Why a cluster does not know a job that it had taken; None where it can't be asked."""
        try:
            session = await self._dashboard.session()
        except (NoAnswer, Denied):
            return None
        before = self._file.get("session")
        if before is not None and session != before:
            return JobLoss(
                kind=FailureKind.NODE_LOST,
                rule="cluster-restarted",
                message=f"the cluster at {self._plan.address} was restarted and knows nothing of "
                f"job {self._plan.submission_id}: it was {before}, it is {session}",
            )
        return _unknown(self._plan, "somebody may have deleted it there")

    async def _send(self) -> str:
        """Returns: why nobody can say whether the cluster has it; empty when it has it."""
        try:
            nodes = await self._dashboard.nodes()
            session = await self._dashboard.session()
            gcs_address = await self._dashboard.gcs_address()
            self._file.note(
                submit_began_at=self._wall_clock(), session=session, gcs_address=gcs_address
            )
            self._sending = asyncio.create_task(asyncio.to_thread(submit, self._plan, nodes))
            await asyncio.shield(self._sending)
        except NoAnswer as error:
            return str(error)
        except Denied as error:
            raise self._refused(FailureKind.USER_ERROR, "job-refused", str(error)) from error
        return ""

    def _known(self) -> None:
        if self._file.get("submitted_at") is None:
            self._file.note(submitted_at=self._wall_clock(), status="pending")

    def _refused(self, kind: FailureKind, rule: str, message: str) -> JobRefused:
        if kind is not FailureKind.LOST_CONTACT:
            self._file.note(status="refused", message=message)
        return JobRefused(JobLoss(kind=kind, rule=rule, message=message))

    async def _asked(self, *, settle: bool) -> JobState | None:
        """What the cluster knows of the job, asked until it answers.

        Args:
            settle: go on to ask for some seconds where it does not know it.

        Raises: JobRefused when it does not answer.
        """
        was_begun = self._file.get("submit_began_at") is not None
        patience_s = self._plan.lost_after_s if was_begun else _FIRST_ANSWER_WITHIN_S
        began = self._clock()
        last_answer_s: float | None = None
        while True:
            try:
                state = await self._dashboard.job(self._plan.submission_id)
            except Denied as error:
                raise self._refused(FailureKind.USER_ERROR, "job-refused", str(error)) from error
            except NoAnswer as error:
                if self._clock() - (last_answer_s or began) > patience_s:
                    raise self._unanswered(was_begun, patience_s, error) from error
            else:
                last_answer_s = self._clock()
                if state is not None or not settle or last_answer_s - began > SETTLES_WITHIN_S:
                    return state
            await asyncio.sleep(_ASK_EACH_S)

    def _unanswered(self, was_begun: bool, patience_s: float, error: NoAnswer) -> JobRefused:
        if was_begun:
            return self._refused(
                FailureKind.LOST_CONTACT,
                "contact-lost",
                f"whether {self._plan.address} has job {self._plan.submission_id} is not known, "
                f"asked for {patience_s:g} s: {error}",
            )
        return self._refused(
            FailureKind.NETWORK,
            "cluster-unreachable",
            f"no Ray dashboard answers at {self._plan.address}, asked for {patience_s:g} s; "
            f"nothing was submitted: {error}",
        )


def _unknown(plan: JobPlan, remark: str) -> JobLoss:
    return JobLoss(
        kind=FailureKind.LOST_CONTACT,
        rule="job-unknown",
        message=f"the cluster at {plan.address} does not know job {plan.submission_id}, which it "
        f"had taken; {remark}",
    )
