"""Advise the user after a program of a run has ended with an error.

The advice depends on the log of the program. If the log names the error, the message of the failure
repeats the error, so the advice must not send the user to the log for the same error. If the log
names no error, the advice must not promise that the log shows the reason.
"""

from __future__ import annotations

from tasks.record.outcome import Failure
from tasks.spec.failure_kinds import FailureKind

#: Kinds of failure whose general advice is to read the log.
_KINDS_THAT_POINT_TO_THE_LOG = frozenset({FailureKind.RUNTIME_ERROR, FailureKind.UNKNOWN})
#: First line of each traceback of Python.
_TRACEBACK = "Traceback (most recent call last)"


def advise_unexplained_exit(process: str, exit_code: int) -> str:
    """Return advice about a process that ended, but wrote no error message to the log.

    Args:
        process: Name of the process, such as `rank 1`.
        exit_code: Exit code of the process, at least 0.
    """
    if exit_code == 0:
        return (
            f"Muster found no error message from {process} in the log, and exit code 0 means that "
            f"{process} ended without an error. Check whether {process} has less data than the "
            "other ranks, and search the code for a `return`, `break`, sys.exit or os._exit that "
            f"ends only {process}."
        )
    return (
        f"Muster found no error message from {process} in the log. If the last log lines do not "
        f"show the reason either, search the code for a call that ends {process} with exit code "
        f"{exit_code}, such as sys.exit({exit_code}), os._exit({exit_code}), or `exit {exit_code}` "
        "in a shell script. Print the reason before this call."
    )


def advise_by_log(failure: Failure) -> str:
    """Return advice about a failure whose `hint` is empty.

    Returns:
        In most cases, the general advice for the kind of the failure. Two cases have other advice:
        the message already repeats the error from the log, or the log has no error message.
    """
    general_advice = failure.kind.properties.remedy
    if not failure.component:
        return general_advice
    is_named = bool(failure.line) and failure.line in failure.message
    is_of_program = failure.kind in _KINDS_THAT_POINT_TO_THE_LOG | {FailureKind.USER_ERROR}
    if is_named and is_of_program and _TRACEBACK in failure.log_tail:
        return (
            "The message names the error, and the traceback in the log shows the code that raised "
            "the error. Correct this code or its input, then start the run again."
        )
    if failure.kind not in _KINDS_THAT_POINT_TO_THE_LOG:
        return general_advice
    if is_named:
        return "Correct the error that the message names, then start the run again."
    if failure.exit_code and not failure.line:
        return advise_unexplained_exit(failure.component, failure.exit_code)
    return general_advice
