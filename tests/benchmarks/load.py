"""Benchmark of the reaction to a crash under load, and of the CPU cost of watching /dev/shm.

The load is: new files in /dev/shm, many processes with many memory mappings, or a full disk. Muster
watches /dev/shm to find the processes that create shared memory segments.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from tasks.processes import registry, shared_memory, tree
from tasks.server.server import prefect_server
from tasks.spec.probes import ReadyProbe
from tests.benchmarks import models
from tests.benchmarks.crash import reaction_ms
from tests.benchmarks.footprint import thread_cpu_ns
from tests.benchmarks.harness import (
    NAMES,
    FlowProcess,
    folder,
    part,
    recorded_ns,
    supervisor_of,
    wait_until,
)
from tests.benchmarks.report import Missing, Result, Row, Sample, interleaved, say
from tests.faults.injections import in_mounts, why_no_mounts

#: Number of files per second that are created in /dev/shm.
_A_SECOND = 20
#: Time limit, in seconds, on the start of a run on a busy machine.
_STARTS_WITHIN_S = 300.0
_PROCESSES, _MAPPINGS = 17, 3000
_SEGMENTS_TEXT = f"{_A_SECOND} foreign segments a second in /dev/shm"


def measure(*, quick: bool) -> Result:
    """Measure how fast Muster reacts to a crash on a machine under different loads.

    Also measure the CPU time that Muster spends on watching the shared memory in /dev/shm.
    """
    rounds, window_s = (1, 2.0) if quick else (6, 10.0)
    missing = []
    with prefect_server(password="") as url:
        ways: dict[str, Sample] = {
            "no other load": partial(_reaction, url),
            _SEGMENTS_TEXT: partial(_reaction, url, segments=True),
            f"{_PROCESSES} processes of {_MAPPINGS:,} mappings, and {_SEGMENTS_TEXT}": partial(
                _reaction, url, segments=True, is_mapped=True
            ),
        }
        if why := why_no_mounts():
            missing.append(Missing(way="disk full", why=why))
        else:
            ways["disk full"] = partial(_reaction, url, is_disk_full=True)
        taken = interleaved(ways, rounds)
    rows = [
        Row(way=f"Muster: the flow `train`, {way}", values=taken[way], group="reaction")
        for way in ways
    ]
    watch, model = _cpu_of_watching(3, window_s)
    rows += [
        Row(way=f"Muster: CPU with {_SEGMENTS_TEXT}", values=watch, unit="%", group="CPU"),
        Row(
            way="four checks of each, 50 ms apart",
            values=model,
            unit="%",
            group="CPU",
            how="modelled",
        ),
    ]
    return Result(
        name="load",
        question="Time from the death of one component (a program of a run, killed by SIGKILL) "
        "until the first of the run's remaining components gets SIGTERM, while the machine is "
        "under load. The last rows show the CPU use of the search for the processes that created "
        "shared memory segments, in % of one core",
        rows=rows,
        missing=missing,
    )


def _reaction(
    url: str, *, segments: bool = False, is_mapped: bool = False, is_disk_full: bool = False
) -> float:
    """Return how fast a run reacts to the death of its trainer under a load, in milliseconds.

    The time starts when the trainer is killed, and ends when another component receives SIGTERM.

    Args:
        url: URL of the Prefect API.
        segments: True if another process creates files in /dev/shm.
        is_mapped: True if a component has many processes with many memory mappings.
        is_disk_full: True if the disk of MUSTER_HOME is full.
    """
    with folder() as place, ExitStack() as stack:
        if segments:
            stack.enter_context(_segments(place))
        commands = {name: part("wait", name, place) for name in NAMES}
        if is_mapped:
            commands["api"] = part("mapped", _PROCESSES, _MAPPINGS, "api", place)
        spec = {
            "name": "bench",
            "workload": "grpo",
            "components": {
                name: {"command": list(command), "ready": {"file": str(place / f"{name}.ready")}}
                for name, command in commands.items()
            },
        }
        home = place / "muster"
        home.mkdir()
        wrapper: Sequence[str] = ()
        if is_disk_full:
            wrapper = in_mounts(f"mount -t tmpfs -o size=4m,mode=700 none {home}")
        flow = stack.enter_context(FlowProcess(place, spec, url, wrapper))
        pid = flow.components(_STARTS_WITHIN_S)["trainer"]["pid"]
        if is_disk_full:
            with suppress(OSError), (flow.home / "filler").open("wb", buffering=0) as f:
                while f.write(bytes(4096)):
                    pass
        time.sleep(1.0)
        return reaction_ms(place, pid, flow.wait)


@contextmanager
def _segments(place: Path) -> Iterator[None]:
    """Start a process that creates files in /dev/shm and belongs to no run.

    The process ends when the context ends.
    """
    maker = subprocess.Popen(part("segments", _A_SECOND, "segments", place))
    try:
        wait_until(lambda: recorded_ns(place, "segments", "ready"), "the maker of segments")
        yield
    finally:
        maker.terminate()
        maker.wait()


def _cpu_of_watching(windows: int, window_s: float) -> tuple[list[float], list[float]]:
    """Measure how much CPU time Muster and an early version of it need to watch /dev/shm.

    The function `look_for_makers` imitates the early version.

    Args:
        windows: Number of time windows.
        window_s: Length of a window, in seconds.

    Returns:
        Two lists with the CPU use in each window, in percent of one core. The first list is for
        Muster's thread, the second for the imitated early version.
    """
    with folder() as place, ExitStack() as stack:
        other_threads = _watch_threads()
        register = registry.RunRegistration.opened("benchmark")
        stack.callback(register.close)
        commands = {name: part("wait", name, place) for name in NAMES}
        ready = {name: ReadyProbe(file=f"{name}.ready") for name in NAMES}
        supervisor = stack.enter_context(supervisor_of(place, commands, ready, register=register))
        for name in NAMES:
            supervisor.start(name)
        pids = [recorded_ns(place, name, "pid") for name in NAMES]
        guardians = [tree.read_parent(pid) for pid in pids if pid]
        is_over = threading.Event()
        model = threading.Thread(
            target=models.look_for_makers,
            args=(
                shared_memory.DIRECTORY,
                lambda: set(tree.descendants(*guardians)),
                is_over.is_set,
            ),
        )
        model.start()
        stack.callback(model.join)
        stack.callback(is_over.set)
        [watch] = _watch_threads() - other_threads
        stack.enter_context(_segments(place))
        say(f"  {windows} windows of {window_s:g} s")
        used: tuple[list[float], list[float]] = ([], [])
        for _ in range(windows):
            cpu_before_ns = [thread_cpu_ns(thread) for thread in (watch, model)]
            began_ns = time.monotonic_ns()
            time.sleep(window_s)
            took_ns = time.monotonic_ns() - began_ns
            for values, thread, before_ns in zip(used, (watch, model), cpu_before_ns, strict=True):
                values.append(100 * (thread_cpu_ns(thread) - before_ns) / took_ns)
        return used


def _watch_threads() -> set[threading.Thread]:
    """Return the threads of this process that watch /dev/shm."""
    return {thread for thread in threading.enumerate() if thread.name == "shared-memory"}
