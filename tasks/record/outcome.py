"""What became of a run: how its processes ended, and the one failure that explains it.

`Exit` is of one process, `Failure` of an attempt, and `Verdict` is how the attempt ended; `Trouble`
says why a component is given up that has not ended, in words that every layer shares.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.words import commas


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: an exit code, or the signal that ended it, or neither is known."""

    exit_code: int | None
    signal: int | None
    #: When its parent saw it, CLOCK_MONOTONIC seconds, comparable between processes.
    at_monotonic_s: float
    #: What made the status unusual or unknown.
    note: str = ""

    @staticmethod
    def of(code: int | None, at_monotonic_s: float, note: str = "") -> Exit:
        """
        Args:
            code: below zero: the signal; None where nobody knows.
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
    """`SIGSEGV` for 11; `signal 35` for what has no name."""
    try:
        return signals.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Recorded(BaseModel):
    """A part of `run.json`, with its keys in the order of the fields. Keys that another version of
    Muster has written beside them stay."""

    model_config = ConfigDict(frozen=True, extra="allow")

    #: What is not written where there is none.
    if_any: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        for name in self.if_any:
            if content.get(name) in (None, "", [], {}):
                content.pop(name, None)
        return content

    def but(self, **changes: object) -> Self:
        """The same with these fields changed."""
        return self.model_copy(update=changes)

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class Failure(Recorded):
    """Why a run failed: the first component to fail, never a victim of the teardown."""

    kind: FailureKind
    #: The component that failed first; None when none has, as for a gang that can't fit.
    component: str | None = None
    exit_code: int | None = None
    #: `SIGSEGV`.
    signal: str | None = None
    #: One line for people: what happened, what was found, what to look at.
    message: str
    #: The id of the rule that recognised it.
    rule: str = ""
    #: The line of the log that the rule matched.
    line: str = ""
    #: What to do about it, where that is known.
    hint: str = ""
    #: The last lines of the component's log.
    log_tail: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the component to blame had ended; another one was alive, and then stopped."""
        return self.exit_code is not None or self.signal is not None

    def __str__(self) -> str:
        """`STORAGE: disk full`."""
        return f"{self.kind.value}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one attempt ended."""

    #: COMPLETED, FAILED or CANCELLED; RUNNING of one that goes on without this process.
    state: RunState
    #: One line: `60/60 steps`, `RUNTIME_ERROR: trainer killed by SIGSEGV ...`.
    message: str
    #: Set when failed, and only then.
    failure: Failure | None = None
    #: What the verdict came from, CLOCK_MONOTONIC seconds: the earliest one holds.
    at_monotonic_s: float = 0.0
    #: `left[component] ->` what could not be ended: pids of this machine that outlived SIGKILL,
    #: and words for what is on others.
    left: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    #: `unseen[component] ->` words for the machines of which nobody can say what it has left there.
    unseen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def failed(failure: Failure, at_monotonic_s: float) -> Verdict:
        return Verdict(
            state=RunState.FAILED,
            message=str(failure),
            failure=failure,
            at_monotonic_s=at_monotonic_s,
        )

    def with_remains(self, left: Mapping[str, tuple[int | str, ...]]) -> Verdict:
        """The verdict of an attempt of which something could not be ended: never a clean one."""
        remains = (
            f"not all of it came to its end ({_by_name(left)}): a process that outlived SIGKILL "
            "waits for a device or a file system, see /proc/PID/stack, and its GPUs are not free"
        )
        if self.failure is not None:
            failure = self.failure.but(message=f"{self.failure.message}; and {remains}")
        else:
            failure = Failure(
                kind=FailureKind.UNKNOWN,
                component=next(iter(left)),
                message=f"{self.message}, but {remains}",
                rule="teardown-incomplete",
            )
        return replace(Verdict.failed(failure, self.at_monotonic_s), left=left)

    def with_unseen(self, unseen: Mapping[str, tuple[str, ...]]) -> Verdict:
        """The verdict with what could not be seen of the attempt's end, which changes none."""
        if not unseen:
            return self
        said = f"not every node was seen to be free ({_by_name(unseen)})"
        if self.failure is None:
            return replace(self, message=f"{self.message}; {said}", unseen=unseen)
        failure = self.failure.but(message=f"{self.failure.message}; {said}")
        return replace(self, message=str(failure), failure=failure, unseen=unseen)


def _by_name(found: Mapping[str, tuple[int | str, ...]]) -> str:
    return "; ".join(f"{name}: {commas(what)}" for name, what in found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a component is given up that has not ended by itself."""

    #: None: its log tells.
    kind: FailureKind | None
    #: The id of the rule that noticed it.
    rule: str
    #: One line for people.
    message: str
    #: Of a process of its, which ended in place of it.
    exit: Exit | None = None


class GivenUp(Exception):
    """A component was not ready in time, had its port taken, or was not taken, or not run in time,
    by its cluster; `loss` says why.

    What a cluster may have of a job is still to be ended.
    """

    def __init__(self, loss: Trouble) -> None:
        super().__init__(loss)
        self.loss = loss

    def __str__(self) -> str:
        return self.loss.message
