"""Tests that the first of several ranks to fail is named, from the messages of real launchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.processes.attempt import make_failure
from tasks.processes.descendant_watch import DeathEvidence
from tasks.record.advice import advise_by_log
from tasks.record.outcome import Exit, Failure
from tasks.record.ranks import RankFailure, find_first_rank

#: Folder with real logs of launchers. Only the paths of files were shortened.
RECORDED = Path(__file__).parents[1] / "data" / "ranks"

STEPS = "step 0\nstep 0\nstep 1\nstep 1\n"
#: Traceback of a rank that lost its connection to the other rank, from torchrun 2.13 with gloo.
LOST_PEER = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/t.py", line 14, in <module>
[rank0]:     model(torch.ones(2,4)).sum().backward()
[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer \
[127.0.0.1]:14722. This is typically caused by a remote worker crashing.
"""
#: Traceback of a rank that got no answer from the other rank.
TIMED_OUT = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/t.py", line 14, in <module>
[rank0]:     model(torch.ones(2,4)).sum().backward()
[rank0]: RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for \
recv operation to complete
"""
RAISED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/t.py", line 12, in <module>
[rank1]:     raise ValueError("the batch of rank 1 is bad")
[rank1]: ValueError: the batch of rank 1 is bad
"""


def entry(rank: int, code: int, pid: int, note: str = "") -> str:
    """Return the entry of a failed rank in the error report of torchrun.

    Args:
        rank: The rank.
        code: Exit code of the rank. A negative number is a signal.
        pid: Process id of the rank.
        note: Name of the signal, as in "(SIGKILL)".
    """
    return f"""\
[{rank}]:
  time      : 2026-11-26_20:07:42
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid}) {note}
  error_file: <N/A>
  traceback : {f"Signal {-code} {note} received by PID {pid}" if code < 0 else "To enable"}
"""


def table(root: str, *others: str) -> str:
    """Return the error report that torchrun prints when its ranks have failed.

    Args:
        root: Entry of the rank that failed first, as `entry` returns it.
        others: Entries of the other failed ranks.
    """
    rank, code = (
        root.split("rank      : ")[1].split(" ")[0],
        root.split("exitcode  : ")[1].split()[0],
    )
    return f"""\
W1126 20:07:42.834000 16824 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process \
18581 closing signal SIGTERM
E1126 20:07:42.955000 16824 torch/distributed/elastic/multiprocessing/api.py:1002] failed \
(exitcode: {code}) local_rank: {rank} (pid: 18582) of binary: /bin/python3
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
=======================================================
t.py FAILED
-------------------------------------------------------
Failures:
{"".join(others) or "  <NO_OTHER_FAILURES>"}
-------------------------------------------------------
Root Cause (first observed failure):
{root}=======================================================
"""


STOPPED = entry(0, -15, 18581, "(SIGTERM)")


def fail(
    text: str,
    *,
    first_death: RankFailure | None = None,
    early_end: RankFailure | None = None,
    error_file: str = "",
    code: int = 1,
) -> Failure:
    """Return the failure of a component whose launcher has failed.

    Args:
        text: The log of the launcher and its ranks.
        first_death: The process that died first according to the kernel.
        early_end: The rank that ended with exit code 0 before another rank failed.
        error_file: Traceback in the error file of torchrun.
        code: Exit code of the launcher.
    """
    exit = Exit.from_return_code(code, 0.0)
    evidence = DeathEvidence(first_death=first_death, early_end=early_end, traceback=error_file)
    return make_failure(
        "trainer", text, message="trainer ended", rule="exit", exit=exit, evidence=evidence
    )


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            STEPS + LOST_PEER + table(entry(1, -9, 7, "(SIGKILL)"), STOPPED),
            "UNKNOWN",
            "rank 1 (pid 7) was killed by SIGKILL first",
        ),
        (
            STEPS + LOST_PEER + table(entry(1, 3, 7), STOPPED),
            "RUNTIME_ERROR",
            "rank 1 (pid 7) ended first, with exit code 3",
        ),
        (
            STEPS + table(entry(1, -11, 7, "(SIGSEGV)"), STOPPED),
            "RUNTIME_ERROR",
            "rank 1 (pid 7) was killed by SIGSEGV first",
        ),
        # torchrun reports rank 0 as the root cause. But the traceback shows that rank 0 failed
        # because it lost its connection to rank 1. So rank 1 died first.
        (
            STEPS + LOST_PEER + table(entry(0, 1, 6), entry(1, -9, 7, "(SIGKILL)")),
            "UNKNOWN",
            "rank 1 (pid 7) was killed by SIGKILL first",
        ),
        (
            STEPS + TIMED_OUT + table(entry(0, 1, 6), entry(1, -15, 7, "(SIGTERM)")),
            "COLLECTIVE_TIMEOUT",
            "rank 0 (pid 6) ended first, with exit code 1, after it had received no answer from "
            "rank 1, which is still alive",
        ),
        (
            "[2024-05-01 10:00:00,1] [ERROR] [launch.py:325:sigkill_handler] ['/bin/python', '-u', "
            "'train.py', '--local_rank=1', '--deepspeed'] exits with return code = -9\n",
            "UNKNOWN",
            "local rank 1 was killed by SIGKILL first",
        ),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal "
            "SIGSEGV\n",
            "RUNTIME_ERROR",
            "process 1 was killed by SIGSEGV first",
        ),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit "
            "code 3\n",
            "RUNTIME_ERROR",
            "process 1 ended first, with exit code 3",
        ),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal "
            "SIGKILL\n",
            "UNKNOWN",
            "process 1 was killed by SIGKILL first",
        ),
    ],
)
def test_first_rank_to_die_is_named(text: str, kind: str, message: str) -> None:
    failure = fail(text)

    assert message in failure.message
    assert failure.kind == kind
    assert "[rank0]" not in failure.message
    assert "another process died first" not in failure.hint


@pytest.mark.parametrize("order", [RAISED + LOST_PEER, LOST_PEER + RAISED])
def test_traceback_of_the_first_rank_is_shown(order: str) -> None:
    failure = fail(STEPS + order + table(entry(1, 1, 7), STOPPED))

    assert failure.kind == "USER_ERROR"
    assert failure.message.startswith("trainer ended: rank 1 (pid 7) ended first, with exit code 1")
    assert failure.message.endswith("ValueError: the batch of rank 1 is bad")
    assert failure.log_tail == RAISED.strip()


@pytest.mark.parametrize(
    ("text", "name", "end"),
    [
        ("\n-- Process 1 terminated with the following error:\nTraceback (most", "process 1", None),
        ("Process Process-2:\nTraceback (most recent call last):\n", "Process-2", None),
        ("Process ForkProcess-1:2:\nTraceback (most recent call last):\n", "ForkProcess-1:2", None),
    ],
)
def test_process_of_multiprocessing_is_named(text: str, name: str, end: int | None) -> None:
    failure = find_first_rank(text)

    assert failure is not None
    assert (failure.name, failure.exit_code) == (name, end)


@pytest.mark.parametrize(
    "text",
    ["", STEPS, LOST_PEER, "Process 7 was slow\n", "Root Cause (first observed failure):\n[0]:\n"],
)
def test_log_without_a_message_of_a_launcher_names_no_rank(text: str) -> None:
    assert find_first_rank(text) is None


def test_only_the_last_table_of_restarted_ranks_counts() -> None:
    first = table(entry(0, -9, 5, "(SIGKILL)"))
    second = table(entry(1, 3, 7), STOPPED)

    failure = find_first_rank(first + STEPS + second)

    assert failure is not None
    assert (failure.name, failure.pid) == ("rank 1", 7)


#: Errors with which gloo, NCCL and PyTorch report on rank 0 that another rank has died.
LOST_RANK = [
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:116",
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection reset by peer [127.0.0.1]:116",
    "RuntimeError: [gloo/transport/tcp/pair.cc:547] Broken pipe",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or "
    "there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
]
NCCL_WATCHDOG = (
    "[E1127 08:21:44.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600007 milliseconds before timing out.\n"
)


def traceback_of(error: str, prefix: str = "") -> str:
    """Return a traceback that ends with an error, with a prefix before each line."""
    lines = ["Traceback (most recent call last):", '  File "/t.py", line 9, in <module>']
    return "".join(f"{prefix}{line}\n" for line in [*lines, *error.splitlines()])


def death(code: int, rank: int | None = 1, *, others_failed: bool = True) -> RankFailure:
    """Return a `RankFailure` for the process that died first.

    Args:
        code: Exit code of the process. A negative number is a signal.
        rank: Rank of the process. None for a process without a rank.
        others_failed: True if other processes failed, too.
    """
    name = f"rank {rank}" if rank is not None else "process `python t.py`"
    return RankFailure(name=name, rank=rank, pid=7, exit_code=code, others_failed=others_failed)


def assert_blames_only_first_rank(failure: Failure, kind: str, end: str) -> None:
    """Assert that the rank that died first decides the kind, the log line and the advice.

    Args:
        failure: Failure of the component.
        kind: Expected failure kind, which is the kind of the rank that died first.
        end: Text about the end of this rank, which the message must contain.
    """
    assert failure.kind == kind
    assert end in failure.message
    assert "peer" not in failure.message + failure.line
    assert "(pid: 554)" not in failure.line
    assert "stopped responding" not in failure.hint
    assert "another process died first" not in failure.hint
    assert "does not answer" not in failure.hint


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
@pytest.mark.parametrize("error", LOST_RANK)
def test_rank_that_ended_with_exit_code_0_while_others_trained_is_blamed(
    prefix: str, error: str
) -> None:
    text = STEPS + traceback_of(error, prefix) + table(entry(0, 1, 6))
    early_end = RankFailure(name="rank 1", rank=1, pid=7, exit_code=0, others_failed=True)

    failure = fail(text, first_death=death(1, 0), early_end=early_end)

    assert_blames_only_first_rank(
        failure, "RUNTIME_ERROR", "rank 1 (pid 7) ended first, with exit code 0"
    )
    assert "rank 1" in failure.hint


def test_error_of_a_later_rank_is_the_cause_if_it_did_not_lose_the_rank_that_ended() -> None:
    early_end = RankFailure(name="rank 1", rank=1, pid=7, exit_code=0, others_failed=True)

    failure = fail(
        STEPS + traceback_of("ValueError: bad batch") + table(entry(0, 1, 6)), early_end=early_end
    )

    assert (failure.kind, "rank 0 (pid 6)" in failure.message) == ("USER_ERROR", True)


def test_exit_code_of_first_rank_is_not_a_time_out_of_the_other_rank() -> None:
    # Rank 1 ended first, and then rank 0 failed. Rank 0 uses torchrun's decorator `record`. So
    # torchrun reports rank 0 as the root cause, and writes the error of rank 0 into the error file.
    text = (RECORDED / "torchrun-record-exit-3.txt").read_text()
    error = traceback_of(LOST_RANK[0])

    failure = fail(text, first_death=death(3), error_file=error)

    assert_blames_only_first_rank(
        failure, "RUNTIME_ERROR", "rank 1 (pid 556) ended first, with exit code 3"
    )
    assert "rank 1" in failure.hint
    assert "Connection closed" not in failure.log_tail


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "[default0]:[rank0]: "])
@pytest.mark.parametrize("error", LOST_RANK)
@pytest.mark.parametrize(
    ("code", "kind", "end"),
    [
        (1, "RUNTIME_ERROR", "exit code 1"),
        (3, "RUNTIME_ERROR", "exit code 3"),
        (-9, "UNKNOWN", "SIGKILL"),
        (-11, "RUNTIME_ERROR", "SIGSEGV"),
    ],
)
def test_lost_connection_of_a_later_rank_decides_nothing(
    prefix: str, error: str, code: int, kind: str, end: str
) -> None:
    lost = STEPS + traceback_of(error, prefix)
    deepspeed = f"['/bin/python', 't.py', '--local_rank=1'] exits with return code = {code}\n"
    cases = [
        fail(lost + table(entry(1, code, 7), entry(0, 1, 6))),
        fail(lost + deepspeed, first_death=death(code), code=abs(code)),
        # In this log, `multiprocessing` prints a line with the process name before the traceback.
        fail(STEPS + "Process Process-1:\n" + lost, first_death=death(code, None)),
        fail(lost, first_death=death(code, None)),
        # A launcher that starts its ranks with `subprocess` writes no report about their ends.
        fail(lost, first_death=death(code), code=abs(code)),
    ]

    for failure in cases:
        assert_blames_only_first_rank(failure, kind, end)
        assert code != -9 or failure.rule == "sigkill"


@pytest.mark.parametrize("prefix", ["", "[rank0]:"])
@pytest.mark.parametrize("code", [3, -9, -11])
def test_time_out_of_a_later_rank_decides_nothing(prefix: str, code: int) -> None:
    text = STEPS + prefix + NCCL_WATCHDOG

    for failure in (
        fail(text + table(entry(1, code, 7), entry(0, -6, 6))),
        fail(text, first_death=death(code, None)),
    ):
        assert failure.kind == ("UNKNOWN" if code == -9 else "RUNTIME_ERROR")
        assert "Watchdog" not in failure.message + failure.line


def test_time_out_of_the_first_rank_itself_stays_a_time_out() -> None:
    own = table(entry(0, -6, 6, "(SIGABRT)"), entry(1, -15, 7, "(SIGTERM)"))

    for text in (STEPS + "[rank0]:" + NCCL_WATCHDOG + own, STEPS + NCCL_WATCHDOG + own):
        assert fail(text).kind == "COLLECTIVE_TIMEOUT"
    waited = (
        STEPS
        + "Process Process-1:\n"
        + traceback_of("RuntimeError: Timed out waiting 8000ms for recv operation")
    )
    alone = fail(waited, first_death=death(1, None, others_failed=False))
    assert alone.kind == "COLLECTIVE_TIMEOUT"


@pytest.mark.parametrize("code", [3, -9, -11])
def test_last_lines_leave_out_the_report_of_the_launcher(code: int) -> None:
    own = "rank 1: loading the batch\n"
    text = STEPS + own + LOST_PEER + table(entry(1, code, 7), STOPPED)

    failure = fail(text)

    assert failure.log_tail == (STEPS + own).strip()


@pytest.mark.parametrize(
    "report",
    [
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 7 closing signal\n",
        "[2024-05-01 10:00:00,1] torch.distributed.elastic.multiprocessing.api: [ERROR] failed\n",
        "W1127 08:21:44.3 321 torch/distributed/run.py:774] Setting OMP_NUM_THREADS\n",
        "[2024-05-01 10:00:00,1] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 812\n",
        traceback_of(
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal 15"
        ),
        'Traceback (most recent call last):\n  File "/v/accelerate/commands/launch.py", line 7, in '
        "simple_launcher\nsubprocess.CalledProcessError: Command 'x' returned 1\n",
    ],
)
def test_report_of_each_launcher_is_left_out(report: str) -> None:
    own = STEPS + traceback_of("ValueError: bad batch 17")

    assert fail(own + report).log_tail == own.strip()


def test_recorded_log_ends_with_a_line_of_the_training() -> None:
    text = (RECORDED / "torchrun-record-exit-3.txt").read_text()

    tail = fail(text, first_death=death(3)).log_tail

    assert "ChildFailedError" not in tail
    assert "Root Cause" not in tail
    assert "torch/distributed/elastic" not in tail


@pytest.mark.parametrize(("code", "note"), [(-9, "(SIGKILL)"), (-11, "(SIGSEGV)")])
def test_report_on_the_exit_of_a_rank_is_not_repeated(code: int, note: str) -> None:
    failure = fail(STEPS + table(entry(1, code, 7, note), STOPPED))

    assert failure.line == ""
    assert failure.message.endswith(f"rank 1 (pid 7) was killed by {note[1:-1]} first")


def test_log_that_has_only_a_launcher_report_is_shown_whole() -> None:
    report = table(entry(0, 1, 7))

    assert "Root Cause" in fail(report).log_tail


def test_warning_that_the_failed_rank_printed_at_its_start_does_not_hide_its_last_lines() -> None:
    warning = "[rank1]:[W1127 08:21:44.1 ProcessGroupNCCL.cpp:4843] using GPU 1\n"

    failure = fail(warning + STEPS + table(entry(1, -9, 7), STOPPED))

    assert failure.log_tail.endswith("step 1")


def test_advice_after_a_time_out_names_the_rank_that_did_not_respond() -> None:
    failure = fail(STEPS + TIMED_OUT + table(entry(0, 1, 6), entry(1, -15, 7, "(SIGTERM)")))

    assert failure.hint.startswith("rank 0 waited for rank 1.")
    assert "Read the log lines of rank 1" in failure.hint


def test_lost_connection_to_a_rank_of_another_machine_is_a_collective_error() -> None:
    lost = traceback_of(LOST_RANK[0], "[rank0]: ")

    failure = fail(STEPS + lost + table(entry(0, 1, 6)))

    assert failure.kind == "COLLECTIVE_TIMEOUT"


def test_advice_after_sigterm_names_the_probable_senders() -> None:
    failure = fail(STEPS + table(entry(1, -15, 7, "(SIGTERM)")))

    assert failure.hint.startswith("SIGTERM ended rank 1. Muster did not send this SIGTERM.")


def test_advice_names_a_process_without_its_command_line() -> None:
    failure = fail(STEPS, first_death=death(3, None))

    assert "search the code for a call that ends process 7 with exit code 3" in failure.hint
    assert "`" not in failure.hint.replace("`exit 3`", "")


@pytest.mark.parametrize("log", ["", STEPS, STEPS + LOST_PEER])
@pytest.mark.parametrize("code", [1, 3])
def test_advice_about_a_rank_without_an_error_message_names_its_exit_code(
    code: int, log: str
) -> None:
    failure = fail(log + table(entry(1, code, 7), STOPPED), first_death=death(code))

    assert failure.hint.startswith("Muster found no error message from rank 1 in the log.")
    assert f"os._exit({code})" in failure.hint


def test_advice_about_a_rank_that_ended_with_exit_code_0_names_possible_reasons() -> None:
    early_end = RankFailure(name="rank 1", rank=1, pid=7, exit_code=0, others_failed=True)

    failure = fail(STEPS + LOST_PEER + table(entry(0, 1, 6)), early_end=early_end)

    assert failure.hint.startswith("Muster found no error message from rank 1 in the log")
    assert "less data than the other ranks" in failure.hint
    assert "os._exit" in failure.hint
    assert "read the last log lines" not in failure.hint


@pytest.mark.parametrize("error", ["ValueError: bad batch", "RuntimeError: bad batch"])
def test_advice_does_not_ask_for_a_reason_that_the_message_names(error: str) -> None:
    raised = traceback_of(error, "[rank1]: ")

    failure = fail(STEPS + raised + table(entry(1, 1, 7), STOPPED))
    remedy = failure.hint or advise_by_log(failure)

    assert failure.message.endswith(error)
    assert remedy.startswith("The message names the error")
    assert "read the" not in remedy.lower()


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "Muster found no error message from trainer in the log."),
        (STEPS, "Muster found no error message from trainer in the log."),
        (traceback_of("RuntimeError: bad batch"), "The message names the error, and the traceback"),
        (traceback_of("ValueError: bad batch"), "The message names the error, and the traceback"),
        ("RuntimeError: bad batch\n", "Correct the error that the message names"),
        ("ValueError: bad batch\n", "Correct the mistake in the spec or in the program"),
        ("Traceback (most recent call last):\n", "Read the end of the component's log."),
    ],
)
def test_advice_about_a_component_without_ranks_fits_its_log(text: str, remedy: str) -> None:
    assert advise_by_log(fail(text, code=3)).startswith(remedy)


def test_error_that_the_first_rank_printed_before_its_exit_decides_the_kind() -> None:
    own = traceback_of("ValueError: bad batch 17")
    lost = traceback_of(LOST_RANK[0], "[rank0]: ")

    failure = fail(STEPS + own + lost + table(entry(1, 5, 7), STOPPED))

    assert failure.kind == "USER_ERROR"
    assert failure.message.endswith("ValueError: bad batch 17")


def test_rank_that_deepspeed_checked_first_is_not_blamed_for_its_lost_connection() -> None:
    lost = traceback_of(LOST_RANK[0], "[rank0]: ")
    report = "['/bin/python', 't.py', '--local_rank=0'] exits with return code = 1\n"

    failure = fail(STEPS + lost + report, first_death=death(1))

    assert_blames_only_first_rank(failure, "RUNTIME_ERROR", "rank 1 (pid 7) ended first")


def test_process_of_multiprocessing_that_lost_its_connection_did_not_fail_first() -> None:
    lost = "Process Process-1:\n" + traceback_of(LOST_RANK[0])
    raised = "Process Process-2:\n" + traceback_of("ValueError: bad batch 17")

    failure = find_first_rank(lost + raised)

    assert failure is not None
    assert failure.name == "Process-2"
    assert find_first_rank(lost) is None


def spawn_report(error: str, process: int = 0) -> str:
    """Return the report of `torch.multiprocessing.spawn` about a process that raised an error."""
    report = traceback_of("torch.multiprocessing.spawn.ProcessRaisedException: ")
    return f"{report}\n-- Process {process} terminated with the following error:\n" + traceback_of(
        error
    )


@pytest.mark.parametrize("error", LOST_RANK)
@pytest.mark.parametrize(
    ("code", "kind", "end"),
    [
        (0, "RUNTIME_ERROR", "exit code 0, while other ranks were still training"),
        (3, "RUNTIME_ERROR", "exit code 3"),
        (-9, "UNKNOWN", "SIGKILL"),
        (-15, "UNKNOWN", "SIGTERM"),
    ],
)
def test_process_of_spawn_that_ended_first_is_named_by_its_number(
    error: str, code: int, kind: str, end: str
) -> None:
    ended = RankFailure(
        name="worker process 2 of 2", number=1, pid=7, exit_code=code, others_failed=True
    )
    victim = RankFailure(name="worker process 1 of 2", number=0, pid=6, exit_code=1)
    is_early = code in (0, -15)

    failure = fail(
        STEPS + spawn_report(error),
        first_death=victim if is_early else ended,
        early_end=ended if is_early else None,
    )

    assert_blames_only_first_rank(failure, kind, end)
    assert "process 1 (pid 7)" in failure.message
    assert "process 1" in failure.hint


def test_error_that_a_process_of_spawn_raised_stays_the_cause() -> None:
    raised = RankFailure(name="worker process 2 of 2", number=1, pid=7, exit_code=1)

    failure = fail(STEPS + spawn_report("ValueError: bad batch", 1), first_death=raised)

    assert failure.kind == "USER_ERROR"
    assert "process 1" in failure.message
    assert failure.message.endswith("ValueError: bad batch")


#: Death of one of two workers of a data loader. The training has no ranks.
ONE_OF_TWO_LOADERS = RankFailure(name="worker process 1 of 2", number=0, pid=17, exit_code=-9)
LOADER_KILLED = "RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. "
#: Failure of rank 1: a worker process of its data loader was killed.
LOADER_DEATH = RankFailure(
    name="rank 1", child="a child process", rank=1, pid=17, exit_code=-9, others_failed=True
)


@pytest.mark.parametrize(
    ("text", "first_death", "worker"),
    [
        (
            traceback_of(LOADER_KILLED, "[rank1]: ") + LOST_PEER + table(entry(1, 1, 7), STOPPED),
            LOADER_DEATH,
            "a data loader worker of rank 1 (pid 17)",
        ),
        (
            traceback_of(LOADER_KILLED, "[rank1]: ") + LOST_PEER,
            LOADER_DEATH,
            "a data loader worker of rank 1 (pid 17)",
        ),
        (
            LOST_PEER + traceback_of(LOADER_KILLED, "[rank1]: "),
            None,
            "a data loader worker of rank 1 (pid 17)",
        ),
        (spawn_report(LOADER_KILLED, 1), None, "a data loader worker of process 1 (pid 17)"),
        (traceback_of(LOADER_KILLED), None, "a data loader worker (pid 17)"),
        (traceback_of(LOADER_KILLED), ONE_OF_TWO_LOADERS, "a data loader worker (pid 17)"),
    ],
)
def test_killed_worker_of_a_data_loader_is_named(
    text: str, first_death: RankFailure | None, worker: str
) -> None:
    failure = fail(STEPS + text, first_death=first_death)

    assert failure.message == f"trainer ended: {worker} was killed by SIGKILL first"
    assert (failure.kind, failure.rule) == ("UNKNOWN", "sigkill")
    assert failure.hint.startswith("SIGKILL ended a data loader worker")


def test_killed_worker_of_a_data_loader_is_not_named_if_another_error_explains_the_failure() -> (
    None
):
    text = traceback_of(LOADER_KILLED) + traceback_of("ValueError: bad batch")

    failure = fail(STEPS + text)

    assert failure.kind == "USER_ERROR"
    assert "data loader" not in failure.message


@pytest.mark.parametrize(
    ("error", "first_death", "end"),
    [
        (
            "DataLoader worker (pid 17) is killed by signal: Segmentation fault. ",
            None,
            "was killed by SIGSEGV first",
        ),
        (
            "DataLoader worker (pid 17) exited unexpectedly with exit code 3. Details are lost due "
            "to multiprocessing. Rerunning with num_workers=0 may give better error trace.",
            None,
            "ended first, with exit code 3",
        ),
        (
            "DataLoader worker (pid(s) 16, 17) exited unexpectedly",
            replace(LOADER_DEATH, exit_code=4),
            "ended first, with exit code 4",
        ),
        ("DataLoader worker (pid(s) 17) exited unexpectedly", None, "failed first"),
    ],
)
def test_worker_of_a_data_loader_is_named_with_its_exit_code(
    error: str, first_death: RankFailure | None, end: str
) -> None:
    text = traceback_of(f"RuntimeError: {error}", "[rank1]: ") + LOST_PEER

    failure = fail(STEPS + text + table(entry(1, 1, 7), STOPPED), first_death=first_death)

    assert failure.message == f"trainer ended: a data loader worker of rank 1 (pid 17) {end}"
    assert failure.kind == "RUNTIME_ERROR"
    assert "num_workers=0" in failure.hint or "exit code" in failure.hint


def lost_loader(error: str, prefix: str = "") -> str:
    """Return the traceback of a process that lost a worker of its data loader.

    The frames are a selection of the frames that PyTorch 2.13 prints.
    """
    lines = [
        "Traceback (most recent call last):",
        '  File "/t.py", line 15, in main',
        "    batch = next(batches)",
        '  File "/env/torch/utils/data/dataloader.py", line 1291, in _try_get_data',
        "    data = self._data_queue.get(timeout=timeout)",
        '  File "/env/torch/multiprocessing/reductions.py", line 538, in rebuild_storage_fd',
        "    fd = df.detach()",
        '  File "/usr/lib/python3.11/multiprocessing/resource_sharer.py", line 57, in detach',
        "    with _resource_sharer.get_connection(self._id) as conn:",
        '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv',
        error,
    ]
    return "".join(f"{prefix}{line}\n" for line in lines)


LOST_LOADER_ERRORS = [
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "EOFError",
    "FileNotFoundError: [Errno 2] No such file or directory",
]
#: Death of the only worker of a data loader. The training has no ranks.
ONLY_LOADER_DEATH = RankFailure(name="process `python t.py`", pid=17, exit_code=-9)


@pytest.mark.parametrize("error", LOST_LOADER_ERRORS)
@pytest.mark.parametrize(
    ("prefix", "end", "first_death", "message"),
    [
        (
            "[rank1]: ",
            LOST_PEER + table(entry(1, 1, 7), STOPPED),
            LOADER_DEATH,
            "a data loader worker of rank 1 (pid 17) was killed by SIGKILL first",
        ),
        (
            "[rank1]: ",
            LOST_PEER,
            LOADER_DEATH,
            "a data loader worker of rank 1 (pid 17) was killed by SIGKILL first",
        ),
        (
            "[rank1]: ",
            LOST_PEER + table(entry(1, 1, 7), STOPPED),
            None,
            "a data loader worker of rank 1 failed first",
        ),
        # the kernel reports the death of another rank, but not that of the worker
        (
            "[rank1]: ",
            LOST_PEER + table(entry(1, 1, 7), STOPPED),
            death(-15, 0),
            "a data loader worker of rank 1 failed first",
        ),
        ("", "", ONLY_LOADER_DEATH, "a data loader worker (pid 17) was killed by SIGKILL first"),
        ("", "", ONE_OF_TWO_LOADERS, "a data loader worker (pid 17) was killed by SIGKILL first"),
        ("", "", None, "a data loader worker failed first"),
    ],
    ids=[
        "torchrun",
        "ranks",
        "unseen-death",
        "other-death",
        "one-process",
        "two-workers",
        "unseen-one-process",
    ],
)
def test_data_loader_worker_is_named_if_its_parent_lost_the_connection_to_it(
    error: str, prefix: str, end: str, first_death: RankFailure | None, message: str
) -> None:
    failure = fail(STEPS + lost_loader(error, prefix) + end, first_death=first_death)

    assert failure.message == f"trainer ended: {message}"
    assert "network" not in failure.hint
    if "SIGKILL" in message:
        assert (failure.kind, failure.rule) == ("UNKNOWN", "sigkill")
        assert failure.hint.startswith("SIGKILL ended a data loader worker")
    else:
        assert failure.kind in ("UNKNOWN", "RUNTIME_ERROR")
        assert "dmesg" in failure.hint


@pytest.mark.parametrize("error", LOST_LOADER_ERRORS)
def test_data_loader_worker_is_named_if_the_thread_that_pins_memory_lost_it(
    error: str,
) -> None:
    name = error.partition(":")[0]
    original = lost_loader(error).replace("dataloader.py", "_utils/pin_memory.py")
    lines = [
        "Traceback (most recent call last):",
        '  File "/t.py", line 15, in main',
        "    batch = next(batches)",
        '  File "/env/torch/utils/data/dataloader.py", line 1515, in _process_data',
        "    data.reraise()",
        '  File "/env/torch/_utils.py", line 775, in reraise',
        "    raise exception",
        f"{name}: Caught {name} in pin memory thread for device 0.",
        *f"Original {original}".splitlines(),
    ]
    text = STEPS + "".join(f"[rank1]: {line}\n" for line in lines) + LOST_PEER
    text += table(entry(1, 1, 7), STOPPED)

    failure = fail(text, first_death=LOADER_DEATH)

    worker = "a data loader worker of rank 1 (pid 17)"
    assert failure.message == f"trainer ended: {worker} was killed by SIGKILL first"


@pytest.mark.parametrize("error", LOST_LOADER_ERRORS)
def test_worker_of_a_data_loader_is_named_if_its_parent_also_lost_the_connection(
    error: str,
) -> None:
    text = (
        f"{STEPS}{lost_loader(error)}\n"
        "During handling of the above exception, another exception occurred:\n\n"
        f"{traceback_of(LOADER_KILLED)}"
    )

    failure = fail(text, first_death=ONE_OF_TWO_LOADERS)

    worker = "a data loader worker (pid 17)"
    assert failure.message == f"trainer ended: {worker} was killed by SIGKILL first"


def test_worker_of_a_data_loader_is_named_if_a_signal_interrupted_the_traceback() -> None:
    report = (
        "object type name: ConnectionResetError\n"
        "object repr     : ConnectionResetError(104, 'Connection reset by peer')\n"
        "lost sys.stderr\n"
    )
    head, _, _ = lost_loader("", "[rank1]: ").partition("    with _resource_sharer")
    text = STEPS + report + head + "    with" + LOST_PEER + table(entry(1, 1, 7), STOPPED)

    failure = fail(text, first_death=LOADER_DEATH)

    worker = "a data loader worker of rank 1 (pid 17)"
    assert failure.message == f"trainer ended: {worker} was killed by SIGKILL first"


def test_lost_connection_outside_the_data_loader_stays_a_network_fault() -> None:
    failure = fail(STEPS + traceback_of(LOST_LOADER_ERRORS[0]))

    assert failure.kind == "NETWORK"


def test_later_error_is_the_cause_although_a_data_loader_worker_was_lost_before() -> None:
    text = lost_loader("EOFError") + traceback_of("ValueError: bad batch")

    assert fail(STEPS + text).kind == "USER_ERROR"
