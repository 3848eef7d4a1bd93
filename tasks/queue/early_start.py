"""Which runs may start early, before the GPUs that they need are free.

The start of a run takes some seconds: the flow process starts, and Ray starts a process for the
run's job. If the next point of a sweep started only after the end of an earlier point, a GPU would
be idle during these seconds. So the queue starts a few short runs early. Ray does not start the
program of such a run before the GPUs are free, so no two programs use the same GPU.

Only runs of a series start early. A *series* contains runs that are alike: they have the same name,
resources and Ray cluster. For example, the points of a matrix are a series. The function `plan` of
the scheduling policy limits the number of early starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tasks.spec.run import Gang

#: A series is short if each of its last runs has held its GPUs for at most this number of seconds.
#: For longer runs, the few seconds of a start are not important.
_SHORT_S = 300.0
#: Number of ended runs of a series whose durations are remembered.
_REMEMBERED_RUNS = 8


def find_series(spec: Mapping[str, Any], gang: Gang, cluster: str) -> str:
    """Return the series of a run, as a text that is equal for all runs of the series.

    Args:
        spec: The run spec.
        gang: The GPUs that the run needs.
        cluster: Address of the run's Ray cluster. Empty if the run does not use Ray.

    Returns:
        Empty if the run must never start early. That is the case in each of these cases:

        - The run does not consist of one Ray job whose driver takes all GPUs of the run. Ray
          reserves GPUs before the start of a program only for the driver of a job.
        - The spec contains a rule for the node of the driver, which the grant does not know.
        - The run has a time limit, which would also count the time before the GPUs are free.
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
    """A run of a series that holds GPUs."""

    #: Series of the run, from `find_series`.
    series: str
    #: Time of the run's GPU grant, in UTC epoch seconds.
    granted_at: float


@dataclass(slots=True)
class SeriesDurations:
    """Measures how long the runs of each series hold their GPUs.

    A new object knows no durations, for example after a restart of the worker. It then learns them
    from the next runs that end.
    """

    #: Mapping from series to the durations of its last ended runs, in seconds.
    _durations_s: dict[str, list[float]] = field(default_factory=dict)
    #: The runs that held GPUs at the last call of `update`, by flow run id.
    _holding: Mapping[UUID, SeriesRun] = field(default_factory=dict)

    def update(self, holding: Mapping[UUID, SeriesRun], now: float) -> frozenset[str]:
        """Record which runs hold GPUs now, and return the series whose runs are short.

        Args:
            holding: The runs of all series that hold GPUs now, by flow run id. A run that is no
                longer in this mapping has ended.
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
        """Return the runs that held GPUs at the last call of `update`, and hold none now."""
        return [run for id, run in self._holding.items() if id not in holding]
