"""Metrics in Prometheus' text format: families that are made at each scrape."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from worker.version import own_version

MetricSamples = Iterable[tuple[Mapping[str, str], float]]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families

    def describe(self) -> Iterator[Metric]:
        return iter(())  # Otherwise the registry would collect once at registration.


def metric(
    name: str, text: str, value: float | MetricSamples, kind: Literal["gauge", "counter"] = "gauge"
) -> Metric:
    """Return a family with one sample, or with one for each set of labels."""
    made = Metric(name.removesuffix("_total") if kind == "counter" else name, text, kind)
    for labels, each in [({}, value)] if isinstance(value, int | float) else value:
        made.add_sample(name, dict(labels), each)
    return made


def optional(name: str, text: str, value: float | None) -> list[Metric]:
    """Return a family, or none where the value is unknown."""
    return [] if value is None else [metric(name, text, value)]


def build_info(name: str) -> Metric:
    """Return a constant 1 with the running versions as labels."""
    labels = {"version": own_version(), "python": platform.python_version()}
    return metric(name, "1; which version runs.", [(labels, 1.0)])


def exposition(families: Iterable[Metric], histograms: Iterable[Histogram] = ()) -> str:
    """Return the text, with the usual metrics of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    for each in histograms:
        registry.register(each)
    ProcessCollector(registry=registry)
    return generate_latest(registry).decode()
