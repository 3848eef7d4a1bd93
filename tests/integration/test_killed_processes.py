"""A failure says who killed a process: the kernel's OOM killer, or another process or person."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes import descendant_watch, oom_killer
from tasks.spec.failure_kinds import FailureKind
from tests.support.supervised_components import ComponentHarness, python, sh, wait_until

LIMIT_BYTES = 64 << 20
#: Python code of a process that exceeds the memory limit after half a second. By then, the
#: supervisor has usually found the process as a descendant of the component.
HOG = "import time; time.sleep(0.5); data = [bytearray(8 << 20) for _ in range(40)]; time.sleep(60)"


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """Yield the directory of an empty cgroup with a memory limit of 64 MiB."""
    memberships = Path("/proc/self/cgroup").read_text()
    groups = oom_killer.find_memory_groups(memberships, Path("/proc/self/mountinfo").read_text())
    if not groups:
        pytest.skip("no memory cgroup is visible")
    directory = groups[0] / f"muster-test-{os.getpid()}"
    try:
        directory.mkdir()
        limit = directory / "memory.limit_in_bytes"
        if not limit.exists():
            limit = directory / "memory.max"
        limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()
        pytest.skip(f"no memory limit can be set: {error}")
    yield directory
    deadline = time.monotonic() + 10
    while directory.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            directory.rmdir()
        time.sleep(0.02)


def run_in(cgroup: Path, script: str) -> tuple[str, ...]:
    """Return the command that runs a shell script in a cgroup."""
    return sh(f"echo $$ > {cgroup}/cgroup.procs; {script}")


@pytest.mark.parametrize("is_kernel_log_readable", [True, False])
def test_component_that_exceeds_its_memory_limit_fails_with_host_oom(
    harness: ComponentHarness,
    limited_cgroup: Path,
    is_kernel_log_readable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_kernel_log_readable:
        monkeypatch.setattr(oom_killer, "read_kernel_log", str)
    interpreter = python(HOG)[0]

    verdict = harness.run(
        harness.component("trainer", run_in(limited_cgroup, f"exec {interpreter} -I -S -c '{HOG}'"))
    )

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.HOST_OOM
    assert verdict.failure.signal == "SIGKILL"
    assert f"cgroup {limited_cgroup} reached its memory limit: limit 64 MiB, peak 64 MiB" in (
        verdict.failure.message
    )
    assert "largest process" in verdict.failure.message


#: Python code that exceeds the memory limit at once, before the supervisor has found the process.
FAST_HOG = "data = [bytearray(8 << 20) for _ in range(40)]; import time; time.sleep(60)"


@pytest.mark.parametrize("is_kernel_log_readable", [True, False])
def test_kill_in_an_unknown_cgroup_gets_no_wrong_explanation(
    harness: ComponentHarness,
    limited_cgroup: Path,
    is_kernel_log_readable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_kernel_log_readable:
        monkeypatch.setattr(oom_killer, "read_kernel_log", str)
    elif not oom_killer.read_kernel_log():
        pytest.skip("the kernel log cannot be read")
    # Delay the first search for the component's processes. So the component enters the cgroup and
    # dies before the search.
    monkeypatch.setattr(descendant_watch, "_FIRST_SEARCH_S", 60.0)
    hog = f"exec {python('')[0]} -I -S -c '{FAST_HOG}'"

    verdict = harness.run(harness.component("trainer", run_in(limited_cgroup, hog)))

    assert verdict.failure is not None
    assert "this machine ran out of memory" not in verdict.failure.message
    assert "killed no process" not in verdict.failure.hint
    if is_kernel_log_readable:
        assert verdict.failure.kind is FailureKind.HOST_OOM
        limit = f"cgroup {limited_cgroup} reached its memory limit: limit 64 MiB, peak 64 MiB"
        assert limit in verdict.failure.message


@pytest.mark.parametrize("exit_code", [1, 137])
def test_launcher_whose_worker_exceeds_the_memory_limit_fails_with_host_oom(
    harness: ComponentHarness, limited_cgroup: Path, exit_code: int
) -> None:
    script = f"{python(HOG)[0]} -I -S -c '{HOG}'; exit {exit_code}"

    verdict = harness.run(harness.component("trainer", run_in(limited_cgroup, script)))

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.HOST_OOM
    assert f"{limited_cgroup} reached its memory limit" in verdict.failure.message


def test_sigkill_sent_by_a_person_in_a_limited_cgroup_is_not_host_oom(
    harness: ComponentHarness, limited_cgroup: Path
) -> None:
    script = "sleep 0.5; kill -KILL $$"

    verdict = harness.run(harness.component("trainer", run_in(limited_cgroup, script)))

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.UNKNOWN
    assert "The kernel's OOM killer has killed no process" in verdict.failure.hint
    assert "dmesg" not in verdict.failure.hint


def test_oom_kill_of_another_program_in_the_cgroup_is_not_the_cause(
    harness: ComponentHarness, limited_cgroup: Path
) -> None:
    if not oom_killer.read_kernel_log():
        pytest.skip("the kernel log cannot be read")
    script = "touch started; until [ -e killed ]; do sleep 0.05; done; kill -KILL $$"
    trainer = harness.component("trainer", run_in(limited_cgroup, script))
    supervisor = harness.start_all(trainer)
    wait_until((harness.directory / "started").exists, "the component is in the cgroup")

    other = subprocess.run(run_in(limited_cgroup, f"exec {python('')[0]} -I -S -c '{HOG}'"))
    (harness.directory / "killed").touch()
    verdict = harness.wait_for_verdict(supervisor)

    assert other.returncode == -signal.SIGKILL
    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.UNKNOWN
    assert "The kernel log (dmesg) does not show" in verdict.failure.hint


#: Program with two worker processes of `multiprocessing`. Worker 0 only sleeps. Worker 1 runs the
#: code that a test inserts for `{end}`, and ends.
WORKERS = """
import multiprocessing, os, signal, sys, time
def work(number):
    time.sleep(1)
    if number == 1:
        {end}
    time.sleep(60)
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    workers = [context.Process(target=work, args=(n,), daemon=True) for n in range(2)]
    [worker.start() for worker in workers]
    open("pid", "w").write(str(workers[1].pid))
    workers[1].join()
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("method", "end", "text", "kind"),
    [
        ("fork", "os.kill(os.getpid(), 9)", "was killed by SIGKILL first", "UNKNOWN"),
        ("spawn", "os.kill(os.getpid(), 11)", "was killed by SIGSEGV first", "RUNTIME_ERROR"),
        ("fork", "os._exit(3)", "ended first, with exit code 3", "RUNTIME_ERROR"),
    ],
)
def test_worker_that_dies_first_is_named(
    harness: ComponentHarness, tmp_path: Path, method: str, end: str, text: str, kind: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKERS.format(end=end, method=method))
    command = (python("")[0], "-I", str(script))

    verdict = harness.run(harness.component("trainer", command, cwd=tmp_path))

    assert verdict.failure is not None
    assert f"(pid {(tmp_path / 'pid').read_text()}) {text}" in verdict.failure.message
    assert verdict.failure.kind == kind


def test_rank_of_a_launcher_without_messages_is_named(harness: ComponentHarness) -> None:
    script = "RANK=0 sleep 60 & RANK=1 sh -c 'sleep 0.8; kill -SEGV $$' & wait $!; exit 1"

    verdict = harness.run(harness.component("trainer", sh(script)))

    assert verdict.failure is not None
    assert "rank 1 (pid " in verdict.failure.message
    assert "was killed by SIGSEGV first" in verdict.failure.message
    assert verdict.failure.kind is FailureKind.RUNTIME_ERROR


def test_error_of_a_program_that_kills_its_own_worker_is_the_cause(
    harness: ComponentHarness,
) -> None:
    code = (
        "import subprocess, time\n"
        "worker = subprocess.Popen(['sleep', '60'])\n"
        "try:\n    time.sleep(0.8)\n    raise ValueError('bad batch')\n"
        "finally:\n    worker.kill()\n    worker.wait()\n"
    )

    verdict = harness.run(harness.component("trainer", python(code)))

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.USER_ERROR
    assert verdict.failure.message.endswith(" s: ValueError: bad batch")


#: Program of a rank. Rank 1 ends after 2 s. Rank 0 fails 1 s later with the error of a
#: lost connection to rank 1.
RANK = """
import os, sys, time
def train(rank):
    time.sleep(2)
    if rank == 1:
        {end}
    time.sleep(1)
    raise RuntimeError("[gloo/pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer")
"""
#: Launchers, which start two ranks and wait for them.
LAUNCHERS = {
    "subprocess": """
import subprocess
if "RANK" in os.environ:
    train(int(os.environ["RANK"]))
else:
    command = [sys.executable, "-I", __file__]
    ranks = [subprocess.Popen(command, env={{"RANK": str(rank)}}) for rank in range(2)]
    sys.exit(max(abs(rank.wait()) for rank in ranks))
""",
    "arguments": """
import subprocess
if len(sys.argv) > 1:
    train(int(sys.argv[1]))
else:
    command = [sys.executable, "-I", __file__]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    sys.exit(max(abs(rank.wait()) for rank in ranks))
""",
    "multiprocessing": """
import multiprocessing
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train, args=(rank,)) for rank in range(2)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
    sys.exit(1)
""",
}


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("subprocess", "rank 1"),
        ("arguments", "worker process 2 of 2"),
        ("multiprocessing", "worker process 2 of 2"),
    ],
)
@pytest.mark.parametrize(
    ("end", "text", "kind"),
    [
        ("os._exit(0)", "ended first, with exit code 0", "RUNTIME_ERROR"),
        ("os._exit(3)", "ended first, with exit code 3", "RUNTIME_ERROR"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL first", "UNKNOWN"),
        ("os.kill(os.getpid(), 15)", "was killed by SIGTERM first", "UNKNOWN"),
    ],
)
def test_rank_that_ended_first_is_named_and_not_the_rank_that_lost_it(
    harness: ComponentHarness,
    tmp_path: Path,
    launcher: str,
    name: str,
    end: str,
    text: str,
    kind: str,
) -> None:
    script = tmp_path / "train.py"
    script.write_text((RANK + LAUNCHERS[launcher]).format(end=end))
    command = (python("")[0], "-I", str(script))

    verdict = harness.run(harness.component("trainer", command, cwd=tmp_path))

    assert verdict.failure is not None
    assert f": {name} (pid " in verdict.failure.message
    assert text in verdict.failure.message
    assert verdict.failure.kind == kind


def test_failed_command_of_a_script_is_not_named(harness: ComponentHarness) -> None:
    script = "sh -c 'sleep 0.8; exit 5'; exit 1"

    verdict = harness.run(harness.component("trainer", sh(script)))

    assert verdict.failure is not None
    assert "first" not in verdict.failure.message


#: Program that writes an error file, as torchrun does if a rank uses the decorator `record`.
TORCHRUN = """
import json, os, sys
callstack = 'Traceback (most recent call last):\\n  File "t.py", line 1\\nValueError: bad batch'
message = {"message": "ValueError: bad batch", "extraInfo": {"py_callstack": callstack}}
json.dump({"message": message}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(1)
"""


@pytest.mark.parametrize("env", [{}, {"TORCHELASTIC_ERROR_FILE": "mine.json"}])
def test_error_file_of_torchrun_gives_the_traceback(
    harness: ComponentHarness, tmp_path: Path, env: dict[str, str]
) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text(TORCHRUN)
    command = (python("")[0], "-I", str(launcher))

    verdict = harness.run(harness.component("trainer", command, cwd=tmp_path, env=env))

    assert verdict.failure is not None
    assert verdict.failure.line == "ValueError: bad batch"
    assert verdict.failure.log_tail.splitlines()[-1] == "ValueError: bad batch"
    if env:
        assert json.loads((tmp_path / "mine.json").read_text())["message"]
