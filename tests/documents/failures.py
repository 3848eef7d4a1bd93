"""Generate the documentation of run states and of failure kinds, from the code."""

from __future__ import annotations

from tasks.record.causes import RULES
from tasks.record.states import LEGAL_TRANSITIONS, RunState
from tasks.show.markdown import markdown_table
from tasks.spec.failure_kinds import (
    REQUEUED,
    CheckpointBlame,
    FailureKind,
    NodeBlame,
    describe_requeues,
)

#: Sentences in the documentation of failure kinds. The sentences say which nodes the next attempt
#: avoids.
_BLAMED_NODES = {
    NodeBlame.NEVER: "",
    NodeBlame.ALWAYS: "If other nodes are free, the next attempt avoids the nodes that the failure "
    "names. If the failure names no node, the next attempt avoids all nodes of the failed attempt.",
    NodeBlame.IF_RANK_IS_NAMED: "If the failure names a rank, the next attempt avoids the nodes of "
    "the failed attempt.",
}
#: Sentences in the documentation of failure kinds. The sentences say when the checkpoint of the
#: attempt may be the cause of the failure.
_BLAMED_CHECKPOINTS = {
    CheckpointBlame.NEVER: "",
    CheckpointBlame.IF_HUNG: "If the attempt hung before its first step, the checkpoint that it "
    "loaded may be the cause. In this case, the next attempt [starts from an earlier "
    "checkpoint](resume.md).",
    CheckpointBlame.IF_DIED: "If the trainer ended before its first step, the checkpoint that it "
    "loaded may be the cause. In this case, the next attempt [starts from an earlier "
    "checkpoint](resume.md).",
}


def draw_transitions() -> str:
    """Return a diagram of the run states and the legal transitions between them."""
    lines = [f"    [*] --> {RunState.QUEUED.value}"]
    for state in RunState:
        next_states = sorted(LEGAL_TRANSITIONS[state], key=list(RunState).index)
        lines += [f"    {state.value} --> {next_state.value}" for next_state in next_states]
    lines += [f"    {state.value} --> [*]" for state in RunState if state.is_final]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def list_failure_kinds() -> str:
    """Return a Markdown table of the failure kinds, with the retries and the remedy of each kind.

    Two columns describe the retries: one for specs that list the kind under `retry`, and one for
    all other specs.
    """
    rows = [
        (
            f"[`{kind.value}`](#{kind.value.lower()})",
            *_describe_retries(kind),
            kind.properties.remedy,
        )
        for kind in FailureKind
    ]
    return markdown_table(("kind", "by default", "where `retry` lists it", "what you do"), rows)


def sections() -> str:
    """Return one section of the documentation for each failure kind.

    A section has the cause of the failure, Muster's reaction and the user's action.
    """
    return "\n\n".join(map(_describe_kind, FailureKind))


def _describe_kind(kind: FailureKind) -> str:
    """Return the section of the documentation about a failure kind."""
    properties = kind.properties
    reaction = properties.reaction
    if kind in REQUEUED and properties.attempts is not None:
        reaction += (
            f" By default, the run returns to the queue {describe_requeues(kind)}. At the next "
            "failure of this kind, the run fails."
        )
    if properties.delay_s is not None:
        reaction += (
            f" The delay before the first retry is about {properties.delay_s:g} s, and doubles "
            "with each further retry."
        )
    items = [
        f"**Cause of the failure `{kind}`**: {properties.cause}",
        f"**Reaction of Muster to `{kind}`**: {reaction}",
        f"**Your next step after `{kind}`**: {properties.action}",
    ]
    nodes = _BLAMED_NODES[properties.blames_node]
    if nodes:
        items.append(f"**Nodes after `{kind}`**: {nodes}")
    checkpoint = _BLAMED_CHECKPOINTS[properties.blames_checkpoint]
    if checkpoint:
        items.append(f"**Checkpoint after `{kind}`**: {checkpoint}")
    return "\n\n".join([f"### {kind}", *("- " + item for item in items)])


def list_rules() -> str:
    """Return a table of the rules that derive the failure kind from a log, in the order of use."""
    rows = [
        (f"`{rule.id}`", f"`{rule.kind.value}`", rule.role.name.lower(), rule.hint, rule.seen_in)
        for rule in RULES
    ]
    return markdown_table(("rule", "kind", "role", "hint", "seen in"), rows)


def _describe_retries(kind: FailureKind) -> tuple[str, str]:
    """Return two descriptions of the retries after a failure of this kind.

    The first description is for specs that do not list the kind under `retry`. The second
    description is for specs that list the kind.
    """
    if not kind.properties.can_be_retried:
        return "the run fails", "nothing: no attempt was made"
    if kind not in REQUEUED:
        return "the run fails", "retried; `attempts` limits the tries"
    if kind.properties.attempts is None:
        return f"requeued {describe_requeues(kind)}", "`attempts` limits the tries"
    return f"requeued {describe_requeues(kind)}", "`attempts` limits the tries"
