"""Generate the documentation of run states and of failure kinds, from the code."""

from __future__ import annotations

from tasks.record.causes import RULES
from tasks.record.states import LEGAL_TRANSITIONS, RunState
from tasks.spec.failure_kinds import DEFAULT_ATTEMPTS, REMEDIES, REQUEUED, FailureKind
from tasks.spec.formatting import markdown_table


def moves() -> str:
    """Return a diagram of the run states and the legal transitions between them."""
    lines = [f"    [*] --> {RunState.QUEUED.value}"]
    for state in RunState:
        next_states = sorted(LEGAL_TRANSITIONS[state], key=list(RunState).index)
        lines += [f"    {state.value} --> {next_state.value}" for next_state in next_states]
    lines += [f"    {state.value} --> [*]" for state in RunState if state.is_final]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def kinds() -> str:
    """Return a table of the failure kinds, with their retries and remedies.

    The table has the default retries and the retries if the spec lists the kind.
    """
    rows = [
        (f"[`{kind.value}`](#{kind.value.lower()})", *_describe_retries(kind), REMEDIES[kind])
        for kind in FailureKind
    ]
    return markdown_table(("kind", "by default", "where `retry` lists it", "what you do"), rows)


def rules() -> str:
    """Return a table of the rules that find the failure kind in a log, in the order of use."""
    rows = [
        (f"`{rule.id}`", f"`{rule.kind.value}`", rule.role.name.lower(), rule.hint, rule.seen_in)
        for rule in RULES
    ]
    return markdown_table(("rule", "kind", "role", "hint", "seen in"), rows)


def _describe_retries(kind: FailureKind) -> tuple[str, str]:
    """Return two descriptions of the retries after a failure of a kind.

    The first is for a spec without the kind under "retry", the second for a spec that lists it.
    """
    if kind in DEFAULT_ATTEMPTS:
        return f"requeued, {DEFAULT_ATTEMPTS[kind] - 1} times", "`attempts` counts the tries in all"
    if kind in REQUEUED:
        return "requeued, without limit", "`attempts` caps it"
    if kind is FailureKind.INFEASIBLE:
        return "the run has failed", "nothing: no attempt was made"
    return "the run has failed", "retried, `attempts` in all"
