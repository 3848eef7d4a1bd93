"""The kinds of failure of a run, and the properties of each kind.

The table `failure_kinds.toml` has all facts about a kind: its cause, the advice to the user, and
the rules for retries. Other modules read these facts with `FailureKind.properties`. The page
docs/states-and-failures.md is generated from the same table.
"""

from __future__ import annotations

import errno
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

#: Text that stands for the path of a hang report in advice to the user. Before the advice is shown,
#: this text is replaced by the path of the failed component's hang report.
HANG_REPORT = "COMPONENT.hang.txt next to the component's log"


class NodeBlame(StrEnum):
    """Condition under which the next attempt of a run avoids the nodes of a failed attempt."""

    #: A node never causes a failure of this kind.
    NEVER = "never"
    #: The nodes in the failure's message may be the cause. If the message contains no node, all
    #: nodes of the attempt may be the cause.
    ALWAYS = "always"
    #: The nodes of the attempt may be the cause if the failure's message contains a rank of the
    #: training.
    IF_RANK_IS_NAMED = "if the failure names a rank"


class CheckpointBlame(StrEnum):
    """Condition under which the loaded checkpoint may have caused a failure."""

    #: A checkpoint never causes a failure of this kind.
    NEVER = "never"
    #: The checkpoint may be the cause if the attempt stopped responding, perhaps while it loaded
    #: the checkpoint.
    IF_HUNG = "if the attempt hung"
    #: The checkpoint may have caused the failure if the trainer ended with an error.
    IF_DIED = "if the trainer died"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProperties:
    """All properties of a kind of failure. Each table of `failure_kinds.toml` contains one kind."""

    #: Events and log lines that show this kind of failure, in Markdown for the documents.
    cause: str
    #: Description of what Muster does after the failure, in Markdown sentences.
    reaction: str
    #: Advice for the user, in Markdown for the documents.
    action: str
    #: Advice for the user, in plain text. Shown if the failure itself has no advice.
    remedy: str
    #: True if the run itself does not cause this kind of failure. The run then returns to the queue
    #: for another attempt. If False, the run fails, unless the run spec lists the kind under
    #: `retry`.
    is_requeued: bool = False
    #: False if the run fails before its first attempt, so that there is no attempt to repeat.
    can_be_retried: bool = True
    #: True if the attempt ends before its components start. The delay before the next attempt then
    #: depends only on the number of consecutive failures of this kind.
    ends_before_components_run: bool = False
    #: Largest number of attempts of a requeued run, including the first, if the run spec contains
    #: no number. None for no limit. A limit is useful if each failed attempt occupies the GPUs for
    #: some time.
    attempts: int | None = None
    #: Delay in seconds before the first retry, if the run spec contains no delay. None for the
    #: usual delay. A short delay is sufficient if the retry does not have to wait for a GPU.
    delay_s: float | None = None
    blames_node: NodeBlame = NodeBlame.NEVER
    blames_checkpoint: CheckpointBlame = CheckpointBlame.NEVER
    #: Names of operating system errors at the start of a component's program, such as `ENOSPC`.
    #: These errors have the kind of failure that this object describes.
    errnos: tuple[str, ...] = ()


class FailureKind(StrEnum):
    """Kind of failure of an attempt. `failure_kinds.toml` explains the kinds.

    After some kinds of failure, the run returns to the queue. After the other kinds, the run fails,
    unless the user lists the kind under `retry` in the run spec.

    `COLLECTIVE_TIMEOUT`, and a SIGKILL of unknown origin, are symptoms. These two kinds are used
    only if the logs show no other cause.
    """

    INSUFFICIENT_RESOURCES = "INSUFFICIENT_RESOURCES"
    START_TIMEOUT = "START_TIMEOUT"
    INFEASIBLE = "INFEASIBLE"
    NOT_READY = "NOT_READY"
    GPU_HARDWARE = "GPU_HARDWARE"
    NODE_LOST = "NODE_LOST"
    HOST_OOM = "HOST_OOM"
    CUDA_OOM = "CUDA_OOM"
    STORAGE = "STORAGE"
    NETWORK = "NETWORK"
    PORT_CONFLICT = "PORT_CONFLICT"
    COLLECTIVE_TIMEOUT = "COLLECTIVE_TIMEOUT"
    STALLED = "STALLED"
    ALARM = "ALARM"
    TIME_LIMIT = "TIME_LIMIT"
    FLEET_LOST = "FLEET_LOST"
    USER_ERROR = "USER_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    LOST_CONTACT = "LOST_CONTACT"
    UNKNOWN = "UNKNOWN"

    @property
    def properties(self) -> KindProperties:
        """The properties of this kind of failure, from `failure_kinds.toml`."""
        return _PROPERTIES[self]


def find_kind_of_start_error(error_number: int | None) -> FailureKind:
    """Return the kind of failure of a component whose program could not be started.

    Args:
        error_number: Error number of the operating system. 0 for an error of Python itself, such as
            a NUL character in an argument. None if the error has no number.
    """
    if error_number is None:
        return FailureKind.UNKNOWN
    if error_number == 0:
        return FailureKind.USER_ERROR
    return _KIND_OF_START_ERROR.get(error_number, FailureKind.UNKNOWN)


def _read_table() -> Mapping[FailureKind, KindProperties]:
    """Return a mapping from all kinds of failure to their properties in `failure_kinds.toml`.

    Raises:
        KeyError: A kind of failure has no table.
        TypeError: A table has an unknown key, or lacks a key.
        ValueError: The name of a table is not a kind of failure, or the value of a key is not
            allowed.
    """
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    properties = {}
    for name, table in tables.items():
        properties[FailureKind(name)] = make_properties(table)
    return {kind: properties[kind] for kind in FailureKind}


def make_properties(table: Mapping[str, Any]) -> KindProperties:
    """Return the properties of a kind of failure from its TOML table.

    Raises:
        TypeError: The table has an unknown key, or lacks a key.
        ValueError: The value of a key is not allowed.
    """
    values = {
        **table,
        "blames_node": NodeBlame(table.get("blames_node", NodeBlame.NEVER)),
        "blames_checkpoint": CheckpointBlame(table.get("blames_checkpoint", CheckpointBlame.NEVER)),
        "errnos": tuple(table.get("errnos", ())),
    }
    return KindProperties(**values)


_PROPERTIES = _read_table()
#: Mapping from an error number of the operating system to a kind of failure. The error occurs at
#: the start of a component's program.
_KIND_OF_START_ERROR = {
    getattr(errno, name): kind
    for kind, properties in _PROPERTIES.items()
    for name in properties.errnos
}
#: Kinds of failure after which the run returns to the queue, even without the spec key `retry`.
REQUEUED = frozenset(kind for kind in FailureKind if kind.properties.is_requeued)


def describe_requeues(kind: FailureKind) -> str:
    """Return how often a run is requeued after failures of a kind: `without limit` or `5 times`."""
    attempts = kind.properties.attempts
    return "without limit" if attempts is None else f"{attempts - 1} times"


def list_requeued_kinds() -> str:
    """Return a text about the kinds of failure after which a run is requeued.

    For each kind, the text says how often a run can be requeued.
    """
    return ", ".join(
        f"{kind} {describe_requeues(kind)}" for kind in FailureKind if kind in REQUEUED
    )


def list_default_attempts() -> str:
    """Return a text about the kinds of failure after which a run is requeued.

    The text lists each kind with its largest number of attempts.
    """
    return ", ".join(
        f"{kind} ({kind.properties.attempts or 'no limit'})"
        for kind in FailureKind
        if kind in REQUEUED
    )


def list_default_delays() -> str:
    """Return a text about the kinds of failure that have a special delay before a retry.

    The text lists each kind with its default delay in seconds.
    """
    return ", ".join(
        f"{kind} ({kind.properties.delay_s:g})" for kind in FailureKind if kind.properties.delay_s
    )
