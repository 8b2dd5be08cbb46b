"""Counters of the server in a registry of its own, and the text that Prometheus scrapes.

Labels take few values on purpose: route templates, known methods, status codes, never what a client made up. Numbers
that live elsewhere (the engine's) are read at scrape time through `watch`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric as it is now: (labels, value) pairs under one name. Names of counters end in _total."""

    name: str
    help: str
    values: tuple[tuple[tuple[str, ...], float], ...]
    label_names: tuple[str, ...] = ()
    counter: bool = field(default=False)


class Metrics:
    """The registry and what HTTP counts. Written on the event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        registry = self._registry
        self._requests = Counter(
            "tidegate_http_requests_total",
            "Answers by route and status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "tidegate_http_request_seconds", "From the request's headers to the end of its answer.", ("route",),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("tidegate_http_in_flight_requests", "Requests being answered.", registry=registry)
        self.disconnects = Counter(
            "tidegate_http_disconnects_total", "Clients that left before the end of their answer.", registry=registry
        )
        self.cut_streams = Counter(
            "tidegate_streams_cut_total", "Streams cut because their reader was too slow.", registry=registry
        )
        self.rows = Counter("tidegate_score_rows_total", "Scored inputs by outcome.", ("outcome",), registry=registry)
        self.tokens = Counter("tidegate_tokens_total", "Tokens of finished requests.", ("kind",), registry=registry)
        self.unauthorized = Counter("tidegate_unauthorized_total", "Requests without a valid key.", registry=registry)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """`route`: a template of the server's own, or "unmatched"."""
        self._requests.labels(route, method if method in _METHODS else "other", str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def watch(self, read: Callable[[], Iterable[Reading]]) -> None:
        """`read` is called at each scrape and must be quick."""
        self._registry.register(_Watched(read))

    def render(self) -> bytes:
        """The exposition, of CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Watched:
    """A collector of prometheus_client."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for reading in self._read():
            family: CounterMetricFamily | GaugeMetricFamily
            if reading.counter:
                family = CounterMetricFamily(
                    reading.name.removesuffix("_total"), reading.help, labels=reading.label_names
                )
            else:
                family = GaugeMetricFamily(reading.name, reading.help, labels=reading.label_names)
            for labels, value in reading.values:
                family.add_metric(labels, value)
            yield family
