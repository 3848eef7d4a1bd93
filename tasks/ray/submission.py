"""Plan the submission of a Ray job, and record the state of the job in `submission.json`.

A later process of the run reads this file to find the job again.
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
    """Plan for submitting one Ray job: its program, its cluster, and its time limits.

    The job's *driver* is the process that runs the program on a node of the cluster.
    """

    #: URL of the cluster's dashboard.
    address: str
    #: Submission id of the job, for example `<run id>--a01`. No two jobs have the same id.
    submission_id: str
    #: Id of the run.
    run_id: str
    #: Number of the run's attempt, from 1.
    attempt: int
    #: Name of the run's component that runs as this job.
    component: str
    #: The command that the driver runs. Ray copies the command's working directory to the cluster,
    #: and the driver starts in the copy. The command's environment variables are added to the
    #: variables that Ray sets on the node. Other variables of this process are not passed on. The
    #: command's log file is on this host and receives the driver's output.
    command: Command
    #: Patterns in the syntax of .gitignore. Matching files of the working directory are not copied
    #: to the cluster. Some other files, such as .git, are never copied.
    excludes: tuple[str, ...] = ()
    #: Mapping from the name of a Ray resource to the amount that the driver itself takes on its
    #: node.
    entrypoint_resources: Mapping[str, float] = field(default_factory=dict)
    #: Ray labels of the node on which the driver must run. Maps each label to its value.
    entrypoint_label_selector: Mapping[str, str] = field(default_factory=dict)
    #: Number of CPUs that the driver itself takes on its node.
    entrypoint_cpus: float | None = None
    #: Number of GPUs that the driver itself takes on its node, out of the GPUs that the queue has
    #: granted to the run.
    entrypoint_gpus: int | None = None
    #: Memory in bytes that Ray reserves for the driver on its node.
    entrypoint_memory_bytes: int | None = None
    #: Names of the nodes that Muster's queue has granted to the run. Empty if the queue has granted
    #: no nodes.
    nodes: Collection[str] = ()
    #: Number of GPUs that the actors and tasks of the job must take together. 0 if the job needs no
    #: GPU.
    gpus: float = 0
    #: Longest time in seconds that the job may be pending. Also the longest time from the start of
    #: the driver until the job has taken its GPUs.
    start_within_s: float = 600.0
    #: If the cluster does not answer for more than this number of seconds, the job counts as lost.
    lost_after_s: float = 180.0
    #: Path of the file on this host that records the submission of the job.
    submission_file: Path
    #: Earliest time, in UTC epoch seconds, at which a process on another host may have submitted
    #: this job. None if no other host can have submitted the job.
    may_be_submitted_since: float | None = None
    #: Function that removes secrets from a text before it is written to disk.
    mask: Callable[[str], str] = str


#: Ray's message about a failed job ends with a quote from the job's log. The quote begins with
#: these words.
#: Source: ray 2.60, JobSupervisor.run.
QUOTED_LOG = "last available logs"

_log = logging.getLogger(__name__)


class SubmissionFile:
    """File that records the submission of one Ray job, and the job's state.

    The file is created before the first request to the cluster. So after a crash, a later process
    of the run finds every job that may exist in the cluster.
    """

    #: Thread that writes the file, so that the caller does not wait for the disk. If None, the
    #: caller's thread writes the file.
    disk: DiskThread | None = None

    def __init__(
        self, path: Path, content: SubmissionJson, mask: Callable[[str], str] = str
    ) -> None:
        """Create the object for a submission file that exists already.

        Args:
            path: Path of the submission file.
            content: The present content of the submission file.
            mask: Function that removes secrets from a text before it is written to the file.
        """
        self.path = path
        self.content = content
        self._mask = mask

    @staticmethod
    def read(path: Path, mask: Callable[[str], str] = str) -> SubmissionFile | None:
        """Read a submission file from disk.

        Args:
            path: Path of the submission file.
            mask: Function that removes secrets from a text. The returned object calls the function
                for Ray's message about the job, before it writes the message to the file.

        Returns:
            The submission file, or None if the file does not exist.

        Raises:
            OSError, ValueError: The file cannot be read.
        """
        try:
            return SubmissionFile(path, SubmissionJson.read(path), mask)
        except FileNotFoundError:
            return None

    @staticmethod
    def begin(plan: JobPlan) -> SubmissionFile:
        """Return the submission file of a planned job.

        If an earlier process of the run has already written a file for this job, that file is read.
        Otherwise, a new file is written.

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
            # Without the field `submit_began_at`, the job would count as never submitted. Muster
            # would then not end the job after a crash of this process.
            content = content.with_changes(submit_began_at=plan.may_be_submitted_since)
        plan.submission_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(plan.submission_file, content.as_json(), durable=True)
        return SubmissionFile(plan.submission_file, content, plan.mask)

    def note(self, **fields: object) -> None:
        """Set fields of the submission file, and write the file if a value has changed.

        An OSError is logged and not raised.

        Args:
            fields: Fields of `SubmissionJson` with their new values.
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
            write_json(self.path, content.as_json(), durable=True)
        except OSError as error:
            _log.warning(
                "Muster could not write the file %s, which records the submission of a Ray job: %s",
                self.path,
                error,
            )

    async def written(self) -> None:
        """Wait until each earlier change of the file is on disk, or its write has failed."""
        if self.disk is not None:
            await asyncio.wrap_future(self.disk.do(lambda: None))

    def note_state(self, state: JobState, **fields: object) -> None:
        """Record a job state from a report of the cluster, and set other fields.

        If Ray's message about the end of the job quotes the job's log, the quote is not recorded.

        Args:
            state: The reported state.
            fields: Other fields of `SubmissionJson` with their new values.
        """
        fields["status"] = state.status.lower()
        if state.is_final:
            message = self._mask(state.message.partition(QUOTED_LOG)[0].rstrip(" ,"))
            fields |= {"message": message[-2000:], "ended_at": state.ended_at}
        self.note(**fields)


def submission_id(run_id: str, attempt: int, component: str, *, is_only: bool) -> str:
    """Return the submission id of the Ray job of a component.

    Args:
        run_id: Id of the run.
        attempt: Number of the run's attempt, from 1.
        component: Name of the component.
        is_only: True if the run has only one Ray job. Otherwise the id ends with the component's
            name.
    """
    return f"{run_id}--a{attempt:02d}" + ("" if is_only else f"-{component}")


def submission_file(place: AttemptPlace, component: str, *, is_only: bool) -> Path:
    """Return the path of the file that records the submission of a component's Ray job.

    Args:
        place: Directory of the attempt.
        component: Name of the component.
        is_only: True if the run has only one Ray job. Otherwise the file name contains the
            component's name.
    """
    return place.submission if is_only else place.directory / f"submission-{component}.json"


#: A submit request without an answer may still reach the cluster within this number of seconds.
SETTLES_WITHIN_S = 5.0
