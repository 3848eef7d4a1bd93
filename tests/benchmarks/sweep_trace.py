"""Read the trace of a sweep, and compute how long its GPUs were idle while points waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The GPU and the times of one point of a sweep, recorded by the program of the point."""

    #: Number of the point.
    number: int
    #: Number of the GPU that the point used. The number comes from CUDA_VISIBLE_DEVICES.
    gpu: str
    #: Time at which the work began, in nanoseconds of CLOCK_MONOTONIC.
    began_ns: int
    #: Time at which the work ended, in nanoseconds of CLOCK_MONOTONIC.
    ended_ns: int


def count_ends(path: Path) -> int:
    """Return how many points of the sweep have ended, or 0 if the trace file does not exist yet."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum(line.startswith("end ") for line in lines)


def read_trace(path: Path) -> list[Work]:
    """Return GPU, start and end of each point of a sweep, in the order of the starts.

    Raises:
        ValueError: The start or the end of a point is missing or repeated, or the point changed
            its GPU.
    """
    begins: dict[int, tuple[str, int]] = {}
    ends: dict[int, tuple[str, int]] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for line in path.read_text().splitlines():
        event, number, gpu, at_ns = line.split()
        counts[event, int(number)] += 1
        events = begins if event == "begin" else ends
        events[int(number)] = (gpu, int(at_ns))

    repeated = [f"{event} of point {number}" for (event, number), n in counts.items() if n > 1]
    if repeated or begins.keys() != ends.keys():
        unfinished = sorted(begins.keys() ^ ends.keys())
        raise ValueError(f"not each point ran once: repeated {repeated}, unfinished {unfinished}")

    works = []
    for number, (gpu, began_ns) in begins.items():
        end_gpu, ended_ns = ends[number]
        if end_gpu != gpu:
            raise ValueError(f"point {number} began on GPU {gpu} and ended on GPU {end_gpu}")
        works.append(Work(number=number, gpu=gpu, began_ns=began_ns, ended_ns=ended_ns))
    return sorted(works, key=lambda work: work.began_ns)


def list_idle_ns(works: Sequence[Work], gpu_count: int) -> list[int]:
    """Return the lengths of all intervals in which a GPU was idle although points waited.

    Only the time from the start of the first point to the start of the last point counts. During
    this time, at least one point is always waiting for a GPU.

    Args:
        works: The work of all points, in the order in which the points started.
        gpu_count: Number of GPUs. A GPU without any work is idle for the whole time.

    Raises:
        ValueError: Two points used the same GPU at the same time, or the points used more GPUs than
            `gpu_count`.
    """
    first_ns = works[0].began_ns
    last_ns = works[-1].began_ns
    works_by_gpu: dict[str, list[Work]] = {}
    for work in works:
        works_by_gpu.setdefault(work.gpu, []).append(work)
    if len(works_by_gpu) > gpu_count:
        raise ValueError(f"the points used {len(works_by_gpu)} GPUs, not {gpu_count}")

    unused = gpu_count - len(works_by_gpu)
    intervals_ns = [last_ns - first_ns] * unused
    for gpu, gpu_works in works_by_gpu.items():
        free_since_ns = first_ns
        for work in gpu_works:
            if work.began_ns < free_since_ns:
                raise ValueError(f"point {work.number} began on GPU {gpu}, which was in use")
            intervals_ns.append(work.began_ns - free_since_ns)
            free_since_ns = work.ended_ns
        intervals_ns.append(last_ns - free_since_ns)
    return [interval_ns for interval_ns in intervals_ns if interval_ns > 0]
