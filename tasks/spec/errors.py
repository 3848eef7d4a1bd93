"""Muster's exceptions, grouped by the reaction that the caller should choose.

The exceptions can be pickled, because a task run may pass them to another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.spec.formatting import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mistake in a spec, and its place in the file."""

    #: Dotted path in the spec, such as `components.trainer.command`. If empty, the fault concerns
    #: the whole file.
    path: str
    #: Description of the mistake, with the value that was found.
    problem: str
    #: Correct form that the user should write instead, or an empty string.
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{place}{self.problem}{remedy}"


class MusterError(Exception):
    """Base class of all errors that Muster raises on purpose.

    Callers should catch the subclasses, because each subclass needs a different reaction.
    """

    #: Exit code of a Muster command that ends with this error.
    exit_code: ClassVar[int] = 1


class BadArgument(MusterError):
    """The user asked for something impossible or missing. Muster did nothing."""

    exit_code = 2


class InvalidSpec(MusterError):
    """A spec has mistakes that the user must correct. Nothing was started or written.

    One exception contains all mistakes of a spec.

    Args:
        faults: The mistakes, at least one.
        source: Name of the spec for the message, such as the path of its file.
    """

    exit_code = 2

    def __init__(self, faults: tuple[Fault, ...], source: str = "the run spec") -> None:
        super().__init__(faults, source)
        self.faults = faults
        self.source = source

    def __str__(self) -> str:
        count = format_count(len(self.faults), "fault")
        return "\n".join([f"{self.source} has {count}:", *(f"  - {f}" for f in self.faults)])


class RunEnded(MusterError):
    """The run is already ending, so Muster did not carry out a request.

    The caller should not repeat the request. This error does not say why the run ends: see the
    `Verdict` of the attempt.
    """


class LostContact(MusterError):
    """A server or cluster did not answer, so it is unknown whether a request was executed.

    Before a second request, the caller must find out whether the first request was executed.
    """


class IllegalTransition(MusterError):
    """Muster tried to change the state of a run in an illegal way. This is a bug in Muster."""
