"""Benchmark of deaths, cancels and teardowns while a file of the run does not answer.

The file is on a FUSE file system whose server is stopped, which blocks like a network file system
whose server is down. The first rows are the same attempts without such a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.ports import PortsReserved
from tasks.processes.supervisor import Supervisor
from tasks.record.checkpoints import CheckpointGrowth, find_newest_step, is_writing_checkpoint
from tasks.record.events import EventLog
from tasks.spec.probes import ReadyProbe
from tasks.spec.run import Progress
from tests.benchmarks.harness import NAMES, folder, part, recorded_ns, wait_until
from tests.benchmarks.report import NotHere, Result, Row, Sample, interleaved
from tests.support.hung_files import hanging_folder, has_fuse

#: Mapping from the file or folder that hangs to the title in the table of results. The empty key
#: means that nothing hangs.
_PLACES = {
    "": "no file hangs",
    "metrics": "hung metrics file",
    "log": "hung log",
    "checkpoints": "hung checkpoint folder",
}
#: Mapping from the name of a measured duration to the title in the table of results.
_TIMES = {
    "crash": "death of a component to SIGTERM of the others",
    "cancel": "cancel to SIGTERM",
    "teardown": "cancel to the end of the teardown",
}


def measure(*, quick: bool) -> Result:
    """Measure how fast an attempt reacts to a crash and to a cancel, with and without a hung file.

    A hung file is a file on a file system that does not answer.
    """
    if not has_fuse():
        raise NotHere("a FUSE file system can be mounted only by root, with /dev/fuse")
    rounds = 1 if quick else 7
    ways: dict[str, Sample] = {
        f"{name}, {title}": partial(_measure, name, place)
        for name in _TIMES
        for place, title in _PLACES.items()
    }
    without = "without Muster: SIGTERM to each component, and wait for its end"
    ways[without] = _measure_without_muster
    taken = interleaved(ways, rounds)
    rows = [
        Row(way=f"Muster: {text}, {title}", values=taken[f"{name}, {title}"], group=name)
        for name, text in _TIMES.items()
        for title in _PLACES.values()
    ]
    rows.append(Row(way=without, values=taken[without], group="teardown"))
    return Result(
        name="hung_files",
        question="Time of a reaction, a cancel and a teardown while a file of the run is on a file "
        "system that does not answer. Muster has noticed before that the file does not answer",
        rows=rows,
    )


def _measure(name: str, hanging: str) -> float:
    """Run one attempt while a file system does not answer, and return a duration in milliseconds.

    Args:
        name: Duration to measure: "crash", "cancel" or "teardown". See `_TIMES`.
        hanging: File or folder on the file system that does not answer: "metrics", "log" or
            "checkpoints". Empty if all files answer.
    """
    with ExitStack() as stack:
        place = stack.enter_context(folder())
        data = stack.enter_context(hanging_folder(place / "data"))
        events = place / "events.jsonl"
        supervisor = _supervisor_of(place, data.path, hanging, EventLog(events))
        # The exit stack calls `data.answer` before it closes the supervisor. So the file system
        # answers again while the supervisor ends the attempt.
        stack.enter_context(supervisor)
        stack.callback(data.answer)
        for component in NAMES:
            supervisor.start(component)
        if hanging:
            data.hang()
            wait_until(
                lambda: "place.unanswered" in events.read_text(), "the report of the hung file"
            )
        pid = int(supervisor.describe("trainer").partition("pid ")[2].rstrip(")"))
        began_ns = time.monotonic_ns()
        if name == "crash":
            os.kill(pid, signal.SIGKILL)
            supervisor.wait_decided()
        else:
            supervisor.interrupt("the benchmark cancels the run")
        if name == "teardown":
            supervisor.teardown()
            return (time.monotonic_ns() - began_ns) / 1e6
        wait_until(partial(recorded_ns, place, "environment", "sigterm"), "the first SIGTERM")
        stopped_ns = recorded_ns(place, "environment", "sigterm")
        assert stopped_ns is not None
        return (stopped_ns - began_ns) / 1e6


def _measure_without_muster() -> float:
    """Stop the components of an attempt one after the other, and return the time in milliseconds.

    The components are child processes without guardians. The last started component is stopped
    first, as in a teardown.
    """
    with ExitStack() as stack:
        place = stack.enter_context(folder())
        processes = []
        for component in NAMES:
            process = subprocess.Popen(part("wait", component, place), start_new_session=True)
            stack.callback(process.kill)
            processes.append(process)
        wait_until(
            lambda: all((place / f"{component}.ready").exists() for component in NAMES),
            "the start of the components",
        )
        began_ns = time.monotonic_ns()
        for process in reversed(processes):
            process.terminate()
            process.wait()
        return (time.monotonic_ns() - began_ns) / 1e6


def _supervisor_of(place: Path, data: Path, hanging: str, events: EventLog) -> Supervisor:
    """Return the supervisor of an attempt.

    Args:
        place: Folder of the attempt, on a disk that always answers.
        data: Folder on the file system that the benchmark lets hang.
        hanging: Name of the file that is put into `data`, a key of `_PLACES`. All other files are
            in `place`.
        events: Receives the events of the attempt.
    """
    checkpoints = str((data if hanging == "checkpoints" else place) / "checkpoints")
    Path(checkpoints).mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    components = []
    for name in NAMES:
        log = (data if hanging == "log" else place) / f"{name}.log"
        command = Command(argv=part("wait", name, place), env=env, cwd=place, log=log, grace_s=5.0)
        component = ComponentPlan(
            name=name,
            command=command,
            ready=ReadyProbe(file=f"{name}.ready"),
            live=None,
            on_exit_zero="fail",
        )
        if name == "trainer":
            component = replace(
                component,
                checkpoints=checkpoints,
                is_saving=partial(is_writing_checkpoint, checkpoints, place),
                seconds_since_growth=CheckpointGrowth(checkpoints, place).seconds_since_growth,
                find_checkpoint=partial(find_newest_step, checkpoints, place, {}),
            )
        components.append(component)
    metrics = (data if hanging == "metrics" else place) / "metrics.jsonl"
    plan = AttemptPlan(
        run_id="benchmark",
        number=1,
        cwd=place,
        components=tuple(components),
        progress=Progress(jsonl=str(metrics), step="step"),
    )
    return Supervisor(plan, PortsReserved([]), events.emit)
