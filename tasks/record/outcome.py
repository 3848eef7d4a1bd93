"""Results of processes and attempts, in types that all layers share.

- `Exit`: the end of a process
- `Failure`: the cause of a failed attempt
- `Verdict`: the result of an attempt
- `Trouble`: the reason for ending a component that is still alive
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
    """End of a process."""

    #: Exit code, or None if a signal ended the process or the status is unknown.
    exit_code: int | None
    #: Number of the signal that ended the process, or None.
    signal: int | None
    #: Time at which the parent process noticed the end, in seconds of CLOCK_MONOTONIC. Values from
    #: different processes can be compared.
    at_monotonic_s: float
    #: Explanation of an unusual or unknown status, or an empty string.
    note: str = ""

    @staticmethod
    def from_return_code(code: int | None, at_monotonic_s: float, note: str = "") -> Exit:
        """Return the end of a process with a return code in the style of `subprocess`.

        Args:
            code: The exit code, the negative number of a signal, or None if unknown.
            at_monotonic_s: Time of the end, in seconds of CLOCK_MONOTONIC.
            note: Explanation of an unusual or unknown status.
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
    """Return the name of a signal, such as `SIGSEGV`, or `signal 35` if it has no name."""
    try:
        return signals.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Recorded(BaseModel):
    """Base class of the objects in `run.json`. The keys are written in the order of the fields.

    Unknown keys, which another version of Muster has written, are kept.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    #: Names of the fields that are omitted from the file if they are empty.
    if_any: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _omit_empty(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        for name in self.if_any:
            if content.get(name) in (None, "", [], {}):
                content.pop(name, None)
        return content

    def with_changes(self, **changes: object) -> Self:
        """Return a copy with these fields changed."""
        return self.model_copy(update=changes)

    def as_json(self) -> dict[str, Any]:
        """Return plain data that can be written as JSON."""
        return self.model_dump(mode="json")


class Failure(Recorded):
    """Cause of a failed attempt. It names the first component that failed, not a later victim."""

    kind: FailureKind
    #: Name of the component that failed first. None if no component failed, for example because the
    #: gang can never fit into the cluster.
    component: str | None = None
    #: Exit code of the component, or None.
    exit_code: int | None = None
    #: Name of the signal that ended the component, such as `SIGSEGV`, or None.
    signal: str | None = None
    #: Line for the user that says what happened and which values were found.
    message: str
    #: Id of the rule that recognised the cause.
    rule: str = ""
    #: Line of the log that the rule matched.
    line: str = ""
    #: Advice for the user, or an empty string.
    hint: str = ""
    #: Last lines of the component's log.
    log_tail: str = ""

    @property
    def has_ended(self) -> bool:
        """True if the component failed by ending, not by being stopped while it was alive."""
        return self.exit_code is not None or self.signal is not None

    def __str__(self) -> str:
        """Return the kind and the message: `STORAGE: disk full`."""
        return f"{self.kind.value}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of an attempt."""

    #: COMPLETED, FAILED or CANCELLED. RUNNING if the attempt continues without this process.
    state: RunState
    #: Line for the user: `60/60 steps`, `RUNTIME_ERROR: trainer killed by SIGSEGV ...`.
    message: str
    #: Cause of the failure if the state is FAILED, otherwise None.
    failure: Failure | None = None
    #: Time of the event that decided the verdict, in seconds of CLOCK_MONOTONIC. If there are
    #: several verdicts, the earliest one counts.
    at_monotonic_s: float = 0.0
    #: Leftovers of each component that could not be ended: pids of processes on this machine that
    #: survived SIGKILL, and descriptions of leftovers on other machines.
    left: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    #: Descriptions of the machines that could not be checked for leftovers, by component.
    unseen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def failed(failure: Failure, at_monotonic_s: float) -> Verdict:
        """Return the verdict of an attempt with this failure."""
        return Verdict(
            state=RunState.FAILED,
            message=str(failure),
            failure=failure,
            at_monotonic_s=at_monotonic_s,
        )

    def with_leftovers(self, left: Mapping[str, tuple[int | str, ...]]) -> Verdict:
        """Return the verdict for an attempt with leftovers that could not be ended: FAILED.

        Args:
            left: The leftovers of each component; see the field `left`.
        """
        remains = (
            f"some processes survived SIGKILL ({_by_name(left)}). They probably wait for a device "
            "or a file system, see /proc/PID/stack. Their GPUs are not free"
        )
        if self.failure is not None:
            failure = self.failure.with_changes(message=f"{self.failure.message}; and {remains}")
        else:
            failure = Failure(
                kind=FailureKind.UNKNOWN,
                component=next(iter(left)),
                message=f"{self.message}, but {remains}",
                rule="teardown-incomplete",
            )
        return replace(Verdict.failed(failure, self.at_monotonic_s), left=left)

    def with_unseen(self, unseen: Mapping[str, tuple[str, ...]]) -> Verdict:
        """Return the verdict with a note on machines that could not be checked for leftovers.

        The state stays the same.
        """
        if not unseen:
            return self
        note = f"leftovers may run on unchecked nodes ({_by_name(unseen)})"
        if self.failure is None:
            return replace(self, message=f"{self.message}; {note}", unseen=unseen)
        failure = self.failure.with_changes(message=f"{self.failure.message}; {note}")
        return replace(self, message=str(failure), failure=failure, unseen=unseen)


def _by_name(items: Mapping[str, tuple[int | str, ...]]) -> str:
    return "; ".join(f"{name}: {join_commas(values)}" for name, values in items.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpReason:
    """Reason for ending a component that is still alive."""

    #: Kind of the failure. None if the component's log must be searched for it.
    kind: FailureKind | None
    #: Id of the rule that noticed the trouble.
    rule: str
    #: Line for the user.
    message: str
    #: End of a child process of the component, if that was the reason, otherwise None.
    exit: Exit | None = None


class GivenUp(Exception):
    """The start of a component failed: for example, it was not ready in time.

    Other reasons are a port that is in use, and a Ray cluster that refused the job or did not start
    it in time. `loss` has the reason. If the component is a Ray job, the caller must still end the
    job.
    """

    def __init__(self, loss: GiveUpReason) -> None:
        super().__init__(loss)
        self.loss = loss

    def __str__(self) -> str:
        return self.loss.message
