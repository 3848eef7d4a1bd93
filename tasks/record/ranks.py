"""Find the process of a distributed training that failed first, from the launcher's own messages.

A training on several GPUs has one process for each GPU, its *rank*. If one rank dies, the other
ranks fail a moment later, because they wait for it. Their messages are usually longer and later
than those of the first rank. The launcher of the ranks notices the deaths and reports them:

- torchrun and accelerate print a table with the exit code and pid of each failed rank;
- deepspeed prints the command of the first process that failed, with its `--local_rank`;
- `torch.multiprocessing.spawn` and `multiprocessing` name the process.

The reports of the launchers are the last lines of a log. `remove_launcher_reports` removes them, so
that the user sees the last lines of the ranks.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

#: Exit code of a process that the launcher itself has stopped.
_STOPPED = -signal.SIGTERM
#: Matches one entry of torchrun's table.
#: Source: torch/distributed/elastic/multiprocessing/errors, ChildFailedError.
_TABLE_ENTRY = re.compile(
    r"^[ \t]*rank +: (?P<rank>\d+) \(local_rank: \d+\)\s*?\n"
    r"[ \t]*exitcode +: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.MULTILINE,
)
#: Line of torchrun's table before the entry of the rank whose failure was observed first.
_ROOT_CAUSE = "Root Cause (first observed failure)"
#: Matches the message of DeepSpeed's launcher. Source: deepspeed/launcher/launch.py.
_DEEPSPEED = re.compile(
    r"--local_rank=(?P<rank>\d+)[^\n]{0,2000}\] exits with return code = (?P<code>-?\d+)"
)
#: Matches the messages of torch.multiprocessing.spawn. Source: torch/multiprocessing/spawn.py.
_SPAWNED = re.compile(
    r"[Pp]rocess (?P<rank>\d+) terminated with (?:signal (?P<signal>SIG\w+)"
    r"|exit code (?P<code>\d+)|the following error)"
)
#: Matches the line that `multiprocessing` prints before the traceback of a process.
_NAMED_PROCESS = re.compile(
    r"^Process (?P<name>[\w.-]{1,60}(?::\d+)?):$(?=\s+Traceback)", re.MULTILINE
)
#: Matches one entry of the table of failed ranks that torchrun prints, with the entry's traceback
#: if it has one.
_TABLE_BLOCK = re.compile(r"^\[\d+\]:[ \t]*\n(?:[ \t][^\n]*\n?|\n)*", re.MULTILINE)
#: Matches the line in which torchrun reports the exit code of one rank.
#: Source: torch/distributed/elastic/multiprocessing/api.py.
_REPORTED_EXIT = re.compile(
    r"^[^\n]{0,200}failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: (?P<pid>\d+)\)[^\n]*\n?",
    re.MULTILINE,
)
#: Matches a log message of torchrun or of DeepSpeed's launcher about the processes of the ranks.
#: The name of torchrun's module follows the level and the time, in one of three formats:
#: `W1127 08:21:44.3 321 torch/...`, `[2024-05-01 10:00:00,1] torch...` and `WARNING:torch...`.
_LAUNCHER_MESSAGE = re.compile(
    r"^(?:[WEIF]\d{4} [\d:.]+ +\d+ (?:\S*/)?torch/distributed/(?:elastic|launcher|run\.py)"
    r"|\[\d{4}-[^\]\n]{1,40}\] torch\.distributed\.(?:elastic|launcher|run)"
    r"|(?:INFO|WARNING|ERROR|CRITICAL):torch\.distributed\.(?:elastic|launcher|run)"
    r"|\[\d{4}-[^\]\n]{1,40}\] \[\w+\] \[(?:launch|runner)\.py:)[^\n]*\n?",
    re.MULTILINE,
)
#: Matches a line in which torchrun reports the exit code or the signal of one rank.
_EXIT_REPORT = re.compile(
    r"\bSignal \d+ \(SIG\w+\) received by PID \d+|failed \(exitcode: -?\d+\) local_rank: \d+"
    r"|\bexitcode +: -?\d+ \(pid: \d+\)"
)
#: Matches a traceback, which begins at the start of a line. The last line is in the group `error`.
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):[ \t]*\n(?P<frames>(?:[ \t][^\n]*\n)+)"
    r"(?P<error>\S[^\n]*(?:\n|$))",
    re.MULTILINE,
)
#: Matches the error of a launcher that only reports the end of a rank, or its own stop by a signal.
#: Source: torch/distributed/elastic/multiprocessing/errors and api.py.
_LAUNCHER_ERROR = re.compile(
    r"torch\.distributed\.elastic\.multiprocessing\.\S*(?:ChildFailedError|SignalException):"
)
#: Matches a line of a traceback in the program `accelerate launch`, which starts the training.
_ACCELERATE_FRAME = re.compile(r"[/\\]accelerate[/\\]commands[/\\]launch\.py")
#: Matches torchrun's table of the failed ranks, from the first to the last line of `=`.
_TABLE = re.compile(
    r"^={20,}[ \t]*\n[^\n]* FAILED[ \t]*\n-{20,}[ \t]*\nFailures:[ \t]*\n"
    r"(?:(?!={20})[^\n]*\n)*(?:={20,}[ \t]*(?:\n|$))?",
    re.MULTILINE,
)
#: Matches the rank that PyTorch writes at the beginning of a line: `[rank1]: ` before a traceback,
#: `[Rank 1] ` in messages of ProcessGroupNCCL.
_RANK_PREFIX = re.compile(r"^(?:\[[^\[\]\n]{1,60}\]:? ?){0,2}?\[[Rr]ank ?(\d+)\]", re.MULTILINE)
#: Matches errors of a rank that lost its connection to another rank. Python's own exceptions are
#: not matched, because a rank may also lose the connection to a server.
_LOST_PEER = re.compile(
    r"(?<!\bErrno 32\] )(?<!\bErrno 104\] )"
    r"(?:Connection (?:closed|reset) by (?:remote )?peer|[Bb]roken pipe)"
    r"|ncclRemoteError|DistBackendError|DistNetworkError|DistStoreError|remote process exited"
    r"|Socket recv failed|recvValue failed|Connection was likely closed|connectFullMesh failed"
)
#: Matches errors of a rank that waited in vain for another rank.
_WAITED_IN_VAIN = re.compile(r"Timed out waiting \d+ms|[Ww]atchdog|NCCL .{0,80}[Tt]imeout")
#: Exit code of a Python program that ends with an exception.
_EXCEPTION_EXIT_CODE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The process of a distributed training that failed first."""

    #: Name of the process: `rank 1`, `local rank 1`, `process 1` or `Process-2`.
    name: str
    #: Number of the rank. None if the launcher does not report a rank.
    rank: int | None = None
    #: Process id, or None if unknown.
    pid: int | None = None
    #: Exit code, or the negative number of the signal that ended the process. None if the process
    #: ended with an exception whose traceback is in the log.
    exit_code: int | None = None
    #: Ranks that this rank waited for in vain, although they were alive.
    alive: tuple[int, ...] = ()
    #: True if other processes of the training on this machine failed later.
    others_failed: bool = False

    @property
    def short_name(self) -> str:
        """Name of the process without its command line: `rank 1` or `process 812`."""
        return self.name if self.pid is None or "`" not in self.name else f"process {self.pid}"

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the process; None if no signal is known."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        return _name_signal(-self.exit_code)

    def __str__(self) -> str:
        """Return the name of the process with its end, such as `rank 1 (pid 7) got SIGKILL`."""
        subject = self.name if self.pid is None else f"{self.name} (pid {self.pid})"
        if self.exit_code is None:
            return f"{subject} failed first"
        if self.exit_code == 0:
            end = "ended first, with exit code 0, while other ranks were still training"
        elif self.exit_code < 0:
            end = f"was killed by {_name_signal(-self.exit_code)} first"
        else:
            end = f"ended first, with exit code {self.exit_code}"
        if not self.alive:
            return f"{subject} {end}"
        ranks = ", ".join(map(str, self.alive))
        noun = "rank" if len(self.alive) == 1 else "ranks"
        return f"{subject} {end}, after it had waited in vain for {noun} {ranks} (still alive)"


def find_first_rank(text: str) -> RankFailure | None:
    """Return the process of a distributed training that failed first.

    Args:
        text: The end of the log of the launcher and of its processes.

    Returns:
        The process. None if the log contains no message of a launcher that names a process.
    """
    if (failure := _read_table(text)) is not None:
        return failure
    if match := _DEEPSPEED.search(text):
        rank = int(match["rank"])
        return RankFailure(name=f"local rank {rank}", rank=rank, exit_code=int(match["code"]))
    if match := _SPAWNED.search(text):
        exit_code = int(match["code"]) if match["code"] else None
        if match["signal"] in signal.Signals.__members__:
            exit_code = -signal.Signals[match["signal"]]
        return RankFailure(name=f"process {match['rank']}", exit_code=exit_code)
    return _find_named_process(text)


def _find_named_process(text: str) -> RankFailure | None:
    """Return the first process of `multiprocessing` whose traceback is in the log, or None.

    A process that only lost its connection to another process did not fail first.
    """
    matches = [*_NAMED_PROCESS.finditer(text)]
    for number, match in enumerate(matches, start=1):
        end = matches[number].start() if number < len(matches) else len(text)
        if not _LOST_PEER.search(text, match.end(), end):
            return RankFailure(name=match["name"])
    return None


def select_lines_of_rank(text: str, failure: RankFailure) -> str:
    """Return the log without the lines about other ranks than the failed rank.

    These are the lines that PyTorch marks as those of other ranks, and the exits of other ranks
    that torchrun reports.
    """

    def keep_own_exit(match: re.Match[str]) -> str:
        return match[0] if failure.pid in (None, int(match["pid"])) else ""

    def keep_own_entry(match: re.Match[str]) -> str:
        entry = _TABLE_ENTRY.search(match[0])
        return match[0] if entry is None or int(entry["rank"]) == failure.rank else ""

    text = _REPORTED_EXIT.sub(keep_own_exit, text)
    if failure.rank is None:
        return text
    text = _TABLE_BLOCK.sub(keep_own_entry, text)
    lines = []
    for line in text.splitlines(keepends=True):
        prefix = _RANK_PREFIX.match(line)
        if prefix is None or int(prefix[1]) == failure.rank:
            lines.append(line)
    return "".join(lines)


def is_consequence(line: str, failure: RankFailure) -> bool:
    """Return True if a line of a log is only a consequence of the death of the failed process.

    Another process then wrote the line. For example, the process that failed first cannot have lost
    its connection to a dead process, so such an error is from another process. A line that PyTorch
    marks with the rank of the failed process is never a consequence.

    Args:
        line: A line of the log that `select_lines_of_rank` returned, as it was printed.
        failure: The process that failed first.
    """
    code = failure.exit_code
    if code is None:
        return False
    has_rank = _RANK_PREFIX.match(line) is not None
    if has_rank and failure.rank is not None:
        return False
    may_be_own = code == _EXCEPTION_EXIT_CODE and not failure.others_failed
    if _LOST_PEER.search(line):
        return not may_be_own
    # A process that waited in vain for another process ends with the exit code of an exception. If
    # the watchdog of NCCL ends the process, it ends with SIGABRT.
    is_end_of_waiting = code in (_EXCEPTION_EXIT_CODE, -signal.SIGABRT)
    return has_rank and not is_end_of_waiting and _WAITED_IN_VAIN.search(line) is not None


def has_lost_peer(text: str) -> bool:
    """Return True if a rank has lost its connection to another rank, or waited for it in vain."""
    return (_LOST_PEER.search(text) or _WAITED_IN_VAIN.search(text)) is not None


def has_error_file(text: str, failure: RankFailure) -> bool:
    """Return True if the error file of torchrun can be about the failed process.

    torchrun writes the error of the rank whose failure it observed first. This rank is the last
    entry of its table. If the log contains no table, the rank of the error file is unknown.

    Args:
        text: The end of the log.
        failure: The process that failed first.
    """
    root_at = text.rfind(_ROOT_CAUSE)
    root = _TABLE_ENTRY.search(text, root_at) if root_at >= 0 else None
    return root is None or failure.pid in (None, int(root["pid"]))


def is_victim(text: str, rank: int) -> bool:
    """Return True if a rank failed only because another rank was lost or did not respond.

    The result depends only on the lines about the rank in the log. These are the lines that PyTorch
    marks with the number of the rank, and the entry of the rank in torchrun's table.
    """
    own_text = _select_marked_lines(text, rank)
    for block in _TABLE_BLOCK.finditer(text):
        entry = _TABLE_ENTRY.search(block[0])
        if entry is not None and int(entry["rank"]) == rank:
            own_text += block[0]
    return has_lost_peer(own_text)


def select_traceback_of_rank(text: str, failure: RankFailure) -> str:
    """Return the lines that PyTorch marks as those of the failed rank, if they have a traceback.

    PyTorch also marks warnings. Without a traceback, the marked lines may be much older than the
    end of the rank.

    Returns:
        An empty string if no traceback has the mark of the rank.
    """
    lines = _select_marked_lines(text, failure.rank)
    return lines if "Traceback (most recent call last)" in lines else ""


def _select_marked_lines(text: str, rank: int | None) -> str:
    """Return the lines that PyTorch marks with the number of a rank, or an empty string."""
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if (prefix := _RANK_PREFIX.match(line)) and int(prefix[1]) == rank
    )


def remove_launcher_reports(text: str) -> str:
    """Return a log without the reports of torchrun, accelerate and deepspeed about their ranks.

    These reports are the table of the failed ranks, the traceback of the launcher itself, and its
    messages about the processes. If the log has no other lines, it is returned unchanged.
    """
    lines_of_ranks = _TABLE.sub("", text)
    lines_of_ranks = _TRACEBACK.sub(_remove_launcher_traceback, lines_of_ranks)
    lines_of_ranks = _LAUNCHER_MESSAGE.sub("", lines_of_ranks)
    return lines_of_ranks if lines_of_ranks.strip() else text


def is_exit_report(line: str) -> bool:
    """Return True if a line of a log only reports the exit code or the signal of a rank."""
    return _EXIT_REPORT.search(line) is not None


def _remove_launcher_traceback(match: re.Match[str]) -> str:
    """Return an empty string for the traceback of a launcher, and any other traceback unchanged."""
    is_of_accelerate = (
        _ACCELERATE_FRAME.search(match["frames"]) and "CalledProcessError" in (match["error"])
    )
    return "" if is_of_accelerate or _LAUNCHER_ERROR.match(match["error"]) else match[0]


def _read_table(text: str) -> RankFailure | None:
    """Return the rank that failed first according to the last table of torchrun, or None."""
    root_at = text.rfind(_ROOT_CAUSE)
    if root_at < 0:
        return None
    root = _TABLE_ENTRY.search(text, root_at)
    if root is None:
        return None
    table_at = max(text.rfind("ChildFailedError", 0, root_at), 0)
    others = [*_TABLE_ENTRY.finditer(text, table_at, root_at)]

    first = root
    alive: Sequence[int] = ()
    was_stopped = int(root["code"]) == _STOPPED
    if was_stopped or is_victim(text, int(root["rank"])):
        # torchrun may name the wrong rank, because it checks its ranks one after the other. If two
        # ranks die in the same moment, torchrun may first see the rank that only lost its
        # connection to the other rank. So prefer a rank that died for another reason.
        own_deaths = [
            entry
            for entry in others
            if int(entry["code"]) != _STOPPED and not is_victim(text, int(entry["rank"]))
        ]
        first = own_deaths[0] if own_deaths else root
        if not own_deaths and not was_stopped:
            alive = [int(entry["rank"]) for entry in others if int(entry["code"]) == _STOPPED]
    rank = int(first["rank"])
    return RankFailure(
        name=f"rank {rank}",
        rank=rank,
        pid=int(first["pid"]),
        exit_code=int(first["code"]),
        alive=tuple(alive),
        others_failed=bool(others),
    )


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
