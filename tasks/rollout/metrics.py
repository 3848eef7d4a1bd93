"""Metrics of a gateway and its fleet in Prometheus' format, for `GET /metrics`."""

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

#: Prefix of the names of all metrics.
_PREFIX = "muster_rollout"
#: Upper bounds of the histogram buckets for response times, in seconds. The bounds range from the
#: time for one token to the time for a long answer.
_BUCKET_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
#: The bounds of `_BUCKET_BOUNDS_S` as Prometheus writes them, and `+Inf` for all longer times.
_BUCKET_LABELS = [*(str(float(bound_s)) for bound_s in _BUCKET_BOUNDS_S), "+Inf"]
#: Number of response times that are kept to compute the quantiles.
_MAX_TIMES = 10_000


class Metrics:
    """Counts the requests of a gateway, and reports its metrics to Prometheus."""

    def __init__(self, fleet: Fleet, *, pieces: Counts[tuple[int, int]]) -> None:
        """
        Args:
            fleet: The fleet that the gateway belongs to.
            pieces: Number of response pieces that each server has generated. A key of this mapping
                is the rank and the epoch of a server. The epoch counts the starts of the server.
                The gateway updates the mapping.
        """
        self._fleet = fleet
        self._pieces = pieces
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(self)
        #: Mapping from HTTP status to the number of completed requests.
        self._ended: Counts[int] = Counts()
        #: Number of completed requests in each histogram bucket of response times.
        self._buckets = [0] * (len(_BUCKET_BOUNDS_S) + 1)
        #: Sum of the response times of all completed requests, in seconds.
        self._total_s = 0.0
        #: Number of requests that were answered with status 200 since the last call of `load`.
        self._answered = 0
        #: Response times in seconds of the latest requests that `_answered` counts.
        self._times_s: deque[float] = deque(maxlen=_MAX_TIMES)

    def ended(self, status: int, took_s: float) -> None:
        """Count a completed request.

        Args:
            status: HTTP status that the client received, or 499 if the client closed the connection
                before the response.
            took_s: Seconds from the request to the end of its answer.
        """
        self._ended[status] += 1
        self._buckets[bisect_left(_BUCKET_BOUNDS_S, took_s)] += 1
        self._total_s += took_s
        if status == HTTPStatus.OK:
            self._answered += 1
            self._times_s.append(took_s)

    def load(self) -> dict[str, float]:
        """Return the number and the response times of the requests since the last call.

        Only requests with status 200 count.

        Returns:
            The number `count`, and the response times `p50` (median), `p99` and `max` in seconds.
            Empty if no request was answered.
        """
        count = self._answered
        self._answered = 0
        times_s = sorted(self._times_s)
        self._times_s.clear()
        if not times_s:
            return {}
        p50_s, p99_s = (times_s[ceil(share * len(times_s)) - 1] for share in (0.5, 0.99))
        return {"count": count, "p50": p50_s, "p99": p99_s, "max": times_s[-1]}

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. The Prometheus library calls this method."""
        snapshot = self._fleet.snapshot()
        engines = snapshot.get("engines", ())
        requests = CounterMetricFamily(
            f"{_PREFIX}_requests",
            "Number of completed requests, by HTTP status. 499: the client closed its connection "
            "before the end of the response.",
            labels=["code"],
        )
        for status, count in self._ended.items():
            requests.add_metric([str(status)], count)
        yield requests
        yield HistogramMetricFamily(
            f"{_PREFIX}_request_seconds",
            "Seconds from the arrival of a request at the gateway to the end of its response, "
            "including the wait in the gateway's queue.",
            buckets=list(zip(_BUCKET_LABELS, accumulate(self._buckets), strict=True)),
            sum_value=self._total_s,
        )
        router = self._fleet.router
        yield _gauge(
            "waiting", "Number of requests that wait in the gateway's queue.", router.waiting
        )
        yield _gauge(
            "outstanding",
            "Number of requests that the inference servers are processing.",
            router.outstanding,
        )
        yield _gauge(
            "version",
            "Version of the last weights that all engines have committed. 0 before the first "
            "update.",
            snapshot.get("version", 0),
        )
        states = GaugeMetricFamily(
            f"{_PREFIX}_engines", "Number of inference engines in each state.", labels=["state"]
        )
        for state, count in Counts(engine["state"] for engine in engines).items():
            states.add_metric([state], count)
        yield states
        version = GaugeMetricFamily(
            f"{_PREFIX}_engine_version",
            "Version of the weights that each inference engine has. Engines whose version is "
            "unknown are omitted.",
            labels=["engine"],
        )
        restarts = CounterMetricFamily(
            f"{_PREFIX}_restarts",
            "Number of restarts of each inference engine since the start of the run.",
            labels=["engine"],
        )
        for engine in engines:
            index = str(engine["engine"])
            if engine["version"] is not None:
                version.add_metric([index], engine["version"])
            restarts.add_metric([index], engine["recoveries"])
        yield version
        yield restarts
        tokens = CounterMetricFamily(
            f"{_PREFIX}_tokens",
            "Number of response pieces that the server of each rank has generated. A piece of a "
            "streamed response is about one token.",
            labels=["rank"],
        )
        pieces_of_rank: Counts[int] = Counts()
        for (rank, _epoch), count in self._pieces.items():
            pieces_of_rank[rank] += count
        for rank, count in pieces_of_rank.items():
            tokens.add_metric([str(rank)], count)
        yield tokens


def _gauge(name: str, description: str, value: float) -> Metric:
    """Return a metric with a single value."""
    return GaugeMetricFamily(f"{_PREFIX}_{name}", description, value=value)
