"""Prometheus metrics, read from the parts' own counters on each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Source = Callable[[], Mapping[str, float]]


class Metrics(Collector):
    """Each source returns numbers by name; the name becomes the label `kind`."""

    def __init__(self) -> None:
        self._counters: list[tuple[str, str, Source]] = []
        self._gauges: list[tuple[str, str, Source]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def counters(self, name: str, text: str, source: Source) -> None:
        self._counters.append((name, text, source))

    def gauges(self, name: str, text: str, source: Source) -> None:
        self._gauges.append((name, text, source))

    def collect(self) -> Iterable[Metric]:
        for name, text, source in self._counters:
            counter = CounterMetricFamily(f"valence_{name}", text, labels=["kind"])
            for kind, value in sorted(source().items()):
                counter.add_metric([kind], value)
            yield counter
        for name, text, source in self._gauges:
            gauge = GaugeMetricFamily(f"valence_{name}", text, labels=["kind"])
            for kind, value in sorted(source().items()):
                gauge.add_metric([kind], value)
            yield gauge

    def text(self) -> bytes:
        return generate_latest(self._registry)
