"""Fault cases of the registry: reused process ids, a reboot, and leaked shared memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.processes.identity import ProcessId
from tests.faults.fault_run import CANCELLED, KILLED, Case, FaultRun, Phase, failed, phases_with
from tests.faults.injections import helper, pids_taken, why_no_pid_to_choose
from tests.support.supervised_components import python, sh, wait_until

#: Program that creates a segment of shared memory, keeps it mapped, and never removes it.
_LEAKS_SEGMENT = """
import mmap, os, sys, time
f = open("/dev/shm/" + sys.argv[1], "w+b")
f.truncate(4096)
mapping = mmap.mmap(f.fileno(), 4096)
os.write(1, b"up\\n")
time.sleep(600)
"""


def _prepare_drain(fault_run: FaultRun) -> None:
    """Let the trainer exit with code 0 while the run continues."""
    fault_run.components["trainer"] |= {
        "argv": sh("echo up; while [ ! -e die ]; do sleep 0.02; done"),
        "on_exit_zero": "drain",
    }


def _reuse_pids_of_running_run(fault_run: FaultRun) -> None:
    pids = [fault_run.pid("trainer"), *fault_run.guardians("trainer")]
    fault_run.touch("die")
    fault_run.until("component.drained", "trainer")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they are reaped")
    _start_processes_with_pids(fault_run, pids)


def _start_processes_with_pids(fault_run: FaultRun, pids: list[int]) -> None:
    fault_run.stack.enter_context(pids_taken(*pids, cwd=fault_run.directory))
    fault_run.bystanders.append((tuple(pids), "a process with a pid of the run's"))


def _registry_entries(fault_run: FaultRun) -> list[Path]:
    """Return the four files in which the run registers its processes.

    One file names the flow process, and one file names each of the three components.
    """
    paths = list(fault_run.observed_flow.home.glob("live/*/*.json"))
    assert len(paths) == 4, "the owner and three components are registered"
    return paths


def _kill_flow(fault_run: FaultRun) -> None:
    """Kill the flow process. The components end, but the run stays in the registry of live runs.

    Each component has a guardian process, which ends the component when the flow process is dead.
    """
    fault_run.observed_flow.kill()
    assert fault_run.observed_flow.oracle_result().left == ()


def _reuse_pids_after_kill(fault_run: FaultRun) -> None:
    _kill_flow(fault_run)
    recorded_pids: set[int] = set()
    for path in _registry_entries(fault_run):
        entry = json.loads(path.read_text())
        names = {"process", "guardian"} & entry.keys()
        recorded_pids |= {entry[name]["pid"] for name in names}
    assert len(recorded_pids) == 7
    _start_processes_with_pids(fault_run, sorted(recorded_pids))
    _check_reconcile_finds_no_process(fault_run)


def _check_reconcile_finds_no_process(fault_run: FaultRun) -> None:
    result = fault_run.reconcile()[fault_run.observed_flow.run_id]
    assert result["is_clean"] and result["killed"] == [], result
    assert not any(fault_run.observed_flow.home.glob("live/*")), "the registry entry still exists"


PID_REUSE = [
    Case(
        number=25,
        title="pid reuse in a run that continues",
        phases=(Phase.RUNNING,),
        prepare=_prepare_drain,
        inject=_reuse_pids_of_running_run,
        expect=CANCELLED,
        obstacle=why_no_pid_to_choose,
    ),
    Case(
        number=25,
        title="pid reuse, then reconcile",
        phases=(Phase.AFTER,),
        inject=_reuse_pids_after_kill,
        expect=KILLED,
        obstacle=why_no_pid_to_choose,
    ),
]


def _rewrite_registry_for_other_boot(fault_run: FaultRun) -> None:
    """Write the ids of running processes into the registry, together with another boot id.

    The other boot id means that the machine was restarted after the processes were registered. So
    the ids now belong to other processes.
    """
    _kill_flow(fault_run)
    pids = fault_run.bystanders[0][0]
    for path in _registry_entries(fault_run):
        entry = json.loads(path.read_text())
        for name in {"process", "guardian"} & entry.keys():
            entry[name] = _process_of_other_boot(pids[name == "guardian"])
        path.write_text(json.dumps(entry))
    _check_reconcile_finds_no_process(fault_run)


def _process_of_other_boot(pid: int) -> dict[str, Any]:
    identity = ProcessId.of(pid).model_dump(mode="json")
    return {**identity, "boot_id": "00000000-0000-0000-0000-000000000000/pid:[1]"}


REBOOT = Case(
    number=26,
    title="registry from before a reboot",
    phases=(Phase.AFTER,),
    inject=_rewrite_registry_for_other_boot,
    expect=KILLED,
)


def _segment_paths(fault_run: FaultRun) -> tuple[Path, Path]:
    """Return the paths of the shared-memory segments of the run and of an unrelated process."""
    return tuple(  # type: ignore[return-value]
        Path(f"/dev/shm/muster-fault-{name}-{fault_run.tag}") for name in ("ours", "others")
    )


def _prepare_segment_leak(fault_run: FaultRun) -> None:
    own_segment, foreign_segment = _segment_paths(fault_run)
    for path in (own_segment, foreign_segment):
        fault_run.stack.callback(path.unlink, missing_ok=True)
    fault_run.components["trainer"]["argv"] = (*python(_LEAKS_SEGMENT), own_segment.name)


def _leak_segment_of_other_process(fault_run: FaultRun) -> None:
    """Leak a shared-memory segment in a program that does not belong to the run.

    The run leaks another segment. Wait until Muster has registered the segment of the run. Muster
    must not register the segment of the other program.
    """
    own_segment, foreign_segment = _segment_paths(fault_run)
    with helper(*python(_LEAKS_SEGMENT), foreign_segment.name, cwd=fault_run.directory):
        assert foreign_segment.exists()
    wait_until(lambda: own_segment.name in _read_owner_entry(fault_run), "the segment is noted")


def _read_owner_entry(fault_run: FaultRun) -> str:
    """Return the text of `owner.json`, in which the flow process registers its resources."""
    [owner] = fault_run.observed_flow.home.glob("live/*/owner.json")
    return owner.read_text()


def _kill_trainer(fault_run: FaultRun) -> None:
    _leak_segment_of_other_process(fault_run)
    fault_run.signal("trainer")


def _kill_flow_and_reconcile(fault_run: FaultRun) -> None:
    _leak_segment_of_other_process(fault_run)
    fault_run.observed_flow.kill()
    fault_run.touch("release")
    assert fault_run.observed_flow.oracle_result().left == ()
    assert fault_run.reconcile()[fault_run.observed_flow.run_id]["is_clean"]


def _check_only_own_segment_is_removed(fault_run: FaultRun) -> None:
    own_segment, foreign_segment = _segment_paths(fault_run)
    assert not own_segment.exists(), "the run's segment still exists"
    assert foreign_segment.exists(), "the segment of an unrelated process was removed"


SHARED_MEMORY = [
    Case(
        number=39,
        title=f"leaked /dev/shm segment, {how}",
        phases=phases_with("trainer"),
        prepare=_prepare_segment_leak,
        inject=inject,
        check=_check_only_own_segment_is_removed,
        expect=expect,
        expect_stopping=KILLED if expect is KILLED else CANCELLED,
    )
    for how, inject, expect in (
        ("then stopped", _leak_segment_of_other_process, CANCELLED),
        ("its maker SIGKILLed", _kill_trainer, failed("trainer", signal="SIGKILL")),
        ("flow SIGKILLed, then reconcile", _kill_flow_and_reconcile, KILLED),
    )
]

CASES = [*PID_REUSE, REBOOT, *SHARED_MEMORY]
