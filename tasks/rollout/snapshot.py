"""What the fleet says of itself: the answer of `GET /muster/rollout`, and whether it can go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.record.states import GroupState
from tasks.rollout.health import Health
from tasks.rollout.registry import FleetView, Registry, TrainingMetadata
from tasks.rollout.router import Router
from tasks.spec.words import commas

#: Groups whose causes are told where the fleet cannot go on.
_CAUSES = 8


def breach(view: FleetView, *, min_active: int | None, is_guarded: bool) -> str:
    """Why the fleet cannot go on, as one line; empty: it can.

    Args:
        min_active: so many groups must serve; None: one that may be recovered is enough.
        is_guarded: it is the time for them to serve: not before the first of them does, nor while
            a training step has their GPUs.
    """
    left = [group for group in view.groups if group.state is not GroupState.RETIRED]
    total, needed = len(view.groups), max(1, min_active or 0)
    if len(left) < needed:
        return f"{len(left)} of {total} engines are left, {needed} are needed: {_causes(view)}"
    serving = len(view.serving)
    if is_guarded and min_active is not None and serving < min_active:
        return f"{serving} of {total} engines serve, min_active is {min_active}: {_causes(view)}"
    return ""


def why_none(view: FleetView) -> str:
    """Why no group serves, for a client that gets no answer; empty where one does."""
    if view.entrypoints:
        return ""
    return "; ".join(
        f"ranks {commas(group.ranks)} are {_word(group.state, bool(group.unreachable))}"
        + (f" ({group.cause})" if group.cause else "")
        for group in view.groups
    )


def as_json(metadata: TrainingMetadata) -> dict[str, Any]:
    """Training metadata as JSON has it: the keys that are ranks are texts."""
    return {
        "epoch": metadata.epoch,
        "version": metadata.version,
        "mesh": [list(ranks) for ranks in metadata.mesh],
        "urls": {str(rank): url for rank, url in metadata.urls.items()},
        "weight_ranks": {str(rank): list(ranks) for rank, ranks in metadata.weight_ranks.items()},
        "epochs": {str(rank): epoch for rank, epoch in metadata.epochs.items()},
    }


def snapshot(
    registry: Registry, router: Router, health: Health, *, state: str, url: str
) -> Mapping[str, Any]:
    """The fleet at one moment, in plain data.

    Args:
        state: starting | serving | down | draining | stopping
        url: of the gateway; empty while it has none.
    """
    view = registry.view
    return {
        "epoch": view.epoch,
        "version": view.version,
        "ready": _is_ready(view),
        "state": state,
        "reason": why_none(view),
        "url": url,
        "concurrency": router.concurrency,
        "servers": [
            {
                "rank": slot.rank,
                "group": slot.engine,
                "node": slot.node,
                "host": slot.host,
                "port": slot.port,
                "url": slot.url,
                "entrypoint": slot.is_entrypoint,
                "state": view.groups[slot.engine].state.value,
                "reachable": slot.rank not in view.groups[slot.engine].unreachable,
                "epoch": view.groups[slot.engine].epoch,
                "version": view.groups[slot.engine].version,
                "outstanding": router.outstanding_of(slot.rank, view.groups[slot.engine].epoch),
                "misses": health.misses_of(slot.rank),
                "cause": view.groups[slot.engine].cause,
            }
            for slot in view.servers.values()
        ],
        "groups": [
            {
                "ranks": list(group.ranks),
                "state": group.state.value,
                "epoch": group.epoch,
                "version": group.version,
                "cause": group.cause,
                "recoveries": group.recoveries,
            }
            for group in view.groups
        ],
        "training": as_json(registry.training_metadata()),
    }


def _is_ready(view: FleetView) -> bool:
    """Every group serves that is not retired."""
    left = [group for group in view.groups if group.state is not GroupState.RETIRED]
    return bool(left) and all(group.is_serving and not group.unreachable for group in left)


def _causes(view: FleetView) -> str:
    named = [f"ranks {commas(one.ranks)}: {one.cause}" for one in view.groups if one.cause]
    more = f"; and {len(named) - _CAUSES} more" if len(named) > _CAUSES else ""
    return "; ".join(named[:_CAUSES]) + more


def _word(state: GroupState, is_unreachable: bool) -> str:
    return f"{state.value} and cannot be reached" if is_unreachable else state.value
