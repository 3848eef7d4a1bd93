"""The containment levels: which can be had, and what each holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tasks.processes import cgroup, registry, tree
from tasks.processes.containment import Containment, Level, probe
from tasks.processes.registry import RunRegister, claimed, remove_unused
from tasks.spec.probes import ReadyProbe
from tests.support.shapes import SHAPES
from tests.support.stage import RUN_ID, Stage, is_alive, sh, wait_until

UP = ReadyProbe(log="up")
HERE = probe(namespace=True)

needs_cgroup = pytest.mark.skipif(
    HERE.cgroup_parent is None, reason=f"no L3 here: {HERE.missing.get(Level.L3)}"
)
needs_namespace = pytest.mark.skipif(
    HERE.level is not Level.L4, reason=f"no L4 here: {HERE.missing.get(Level.L4)}"
)


@pytest.fixture
def register(muster_home: Path) -> Iterator[RunRegister]:
    register = RunRegister.opened(RUN_ID)
    yield register
    register.close()


@pytest.fixture
def segment() -> Iterator[Path]:
    """The path of a segment that is not there yet."""
    path = Path("/dev/shm") / f"muster-test-{os.urandom(4).hex()}"
    yield path
    path.unlink(missing_ok=True)


def held(level: Level) -> dict[str, Containment]:
    with mock.patch.dict(os.environ, MUSTER_MAX_CONTAINMENT=level.value):
        return {"containment": probe(namespace=level is Level.L4)}


@pytest.mark.parametrize("level", [Level.L2, Level.L3, Level.L4])
def test_no_level_above_the_one_allowed_is_taken(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_MAX_CONTAINMENT", level.value)

    found = probe(namespace=True)

    assert found.level.value <= level.value
    assert all(
        f"is {level.value}" in found.missing[above]
        for above in Level
        if above in found.missing and above.value > level.value
    )


def test_namespace_is_not_taken_unless_it_is_asked_for() -> None:
    assert probe().level is not Level.L4


def test_without_a_subreaper_the_level_is_the_lowest_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(tree, "become_subreaper", refuse)

    found = probe(namespace=True)

    assert found.level is Level.L1
    assert "subreaper" in found.missing[Level.L2]


def test_cgroup_that_cannot_be_written_drops_the_level_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cgroup, "own_cgroup", lambda: str(tmp_path / "not" / "there"))

    found = probe()

    assert found.level is Level.L2
    assert "No such file or directory" in found.missing[Level.L3]


def test_level_says_what_it_promises_and_why_no_higher_one_is_in_force() -> None:
    text = str(Containment(level=Level.L2, missing={Level.L3: "read-only"}))

    assert text == "L2 (guardians: no single SIGKILL leaves a process behind; no L3: read-only)"


@needs_cgroup
def test_component_and_all_that_comes_of_it_is_in_a_cgroup_of_its_own(stage: Stage) -> None:
    daemon = stage.component("trainer", SHAPES["scrubbed-daemon"], ready=UP)
    supervisor = stage.running(daemon, **held(Level.L3))
    [directory] = cgroups_of(stage.pid_of("trainer"))

    below = tree.descendants(stage.guardian_of("trainer"))
    assert cgroup.pids(directory) == set(below)
    assert len(below) == 2

    stage.end(supervisor)
    assert not Path(directory).exists()


@needs_cgroup
def test_cgroup_of_a_component_that_could_not_be_started_is_gone(stage: Stage) -> None:
    before = cgroups_of_ours()

    stage.run(stage.component("trainer", ("/no/such/program",)), **held(Level.L3))

    assert cgroups_of_ours() == before


@needs_namespace
def test_components_of_a_run_share_one_namespace_and_see_none_but_the_run(stage: Stage) -> None:
    listing = sh("echo up; ls -d /proc/[0-9]*; readlink /proc/self/ns/pid >&2; exec sleep 600")
    supervisor = stage.running(
        stage.component("api", listing, ready=UP),
        stage.component("trainer", listing, ready=UP),
        **held(Level.L4),
    )
    namespaces = {os.readlink(f"/proc/{stage.pid_of(c)}/ns/pid") for c in ("api", "trainer")}
    wait_until(lambda: "pid:[" in stage.text_of("trainer"), "all is said")

    assert len(namespaces) == 1
    assert namespaces != {os.readlink("/proc/self/ns/pid")}
    assert stage.text_of("trainer").count("/proc/") < 10
    stage.end(supervisor)


# All of SHAPES are ended so by `make faults`, at each level.
@needs_namespace
@pytest.mark.parametrize("shape", ["leader-ignores-term", "scrubbed-daemon"])
def test_any_tree_in_a_namespace_ends_with_its_component(stage: Stage, shape: str) -> None:
    supervisor = stage.running(
        stage.component("trainer", SHAPES[shape], ready=UP), **held(Level.L4)
    )

    supervisor.interrupt("enough")
    verdict = stage.end(supervisor)

    assert verdict.left == {}


@needs_namespace
def test_death_in_a_namespace_is_told_as_it_was(stage: Stage) -> None:
    verdict = stage.run(
        stage.component("api"),
        stage.component("trainer", sh("kill -SEGV $$")),
        **held(Level.L4),
    )

    assert verdict.failure is not None
    assert (verdict.failure.component, verdict.failure.signal) == ("trainer", "SIGSEGV")


@needs_namespace
def test_what_a_killed_guardian_leaves_in_a_namespace_is_ended(stage: Stage) -> None:
    supervisor = stage.running(
        stage.component("api", ready=None),
        stage.component("trainer", SHAPES["scrubbed-daemon"], ready=UP),
        **held(Level.L4),
    )

    os.kill(stage.guardian_of("trainer"), signal.SIGKILL)
    verdict = stage.verdict_of(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.left == {}


def test_namespace_that_is_refused_says_why(tmp_path: Path) -> None:
    """Where a container's rules refuse unshare, for example: here a user limit does."""
    script = "from tasks.processes.containment import probe; print(probe(namespace=True))"
    if os.getuid() != 0:
        pytest.skip("the limit of namespaces is root's to set")
    limit = 'echo 0 > /proc/sys/user/max_pid_namespaces && exec "$@"'
    done = subprocess.run(
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
    if "Read-only" in done.stderr or "Permission" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("the limit can't be set here")

    assert "no L4: unshare is refused" in done.stdout, done.stderr


def test_segment_that_somebody_still_uses_stays(segment: Path) -> None:
    with segment.open("w"):
        assert remove_unused([segment]) == []

    assert remove_unused([segment]) == [segment]


def test_segments_are_registered_when_processes_are_about_to_end(
    stage: Stage, register: RunRegister, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is until the next look."""
    monkeypatch.setattr(registry, "_CPU_SHARE", 1e-6)
    second = segment.with_name(f"{segment.name}-2")
    stage.running(
        stage.component(
            "api",
            sh(
                f"exec 3>{segment}; until [ -e make ]; do sleep 0.02; done; "
                f"exec 4>{second}; echo made; trap '' TERM; while :; do sleep 1; done"
            ),
            grace_s=0.3,
        ),
        stage.component("trainer"),
        register=register,
    )
    wait_until(lambda: segment in register.owner.leftovers, "the first is registered")
    (stage.directory / "make").touch()
    wait_until(lambda: "made" in stage.text_of("api"), "the second is made")

    os.kill(stage.pid_of("trainer"), signal.SIGKILL)

    wait_until(lambda: second in register.owner.leftovers, "it is registered")
    second.unlink()


def test_registry_is_written_before_the_program_runs(
    stage: Stage, register: RunRegister, muster_home: Path
) -> None:
    """The program itself finds its entry."""
    entry = muster_home / "live" / RUN_ID / "component-trainer.json"

    stage.run(
        stage.component("trainer", ("cat", str(entry)), on_exit_zero="complete"),
        register=register,
    )

    assert f'"pid": {stage.pid_of("trainer")}' in stage.text_of("trainer")
    assert not entry.exists()


def test_living_run_is_not_claimed_by_its_own_process(
    stage: Stage, register: RunRegister, muster_home: Path
) -> None:
    supervisor = stage.supervise(stage.component("trainer"), register=register)
    supervisor.start("trainer")

    with claimed(RUN_ID) as lost:
        assert lost is None

    assert is_alive(stage.pid_of("trainer"))
    stage.end(supervisor)


def cgroups_of(pid: int) -> list[str]:
    try:
        return [cgroup.own_cgroup(f"/proc/{pid}")]
    except OSError:
        return []


def cgroups_of_ours() -> set[str]:
    assert HERE.cgroup_parent is not None
    return {entry.name for entry in Path(HERE.cgroup_parent).glob(f"{cgroup.PREFIX}{RUN_ID}-*")}
