"""Muster's artifacts on a Prefect server.

There are three kinds:

- Artifacts of a flow run or of the queue. They are updated in place. If each change created a new
  artifact, the Prefect UI would list all earlier artifacts, too.
- Reports. Each report is a new artifact.
- The submitted code of runs. A host downloads code that its `MUSTER_HOME` does not contain.

Muster does not use Prefect's own update functions. Prefect's functions also send the content of an
artifact as an event, which the server stores for days.
"""

from __future__ import annotations

import base64
import logging
import warnings
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
from tasks.server.events import override_client_settings
from tasks.show.markdown import escape_markdown, markdown_image
from tasks.show.run_view import Shown
from tasks.spec.run import LIVE_CODE

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


def find_run_logger(own: logging.Logger) -> Log:
    """Return the logger of the current flow run.

    Args:
        own: Logger of the calling module, which is returned if there is no current flow run.
    """
    with suppress(MissingContextError):
        return get_run_logger()
    return own


def create_report(key: str, markdown: str, summary: str, log: Log) -> None:
    """Create a new artifact for a report, and link it to the current flow run if there is one.

    If the server does not accept the artifact, only a warning is logged, because the log also
    contains the lines of the report.

    Args:
        key: Key of the artifact.
        markdown: Content of the artifact, in which text of users is already escaped.
        summary: Description of the artifact in plain text. Each line becomes a paragraph.
        log: Logger for the warning.
    """
    if not PREFECT_API_URL.value():
        return
    description = "\n\n".join(map(escape_markdown, summary.splitlines()))
    try:
        with override_client_settings(retries=1), warnings.catch_warnings():
            # Outside a flow run, for example in `muster reconcile`, Prefect prints a warning that
            # is of no use to users of Muster.
            warnings.simplefilter("ignore", FutureWarning)
            create_markdown_artifact(markdown, key=key, description=description)
    except Exception as error:
        log.warning("Muster could not create an artifact of the run in the Prefect UI: %r", error)


def find_artifacts(
    client: SyncPrefectClient, flow_run_id: UUID | None, keys: Iterable[str]
) -> list[Artifact]:
    """Return the artifacts with the given keys, most recently updated first.

    Args:
        client: Client of the Prefect server.
        flow_run_id: Id of the flow run that owns the artifacts. If None, all artifacts are
            searched, with or without a flow run.
        keys: Keys of the artifacts.
    """
    criteria: dict[str, Any] = {"key": {"any_": list(keys)}}
    if flow_run_id is not None:
        criteria["flow_run_id"] = {"any_": [flow_run_id]}
    return client.read_artifacts(
        artifact_filter=ArtifactFilter.model_validate(criteria), sort=ArtifactSort.UPDATED_DESC
    )


@dataclass(slots=True)
class Artifacts:
    """Updates the artifacts of a flow run, or artifacts without a flow run, in place.

    Each method call sends requests to the server and waits for the responses. So call the methods
    in a thread that may block.
    """

    #: Id of the flow run that owns the artifacts. None if the artifacts belong to no flow run.
    _flow_run_id: UUID | None
    #: Keys of artifacts that another process may have already created. Before the first update,
    #: the server is searched for these artifacts.
    _keys: Collection[str]
    #: Function that replaces each secret in a text by `***`.
    _mask: Callable[[str], str] = str
    #: Mapping from the key of an artifact to its id. None if the existing artifacts have not been
    #: read yet.
    _ids: dict[str, UUID] | None = None

    def show(self, client: SyncPrefectClient, key: str, shown: Shown) -> None:
        """Update the artifact with the given key, or create the artifact if it is missing.

        Args:
            client: Client of the Prefect server.
            key: Key of the artifact.
            shown: New content of the artifact.

        Raises:
            httpx.HTTPError: The server did not accept the content.
        """
        if self._ids is None:
            existing: list[Artifact] = []
            if self._keys:
                existing = find_artifacts(client, self._flow_run_id, self._keys)
            self._ids = {
                artifact.key: artifact.id for artifact in reversed(existing) if artifact.key
            }
        description = self._mask(shown.headline)
        if shown.picture:
            # Mask secrets before the picture is encoded as base64, because secrets cannot be found
            # in the encoded text.
            description = markdown_image(self._mask(shown.picture), description)
        data = self._mask(shown.data) if isinstance(shown.data, str) else shown.data
        content = {"description": description, "data": data}
        if key in self._ids and self._is_updated(client, self._ids[key], content):
            return
        content |= {"key": key, "type": shown.type}
        if self._flow_run_id is not None:
            content["flow_run_id"] = str(self._flow_run_id)
        response = client.request("POST", "/artifacts/", json=content)
        self._ids[key] = UUID(response.json()["id"])

    def _is_updated(
        self, client: SyncPrefectClient, artifact: UUID, content: dict[str, str | float]
    ) -> bool:
        """Update an artifact. Return False if a user has deleted the artifact."""
        path_params = {"id": str(artifact)}
        try:
            client.request("PATCH", "/artifacts/{id}", path_params=path_params, json=content)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True


#: Artifact type of an entry for submitted code. An entry lists the ids of the artifacts that
#: contain the code. An entry has no key, so the Prefect UI does not list it.
_CODE = "muster-code"
#: Artifact type of a part of the content of submitted code. The Prefect UI does not list a part.
_PART = "muster-code-part"
#: Largest size of a part of submitted code, in bytes. Parts are small because HTTP proxies limit
#: the size of a request.
_PART_BYTES = 4 << 20
#: Number of entries for submitted code that are read with one request.
_PAGE_SIZE = 200


def store_submitted_code(
    client: SyncPrefectClient | None,
    code: str | None,
    root: Path,
    outputs: Collection[str] = (),
) -> str:
    """Store the code of a submitted spec on this machine and on the server, and return its name.

    Args:
        client: Client of the Prefect server. None if there is no server.
        code: Name of stored code in the spec, which is returned unchanged. If None, a new snapshot
            of the project is stored.
        root: Root folder of the project.
        outputs: See `code_store.store_project`.

    Raises:
        InvalidSpec: The project cannot be stored.
        NoCode: The named code is neither on this machine nor on the server.
        OSError: A file cannot be read or written.
    """
    if code == LIVE_CODE:
        return LIVE_CODE
    fetch = partial(download_code, client) if client is not None else lambda _name: None
    name = code or code_store.store_project(root, outputs)
    code_store.read_content(code_store.read_code(name, fetch).tree, fetch)
    if client is not None:
        upload_code(client, name)
    return name


def make_code_label(code: str | None) -> dict[str, str | int | float | bool] | None:
    """Return the flow run label that names the stored code of a run.

    Args:
        code: Name of the code in the run spec.

    Returns:
        The label, or None if the run uses the files of its project directly.
    """
    if code in (None, LIVE_CODE):
        return None
    return {"muster.code": code_store.read_code(code).tree}


def upload_code(client: SyncPrefectClient, name: str) -> None:
    """Upload both parts of stored code from this machine: the description and the file tree.

    The file tree is an archive of the project's files. A repeated call has no effect.

    Args:
        client: Client of the Prefect server.
        name: Name of the stored code.
    """
    entry_ids = {entry_name: entry_id for entry_id, entry_name, _parts in _read_entries(client)}
    for object_name in (code_store.read_code(name).tree, name):
        # ObjectNotFound means that another process has just deleted the entry. Then upload the
        # content again below.
        with suppress(ObjectNotFound):
            if object_name in entry_ids:
                # Renew the update time of the entry. Otherwise, `delete_unused_code` could delete
                # the old entry before a flow run uses it.
                path_params = {"id": entry_ids[object_name]}
                client.request(
                    "PATCH", "/artifacts/{id}", path_params=path_params, json={"description": None}
                )
                continue
        content = code_store.read_compressed(object_name)
        parts = []
        for start in range(0, len(content), _PART_BYTES):
            data = base64.b64encode(content[start : start + _PART_BYTES]).decode()
            parts.append(_create_artifact(client, {"type": _PART, "data": data}))
        # Create the entry last, so that an entry always has all of its parts.
        entry = {"name": object_name, "parts": parts}
        _create_artifact(client, {"type": _CODE, "data": entry})


def download_code(client: SyncPrefectClient, name: str) -> bytes | None:
    """Download one of the two parts of stored code: the description or the file tree.

    The description is a line of JSON. The file tree is a tar archive of the project's files.

    Args:
        client: Client of the Prefect server.
        name: Name of the description or of the file tree.

    Returns:
        The compressed content, or None if the server does not have the content.
    """
    for _entry_id, entry_name, parts in _read_entries(client):
        if entry_name == name:
            return b"".join(_read_part(client, part) for part in parts)
    return None


def _read_part(client: SyncPrefectClient, artifact_id: str) -> bytes:
    """Return the content of one part of stored code."""
    part_filter = ArtifactFilter.model_validate({"id": {"any_": [artifact_id]}})
    [part] = client.read_artifacts(artifact_filter=part_filter)
    return base64.b64decode(str(part.data))


def delete_unused_code(client: SyncPrefectClient, named: Collection[str]) -> int:
    """Delete unused code from the server. Code that was uploaded in the last day is kept.

    Args:
        client: Client of the Prefect server.
        named: Names of the stored code and file trees that are still used.

    Returns:
        Number of deleted entries.
    """
    yesterday = datetime.now(UTC) - timedelta(days=1)
    count = 0
    for entry_id, name, parts in list(_read_entries(client, updated_before=yesterday)):
        if name not in named:
            for artifact_id in (entry_id, *parts):
                client.delete_artifact(UUID(artifact_id))
            count += 1
    return count


def _create_artifact(client: SyncPrefectClient, content: dict[str, Any]) -> str:
    """Create an artifact and return its id."""
    return str(client.request("POST", "/artifacts/", json=content).json()["id"])


def _read_entries(
    client: SyncPrefectClient, updated_before: datetime | None = None
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the artifacts that list the parts of submitted code.

    Each item consists of the id of the artifact, the name of the code, and the ids of the parts in
    the order of the content.

    Args:
        client: Client of the Prefect server.
        updated_before: Omit artifacts that were uploaded or renewed after this time. If None, all
            artifacts are yielded.
    """
    entry_filter = ArtifactFilter.model_validate({"type": {"any_": [_CODE]}})
    offset = 0
    while entries := client.read_artifacts(
        artifact_filter=entry_filter, limit=_PAGE_SIZE, offset=offset
    ):
        for entry in entries:
            data: Any = entry.data
            if updated_before is None or (entry.updated and entry.updated < updated_before):
                yield str(entry.id), data["name"], data["parts"]
        offset += len(entries)
