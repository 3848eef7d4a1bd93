"""The automations of this folder on a Prefect server: `python -m deployments.automations.apply`.

Each is known by its name. What somebody has changed on the server is left as it is, and so is
whether it is switched on; what nobody has changed follows its file.

Where the server has a notification block of the name `muster`, they notify through it; else they do
nothing, and what they would have told is an event in the feed.
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
#: The name of the notification block, of any type: several types may each have one.
BLOCK = "muster"
#: On each of ours.
_TAG = "muster"
#: What was applied last: a tag, followed by a digest.
_APPLIED = "applied:"
#: A setting of where and how, which a file does not have.
_NOT_CONTENT = frozenset({"enabled", "tags", "owner_resource", "id"})


class BadAutomation(Exception):
    """A file of the folder is no automation: mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of one automation."""

    name: str
    #: created | updated | as it was | kept
    what: str

    def __str__(self) -> str:
        why = {"kept": ": it was changed on the server (--replace: as in its file again)"}
        return f"automation {self.name!r}: {self.what}{why.get(self.what, '')}"


def read(path: Path, blocks: Sequence[UUID]) -> AutomationCore:
    """An automation as its file has it, notifying through these blocks.

    Raises: BadAutomation.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        notification = content.pop("notification")
        actions = _actions(notification["subject"], notification["body"], blocks)
        return AutomationCore(**content, actions=actions, tags=[_TAG])
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValidationError) as error:
        raise BadAutomation(f"{path}: {error!r}") from error


def _actions(subject: str, body: str, blocks: Sequence[UUID]) -> list[ActionTypes]:
    # With the types, which an update would leave out as what nobody has set.
    return [
        SendNotification(
            type="send-notification", block_document_id=block, subject=subject, body=body
        )
        for block in blocks
    ] or [DoNothing(type="do-nothing")]


def apply(
    client: SyncPrefectClient, folder: Path = FOLDER, *, replace: bool = False
) -> Iterator[Applied]:
    """Bring each automation of a folder to the server.

    Args:
        replace: also what was changed on the server; whether it is switched on is kept.

    Raises: BadAutomation; httpx.HTTPError.
    """
    blocks = _blocks(client)
    for path in sorted(folder.glob("*.yaml")):
        wanted = read(path, blocks)
        wanted.tags = [_TAG, f"{_APPLIED}{digest(wanted)}"]
        there = client.read_automations_by_name(wanted.name)
        if not there:
            client.create_automation(wanted)
            yield Applied(name=wanted.name, what="created")
        for one in there:
            yield Applied(name=wanted.name, what=_update(client, one, wanted, replace=replace))


def _update(
    client: SyncPrefectClient, there: Automation, wanted: AutomationCore, *, replace: bool
) -> str:
    is_ours = f"{_APPLIED}{digest(there)}" in there.tags
    if digest(there) == digest(wanted) and is_ours:
        return "as it was"
    if not (is_ours or replace):
        return "kept"
    client.update_automation(there.id, wanted.model_copy(update={"enabled": there.enabled}))
    return "updated"


def digest(automation: AutomationCore) -> str:
    """The same for two automations that do the same."""
    content = automation.model_dump(mode="json", exclude=set(_NOT_CONTENT))
    return hashlib.sha256(json.dumps(_sorted(content)).encode()).hexdigest()[:12]


def _sorted(value: Any) -> Any:
    """With its sets, which JSON has as lists of any order, in one order."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return sorted(value)
    return [_sorted(one) for one in value] if isinstance(value, list) else value


def _blocks(client: SyncPrefectClient) -> list[UUID]:
    """The notification blocks of the name, whatever their types."""
    wanted = {
        "block_documents": {"name": {"any_": [BLOCK]}},
        "block_schemas": {"block_capabilities": {"all_": ["notify"]}},
    }
    found = client.request("POST", "/block_documents/filter", json=wanted).json()
    return sorted(UUID(one["id"]) for one in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring the automations to the server, and say what became of each.

    Returns: 0 done; 1 the server does not answer, or refuses; 2 a file is no automation.
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
            for one in apply(client, replace=options.replace):
                print(one, flush=True)
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
