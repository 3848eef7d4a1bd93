"""Create the automations of this folder on a Prefect server.

Run `python -m deployments.automations.apply`.

An automation is identified by its name. An automation that a person changed on the server is kept;
any other automation is updated from its file. An update never enables or disables an automation.

If the server has a notification block named `muster`, the automations notify through this block.
Otherwise they have no action, and only Muster's event appears in the server's event feed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import ActionTypes, DoNothing, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.settings import PREFECT_API_URL
from pydantic import ValidationError

import tasks.server  # noqa: F401  (its import guards Prefect's clients)
from tasks.show.output import guard_output

FOLDER = Path(__file__).parent
#: Name of the notification blocks. Blocks of several types may have this name.
BLOCK = "muster"
#: Tag of every automation of Muster.
_TAG = "muster"
#: Prefix of the tag that holds the digest of the content that was applied last.
_APPLIED = "applied:"
#: Fields of an automation that do not come from its file, so that the digest ignores them.
_NOT_CONTENT = frozenset({"enabled", "tags", "owner_resource", "id"})


class BadAutomation(Exception):
    """A file of the folder is not a valid automation. The user must correct the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Result of applying one automation."""

    name: str
    #: created | updated | as it was | kept
    what: str

    def __str__(self) -> str:
        why = {"kept": ": it was changed on the server (--replace: as in its file again)"}
        return f"automation {self.name!r}: {self.what}{why.get(self.what, '')}"


def read(path: Path, blocks: Sequence[UUID]) -> AutomationCore:
    """Read an automation from a file, and let it notify through the blocks.

    Raises:
        BadAutomation: The file is not a valid automation.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        notification = content.pop("notification")
        actions = _actions(notification["subject"], notification["body"], blocks)
        return AutomationCore(**content, actions=actions, tags=[_TAG])
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValidationError) as error:
        raise BadAutomation(f"{path}: {error!r}") from error


def _actions(subject: str, body: str, blocks: Sequence[UUID]) -> list[ActionTypes]:
    # Set `type` explicitly: an update leaves out fields that were not set.
    return [
        SendNotification(
            type="send-notification", block_document_id=block, subject=subject, body=body
        )
        for block in blocks
    ] or [DoNothing(type="do-nothing")]


def apply(
    client: SyncPrefectClient, folder: Path = FOLDER, *, replace: bool = False
) -> Iterator[Applied]:
    """Create or update each automation of a folder on the server, and yield the results.

    Args:
        replace: Also update automations that a person changed on the server. They stay enabled or
            disabled as they are.

    Raises:
        BadAutomation: A file is not a valid automation.
        httpx.HTTPError: The server does not answer, or refuses.
    """
    blocks = _blocks(client)
    for path in sorted(folder.glob("*.yaml")):
        wanted = read(path, blocks)
        wanted.tags = [_TAG, f"{_APPLIED}{digest(wanted)}"]
        existing_automations = client.read_automations_by_name(wanted.name)
        if not existing_automations:
            client.create_automation(wanted)
            yield Applied(name=wanted.name, what="created")
        for existing in existing_automations:
            result = _update(client, existing, wanted, replace=replace)
            yield Applied(name=wanted.name, what=result)


def _update(
    client: SyncPrefectClient, existing: Automation, wanted: AutomationCore, *, replace: bool
) -> str:
    is_unchanged_by_user = f"{_APPLIED}{digest(existing)}" in existing.tags
    if digest(existing) == digest(wanted) and is_unchanged_by_user:
        return "as it was"
    if not (is_unchanged_by_user or replace):
        return "kept"
    client.update_automation(existing.id, wanted.model_copy(update={"enabled": existing.enabled}))
    return "updated"


def digest(automation: AutomationCore) -> str:
    """Return a digest of an automation's content, which is equal for equal contents."""
    content = automation.model_dump(mode="json", exclude=set(_NOT_CONTENT))
    return hashlib.sha256(json.dumps(_sorted(content)).encode()).hexdigest()[:12]


def _sorted(value: Any) -> Any:
    """Return a JSON value with sorted keys and sorted lists of strings.

    Such a list may be a set of the model, which JSON lists in any order.
    """
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _blocks(client: SyncPrefectClient) -> list[UUID]:
    """Return the ids of the notification blocks named `BLOCK`, of every type."""
    wanted = {
        "block_documents": {"name": {"any_": [BLOCK]}},
        "block_schemas": {"block_capabilities": {"all_": ["notify"]}},
    }
    blocks = client.request("POST", "/block_documents/filter", json=wanted).json()
    return sorted(UUID(block["id"]) for block in blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Create or update the automations on the server, and print the result of each.

    Returns:
        0 if done; 1 if the server does not answer or refuses; 2 if a file is not an automation.
    """
    parser = argparse.ArgumentParser(
        prog="python -m deployments.automations.apply",
        description="Brings the automations of deployments/automations/ to the Prefect server of "
        f"PREFECT_API_URL. Where it has a notification block named {BLOCK}, they notify through "
        "it.",
        epilog="Exit: 0 done; 1 the server does not answer, or refuses; 2 a file is no "
        "automation, or the arguments are wrong.",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="also those that were changed on the server; what is switched off stays so",
    )
    options = parser.parse_args(arguments)
    if not (url := PREFECT_API_URL.value()):
        print(
            "no Prefect server is set: start one (`muster up`, which says its address), and set "
            "PREFECT_API_URL to that",
            file=sys.stderr,
        )
        return 1
    try:
        with get_client(sync_client=True) as client:
            for applied in apply(client, replace=options.replace):
                print(applied, flush=True)
    except BadAutomation as error:
        print(error, file=sys.stderr)
        return 2
    except httpx.HTTPError as error:
        print(
            f"the Prefect server at PREFECT_API_URL={url} did not take them: {error!r}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    with guard_output():
        raise SystemExit(main())
