"""What one submission to a Ray cluster is to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
    argv: tuple[str, ...]
    #: What the job's processes get on top of their node's environment, and nothing else of ours.
    env: Mapping[str, str]
    #: Local directory that is shipped; the driver starts in its copy.
    working_dir: Path
    #: What of it is not shipped, beside what never is; in the syntax of .gitignore.
    excludes: tuple[str, ...] = ()
    #: Local file that the driver's output flows into.
    log: Path
    #: What asks the driver to leave.
    stop_signal: int
    #: From the stop signal to SIGKILL.
    grace_s: float
    #: What the driver itself takes of its node; empty with no labels: any node but the head.
    entrypoint_resources: Mapping[str, float] = field(default_factory=dict)
    entrypoint_label_selector: Mapping[str, str] = field(default_factory=dict)
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
