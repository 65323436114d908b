"""Counts of 0 messages and 0 consumers.

RabbitMQ also reports them for a quorum queue whose leader does not respond.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from reliable_mq.cli.doctor.broker import HostEntry
from reliable_mq.cli.doctor.examine import _existence
from reliable_mq.codec.methods import CheckQueue
from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.deadletters.queue import depths
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.monitoring import QueueDepths
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.testing.waiting import wait_until
from reliable_mq.url import parse_url
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.codec.methods import QueueState
    from reliable_mq.core.channel_setup import StepGenerator
    from reliable_mq.sync.io_thread import IOThread
    from tests.contract.scripted_broker import ScriptedBroker

UNKNOWN = (0, 0)
QUEUE = "orders.dead"


def test_counts_in_doubt_are_asked_for_again(broker: ScriptedBroker) -> None:
    """Only queues with such counts are counted again, up to three times.

    A refused queue is not.
    """
    broker.missing.add("missing")
    broker.counts.extend([UNKNOWN, (3, 0), UNKNOWN, (0, 1), UNKNOWN, UNKNOWN, (7, 0), UNKNOWN])
    with AdminChannel(parse_url(broker.url), name="test") as channel:
        found = channel.counts(["late", "ready", "empty", "missing", "consumed"])
    counts = {
        name: (count.code if isinstance(count, StepRefused) else (count.messages, count.consumers))
        for name, count in found.items()
    }
    assert counts == {"late": (7, 0), "ready": (3, 0), "empty": UNKNOWN, "missing": 404, "consumed": (0, 1)}
    assert not broker.counts


class BusyIO:
    """An I/O thread on which data arrives. The step goes out after some waits."""

    running = True

    def __init__(self, io: IOThread, waits: int) -> None:
        self._io = io
        self._waits = waits
        self._received = 0
        self._step: Callable[[], None] | None = None

    def call_soon(self, fn: Callable[[], None]) -> None:
        self._step = fn

    @property
    def bytes_received(self) -> int:
        self._waits -= 1
        if self._waits == 0 and self._step is not None:
            self._io.call_soon(self._step)
        self._received += 10_000 if self._waits >= 0 else 0
        return self._received

    def run(self, steps: StepGenerator, done: Callable[[object], None]) -> None:
        self._io.run(steps, done)

    def close(self, timeout: float) -> bool:
        return self._io.close(timeout)


def test_a_reply_is_waited_for_while_data_arrives(broker: ScriptedBroker) -> None:
    """On a slow network, it comes after the deliveries that the broker sent before."""
    broker.counts.append((3, 0))
    with AdminChannel(parse_url(broker.url), name="test") as channel:
        io = channel._io
        channel._timeout = 0.5
        channel._io = cast("IOThread", BusyIO(io, waits=3))
        assert cast("QueueState", channel.carry_out(CheckQueue(QUEUE))).messages == 3

        channel._timeout = 0.05
        channel._io = cast("IOThread", BusyIO(io, waits=-1))
        with pytest.raises(BrokerUnavailable, match=r"did not answer CheckQueue within 0\.05 s"):
            channel.carry_out(CheckQueue(QUEUE))


@pytest.mark.slow
def test_a_queue_seems_empty_only_if_it_is_counted_again(broker: ScriptedBroker) -> None:
    """This holds for all readers of counts: dead-letter queues, gauges, the doctor."""
    settings = parse_url(broker.url)
    broker.counts.extend([UNKNOWN, UNKNOWN, (5, 0)])
    assert depths(settings, [QUEUE]) == {QUEUE: 5}

    broker.counts.extend([UNKNOWN, UNKNOWN, UNKNOWN, (5, 0)])  # the first one is read on entry
    with DeadLetterQueue(broker.url, QUEUE) as dead:
        assert len(dead) == 5

    registry = CollectorRegistry()
    broker.counts.extend([UNKNOWN, UNKNOWN, (5, 0)])
    with QueueDepths(broker.url, [QUEUE], registry=registry, interval=60):
        labels = {"queue": QUEUE, "role": "dead_letters"}
        wait_until(
            lambda: registry.get_sample_value("reliable_mq_queue_messages", labels) is not None,
            timeout=30,
            what="the gauge",
        )
        assert registry.get_sample_value("reliable_mq_queue_messages", labels) == 5


@pytest.mark.slow
def test_a_gauge_falls_to_0_only_after_several_measurements(broker: ScriptedBroker) -> None:
    """An election must not look like an empty queue that fills again, because an alert fires when it grows."""
    registry, labels = CollectorRegistry(), {"queue": QUEUE, "role": "dead_letters"}

    def seen() -> float | None:
        return registry.get_sample_value("reliable_mq_queue_messages", labels)

    broker.count = (5, 0)
    with QueueDepths(broker.url, [QUEUE], registry=registry, interval=2):
        wait_until(lambda: seen() == 5, timeout=20, what="the gauge")
        broker.counts.extend([UNKNOWN] * 3)  # one measurement
        wait_until(lambda: seen() is None, timeout=20, what="the election")
        wait_until(lambda: seen() is not None, timeout=20, what="the leader")
        assert seen() == 5
        broker.count = UNKNOWN
        wait_until(lambda: seen() == 0, timeout=60, what="an empty queue")


def test_depths_are_measured_again_once_threads_can_start(broker: ScriptedBroker) -> None:
    """A process that is short of threads or descriptors has some later. Otherwise no alert would ever fire again."""
    registry, labels = CollectorRegistry(), {"queue": QUEUE, "role": "dead_letters"}

    def value(name: str) -> float:
        return registry.get_sample_value(f"reliable_mq_queue_{name}", labels) or 0

    broker.count, broker.greeting = (5, 0), b"no broker"
    with QueueDepths(broker.url, [QUEUE], registry=registry, interval=0.05):
        wait_until(lambda: value("depth_failures_total") >= 1, timeout=20, what="a failure")
        with refusing_threads("queue depths"):
            several = value("depth_failures_total") + 3
            wait_until(lambda: value("depth_failures_total") >= several, timeout=20, what="several failures")
        broker.greeting = None
        wait_until(lambda: value("messages") == 5, timeout=20, what="the gauge")


def test_a_broker_that_is_away_is_a_warning_for_each_reason(
    broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The depths are measured again by themselves, so nobody has given up."""
    registry, labels = CollectorRegistry(), {"queue": QUEUE, "role": "dead_letters"}

    def value(name: str) -> float:
        return registry.get_sample_value(f"reliable_mq_queue_{name}", labels) or 0

    def wait_failures(count: int) -> None:
        wanted = value("depth_failures_total") + count
        wait_until(lambda: value("depth_failures_total") >= wanted, timeout=20, what="failures")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    broker.count = (5, 0)
    broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
    with QueueDepths(broker.url, [QUEUE], registry=registry, interval=0.05):
        wait_failures(3)
        [line] = told()
        assert line.startswith("queue depths: ")
        assert "INTERNAL_ERROR - starting" in line
        assert line.endswith("; trying again in 0.05 s")
        broker.refusals["Connection.Open"] = 530, "NOT_ALLOWED - vhost / not found"
        wait_until(lambda: len(told()) == 2, timeout=20, what="the other reason")
        broker.refusals.clear()
        wait_until(lambda: value("messages") == 5, timeout=20, what="the gauge")
        broker.refusals["Connection.Open"] = 530, "NOT_ALLOWED - vhost / not found"
        broker.connections[-1].cut()
        wait_until(lambda: "NOT_ALLOWED" in told()[-1] and len(told()) > 2, timeout=20, what="another outage")
    assert all(record.levelno < logging.ERROR for record in caplog.records)


def test_the_url_may_name_the_connection_of_depths(broker: ScriptedBroker) -> None:
    registry, labels = CollectorRegistry(), {"queue": QUEUE, "role": "dead_letters"}
    broker.count = (5, 0)
    with QueueDepths(f"{broker.url}?name=x", [QUEUE], registry=registry, interval=0.05):
        wait_until(
            lambda: registry.get_sample_value("reliable_mq_queue_messages", labels), timeout=20, what="the gauge"
        )


def test_depths_without_a_thread_leave_nothing_behind(broker: ScriptedBroker) -> None:
    registry = CollectorRegistry()
    broker.count = (5, 0)
    depths = QueueDepths(broker.url, [QUEUE], registry=registry, interval=0.05)
    with refusing_threads("queue depths"), pytest.raises(RuntimeError, match="can't start new thread"):
        depths.__enter__()
    with depths:
        wait_until(
            lambda: registry.get_sample_value("reliable_mq_queue_messages", {"queue": QUEUE, "role": "dead_letters"}),
            timeout=20,
            what="the gauge",
        )
    assert "reliable_mq_queue_messages" not in generate_latest(registry).decode()


@pytest.mark.parametrize(("last", "told"), [((5, 0), "5 messages"), (UNKNOWN, "0 messages ready, 0 consumers (Rabb")])
def test_the_doctor_says_what_no_messages_may_mean(broker: ScriptedBroker, last: tuple[int, int], told: str) -> None:
    settings = parse_url(broker.url)
    with AdminChannel(settings, name="test") as channel:
        entry = HostEntry(settings, channel.server, channel.frame_max)
    broker.counts.extend([UNKNOWN, UNKNOWN, last])
    [finding] = _existence(entry, ["orders"])
    assert finding.text.startswith(told)
    assert ("leader does not respond" in finding.text) is (last == UNKNOWN)
