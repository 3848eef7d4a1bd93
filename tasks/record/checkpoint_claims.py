"""Find out which run wrote a checkpoint if two runs write their checkpoints to the same folder.

If the folder of a run's checkpoints is outside of the run's own directory, the run creates a small
file in `$MUSTER_HOME/claims`, called a claim. The claim contains the folder, the id of the run and
the time. If two runs have claimed a folder and were active at the same time, the training steps
that they reported decide to which run a checkpoint belongs. Runs of another `MUSTER_HOME` are not
taken into account.
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

#: The search for training steps reads at most this number of bytes at the end of an event log.
_EVENTS_BYTES = 4 << 20
#: Largest assumed difference between the clocks of a file server and of this machine, in seconds.
_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another run that writes its checkpoints to the same folder at the same time as this run."""

    place: RunPlace
    #: Time at which the other run began to use the folder, in UTC epoch seconds.
    since: float
    #: Time at which the run in `place` ended, in UTC epoch seconds. Infinite if this run is still
    #: active.
    until: float

    @property
    def is_running(self) -> bool:
        return self.until == float("inf")

    @property
    def run_id(self) -> str:
        return self.place.run_id


def claim_folder(folder: str, run_id: str, clock: Callable[[], float] = time.time) -> None:
    """Create a file which records that a run writes its checkpoints to a folder.

    An existing file for the same run and folder is not changed.

    Args:
        folder: Absolute path of the folder, or a pattern that matches the checkpoints.
        run_id: Id of the run.
        clock: Function that returns the current time in UTC epoch seconds.

    Raises:
        OSError: The file cannot be written.
    """
    claim = _claims_of(folder) / f"{run_id}.json"
    if claim.exists():
        return
    for parent in (claim.parent.parent, claim.parent):
        parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    replace_file(claim, json_text({"folder": folder, "run_id": run_id, "since": clock()}))


def find_rivals(folder: str, run_id: str) -> list[Rival]:
    """Return the other runs that wrote checkpoints to a folder at the same time as a certain run.

    Args:
        folder: Absolute path of the folder, or a pattern that matches the checkpoints.
        run_id: Id of the run. If `claim_folder` was not called for this run and this folder, the
            result is empty.
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
    """Return why a checkpoint may belong to another run, or an empty string if it belongs to this
    run.

    A checkpoint belongs to the run whose reported steps are nearest to the step of the checkpoint.

    Args:
        checkpoint: The checkpoint.
        own: Directory of this run.
        rivals: Other runs that wrote checkpoints to the same folder.

    Returns:
        A text for the user.
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
        return (
            f"the checkpoint {verb} to the run {rival.run_id}, which writes its checkpoints to the "
            "same folder"
        )
    return ""


def _claims_of(folder: str) -> Path:
    name = hashlib.sha256(folder.encode()).hexdigest()[:16]
    return muster_home() / "claims" / name


def _read_claims(folder: str) -> Iterator[tuple[str, float]]:
    """Yield the id of each run that uses a folder, and the time at which the run began to use it.

    The time is in UTC epoch seconds.
    """
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
    """Return the lowest and the highest training step that a run reported in a period of time.

    The last step that was reported before the period counts as well.

    Args:
        place: Directory of the run.
        since: Start of the period in UTC epoch seconds.
        until: End of the period in UTC epoch seconds.

    Returns:
        The two steps, or None if the run reported no step.
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
    """Yield time (UTC epoch seconds) and training step of each progress event in an event log."""
    with suppress(OSError), events.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _EVENTS_BYTES))
        for line in file:
            if b'"run.progress"' in line:
                with suppress(ValueError, KeyError, TypeError):
                    event = json.loads(line)
                    yield float(event["at"]), float(event["step"])


def _distance(step: int | None, steps: tuple[float, float] | None) -> float:
    """Return the distance of a step from a range of steps, or 0 if the step is in the range.

    The distance is infinite if the step or the range is None.
    """
    if step is None or steps is None:
        return float("inf")
    low, high = steps
    return max(low - step, step - high, 0.0)
