"""The record of a run on its page, so that whoever can't see its host can read it, and another host
can go on with it."""

from __future__ import annotations

import json
from typing import Any

from tasks.record.states import RunState
from tasks.show.markdown import block
from tasks.show.view import RunView, Shown

#: Of earlier attempts the record keeps no lines of logs: hundreds of requeues shall fit.
_WITH_TAILS = 10
#: What each attempt must have.
_OF_ATTEMPTS = {
    *("number", "state", "started_at", "ended_at", "failure"),
    *("components", "ray", "ports", "resume_from", "decision"),
}


def record_of(view: RunView) -> Shown:
    """What `run.json` says."""
    content = json.loads(json.dumps(view.record))
    for attempt in content["attempts"][:-_WITH_TAILS]:
        if attempt["failure"]:
            attempt["failure"]["log_tail"] = ""
    count = len(content["attempts"])
    said = f"run.json: {content['state']}, {count} attempt{'' if count == 1 else 's'}"
    return Shown(headline=said, data=block(json.dumps(content, indent=2)))


def record_read(data: str) -> dict[str, Any] | None:
    """The record that such an artifact holds; None where it holds none that can be gone on with.

    Anybody can write an artifact, and a secret that is masked in it may be a word of the record's.
    """
    _, _, rest = data.partition("\n")
    try:
        content = json.loads(rest.rpartition("\n")[0])
        RunState(content["state"])
        attempts = content["attempts"]
        numbers = [attempt["number"] for attempt in attempts if attempt.keys() >= _OF_ATTEMPTS]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if numbers == [*range(1, len(attempts) + 1)] else None
