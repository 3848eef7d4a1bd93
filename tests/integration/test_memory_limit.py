"""The key `memory_gib` limits the memory of a component and all its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.processes import oom_killer
from tasks.processes.memory_cgroup import find_memory_parent
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tests.support.supervised_components import ComponentHarness, python, sh

LIMIT_BYTES = 64 << 20
#: Python code of two programs that allocate memory and then wait: PART 40 MiB, and WHOLE 160 MiB.
PART = "import time; data = bytearray(40 << 20); time.sleep(60)"
WHOLE = "import time; time.sleep(0.5); data = bytearray(160 << 20); time.sleep(60)"


@pytest.fixture
def parent() -> Path:
    """Return the directory below which Muster creates memory cgroups."""
    try:
        return Path(find_memory_parent().directory)
    except OSError as error:
        pytest.skip(str(error))


def list_cgroups(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir() if path.name.startswith("muster-")}


def test_component_beyond_its_memory_limit_fails_with_host_oom_and_names_limit_and_peak(
    harness: ComponentHarness, parent: Path
) -> None:
    before = list_cgroups(parent)

    verdict = harness.run(
        harness.component("trainer", python(WHOLE), memory_limit_bytes=LIMIT_BYTES)
    )

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.HOST_OOM, verdict.failure
    assert verdict.failure.component == "trainer"
    assert "trainer reached its limit `memory_gib`" in verdict.failure.message
    assert "limit 64 MiB, peak 64 MiB" in verdict.failure.message
    assert "raise `memory_gib`" in verdict.failure.hint
    assert list_cgroups(parent) - before == set()


def test_memory_of_all_processes_counts_together(harness: ComponentHarness, parent: Path) -> None:
    command = python(
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-I', '-S', '-c', {PART!r}]\n"
        "parts = [subprocess.Popen(command) for _ in range(2)]\n"
        "while all(part.poll() is None for part in parts):\n"
        "    time.sleep(0.05)\n"
        "sys.exit(1)\n"
    )

    verdict = harness.run(harness.component("trainer", command, memory_limit_bytes=LIMIT_BYTES))

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.HOST_OOM, verdict.failure
    assert "trainer reached its limit `memory_gib`" in verdict.failure.message


def test_kernel_has_the_limit_for_the_component_and_for_no_other_component(
    harness: ComponentHarness, parent: Path, tmp_path: Path
) -> None:
    commands = {
        name: sh(
            f"cat /proc/self/cgroup > {tmp_path}/{name}; sleep 0.5; cat "
            f"{parent}/*{name}/memory.limit_in_bytes {parent}/*{name}/memory.max "
            f"> {tmp_path}/{name}.limit 2> /dev/null; exit 0"
        )
        for name in ("api", "trainer")
    }

    verdict = harness.run(
        harness.component("api", commands["api"], on_exit_zero="drain"),
        harness.component(
            "trainer", commands["trainer"], on_exit_zero="complete", memory_limit_bytes=LIMIT_BYTES
        ),
    )

    mountinfo = Path("/proc/self/mountinfo").read_text()
    groups = {
        name: oom_killer.find_memory_groups((tmp_path / name).read_text(), mountinfo)[0]
        for name in commands
    }
    assert verdict.state is RunState.COMPLETED
    assert groups["trainer"].parent == parent
    assert groups["api"] != groups["trainer"]
    assert (tmp_path / "trainer.limit").read_text().strip() == str(LIMIT_BYTES)
    assert (tmp_path / "api.limit").read_text() == ""
