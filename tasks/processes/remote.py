"""What supervision asks of a job that a cluster runs for a component, whatever the cluster is."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tasks.record.outcome import Exit, JobLoss, JobRefused

__all__ = ["JobLoss", "JobRefused", "RemoteJob"]


class RemoteJob(Protocol):
    """One submission to a cluster, from before it is submitted until nothing of it is left.

    Lives in one asyncio loop. Nothing in it blocks that loop.
    """

    #: Resolves once the job is final by the cluster's word, and is never rejected. A signal or an
    #: exit code where the cluster knows it, else neither, with the cluster's reason as the note.
    #: `at_monotonic_s` is the earliest moment at which the job can have ended: what died of its
    #: end must not look as if it had died first.
    exited: asyncio.Future[Exit]

    @property
    def submission_id(self) -> str:
        """By which the cluster knows it."""

    def last_words(self, log_end: str) -> str:
        """What is known of what the job said at its end: the end of its log without what the
        cluster itself wrote there, and the cluster's own word on the end."""

    @property
    def place(self) -> str:
        """Where its driver runs, in words: `node 10.0.0.2`; empty while it runs nowhere."""

    async def launch(self) -> None:
        """Submit it, or attach to it where it was submitted before, and wait until it runs.

        Returns once its driver runs, or it is final. Raises: JobRefused. A cancel leaves it to
        `end`.
        """

    async def until_lost(self) -> JobLoss:
        """Watch a job that was launched, for ever: contact with its cluster, the GPUs that it is
        to take by its start deadline.

        Returns: why it is given up. A cancel ends it.
        """

    def stop(self) -> None:
        """Ask it to end, in its grace period. Returns at once; any number of times."""

    def kill(self) -> None:
        """End it now, without a grace period. Returns at once."""

    async def end(self) -> tuple[str, ...]:
        """Stop it and wait until it is final, its actors are gone, its GPUs are free, no process
        of it is left on any node, and its log is whole.

        Returns: what did not come free in time, by node and pid; empty when all is free. Safe
        after a `launch` that failed or was cancelled, and before any.
        """

    async def let_go(self) -> None:
        """Leave the job running, and stop watching it: the next process attaches to it."""
