"""Why a job on a cluster is given up, in words that every layer shares."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.spec.failure_kinds import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLoss:
    """Why a job is given up that has not ended by itself."""

    kind: FailureKind
    #: The id of the rule that noticed it.
    rule: str
    #: One line for people.
    message: str


class JobRefused(Exception):
    """The cluster did not take the job, or took it and never ran it; `loss` says why.

    Nothing of it is left, unless `loss.kind` is LOST_CONTACT: then nobody can say.
    """

    def __init__(self, loss: JobLoss) -> None:
        super().__init__(loss)
        self.loss = loss

    def __str__(self) -> str:
        return self.loss.message
