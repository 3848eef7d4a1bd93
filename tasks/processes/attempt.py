"""Supervise one attempt at a run: start its components in order, notice failures, and end the
components in reverse order.

The attempt runs in a separate asyncio loop. `supervisor.Supervisor` runs that loop in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tasks.processes.component import (
    PORT_TAKEN,
    AttemptContext,
    AttemptPlan,
    ComponentPlan,
    RunningComponent,
)
from tasks.processes.descendant_watch import DeathEvidence
from tasks.processes.full_disks import FileSystem, measure_at_exit, name_full_disk
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.hang_report import call_with_time_limit
from tasks.processes.host_limits import (
    HostLimit,
    describe_shortage,
    measure_process_limits,
    name_reached_limit,
)
from tasks.processes.identity import host_name
from tasks.processes.log_bounds import keep_log_bounded
from tasks.processes.machine import read_gpus
from tasks.processes.owned_tasks import OwnedTasks, cancel_tasks
from tasks.processes.place_reader import PlaceReader, PlaceTimeout
from tasks.processes.ports import PortsReserved, listening_sockets
from tasks.processes.process_component import ProcessComponent
from tasks.processes.progress import (
    ProgressEnd,
    ProgressWatch,
    Silence,
    StepSource,
    growing_intervals,
    make_step_reader,
    name_rank,
)
from tasks.processes.registry import RunRegistration
from tasks.processes.start_errors import describe_start_error
from tasks.processes.time_to_save import TimeToSave
from tasks.record.advice import advise_unexplained_exit
from tasks.record.causes import Cause, Role, find_cause, last_lines
from tasks.record.crash_stack import find_crash_place
from tasks.record.events import Emit
from tasks.record.log_bound import LogBound
from tasks.record.outcome import (
    ComponentFailed,
    Exit,
    Failure,
    GiveUpReason,
    Verdict,
    add_warning,
    signal_name,
)
from tasks.record.ranks import (
    RankFailure,
    ends_with_dead_loader,
    find_dead_loader,
    find_first_rank,
    has_error_file,
    has_lost_peer,
    is_consequence,
    is_exit_report,
    is_loss_of_local_peer,
    is_report_of_dead_loader,
    is_victim,
    name_processes_of_spawn,
    remove_launcher_reports,
    select_lines_of_rank,
    select_traceback_of_rank,
)
from tasks.record.states import RunState
from tasks.spec.checkpoint_urls import is_url
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import HANG_REPORT, FailureKind, find_kind_of_start_error
from tasks.spec.formatting import join_words
from tasks.spec.watch import NOT_FINITE_ADVICE, Alarms

_log = logging.getLogger(__name__)

#: Time limit in seconds of the search for the last checkpoint of a trainer that was killed.
_FIND_CHECKPOINT_WITHIN_S = 30.0
#: Time limit in seconds for reading the end of a log, to find the reason for a component's end.
_READ_LOG_WITHIN_S = 10.0
#: Time limit in seconds for measuring the free space of file systems after a component has ended.
_MEASURE_WITHIN_S = 2.0
#: Time limit in seconds for the determination of the attempt's result.
_RESULT_WITHIN_S = 60.0
#: Time limit in seconds for finding out why a program could not be started.
_EXPLAIN_START_WITHIN_S = 5.0
#: Seconds between two searches for hanging reads from files and folders, for example on NFS.
_PLACES_EVERY_S = 1.0
#: Seconds between two test reads of the log files. A test read shows whether the file system hangs.
_CHECK_LOGS_EVERY_S = 5.0
#: A file or folder is reported to the user if a read from it hangs for this number of seconds.
_REPORT_PLACE_AFTER_S = 5.0
#: Smallest number of seconds between two checks whether a component is writing a checkpoint. Such a
#: check also shows whether the file system of the checkpoints hangs.
_CHECK_CHECKPOINTS_EVERY_S = 5.0
#: Pause after a check whether a component is writing a checkpoint, as a multiple of the duration of
#: the check. For example, a check of 1 s is followed by a pause of 50 s. The pause is never shorter
#: than `_CHECK_CHECKPOINTS_EVERY_S`.
_CHECK_CHECKPOINTS_PAUSE = 50.0
#: Pattern of a log line in which a trainer reports that it has received SIGTERM.
_SIGTERM_HEARD = re.compile(
    r"(?:receiv|caught|catch|got |handl|by )\w*[^\n]{0,30}?(?:SIGTERM|signal 15)"
    r"|SIGTERM[^\n]{0,30}?(?:receiv|caught|:)",
    re.IGNORECASE,
)
#: Number of lines at the end of a log in which Muster searches for a message about SIGTERM.
_LAST_LINES = 40
#: Largest number of times that components of one attempt are started again on another port.
_MOVES_AT_MOST = 5
#: Smallest number of seconds between two checks of the processes that listen on the run's ports.
_PORTS_EVERY_S = 1.0
#: Pause after a check of the run's ports, as a multiple of the duration of the check. For example,
#: a check of 1 s is followed by a pause of 20 s. The pause is never shorter than `_PORTS_EVERY_S`.
_PORTS_PAUSE = 20.0
#: Seconds to wait until the GPU driver reports the GPU utilisation. If the driver does not answer
#: in that time, the driver is not asked again.
_DRIVER_WITHIN_S = 5.0
#: Signals that the kernel sends to a program after an error in that program.
_FATAL_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP"})

#: Exit codes of a process that SIGKILL ended, as `subprocess` and as a shell report them.
_SIGKILL_CODES = (-signal.SIGKILL, 128 + signal.SIGKILL)

#: Advice for a signal that ended a component, if the log does not show the cause.
_SIGNAL_HINTS = {
    "SIGKILL": "A person, another program, a job manager or the program itself may have sent "
    "SIGKILL. Or the kernel's OOM killer sent it: in this case, dmesg on the host "
    "shows the kill.",
    "SIGTERM": "Muster did not send this SIGTERM. Probably a person, another program, or a job "
    "manager such as Slurm sent the signal.",
    "SIGBUS": "SIGBUS often means that a memory-mapped file could not grow, because its file "
    "system is full. Check the free space with `df -h /dev/shm` and `df -h`.",
}
#: Advice for a component ended by SIGKILL, if the OOM killer probably did not send the signal.
_SIGKILL_BY_OTHERS = (
    "So SIGKILL probably came from a person, another program, a job manager such as Slurm, or the "
    "program itself."
)
#: Advice for an alarm about a metric that is NaN or infinite.
_NOT_FINITE_HINT = (
    f"{NOT_FINITE_ADVICE} To let Muster resume from a checkpoint before this metric value, list "
    "ALARM (the kind of this failure) under `retry` in the spec."
)
#: Advice for a run that Muster stopped before the first step, because no progress was visible.
_FIRST_STEP_HINT = (
    "If the program needs more time for imports, the model or a compilation, raise `stall_after_s` "
    "in the spec (now {limit_s:g} s). Otherwise read the file {hang_report}: it shows the code "
    "that the component was executing."
)
#: Advice for a run without `progress` that has written no output for too long.
_NO_OUTPUT_HINT = (
    "If the training needs this long without output, for example to load the model, raise "
    "`stall_after_s` in the spec (now {limit_s:g} s). Or write `progress` into the spec, so that "
    "Muster reads the training steps. Otherwise read the file {hang_report}: it shows the code at "
    "which the component hung."
)
_LESS_MEMORY = "Use fewer worker processes, a smaller batch, or less offloading to CPU memory."
#: Advice for a process that the kernel's OOM killer has killed.
_OOM_HINT = (
    f"{_LESS_MEMORY} Or give the component more memory: a higher memory limit, or a machine with "
    "more memory."
)
#: Advice for a process that the OOM killer has killed because of the component's own limit.
_OWN_LIMIT_HINT = f"{_LESS_MEMORY} Or raise `memory_gib` of the component in the spec."
#: Advice for a worker of a data loader that ended in an unknown way.
_LOST_LOADER_HINT = (
    "A data loader worker ended without an error message. Check with dmesg whether the kernel's "
    "OOM killer ended the worker. To see an error of the worker itself, run the training with "
    "`num_workers=0`."
)
#: Advice for a worker of a data loader that has crashed.
_CRASHED_LOADER_HINT = (
    "A data loader worker crashed. To see which code crashed, run the training with "
    "`num_workers=0`: the crash then happens in the main process, and its call stack is in the log."
)
#: Empty evidence: this machine's kernel knows nothing about the deaths of a component's processes.
_NO_EVIDENCE = DeathEvidence()
#: Advice for an exit code of a shell, if the log does not show the cause.
_EXIT_CODE_HINTS = {
    126: "Exit code 126 means that a shell could not execute a program. Check that the program's "
    "file is executable, and that its first line names an existing interpreter.",
    127: "Exit code 127 means that a shell did not find a program. Check the name of the program, "
    "and the variable PATH.",
}


def make_failure(
    component: str,
    text: str,
    *,
    message: str,
    rule: str,
    kind: FailureKind | None = None,
    exit: Exit | None = None,
    evidence: DeathEvidence = _NO_EVIDENCE,
    folder: Path | None = None,
) -> Failure:
    """Return the failure of a component, with the cause that is found in its log.

    Args:
        component: Name of the component.
        message: One line that describes the failure.
        text: End of the component's log, in which the cause is searched. If the component is a
            launcher of several ranks, only the lines of the first rank that failed are searched.
        rule: Name of the rule that detected the failure. Used only if no cause is found in `text`.
        kind: Kind of the failure. None if it is uncertain: the kind is then taken from the cause in
            `text`, or else from the signal that ended the component.
        exit: Exit of the component; None if it has not ended.
        evidence: Facts that the kernel and the launcher report about the deaths of the component's
            processes.
        folder: Working directory of the component. The message names the user's own code by a path
            relative to this folder. None if unknown.
    """
    evidence = replace(
        evidence,
        first_death=_name_process(text, evidence.first_death),
        early_end=_name_process(text, evidence.early_end),
    )
    first_rank: RankFailure | None = None
    loader: RankFailure | None = None
    if exit is not None:
        first_rank = _find_first_rank(text, evidence)
        loader = _find_dead_loader(text, first_rank, evidence)
        first_rank = loader or first_rank
    own_text = text
    traceback = evidence.traceback
    is_later_error: Callable[[str], bool] | None = None
    if first_rank is not None:
        own_text = select_lines_of_rank(text, first_rank)
        is_later_error = partial(is_consequence, failure=first_rank)
        if loader is not None:
            is_later_error = partial(_is_consequence_of_loader, loader=loader)
        has_later_error = any(map(is_later_error, traceback.splitlines()))
        if has_later_error or not has_error_file(text, first_rank):
            traceback = ""
    # If an alarm rule of the run spec has ended the attempt, the alarm is the cause. Do not search
    # the log for another cause.
    is_explained = kind is FailureKind.ALARM
    cause = None if is_explained else find_cause(own_text, is_consequence=is_later_error)
    is_early_end = first_rank is not None and first_rank is evidence.early_end
    if is_early_end:
        # The errors in the log come from other ranks, which lost the connection to `first_rank`.
        cause = None
    elif traceback and (cause is None or cause.rule.role >= Role.CASCADE):
        cause = find_cause(traceback) or cause
    exit_signal = exit.signal_name if exit else None
    signal_of_death = exit_signal
    if first_rank is not None and first_rank.signal_name:
        signal_of_death = first_rank.signal_name
        is_certain = first_rank is evidence.first_death or signal_of_death == "SIGKILL"
        if is_certain and cause is not None and cause.rule.role >= Role.EXCEPTION:
            # A signal has killed the process that failed first, so this process wrote no message.
            # The message in the log comes from processes that lost the connection to this process.
            cause = None
    is_oom_kill = (
        exit is not None and kind is None and _is_oom_kill(exit, first_rank, cause, evidence)
    )
    if is_oom_kill:
        cause = None
        kind = FailureKind.HOST_OOM
        rule = "oom-killer"
    hint = cause.rule.hint if cause else ""
    line = cause.line if cause else ""
    if cause is not None and kind in (None, FailureKind.RUNTIME_ERROR):
        rule = cause.rule.id
        # If the kind of the cause is UNKNOWN, keep the argument `kind`. For example, the log line
        # "Killed" has the kind UNKNOWN.
        if cause.rule.kind is not FailureKind.UNKNOWN:
            kind = cause.rule.kind
    if kind is None:
        is_fatal = signal_of_death in _FATAL_SIGNALS
        has_error_code = first_rank is not None and (first_rank.exit_code or 0) > 0
        has_ended_early = first_rank is not None and is_early_end and first_rank.exit_code == 0
        is_error = is_fatal or has_error_code or has_ended_early
        kind = FailureKind.RUNTIME_ERROR if is_error else FailureKind.UNKNOWN
        if cause is None and first_rank is not None and first_rank.signal_name == "SIGKILL":
            rule = "sigkill"
    if exit is not None and not hint:
        hint = _make_exit_hint(exit)
    cause_line = line if cause is not None and cause.rule.id != "traceback" else ""
    tail = last_lines(remove_launcher_reports(own_text))
    if first_rank is not None:
        message = f"{message}: {first_rank}"
        if cause is not None and cause.rule.role in (Role.CASCADE, Role.WRAPPER):
            # Omit this line of the log from the message. The line only says that this rank has
            # ended, or that another rank has lost the connection to this rank. The message already
            # names this rank.
            cause_line = ""
        if is_exit_report(line):
            # The message already says how this rank has ended.
            cause_line = ""
            line = ""
        if cause is not None and cause.rule.role is Role.WRAPPER:
            line = ""
        is_wrapper = cause is not None and cause.rule.role is Role.WRAPPER
        # If `cause_line` is not empty, the message already names the reason. In this case, do not
        # send the user to the log for the reason.
        if loader is not None and not cause_line and loader.exit_code is None:
            hint = _LOST_LOADER_HINT
        elif loader is not None and not cause_line and signal_of_death in _FATAL_SIGNALS:
            hint = _CRASHED_LOADER_HINT
        elif not cause_line and (not hint or is_wrapper):
            is_unexplained = cause is None or is_wrapper
            hint = _advise_about_rank(first_rank, is_unexplained=is_unexplained)
        elif first_rank.alive and kind is FailureKind.COLLECTIVE_TIMEOUT:
            waited_for = join_words([f"rank {rank}" for rank in first_rank.alive])
            hint = (
                f"{first_rank.short_name} waited for {waited_for}. Read the log lines of "
                f"{waited_for} to find out why {waited_for} did not answer. If these lines do not "
                "show the reason, set `stall_after_s` in the spec to a time shorter than the "
                "timeout. Muster then notices the hang first, and records where each rank waits."
            )
        tail = last_lines(select_traceback_of_rank(text, first_rank)) or tail
    tail = last_lines(traceback) or tail
    has_unclear_cause = cause is None or cause.rule.role >= Role.CASCADE
    if is_oom_kill:
        message = f"{message}: {evidence.oom_kill}"
        hint = _OWN_LIMIT_HINT if evidence.reached_own_limit else _OOM_HINT
    elif exit is not None and has_unclear_cause and _got_sigkill(exit, first_rank):
        hint = _SIGNAL_HINTS["SIGKILL"]
        if evidence.no_oom_kill:
            hint = f"{evidence.no_oom_kill} {_SIGKILL_BY_OTHERS}"
        if _signal_of_shell(exit):
            observation = _describe_shell_code(exit)
        else:
            is_rank = first_rank is not None and first_rank.exit_code in _SIGKILL_CODES
            killed = first_rank.short_name if first_rank is not None and is_rank else component
            observation = f"SIGKILL ended {killed}."
        hint = f"{observation} {hint}"
    elif has_unclear_cause and first_rank is not None and first_rank.signal_name == "SIGTERM":
        hint = f"SIGTERM ended {first_rank.short_name}. {_SIGNAL_HINTS['SIGTERM']}"
    if cause_line:
        message = f"{message}: {cause_line}"
    if exit is not None:
        # The components have the variable PYTHONFAULTHANDLER, so the log may contain the call stack
        # of a crashed Python process.
        crash_signal = signal_of_death or _signal_of_shell(exit) or ""
        if place := find_crash_place(own_text, crash_signal, folder):
            message = f"{message}, in {place}"
    return Failure(
        kind=kind,
        component=component,
        message=message,
        exit_code=exit.exit_code if exit else None,
        signal=exit_signal,
        rule=rule,
        line=line,
        hint=hint,
        log_tail=tail,
    )


def _find_first_rank(text: str, evidence: DeathEvidence) -> RankFailure | None:
    """Return the component's process that failed first, or None if unknown.

    Args:
        text: End of the component's log. A launcher may name the failed process there.
        evidence: Facts from the kernel about the deaths of the component's processes.
    """
    logged = find_first_rank(text)
    death = evidence.first_death
    if evidence.early_end is not None and _is_loss_of_a_rank(text, death):
        return evidence.early_end
    if death is None:
        return logged
    if logged is not None and logged.pid is not None:
        return logged
    if logged is not None and logged.rank is not None and logged.rank == death.rank:
        return death
    if logged is not None and logged.exit_code is not None and logged.name == death.full_name:
        return death
    is_crash = death.signal_name in _FATAL_SIGNALS
    if logged is not None and logged.exit_code is not None:
        # The rank that the launcher names is not always the rank that failed first. DeepSpeed
        # checks its ranks one after the other, once per second, and `torch.multiprocessing.spawn`
        # checks its processes in any order. Meanwhile, other ranks may fail, because they lose the
        # connection to the first failed rank.
        is_exception = logged.exit_code == 1
        is_later = is_exception and (
            death.exit_code != 1 or (logged.rank is not None and is_victim(text, logged.rank))
        )
        is_numbered = death.rank is not None or death.number is not None
        return death if is_later and is_numbered else logged
    cause = find_cause(text, is_consequence=partial(is_consequence, failure=death))
    is_explained = cause is not None and cause.rule.role < Role.CASCADE
    if logged is None:
        # The process `death` failed first if it crashed, or if the log names no cause of the
        # component's failure. Otherwise, the component probably failed because of the cause in the
        # log, and then ended the process `death`.
        return death if is_crash or not is_explained else None
    # `death` is the first failed process according to the kernel. `logged` is a failed process
    # whose traceback is in the log. If `death` did not crash, return `logged` in two cases: the log
    # names the cause of the component's failure, or `death` probably wrote the traceback itself,
    # because no other process failed. In all other cases, return `death`.
    has_own_traceback = death.exit_code == 1 and not death.others_failed
    return death if is_crash or not (is_explained or has_own_traceback) else logged


def _name_process(text: str, failure: RankFailure | None) -> RankFailure | None:
    """Return a failure in which a process of `torch.multiprocessing.spawn` is named `process N`.

    N is the index of the process, from 0. Any other failure is returned unchanged.
    """
    return None if failure is None else name_processes_of_spawn(text, failure)


def _find_dead_loader(
    text: str, first_rank: RankFailure | None, evidence: DeathEvidence
) -> RankFailure | None:
    """Return the worker of a data loader whose end explains the failure, or None.

    Args:
        text: End of the component's log.
        first_rank: The first failed process of the component, or None if unknown.
        evidence: Facts from the kernel about the deaths of the component's processes.
    """
    first_death = evidence.first_death
    own_text = ""
    if (rank := first_rank or first_death) is not None:
        own_text = select_traceback_of_rank(text, rank)
    own_text = own_text or remove_launcher_reports(text)
    loader = find_dead_loader(own_text, first_rank, first_death)
    if loader is None or ends_with_dead_loader(own_text):
        return loader
    # The log may contain the error in another form than a traceback of Python. `cause.line` is the
    # line of the log that best explains the failure.
    cause = find_cause(own_text, is_consequence=partial(is_consequence, failure=loader))
    return loader if cause is not None and is_report_of_dead_loader(cause.line) else None


def _is_consequence_of_loader(line: str, loader: RankFailure) -> bool:
    """Return True if a log line only shows a consequence of the end of a data loader worker."""
    return (
        is_consequence(line, loader)
        or is_loss_of_local_peer(line)
        or is_report_of_dead_loader(line)
    )


def _is_loss_of_a_rank(text: str, death: RankFailure | None) -> bool:
    """Return True if the log names a lost connection to a rank, and no other cause of the failure.

    Args:
        text: End of the component's log.
        death: The process that failed first according to the kernel, or None if it is unknown.
    """
    is_killed = death is not None and death.signal_name not in (None, "SIGABRT")
    if is_killed or not has_lost_peer(text):
        return False
    cause = find_cause(text, is_consequence=has_lost_peer)
    return cause is None or cause.rule.role >= Role.CASCADE


def _got_sigkill(exit: Exit, first_rank: RankFailure | None) -> bool:
    """Return True if SIGKILL ended the component or the process that failed first.

    Args:
        exit: Exit of the component.
        first_rank: The process of the component that failed first, or None if it is unknown.
    """
    is_rank = first_rank is not None and first_rank.exit_code in _SIGKILL_CODES
    return is_rank or exit.signal == signal.SIGKILL or exit.exit_code in _SIGKILL_CODES


def _is_oom_kill(
    exit: Exit, first_rank: RankFailure | None, cause: Cause | None, evidence: DeathEvidence
) -> bool:
    """Return True if a kill by the kernel's OOM killer explains the exit of a component.

    Args:
        exit: Exit of the component.
        first_rank: The process of the component that failed first, or None if it is unknown.
        cause: Line of the component's log that best explains the exit, or None.
        evidence: Facts from the kernel about the deaths of the component's processes.
    """
    if not evidence.oom_kill:
        return False
    if exit.signal is not None or _got_sigkill(exit, first_rank):
        return _got_sigkill(exit, first_rank)
    is_unclear = cause is None or cause.rule.role >= Role.CASCADE
    return is_unclear and (first_rank is None or first_rank.exit_code is None)


def _make_exit_hint(exit: Exit) -> str:
    """Return advice for the user if the log does not show why a component exited. May be empty."""
    code = exit.exit_code
    if exit.signal_name in _SIGNAL_HINTS:
        return _SIGNAL_HINTS[exit.signal_name]
    if code in _EXIT_CODE_HINTS:
        return _EXIT_CODE_HINTS[code]
    shell_signal = _signal_of_shell(exit)
    if shell_signal is None:
        return ""
    return f"{_describe_shell_code(exit)} {_SIGNAL_HINTS.get(shell_signal, '')}".rstrip()


def _advise_about_rank(first_rank: RankFailure, *, is_unexplained: bool) -> str:
    """Return advice about the first failed process of a component.

    The advice is for a failure whose message does not name the reason.

    Args:
        first_rank: The first failed process of the component.
        is_unexplained: True if Muster found no error message of the process in the log.
    """
    process = first_rank.short_name
    code = first_rank.exit_code
    if is_unexplained and code is not None and code >= 0:
        return advise_unexplained_exit(process, code)
    return f"To find the reason, read the last log lines of {process}."


def _advise_early_exit(name: str, step: float | None) -> str:
    """Return advice for a component that ended with exit code 0 before the required step.

    Args:
        name: Name of the component.
        step: Training step that was reached; None if no step is known.
    """
    if not step:
        return f"Read the end of the component's log to see why {name} ended before its first step."
    return (
        f"Read the end of the component's log to see why {name} ended at step {step:g}. If the "
        f"training is complete at this step, write `success: {{step: {step:g}}}` into the spec."
    )


def _describe_shell_code(exit: Exit) -> str:
    """Return a sentence that names the signal behind a shell's exit code, such as 137."""
    return (
        f"Exit code {exit.exit_code} means that the component is a shell or launcher, and "
        f"{_signal_of_shell(exit)} ended the program that the shell or launcher had started."
    )


def _signal_of_shell(exit: Exit) -> str | None:
    """Return the name of the signal that ended a program which a shell had started.

    If a signal ends the program, the exit code of the shell is 128 plus the number of the signal.

    Returns:
        None if no signal explains the exit code.
    """
    code = exit.exit_code or 0
    return signal_name(code - 128) if 128 < code < 128 + 65 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An event that decides how an attempt ends."""

    #: Time at which the event happened, in CLOCK_MONOTONIC seconds. Muster may notice the event
    #: later.
    at_monotonic_s: float
    #: State of the run after the attempt: COMPLETED, FAILED or CANCELLED; RUNNING if the Ray jobs
    #: of the run continue without this process.
    state: RunState
    #: Reason for the end of the attempt, in one line for the user.
    reason: str
    #: Returns the verdict, which contains the final state, a message and the failure. Called after
    #: the end of all components, when their logs are complete.
    make_verdict: Callable[[], Awaitable[Verdict]]
    #: Name of the component that failed first; None if no component failed.
    component: str | None = None
    #: True if Muster sends a warning signal to the components before it stops them, so that they
    #: can save a checkpoint.
    warns: bool = False

    @staticmethod
    def of(
        verdict: Verdict, at_monotonic_s: float | None = None, *, warns: bool = False
    ) -> Decision:
        """Return a decision whose verdict is already known.

        Args:
            verdict: The final state of the attempt, with a message and the failure.
            at_monotonic_s: Time of the event in CLOCK_MONOTONIC seconds. None if the event happens
                now.
            warns: True if Muster sends a warning signal to the components before it stops them, so
                that they can save a checkpoint.
        """

        async def make_verdict() -> Verdict:
            return verdict

        return Decision(
            at_monotonic_s=time.monotonic() if at_monotonic_s is None else at_monotonic_s,
            state=verdict.state,
            reason=verdict.message,
            make_verdict=make_verdict,
            warns=warns,
        )


class EarliestDecision:
    """Keeps the decision how an attempt ends. The earliest event decides.

    Muster may notice a later event first. But the earliest event is the cause of the attempt's end.
    Processes that die because of this event, or because the teardown stops them, die later. So
    these processes are not blamed for the end.
    """

    def __init__(self) -> None:
        #: The earliest decision; None if no event has decided yet how the attempt ends.
        self.decision: Decision | None = None
        #: Time of the earliest event that decides how the attempt ends; infinity if there is none.
        #: Later events are ignored.
        self.horizon_s = float("inf")

    def is_open_at(self, at_monotonic_s: float) -> bool:
        """Return True if an event at this time can still decide how the attempt ends.

        An event cannot decide the end if an earlier event has already decided it.
        """
        return at_monotonic_s < self.horizon_s

    def reserve(self, at_monotonic_s: float) -> None:
        """Permanently ignore all events that happen after the given time.

        Call this method with the time of an event that may decide how the attempt ends, but must be
        examined first.
        """
        self.horizon_s = min(self.horizon_s, at_monotonic_s)

    def decide(self, decision: Decision) -> bool:
        """Keep a decision if it is the earliest so far. Return True if it was kept."""
        if decision.at_monotonic_s > self.horizon_s:
            return False
        if self.decision and decision.at_monotonic_s >= self.decision.at_monotonic_s:
            return False
        self.decision = decision
        self.reserve(decision.at_monotonic_s)
        return True


class SupervisedAttempt:
    """Supervises the components of one attempt, and determines how the attempt ends.

    When an event decides the end of the attempt, the teardown begins. The teardown stops the
    components in reverse order. After the teardown has begun, no component is started.
    """

    def __init__(
        self,
        plan: AttemptPlan,
        ports: PortsReserved,
        emit: Emit,
        register: RunRegistration | None = None,
        template: GuardianTemplate | None = None,
        replan: Callable[[str], AttemptPlan] | None = None,
    ) -> None:
        """
        Args:
            plan: The components and their settings.
            ports: The ports of the run.
            emit: Publishes events.
            register: The run's registry on disk. None if the run is not registered.
            template: Helper process that forks the guardian processes. Each component runs under
                its own guardian process. If None, a new helper process is started when it is
                needed.
            replan: Called with the name of a component whose port is taken. Reserves another port
                and returns the changed plan; raises OSError if no port is free. None if a taken
                port must end the attempt.
        """
        self._plan = plan
        self._replan = replan
        self._moves_left = _MOVES_AT_MOST
        self._context = AttemptContext(plan, ports, emit, register, template, self.crash)
        self._emit = emit
        #: Mapping from name to component, in the order in which the components are started.
        self.components: dict[str, RunningComponent] = {}
        self._launched: list[RunningComponent] = []
        #: Tasks that watch the whole attempt. The tasks that watch a single component are in
        #: `RunningComponent.tasks`.
        self._watchers = OwnedTasks(self.crash)
        #: Tasks that examine the end of a component, and decide whether the run continues, fails or
        #: is complete. The teardown waits for the results of these tasks.
        self._examinations = OwnedTasks(self.crash)
        self._alarms = Alarms(plan.alarms) if plan.alarms else None
        silence = Silence(
            self._context.logs.values(),
            resumed_step=plan.resume.step if plan.resume else None,
        )
        self._progress = ProgressWatch(
            plan,
            self._step_source(),
            silence,
            emit,
            self._is_quiet,
            self._context.readers,
            self._context.log_reader,
        )
        #: Mapping from path to reader. Contains each file or folder that does not answer and was
        #: reported to the user.
        self._reported: dict[str, PlaceReader] = {}
        #: Mapping from component name to the size of the component's log in bytes. Muster measures
        #: the size before it examines or stops any component, because the examination and the stop
        #: add lines to the log. Only some components are included: those that hang, and the
        #: component that failed first, unless it exited before the measurement.
        self._sizes_before_stop: dict[str, int] = {}
        #: The decision how the attempt ends. If several events could end the attempt, such as
        #: failures of two components, the earliest event decides.
        self.earliest = EarliestDecision()
        self._teardown: asyncio.Task[Verdict] | None = None
        self._time_to_save = TimeToSave(
            components=lambda: tuple(self._launched), emit=emit, readers=self._context.readers
        )
        #: asyncio event that is set when the end of the run is decided.
        self.decided = asyncio.Event()

    def prepare(self) -> None:
        """Prepare every component, and start the tasks that watch the whole attempt.

        For each component that runs on this machine, a guardian process is started. The guardian
        process will later start the component's program and end the program's processes. If a
        guardian process cannot be started, the attempt fails.
        """
        try:
            self._context.begin()
            for plan in self._plan.components:
                make = plan.make_component or ProcessComponent
                self.components[plan.name] = make(plan, self._context)
            self._context.settle()
        except OSError as error:
            message = f"Muster cannot start any process: {error.strerror or error}"
            if shortage := describe_shortage(error):
                message = f"{message}; {shortage}"
            kind = find_kind_of_start_error(error.errno)
            self.fail(Failure(kind=kind, message=message, rule="spawn"))
            return
        self._watchers.start(self._follow_progress())
        self._watchers.start(self._publish_gpu_use())
        self._watchers.start(self._follow_ports())
        for plan in self._plan.components:
            if plan.log_max_bytes is not None:
                log = self._context.logs[plan.name]
                bound = LogBound(limit_bytes=plan.log_max_bytes)
                self._watchers.start(keep_log_bounded(plan.name, log, bound, self._warn))
        self._watchers.start(self._follow_places())
        for component_plan in self._plan.components:
            # Do not check checkpoints in an object store. Requests to a store have their own time
            # limits, and each request costs money.
            if component_plan.is_saving is not None and not is_url(component_plan.checkpoints):
                self._watchers.start(self._follow_checkpoints(component_plan))
        if any(component.warning is not None for component in self._plan.components):
            self._watchers.start(self._time_to_save.follow_planned_ends())
        if self._plan.time_limit_s is not None:
            self._watchers.start(self._follow_time_limit(self._plan.time_limit_s))

    async def start(self, name: str) -> None:
        """Start one component and wait until it is ready.

        Raises:
            RunEnded: The end of the run was decided before the component was ready.
        """
        self._check_undecided(name)
        while True:
            await self._check_ports()
            self._check_undecided(name)
            component = self.components[name]
            await self._launch(component)
            # If the program could not be executed, the attempt has already failed. Raise the error
            # now, so that the component is not reported as ready.
            self._check_undecided(name)
            await self._until_settled(component)
            self._check_undecided(name)
            if not component.lost_port.is_set():
                break
            await self._move(component)
            self._check_undecided(name)
        self._progress.silence.restart()
        component.tasks.start(self._follow(component, component.until_unresponsive))
        component.tasks.start(self._follow(component, component.until_process_lost))
        if all(component.is_ready for component in self.components.values()):
            self._emit("attempt.ready", step=self._progress.step)

    async def _until_settled(self, component: RunningComponent) -> None:
        """Wait until a component is ready.

        Two events end the wait earlier: a process outside the run takes the port of the component,
        or the supervisor decides to end the attempt.
        """
        starting = component.tasks.start(self._await_ready(component))
        waits = [
            asyncio.create_task(event.wait())
            for event in (component.became_ready, component.lost_port, self.decided)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_tasks(starting, *waits)

    def _can_move(self, component: RunningComponent) -> bool:
        """Return True if a component whose port is taken may be started again on another port."""
        return (
            self._replan is not None
            and self._context.guards.can_prepare_again
            and self._moves_left > 0
            and not component.is_ready
            and not self.decided.is_set()
            and bool(self._context.ports.of(component.name))
        )

    async def _move(self, component: RunningComponent) -> None:
        """End a component whose port is taken, and prepare it again with another port.

        If another component has already been started with the old port in its command, the attempt
        fails instead.
        """
        assert self._replan is not None
        self._moves_left -= 1
        message = component.port_loss.message
        try:
            plan = await asyncio.to_thread(self._replan, component.name)
        except OSError as error:
            self._fail_by_loss(
                component, replace(component.port_loss, message=f"{message}; {error}")
            )
            return
        changed = [
            component_plan
            for before, component_plan in zip(self._plan.components, plan.components, strict=True)
            if not before.is_same_start(component_plan)
        ]
        launched = [
            component_plan.name
            for component_plan in changed
            if self.components[component_plan.name].is_launched
        ]
        if others := [name for name in launched if name != component.name]:
            started = ", ".join(others)
            reason = (
                f"{message}. The run cannot use another port, because {started} was already "
                "started with this port"
            )
            self._fail_by_loss(component, replace(component.port_loss, message=reason))
            return
        if component.name not in [component_plan.name for component_plan in changed]:
            # The component's command does not depend on the new port, so the component would use
            # the taken port again. Do not start the component again.
            self._fail_by_loss(component, component.port_loss)
            return
        self._emit("component.moved", component.name, pid=component.pid, reason=message)
        if await component.end():
            self._fail_by_loss(component, component.port_loss)
            return
        for component_plan in changed:
            if component_plan.name != component.name:
                await self.components[component_plan.name].end()
        if self.decided.is_set():
            return
        # Do not await anything from here on. A teardown that begins now must find either all
        # components with the old port or all components with the new port.
        self._launched.remove(component)
        try:
            for component_plan in changed:
                make = component_plan.make_component or ProcessComponent
                self.components[component_plan.name] = make(component_plan, self._context)
        except OSError as error:
            self._fail(component, f"{component.name} can't be started again: {error}", "spawn")
            return
        self._plan = self._context.plan = self._progress.plan = plan
        self._progress.source = self._step_source()

    def _step_source(self) -> StepSource | None:
        plan = self._plan
        return make_step_reader(
            plan.progress,
            plan.cwd,
            plan.metrics,
            self._context.client,
            self._check_alarms,
            self._context.readers,
        )

    async def _follow_places(self) -> None:
        """Check repeatedly whether reads from files and folders hang, and notify the user."""
        check_logs_at_s = 0.0
        while True:
            if time.monotonic() >= check_logs_at_s:
                check_logs_at_s = time.monotonic() + _CHECK_LOGS_EVERY_S
                self._context.log_reader.poll(self._context.read_first_bytes_of_logs)
            self._report_places()
            await asyncio.sleep(_PLACES_EVERY_S)

    def _report_places(self) -> None:
        """Publish an event for each file or folder that no longer answers, or answers again."""
        unanswered = {
            reader.place: reader
            for reader in self._context.readers.list_unanswered(_REPORT_PLACE_AFTER_S)
        }
        for place, reader in unanswered.items():
            if place not in self._reported:
                since = time.time() - reader.unanswered_s
                self._emit("place.unanswered", place=place, since=since, message=str(reader))
        for place in self._reported.keys() - unanswered.keys():
            self._emit("place.answered", place=place, message=f"{place} answers again")
        self._reported = unanswered

    async def _follow_checkpoints(self, plan: ComponentPlan) -> None:
        """Check repeatedly that the file system of a component's checkpoints responds.

        If these checks find that the file system hangs, the end of the attempt does not wait for
        the file system.
        """
        assert plan.is_saving is not None
        reader = self._context.readers.of(plan.checkpoints)
        while True:
            began_s = time.monotonic()
            with contextlib.suppress(PlaceTimeout, OSError):
                await reader.ask(plan.is_saving)
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(_CHECK_CHECKPOINTS_EVERY_S, took_s * _CHECK_CHECKPOINTS_PAUSE))

    async def _follow_ports(self) -> None:
        """Check repeatedly whether a process of another user listens on a port of the run."""
        while True:
            began_s = time.monotonic()
            await self._check_ports()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(_PORTS_EVERY_S, took_s * _PORTS_PAUSE))

    def _warn(self, message: str) -> None:
        """Add a warning to the events of the run."""
        self._emit("run.warning", message=message)

    async def _check_ports(self) -> None:
        """Check once whether a process of another user listens on a port of a running component.

        If so, that component is started again on another port, or the attempt fails.
        """
        try:
            table = await asyncio.to_thread(listening_sockets)
        except OSError as error:
            _log.warning("the processes that listen on the run's ports cannot be listed: %s", error)
            return
        own_users = (0, os.getuid())
        others = {listener.port for listener in table if listener.uid not in own_users}
        if not others & {*self._context.ports.numbers.values()}:
            return
        for component in tuple(self._launched):
            if (
                component.is_launched
                and component.exit is None
                and not component.lost_port.is_set()
            ):
                try:
                    await component.refuse_foreign_ports(others)
                except ComponentFailed as error:
                    self._give_up(component, error.reason)

    def _give_up(self, component: RunningComponent, reason: GiveUpReason) -> None:
        """Start a component on another port if its port is taken; otherwise end the attempt."""
        if reason.rule == PORT_TAKEN and self._can_move(component):
            component.port_loss = reason
            component.lost_port.set()
        else:
            self._fail_by_loss(component, reason)

    def interrupt(self, why: str, state: RunState = RunState.CANCELLED) -> None:
        """End the attempt for a reason outside the attempt, such as a cancel by the user.

        If the training has reached its last step and the trainer then ends with exit code 0, the
        attempt still counts as completed.

        Args:
            why: Reason for the end, in one line for the user.
            state: State of the run after the attempt. RUNNING means that the Ray jobs of the
                attempt continue until another process resumes the run.
        """

        async def make_verdict() -> Verdict:
            trainer = self._find_completed_trainer() if state is RunState.CANCELLED else None
            if trainer is None:
                return Verdict(state=state, message=why)
            return self._complete(f"{self._progress.describe_end()}; {trainer.name} has ended")

        self._decide(
            Decision(
                at_monotonic_s=time.monotonic(),
                state=state,
                reason=why,
                make_verdict=make_verdict,
                warns=True,
            )
        )

    def _find_completed_trainer(self) -> RunningComponent | None:
        """Return the component that has ended with exit code 0 after the last step.

        Returns:
            None if there is no such component, or if the last step is unknown or was not reached.
        """
        if not self._progress.is_finished:
            return None
        ended = (
            component
            for component in self._launched
            if component.plan.on_exit_zero == "complete" and component.is_ready
            if component.exit is not None and component.exit.is_zero
        )
        return next(ended, None)

    def _complete(self, message: str) -> Verdict:
        """Return the verdict of a completed attempt. Warn if a metric is NaN or infinite."""
        not_finite = self._alarms.describe_not_finite() if self._alarms else ""
        if not_finite:
            message = add_warning(message, not_finite)
        values = self._alarms.not_finite_values if self._alarms else ()
        return Verdict(state=RunState.COMPLETED, message=message, not_finite=values)

    def crash(self, error: BaseException) -> None:
        """Fail the attempt after an error in Muster's own code.

        The components are ended, because they must not continue without supervision.
        """
        _log.error("the supervision of run %s failed", self._plan.run_id, exc_info=error)
        message = f"an error in Muster ended the supervision of the run: {error!r}"
        if shortage := describe_shortage(error):
            message = f"{message}; {shortage}"
        self.fail(Failure(kind=FailureKind.UNKNOWN, message=message, rule="internal-error"))

    def fail(self, failure: Failure) -> None:
        """End the attempt as failed, for a reason that is not a failure of a component."""
        # While an earlier event is examined, every decision with a later time is ignored. But this
        # failure must not be ignored, because the examination itself may have failed. So give this
        # failure the time of the earlier event.
        at = min(time.monotonic(), self.earliest.horizon_s)
        self._decide(Decision.of(Verdict.failed(failure, at), at))

    def hurry(self) -> None:
        """Request that all components are killed without a grace period. Returns at once."""
        self._time_to_save.is_hurried = True
        for component in self._launched:
            component.kill()

    async def teardown(self) -> Verdict:
        """Stop the running components in reverse order, and wait until no process remains.

        If no event has decided yet how the attempt ends, the attempt ends as cancelled.

        Returns:
            The final state of the attempt, with a message and the failure. Further calls return the
            same verdict.
        """
        if self._teardown is None:
            self.interrupt("the run was ended before it had finished")
        # Wait for the decision how the attempt ends. After the end of a component, Muster needs
        # some time to find out whether the attempt has failed or is complete.
        await self.decided.wait()
        assert self._teardown is not None
        return await asyncio.shield(self._teardown)

    def _check_undecided(self, name: str) -> None:
        if self.decided.is_set():
            raise RunEnded(f"Muster does not start {name}, because the run is already ending")

    async def _launch(self, component: RunningComponent) -> None:
        """Start a component.

        Never cancel this coroutine: a process that the coroutine has started might then never be
        ended.
        """
        self._launched.append(component)
        self._progress.silence.restart()
        try:
            await component.launch()
        except ComponentFailed as error:
            self._give_up(component, error.reason)
        except OSError as error:  # includes TimeoutError
            reason = await self._explain_start_error(component, error)
            message = f"{component.name} can't be started: {reason}"
            if shortage := describe_shortage(error):
                message = f"{message}; {shortage}"
            kind = find_kind_of_start_error(error.errno)
            self._fail(component, message, "spawn", kind=kind)
        else:
            component.exited.add_done_callback(
                lambda exited: self._on_exit(component, exited.result())
            )

    async def _explain_start_error(self, component: RunningComponent, error: OSError) -> str:
        """Return the reason why a component could not be started, in one line for the user."""
        command = component.plan.command
        if isinstance(error, PlaceTimeout):
            return str(error)
        # The explanation reads files of the program. The files may be on a file system that does
        # not answer, so limit the time.
        return await call_with_time_limit(
            _EXPLAIN_START_WITHIN_S,
            lambda: describe_start_error(error, command.argv, command.env, command.cwd),
            error.strerror or str(error),
        )

    async def _await_ready(self, component: RunningComponent) -> None:
        if component.lost_port.is_set():
            return
        try:
            await component.until_running()
            # If the end of the attempt is already decided, do not start a task that watches the
            # component. The teardown would not cancel such a late task.
            if not self.decided.is_set():
                component.tasks.start(self._follow(component, component.until_job_lost))
            await component.until_ready()
        except ComponentFailed as error:
            self._give_up(component, error.reason)

    def _on_exit(self, component: RunningComponent, exit: Exit) -> None:
        component.exit = exit
        self._emit(
            "component.exited",
            component.name,
            pid=component.pid,
            exit_code=exit.exit_code,
            signal=exit.signal_name,
        )
        if component.lost_port.is_set() or not self.earliest.is_open_at(exit.at_monotonic_s):
            return
        if not exit.is_zero and self._can_move(component):
            self._examinations.start(self._judge_failed_start(component, exit))
        elif not exit.is_zero and self._may_be_finished(component, exit):
            self._conclude(component, exit)
        elif not exit.is_zero:
            self._fail_by_exit(component, exit)
        elif not component.is_ready:
            self._examinations.start(self._judge_early_exit(component, exit))
        else:
            self._judge_exit_zero(component, exit)

    async def _judge_failed_start(self, component: RunningComponent, exit: Exit) -> None:
        """Restart a component that failed before it was ready, or fail the attempt.

        If another process has taken the port of the component, the component is started again on
        another port. Otherwise the attempt fails.
        """
        line = ""
        with contextlib.suppress(PlaceTimeout):
            line = await self._context.log_reader.ask(
                partial(self._port_conflict_of, component), _READ_LOG_WITHIN_S
            )
        if component.lost_port.is_set():
            # While the log was read, another check found that the port is taken. `start` now
            # restarts the component or fails the attempt.
            return
        if line:
            message = f"{component.name} could not listen on its port: {line}"
            kind = FailureKind.PORT_CONFLICT
            reason = GiveUpReason(kind=kind, rule=PORT_TAKEN, message=message, exit=exit)
            if self._can_move(component):
                self._give_up(component, reason)
                return
        self._fail_by_exit(component, exit)

    def _port_conflict_of(self, component: RunningComponent) -> str:
        """Return the log line which says that a reserved port of the component is in use.

        The line counts only if it names the port, or if a process listens on the port now.

        Returns:
            An empty string if there is no such line.
        """
        cause = find_cause(component.read_log_end())
        if cause is None or cause.rule.kind is not FailureKind.PORT_CONFLICT:
            return ""
        own = self._context.ports.of(component.name).values()
        named = {int(word) for word in re.findall(r"\b\d{4,5}\b", cause.line)}
        with contextlib.suppress(OSError):
            named |= {listener.port for listener in listening_sockets()}
        return cause.line if named & {*own} else ""

    async def _judge_early_exit(self, component: RunningComponent, exit: Exit) -> None:
        """Decide about a component that exited with code 0 before a readiness check succeeded.

        The component may have become ready after the last readiness check, shortly before its exit.
        In this case, its setting `on_exit_zero` decides how the attempt continues. Otherwise the
        attempt fails.
        """
        if await component.was_ready_before_end():
            component.mark_ready()
            self._judge_exit_zero(component, exit)
        else:
            self._fail_by_exit(component, exit)

    def _judge_exit_zero(self, component: RunningComponent, exit: Exit) -> None:
        match component.plan.on_exit_zero:
            case "fail":
                self._fail_by_exit(component, exit)
            case "complete":
                self._conclude(component, exit)
            case "drain":
                component.is_drained = True
                self._emit("component.drained", component.name)
                if all(component.is_drained for component in self.components.values()):
                    self._conclude(component, exit)

    def _conclude(self, component: RunningComponent, exit: Exit) -> None:
        # The run does not need its other components any more. So ignore all events after this exit,
        # such as the end of another component.
        self.earliest.reserve(exit.at_monotonic_s)
        self._examinations.start(self._check_success(component, exit))

    def _may_be_finished(self, component: RunningComponent, exit: Exit) -> bool:
        """Return True if a component may have done all its work before a signal ended it.

        This is possible only for a trainer that was ready, in a run with a known last step.
        """
        is_trainer = component.plan.on_exit_zero == "complete" and component.is_ready
        has_signal = exit.signal is not None or _signal_of_shell(exit) is not None
        return has_signal and is_trainer and self._plan.last_step is not None

    async def _check_success(self, component: RunningComponent, exit: Exit) -> None:
        """After the end of a component, decide whether the attempt has succeeded.

        Called only if the end of this component can mean that all work of the run is done.
        """
        if not exit.is_zero:
            await self._check_killed(component, exit)
            return
        last = self._plan.last_step
        required = self._plan.success_step
        await self._progress.until_reached(required if required is not None else last)
        step = self._progress.highest_step
        is_finished = self._progress.is_finished or self._has_nothing_to_do(step)
        if required is not None and step is not None and step >= required:
            is_finished = True
        is_short = last is not None and not is_finished
        problem = await self._progress.explain_missing_step()
        if problem is not None and problem.is_before_first_line:
            text, _ = await self._read_log_end(component)
            problem = name_rank(problem, text)
        words = ""
        if is_short:
            text, _ = await self._read_log_end(component)
            words = "\n".join(text.splitlines()[-_LAST_LINES:])
        if sigterm_line := _SIGTERM_HEARD.search(words):
            message = (
                f"{component} ended with exit code 0{self._describe_missing_steps()}, after it had "
                f"received a SIGTERM that Muster did not send ({sigterm_line[0]})"
            )
            self._fail(
                component,
                message,
                "ended-from-outside",
                kind=FailureKind.UNKNOWN,
                exit=exit,
                hint="Probably a person, another program or a job manager asked the training to "
                "end. If the training should continue, start the run again.",
            )
            return
        if required is not None and not is_finished:
            reached = (
                "no step of the training is known"
                if step is None
                else f"only step {step:g} was reached"
            )
            message = (
                f"{component} ended with exit code 0, but {reached}: "
                f"`success` in the spec requires step {required:g}"
            )
            hint = _advise_early_exit(component.name, step)
            if problem is not None:
                message += f"; {problem}"
                hint = problem.remedy
            kind = FailureKind.RUNTIME_ERROR
            if self._progress.source is not None and self._progress.source.unanswered:
                kind = FailureKind.STORAGE
            self._fail(component, message, "success-not-reached", kind=kind, exit=exit, hint=hint)
            return
        message = str(self._progress) or f"{component.name} is done"
        warning = ""
        if is_finished and step is None and last is not None:
            message = (
                f"step {last:g} of {last:g}: nothing was left to do, because the attempt started "
                "from a checkpoint of the last step"
            )
        elif last is not None and is_short and (step is None or step < last - 1):
            # Do not warn if the reported step is `last - 1`. A trainer that counts its steps from
            # zero reports this number for its last step.
            warning = f"{component.name} ended with exit code 0{self._describe_missing_steps()}"
            if problem is None:
                warning += (
                    f". If a run that ends before step {last:g} should count as failed, write "
                    f"`success: {{step: {last:g}}}` into the spec"
                )
        elif last is None and problem is not None:
            warning = f"{component.name} ended, but no step of its training is known"
        elif (total := self._progress.total) is not None and step is not None and step > total + 1:
            # Do not warn about step `total + 1`, because some trainers report one step more.
            warning = (
                f"{component.name} reached step {step:g}, but `progress.total` in the spec is "
                f"{total:g}. Write the real number of steps there, because Muster computes the "
                "remaining time of the run from this number"
            )
        if warning and problem is not None:
            warning += f": {problem}"
        not_finite = self._alarms.describe_not_finite() if self._alarms else ""
        reason = message
        if warning:
            if problem is None or not self._progress.has_warned:
                self._emit("run.warning", message=warning)
            message = f"warning: {warning}"
        if not_finite:
            self._emit(
                "run.warning", message=not_finite if warning else f"{message}, but {not_finite}"
            )
            message = add_warning(message, not_finite)
        if warning or not_finite:
            reason = f"{component.name} ended with exit code 0"
        values = self._alarms.not_finite_values if self._alarms else ()
        verdict = Verdict(state=RunState.COMPLETED, message=message, not_finite=values)
        decision = Decision.of(verdict, exit.at_monotonic_s)
        self._decide(replace(decision, reason=reason))

    def _has_nothing_to_do(self, step: float | None) -> bool:
        """Return True if the attempt started at the last step, so that it trained no step."""
        loaded = self._plan.resume.step if self._plan.resume else None
        is_last = loaded is not None and loaded in (self._plan.last_step, self._plan.success_step)
        return step in (None, loaded) and (is_last or self._plan.starts_finished)

    def _describe_missing_steps(self) -> str:
        """Return a text such as ` at step 12 of 60`: the reached step and the run's last step.

        If no step was ever read, the text says that the reached step is unknown.

        Returns:
            An empty string if the last step is unknown.
        """
        last = self._plan.last_step
        if last is None:
            return ""
        step = self._progress.highest_step
        if step is None:
            return f", but the reached training step is unknown (the training has {last:g} steps)"
        return f" at step {step:g} of {last:g}"

    async def _check_killed(self, component: RunningComponent, exit: Exit) -> None:
        """Decide whether a component had done its work before a signal ended it.

        The work is done if the training has reached its last step, and one of these is true:

        - The component's newest complete checkpoint contains the last step, or was saved after the
          last step was reached.
        - The component has no checkpoint, and it crashed, for example with SIGSEGV.
        """
        await self._progress.until_reached(None)
        if not self._progress.is_finished:
            self._fail_by_exit(component, exit)
            return
        newest: tuple[int | None, float] | None = None
        is_known = True
        find_checkpoint = component.plan.find_checkpoint
        if find_checkpoint is not None:
            reader = self._context.readers.of(component.plan.checkpoints)
            try:
                newest = await reader.ask(find_checkpoint, _FIND_CHECKPOINT_WITHIN_S)
            except Exception as error:
                # The folder of the checkpoints cannot be read, or its file system does not answer.
                _log.warning("the last checkpoint of %s is unknown: %s", component.name, error)
                is_known = False
        last = self._plan.last_step or 0
        reached_at = self._progress.reached_at or math.inf
        is_saved = newest is not None and ((newest[0] or 0) >= last or newest[1] >= reached_at)
        exit_signal = exit.signal_name or _signal_of_shell(exit)
        is_crash_at_exit = is_known and newest is None and exit_signal in _FATAL_SIGNALS
        if not is_saved and not is_crash_at_exit:
            self._fail_by_exit(component, exit)
            return
        where = "after its last checkpoint" if is_saved else "at its exit"
        message = (
            f"{self._progress.describe_end()}; {component.name} was killed by {exit_signal} {where}"
        )
        verdict = Verdict(state=RunState.COMPLETED, message=message)
        self._decide(Decision.of(verdict, exit.at_monotonic_s))

    def _fail_by_exit(self, component: RunningComponent, exit: Exit) -> None:
        ended = str(exit) if exit.signal is not None else f"ended with {exit}"
        ready = component.plan.ready
        is_preparation = ready is not None and ready.exit is not None
        before = "" if component.is_ready or is_preparation else " before it was ready"
        early = ", although the run still needed it" if exit.is_zero and not before else ""
        message = f"{component} {ended}{before} after {component.seconds_alive():.1f} s{early}"
        if self._progress.is_finished:
            message += f"; {self._progress.describe_end()}"
        hint = ""
        if exit.is_zero:
            hint = (
                f"Read the end of the component's log to see why {component.name} ended. "
                f"{component.name} must run until the run ends, and must not move itself into the "
                "background."
            )
        if early:
            hint += (
                f" If {component.name} is allowed to end before the run ends, write "
                f"`on_exit_zero: drain` into `components.{component.name}` of the spec."
            )
        self._fail(component, message, "exit", exit=exit, hint=hint)

    def _fail_by_loss(self, component: RunningComponent, reason: GiveUpReason) -> None:
        message = f"{component}: {reason.message}"
        self._fail(component, message, reason.rule, kind=reason.kind, exit=reason.exit)

    def _fail(
        self,
        component: RunningComponent,
        message: str,
        rule: str,
        *,
        kind: FailureKind | None = None,
        exit: Exit | None = None,
        hint: str = "",
        place_words: str = "it hangs in",
    ) -> None:
        """Decide that a component has failed.

        Args:
            component: The component.
            message: One line that describes the failure.
            rule: Name of the rule that noticed the failure.
            kind: Kind of the failure, or None if the log of the component decides the kind.
            exit: Exit of the component, or None if it has not ended.
            hint: Advice for the user if the log of the component does not show the cause.
            place_words: Words that introduce the code location at which a component hangs, for
                example `it was in`.
        """
        at = exit.at_monotonic_s if exit is not None else time.monotonic()
        since = self._progress.size_of_survived_log(component.log.path)
        limits: asyncio.Future[tuple[HostLimit, ...]] | None = None
        measured: Future[tuple[FileSystem, ...]] | None = None
        if exit is not None:
            # Measure the use of processes and threads before the teardown. The teardown ends the
            # processes that may have used up a limit.
            loop = asyncio.get_running_loop()
            limits = loop.run_in_executor(None, measure_process_limits)
            if not self._disk_reader.is_overdue:
                measured = self._disk_reader.submit(partial(measure_at_exit, component.log.path))
        if kind is FailureKind.STALLED and self.earliest.is_open_at(at):
            component.is_hung = True

        async def make_verdict() -> Verdict:
            until = self._sizes_before_stop.get(component.name)
            text, problem = await self._read_log_end(component, since, until)
            evidence = await self._read_evidence(component, exit)
            file_systems: tuple[FileSystem, ...] = ()
            if measured is not None:
                with contextlib.suppress(PlaceTimeout):
                    file_systems = await self._disk_reader.until_done(measured, _MEASURE_WITHIN_S)
            full_message = message
            if component.hangs_in:
                full_message = f"{message}; {place_words} {component.hangs_in}"
            if problem and problem not in message:
                full_message = f"{full_message}; {problem}"
            # Use a thread, because the search in a long log can take two seconds.
            failure = await asyncio.to_thread(
                make_failure,
                component.name,
                text,
                message=full_message,
                rule=rule,
                kind=kind,
                exit=exit,
                evidence=evidence,
                folder=component.plan.command.cwd,
            )
            failure = failure.with_changes(hint=failure.hint or hint)
            failure = name_full_disk(failure, file_systems)
            limits_at_exit: tuple[HostLimit, ...] = ()
            if limits is not None and limits.done() and limits.exception() is None:
                limits_at_exit = limits.result()
            failure = name_reached_limit(failure, limits_at_exit)
            return Verdict.failed(failure, at)

        self._decide(
            Decision(
                at_monotonic_s=at,
                state=RunState.FAILED,
                reason=message,
                make_verdict=make_verdict,
                component=component.name,
            )
        )

    @property
    def _disk_reader(self) -> PlaceReader:
        """Reader that measures the free space of the logs' file system."""
        return self._context.readers.of("the file system of the logs")

    async def _read_log_end(
        self, component: RunningComponent, since: int = 0, until: int | None = None
    ) -> tuple[str, str]:
        """Return the end of a component's log.

        Args:
            component: The component.
            since: See `RunningComponent.read_log_end`.
            until: See `RunningComponent.read_log_end`.

        Returns:
            `(text, problem)`: the end of the log and an empty string. If the file system of the log
            does not respond in time, an empty string and a message about the file system.
        """
        reader = self._context.log_reader
        try:
            # First read one byte with a short time limit, to notice a file system that does not
            # answer. The search in a long log has a longer limit.
            await reader.ask(partial(self._context.read_first_byte, component.log))
            read = partial(component.read_log_end, since, until)
            return await reader.ask(read, _READ_LOG_WITHIN_S), ""
        except PlaceTimeout as error:
            return "", str(error)

    async def _read_evidence(self, component: RunningComponent, exit: Exit | None) -> DeathEvidence:
        """Return the facts about the deaths of a component's processes, as far as known."""
        if exit is None:
            return _NO_EVIDENCE
        try:
            reader = self._context.log_reader
            return await reader.ask(partial(component.explain_death, exit), _READ_LOG_WITHIN_S)
        except PlaceTimeout:
            return _NO_EVIDENCE

    def _decide(self, decision: Decision) -> None:
        if not self.earliest.decide(decision) or self._teardown is not None:
            return
        if not decision.state.is_final:
            self._teardown = asyncio.create_task(self._hand_over(decision))
            self.decided.set()
            return
        last = self._launched[-1] if self._launched else None
        is_free = last is not None and last.exit is None and not self._may_be_saving(last)
        is_warned = decision.warns and any(m.plan.warning is not None for m in self._launched)
        is_blamed = last is not None and last.name == decision.component
        is_unexamined = not is_blamed and not self._hung_components()
        if last is not None and is_free and not is_warned and is_unexamined:
            # The teardown first writes events, and then stops the components in the reverse order
            # of their launch. To save time, send the stop signal already now to the component that
            # was launched last. Do not do this if the component caused the end of the attempt: the
            # size of the component's log must be read before the signal.
            last.stop()
        self._teardown = asyncio.create_task(self._take_down(decision))
        self.decided.set()

    def _may_be_saving(self, component: RunningComponent) -> bool:
        """Return True if Muster must check whether a component is writing a checkpoint.

        The result is False if the file system of the checkpoints hangs, because no check of the
        checkpoints is possible.
        """
        is_saving = component.plan.is_saving
        reader = self._context.readers.of(component.plan.checkpoints)
        return is_saving is not None and not reader.is_overdue

    async def _take_down(self, decision: Decision) -> Verdict:
        self._context.hurry()
        self._emit("teardown.begun", reason=decision.reason, cause=decision.component)
        await self._cancel_watchers()
        # Record the size of the logs before any component is examined or stopped. The examination
        # appends call stacks to the log, and a launcher reports the stop signal as an error. The
        # search for the cause of the failure skips these lines.
        for component in self._launched:
            is_blamed = component.name == decision.component and component.exit is None
            if is_blamed or component.is_hung:
                with contextlib.suppress(PlaceTimeout):
                    size = await self._context.log_reader.ask(component.log.size)
                    self._sizes_before_stop[component.name] = max(0, size)
        # Examine components that hang before any component is stopped. A component may hang because
        # it waits for another component. After the end of that other component, the call stacks of
        # the waiting component would no longer show the wait.
        await self._for_each(
            self._hung_components().values(), lambda component: component.examine()
        )
        time_to_save = self._time_to_save
        if decision.warns:
            try:
                await time_to_save.warn_now(decision.reason)
            except Exception:
                _log.exception(
                    "Muster could not send the warning signal (`stop.warn` in the spec) before the "
                    "stop of the components"
                )
        # Wait for the checkpoints before any component is stopped. A trainer may need the other
        # components until it has finished its step and its checkpoint.
        await self._for_each(self._launched, time_to_save.until_saved)
        left: dict[str, tuple[int | str, ...]] = {}
        errors: dict[str, str] = {}
        for component in reversed(self._launched):
            await self._end_component(component, left, errors)
        unused = [component for component in self.components.values() if not component.is_launched]
        await asyncio.gather(
            *(self._end_component(component, left, errors) for component in unused)
        )
        await self._examinations.finish()
        left_at_close, _ = await asyncio.gather(self._close_context(errors), self._read_last_step())
        left = {**left_at_close, **left}
        failed_ends = {name: (error,) for name, error in errors.items()}
        self._emit("teardown.ended", left={**left, **failed_ends} or None)
        verdict = await self._make_verdict(self.earliest.decision or decision)
        self._report_places()
        self._context.readers.close()
        self._context.release_logs()
        if left:
            verdict = verdict.with_leftovers(left)
        if errors:
            verdict = verdict.with_failed_ends(errors)
        unseen = {component.name: component.unseen for component in self._launched}
        return verdict.with_unseen({name: texts for name, texts in unseen.items() if texts})

    async def _cancel_watchers(self) -> None:
        """Cancel the tasks that watch the attempt and its components, and wait for their end."""
        owners = [self._watchers, *(component.tasks for component in self.components.values())]
        await asyncio.gather(*(owner.cancel() for owner in owners))

    async def _close_context(self, errors: dict[str, str]) -> dict[str, tuple[str, ...]]:
        """Close the resources of the attempt. See `AttemptContext.close` for the result.

        Args:
            errors: Mapping from component name to error text. If this function fails, it adds its
                error under the name "teardown".
        """
        try:
            return await self._context.close()
        except Exception as error:
            _log.exception("the teardown of run %s could not be completed", self._plan.run_id)
            errors["teardown"] = repr(error)
            return {}

    async def _read_last_step(self) -> None:
        """Read the training step once more, after the end of all components.

        This step shows whether the attempt has made progress.
        """
        if self._plan.progress is None or self._plan.progress.jsonl is None:
            return
        try:
            await self._progress.until_reached(None)
        except Exception:
            _log.exception("the last step of run %s could not be read", self._plan.run_id)

    async def _end_component(
        self,
        component: RunningComponent,
        left: dict[str, tuple[int | str, ...]],
        errors: dict[str, str],
    ) -> None:
        """End a component. An error is recorded in `errors`, and not raised.

        Args:
            component: The component.
            left: Mapping from component name to processes. This function adds the processes that
                could not be ended.
            errors: Mapping from component name to error text. If this function fails, it adds its
                error, and kills the processes of the component.
        """
        try:
            if component.is_launched:
                await self._time_to_save.until_saved(component)
            async with self._time_to_save.delaying_kill(component):
                if leftovers := await component.end():
                    left[component.name] = leftovers
        except Exception as error:
            _log.exception("component %s could not be ended", component.name)
            errors[component.name] = repr(error)
            with contextlib.suppress(Exception):
                component.kill()

    async def _for_each(
        self,
        components: Iterable[RunningComponent],
        work: Callable[[RunningComponent], Awaitable[None]],
    ) -> None:
        """Do some work for several components at the same time. Errors are only logged."""
        components = list(components)
        results = await asyncio.gather(*map(work, components), return_exceptions=True)
        for component, error in zip(components, results, strict=True):
            if error is not None:
                _log.error(
                    "an error occurred while component %s was ended", component.name, exc_info=error
                )

    async def _make_verdict(self, decision: Decision) -> Verdict:
        """Return the verdict of a decision: the final state of the attempt and its reason.

        The verdict is a failure if Muster cannot determine it within `_RESULT_WITHIN_S` seconds, or
        if an error occurs in Muster's own code.
        """
        try:
            async with asyncio.timeout(_RESULT_WITHIN_S):
                return await decision.make_verdict()
        except Exception as error:
            _log.exception("the result of run %s could not be determined", self._plan.run_id)
            message = f"{decision.reason}; Muster could not find the cause: {error!r}"
            failure = Failure(kind=FailureKind.UNKNOWN, message=message, rule="internal-error")
            return Verdict.failed(failure, decision.at_monotonic_s)

    async def _hand_over(self, decision: Decision) -> Verdict:
        self._emit("attempt.left", reason=decision.reason)
        await self._cancel_watchers()
        await self._for_each(self.components.values(), lambda component: component.detach())
        try:
            await self._context.close()
        except Exception:
            _log.exception(
                "the ports and guardian processes of run %s could not be closed", self._plan.run_id
            )
        verdict = await self._make_verdict(decision)
        self._context.readers.close()
        self._context.release_logs()
        return verdict

    async def _follow(
        self, component: RunningComponent, until_lost: Callable[[], Awaitable[GiveUpReason]]
    ) -> None:
        reason = await until_lost()
        if reason.kind is FailureKind.STALLED and self._progress.is_finished:
            # Ignore the failed liveness probe, because the last step was reached. The trainer may
            # already have closed the server that answers the probe.
            return
        self._fail_by_loss(component, reason)

    async def _follow_progress(self) -> None:
        end, why = await self._progress.until_over()
        if end is ProgressEnd.FINISHED:
            self._finish(why)
            return
        hint = ""
        place_words = "it hangs in"
        if end is ProgressEnd.NO_FIRST_STEP:
            hint = _FIRST_STEP_HINT
            # The component may still be working. For example, it may be importing modules.
            place_words = "it was in"
        elif self._plan.progress is None:
            hint = _NO_OUTPUT_HINT
        self._fail(
            self._stalled_component(),
            why,
            "stall",
            kind=FailureKind.STALLED,
            hint=hint.format(limit_s=self._plan.stall_after_s, hang_report=HANG_REPORT),
            place_words=place_words,
        )

    def _finish(self, why: str) -> None:
        """Decide that the attempt is completed, although some components still run.

        Called if components still run `finish_within_s` seconds after the last step of the run.
        """
        component = self._stalled_component()
        # Mark the component as hung, so that its call stacks are read before it is ended. The call
        # stacks show why the component did not end.
        component.is_hung = True
        within_s = self._plan.finish_within_s

        async def make_verdict() -> Verdict:
            place = f" (it hangs in {component.hangs_in})" if component.hangs_in else ""
            message = (
                f"{why}; {component.name} did not end within {within_s:g} s and was stopped{place}"
            )
            return Verdict(state=RunState.COMPLETED, message=message)

        self._decide(
            Decision(
                at_monotonic_s=time.monotonic(),
                state=RunState.COMPLETED,
                reason=f"{why}; stopping the remaining components",
                make_verdict=make_verdict,
            )
        )

    def _check_alarms(self, step: float, figures: Mapping[str, Any]) -> None:
        self._progress.note_line(step)
        for alarm in self._alarms.evaluate(step, figures) if self._alarms else ():
            self._emit("run.alarm", **asdict(alarm), message=alarm.message)
            if alarm.then == "stop":
                rule = f"watch-{alarm.rule}"
                watch_rule = (self._plan.alarms or {}).get(alarm.rule)
                is_about_nan = watch_rule is not None and bool(watch_rule.finite)
                self._fail(
                    self._stalled_component(),
                    alarm.message,
                    rule,
                    kind=FailureKind.ALARM,
                    hint=_NOT_FINITE_HINT if is_about_nan else "",
                )

    async def _publish_gpu_use(self) -> None:
        """Publish the GPU utilisation of the run repeatedly, with growing intervals."""
        has_driver = True
        async for _ in growing_intervals():
            if self._is_quiet():
                continue
            use = dict[str, float]()
            gpu_state: dict[str, Any] = {}
            if has_driver:
                gpu_state = await call_with_time_limit(
                    _DRIVER_WITHIN_S, read_gpus, gpu_state, "the query of the GPU driver"
                )
            has_driver = bool(gpu_state.get("gpus"))
            if (own := self._mean_gpu_use(gpu_state)) is not None:
                use[host_name()] = own
            try:
                use |= await self._plan.gpu_use() if self._plan.gpu_use else {}
            except Exception as error:
                # Continue after any error. The utilisation is only shown to people, and the answer
                # may come from a program that is not a Ray dashboard.
                _log.warning(
                    "the GPU utilisation of run %s could not be read: %r", self._plan.run_id, error
                )
            if use:
                self._emit("run.load", gpus=use)

    def _mean_gpu_use(self, gpu_state: Mapping[str, Any]) -> float | None:
        """Return the mean utilisation of the run's GPUs on this machine, from 0 to 1.

        If the run has no granted GPUs, the GPUs that its processes use are counted instead.

        Args:
            gpu_state: Result of `read_gpus`.

        Returns:
            None if no utilisation is known.
        """
        granted = self._plan.devices
        gpu_processes = gpu_state.get("processes", ())
        # List the processes of the run only if they are needed. A run may have thousands of
        # processes.
        pids = self._context.guards.own_pids() if gpu_processes and not granted else set[int]()
        used_uuids = {process["uuid"] for process in gpu_processes if process["pid"] in pids}

        def is_own(gpu: Mapping[str, Any]) -> bool:
            return gpu["index"] in granted if granted else gpu["uuid"] in used_uuids

        shares = [
            gpu["busy_percent"] / 100
            for gpu in gpu_state.get("gpus", ())
            if is_own(gpu) and gpu["busy_percent"] is not None
        ]
        return fmean(shares) if shares else None

    async def _follow_time_limit(self, limit_s: float) -> None:
        """Warn the components before the attempt's time limit. At the limit, end the attempt."""
        # If this process has resumed the attempt of an earlier process, count the time limit from
        # the start of the attempt in that process.
        began_at = self._plan.began_at if self._plan.began_at is not None else time.time()
        end_at = began_at + limit_s
        limit = self._plan.time_limit_text or (
            f"time limit of {limit_s / 3600:g} hours (gang.max_hours)"
        )
        self._watchers.start(
            self._time_to_save.announce_end(end_at, f"the attempt reaches its {limit}")
        )
        await asyncio.sleep(max(0.0, end_at - time.time()))
        if self._progress.is_finished:
            return
        message = f"the attempt has reached its {limit}"
        failure = Failure(kind=FailureKind.TIME_LIMIT, message=message, rule="time-limit")
        self._decide(Decision.of(Verdict.failed(failure, time.monotonic()), warns=True))

    def _is_quiet(self) -> bool:
        """Return True if no progress is expected now.

        No progress is expected before the first component is started, and while a component is
        pending, for example a Ray job that waits for its GPUs.
        """
        return not self._launched or any(component.is_pending for component in self._launched)

    def _stalled_component(self) -> RunningComponent:
        """Return the component that is blamed if the run makes no progress.

        Among the components that are not ready yet, the one that was started last is blamed. If all
        components are ready, the trainer is blamed; without a trainer, the component that was
        started last.
        """
        running = [
            component for component in self._launched if component.exit is None
        ] or self._launched
        starting = [component for component in running if not component.is_ready]
        trainer = [component for component in running if component.name == "trainer"]
        return (starting or trainer or running)[-1]

    def _hung_components(self) -> dict[str, RunningComponent]:
        return {name: component for name, component in self.components.items() if component.is_hung}
