"""Nodes of a Ray cluster that could not be checked for leftover processes after a job had ended.

For each such job a note is written to disk, so that `muster reconcile` checks the nodes later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.processes.identity import host_name
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer
from tasks.record.disk import write_json
from tasks.record.places import muster_home, read_own_file
from tasks.record.run_json import SubmissionJson

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedNode:
    """A node, or a whole cluster, that could not be checked for leftover processes."""

    #: Ray's node id, in hex. Empty if no node of the cluster could be checked.
    node_id: str
    #: Name of the node, or the address of the control store if `node_id` is empty.
    name: str
    #: Reason why the node could not be checked.
    why: str

    def __str__(self) -> str:
        subject = f"node {self.name} was not seen" if self.node_id else "no node was seen"
        return f"{subject} ({self.why[:200]})"


async def split_departed_nodes(
    dashboard: Dashboard, unreached: Sequence[UncheckedNode], *, since: float | None = None
) -> tuple[list[UncheckedNode], list[str]]:
    """Separate unreachable nodes that are still in the cluster from nodes that have left it.

    Args:
        dashboard: The dashboard of the cluster. It decides which nodes are in the cluster.
        unreached: The nodes that could not be reached.
        since: UTC epoch seconds. Nodes that the cluster has lost since then are added to the
            second list. None adds no nodes.

    Returns:
        The nodes that are still in the cluster, and one sentence for each node that has left it.
        If the dashboard does not answer, all nodes count as still in the cluster.
    """
    try:
        living_ids = {node.node_id for node in await dashboard.nodes()}
        departures = {} if since is None else await dashboard.lost_nodes(since)
    except (NoAnswer, Denied):
        return [*unreached], []

    still_in_cluster = []
    for node in unreached:
        if not node.node_id or node.node_id in living_ids:
            still_in_cluster.append(node)
        else:
            departures.setdefault(node.node_id, f"node {node.name} has left the cluster")
    return still_in_cluster, [*departures.values()]


class UncheckedNodesNote(BaseModel):
    """File that lists the nodes that could not be checked after a submission had ended.

    The note exists until every listed node has been checked or has left the cluster. Checking the
    nodes is safe at any time, even if the run has new attempts: the check looks only for processes
    of the attempt that has ended.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Content of the job's submission file when the note was written.
    job: SubmissionJson
    #: Host that checks the nodes again.
    host: str = Field(default_factory=host_name)
    #: Path of the attempt's events.jsonl, where the result of the check is logged.
    events: Path
    #: Time at which the note was created, in UTC epoch seconds.
    since: float = Field(default_factory=time.time)
    #: `name[node id]`. Empty if all nodes of the cluster must be checked.
    nodes: Mapping[str, str] = {}

    def of(self, unseen: Sequence[UncheckedNode]) -> UncheckedNodesNote:
        """Return a copy of this note that lists these nodes."""
        is_whole_cluster = any(not node.node_id for node in unseen)
        nodes = {} if is_whole_cluster else {node.node_id: node.name for node in unseen}
        return self.model_copy(update={"nodes": nodes})

    def write(self) -> None:
        """Write the note to disk. A failure is logged and not raised."""
        path = _note_path(self.job.submission_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, self.model_dump(mode="json"))
        except OSError as error:
            _log.warning("%s could not be written: %s", path, error)

    def forget(self) -> None:
        """Delete the note from disk, if it exists."""
        _note_path(self.job.submission_id).unlink(missing_ok=True)


def _note_path(submission_id: str) -> Path:
    return muster_home() / "unseen" / f"{submission_id}.json"


def read_notes(host: str) -> Iterator[UncheckedNodesNote]:
    """Yield the notes that this host must check. Unreadable notes are logged and skipped."""
    for path in sorted(_note_path("").parent.glob("*.json")):
        try:
            note = UncheckedNodesNote.model_validate_json(read_own_file(path))
        except (OSError, ValidationError) as error:
            _log.warning("%s can't be read, and is passed over: %s", path, error)
            continue
        if note.host == host:
            yield note
