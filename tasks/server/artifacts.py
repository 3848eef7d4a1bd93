"""Muster's artifacts on a Prefect server.

- Artifacts of a flow run or of the queue: one artifact for each key, updated in place. A new
  artifact for each change would be listed next to all earlier artifacts.
- Reports: a new artifact each time.
- The code of runs, for hosts with a `MUSTER_HOME` that does not contain it.

Muster does not use Prefect's own update functions. They would send the content of an artifact a
second time, as an event that the server stores for days.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import Artifact
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import MissingContextError, ObjectNotFound
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL

from tasks.record import code_store
from tasks.server.events import client_settings
from tasks.show.view import Shown
from tasks.spec.formatting import escape_markdown, markdown_image
from tasks.spec.run import LIVE_CODE

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


def run_log(own: logging.Logger) -> Log:
    """Return the logger of the current flow run, or the given logger outside of a flow run."""
    with suppress(MissingContextError):
        return get_run_logger()
    return own


def leave_report(key: str, markdown: str, summary: str, log: Log) -> None:
    """Create a new artifact with a key, and link it to the current flow run if there is one.

    This never raises: the reported work is done, and the log has the same lines.

    Args:
        markdown: The page. Its maker has escaped all text from outside.
        summary: Plain text for the card, a paragraph each line.
    """
    if not PREFECT_API_URL.value():
        return
    description = "\n\n".join(map(escape_markdown, summary.splitlines()))
    try:
        with client_settings(retries=1):
            create_markdown_artifact(markdown, key=key, description=description)
    except Exception as error:
        log.warning("the artifact was not made: %r", error)


def artifacts_of(
    client: SyncPrefectClient, flow_run_id: UUID | None, keys: Iterable[str]
) -> list[Artifact]:
    """Return the artifacts with these keys, last updated first.

    Args:
        flow_run_id: flow run of the artifacts. None: artifacts of any flow run, or of none.
    """
    which: dict[str, Any] = {"key": {"any_": list(keys)}}
    if flow_run_id is not None:
        which["flow_run_id"] = {"any_": [flow_run_id]}
    return client.read_artifacts(
        artifact_filter=ArtifactFilter.model_validate(which), sort=ArtifactSort.UPDATED_DESC
    )


@dataclass(slots=True)
class Artifacts:
    """The artifacts of a flow run, or those without a flow run.

    Each call asks the server, so use it in a thread that may wait. It may raise httpx.HTTPError.
    """

    _flow_run_id: UUID | None
    #: Keys of artifacts that another process may have created already.
    _keys: Collection[str]
    _mask: Callable[[str], str] = str
    #: Ids of the artifacts by key. None until the existing artifacts are read.
    _ids: dict[str, UUID] | None = None

    def show(self, client: SyncPrefectClient, key: str, shown: Shown) -> None:
        """Update the artifact of a key, or create it if it is missing."""
        if self._ids is None:
            existing: list[Artifact] = []
            if self._keys:
                existing = artifacts_of(client, self._flow_run_id, self._keys)
            self._ids = {
                artifact.key: artifact.id for artifact in reversed(existing) if artifact.key
            }
        said = self._mask(shown.headline)
        if shown.picture:
            # Mask the secrets before encoding. Masking the encoded picture would break it.
            said = markdown_image(self._mask(shown.picture), said)
        data = self._mask(shown.data) if isinstance(shown.data, str) else shown.data
        content = {"description": said, "data": data}
        if key in self._ids and self._is_updated(client, self._ids[key], content):
            return
        content |= {"key": key, "type": shown.type}
        if self._flow_run_id is not None:
            content["flow_run_id"] = str(self._flow_run_id)
        answer = client.request("POST", "/artifacts/", json=content)
        self._ids[key] = UUID(answer.json()["id"])

    def _is_updated(
        self, client: SyncPrefectClient, artifact: UUID, content: dict[str, str | float]
    ) -> bool:
        """Update an artifact. Return False if it does not exist any more."""
        place = {"id": str(artifact)}
        try:
            client.request("PATCH", "/artifacts/{id}", path_params=place, json=content)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True


#: Artifact types of the code store. The UI does not list them because they have no key.
_CODE, _PART = "muster-code", "muster-code-part"
#: Maximum size of a part of packed content, in bytes. Proxies limit the size of a request.
_PART_BYTES = 4 << 20
_PAGE = 200


def submitted_code(client: SyncPrefectClient | None, code: str | None, root: Path) -> str:
    """Return the code name for a submitted spec, and store the code here and on the server.

    Args:
        client: None if there is no server.
        code: code in the spec, which is kept. None: a new snapshot of the project.
        root: folder of the project.

    Raises: InvalidSpec; NoCode, if the code is not available; OSError.
    """
    if code == LIVE_CODE:
        return LIVE_CODE
    fetch = partial(shared_code, client) if client is not None else lambda _name: None
    name = code or code_store.put(root)
    code_store.read(code_store.code_of(name, fetch).tree, fetch)
    if client is not None:
        share_code(client, name)
    return name


def code_label(code: str | None) -> dict[str, str | int | float | bool] | None:
    """Return the flow run label that names the tree of the code, or None without stored code."""
    if code in (None, LIVE_CODE):
        return None
    return {"muster.code": code_store.code_of(code).tree}


def share_code(client: SyncPrefectClient, name: str) -> None:
    """Upload a code of this machine and its tree to the server. Idempotent."""
    there = {name: id for id, name, _parts in _shared(client)}
    for one in (code_store.code_of(name).tree, name):
        with suppress(ObjectNotFound):
            if one in there:
                # Renew its update time, so that it is not deleted before a run refers to it.
                id = {"id": there[one]}
                client.request(
                    "PATCH", "/artifacts/{id}", path_params=id, json={"description": None}
                )
                continue
        content, parts = code_store.packed(one), []
        for at in range(0, len(content), _PART_BYTES):
            data = base64.b64encode(content[at : at + _PART_BYTES]).decode()
            parts.append(_post(client, {"type": _PART, "data": data}))
        # Create the entry last: an entry then always has all its parts.
        _post(client, {"type": _CODE, "data": {"name": one, "parts": parts}})


def shared_code(client: SyncPrefectClient, name: str) -> bytes | None:
    """Return the packed content of a name on the server, or None if it has none."""
    for _id, one, parts in _shared(client):
        if one == name:
            which = (ArtifactFilter.model_validate({"id": {"any_": [part]}}) for part in parts)
            found = (client.read_artifacts(artifact_filter=one) for one in which)
            return b"".join(base64.b64decode(str(part.data)) for [part] in found)
    return None


def forget_code(client: SyncPrefectClient, named: Collection[str]) -> int:
    """Delete the entries that are not named and that were not uploaded or renewed within a day.

    Returns: the number of deleted entries.
    """
    before = datetime.now(UTC) - timedelta(days=1)
    count = 0
    for id, name, parts in list(_shared(client, before)):
        if name not in named:
            for artifact_id in (id, *parts):
                client.delete_artifact(UUID(artifact_id))
            count += 1
    return count


def _post(client: SyncPrefectClient, content: dict[str, Any]) -> str:
    return str(client.request("POST", "/artifacts/", json=content).json()["id"])


def _shared(
    client: SyncPrefectClient, before: datetime | None = None
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the id, the name and the ordered part ids of each code entry on the server."""
    which, at = ArtifactFilter.model_validate({"type": {"any_": [_CODE]}}), 0
    while found := client.read_artifacts(artifact_filter=which, limit=_PAGE, offset=at):
        for one in found:
            data: Any = one.data
            if before is None or (one.updated and one.updated < before):
                yield str(one.id), data["name"], data["parts"]
        at += len(found)
