"""Errors of a run, grouped by what the caller should do next.

Every class survives pickle: a task run may hand it to another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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

    #: Of a command that ends with it.
    exit_code: ClassVar[int] = 1


class BadArgument(MusterError):
    """What was asked for can't be, or names nothing: ask for something else. Nothing was done."""

    exit_code = 2


class InvalidSpec(MusterError):
    """The input must be mended: nothing was started and nothing was written.

    Raised for every fault of a spec at once.
    """

    exit_code = 2

    def __init__(self, faults: tuple[Fault, ...], source: str = "the run spec") -> None:
        super().__init__(faults, source)
        self.faults = faults
        self.source = source

    def __str__(self) -> str:
        count = counted(len(self.faults), "fault")
        return "\n".join([f"{self.source} has {count}:", *(f"  - {f}" for f in self.faults)])


class RunEnded(MusterError):
    """How the run ends is decided, so what was asked is not done: go on to the teardown.

    The verdict, not this error, says what became of the run and which component failed first.
    """


class LostContact(MusterError):
    """The outcome is unknown: ask again before anything is submitted twice."""


class IllegalTransition(MusterError):
    """A state moved where the table of legal moves does not allow: a bug of Muster's."""
