"""Results of processes and attempts, in types that all layers share.

- `Exit`: the end of a process
- `Failure`: the cause of a failed attempt
- `Verdict`: the result of an attempt
- `GiveUpReason`: the reason for ending a component that is still alive
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.formatting import join_commas


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a process: its exit code or signal, and the time of the end."""

    #: Exit code, or None if a signal ended the process or the status is unknown.
    exit_code: int | None
    #: Number of the signal that ended the process, or None.
    signal: int | None
    #: Time at which the parent process noticed that the process had ended, in seconds of
    #: CLOCK_MONOTONIC. All processes of a machine share this clock.
    at_monotonic_s: float
    #: Text that explains an unusual or unknown exit status, or an empty string.
    note: str = ""

    @staticmethod
    def from_return_code(code: int | None, at_monotonic_s: float, note: str = "") -> Exit:
        """Return the `Exit` for a return code of the module `subprocess`.

        Args:
            code: The exit code, the negative number of a signal, or None if unknown.
            at_monotonic_s: Time of the end, in seconds of CLOCK_MONOTONIC.
            note: Text that explains an unusual or unknown exit status.
        """
        is_signal = code is not None and code < 0
        return Exit(
            exit_code=None if is_signal else code,
            signal=-code if is_signal and code is not None else None,
            at_monotonic_s=at_monotonic_s,
            note=note,
        )

    @property
    def is_zero(self) -> bool:
        return self.exit_code == 0

    @property
    def signal_name(self) -> str | None:
        return signal_name(self.signal) if self.signal is not None else None

    def __str__(self) -> str:
        if self.signal is not None:
            text = f"killed by {signal_name(self.signal)}"
        elif self.exit_code is not None:
            text = f"exit code {self.exit_code}"
        else:
            text = "exit status unknown"
        return f"{text}: {self.note}" if self.note else text


def signal_name(signum: int) -> str:
    """Return the name of a signal, such as `SIGSEGV`. An unnamed signal gives `signal NUMBER`."""
    try:
        return signals.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Recorded(BaseModel):
    """Base class of the objects in `run.json`.

    The JSON keys have the order of the fields. Unknown keys, which another version of Muster has
    written, are kept.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    #: Names of the fields that are left out of `run.json` if they are empty.
    if_any: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _omit_empty(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        for name in self.if_any:
            if content.get(name) in (None, "", [], {}):
                content.pop(name, None)
        return content

    def with_changes(self, **changes: object) -> Self:
        """Return a copy of the object in which some fields have new values."""
        return self.model_copy(update=changes)

    def as_json(self) -> dict[str, Any]:
        """Return the object as a dict that can be written as JSON."""
        return self.model_dump(mode="json")


class Failure(Recorded):
    """Cause of a failed attempt.

    The field `component` contains the component that failed first. Often, other components fail
    later as a consequence.
    """

    #: Kind of the failure.
    kind: FailureKind
    #: Name of the component that failed first. None if the attempt failed for another reason, for
    #: example because the cluster has too few GPUs.
    component: str | None = None
    #: Exit code of the component. None if the component was ended by a signal or has not ended.
    exit_code: int | None = None
    #: Name of the signal that ended the component, such as `SIGSEGV`, or None.
    signal: str | None = None
    #: Message for the user about the failure.
    message: str
    #: Name of the rule that recognised the failure, such as `cuda-oom`, or an empty string.
    rule: str = ""
    #: Log line that matched the rule, or an empty string.
    line: str = ""
    #: Advice for the user, or an empty string.
    hint: str = ""
    #: Last lines of the component's log.
    log_tail: str = ""

    @property
    def has_ended(self) -> bool:
        """True if the component ended by itself.

        False if Muster must end the component, for example because the component does not respond.
        """
        return self.exit_code is not None or self.signal is not None

    def __str__(self) -> str:
        """Return the kind and the message: `STORAGE: disk full`."""
        return f"{self.kind.value}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of an attempt: its final state, a message, and the cause of a failure."""

    #: Final state of the attempt: COMPLETED, FAILED or CANCELLED. The state is RUNNING if this flow
    #: process ends and the attempt continues.
    state: RunState
    #: Message for the user, such as `60/60 steps` or `RUNTIME_ERROR: trainer killed by SIGSEGV
    #: ...`.
    message: str
    #: Cause of the failure if the state is FAILED, otherwise None.
    failure: Failure | None = None
    #: Last values of the metrics that ended without a finite value, such as `nan` or `null`.
    #: Empty if the state is not COMPLETED.
    not_finite: tuple[str, ...] = ()
    #: Time of the event that decided the result, in seconds of CLOCK_MONOTONIC. Several parts of
    #: Muster can report a result for an attempt. The earliest result is used.
    at_monotonic_s: float = 0.0
    #: Mapping from a component to descriptions of the leftover processes that Muster could not end.
    #: Records of earlier versions contain process ids instead.
    left: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    #: Mapping from a component to texts about machines on which Muster could not search for
    #: leftover processes.
    unseen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def failed(failure: Failure, at_monotonic_s: float) -> Verdict:
        """Return the result of an attempt that failed because of `failure`."""
        return Verdict(
            state=RunState.FAILED,
            message=str(failure),
            failure=failure,
            at_monotonic_s=at_monotonic_s,
        )

    def with_warning(self, warning: str) -> Verdict:
        """Return the result with a warning in its message."""
        return replace(self, message=add_warning(self.message, warning))

    def with_leftovers(self, left: Mapping[str, tuple[int | str, ...]]) -> Verdict:
        """Return the result with the state FAILED, because Muster could not end some processes.

        Args:
            left: The leftover processes of each component; see the field `left`.
        """
        problem = (
            f"some processes could not be ended ({_by_name(left)}). Until they end, other runs "
            "cannot use their GPUs, ports and files"
        )
        return self._with_incomplete_teardown(problem, left)

    def with_failed_ends(self, errors: Mapping[str, str]) -> Verdict:
        """Return the result as FAILED, with a message that Muster could not end some components.

        Args:
            errors: Mapping from a component to the error. The errors are added to the field `left`,
                because processes of these components may still run.
        """
        listed = "; ".join(f"{name}: {error}" for name, error in errors.items())
        problem = (
            "Muster could not end these components, because an error occurred in Muster "
            f"({listed}). To end remaining processes, run `muster reconcile`"
        )
        left = {
            **self.left,
            **{name: (*self.left.get(name, ()), error) for name, error in errors.items()},
        }
        return self._with_incomplete_teardown(problem, left)

    def _with_incomplete_teardown(
        self, problem: str, left: Mapping[str, tuple[int | str, ...]]
    ) -> Verdict:
        if self.failure is not None:
            failure = self.failure.with_changes(message=f"{self.failure.message}; and {problem}")
        else:
            failure = Failure(
                kind=FailureKind.UNKNOWN,
                component=next(iter(left)),
                message=f"{join_problems(self.message)}, but {problem}",
                rule="teardown-incomplete",
                hint="To end the remaining processes: muster reconcile",
            )
        return replace(Verdict.failed(failure, self.at_monotonic_s), left=left)

    def with_unseen(self, unseen: Mapping[str, tuple[str, ...]]) -> Verdict:
        """Return the result with a note about machines on which leftover processes may exist.

        The state stays the same.

        Args:
            unseen: Mapping from a component to texts about the machines that could not be searched.
        """
        if not unseen:
            return self
        note = (
            "processes of the run may still be running on nodes that were not checked "
            f"({_by_name(unseen)})"
        )
        if self.failure is None:
            return replace(self, message=f"{self.message}; {note}", unseen=unseen)
        failure = self.failure.with_changes(message=f"{self.failure.message}; {note}")
        return replace(self, message=str(failure), failure=failure, unseen=unseen)


#: Beginning of each line of a message with warnings.
_WARNING = "warning: "


def add_warning(message: str, warning: str) -> str:
    """Add a warning to the message of a completed attempt, and return the new message.

    Examples: `warning: step 40, but loss is nan` after the first warning. After a second warning,
    the message has a second line that begins with `warning: `.
    """
    if message.startswith(_WARNING):
        return f"{message}\n{_WARNING}{warning}"
    return f"{_WARNING}{message}, but {warning}"


def list_problems(message: str) -> list[str]:
    """Return the warnings in the message of a run. A message without warnings is the only item."""
    if not message.startswith(_WARNING):
        return [message]
    first, *others = message.split(f"\n{_WARNING}")
    return [first, *(f"{_WARNING}{text}" for text in others)]


def join_problems(message: str) -> str:
    """Return the message of a run with all its warnings in one sentence, such as `warning: A; B`.

    A message without warnings is returned unchanged.
    """
    first, *others = list_problems(message)
    return "; ".join([first, *(text.removeprefix(_WARNING) for text in others)])


def _by_name(items: Mapping[str, tuple[int | str, ...]]) -> str:
    return "; ".join(f"{name}: {join_commas(values)}" for name, values in items.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpReason:
    """Reason why Muster ends a component that is still alive, and treats it as failed."""

    #: Kind of the failure, or None if the kind must be found in the log of the component.
    kind: FailureKind | None
    #: Name of the failed check, such as `live` for the liveness probe.
    rule: str
    #: Message for the user that explains why Muster ends the component.
    message: str
    #: Exit status of the process whose end is the reason. None if the reason is not the end of a
    #: process.
    exit: Exit | None = None


class ComponentFailed(Exception):
    """A component could not be started, or was not ready in time.

    For example, a port is in use, or a Ray cluster rejects the component's Ray job. The attribute
    `reason` describes the failure. A Ray job may still be running, so the caller must end it.
    """

    def __init__(self, reason: GiveUpReason) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason.message
