"""The artifacts that Muster has on a Prefect server: those of a flow run and of the queue, one of
each key, kept current in place; reports, each one for itself; and the code of runs, for hosts that
have another `MUSTER_HOME` than the one it was submitted from.

A new one for each change would be shown beside all earlier ones. Prefect's own verbs would send
what an artifact shows a second time, as an event that the server keeps for days.
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
    """The log of the flow run of this context; without one, the module's own."""
    with suppress(MissingContextError):
        return get_run_logger()
    return own


def leave_report(key: str, markdown: str, summary: str, log: Log) -> None:
    """Leave an artifact beside all earlier ones of its key, on the flow run of this context if any.

    Never raises: what a report is about was done, and its lines are in the log.

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
    """Those of a flow run, or of whatever one, the one that was updated last first."""
    which: dict[str, Any] = {"key": {"any_": list(keys)}}
    if flow_run_id is not None:
        which["flow_run_id"] = {"any_": [flow_run_id]}
    return client.read_artifacts(
        artifact_filter=ArtifactFilter.model_validate(which), sort=ArtifactSort.UPDATED_DESC
    )


@dataclass(slots=True)
class Artifacts:
    """Those of a flow run, or of none. Asks the server: use it from a thread that may wait. Each
    call may raise what httpx does."""

    _flow_run_id: UUID | None
    #: Those that somebody else may have made already.
    _keys: Collection[str]
    _mask: Callable[[str], str] = str
    #: None until it was asked what was made before.
    _ids: dict[str, UUID] | None = None

    def show(self, client: SyncPrefectClient, key: str, shown: Shown) -> None:
        """Have the artifact of a key show this."""
        if self._ids is None:
            found = artifacts_of(client, self._flow_run_id, self._keys) if self._keys else []
            self._ids = {one.key: one.id for one in reversed(found) if one.key}
        said = self._mask(shown.headline)
        if shown.picture:
            # Before it is a picture: what is masked in its code breaks it.
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
        """Whether it was still there to be updated."""
        place = {"id": str(artifact)}
        try:
            client.request("PATCH", "/artifacts/{id}", path_params=place, json=content)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True


#: Of what the UI lists, since they have no key, neither is one.
_CODE, _PART = "muster-code", "muster-code-part"
#: Of packed content, in bytes: proxies have their limits.
_PART_BYTES = 4 << 20
_PAGE = 200


def submitted_code(client: SyncPrefectClient | None, code: str | None, root: Path) -> str:
    """What a spec that is submitted says of its code: the name of that of its project, which is
    kept here and on the server, where there is one, unless it names another.

    Raises: InvalidSpec, NoCode: it is not to be had; OSError.
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
    """The label of a flow run that says which tree its components run; None for none."""
    if code in (None, LIVE_CODE):
        return None
    return {"muster.code": code_store.code_of(code).tree}


def share_code(client: SyncPrefectClient, name: str) -> None:
    """Have the server keep a code of this machine, with its tree. Safe any number of times."""
    there = {name: id for id, name, _parts in _shared(client)}
    for one in (code_store.code_of(name).tree, name):
        with suppress(ObjectNotFound):
            if one in there:
                # So that nobody takes it for forgotten before a run names it.
                id = {"id": there[one]}
                client.request(
                    "PATCH", "/artifacts/{id}", path_params=id, json={"description": None}
                )
                continue
        content, parts = code_store.packed(one), []
        for at in range(0, len(content), _PART_BYTES):
            data = base64.b64encode(content[at : at + _PART_BYTES]).decode()
            parts.append(_post(client, {"type": _PART, "data": data}))
        # Last: what has an entry is whole.
        _post(client, {"type": _CODE, "data": {"name": one, "parts": parts}})


def shared_code(client: SyncPrefectClient, name: str) -> bytes | None:
    """What the server keeps under a name, packed."""
    for _id, one, parts in _shared(client):
        if one == name:
            which = (ArtifactFilter.model_validate({"id": {"any_": [part]}}) for part in parts)
            found = (client.read_artifacts(artifact_filter=one) for one in which)
            return b"".join(base64.b64decode(str(part.data)) for [part] in found)
    return None


def forget_code(client: SyncPrefectClient, named: Collection[str]) -> int:
    """Remove what nothing names and was not shared within a day; how much was removed."""
    before, count = datetime.now(UTC) - timedelta(days=1), 0
    for id, name, parts in list(_shared(client, before)):
        if name not in named:
            for one in (id, *parts):
                client.delete_artifact(UUID(one))
            count += 1
    return count


def _post(client: SyncPrefectClient, content: dict[str, Any]) -> str:
    return str(client.request("POST", "/artifacts/", json=content).json()["id"])


def _shared(
    client: SyncPrefectClient, before: datetime | None = None
) -> Iterator[tuple[str, str, list[str]]]:
    """Of each entry its id, what it is of, and the ids of its parts, in order."""
    which, at = ArtifactFilter.model_validate({"type": {"any_": [_CODE]}}), 0
    while found := client.read_artifacts(artifact_filter=which, limit=_PAGE, offset=at):
        for one in found:
            data: Any = one.data
            if before is None or (one.updated and one.updated < before):
                yield str(one.id), data["name"], data["parts"]
        at += len(found)
