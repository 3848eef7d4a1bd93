"""Rules by which causes of failure are recognised: what a rule is, and the whole table.

The rules themselves are data: of the machines in `rules_machines`, of the programs in
`rules_programs`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from tasks.spec.failure_kinds import FailureKind


class Role(IntEnum):
    """What a text tells of the order of events; the lower one is believed, wherever it stands."""

    #: Nothing else brings it about: memory or a disk ran out, a device broke, GPUs were missing.
    CAUSE = 0
    #: An error that has a name, though it may follow from something else.
    ERROR = 1
    #: Any error that a traceback ends with.
    EXCEPTION = 2
    #: It follows from the death or the silence of something else.
    CASCADE = 3
    #: It only says that something else has failed.
    WRAPPER = 4
    #: All that there is to say where nothing else was recognised.
    LAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One text and what it means."""

    id: str
    kind: FailureKind
    role: Role
    #: Searched in what each line says, without the marks of time, level and process before it.
    #: It must never cross lines, and take time in proportion to a line's length.
    pattern: re.Pattern[str]
    #: What the user can do.
    hint: str = ""
    #: Where the text comes from: a file of a project, an issue, a page of ours.
    source: str
    #: The version whose text was seen; "any" where it has been the same for many years.
    seen_in: str
    #: Believed even in a line that is marked as a warning: Ray and the kernel warn of deaths.
    at_any_level: bool = False


def rule(
    id: str,
    kind: FailureKind,
    role: Role,
    pattern: str,
    *,
    source: str,
    seen_in: str,
    hint: str = "",
    at_any_level: bool = False,
) -> Rule:
    """The rule, its pattern compiled; `^` begins a line."""
    return Rule(
        id=id,
        kind=kind,
        role=role,
        pattern=re.compile(pattern, re.MULTILINE),
        hint=hint,
        source=source,
        seen_in=seen_in,
        at_any_level=at_any_level,
    )
