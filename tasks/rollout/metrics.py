"""What a gateway and its fleet say of themselves to Prometheus, at `GET /metrics`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections import deque
from collections.abc import Iterator
from http import HTTPStatus
from itertools import accumulate
from math import ceil

import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tasks.rollout.fleet import Fleet

_PREFIX = "muster_rollout"
#: Of requests, in seconds: from a token to a long answer.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
#: Answers, the last ones, of which quantiles are told.
_MOST_TIMES = 10_000
_BOUNDS = [*(str(float(one)) for one in _SECONDS), "+Inf"]


class Metrics:
    """Of one gateway.

    Args:
        pieces: by rank and epoch, what an incarnation has generated.
    """

    def __init__(self, fleet: Fleet, *, pieces: Counts[tuple[int, int]]) -> None:
        self._fleet, self._pieces = fleet, pieces
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(self)
        #: Requests that have ended: by status, by the bucket of their seconds, and these in all.
        self._ended: Counts[int] = Counts()
        self._buckets = [0] * (len(_SECONDS) + 1)
        self._took_s = 0.0
        #: Of those that were answered since `load` was asked: how many, and their seconds.
        self._answered = 0
        self._times_s: deque[float] = deque(maxlen=_MOST_TIMES)

    def ended(self, status: int, took_s: float) -> None:
        self._ended[status] += 1
        self._buckets[bisect_left(_SECONDS, took_s)] += 1
        self._took_s += took_s
        if status == HTTPStatus.OK:
            self._answered += 1
            self._times_s.append(took_s)

    def load(self) -> dict[str, float]:
        """Of the answers since it was asked last, half of which took up to `p50` seconds; empty
        where there are none."""
        count, self._answered = self._answered, 0
        times_s = sorted(self._times_s)
        self._times_s.clear()
        if not times_s:
            return {}
        half, most = (times_s[ceil(part * len(times_s)) - 1] for part in (0.5, 0.99))
        return {"count": count, "p50": half, "p99": most, "max": times_s[-1]}

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return prometheus.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        seen = self._fleet.snapshot()
        engines = seen.get("engines", ())
        requests = CounterMetricFamily(
            f"{_PREFIX}_requests",
            "Requests that have ended, by the status that the client got; 499: it left before.",
            labels=["code"],
        )
        for status, count in self._ended.items():
            requests.add_metric([str(status)], count)
        yield requests
        yield HistogramMetricFamily(
            f"{_PREFIX}_request_seconds",
            "From a request to the end of its answer, the wait in line included.",
            buckets=list(zip(_BOUNDS, accumulate(self._buckets), strict=True)),
            sum_value=self._took_s,
        )
        router = self._fleet.router
        yield _gauge("waiting", "Requests that wait in line.", router.waiting)
        yield _gauge("outstanding", "Requests that are with a server.", router.outstanding)
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
