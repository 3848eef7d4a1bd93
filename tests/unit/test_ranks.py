"""Tests that the first of several ranks to fail is named, from the messages of real launchers."""

from __future__ import annotations

import pytest

from tasks.processes.attempt import make_failure
from tasks.record.outcome import Exit, Failure
from tasks.record.ranks import find_first_rank

STEPS = "step 0\nstep 0\nstep 1\nstep 1\n"
#: Traceback of a rank that lost its connection to the other rank. From torchrun 2.13 with gloo.
LOST_PEER = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/t.py", line 14, in <module>
[rank0]:     model(torch.ones(2,4)).sum().backward()
[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer \
[127.0.0.1]:14722. This is typically caused by a remote worker crashing.
"""
#: Traceback of a rank that waited in vain for the other rank.
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
    """Return the entry of a failed rank in the error report of torchrun."""
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


def fail(text: str) -> Failure:
    """Return the failure of a component whose launcher has printed the text and exited with 1."""
    exit = Exit.from_return_code(1, 0.0)
    return make_failure("trainer", text, message="trainer ended", rule="exit", exit=exit)


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
        # Both ranks were dead when torchrun checked them, and torchrun checked rank 0 first.
        (
            STEPS + LOST_PEER + table(entry(0, 1, 6), entry(1, -9, 7, "(SIGKILL)")),
            "UNKNOWN",
            "rank 1 (pid 7) was killed by SIGKILL first",
        ),
        (
            STEPS + TIMED_OUT + table(entry(0, 1, 6), entry(1, -15, 7, "(SIGTERM)")),
            "COLLECTIVE_TIMEOUT",
            "rank 0 (pid 6) ended first, with exit code 1, after it waited in vain for rank 1",
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
    ],
)
def test_first_rank_to_die_is_named(text: str, kind: str, message: str) -> None:
    failure = fail(text)

    assert message in failure.message
    assert failure.kind == kind
    assert "[rank0]" not in failure.message
    assert "Another process died first" not in failure.hint


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
