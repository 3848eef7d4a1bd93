"""What a run can be in, and what it can die of, from the code that decides it."""

from __future__ import annotations

from tasks.record.causes import RULES
from tasks.record.states import LEGAL_TRANSITIONS, RunState
from tasks.spec.failure_kinds import DEFAULT_ATTEMPTS, REMEDIES, REQUEUED, FailureKind
from tasks.spec.formatting import markdown_table


def moves() -> str:
    """The states and the legal moves between them, as a diagram."""
    lines = [f"    [*] --> {RunState.QUEUED.value}"]
    for before in RunState:
        after = sorted(LEGAL_TRANSITIONS[before], key=list(RunState).index)
        lines += [f"    {before.value} --> {one.value}" for one in after]
    lines += [f"    {state.value} --> [*]" for state in RunState if state.is_final]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def kinds() -> str:
    """What follows each kind of failure where the spec says nothing."""
    rows = [
        (f"[`{kind.value}`](#{kind.value.lower()})", *_what_follows(kind), REMEDIES[kind])
        for kind in FailureKind
    ]
    return markdown_table(("kind", "by default", "where `retry` lists it", "what you do"), rows)


def rules() -> str:
    """The texts by which a log tells a kind, in the order in which they are looked for."""
    rows = [
        (f"`{one.id}`", f"`{one.kind.value}`", one.role.name.lower(), one.hint, one.seen_in)
        for one in RULES
    ]
    return markdown_table(("rule", "kind", "role", "hint", "seen in"), rows)


def _what_follows(kind: FailureKind) -> tuple[str, str]:
    if kind in DEFAULT_ATTEMPTS:
        return f"requeued, {DEFAULT_ATTEMPTS[kind] - 1} times", "`attempts` counts the tries in all"
    if kind in REQUEUED:
        return "requeued, without limit", "`attempts` caps it"
    if kind is FailureKind.INFEASIBLE:
        return "the run has failed", "nothing: no attempt was made"
    return "the run has failed", "tried again, `attempts` in all"
