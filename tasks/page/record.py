"""The record of a run on its page, so that whoever can't see its host can read it, and another host
can go on with it."""

from __future__ import annotations

import json
from typing import Any

from tasks.page.markdown import block
from tasks.page.view import RunView, Shown

#: Of earlier attempts the record keeps no lines of logs: hundreds of requeues shall fit.
_WITH_TAILS = 10


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
    """The record that such an artifact holds; None where it holds none."""
    _, _, rest = data.partition("\n")
    try:
        content = json.loads(rest.rpartition("\n")[0])
        content["attempts"][-1:]
    except (ValueError, KeyError, TypeError):
        return None
    return content if isinstance(content, dict) else None
