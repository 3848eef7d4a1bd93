"""Create the automations of this folder on a Prefect server.

Run `python -m deployments.automations.apply`.

An automation is identified by its name. An automation that a person changed on the server is kept.
Any other automation is updated from its file. An update never enables or disables an automation.

If the server has a notification block named `muster`, the automations send their notifications
through this block. Otherwise the automations have no action, and only Muster's event appears in the
server's event feed.
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

#: Folder with the YAML files of Muster's Prefect automations.
FOLDER = Path(__file__).parent
#: Name of the notification blocks. Blocks of several types may have this name.
BLOCK = "muster"
#: Prefect tag that each of Muster's automations has on the server.
_TAG = "muster"
#: Prefix of a tag of each automation. The rest of the tag is the hash of the automation's content
#: after the last update by this program. If the present content on the server has another hash, a
#: user has changed the automation.
_APPLIED = "applied:"
#: Fields that the YAML file of an automation does not set. The hash of the automation's content
#: omits these fields.
_NOT_CONTENT = frozenset({"enabled", "tags", "owner_resource", "id"})


class BadAutomation(Exception):
    """An automation file is not valid. The user must correct the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Result of creating or updating one Prefect automation."""

    #: Name of the Prefect automation.
    name: str
    #: Result: `created`, `updated`, `as it was` (already current), or `kept` (because a user has
    #: changed the automation).
    what: str

    def __str__(self) -> str:
        reasons = {
            "kept": ", because a user changed this automation on the server. To "
            "overwrite the automation, use --replace"
        }
        return f"automation {self.name!r}: {self.what}{reasons.get(self.what, '')}"


def read(path: Path, blocks: Sequence[UUID]) -> AutomationCore:
    """Return the automation of a file.

    Args:
        path: The file.
        blocks: Ids of the notification blocks through which the automation notifies.

    Raises:
        BadAutomation: The file is not a valid automation.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        notification = content.pop("notification")
        actions = _make_actions(notification["subject"], notification["body"], blocks)
        return AutomationCore(**content, actions=actions, tags=[_TAG])
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValidationError) as error:
        raise BadAutomation(f"{path}: {error!r}") from error


def _make_actions(subject: str, body: str, blocks: Sequence[UUID]) -> list[ActionTypes]:
    """Return one notification for each block, or the action `do-nothing` if there are no blocks."""
    # Set `type` explicitly, because Prefect's client does not send fields with a default value when
    # it updates an automation.
    if not blocks:
        return [DoNothing(type="do-nothing")]
    return [
        SendNotification(
            type="send-notification", block_document_id=block, subject=subject, body=body
        )
        for block in blocks
    ]


def apply(
    client: SyncPrefectClient, folder: Path = FOLDER, *, replace: bool = False
) -> Iterator[Applied]:
    """Create or update each automation of a folder on the server, and yield the results.

    Args:
        client: Client of the Prefect server.
        folder: Folder of the automation files.
        replace: True to also update automations that a user has changed on the server. Enabled
            automations stay enabled, and disabled automations stay disabled.

    Raises:
        BadAutomation: A file is not a valid automation.
        httpx.HTTPError: The server does not answer, or refuses a request.
    """
    blocks = _read_blocks(client)
    for path in sorted(folder.glob("*.yaml")):
        automation = read(path, blocks)
        automation.tags = [_TAG, f"{_APPLIED}{digest(automation)}"]
        existing_automations = client.read_automations_by_name(automation.name)
        if not existing_automations:
            client.create_automation(automation)
            yield Applied(name=automation.name, what="created")
        for existing in existing_automations:
            result = _update(client, existing, automation, replace=replace)
            yield Applied(name=automation.name, what=result)


def _update(
    client: SyncPrefectClient, existing: Automation, automation: AutomationCore, *, replace: bool
) -> str:
    """Update an automation on the server to the content of its YAML file.

    Do nothing if the contents are equal. Also do nothing if a user has changed the automation on
    the server, unless `replace` is True.

    Args:
        client: Client of the Prefect server.
        existing: The automation on the server.
        automation: The automation of the YAML file.
        replace: True to also update an automation that a user has changed.

    Returns:
        `updated`, `as it was` (already current), or `kept` (because a user has changed the
        automation).
    """
    is_unchanged_by_user = f"{_APPLIED}{digest(existing)}" in existing.tags
    if digest(existing) == digest(automation) and is_unchanged_by_user:
        return "as it was"
    if not (is_unchanged_by_user or replace):
        return "kept"
    update = automation.model_copy(update={"enabled": existing.enabled})
    client.update_automation(existing.id, update)
    return "updated"


def digest(automation: AutomationCore) -> str:
    """Return a hash of an automation's content. Equal contents have equal hashes."""
    content = automation.model_dump(mode="json", exclude=set(_NOT_CONTENT))
    return hashlib.sha256(json.dumps(_sort_json(content)).encode()).hexdigest()[:12]


def _sort_json(value: Any) -> Any:
    """Return a JSON value with sorted keys and sorted lists of strings.

    Equal JSON values then have equal texts, which `digest` needs. Lists are sorted because Prefect
    makes some lists from sets, in an arbitrary order.
    """
    if isinstance(value, dict):
        return {key: _sort_json(value[key]) for key in sorted(value)}
    if not isinstance(value, list):
        return value
    if all(isinstance(item, str) for item in value):
        return sorted(value)
    return [_sort_json(item) for item in value]


def _read_blocks(client: SyncPrefectClient) -> list[UUID]:
    """Return the ids of the notification blocks named `muster`, of every type."""
    block_filter = {
        "block_documents": {"name": {"any_": [BLOCK]}},
        "block_schemas": {"block_capabilities": {"all_": ["notify"]}},
    }
    blocks = client.request("POST", "/block_documents/filter", json=block_filter).json()
    return sorted(UUID(block["id"]) for block in blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Create or update the automations on the server, and print the result of each.

    Returns:
        0 if all automations were applied; 1 if the server does not answer or refuses a request; 2
        if a file is not a valid automation.
    """
    parser = argparse.ArgumentParser(
        prog="python -m deployments.automations.apply",
        description="Create or update the automations of deployments/automations/ on the Prefect "
        f"server of PREFECT_API_URL. If the server has a notification block named {BLOCK}, the "
        "automations send notifications through this block.",
        epilog="Exit: 0 done; 1 the server does not answer, or refuses a request; 2 a file is "
        "not a valid automation, or the arguments are wrong.",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="Also overwrite automations that a person changed on the server. A disabled "
        "automation stays disabled.",
    )
    options = parser.parse_args(arguments)
    if not (url := PREFECT_API_URL.value()):
        print(
            "no Prefect server is set: run `muster up`, and set PREFECT_API_URL to the address "
            "that the command prints",
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
            f"the Prefect server at PREFECT_API_URL={url} did not accept the automations: "
            f"{error!r}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    with guard_output():
        raise SystemExit(main())
