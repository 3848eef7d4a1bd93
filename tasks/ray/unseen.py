"""Nodes of a Ray cluster that were not seen after a job's end, so that nobody can say what runs
there, and the notes by which they are asked again.
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
from tasks.record.places import muster_home
from tasks.record.run_json import SubmissionJson

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenNode:
    """A node, or all of a cluster, of which nobody can say what runs there."""

    #: Ray's, in hex; empty for every node of the cluster.
    node_id: str
    #: Of the node; the control store's address for all of them.
    name: str
    why: str

    def __str__(self) -> str:
        said = f"node {self.name} was not seen" if self.node_id else "no node was seen"
        return f"{said} ({self.why[:200]})"


async def told_apart(
    dashboard: Dashboard, unreached: Sequence[UnseenNode], *, since: float | None = None
) -> tuple[list[UnseenNode], list[str]]:
    """Of the nodes that were not reached, those that are of the cluster still, by its own word, and
    are to be asked again; and in words those that have left it, which it can't reach any more.

    Args:
        since: the nodes that it has lost since then, UTC epoch seconds, count as well.
    """
    try:
        living = {node.node_id for node in await dashboard.nodes()}
        left = {} if since is None else await dashboard.lost_nodes(since)
    except (NoAnswer, Denied):
        return [*unreached], []
    unseen = []
    for node in unreached:
        if not node.node_id or node.node_id in living:
            unseen.append(node)
        else:
            left.setdefault(node.node_id, f"node {node.name} has left the cluster")
    return unseen, [*left.values()]


class UnseenNote(BaseModel):
    """The nodes that could not be asked after the end of a submission, noted until they are seen or
    have left their cluster: nobody can say what they still run of it.

    They may be asked whatever has become of the run since: what is looked for there is of one
    attempt, which has ended.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: What was known of it then.
    job: SubmissionJson
    #: The machine that asks again.
    host: str = Field(default_factory=host_name)
    #: Of the attempt, where what is found is told.
    events: Path
    #: UTC epoch seconds.
    since: float = Field(default_factory=time.time)
    #: `name[node id]`; empty for every node of the cluster.
    nodes: Mapping[str, str] = {}

    def of(self, unseen: Sequence[UnseenNode]) -> UnseenNote:
        """The same of these nodes."""
        is_of_all = any(not node.node_id for node in unseen)
        nodes = {} if is_of_all else {node.node_id: node.name for node in unseen}
        return self.model_copy(update={"nodes": nodes})

    def write(self) -> None:
        path = _file(self.job.submission_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, self.model_dump(mode="json"))
        except OSError as error:
            _log.warning("%s could not be written: %s", path, error)

    def forget(self) -> None:
        _file(self.job.submission_id).unlink(missing_ok=True)


def _file(submission_id: str) -> Path:
    return muster_home() / "unseen" / f"{submission_id}.json"


def unseen_notes(host: str) -> Iterator[UnseenNote]:
    """Those that a machine has to ask again."""
    for path in sorted(_file("").parent.glob("*.json")):
        try:
            note = UnseenNote.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            _log.warning("%s can't be read, and is passed over: %s", path, error)
            continue
        if note.host == host:
            yield note
