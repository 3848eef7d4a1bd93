"""The block at the end of a run: how it ended, why, and where to go on reading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.show.lines import how_ended
from tasks.show.pace import clock_text
from tasks.show.screen import Line
from tasks.spec.failure_kinds import REMEDIES, FailureKind

_TAIL_LINES = 12
_STYLES = {"completed": "bold green", "failed": "bold red", "crashed": "bold red"}
_LABEL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended, as far as this process knows."""

    #: The run's or its flow run's: `completed`, `failed`, `cancelled`, `crashed`.
    state: str
    message: str
    #: None where it has none: it never began.
    record: Path | None = None
    #: Of the flow run in the UI; empty where its server ends with this process.
    page: str = ""


def end_block(ending: Ending) -> Iterator[Line]:
    """The block, after an empty line."""
    content = _content(ending.record)
    attempts = content.get("attempts") or []
    failure = attempts[-1]["failure"] if attempts and ending.state != "completed" else None
    left = "; nothing is left running" if ending.state == "cancelled" else ""
    yield Line(text="")
    # The message of the flow run says where to look, too, which stands below here.
    message = ending.message
    if failure and ending.state == "failed":
        message = f"{failure['kind']}: {failure['message']}"
    yield Line(
        text=f"{ending.state}: {message}{left}",
        style=_STYLES.get(ending.state, "bold yellow"),
    )
    if content:
        yield _field("run", str(content["run_id"]))
        yield _field("took", _took(content, attempts))
    if ending.state == "failed":
        yield from _cause(ending, attempts, failure)
    if ending.record is not None:
        yield _field("record", str(ending.record))
    if ending.page:
        yield _field("page", ending.page)


def _cause(
    ending: Ending, attempts: list[Mapping[str, Any]], failure: Mapping[str, Any] | None
) -> Iterator[Line]:
    """What failed first, its last words, and what to do."""
    kind = failure["kind"] if failure else ending.message.partition(":")[0]
    if failure and failure["component"]:
        yield _field("first", f"{failure['component']}, {_how_failed(failure)}")
    if failure and failure["hint"]:
        yield _field("hint", failure["hint"])
    if kind in FailureKind.__members__:
        yield _field("to do", REMEDIES[FailureKind(kind)])
    if failure and failure["component"] and ending.record is not None:
        folder = ending.record.parent / f"attempt-{attempts[-1]['number']:02d}"
        log = folder / f"{failure['component']}.log"
        yield _field("log", str(log))
        hang = log.with_suffix(".hang.txt")
        if hang.exists():
            yield _field("hung in", str(hang))
        if tail := failure["log_tail"].splitlines()[-_TAIL_LINES:]:
            yield _field("", "its last lines:")
            for line in tail:
                yield _field("", f"| {line}")


def _how_failed(failure: Mapping[str, Any]) -> str:
    """`RUNTIME_ERROR, SIGSEGV`; of one that had not ended by itself the kind alone."""
    has_ended = failure["signal"] is not None or failure["exit_code"] is not None
    return f"{failure['kind']}, {how_ended(failure)}" if has_ended else str(failure["kind"])


def _took(content: Mapping[str, Any], attempts: list[Mapping[str, Any]]) -> str:
    """`0:21, 2 attempts (NODE_LOST, completed)`."""
    began, ended = content["started_at"], content["ended_at"]
    took = clock_text(ended - began) if ended is not None else "not ended"
    if len(attempts) < 2:
        return f"{took}, {'1 attempt' if attempts else 'no attempt'}"
    ends = [(one["failure"] or {}).get("kind") or one["state"] for one in attempts]
    shown = ends if len(ends) <= 6 else [*ends[:3], f"{len(ends) - 5} more", *ends[-2:]]
    return f"{took}, {len(attempts)} attempts ({', '.join(shown)})"


def _field(name: str, text: str) -> Line:
    return Line(text=f"  {name:<{_LABEL}}{text}")


def _content(record: Path | None) -> Mapping[str, Any]:
    """Of `run.json`; nothing where it can't be read: what is known otherwise is shown even so."""
    if record is None:
        return {}
    try:
        content: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content
