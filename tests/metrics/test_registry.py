"""Scrapes of a registry, whose publishers and consumers come and go."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import weakref
from itertools import count
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from reliable_mq import AsyncConsumer, AsyncPublisher, Consumer, Publisher
from reliable_mq.core.statistics import Histogram
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.metrics.registry import Family, Reading, Registration, register
from reliable_mq.testing.waiting import wait_until
from tests.sync.test_interrupted_calls import Interruption, on_another_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MESSAGES = Family("messages", "counter", "Messages.", ("name",))
WAITING = Family("waiting", "gauge", "Waiting.", ("name",))
AGE = Family("age_seconds", "gauge", "The oldest.", ("name",), "highest")
CONNECTED = Family("connected", "gauge", "1 while connected.", ("name",), "lowest")
SECONDS = Family("seconds", "histogram", "Latency.", ("name",))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def reading(name: str, *, messages: float = 0, waiting: float = 0, age: float = 0) -> Callable[[], Iterable[Reading]]:
    """Return the readings of a publisher with that name."""
    labels = (name,)
    return lambda: [
        Reading(MESSAGES, labels, messages),
        Reading(WAITING, labels, waiting),
        Reading(AGE, labels, age),
    ]


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Return the samples of a scrape by name and labels, without the prefix."""
    return {
        f"{sample.name.removeprefix('reliable_mq_')} {' '.join(sample.labels.values())}": sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_a_reading_is_shown_under_its_labels(registry: CollectorRegistry) -> None:
    """Each publisher is a set of label values; counters have the suffix ``_total``."""
    register(registry, reading("a", messages=3, waiting=2, age=0.5))
    register(registry, reading("b", messages=4))
    assert shown(registry) == {
        "messages_total a": 3,
        "messages_total b": 4,
        "waiting a": 2,
        "waiting b": 0,
        "age_seconds a": 0.5,
        "age_seconds b": 0,
    }


def test_every_scrape_reads_anew(registry: CollectorRegistry) -> None:
    """No value is cached between scrapes."""
    count = 0

    def read() -> Iterable[Reading]:
        yield Reading(MESSAGES, ("a",), count)

    register(registry, read)
    for count in (1, 5, 9):  # read by read()
        assert shown(registry) == {"messages_total a": count}


def test_equal_names_are_added_up_and_of_ages_the_highest_counts(registry: CollectorRegistry) -> None:
    """Prometheus allows a set of labels once, so equal names share one sample."""
    register(registry, reading("a", messages=3, waiting=2, age=7))
    register(registry, reading("a", messages=4, waiting=1, age=5))
    assert shown(registry) == {"messages_total a": 7, "waiting a": 3, "age_seconds a": 7}


def test_of_connections_the_lowest_counts(registry: CollectorRegistry) -> None:
    """If one of several publishers is not connected, the metric shows it."""
    lost, *_ = [register(registry, lambda value=value: [Reading(CONNECTED, ("a",), value)]) for value in (0, 1, 1)]
    assert shown(registry) == {"connected a": 0}
    lost.close()
    assert shown(registry) == {"connected a": 1}


def test_a_counter_never_falls_when_its_publisher_goes(registry: CollectorRegistry) -> None:
    """The counts of a closed publisher stay, and its gauges disappear."""
    first = register(registry, reading("a", messages=3, waiting=2))
    second = register(registry, reading("a", messages=4, waiting=1))
    first.close()
    assert shown(registry) == {"messages_total a": 7, "waiting a": 1, "age_seconds a": 0}
    first.close()
    second.close()
    assert shown(registry) == {"messages_total a": 7}
    register(registry, reading("a", messages=1))
    assert shown(registry)["messages_total a"] == 8


def test_histograms_are_cumulative_and_added_up(registry: CollectorRegistry) -> None:
    """A bucket counts the values up to its bound, as Prometheus requires."""
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 7.0):
        histogram.observe(value)

    def read() -> Iterable[Reading]:
        yield Reading(SECONDS, ("a",), histogram)

    expected = {"seconds_bucket a 0.1": 1, "seconds_bucket a 1.0": 2, "seconds_bucket a +Inf": 3}
    expected |= {"seconds_count a": 3, "seconds_sum a": 7.6}
    first = register(registry, read)
    assert shown(registry) == pytest.approx(expected)
    register(registry, read)
    assert shown(registry) == pytest.approx({name: 2 * value for name, value in expected.items()})
    first.close()
    histogram.observe(0.0)
    assert shown(registry)["seconds_count a"] == 3 + 4, "what is retired does not change any more"


def test_the_exposition_format_takes_it(registry: CollectorRegistry) -> None:
    """Names and help texts have the form that Prometheus reads."""
    register(registry, reading("a", messages=3))
    text = generate_latest(registry).decode()
    assert "# HELP reliable_mq_messages_total Messages.\n# TYPE reliable_mq_messages_total counter\n" in text
    assert 'reliable_mq_messages_total{name="a"} 3.0\n' in text


@pytest.mark.parametrize(("publisher", "consumer"), [(Publisher, Consumer), (AsyncPublisher, AsyncConsumer)])
def test_counters_are_at_0_before_anything_connects(
    publisher: type[Publisher | AsyncPublisher], consumer: type[Consumer | AsyncConsumer], registry: CollectorRegistry
) -> None:
    """Otherwise the first count of a series is no growth for Prometheus."""
    clients = (
        publisher("amqp://localhost", registry=registry),
        consumer("amqp://localhost", "orders", registry=registry),
    )
    found = shown(registry)
    assert found["publisher_settled_total publisher returned"] == 0
    assert found["consumer_rejected_total consumer orders"] == 0
    assert not any("connected" in name for name in found)
    assert clients


@pytest.mark.parametrize("client", [Publisher, AsyncPublisher, Consumer, AsyncConsumer])
def test_a_registry_keeps_nothing_that_does_not_run(client: Callable[..., object], registry: CollectorRegistry) -> None:
    arguments = () if client in (Publisher, AsyncPublisher) else ("orders", print)
    gone = weakref.ref(client("amqp://localhost", *arguments, registry=registry))
    gc.collect()
    assert gone() is None


def test_a_registry_does_not_keep_a_consumer_unable_to_connect(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """A program may make another one for each attempt."""
    caplog.set_level(logging.CRITICAL, "reliable_mq")  # a record, which pytest keeps, leads to the consumer
    consumer = Consumer("amqp://127.0.0.1:1", "orders", print, registry=registry, name="away")
    with pytest.raises(BrokerUnavailable):
        consumer.connect()
    gone = weakref.ref(consumer)
    del consumer

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    wait_until(is_gone, timeout=30, what="the end of the consumer")
    assert shown(registry)["consumer_deliveries_total away orders"] == 0


def test_registries_know_nothing_of_each_other(registry: CollectorRegistry) -> None:
    """A publisher appears only in the registry that it was registered in."""
    other = CollectorRegistry()
    register(registry, reading("a", messages=3))
    register(other, reading("b", messages=4))
    assert list(shown(registry)) == ["messages_total a", "waiting a", "age_seconds a"]
    assert list(shown(other)) == ["messages_total b", "waiting b", "age_seconds b"]


def test_a_registry_that_is_gone_is_forgotten() -> None:
    """The package keeps only weak references to registries."""
    registry = CollectorRegistry()
    register(registry, reading("a"))
    gone = weakref.ref(registry)
    del registry
    gc.collect()
    assert gone() is None


def test_threads_may_come_and_go_while_others_scrape(registry: CollectorRegistry) -> None:
    """Concurrent registering, closing and scraping loses no count."""
    rounds, threads = 200, 8

    def work() -> None:
        for _ in range(rounds):
            register(registry, reading("a", messages=1)).close()

    working = [threading.Thread(target=work) for _ in range(threads)]
    for thread in working:
        thread.start()
    seen = [0.0]
    while any(thread.is_alive() for thread in working):
        seen.append(shown(registry).get("messages_total a", 0.0))
    assert seen == sorted(seen)
    assert shown(registry) == {"messages_total a": rounds * threads}


class SignalHandler(Interruption):
    """Calls a signal handler at the n-th place in a block where Python may run one."""

    def __init__(self, step: int, handler: Callable[[], object]) -> None:
        super().__init__(step)
        self._handler = handler

    def __exit__(self, *error: object) -> bool:
        super().__exit__(*error)
        return False

    def _pass(self) -> None:
        self.left -= 1
        if not self.left:
            self.over = True
            sys.settrace(None)
            self._handler()


def scrape(registry: CollectorRegistry, _first: Registration) -> None:
    assert shown(registry)["messages_total a"] in (8, 12)


def register_one(registry: CollectorRegistry, _first: Registration) -> None:
    register(registry, reading("a"))


def close(_registry: CollectorRegistry, first: Registration) -> None:
    first.close()


@pytest.mark.parametrize("call", [scrape, register_one, close], ids=lambda call: call.__name__)
def test_a_signal_handler_may_use_a_registry_amid_any_call(
    call: Callable[[CollectorRegistry, Registration], None],
) -> None:
    """The handler closes one publisher and registers another; no count is lost."""

    def interrupted(step: int) -> SignalHandler:
        registry = CollectorRegistry()
        first, second = (register(registry, reading("a", messages=messages)) for messages in (5, 3))
        handler = SignalHandler(step, lambda: (second.close(), register(registry, reading("a", messages=4))))
        with handler:
            call(registry, first)
        assert shown(registry)["messages_total a"] == (12 if handler.over else 8)
        return handler

    every_place(interrupted, least=4)


def test_a_signal_handler_may_register_first_amid_registering() -> None:
    """A registry with two collectors would show each metric twice."""

    def interrupted(step: int) -> SignalHandler:
        registry = CollectorRegistry()
        handler = SignalHandler(step, lambda: register(registry, reading("a", messages=3)))
        with handler:
            register(registry, reading("a", messages=4))
        assert [metric.name for metric in registry.collect()].count("reliable_mq_messages") == 1
        assert shown(registry)["messages_total a"] == (7 if handler.over else 4)
        return handler

    every_place(interrupted, least=5)


def every_place(interrupted: Callable[[int], SignalHandler], least: int) -> None:
    """Interrupt the call at each place, on another thread in case of a deadlock."""
    handlers: list[SignalHandler] = []
    for step in count(1):
        on_another_thread(lambda step=step: handlers.append(interrupted(step)), f"a call interrupted at step {step}")
        if not handlers[-1].over:
            break
    assert step > least, "it looked at nothing"


def test_a_forked_child_registers_while_the_parent_closes(registry: CollectorRegistry) -> None:
    """The lock is held at the fork by a thread that the child does not have.

    The counts of the parent stay in the parent.
    """
    closing, may_close = threading.Event(), threading.Event()

    def read() -> Iterable[Reading]:
        closing.set()
        assert may_close.wait(60)
        return [Reading(MESSAGES, ("a",), 3)]

    closer = threading.Thread(target=register(registry, read).close)
    register(registry, reading("a", messages=5)).close()
    closer.start()
    assert closing.wait(20)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            register(registry, reading("b", messages=1))
            status = 0 if shown(registry) == {"messages_total b": 1, "waiting b": 0, "age_seconds b": 0} else 2
        finally:
            os._exit(status)
    may_close.set()
    closer.join()
    assert waited_for(child) == 0
    assert shown(registry) == {"messages_total a": 8}


def waited_for(child: int) -> int:
    """Return the exit code of a child; kill the child if it does not end."""
    try:
        ended = wait_until(
            lambda: child in (done := os.waitpid(child, os.WNOHANG)) and done, timeout=20, what="its end"
        )
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    assert ended
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.parametrize("wrong", [True, "registry", object()])
def test_what_is_no_registry_is_refused(wrong: CollectorRegistry) -> None:
    """The error is raised by `register` and names the argument."""
    with pytest.raises(ConfigurationError, match="registry"):
        register(wrong, reading("a"))
