"""The relay into a stage under load, with faults.

The stage does not confirm or nacks; an alarm; large bodies; SIGTERM.
"""

from __future__ import annotations

import re
import signal
import urllib.request
from collections import Counter
from struct import Struct
from typing import TYPE_CHECKING

import pytest

from integration.support.command_line import running_cli
from integration.support.stages import DEADLINE, StageReader, check_each_once, ids, originals, publish, ready, relaying
from reliable_mq import Message, Publisher
from reliable_mq.codec.methods import Consume, SetPrefetch
from reliable_mq.testing.frames import Frame, basic_nack
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import pytest

    from reliable_mq.stage import StageRelay
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

CONFIRM = Struct(">QB")  # tag and multiple of a basic.ack, after its method number
LARGE = 256 * 1024


def moved_by(relay: StageRelay) -> int:
    return relay.statistics.moved + relay.statistics.moved_before


def test_f69_while_the_stage_does_not_confirm_nothing_is_acked(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """All messages are requeued when the relay reconnects.

    Then the content of the stage ensures that each message is moved once.
    """
    publish(vhost.url, "orders", 1, type="quorum")
    with fault_proxy(vhost.url) as proxy, relaying(proxy.url, confirm_timeout=6.0) as relay:
        wait_until(lambda: relay.active and moved_by(relay) >= 1, timeout=DEADLINE, what="the first one moved")
        proxy.hold_confirms()
        before, failures = moved_by(relay), relay.statistics.failures
        publish(vhost.url, "orders", 100, first=1)
        wait_until(lambda: relay.status().outstanding >= 8, timeout=DEADLINE, what="copies that are not confirmed")
        wait_until(lambda: relay.statistics.failures > failures, timeout=DEADLINE, what="a replaced connection")
        wait_until(lambda: ready(vhost, "orders") == 100, timeout=DEADLINE, what="all requeued")
        assert moved_by(relay) == before
        proxy.release_confirms()

        def rest_moved() -> bool:
            found = moved_by(relay) >= before + 100  # more, if the relay reconnects with acks on their way
            return found and not relay.status().outstanding and not ready(vhost, "orders")

        wait_until(rest_moved, timeout=DEADLINE, what="all moved")
        assert relay.statistics.moved_before >= 8
    assert ready(vhost, "orders") == 0
    check_each_once(vhost.url, "stage", count=101)


def test_f69_a_nack_of_the_stage_loses_and_repeats_nothing(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay checks whether the stage has a nacked copy; here it has."""
    publish(vhost.url, "orders", 1, type="quorum")
    nacked: list[int] = []

    def nack(_: object, frame: Frame) -> list[Frame]:
        if frame.name != "basic.ack" or nacked:
            return [frame]
        tag, multiple = CONFIRM.unpack_from(frame.payload, 4)
        nacked.append(tag)
        return [basic_nack(frame.channel, tag, multiple=bool(multiple))]

    with fault_proxy(vhost.url) as proxy, relaying(proxy.url) as relay:
        wait_until(lambda: relay.statistics.moved == 1, timeout=DEADLINE, what="the first one moved")
        proxy.rewrite(nack, "to_client")
        publish(vhost.url, "orders", 500, first=1)
        wait_until(lambda: moved_by(relay) == 501, timeout=DEADLINE, what="all moved")
        assert nacked
        assert relay.statistics.failures == 1
        assert relay.statistics.moved_before >= 1
    assert "the stage did not take a message (basic.nack)" in caplog.text
    check_each_once(vhost.url, "stage", count=501)


def test_f69_an_alarm_while_messages_move_is_waited_for(
    private_vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection stays open beyond the confirm timeout, and the relay continues."""
    publish(private_vhost.url, "orders", 3000, type="quorum")
    with fault_proxy(private_vhost.url) as proxy:
        proxy.throttle(40_000)
        with relaying(proxy.url, confirm_timeout=5.5, max_outstanding=50) as relay:
            wait_until(lambda: relay.statistics.moved > 50, timeout=DEADLINE, what="some messages moved")
            private_vhost.broker.alarm("disk")
            blocked = "the broker blocks publishing"
            wait_until(lambda: blocked in caplog.text, timeout=DEADLINE, what="a relay that waits")
            proxy.throttle(None)
            assert not relay.wait_moved(6.0)
            assert relay.active
            assert relay.statistics.moved < 3000
            private_vhost.broker.clear_alarm("disk")
            assert relay.wait_moved(DEADLINE)
            assert relay.statistics.moved == 3000
            assert (relay.statistics.failures, relay.statistics.epochs) == (0, 1)
    check_each_once(private_vhost.url, "stage", count=3000)


def test_the_bytes_that_a_relay_holds_are_bounded(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The relay reads far ahead while messages are small.

    When large ones arrive, it pauses and then reads ahead less.
    """
    small, large, at_once = 3000, 80, 32
    publish(vhost.url, "orders", small, type="quorum")
    held: list[int] = []
    with (
        fault_proxy(vhost.url) as proxy,
        relaying(proxy.url, max_outstanding_bytes=4 * LARGE, confirm_timeout=DEADLINE) as relay,
    ):
        wait_until(lambda: relay.statistics.moved == small, timeout=DEADLINE, what="small messages moved")
        cancels = proxy.seen("basic.cancel", "to_broker")
        proxy.hold_confirms()
        messages = [Message(bytes(LARGE), message_id=f"large-{number}") for number in range(large)]
        with Publisher(vhost.url) as publisher:
            proxy.stop_reading("to_client")  # so that many are on the way before the relay knows of one
            assert publisher.publish_many(messages[:at_once], routing_key="orders").ok
            wait_until(lambda: ready(vhost, "orders") == 0, timeout=DEADLINE, what="large messages on their way")
            proxy.resume("to_client")
            proxy.wait_for(
                lambda: proxy.seen("basic.cancel", "to_broker") >= cancels + 2, DEADLINE, what="fewer, then a pause"
            )
            assert publisher.publish_many(messages[at_once:], routing_key="orders").ok
        wait_until(
            lambda: ready(vhost, "orders") + relay.status().outstanding == large, timeout=DEADLINE, what="a pause"
        )
        paused = relay.status()
        assert 4 * LARGE < paused.held_bytes < large * LARGE / 2
        consumes = proxy.seen("basic.consume", "to_broker")
        proxy.release_confirms()

        def moved() -> bool:
            held.append(relay.status().held_bytes)
            return relay.statistics.moved == small + large

        wait_until(moved, timeout=DEADLINE, what="all moved", interval=0.001)
        assert proxy.seen("basic.consume", "to_broker") > consumes
    assert max(held) <= paused.held_bytes
    check_each_once(vhost.url, "stage", count=small + large)


def test_a_terminated_stage_command_leaves_the_rest_queued(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Each published message is either staged or ready.

    The metrics are served until the end. The proxy keeps the relay from moving everything while the test is busy.
    """
    published = 10_000
    publish(vhost.url, "orders", published, type="quorum")
    proxy = fault_proxy(vhost.url)
    proxy.throttle(170_000)
    with running_cli("stage", proxy.url, "orders", "stage", "--metrics-port", "0") as process:
        assert process.stderr is not None
        address = process.stderr.readline().decode().split()[1]

        def moved() -> float:
            with urllib.request.urlopen(address, timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("reliable_mq_stage_moved_total{"))

        wait_until(lambda: moved() >= 500, timeout=DEADLINE, what="some messages moved")
        process.send_signal(signal.SIGTERM)
        proxy.throttle(None)
        _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    told = re.search(r"([\d,]+) messages moved", said.decode())
    assert told is not None, said
    staged = ids(originals(vhost.url, "stage", count=int(told[1].replace(",", ""))))
    assert f"{staged.total():,} messages moved" in said.decode()
    left = published - staged.total()
    assert left > 0
    with StageReader(vhost.url) as reader:
        reader.perform(SetPrefetch(65_535))
        reader.perform(Consume("orders", "rest"))
        wait_until(lambda: len(reader.arrived) >= left, timeout=DEADLINE, what="what is left")
        reader.wait_quiet()
        rest = Counter(Message.from_wire(each.body, each.properties).message_id for each in reader.arrived)
    assert staged + rest == Counter(f"m{number}" for number in range(published))
