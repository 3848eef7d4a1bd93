"""Tests of the containment levels, with which Muster finds and ends a component's processes.

The tests check which levels this machine offers, and which processes each level ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tasks.processes import cgroup, shared_memory_scan, tree
from tasks.processes.containment import Containment, Level, probe
from tasks.processes.registry import RunRegistration, claim_lost_run
from tasks.processes.shared_memory import remove_unused
from tasks.spec.probes import ReadyProbe
from tests.support.process_trees import SHAPES
from tests.support.supervised_components import RUN_ID, ComponentHarness, is_alive, sh, wait_until

UP = ReadyProbe(log="up")
HERE = probe(namespace=True)

needs_cgroup = pytest.mark.skipif(
    HERE.cgroup_parent is None, reason=f"no L3 here: {HERE.missing.get(Level.L3)}"
)
needs_namespace = pytest.mark.skipif(
    HERE.level is not Level.L4, reason=f"no L4 here: {HERE.missing.get(Level.L4)}"
)


@pytest.fixture
def register(muster_home: Path) -> Iterator[RunRegistration]:
    register = RunRegistration.opened(RUN_ID)
    yield register
    register.close()


@pytest.fixture
def segment() -> Iterator[Path]:
    """Yield the path of a shared-memory file that does not exist yet."""
    path = Path("/dev/shm") / f"muster-test-{os.urandom(4).hex()}"
    yield path
    path.unlink(missing_ok=True)


def containment_at(level: Level) -> dict[str, Containment]:
    """Return the keyword argument that makes a supervisor use at most this containment level.

    The level says how Muster finds and ends all processes of a component. L2 uses guardian
    processes, L3 also cgroups, and L4 also namespaces.
    """
    with mock.patch.dict(os.environ, MUSTER_MAX_CONTAINMENT=level.value):
        return {"containment": probe(namespace=level is Level.L4)}


@pytest.mark.parametrize("level", [Level.L2, Level.L3, Level.L4])
def test_no_level_above_the_allowed_level_is_used(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_MAX_CONTAINMENT", level.value)

    containment = probe(namespace=True)

    assert containment.level.value <= level.value
    assert all(
        f"is {level.value}" in containment.missing[higher]
        for higher in Level
        if higher in containment.missing and higher.value > level.value
    )


def test_namespace_is_used_only_on_request() -> None:
    assert probe().level is not Level.L4


def test_level_without_a_subreaper_is_the_lowest_and_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(tree, "become_subreaper", refuse)

    containment = probe(namespace=True)

    assert containment.level is Level.L1
    assert "subreaper" in containment.missing[Level.L2]


def test_unwritable_cgroup_lowers_the_level_and_the_reason_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cgroup, "own_cgroup", lambda: str(tmp_path / "not" / "there"))

    containment = probe()

    assert containment.level is Level.L2
    assert "No such file or directory" in containment.missing[Level.L3]


def test_text_of_a_containment_level_explains_the_level_and_why_no_higher_level_is_used() -> None:
    text = str(Containment(level=Level.L2, missing={Level.L3: "read-only"}))

    assert text == (
        "L2 (guardian processes: all processes of the run end, even if one of Muster's own "
        "processes is killed; no L3: read-only)"
    )


@needs_cgroup
def test_component_and_its_descendants_are_in_their_own_cgroup(harness: ComponentHarness) -> None:
    daemon = harness.component("trainer", SHAPES["scrubbed-daemon"], ready=UP)
    supervisor = harness.start_all(daemon, **containment_at(Level.L3))
    [directory] = find_cgroup(harness.wait_for_pid("trainer"))

    descendants = tree.descendants(harness.guardian_of("trainer"))
    assert cgroup.pids(directory) == set(descendants)
    assert len(descendants) == 2

    harness.end(supervisor)
    assert not Path(directory).exists()


@needs_cgroup
def test_cgroup_of_a_component_that_failed_to_start_is_removed(harness: ComponentHarness) -> None:
    before = list_run_cgroups()

    harness.run(harness.component("trainer", ("/no/such/program",)), **containment_at(Level.L3))

    assert list_run_cgroups() == before


@needs_namespace
def test_components_of_a_run_share_a_namespace_and_see_only_processes_of_the_run(
    harness: ComponentHarness,
) -> None:
    listing = sh("echo up; ls -d /proc/[0-9]*; readlink /proc/self/ns/pid >&2; exec sleep 600")
    supervisor = harness.start_all(
        harness.component("api", listing, ready=UP),
        harness.component("trainer", listing, ready=UP),
        **containment_at(Level.L4),
    )
    namespaces = {
        os.readlink(f"/proc/{harness.wait_for_pid(c)}/ns/pid") for c in ("api", "trainer")
    }
    wait_until(
        lambda: "pid:[" in harness.read_log("trainer"), "the trainer has printed its namespace"
    )

    assert len(namespaces) == 1
    assert namespaces != {os.readlink("/proc/self/ns/pid")}
    assert harness.read_log("trainer").count("/proc/") < 10
    harness.end(supervisor)


# This test uses only two of the process trees in SHAPES. `make faults` tests all process trees at
# each containment level.
@needs_namespace
@pytest.mark.parametrize("shape", ["leader-ignores-term", "scrubbed-daemon"])
def test_process_tree_in_a_namespace_ends_with_its_component(
    harness: ComponentHarness, shape: str
) -> None:
    supervisor = harness.start_all(
        harness.component("trainer", SHAPES[shape], ready=UP), **containment_at(Level.L4)
    )

    supervisor.interrupt("enough")
    verdict = harness.end(supervisor)

    assert verdict.left == {}


@needs_namespace
def test_signal_that_killed_a_component_in_a_namespace_is_reported(
    harness: ComponentHarness,
) -> None:
    verdict = harness.run(
        harness.component("api"),
        harness.component("trainer", sh("kill -SEGV $$")),
        **containment_at(Level.L4),
    )

    assert verdict.failure is not None
    assert (verdict.failure.component, verdict.failure.signal) == ("trainer", "SIGSEGV")


@needs_namespace
def test_processes_of_a_killed_guardian_in_a_namespace_are_ended(harness: ComponentHarness) -> None:
    supervisor = harness.start_all(
        harness.component("api", ready=None),
        harness.component("trainer", SHAPES["scrubbed-daemon"], ready=UP),
        **containment_at(Level.L4),
    )

    os.kill(harness.guardian_of("trainer"), signal.SIGKILL)
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.left == {}


def test_reason_for_a_refused_namespace_is_named(tmp_path: Path) -> None:
    """A limit on the number of namespaces makes `unshare` fail, as in many containers."""
    script = "from tasks.processes.containment import probe; print(probe(namespace=True))"
    if os.getuid() != 0:
        pytest.skip("only root can set the limit of namespaces")
    limit = 'echo 0 > /proc/sys/user/max_pid_namespaces && exec "$@"'
    result = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "sh",
            "-c",
            limit,
            "-",
            sys.executable,
            "-c",
            script,
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    if "Read-only" in result.stderr or "Permission" in result.stderr or "unshare:" in result.stderr:
        pytest.skip("the limit can't be set here")

    assert "no L4: the kernel refuses a PID namespace" in result.stdout, result.stderr


def test_shared_memory_in_use_is_not_removed(segment: Path) -> None:
    with segment.open("w"):
        assert remove_unused([segment]) == []

    assert remove_unused([segment]) == [segment]


def test_shared_memory_is_registered_before_processes_are_stopped(
    harness: ComponentHarness,
    register: RunRegistration,
    segment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor searches for shared memory at intervals, and before ending processes."""
    monkeypatch.setattr(shared_memory_scan, "_CPU_SHARE", 1e-6)
    second = segment.with_name(f"{segment.name}-2")
    harness.start_all(
        harness.component(
            "api",
            sh(
                f"exec 3>{segment}; until [ -e make ]; do sleep 0.02; done; "
                f"exec 4>{second}; echo made; trap '' TERM; while :; do sleep 1; done"
            ),
            grace_s=0.3,
        ),
        harness.component("trainer"),
        register=register,
    )
    wait_until(
        lambda: segment in register.owner.leftovers, "the first shared memory file is registered"
    )
    (harness.directory / "make").touch()
    wait_until(lambda: "made" in harness.read_log("api"), "the second shared memory file exists")

    os.kill(harness.wait_for_pid("trainer"), signal.SIGKILL)

    wait_until(
        lambda: second in register.owner.leftovers, "the second shared memory file is registered"
    )
    second.unlink()


def test_registry_is_written_before_the_program_runs(
    harness: ComponentHarness, register: RunRegistration, muster_home: Path
) -> None:
    """The program prints its own registry entry. The entry must exist before the program runs."""
    entry = muster_home / "live" / RUN_ID / "component-trainer.json"

    harness.run(
        harness.component("trainer", ("cat", str(entry)), on_exit_zero="complete"),
        register=register,
    )

    assert f'"pid": {harness.wait_for_pid("trainer")}' in harness.read_log("trainer")
    assert not entry.exists()


def test_process_cannot_claim_its_own_living_run_as_lost(
    harness: ComponentHarness, register: RunRegistration, muster_home: Path
) -> None:
    supervisor = harness.supervise(harness.component("trainer"), register=register)
    supervisor.start("trainer")

    with claim_lost_run(RUN_ID) as lost_run:
        assert lost_run is None

    assert is_alive(harness.wait_for_pid("trainer"))
    harness.end(supervisor)


def find_cgroup(pid: int) -> list[str]:
    """Return a list with the path of a process's cgroup, or an empty list for an ended process."""
    try:
        return [cgroup.own_cgroup(f"/proc/{pid}")]
    except OSError:
        return []


def list_run_cgroups() -> set[str]:
    """Return the names of the cgroups of all components that these tests have started."""
    assert HERE.cgroup_parent is not None
    return {entry.name for entry in Path(HERE.cgroup_parent).glob(f"{cgroup.PREFIX}{RUN_ID}-*")}
