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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tasks.spec.run import Gang

#: A series is short if each of its last ended runs held GPUs for at most this number of seconds.
#: For longer runs, a few seconds of idle GPUs do not matter.
_SHORT_S = 300.0
#: For each series, the durations of at most this number of ended runs are kept.
_REMEMBERED_RUNS = 8


def find_series(spec: Mapping[str, Any], gang: Gang, cluster: str) -> str:
    """Return the series of a run, as a text that is equal for all runs of the series.

    Args:
        spec: The run spec.
        gang: The GPUs that the run needs.
        cluster: Address of the run's Ray cluster. Empty if the run does not use Ray.

    Returns:
        A text such as `grid, 1 x 3 CPUs, http://ray:8265`. An empty string if the run must never
        start early, that is, if one of these conditions holds:

        - The run has other components than a single Ray job, or the driver of the job does not take
          all GPUs of the run. Ray starts a driver only when the driver's own GPUs are free. Actors
          and tasks request their GPUs only after the driver has started.
        - The spec itself says on which nodes the driver may run. Ray may then choose a node that
          the queue did not grant.
        - The run has a time limit. The limit would include the wait for the GPUs.
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
    has_time_limit = spec.get("timeout_s") or gang.max_hours
    if launchers != ["ray_job"] or not takes_gpus or has_node_rule or has_time_limit:
        return ""
    return f"{spec.get('name')}, {gang.gpus_per_node} x {gang.cpus_per_gpu} CPUs, {cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRun:
    """A run that belongs to a series and holds GPUs."""

    #: Series of the run, from `find_series`.
    series: str
    #: Time of the run's GPU grant, in UTC epoch seconds.
    granted_at: float


@dataclass(slots=True)
class SeriesDurations:
    """Measures how long the runs of each series hold their GPUs.

    A new object has no durations. So after a restart of the worker, no series is short until one of
    its runs has ended.
    """

    #: Mapping from series to the durations, in seconds, of the last ended runs of the series.
    _durations_s: dict[str, list[float]] = field(default_factory=dict)
    #: The runs that held GPUs at the previous call of `update`, by flow run id.
    _holding: Mapping[UUID, SeriesRun] = field(default_factory=dict)

    def update(self, holding: Mapping[UUID, SeriesRun], now: float) -> frozenset[str]:
        """Record which runs hold GPUs now, and return the series whose runs are short.

        Args:
            holding: All runs that belong to a series and hold GPUs now, by flow run id. A run that
                was in the mapping of the previous call, but not in this one, has ended.
            now: Current time in UTC epoch seconds.
        """
        for run in self._find_ended(holding):
            durations_s = self._durations_s.setdefault(run.series, [])
            durations_s.append(now - run.granted_at)
            del durations_s[:-_REMEMBERED_RUNS]
        self._holding = holding
        return frozenset(
            series
            for series, durations_s in self._durations_s.items()
            if max(durations_s) <= _SHORT_S
        )

    def _find_ended(self, holding: Mapping[UUID, SeriesRun]) -> Iterable[SeriesRun]:
        """Return the runs that held GPUs at the previous call of `update`, but hold none now."""
        return [run for id, run in self._holding.items() if id not in holding]
