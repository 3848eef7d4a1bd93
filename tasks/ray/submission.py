"""One submission of a job to a Ray cluster: its plan, and its state in `submission.json`.

A later process reads the file to find the job again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.processes.guarded import Command
from tasks.ray.dashboard import JobState
from tasks.record.disk import DiskThread, json_text, write_json
from tasks.record.places import AttemptPlace
from tasks.record.run_json import SubmissionJson


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The plan of one submission: its program, its cluster, and the time limits of its phases."""

    #: URL of the cluster's dashboard.
    address: str
    #: `<run id>--a01`. An id is never used for a second submission.
    submission_id: str
    run_id: str
    #: Number of the attempt, from 1.
    attempt: int
    component: str
    #: The program. Its working directory is shipped to the cluster, and the driver starts in the
    #: copy. Its variables are added to the environment of the driver's node; no other variable of
    #: this process is passed on. Its log file is local and receives the driver's output.
    command: Command
    #: Patterns in the syntax of .gitignore. Matching files of the working directory are not
    #: shipped, in addition to those that are never shipped.
    excludes: tuple[str, ...] = ()
    #: Resources that the driver itself takes on its node. If these and the labels are empty, the
    #: driver runs on any node except the head.
    entrypoint_resources: Mapping[str, float] = field(default_factory=dict)
    #: Ray labels that the driver's node must have.
    entrypoint_label_selector: Mapping[str, str] = field(default_factory=dict)
    #: Names of the nodes that were granted to the run. Empty if the run has no grant.
    nodes: Collection[str] = ()
    #: Number of GPUs that the whole job must take. 0 disables this check.
    gpus: float = 0
    #: Longest time in seconds that the job may be pending. After that, a running job has the same
    #: time to take its GPUs.
    start_within_s: float = 600.0
    #: Seconds without an answer from the cluster after which the job counts as lost.
    lost_after_s: float = 180.0
    #: Path of the submission file.
    submission_file: Path
    #: UTC epoch seconds since when a process on another host may have submitted this job. None if
    #: no other host can have done so. The submission file of that process is not on this host.
    may_be_submitted_since: float | None = None
    #: Function that removes secrets from a text before it is written to disk.
    mask: Callable[[str], str] = str


#: Ray ends the message about a failed job with a quote of the log, which starts with these words.
#: Source: ray 2.60, JobSupervisor.run.
QUOTED_LOG = "last available logs"

_log = logging.getLogger(__name__)


class SubmissionFile:
    """The file that records one submission. It exists before the first request to the cluster."""

    #: Thread that writes the file, so that the caller never waits for the disk. If None, the caller
    #: writes the file itself.
    disk: DiskThread | None = None

    def __init__(
        self, path: Path, content: SubmissionJson, mask: Callable[[str], str] = str
    ) -> None:
        """
        Args:
            path: Path of the file.
            content: Content that the file has now.
            mask: Function that removes secrets from a text.
        """
        self.path = path
        self.content = content
        self._mask = mask

    @staticmethod
    def read(path: Path, mask: Callable[[str], str] = str) -> SubmissionFile | None:
        """Read the file of an earlier process.

        Returns:
            None if the file does not exist.

        Raises:
            OSError, ValueError: The file cannot be read.
        """
        try:
            return SubmissionFile(path, SubmissionJson.read(path), mask)
        except FileNotFoundError:
            return None

    @staticmethod
    def begin(plan: JobPlan) -> SubmissionFile:
        """Return the file of an earlier process for this submission, or write a new one.

        Raises:
            OSError, ValueError: The file cannot be read or written.
        """
        file = SubmissionFile.read(plan.submission_file, plan.mask)
        if file is not None and file.content.submission_id == plan.submission_id:
            return file
        content = SubmissionJson(
            address=plan.address,
            submission_id=plan.submission_id,
            run_id=plan.run_id,
            attempt=plan.attempt,
            component=plan.component,
            argv=tuple(map(plan.mask, plan.command.argv)),
            status="submitting",
        )
        if plan.may_be_submitted_since is not None:
            # Otherwise the job would count as never submitted, and nobody would end it.
            content = content.with_changes(submit_began_at=plan.may_be_submitted_since)
        plan.submission_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(plan.submission_file, content.as_json())
        return SubmissionFile(plan.submission_file, content, plan.mask)

    def note(self, **fields: object) -> None:
        """Set fields of the file. The file is written only if a value has changed.

        A failure to write is logged and not raised.
        """
        changes = {
            key: value for key, value in fields.items() if getattr(self.content, key) != value
        }
        if not changes:
            return
        content = self.content.with_changes(**changes)
        self.content = content
        if self.disk is not None:
            self.disk.replace(self.path, lambda: json_text(content.as_json()))
            return
        try:
            write_json(self.path, content.as_json())
        except OSError as error:
            _log.warning("%s could not be written: %s", self.path, error)

    async def written(self) -> None:
        """Wait until all earlier changes are on disk, or writing them has failed."""
        if self.disk is not None:
            await asyncio.wrap_future(self.disk.do(lambda: None))

    def note_state(self, state: JobState, **fields: object) -> None:
        """Record the state that the cluster reported, and other fields.

        The part of the message that quotes the job's log is left out.
        """
        fields["status"] = state.status.lower()
        if state.is_final:
            message = self._mask(state.message.partition(QUOTED_LOG)[0].rstrip(" ,"))
            fields |= {"message": message[-2000:], "ended_at": state.ended_at}
        self.note(**fields)


def submission_id(run_id: str, attempt: int, component: str, *, is_only: bool) -> str:
    """Return the submission id of a component's job, which is the same at each call.

    Args:
        is_only: True if the run has only one job. Otherwise the id ends with the component's name.
    """
    return f"{run_id}--a{attempt:02d}" + ("" if is_only else f"-{component}")


def submission_file(place: AttemptPlace, component: str, *, is_only: bool) -> Path:
    """Return the path of the submission file of a component's job."""
    return place.submission if is_only else place.directory / f"submission-{component}.json"


#: Seconds that a request without an answer may still need to reach the cluster.
SETTLES_WITHIN_S = 5.0
