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

#: Words for the path of a hang report in advice to the user. Before the advice is shown, the words
#: are replaced by the path of the failed component's hang report.
HANG_REPORT = "COMPONENT.hang.txt next to the component's log"


class NodeBlame(StrEnum):
    """Condition under which the next attempt of a run avoids the nodes of a failed attempt."""

    #: A node is never the cause of this kind of failure.
    NEVER = "never"
    #: The nodes that the failure names may be the cause. If the failure names no node, every node
    #: of the attempt may be the cause.
    ALWAYS = "always"
    #: The nodes of the attempt may be the cause if the failure names a rank of the training.
    IF_RANK_IS_NAMED = "if the failure names a rank"


class CheckpointBlame(StrEnum):
    """Condition under which the checkpoint of an attempt may be the cause of its failure."""

    #: A checkpoint is never the cause of this kind of failure.
    NEVER = "never"
    #: The checkpoint may be the cause if the attempt made no progress: the attempt may have hung
    #: while it loaded the checkpoint.
    IF_HUNG = "if the attempt hung"
    #: The checkpoint may be the cause if the trainer ended with an error: a damaged checkpoint can
    #: cause such an error.
    IF_DIED = "if the trainer died"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProperties:
    """All facts about a kind of failure: one table of `failure_kinds.toml`."""

    #: Events and log texts by which Muster recognises this kind of failure, in Markdown for the
    #: documents.
    cause: str
    #: Reaction of Muster, in Markdown sentences.
    reaction: str
    #: Advice for the user, in Markdown sentences in the imperative, for the documents.
    action: str
    #: Advice for the user, in plain text. Muster shows it if the failure itself has no hint.
    remedy: str
    #: True if a failure of this kind is not caused by the run, so that the run returns to the queue
    #: for another attempt. False if the run fails, unless the user lists the kind under `retry` in
    #: the run spec.
    is_requeued: bool = False
    #: False if the run fails before its first attempt, so that no attempt can be repeated.
    can_be_retried: bool = True
    #: True if the attempt ends before its components have run. In that case, the delay before the
    #: next attempt depends only on the number of consecutive failures of this kind.
    ends_before_components_run: bool = False
    #: Largest number of attempts of a requeued run, including the first, if the run spec sets no
    #: number. None if there is no limit. There is a limit for each kind whose failed attempts hold
    #: the GPUs of the run for some time.
    attempts: int | None = None
    #: Seconds between an attempt with this kind of failure and the first retry, if the run spec
    #: sets no delay. None if the common default delay applies, as for most kinds of failure. A
    #: short delay is enough if no GPU must become free before the retry.
    delay_s: float | None = None
    blames_node: NodeBlame = NodeBlame.NEVER
    blames_checkpoint: CheckpointBlame = CheckpointBlame.NEVER
    #: Names of errors of the operating system, such as `ENOSPC`. A failure has this kind if one of
    #: these errors prevented the start of a component's program.
    errnos: tuple[str, ...] = ()


class FailureKind(StrEnum):
    """Kind of the cause that made an attempt of a run fail. Each kind needs another reaction.

    By default, the run fails. The user can list a kind of failure under `retry` in the run spec;
    Muster then starts another attempt. `failure_kinds.toml` has a table for each kind, which
    explains the kind.

    `COLLECTIVE_TIMEOUT` and a SIGKILL without further evidence are symptoms. They count only if the
    logs show no other cause.
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
        """The facts about this kind of failure, from `failure_kinds.toml`."""
        return _PROPERTIES[self]


def find_kind_of_start_error(error_number: int | None) -> FailureKind:
    """Return the kind of failure of a component whose program could not be started.

    Args:
        error_number: Error number of the operating system. 0 for an error that Python itself
            raises, such as a NUL character in an argument. None if the error has no number.
    """
    if error_number is None:
        return FailureKind.UNKNOWN
    if error_number == 0:
        return FailureKind.USER_ERROR
    return _KIND_OF_START_ERROR.get(error_number, FailureKind.UNKNOWN)


def _read_table() -> Mapping[FailureKind, KindProperties]:
    """Return the properties of all kinds of failure, from `failure_kinds.toml`.

    Raises:
        KeyError: A kind of failure has no table.
        TypeError: A table has an unknown key, or lacks a key.
        ValueError: The name of a table is not a kind of failure. Also raised if a value is not in
            the enum of its key.
    """
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    properties = {}
    for name, table in tables.items():
        properties[FailureKind(name)] = make_properties(table)
    return {kind: properties[kind] for kind in FailureKind}


def make_properties(table: Mapping[str, Any]) -> KindProperties:
    """Return the properties of a kind from its TOML table.

    Raises:
        TypeError: The table has an unknown key, or lacks a key.
        ValueError: A value is not in the enum of its key.
    """
    values = {
        **table,
        "blames_node": NodeBlame(table.get("blames_node", NodeBlame.NEVER)),
        "blames_checkpoint": CheckpointBlame(table.get("blames_checkpoint", CheckpointBlame.NEVER)),
        "errnos": tuple(table.get("errnos", ())),
    }
    return KindProperties(**values)


_PROPERTIES = _read_table()
#: Kind of failure of a program that could not be started, by the error number.
_KIND_OF_START_ERROR = {
    getattr(errno, name): kind
    for kind, properties in _PROPERTIES.items()
    for name in properties.errnos
}
#: Kinds of failure after which the run returns to the queue, even if `retry` does not list them.
REQUEUED = frozenset(kind for kind in FailureKind if kind.properties.is_requeued)


def describe_requeues(kind: FailureKind) -> str:
    """Return the number of requeues after failures of a kind: `without limit`, `5 times`."""
    attempts = kind.properties.attempts
    return "without limit" if attempts is None else f"{attempts - 1} times"


def list_requeued_kinds() -> str:
    """Return text that lists the kinds of failure after which a run is requeued.

    The text contains the name of each kind and its number of requeues.
    """
    return ", ".join(
        f"{kind} {describe_requeues(kind)}" for kind in FailureKind if kind in REQUEUED
    )


def list_default_attempts() -> str:
    """Return text that lists the kinds of failure after which a run is requeued.

    The text contains the name of each kind and its largest number of attempts.
    """
    return ", ".join(
        f"{kind} ({kind.properties.attempts or 'no limit'})"
        for kind in FailureKind
        if kind in REQUEUED
    )


def list_default_delays() -> str:
    """Return text that lists the kinds of failure with a special delay before a retry.

    The text contains the name of each kind and its default delay in seconds.
    """
    return ", ".join(
        f"{kind} ({kind.properties.delay_s:g})" for kind in FailureKind if kind.properties.delay_s
    )
