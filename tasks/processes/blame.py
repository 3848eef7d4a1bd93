"""Why a component failed, as far as its end and its log tell."""

from __future__ import annotations

import errno

from tasks.record.causes import find_cause, last_error, last_lines
from tasks.record.outcome import Exit, Failure
from tasks.spec.failure_kinds import FailureKind

_FATAL_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP"})
_USERS_ERRNOS = frozenset(
    # What Python itself refuses, such as a NUL in an argument, has number 0.
    {0, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR}
    | {errno.E2BIG, errno.ELOOP, errno.ENAMETOOLONG}
)


def failure_of(
    component: str,
    text: str,
    *,
    message: str,
    rule: str,
    kind: FailureKind | None = None,
    exit: Exit | None = None,
) -> Failure:
    """The failure, with what the component said of it.

    Args:
        message: what happened, in one line.
        text: the end of its log, and what else was said of its end.
        rule: by which it was noticed; a text that names a cause replaces it.
        kind: where it is certain already; None: the text, or else the signal, tells.
    """
    cause = find_cause(text)
    signal = exit.signal_name if exit else None
    hint = cause.rule.hint if cause else ""
    line = cause.line if cause else ""
    if cause is not None and kind in (None, FailureKind.RUNTIME_ERROR):
        rule = cause.rule.id
        # That something was killed, as a text may say, is no better than what is known already.
        if cause.rule.kind is not FailureKind.UNKNOWN:
            kind = cause.rule.kind
    if kind is None:
        kind = FailureKind.RUNTIME_ERROR if signal in _FATAL_SIGNALS else FailureKind.UNKNOWN
    if signal == "SIGKILL" and not hint:
        hint = "SIGKILL comes from outside: the kernel's OOM killer (see dmesg) or a person"
    said = line if cause is not None and cause.rule.id != "traceback" else last_error(text)
    return Failure(
        kind=kind,
        component=component,
        message=f"{message}: {said}" if said else message,
        exit_code=exit.exit_code if exit else None,
        signal=signal,
        rule=rule,
        line=line,
        hint=hint,
        log_tail=last_lines(text),
    )


def kind_of_spawn_error(error: Exception) -> FailureKind:
    """Of a program that could not be started: the user's to mend, or the machine's fault."""
    if isinstance(error, OSError) and error.errno in _USERS_ERRNOS:
        return FailureKind.USER_ERROR
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
        return FailureKind.STORAGE
    return FailureKind.UNKNOWN
