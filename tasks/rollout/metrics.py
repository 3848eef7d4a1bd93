"""What a gateway and its fleet say of themselves to Prometheus, at `GET /metrics`."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tasks.rollout.fleet import Fleet
from tasks.rollout.router import WaitingLine

_PREFIX = "muster_rollout"
#: Of requests, in seconds: from a token to a long answer.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Of one gateway; beside what others of the process register.

    Args:
        pieces: by rank and epoch, what an incarnation has generated.
    """

    def __init__(self, fleet: Fleet, *, line: WaitingLine, pieces: Counts[tuple[int, int]]) -> None:
        self._fleet, self._line, self._pieces = fleet, line, pieces
        self._registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            f"{_PREFIX}_requests",
            "Requests that have ended, by the status that the client got; 499: it left before.",
            ["code"],
            registry=self._registry,
        )
        self._seconds = prometheus.Histogram(
            f"{_PREFIX}_request_seconds",
            "From a request to the end of its answer, the wait in line included.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(self)
        #: To find one by its label takes four times as long as to count.
        self._by_status: dict[int, prometheus.Counter] = {}

    def ended(self, status: int, took_s: float) -> None:
        """A request has."""
        if (counter := self._by_status.get(status)) is None:
            counter = self._by_status[status] = self._requests.labels(str(status))
        counter.inc()
        self._seconds.observe(took_s)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return prometheus.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What is read when it is asked for, and counted nowhere."""
        seen = self._fleet.snapshot()
        engines = seen.get("engines", ())
        yield _gauge("waiting", "Requests that wait in line.", len(self._line))
        outstanding = self._fleet.router.outstanding
        yield _gauge("outstanding", "Requests that are with a server.", outstanding)
        yield _gauge("version", "Of the fleet's weights.", seen.get("version", 0))
        states = GaugeMetricFamily(f"{_PREFIX}_engines", "By state.", labels=["state"])
        for state, count in Counts(one["state"] for one in engines).items():
            states.add_metric([state], count)
        yield states
        version = GaugeMetricFamily(
            f"{_PREFIX}_engine_version", "Of its weights, where it is known.", labels=["engine"]
        )
        restarts = CounterMetricFamily(
            f"{_PREFIX}_restarts", "Of an engine, since the fleet began.", labels=["engine"]
        )
        for one in engines:
            if one["version"] is not None:
                version.add_metric([str(one["engine"])], one["version"])
            restarts.add_metric([str(one["engine"])], one["recoveries"])
        yield from (version, restarts)
        tokens = CounterMetricFamily(
            f"{_PREFIX}_tokens",
            "Pieces of generated answers, by the server's rank: of a stream about a token each.",
            labels=["rank"],
        )
        by_rank: Counts[int] = Counts()
        for (rank, _), count in self._pieces.items():
            by_rank[rank] += count
        for rank, count in by_rank.items():
            tokens.add_metric([str(rank)], count)
        yield tokens


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", says, value=value)
