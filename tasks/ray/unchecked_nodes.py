"""Record the Ray nodes that could not be checked for leftover processes when a job ended.

For each such job a note file is written to disk. `muster reconcile` reads the notes and checks the
nodes later.
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
    """A Ray node, or a whole Ray cluster, that could not be checked for leftover processes."""

    #: Ray's node id in hex. An empty string if this object stands for a whole cluster, because no
    #: node of the cluster could be checked.
    node_id: str
    #: Name of the node. If `node_id` is empty, the address of the cluster's control store (GCS).
    name: str
    #: Reason why the node or cluster could not be checked.
    why: str

    def __str__(self) -> str:
        if self.node_id:
            return (
                f"Muster could not check node {self.name} for leftover processes ({self.why[:200]})"
            )
        return (
            "Muster could not check any node of the cluster for leftover processes "
            f"({self.why[:200]})"
        )


async def split_departed_nodes(
    dashboard: Dashboard, unreached: Sequence[UncheckedNode], *, since: float | None = None
) -> tuple[list[UncheckedNode], list[str]]:
    """Separate unreachable nodes of a cluster from nodes that no longer belong to the cluster.

    Args:
        dashboard: The dashboard of the Ray cluster, which lists the cluster's nodes.
        unreached: The nodes that could not be reached.
        since: Time in UTC epoch seconds. The result also describes other nodes that the cluster has
            lost since this time. If None, the result describes only nodes of `unreached`.

    Returns:
        A list of the unreachable nodes that still belong to the cluster, and a list with one phrase
        for each node that no longer belongs to the cluster. If the dashboard does not answer, all
        nodes of `unreached` count as nodes of the cluster.
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
            departures.setdefault(node.node_id, f"node {node.name} left the cluster")
    return still_in_cluster, [*departures.values()]


class UncheckedNodesNote(BaseModel):
    """Note file with the nodes that could not be checked for leftover processes of a Ray job.

    The file exists until every listed node has been checked or is no longer in the cluster. A check
    kills the leftover processes of the ended attempt, but no processes of a new attempt of the run.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Content of the job's submission file at the time when this note file was written.
    job: SubmissionJson
    #: Name of the host on which `muster reconcile` checks the nodes for leftover processes.
    host: str = Field(default_factory=host_name)
    #: Path of the attempt's events.jsonl, to which `muster reconcile` appends the result of the
    #: check of the nodes.
    events: Path
    #: Time at which this note file was first written, in UTC epoch seconds.
    since: float = Field(default_factory=time.time)
    #: Nodes that must be checked: mapping from node id to node name. Empty if all nodes of the
    #: cluster must be checked.
    nodes: Mapping[str, str] = {}

    def with_nodes(self, unchecked: Sequence[UncheckedNode]) -> UncheckedNodesNote:
        """Return a copy of this note with the given list of nodes to check."""
        is_whole_cluster = any(not node.node_id for node in unchecked)
        nodes = {} if is_whole_cluster else {node.node_id: node.name for node in unchecked}
        return self.model_copy(update={"nodes": nodes})

    def write(self) -> None:
        """Write this note about unchecked nodes to disk. An OSError is logged and not raised."""
        path = _note_path(self.job.submission_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, self.model_dump(mode="json"), durable=True)
        except OSError as error:
            _log.warning(
                "Muster could not write the file %s, which lists nodes that must be checked for "
                "leftover processes: %s",
                path,
                error,
            )

    def forget(self) -> None:
        """Delete the file of this note about unchecked nodes, if the file exists."""
        _note_path(self.job.submission_id).unlink(missing_ok=True)


def _note_path(submission_id: str) -> Path:
    return muster_home() / "unseen" / f"{submission_id}.json"


def read_notes(host: str) -> Iterator[UncheckedNodesNote]:
    """Yield the notes about the nodes that `muster reconcile` on a given host must check.

    A note is a file on disk. A file that cannot be read is skipped, and a warning is logged.

    Args:
        host: Name of the host.
    """
    for path in sorted(_note_path("").parent.glob("*.json")):
        try:
            note = UncheckedNodesNote.model_validate_json(read_own_file(path))
        except (OSError, ValidationError) as error:
            _log.warning(
                "The file %s lists nodes that must be checked for leftover processes. Muster skips "
                "the file, because the file cannot be read: %s",
                path,
                error,
            )
            continue
        if note.host == host:
            yield note
