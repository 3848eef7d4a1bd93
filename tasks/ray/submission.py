"""One submission to a Ray cluster: what it is to be, and what is known of it, which is kept in
`submission.json` for whoever comes after this process."""

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
    """One submission: what is run, where, and how long each of its phases may take."""

    #: URL of the cluster's dashboard.
    address: str
    #: `<run id>--a01`; never used twice.
    submission_id: str
    run_id: str
    #: From 1.
    attempt: int
    component: str
    #: Its directory is shipped, and the driver starts in its copy. Its variables come on top of
    #: their node's environment, and nothing else of ours does. The driver's output flows into its
    #: log, a local file.
    command: Command
    #: What of the directory is not shipped, beside what never is; in the syntax of .gitignore.
    excludes: tuple[str, ...] = ()
    #: What the driver itself takes of its node; empty with no labels: any node but the head.
    entrypoint_resources: Mapping[str, float] = field(default_factory=dict)
    entrypoint_label_selector: Mapping[str, str] = field(default_factory=dict)
    #: The names of those that its run was given.
    nodes: Collection[str] = ()
    #: How many GPUs the job is to take in all; 0: not watched.
    gpus: float = 0
    #: How long it may be pending, and then how long it may run without its GPUs.
    start_within_s: float = 600.0
    #: How long its cluster may be out of reach.
    lost_after_s: float = 180.0
    #: Where what is known of the submission is kept, for whoever comes after this process.
    submission_file: Path
    #: UTC epoch seconds, where a process of another host, whose file is not here, may have
    #: submitted it.
    may_be_submitted_since: float | None = None
    #: Takes secrets out of a text, before it is written down.
    mask: Callable[[str], str] = str


#: Where Ray's word on a job's end begins to quote its log. Source: ray 2.60, JobSupervisor.run.
QUOTED_LOG = "last available logs"

_log = logging.getLogger(__name__)


class SubmissionFile:
    """The file of one submission. It is there before the cluster is asked for anything."""

    #: Writes it, so that who supervises never waits for it; None: whoever notes something does.
    disk: DiskThread | None = None

    def __init__(
        self, path: Path, content: SubmissionJson, mask: Callable[[str], str] = str
    ) -> None:
        self.path = path
        self.content = content
        self._mask = mask

    @staticmethod
    def read(path: Path, mask: Callable[[str], str] = str) -> SubmissionFile | None:
        """What an earlier process left, None where there is none.

        Raises: OSError, ValueError.
        """
        try:
            return SubmissionFile(path, SubmissionJson.read(path), mask)
        except FileNotFoundError:
            return None

    @staticmethod
    def begin(plan: JobPlan) -> SubmissionFile:
        """Go on with the file of an earlier process, or write one. Raises: OSError, ValueError."""
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
            # Without it, the job would be taken for one that was never sent, and never ended.
            content = content.but(submit_began_at=plan.may_be_submitted_since)
        plan.submission_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(plan.submission_file, content.as_json())
        return SubmissionFile(plan.submission_file, content, plan.mask)

    def note(self, **known: object) -> None:
        """Add what has become known; written only where it is new."""
        fresh = {key: value for key, value in known.items() if getattr(self.content, key) != value}
        if not fresh:
            return
        content = self.content = self.content.but(**fresh)
        if self.disk is not None:
            self.disk.replace(self.path, lambda: json_text(content.as_json()))
            return
        try:
            write_json(self.path, content.as_json())
        except OSError as error:
            _log.warning("%s could not be written: %s", self.path, error)

    async def written(self) -> None:
        """Wait until the disk has taken, or refused, what was noted."""
        if self.disk is not None:
            await asyncio.wrap_future(self.disk.do(lambda: None))

    def note_state(self, state: JobState, **known: object) -> None:
        """`note` what the cluster says of the job, without what it quotes of the job's log."""
        known["status"] = state.status.lower()
        if state.is_final:
            told = self._mask(state.message.partition(QUOTED_LOG)[0].rstrip(" ,"))
            known |= {"message": told[-2000:], "ended_at": state.ended_at}
        self.note(**known)


def submission_id(run_id: str, attempt: int, component: str, *, is_only: bool) -> str:
    """`<run id>--aNN`, the same each time; that of one among several jobs ends with its name."""
    return f"{run_id}--a{attempt:02d}" + ("" if is_only else f"-{component}")


def submission_file(place: AttemptPlace, component: str, *, is_only: bool) -> Path:
    """Where the attempt keeps what is known of the job."""
    return place.submission if is_only else place.directory / f"submission-{component}.json"


#: A request that got no answer may still be on its way through the dashboard.
SETTLES_WITHIN_S = 5.0
