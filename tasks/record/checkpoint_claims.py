"""Notice that two runs write their checkpoints to one folder, and keep them apart.

Each run with a folder outside of its own directory leaves a claim in `$MUSTER_HOME/claims`. If the
claims of two runs overlap in time, the steps that the runs reported tell whose a checkpoint is.
Runs of another `MUSTER_HOME` leave no claim here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.record.checkpoint_folder import Checkpoint
from tasks.record.disk import json_text, replace_file
from tasks.record.places import RunPlace, muster_home
from tasks.record.run_json import RunJson

#: Largest number of bytes at the end of an event log that are searched for steps.
_EVENTS_BYTES = 4 << 20
#: Clocks of a file server and of this machine may differ by this many seconds.
_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another run that wrote to the same folder at the same time."""

    place: RunPlace
    #: Time of its claim in UTC epoch seconds.
    since: float
    #: End of that run in UTC epoch seconds. Infinite while the run goes on.
    until: float

    @property
    def is_running(self) -> bool:
        return self.until == float("inf")

    @property
    def run_id(self) -> str:
        return self.place.run_id


def claim_folder(folder: str, run_id: str, clock: Callable[[], float] = time.time) -> None:
    """Note that a run writes its checkpoints to a folder, or to the files that a pattern matches.

    Args:
        folder: Absolute path or pattern.
        run_id: Id of the run. A run claims a folder once.
        clock: Returns the current time in UTC epoch seconds.

    Raises:
        OSError: The claim cannot be written.
    """
    claim = _claims_of(folder) / f"{run_id}.json"
    if claim.exists():
        return
    for parent in (claim.parent.parent, claim.parent):
        parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    replace_file(claim, json_text({"folder": folder, "run_id": run_id, "since": clock()}))


def find_rivals(folder: str, run_id: str) -> list[Rival]:
    """Return the other runs whose claims on a folder overlap with that of a run.

    Args:
        folder: Absolute path or pattern.
        run_id: Id of the run.
    """
    claims = {claim_id: since for claim_id, since in _read_claims(folder)}
    own_since = claims.pop(run_id, None)
    if own_since is None:
        return []
    own_until = _end_of(RunPlace.of(run_id))
    rivals = [
        Rival(place=RunPlace.of(other), since=since, until=_end_of(RunPlace.of(other)))
        for other, since in claims.items()
    ]
    return [rival for rival in rivals if rival.since <= own_until and own_since <= rival.until]


def why_of_rival(checkpoint: Checkpoint, own: RunPlace, rivals: Sequence[Rival]) -> str:
    """Return why a checkpoint may belong to a rival, or an empty string if it does not.

    A checkpoint belongs to the run whose reported steps are nearest to its step. If that is
    unclear, it belongs to nobody.
    """
    for rival in rivals:
        began = rival.since - _CLOCK_SLACK_S
        if not began <= checkpoint.changed_at <= rival.until + _CLOCK_SLACK_S:
            continue
        own_distance = _distance(checkpoint.step, _find_steps(own, began, rival.until))
        rival_distance = _distance(checkpoint.step, _find_steps(rival.place, began, rival.until))
        if own_distance < rival_distance:
            continue
        verb = "may belong" if own_distance == rival_distance else "belongs"
        return f"it {verb} to {rival.run_id}, which writes to the same folder"
    return ""


def _claims_of(folder: str) -> Path:
    name = hashlib.sha256(folder.encode()).hexdigest()[:16]
    return muster_home() / "claims" / name


def _read_claims(folder: str) -> Iterator[tuple[str, float]]:
    """Yield the claims on a folder: run id, and time in UTC epoch seconds."""
    claims = _claims_of(folder)
    if not claims.is_dir():
        return
    for claim in sorted(claims.glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if not RunPlace.of(claim.stem).directory.exists():
                claim.unlink()  # The run was pruned.
                continue
            yield claim.stem, float(json.loads(claim.read_text(encoding="utf-8"))["since"])


def _end_of(place: RunPlace) -> float:
    with suppress(OSError, ValueError):
        return RunJson.read(place.record).ended_at or float("inf")
    return float("inf")


def _find_steps(place: RunPlace, since: float, until: float) -> tuple[float, float] | None:
    """Return the lowest and the highest step that a run reported in a time, or None.

    The last step before that time counts, too.
    """
    before: float | None = None
    steps: list[float] = []
    for events in sorted(place.directory.glob("attempt-*/events.jsonl")):
        for at, step in _read_steps(events):
            if at < since:
                before = step
            elif at <= until:
                steps.append(step)
    steps += [before] if before is not None else []
    return (min(steps), max(steps)) if steps else None


def _read_steps(events: Path) -> Iterator[tuple[float, float]]:
    """Yield time and step of each progress event in an event log."""
    with suppress(OSError), events.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _EVENTS_BYTES))
        for line in file:
            if b'"run.progress"' in line:
                with suppress(ValueError, KeyError, TypeError):
                    event = json.loads(line)
                    yield float(event["at"]), float(event["step"])


def _distance(step: int | None, steps: tuple[float, float] | None) -> float:
    """Return the distance of a step from a range of steps. Infinite if either is unknown."""
    if step is None or steps is None:
        return float("inf")
    low, high = steps
    return max(low - step, step - high, 0.0)
