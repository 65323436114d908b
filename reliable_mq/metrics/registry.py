"""Prometheus metrics of publishers and consumers, in a user's registry.

This module counts nothing. The core counts in plain numbers while it works, and a scrape reads them. So metrics cost
nothing between scrapes, and a process without a registry has no cost at all.

The code bounds the labels: ``publisher`` and ``consumer`` are the names given to the constructors, ``queue`` is the
queue consumed from or measured, ``role`` has two values, ``outcome`` has five (three for an outbox's row), and ``what``
has two. The metrics of publishers with the same name are added up. Exceptions are ages, the rows of an outbox and the
depth of a queue, where the highest value counts, and the connection state, where the lowest does. The counts of a
closed publisher or consumer stay in the totals, so a counter never falls while the process lives. A forked child counts
from zero.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from reliable_mq._util.hooks import ForkStage, at_fork
from reliable_mq.core.statistics import Histogram, Merged
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, as Prometheus describes it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    labels: tuple[str, ...]
    merged: Merged = "sum"

    @property
    def full_name(self) -> str:
        """The exposed name, without ``_total``."""
        return f"reliable_mq_{self.name}"


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a family for one set of label values, in the order of its labels."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


class Registration:
    """A publisher or consumer in a registry."""

    def __init__(self, collector: _Collector, read: Callable[[], Iterable[Reading]]) -> None:
        self._collector = collector
        self.read = read

    def open(self) -> None:
        """Call ``read`` on every scrape again. Idempotent.

        ``read`` must not count again the counts of the last reading, because they stay in the totals.
        """
        self._collector.add(self)

    def close(self) -> None:
        """Take a last reading. Counters stay in the totals; gauges vanish. Idempotent."""
        self._collector.retire(self)


def register(registry: CollectorRegistry, read: Callable[[], Iterable[Reading]]) -> Registration:
    """Call ``read`` on the thread of every scrape of ``registry``. Thread-safe.

    Raises:
        ConfigurationError: If ``registry`` is not a ``CollectorRegistry``.
    """
    if not isinstance(registry, CollectorRegistry):
        raise ConfigurationError(f"registry must be a prometheus_client.CollectorRegistry, not {registry!r}")
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            made = _Collector()
            collector = _collectors.setdefault(registry, made)
            if collector is made:  # otherwise a signal handler was faster
                registry.register(collector)
    registration = Registration(collector, read)
    registration.open()
    return registration


@dataclass(slots=True)
class _Totals:
    """Readings merged by family and label values."""

    values: dict[tuple[Family, tuple[str, ...]], float] = field(default_factory=lambda: defaultdict(float))
    histograms: dict[tuple[Family, tuple[str, ...]], Histogram] = field(default_factory=dict)

    def add(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            key = reading.family, reading.labels
            if isinstance(reading.value, Histogram):
                total = self.histograms.setdefault(key, Histogram(reading.value.bounds))
                total.add(reading.value)
            elif reading.family.merged == "highest":
                self.values[key] = max(self.values[key], reading.value)
            elif reading.family.merged == "lowest":
                self.values[key] = min(self.values.get(key, reading.value), reading.value)
            else:
                self.values[key] += reading.value

    def copy(self) -> _Totals:
        copied = _Totals()
        copied.values.update(self.values)
        for key, histogram in self.histograms.items():
            copied.histograms[key] = Histogram(histogram.bounds)
            copied.histograms[key].add(histogram)
        return copied


class _Counted(NamedTuple):
    """The registrations to read, and the counts of those that are closed."""

    registrations: frozenset[Registration]
    retired: _Totals


class _Collector(Collector):
    """The collector of one registry.

    A signal handler may interrupt any call here, and make another. So a change builds a new state and replaces the
    former one in a single step, unless a signal handler has replaced it meanwhile. A scrape reads one state, without
    the lock.
    """

    def __init__(self) -> None:
        self.renew_lock()
        self.forget()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child. A thread of the parent may have held it."""
        self._lock = threading.RLock()

    def forget(self) -> None:
        """Begin without registrations and counts in a forked child. They are the parent's."""
        self._counted = _Counted(frozenset(), _Totals())

    def add(self, registration: Registration) -> None:
        with self._lock:
            while registration not in (before := self._counted).registrations:
                after = before._replace(registrations=before.registrations | {registration})
                if self._counted is before:
                    self._counted = after

    def retire(self, registration: Registration) -> None:
        with self._lock:
            while registration in (before := self._counted).registrations:
                retired = before.retired.copy()
                retired.add(reading for reading in registration.read() if reading.family.kind != "gauge")
                after = _Counted(before.registrations - {registration}, retired)
                if self._counted is before:
                    self._counted = after

    def describe(self) -> Iterable[Metric]:
        """Return nothing to check at registration: only this package uses the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        registrations, retired = self._counted
        totals = retired.copy()
        for registration in registrations:
            totals.add(registration.read())
        families: dict[Family, Metric] = {}
        for (family, labels), value in totals.values.items():
            metric = families.setdefault(family, _empty(family))
            metric.add_metric(labels, value)  # type: ignore[attr-defined]
        for (family, labels), histogram in totals.histograms.items():
            metric = families.setdefault(family, _empty(family))
            metric.add_metric(labels, _cumulated(histogram), histogram.total)  # type: ignore[attr-defined]
        return families.values()


def _empty(family: Family) -> Metric:
    make: Mapping[str, type[Metric]] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return make[family.kind](family.full_name, family.documentation, labels=family.labels)  # type: ignore[call-arg]


def _cumulated(histogram: Histogram) -> list[tuple[str, float, Exemplar | None]]:
    """Return bounds, cumulative counts, and the exemplars that OpenMetrics shows."""
    buckets: list[tuple[str, float, Exemplar | None]] = []
    count = 0
    for place, bound in enumerate([*map(str, histogram.bounds), "+Inf"]):
        count += histogram.counts[place]
        traced = histogram.exemplars.get(place)
        exemplar = None if traced is None else Exemplar(dict(traced.ids), traced.value, traced.at)
        buckets.append((bound, count, exemplar))
    return buckets


_lock = threading.RLock()  # a signal handler may acquire it again
_collectors: WeakKeyDictionary[CollectorRegistry, _Collector] = WeakKeyDictionary()


def _renew_locks() -> None:
    global _lock  # noqa: PLW0603  # a thread of the parent may have held it
    _lock = threading.RLock()
    for collector in _collectors.values():
        collector.renew_lock()


def _forget() -> None:
    for collector in _collectors.values():
        collector.forget()


at_fork(ForkStage.RENEW, _renew_locks)
at_fork(ForkStage.FORGET, _forget)  # the registrations may have the last references to publishers
