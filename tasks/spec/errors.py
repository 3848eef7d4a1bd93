"""Errors of a run, grouped by what the caller should do next.

Every class survives pickle: a task run may hand it to another process.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.spec.words import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong with a run spec, by its place in the file."""

    #: Dotted path in the spec, `components.trainer.command`; empty for the file as a whole.
    path: str
    #: What is wrong, with the value that was found.
    problem: str
    #: What to write instead.
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{place}{self.problem}{remedy}"


class MusterError(Exception):
    """Any error that Muster raises on purpose; catch a subclass to know what to do."""


class InvalidSpec(MusterError):
    """The input must be mended: nothing was started and nothing was written.

    Raised for every fault of a spec at once. A gang that is well written but larger than the
    cluster is `Infeasible`, not this.
    """

    def __init__(self, faults: tuple[Fault, ...], source: str = "the run spec") -> None:
        super().__init__(faults, source)
        self.faults = faults
        self.source = source

    def __str__(self) -> str:
        count = counted(len(self.faults), "fault")
        return "\n".join([f"{self.source} has {count}:", *(f"  - {f}" for f in self.faults)])


class Infeasible(MusterError):
    """The gang can never fit this cluster: ask for less, or on another cluster."""


class InsufficientResources(MusterError):
    """The gang's GPUs were not free after all: requeue the run, its attempt does not count."""


class ProcessFailed(MusterError):
    """A component failed: read its log. Its subclasses say when in its life it failed."""

    def __init__(self, message: str, component: str) -> None:
        super().__init__(message, component)
        self.message = message
        self.component = component

    def __str__(self) -> str:
        return self.message


class NotReady(ProcessFailed):
    """The component lives, but its readiness probe did not pass by its deadline.

    A component that died before it was ready is `ExitedEarly`.
    """


class ExitedEarly(ProcessFailed):
    """The component ended before its part was done, ready or not."""


class RunEnded(MusterError):
    """The run's fate is decided, so what was asked is not done: go on to the teardown.

    The verdict, not this error, says what became of the run and which component is to blame.
    """


class LostContact(MusterError):
    """The outcome is unknown: ask again before anything is submitted twice."""


class IllegalTransition(MusterError):
    """A state moved where the table of legal moves does not allow: a bug of Muster's."""
