"""Rules for the early start of runs, before their GPUs are free.

The start of a run takes some seconds: the flow process starts, and Ray starts a process for the
run's job. If the next point of a sweep started only after the end of an earlier point, a GPU would
be idle during these seconds. So the queue starts a few short runs early. Ray does not start the
program of such a run before the GPUs are free, so no two programs use the same GPU.

Only runs of a series start early. A *series* contains all runs with the same name, number of GPUs,
CPUs per GPU and Ray cluster. For example, the points of a sweep form a series. The function `plan`
of the scheduling policy limits the number of early starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tasks.spec.run import Gang

#: A series is short if each of its last completed runs used GPUs for at most this number of
#: seconds, and if no active run of the series has used GPUs for longer. For longer runs, a few
#: seconds of idle GPUs do not matter.
_SHORT_S = 300.0
#: For each series, the durations of at most this number of completed runs are kept.
_REMEMBERED_RUNS = 8
#: A series with fewer completed runs than this number is not short.
_MIN_COMPLETED_RUNS = 2
#: Smallest value of `ray.start_within_s`, in seconds, with which a run may start early. With a
#: smaller value, the run could fail as START_TIMEOUT while it waits for the end of a short run.
_MIN_START_WITHIN_S = 2 * _SHORT_S


def find_series(spec: Mapping[str, Any], gang: Gang, cluster: str) -> str:
    """Return the series of a run, as a text that is equal for all runs of the series.

    Args:
        spec: The run spec.
        gang: The GPUs that the run needs.
        cluster: Address of the run's Ray cluster. Empty if the run does not use Ray.

    Returns:
        A text such as `grid, 1 x 3 CPUs, http://ray:8265`. An empty string if the run must never
        start early, that is, if one of these conditions holds:

        - The run has other components than a single Ray job.
        - The driver of the job does not take all GPUs of the run. Ray waits until the driver's own
          GPUs are free, but not until the GPUs of the driver's actors and tasks are free. So the
          driver would start too soon.
        - The spec itself says on which nodes the driver may run. Ray may then choose another node
          than the node that the queue granted.
        - The run has a time limit. The limit would include the wait for the GPUs.
        - The key `ray.start_within_s` is less than 10 minutes. This time would include the wait for
          the GPUs.
    """
    components = spec.get("components")
    ray = spec.get("ray")
    if not cluster or not isinstance(components, Mapping) or not isinstance(ray, Mapping):
        return ""
    launchers = [
        component.get("launcher") if isinstance(component, Mapping) else None
        for component in components.values()
    ]
    takes_gpus = gang.nodes == 1 and ray.get("entrypoint_gpus") == gang.gpus_per_node
    has_node_rule = ray.get("entrypoint_label_selector") or ray.get("entrypoint_resources")
    start_within_s = ray.get("start_within_s", _MIN_START_WITHIN_S)
    is_patient = isinstance(start_within_s, int | float) and start_within_s >= _MIN_START_WITHIN_S
    has_time_limit = spec.get("timeout_s") or gang.max_hours or not is_patient
    if launchers != ["ray_job"] or not takes_gpus or has_node_rule or has_time_limit:
        return ""
    return f"{spec.get('name')}, {gang.gpus_per_node} x {gang.cpus_per_gpu} CPUs, {cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRun:
    """A run that belongs to a series and holds GPUs."""

    #: Series of the run, from `find_series`.
    series: str
    #: Node whose GPUs the run holds.
    node: str
    #: Time of the run's GPU grant, in UTC epoch seconds.
    granted_at: float
    #: True if other runs still used the GPUs at the time of the grant.
    is_early: bool = False


@dataclass(slots=True)
class SeriesDurations:
    """Measures how long the runs of each series use their GPUs.

    A new object has no durations. So after a restart of the worker, no series is short until some
    of its runs have completed.
    """

    #: Mapping from series to the durations, in seconds, of the last completed runs of the series.
    _durations_s: dict[str, list[float]] = field(default_factory=dict)
    #: The runs that held GPUs at the previous call of `update`, by flow run id.
    _holding: Mapping[UUID, SeriesRun] = field(default_factory=dict)
    #: For each run that uses its GPUs now, the time at which this use began, in UTC epoch seconds.
    #: The keys are flow run ids. A run that started early, and still waits for its GPUs, is not
    #: included.
    _began_at: dict[UUID, float] = field(default_factory=dict)

    def find_ended(self, holding: Collection[UUID]) -> frozenset[UUID]:
        """Return the runs that held GPUs at the previous call of `update`, but hold none now.

        Args:
            holding: Flow run ids of the runs that hold GPUs now.
        """
        return frozenset(self._holding.keys() - set(holding))

    def update(
        self, holding: Mapping[UUID, SeriesRun], completed: Collection[UUID], now: float
    ) -> frozenset[str]:
        """Record which runs hold GPUs now, and return the series whose runs are short.

        Args:
            holding: All runs that belong to a series and hold GPUs now, by flow run id. A run that
                was in the mapping of the previous call, but not in this one, has ended.
            completed: Flow run ids of the ended runs that have completed. The durations of other
                ended runs do not count, because a failed run is often shorter than usual.
            now: Current time in UTC epoch seconds.
        """
        for run_id, run in holding.items():
            if not run.is_early:
                self._began_at.setdefault(run_id, run.granted_at)
        for run_id in self.find_ended(holding):
            self._record_end(run_id, holding, run_id in completed, now)
        self._holding = holding
        long_series = {
            run.series
            for run_id, run in holding.items()
            if now - self._began_at.get(run_id, now) > _SHORT_S
        }
        return frozenset(
            series
            for series, durations_s in self._durations_s.items()
            if len(durations_s) >= _MIN_COMPLETED_RUNS and max(durations_s) <= _SHORT_S
        ).difference(long_series)

    def _record_end(
        self, run_id: UUID, holding: Mapping[UUID, SeriesRun], is_completed: bool, now: float
    ) -> None:
        """Record the duration of an ended run, and the run that takes over the GPUs of this run.

        Args:
            run_id: Flow run id of the ended run.
            holding: The runs that hold GPUs now.
            is_completed: True if the ended run has completed.
            now: Current time in UTC epoch seconds.
        """
        run = self._holding[run_id]
        began_at = self._began_at.pop(run_id, None)
        if began_at is None:
            # The run started early, and ended before its GPUs were free.
            return
        if is_completed:
            durations_s = self._durations_s.setdefault(run.series, [])
            durations_s.append(now - began_at)
            del durations_s[:-_REMEMBERED_RUNS]
        # Ray gives the free GPUs to the run that has waited for the longest time.
        waiting = [
            (other.granted_at, other_id)
            for other_id, other in holding.items()
            if other_id not in self._began_at
            and (other.series, other.node) == (run.series, run.node)
        ]
        if waiting:
            self._began_at[min(waiting)[1]] = now
