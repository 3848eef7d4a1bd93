"""Find the process of a distributed training that failed first, from the launcher's own messages.

A training on several GPUs has one process for each GPU, its *rank*. If one rank dies, the other
ranks fail a moment later, because they wait for it. Their messages are usually longer and later
than those of the first rank. The launcher of the ranks notices the deaths and reports them:

- torchrun and accelerate print a table with the exit code and pid of each failed rank;
- deepspeed prints the command of the first process that failed, with its `--local_rank`;
- `torch.multiprocessing.spawn` and `multiprocessing` name the process.

A launcher that starts its ranks with `subprocess` may report nothing. The kernel then shows the
first death (see `descendant_watch`), and this module tells which log lines are consequences of it.

The reports of the launchers are the last lines of a log. `remove_launcher_reports` removes them, so
that the user sees the last lines of the ranks.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Exit code of a process that the launcher of the training has stopped.
_STOPPED = -signal.SIGTERM
#: Matches one entry in torchrun's table of failed ranks. Source:
#: torch/distributed/elastic/multiprocessing/errors, ChildFailedError.
_TABLE_ENTRY = re.compile(
    r"^[ \t]*rank +: (?P<rank>\d+) \(local_rank: \d+\)\s*?\n"
    r"[ \t]*exitcode +: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.MULTILINE,
)
#: Line in torchrun's table before the entry of the rank that torchrun saw failing first.
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
#: Matches the line that `multiprocessing` prints before the traceback of a child process.
_NAMED_PROCESS = re.compile(
    r"^Process (?P<name>[\w.-]{1,60}(?::\d+)?):$(?=\s+Traceback)", re.MULTILINE
)
#: Matches one entry in torchrun's table of failed ranks. The entry may contain a traceback.
_TABLE_BLOCK = re.compile(r"^\[\d+\]:[ \t]*\n(?:[ \t][^\n]*\n?|\n)*", re.MULTILINE)
#: Matches the line in which torchrun reports the exit code of one rank. Source:
#: torch/distributed/elastic/multiprocessing/api.py.
_REPORTED_EXIT = re.compile(
    r"^[^\n]{0,200}failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: (?P<pid>\d+)\)[^\n]*\n?",
    re.MULTILINE,
)
#: Matches a log message of torchrun or of DeepSpeed's launcher about the processes of the ranks.
#: torchrun writes the level, the time and the name of its module in one of three formats: `W1127
#: 08:21:44.3 321 torch/...`, `[2024-05-01 10:00:00,1] torch...` and `WARNING:torch...`.
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
#: Matches a traceback that begins at the start of a line. The group `error` contains the last line.
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):[ \t]*\n(?P<frames>(?:[ \t][^\n]*\n)+)"
    r"(?P<error>\S[^\n]*(?:\n|$))",
    re.MULTILINE,
)
#: Matches a launcher error that only reports the end of a rank, or the signal that stopped the
#: launcher. Source: torch/distributed/elastic/multiprocessing/errors and api.py.
_LAUNCHER_ERROR = re.compile(
    r"torch\.distributed\.elastic\.multiprocessing\.\S*(?:ChildFailedError|SignalException):"
)
#: Matches a traceback line that belongs to the program `accelerate launch`, which starts the
#: training.
_ACCELERATE_FRAME = re.compile(r"[/\\]accelerate[/\\]commands[/\\]launch\.py")
#: Matches torchrun's table of the failed ranks. The first and the last line of the table consist of
#: `=`.
_TABLE = re.compile(
    r"^={20,}[ \t]*\n[^\n]* FAILED[ \t]*\n-{20,}[ \t]*\nFailures:[ \t]*\n"
    r"(?:(?!={20})[^\n]*\n)*(?:={20,}[ \t]*(?:\n|$))?",
    re.MULTILINE,
)
#: Matches the rank that PyTorch writes at the beginning of a line: `[rank1]: ` before a line of a
#: traceback, `[Rank 1] ` in messages of ProcessGroupNCCL.
_RANK_PREFIX = re.compile(r"^(?:\[[^\[\]\n]{1,60}\]:? ?){0,2}?\[[Rr]ank ?(\d+)\]", re.MULTILINE)
#: Matches errors of a rank that lost its connection to another rank. Exceptions of Python itself do
#: not match, because they may be about the connection to a server.
_LOST_PEER = re.compile(
    r"(?<!\bErrno 32\] )(?<!\bErrno 104\] )"
    r"(?:Connection (?:closed|reset) by (?:remote )?peer|[Bb]roken pipe)"
    r"|ncclRemoteError|DistBackendError|DistNetworkError|DistStoreError|remote process exited"
    r"|Socket recv failed|recvValue failed|Connection was likely closed|connectFullMesh failed"
)
#: Matches errors of a rank that waited too long for another rank.
_WAITED_IN_VAIN = re.compile(r"Timed out waiting \d+ms|[Ww]atchdog|NCCL .{0,80}[Tt]imeout")
#: Matches the error of a process whose data loader lost a worker. Sources:
#: torch/csrc/DataLoader.cpp, torch/utils/data/dataloader.py.
_DEAD_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d+(?:, \d+)*)\) "
    r"(?:is killed by signal: (?P<signal>[^.\n]{1,40})\."
    r"|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
#: Matches two frames of a traceback: PyTorch's data loader, and the module of Python that opens a
#: local connection to a worker to receive a tensor.
_LOADER_FRAME = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]dataloader\.py")
_SHARER_FRAME = re.compile(r"[/\\]multiprocessing[/\\]resource_sharer\.py")
#: Matches the exceptions of a process that has lost a local connection to another process. If a
#: signal interrupted Python while it printed the traceback, Python prints the name of the exception
#: after `object type name: ` instead.
_LOST_LOCAL_PEER = re.compile(
    r"(?:object (?:type name|repr) *: )?"
    r"(?:ConnectionResetError|ConnectionRefusedError|EOFError|BrokenPipeError|FileNotFoundError)\b"
)
#: Matches a line of a traceback or of an error that only `torch.multiprocessing.spawn` prints.
_TORCH_SPAWN = re.compile(
    r"[/\\]torch[/\\]multiprocessing[/\\]spawn\.py|torch\.multiprocessing\.spawn\."
)
#: Matches the text that `RankFailure.__str__` returns, in the message of a failure. The name of a
#: process contains no colon that is followed by a space. Only the text directly after the first
#: `: ` is searched, because a log line may follow later in the message.
_FIRST_RANK = re.compile(
    r"(?:(?!: )[^\n])*: (?P<rank>(?:(?!: )[^\n]){1,200}? (?:failed first"
    r"|was killed by (?:SIG\w+|signal \d+) first|ended first, with exit code \d+))(?![\w-])"
)
#: Mapping from the description of a signal, such as `Killed`, to the signal.
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}
#: Exit code of a Python program that ends with an exception.
_EXCEPTION_EXIT_CODE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The process that failed before all others in a distributed training."""

    #: Name of the process: `rank 1`, `local rank 1`, `process 1`, `worker process 2 of 2` or
    #: `Process-2`. For a child process of a rank, the name of the rank.
    name: str
    #: Description of a child process of a rank: `a child process` or `a data loader worker`. Empty
    #: if the process is the rank itself.
    child: str = ""
    #: Index of the process, from 0, among all processes with the same parent and the same program.
    #: For a child process of a rank, this is the index of the rank's process. None if unknown.
    number: int | None = None
    #: Number of the rank. None if the launcher does not report a rank.
    rank: int | None = None
    #: Process id, or None if unknown.
    pid: int | None = None
    #: Exit code, or negative signal number, of the process. None if the process ended with an
    #: exception and its traceback is in the log.
    exit_code: int | None = None
    #: Other ranks that were alive, but did not respond to this rank in time.
    alive: tuple[int, ...] = ()
    #: True if other processes of the training on this machine failed after this process.
    others_failed: bool = False

    @property
    def full_name(self) -> str:
        """Name of the process: `rank 1` or `a data loader worker of rank 1`."""
        return f"{self.child} of {self.name}" if self.child else self.name

    @property
    def short_name(self) -> str:
        """Short name of the process: `rank 1` or `process 812`."""
        is_long = self.pid is not None and "`" in self.name
        return f"process {self.pid}" if is_long else self.full_name

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the process, or None if no signal is known."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        return _name_signal(-self.exit_code)

    def __str__(self) -> str:
        """Return the name of the process and how it ended, such as `rank 1 (pid 7) got SIGKILL`."""
        subject = self.full_name if self.pid is None else f"{self.full_name} (pid {self.pid})"
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
        is_one = len(self.alive) == 1
        others = f"rank {ranks}, which is" if is_one else f"ranks {ranks}, which are"
        return f"{subject} {end}, after it had received no answer from {others} still alive"


def read_first_rank(message: str) -> str:
    """Return the description of the process that failed first, from the message of a failure.

    Args:
        message: Message of a failure. It may contain the text that `RankFailure.__str__` returns.

    Returns:
        A text such as `rank 1 (pid 7) was killed by SIGKILL first`. An empty string if the message
        names no such process.
    """
    match = _FIRST_RANK.match(message)
    return match["rank"] if match is not None else ""


def find_first_rank(text: str) -> RankFailure | None:
    """Return the process that failed first in a distributed training.

    Args:
        text: The end of the log of the launcher and of its processes.

    Returns:
        The process, or None if no message of a launcher names a failed process.
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
    """Return the first child process that `multiprocessing` reports with a traceback, or None.

    A process that only lost its connection to another process is skipped.
    """
    matches = [*_NAMED_PROCESS.finditer(text)]
    for number, match in enumerate(matches, start=1):
        end = matches[number].start() if number < len(matches) else len(text)
        if not _LOST_PEER.search(text, match.end(), end):
            return RankFailure(name=match["name"])
    return None


def name_processes_of_spawn(text: str, failure: RankFailure) -> RankFailure:
    """Return a copy of a failure in which the failed process is named `process N`.

    N is the number of the process, from 0. The failure is returned unchanged if N is unknown, if
    the log contains no message of `torch.multiprocessing.spawn`, or if the process already has the
    name of a rank.
    """
    is_named = failure.number is None or failure.rank is not None
    if is_named or not _TORCH_SPAWN.search(text):
        return failure
    return replace(failure, name=f"process {failure.number}")


def find_dead_loader(
    text: str, failure: RankFailure | None, first_death: RankFailure | None
) -> RankFailure | None:
    """Return the data loader worker whose end is reported in the log.

    Usually, PyTorch reports the signal or the exit code of the worker in an error of the parent.
    But if the worker ends while the parent is receiving a tensor from it, the parent may only
    report a lost connection.

    Args:
        text: Only the lines of the failed rank at the end of the log. If the lines do not name
            their rank, all lines except the reports of launchers.
        failure: The process that failed first according to the log and the kernel, or None if
            unknown. It may be the worker.
        first_death: The process that died first according to the kernel, or None if unknown.

    Returns:
        The worker. Its exit code is None if neither the log nor the kernel reports the exit code.
        None if the log contains no such error.
    """
    matches = [*_DEAD_LOADER.finditer(text)]
    match = matches[-1] if matches else None
    if match is None and not _ends_with_lost_loader(text):
        return None
    loader = RankFailure(name="a data loader worker", others_failed=True)
    if match is not None:
        pids = [int(pid) for pid in match["pids"].split(", ")]
        exit_code = int(match["code"]) if match["code"] else None
        if match["signal"] in _SIGNALS:
            exit_code = -_SIGNALS[match["signal"]]
        if exit_code == -signal.SIGTERM:
            # A rank may stop its data loader workers with SIGTERM after its own failure. So a
            # worker that got SIGTERM is probably not the cause.
            return None
        if exit_code is None and first_death is not None and first_death.pid in pids:
            loader = replace(loader, pid=first_death.pid, exit_code=first_death.exit_code)
        else:
            loader = replace(loader, pid=pids[0] if len(pids) == 1 else None, exit_code=exit_code)
        if prefix := _RANK_PREFIX.match(text, text.rfind("\n", 0, match.start()) + 1):
            loader = _make_child(loader, name=f"rank {prefix[1]}", rank=int(prefix[1]))
    elif first_death is not None and (first_death.child or first_death.rank is None):
        is_of_failure = failure is None or first_death.name == failure.name
        if is_of_failure:
            loader = replace(loader, pid=first_death.pid, exit_code=first_death.exit_code)
            failure = first_death
    if failure is None:
        return loader
    is_worker = failure.pid is not None and failure.pid == loader.pid
    if not is_worker and failure.exit_code not in (None, _EXCEPTION_EXIT_CODE):
        # The worker can be the cause only in two cases: the worker itself failed first, or the rank
        # that started the worker ended first, with an exception. Neither is the case here.
        return None
    if "`" in failure.name or (is_worker and failure.rank is None and not failure.child):
        # `failure.name` does not name a parent: it is the name of the worker's own process, or a
        # long command line.
        return loader
    return _make_child(loader, name=failure.name, rank=failure.rank, number=failure.number)


def _make_child(
    loader: RankFailure, *, name: str, rank: int | None, number: int | None = None
) -> RankFailure:
    """Return a copy of a description of a data loader worker, to which the parent is added.

    Args:
        loader: The worker.
        name: Name of the parent.
        rank: Number of the parent's rank. None if the parent has no rank.
        number: Index of the parent among the ranks, from 0. None if unknown.
    """
    return replace(loader, name=name, child="a data loader worker", rank=rank, number=number)


def ends_with_dead_loader(text: str) -> bool:
    """Return True if the last traceback reports the end of a data loader worker."""
    _, error = _read_last_traceback(text)
    return _ends_with_lost_loader(text) or (error is not None and is_report_of_dead_loader(error))


def is_report_of_dead_loader(line: str) -> bool:
    """Return True if a log line reports the end of a data loader worker."""
    return _DEAD_LOADER.search(line) is not None


def _ends_with_lost_loader(text: str) -> bool:
    """Return True if a lost connection to a data loader worker caused the last traceback."""
    traceback, error = _read_last_traceback(text)
    # If a signal interrupted Python while it printed the traceback, the exception is missing.
    if error is not None and not is_loss_of_local_peer(error):
        return False
    # An error of the thread that pins memory has the frames of this thread below the exception,
    # after the words "Original Traceback". So search all lines for the frames.
    return any(map(_LOADER_FRAME.search, traceback)) and any(map(_SHARER_FRAME.search, traceback))


def _read_last_traceback(text: str) -> tuple[list[str], str | None]:
    """Return the lines after the beginning of the last traceback, and the line of its exception.

    Marks such as `[rank1]: ` at the beginning of the lines are removed. The list is empty if there
    is no traceback. The exception is None if the traceback is incomplete.
    """
    lines = [_RANK_PREFIX.sub("", line).removeprefix(": ") for line in text.splitlines()]
    heads = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    traceback = lines[heads[-1] + 1 :] if heads else []
    errors = (line for line in traceback if line.strip() and not line.startswith(" "))
    return traceback, next(errors, None)


def is_loss_of_local_peer(line: str) -> bool:
    """Return True if a log line is an exception about a lost connection to a local process."""
    text = _RANK_PREFIX.sub("", line).removeprefix(": ")
    return _LOST_LOCAL_PEER.match(text) is not None


def select_lines_of_rank(text: str, failure: RankFailure) -> str:
    """Return the log without the lines about ranks other than the failed rank.

    Omitted are lines that PyTorch marks with the number of another rank, and lines in which
    torchrun reports the exit of another rank.
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
    """Return True if a log line only shows a consequence of the death of the failed process.

    Such a line was written by another process. An example is an error about a lost connection to
    the failed process. A line that PyTorch marks with the failed rank is never a consequence.

    Args:
        line: A line of the log, as it was printed.
        failure: The process that failed first.
    """
    code = failure.exit_code
    if code is None:
        return False
    prefix = _RANK_PREFIX.match(line)
    if prefix is not None and int(prefix[1]) == failure.rank:
        return False
    is_of_other_rank = prefix is not None and failure.rank is not None
    is_exception = code == _EXCEPTION_EXIT_CODE
    may_be_own = is_exception and not failure.others_failed and not is_of_other_rank
    if _LOST_PEER.search(line):
        return not may_be_own
    # The line may report that a process waited too long for another process. If the failed process
    # itself wrote this line, the line shows the cause of the failure and not a consequence. A
    # process that waited too long ends with an exception, or NCCL's watchdog ends it with SIGABRT.
    # After any other end of the failed process, another process wrote the line.
    is_end_of_waiting = code in (_EXCEPTION_EXIT_CODE, -signal.SIGABRT) and not is_of_other_rank
    has_waited = prefix is not None and _WAITED_IN_VAIN.search(line) is not None
    return has_waited and not is_end_of_waiting


def has_lost_peer(text: str) -> bool:
    """Return True if a rank lost the connection to another rank, or waited too long for a rank."""
    return (_LOST_PEER.search(text) or _WAITED_IN_VAIN.search(text)) is not None


def has_error_file(text: str, failure: RankFailure) -> bool:
    """Return True if torchrun's error file may be about the failed process.

    The error file contains the error of the rank that torchrun saw failing first. The last entry in
    torchrun's table is about the same rank. If the log contains no table, the rank of the error
    file is unknown.

    Args:
        text: The end of the log.
        failure: The process that failed first.
    """
    root_at = text.rfind(_ROOT_CAUSE)
    root = _TABLE_ENTRY.search(text, root_at) if root_at >= 0 else None
    return root is None or failure.pid in (None, int(root["pid"]))


def is_victim(text: str, rank: int) -> bool:
    """Return True if a rank failed only because another rank died or did not respond.

    Only log lines about this rank are used. These are the lines that PyTorch marks with the number
    of the rank, and the entry of the rank in torchrun's table.
    """
    own_text = _select_marked_lines(text, rank)
    for block in _TABLE_BLOCK.finditer(text):
        entry = _TABLE_ENTRY.search(block[0])
        if entry is not None and int(entry["rank"]) == rank:
            own_text += block[0]
    return has_lost_peer(own_text)


def select_traceback_of_rank(text: str, failure: RankFailure) -> str:
    """Return the lines that PyTorch marks with the failed rank, if they contain a traceback.

    Without a traceback, the marked lines may be warnings that are much older than the failure.

    Returns:
        An empty string if the marked lines contain no traceback.
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
    """Return a log without the reports that launchers such as torchrun write about their ranks.

    These reports are the table of the failed ranks, the traceback of the launcher, and its messages
    about processes. A log that consists only of such reports is returned unchanged.
    """
    lines_of_ranks = _TABLE.sub("", text)
    lines_of_ranks = _TRACEBACK.sub(_remove_launcher_traceback, lines_of_ranks)
    lines_of_ranks = _LAUNCHER_MESSAGE.sub("", lines_of_ranks)
    return lines_of_ranks if lines_of_ranks.strip() else text


def is_exit_report(line: str) -> bool:
    """Return True if a line of a log only reports the exit code or the signal of a rank."""
    return _EXIT_REPORT.search(line) is not None


def _remove_launcher_traceback(match: re.Match[str]) -> str:
    """Return an empty string for the traceback of a launcher. Return other tracebacks unchanged."""
    is_of_accelerate = (
        _ACCELERATE_FRAME.search(match["frames"]) and "CalledProcessError" in (match["error"])
    )
    return "" if is_of_accelerate or _LAUNCHER_ERROR.match(match["error"]) else match[0]


def _read_table(text: str) -> RankFailure | None:
    """Return the rank that failed first according to torchrun's last table, or None."""
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
        # If two ranks die at nearly the same time, torchrun may name the rank that only lost its
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
