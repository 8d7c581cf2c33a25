"""Counters of requests by route, as Prometheus metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

SECONDS_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)


class RouteStats:
    """Counters of one route: plain integers, because prometheus-client locks at each increment."""

    __slots__ = (
        "bucket_counts",
        "is_audited",
        "method",
        "seconds_total",
        "status_counts",
        "template",
    )

    def __init__(self, method: str, template: str, *, is_audited: bool = False) -> None:
        self.is_audited = is_audited
        self.method = method
        self.template = template
        self.status_counts: dict[int, int] = {}
        self.bucket_counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self.seconds_total = 0.0

    def observe(self, status: int, seconds: float) -> None:
        """Count one answer; `status` 0 means that the client hung up first."""
        self.status_counts[status] = self.status_counts.get(status, 0) + 1
        self.bucket_counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.seconds_total += seconds


class HttpMetrics(Collector):
    """The counters of all routes as Prometheus families.

    Labels come from closed sets (route templates, methods, statuses this node returns), so no caller
    can create series.
    """

    def __init__(self) -> None:
        self._routes: list[RouteStats] = []

    def route(self, method: str, template: str, *, is_audited: bool = False) -> RouteStats:
        """The counters of a new route."""
        stats = RouteStats(method, template, is_audited=is_audited)
        self._routes.append(stats)
        return stats

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        requests = CounterMetricFamily(
            "sdstore_http_requests", "Requests answered", labels=("method", "route", "status")
        )
        seconds = HistogramMetricFamily(
            "sdstore_http_request_seconds", "Time to answer", labels=("method", "route")
        )
        for stats in self._routes:
            labels = [stats.method, stats.template]
            for status, count in stats.status_counts.items():
                requests.add_metric([*labels, str(status)], count)
            seconds.add_metric(labels, _cumulative(stats.bucket_counts), stats.seconds_total)
        yield requests
        yield seconds


def _cumulative(bucket_counts: list[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*SECONDS_BOUNDS, "+Inf"), bucket_counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return buckets
