"""A publisher of either API, with a broker that may do anything.

The tests cover confirms, returns, closes, silence and alarms.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import random
import socket
import struct
import threading
import time
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import pytest
import tenacity
from prometheus_client import CollectorRegistry

from reliable_mq import (
    BrokerUnavailable,
    ConfigurationError,
    Message,
    PublishBlocked,
    PublishDisconnected,
    Publisher,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReport,
    PublishReturned,
    PublishUnconfirmed,
    Queue,
    ReliableMQError,
    RetryPolicy,
    TopologyMismatch,
    UsageError,
)
from reliable_mq.codec.frames import method_frame
from reliable_mq.codec.methods import CONNECTION_BLOCKED, CONNECTION_CLOSED
from reliable_mq.core import reconnect
from reliable_mq.core.reconnect import MOST_UNANSWERED
from reliable_mq.engine import channel as channel_module
from reliable_mq.engine.publisher_channel import BasePublisherChannel
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.testing.containers import free_port
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.contract.scripted_broker import Channel, Published, ScriptedBroker

NewPublisher = "Callable[..., Any]"
KEY = "orders"
ONCE = RetryPolicy(max_attempts=1)
SOON = RetryPolicy(max_attempts=3, delays=(0.01,))


def submit(publisher: Any, count: int, **arguments: Any) -> list[Any]:
    return [publisher.submit(Message(b"%d" % number), **{"routing_key": KEY, **arguments}) for number in range(count)]


def errors(confirmations: list[Any]) -> list[PublishError | None]:
    return [confirmation.exception(30) for confirmation in confirmations]


def block(broker: ScriptedBroker, publisher: Any, reason: str = "low on memory") -> None:
    broker.connection.block(reason)
    wait_until(lambda: publisher.blocked, timeout=30, what="the blocked state")


def settled(confirmations: list[Any]) -> list[int]:
    return [number for number, confirmation in enumerate(confirmations) if confirmation.done()]


def wait_settled(confirmations: list[Any], *numbers: int) -> None:
    """Wait until exactly these confirmations are settled."""
    wait_until(lambda: settled(confirmations) == list(numbers), timeout=30, what=lambda: f"{settled(confirmations)}")


def acking(published: Published) -> None:
    published.channel.ack(published.number)


# -- confirms ----------------------------------------------------------------------------------------------------------


def test_a_publish_succeeds_with_its_ack_and_not_before(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher() as publisher:
        [confirmation] = submit(publisher, 1)
        [published] = broker.wait_published(1)
        assert not confirmation.done()
        assert publisher.outstanding == 1
        assert (published.body, published.routing_key, published.mandatory) == (b"0", KEY, True)
        assert published.properties.delivery_mode == 2
        published.channel.ack(1)
        receipt = confirmation.result(30)
        assert (receipt.message_id, receipt.attempts) == (published.message_id, 1)
        assert not receipt.possible_duplicate
        assert publisher.outstanding == 0


def test_confirms_settle_what_they_name_in_any_order(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher() as publisher:
        confirmations = submit(publisher, 10)
        channel = broker.wait_published(10)[-1].channel
        channel.ack(7)
        wait_settled(confirmations, 6)
        channel.ack(2)
        wait_settled(confirmations, 1, 6)
        channel.ack(5, multiple=True)
        wait_settled(confirmations, 0, 1, 2, 3, 4, 6)
        channel.ack(10)
        wait_settled(confirmations, 0, 1, 2, 3, 4, 6, 9)
        channel.ack(0, multiple=True)  # everything outstanding
        assert errors(confirmations) == [None] * 10


def test_a_nack_of_several_fails_exactly_those(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher(retry=ONCE) as publisher:
        confirmations = submit(publisher, 8)
        channel = broker.wait_published(8)[-1].channel
        channel.ack(2)
        channel.nack(4, multiple=True)
        channel.ack(5)
        channel.nack(6)
        channel.ack(8, multiple=True)
        nacked = [isinstance(error, PublishNacked) for error in errors(confirmations)]
        assert nacked == [True, False, True, True, False, True, False, False]
        assert publisher.statistics.nacked == 4


def test_a_nack_is_retried_with_its_id_and_not_as_a_duplicate(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher(retry=SOON) as publisher:
        given_up, taken = submit(publisher, 2)
        channel = broker.wait_published(2)[-1].channel
        channel.nack(2, multiple=True)
        broker.wait_published(4)
        channel.ack(3) if broker.published[2].body == b"1" else channel.ack(4)
        channel.nack(4) if broker.published[2].body == b"1" else channel.nack(3)
        channel.nack(broker.wait_published(5)[-1].number)
        error = given_up.exception(30)
        assert isinstance(error, PublishNacked)
        assert error.attempts == 3
        assert taken.result(30).attempts == 2
        assert not any(published.possible_duplicate for published in broker.published)
        assert {published.message_id for published in broker.published} == {given_up.message_id, taken.message_id}


def test_confirms_that_fit_nothing_change_nothing(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """The confirms are repeated, unknown, beyond the last publish, or contradictory."""
    with new_publisher(retry=ONCE) as publisher:
        first, second, third = submit(publisher, 3)
        channel = broker.wait_published(3)[-1].channel
        channel.ack(2)
        channel.nack(2)
        channel.ack(2)
        channel.ack(99)
        channel.nack(99, multiple=True)
        channel.ack(1)
        assert errors([first, second]) == [None, None]
        assert not third.done()
        channel.nack(3)
        assert isinstance(third.exception(30), PublishNacked)
        assert len(broker.connections) == 1


# -- returns -----------------------------------------------------------------------------------------------------------


def test_a_return_before_the_ack_fails_that_message_and_no_other(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher() as publisher:
        confirmations = submit(publisher, 5)
        published = broker.wait_published(5)
        channel = published[0].channel
        channel.return_(published[1], 313, "NO_CONSUMERS")
        channel.return_(published[3])
        wait_settled(confirmations)
        channel.ack(5, multiple=True)
        found = errors(confirmations)
        assert [type(error) for error in found if error] == [PublishReturned] * 2
        assert (found[1].reply_code, found[1].reply_text) == (313, "NO_CONSUMERS")
        assert (found[3].reply_code, found[3].reply_text) == (312, "NO_ROUTE")
        assert [error is None for error in found] == [True, False, True, False, True]


def test_the_body_of_a_return_is_never_in_memory(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """The size of the returned body does not matter.

    The publisher has the message itself.
    """

    def script(published: Published) -> None:
        published.channel.return_large(published, 500)
        published.channel.ack(published.number)

    broker.script = script
    with new_publisher() as publisher:
        publisher.connect()
        gc.collect()
        tracemalloc.start()
        try:
            with pytest.raises(PublishReturned):
                publisher.publish(Message(b"x"), routing_key=KEY)
            assert tracemalloc.get_traced_memory()[1] < 8_000_000
        finally:
            tracemalloc.stop()


def test_a_frame_larger_than_agreed_ends_the_connection_at_once(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the frame. Unconfirmed messages are published again."""
    with new_publisher() as publisher:
        confirmation = publisher.submit(Message(b"x"), routing_key=KEY)
        [published] = broker.wait_published(1)
        broker.script = acking
        published.channel.connection.send_bytes(struct.pack(">BHI", 3, 1, 3 * 2**30) + b"x")
        assert confirmation.result(30)
    assert "frame of type 3 and 3221225472 bytes on channel 1, where at most 131064 may come" in caplog.text


def test_a_return_counts_where_a_nack_follows_it_too(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher(retry=SOON) as publisher:
        [confirmation] = submit(publisher, 1)
        [published] = broker.wait_published(1)
        published.channel.return_(published)
        published.channel.nack(1)
        assert isinstance(confirmation.exception(30), PublishReturned)


def test_a_return_without_an_ack_is_forgotten_with_its_channel(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher() as publisher:
        [confirmation] = submit(publisher, 1)
        [published] = broker.wait_published(1)
        published.channel.return_(published)
        published.channel.connection.cut()
        again = broker.wait_published(2)[1]
        again.channel.ack(1)
        assert confirmation.result(30).possible_duplicate


def test_a_return_of_nothing_that_is_outstanding_changes_nothing(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher() as publisher:
        [first] = submit(publisher, 1)
        [published] = broker.wait_published(1)
        published.channel.ack(1)
        assert first.exception(30) is None
        [second] = submit(publisher, 1)
        broker.wait_published(2)
        published.channel.return_(published)
        published.channel.ack(2)
        assert second.exception(30) is None


@pytest.mark.parametrize("alike", [False, True], ids=["equal ids", "one message"])
def test_the_log_warns_of_a_message_that_is_published_again(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture, alike: bool
) -> None:
    """A loop over one Message costs a round trip each. Equal ids of several messages are the caller's choice."""
    message = Message(b"tick", message_id="same")
    broker.script = lambda published: published.channel.ack(published.number)
    with new_publisher() as publisher:
        publisher.connect()
        messages = [message if alike else Message(b"tick", message_id="same") for _ in range(20)]
        assert publisher.publish_many(messages, routing_key=KEY).confirmed == 20
    assert ("make a new Message for each message" in caplog.text) is alike


def test_no_two_messages_with_one_id_are_outstanding_at_once(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """A return has an id but no number, so only one publish per id is outstanding."""
    with new_publisher() as publisher:
        same = [
            publisher.submit(Message(b"%d" % n, message_id="same"), routing_key="nowhere" if n == 1 else KEY)
            for n in range(3)
        ]
        other = publisher.submit(Message(b"other"), routing_key=KEY)
        published = broker.wait_published(2)
        assert [one.body for one in published] == [b"0", b"other"]
        published[0].channel.ack(2, multiple=True)
        second = broker.wait_published(3)[2]
        assert second.body == b"1"
        second.channel.return_(second)
        second.channel.ack(3)
        third = broker.wait_published(4)[3]
        third.channel.ack(4)
        assert [isinstance(error, PublishReturned) for error in errors([*same, other])] == [False, True, False, False]


# -- channels and connections that end ---------------------------------------------------------------------------------


def closing_over(bad: set[bytes], closes: list[int]) -> Callable[[Published], None]:
    """Return a script that closes the channel over an invalid message."""

    def script(published: Published) -> None:
        if published.body in bad:
            closes.append(published.number)
            published.channel.close(404, "NOT_FOUND - no exchange 'missing'")
        else:
            published.channel.ack(published.number)

    return script


@pytest.mark.parametrize("culprits", [[0], [63], [31, 32], [5, 6, 60]])
def test_the_culprit_of_a_channel_close_fails_alone(
    broker: ScriptedBroker, new_publisher: NewPublisher, culprits: list[int]
) -> None:
    """The broker names no culprit.

    The outstanding publishes are sent again in smaller groups, on channels of one connection.
    """
    closes: list[int] = []
    broker.script = closing_over({b"%d" % culprit for culprit in culprits}, closes)
    with new_publisher() as publisher:
        found = errors(submit(publisher, 64))
        assert [number for number, error in enumerate(found) if error] == culprits
        assert {type(error) for error in found if error} == {PublishRefused}
        assert {error.reply_code for error in found if error} == {404}
        assert publisher.publish(Message(b"fine"), routing_key=KEY).attempts == 1
    assert len(broker.connections) == 1
    assert len(closes) <= 8 * len(culprits)


def test_an_ack_of_a_closed_channel_confirms_nothing_on_the_next(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher() as publisher:
        confirmations = submit(publisher, 2)
        old = broker.wait_published(2)[-1].channel
        old.close(406, "PRECONDITION_FAILED - of something else")
        first = broker.wait_published(3)[2]  # the first half of the suspects
        assert first.channel is not old
        old.ack(1)
        old.ack(2, multiple=True)
        first.channel.ack(1)
        second = broker.wait_published(4)[3]
        wait_settled(confirmations, 0)
        second.channel.ack(second.number)
        assert errors(confirmations) == [None, None]
        assert len(broker.connections) == 1


def test_a_reconnect_republishes_unconfirmed_in_order_and_marked(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher() as publisher:
        confirmations = submit(publisher, 10)
        channel = broker.wait_published(10)[-1].channel
        channel.ack(3, multiple=True)
        channel.ack(8)
        wait_settled(confirmations, 0, 1, 2, 7)
        channel.connection.cut()
        again = broker.wait_published(16)[10:]
        assert [published.body for published in again] == [b"3", b"4", b"5", b"6", b"8", b"9"]
        assert all(published.possible_duplicate for published in again)
        assert [published.number for published in again] == [1, 2, 3, 4, 5, 6]
        ids = {published.body: published.message_id for published in broker.published[:10]}
        assert all(ids[published.body] == published.message_id for published in again)
        again[0].channel.ack(6, multiple=True)
        assert errors(confirmations) == [None] * 10
        assert [one.result(0).possible_duplicate for one in confirmations].count(True) == 6
        assert publisher.statistics.republished == 6


@pytest.mark.parametrize("how", ["reset", "320", "not UTF-8", "garbage"])
def test_a_connection_that_ends_anyhow_is_replaced(
    broker: ScriptedBroker, new_publisher: NewPublisher, how: str
) -> None:
    with new_publisher() as publisher:
        confirmations = submit(publisher, 5)
        channel = broker.wait_published(5)[-1].channel
        match how:
            case "reset":
                channel.connection.cut()
            case "320":
                channel.connection.close(320, "CONNECTION_FORCED - broker forced connection closure")
            case "not UTF-8":
                channel.connection.send_bytes(method_frame(0, *CONNECTION_CLOSED, b"\x01\x40\x01\xff" + bytes(4)))
            case _:
                channel.connection.send_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        again = broker.wait_published(10)[5:]
        assert [published.body for published in again] == [b"0", b"1", b"2", b"3", b"4"]
        again[0].channel.ack(5, multiple=True)
        assert errors(confirmations) == [None] * 5
        assert len(broker.connections) == 2


def test_a_log_handler_that_raises_does_not_end_reconnecting(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    class Failing(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("no space left on device")

    logger, failing = logging.getLogger("reliable_mq"), Failing()
    logger.addHandler(failing)
    try:
        with new_publisher() as publisher:
            for number in range(3):
                confirmations = submit(publisher, 1)
                broker.wait_published(2 * number + 1)[-1].channel.connection.cut()
                broker.wait_published(2 * number + 2)[-1].channel.ack(1)
                assert errors(confirmations) == [None]
    finally:
        logger.removeHandler(failing)


def test_a_broker_that_comes_and_goes_costs_nothing_but_time(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """Each connection ends after three publishes, and only one of them is acked."""

    def script(published: Published) -> None:
        if published.number == 3:
            published.channel.ack(1)
            published.channel.connection.cut()

    broker.script = script
    with new_publisher() as publisher:
        confirmations = submit(publisher, 20)
        wait_until(lambda: len(settled(confirmations)) >= 18, timeout=30, what="18 confirms")
        broker.script = acking
        broker.connection.cut()
        assert errors(confirmations) == [None] * 20


def test_a_channel_that_nacks_all_for_too_long_is_replaced(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """A quorum queue tells each channel once that it is no longer full.

    A channel that misses it would nack forever.
    """
    channels: list[Channel] = []

    def script(published: Published) -> None:
        channel = published.channel
        if channel not in channels:
            channels.append(channel)
        channel.nack(published.number) if channel is channels[0] else channel.ack(published.number)

    broker.script = script
    with new_publisher(confirm_timeout=0.3, retry=RetryPolicy(max_attempts=1000, delays=(0.02,))) as publisher:
        receipts = [confirmation.result(30) for confirmation in submit(publisher, 3)]
        assert all(receipt.attempts > 2 and not receipt.possible_duplicate for receipt in receipts)
        assert (len(channels), len(broker.connections)) == (2, 1)
        assert not channels[0].open
        assert channels[1].published == 3, "published elsewhere than on the new channel"
        assert not any(published.possible_duplicate for published in broker.published)


# -- silence -----------------------------------------------------------------------------------------------------------


def test_a_late_ack_frees_the_place_of_a_publish_that_timed_out(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher(max_outstanding=1) as publisher:
        publisher.connect()
        began = time.monotonic()
        with pytest.raises(PublishUnconfirmed) as caught:
            publisher.publish(Message(b"x"), routing_key=KEY, timeout=0.5)
        assert 0.4 < time.monotonic() - began < 15
        assert caught.value.sent
        assert caught.value.may_have_arrived
        [published] = broker.wait_published(1)
        with pytest.raises(PublishUnconfirmed, match="window"):
            publisher.submit(Message(b"y"), routing_key=KEY, timeout=0.1)
        published.channel.ack(1)
        broker.script = acking
        publisher.publish(Message(b"z"), routing_key=KEY)
        assert [one.body for one in broker.published] == [b"x", b"z"]


@pytest.mark.slow
def test_a_channel_that_confirms_nothing_in_time_is_replaced(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    def script(published: Published) -> None:
        if published.channel.connection is not broker.connections[0]:
            acking(published)

    broker.script = script
    with new_publisher(confirm_timeout=1.0) as publisher:
        confirmations = submit(publisher, 3)
        assert errors(confirmations) == [None] * 3
        assert [one.result(0).attempts for one in confirmations] == [2, 2, 2]
        assert len(broker.connections) == 2
        assert not broker.connections[0].closed_in_good_order


@pytest.mark.slow
def test_a_channel_that_passes_over_one_queue_is_replaced(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """Confirms of one queue are lost, and those of another arrive.

    A new channel gets both.
    """

    def script(published: Published) -> None:
        if published.routing_key == KEY or published.channel.connection is not broker.connections[0]:
            acking(published)

    broker.script = script
    with new_publisher(confirm_timeout=1.0) as publisher:
        first, second = (
            submit(publisher, 1, routing_key="stuck", timeout=1.5),
            submit(publisher, 2, routing_key="stuck"),
        )
        quick: list[Any] = []

        def replaced() -> bool:
            quick.extend(submit(publisher, 1))
            return len(broker.connections) == 2

        wait_until(replaced, timeout=30, what="the channel was replaced", interval=0.1)
        assert [type(error) for error in errors(first)] == [PublishUnconfirmed]
        assert errors(second + quick) == [None] * (2 + len(quick))
        assert all(confirmation.result(0).possible_duplicate for confirmation in second)


@pytest.mark.slow
def test_confirms_that_trickle_in_keep_the_channel(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher(confirm_timeout=1.6) as publisher:
        confirmations = submit(publisher, 9)
        channel = broker.wait_published(9)[-1].channel
        for number in range(1, 10):
            began = time.monotonic()
            wait_until(lambda since=began: time.monotonic() - since > 0.2, timeout=5, what="time to pass")
            channel.ack(number)
        assert errors(confirmations) == [None] * 9
        assert len(broker.connections) == 1


@pytest.mark.parametrize("end", ["discard", "abort"])
def test_a_publish_that_no_socket_took_is_unsent(broker: ScriptedBroker, new_publisher: NewPublisher, end: str) -> None:
    """A connection is aborted, and its loss is reported in the next turn of the loop.

    A publish in between is no possible duplicate.
    """
    broker.script = acking
    with new_publisher() as publisher:
        publisher.connect()
        user = getattr(publisher, "publisher", publisher)
        channel = user._channel
        confirmations: list[Any] = []

        def publish_after_the_end() -> None:
            submitted = user.submit(Message(b"x"), routing_key=KEY)
            if asyncio.iscoroutine(submitted):
                with pytest.raises(StopIteration) as returned:
                    submitted.send(None)
                submitted = returned.value.value
            confirmations.append(submitted)
            io = channel._io
            io.discard("in doubt") if end == "discard" else io._connector._link.abort("a broken frame")
            channel._advance()

        channel._io.call_soon(publish_after_the_end)
        [published] = broker.wait_published(1)
        assert not published.possible_duplicate
        publisher.flush(30)
        receipt = confirmations[0].result()
        assert (receipt.attempts, receipt.possible_duplicate) == (1, False)
        assert len(broker.connections) == 2


def test_a_full_window_keeps_the_next_message_back(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher(max_outstanding=3) as publisher:
        confirmations = submit(publisher, 3)
        channel = broker.wait_published(3)[-1].channel
        with pytest.raises(PublishUnconfirmed, match="window") as caught:
            publisher.submit(Message(b"x"), routing_key=KEY, timeout=0.1)
        assert not caught.value.sent
        channel.ack(2)
        [fourth] = submit(publisher, 1)
        broker.wait_published(4)
        channel.ack(4, multiple=True)
        assert errors([*confirmations, fourth]) == [None] * 4
        assert len(broker.published) == 4


def test_a_caller_overtaken_by_a_callback_keeps_its_deadline(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher
) -> None:
    """While there are more callbacks than places, only their publishes are admitted."""
    gate, runs = threading.Event(), threading.Event()
    with new_publisher_of_the_sync_api(max_outstanding=2, confirm_timeout=1000, delivery_timeout=500) as publisher:

        def overtake(_: object) -> None:
            runs.set()
            assert gate.wait(30)
            publisher.submit(Message(b"overtakes"), routing_key=KEY)

        [first] = submit(publisher, 1)
        for callback in (overtake, id, id, id):
            first.add_done_callback(callback)
        [published] = broker.wait_published(1)
        published.channel.ack(1)
        assert runs.wait(30)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(publisher.submit, Message(b"waits"), routing_key=KEY)
            channel = publisher._channel
            wait_until(lambda: channel._waiting, timeout=30, what="a caller that waits")
            gate.set()
            overtaken = waiting.result(30)
        _, second, third = broker.wait_published(3)
        assert (second.body, third.body) == (b"overtakes", b"waits")
        assert channel.session.next_wakeup() == overtaken.accepted_at + 500
        second.channel.ack(3, multiple=True)


def test_large_bodies_fill_the_window_by_their_bytes(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher(max_outstanding_bytes=1000) as publisher:
        first = publisher.submit(Message(b"x" * 600), routing_key=KEY)
        with pytest.raises(PublishUnconfirmed, match="window"):
            publisher.submit(Message(b"x" * 600), routing_key=KEY, timeout=0.1)
        broker.wait_published(1)[0].channel.ack(1)
        assert first.exception(30) is None
        alone = publisher.submit(Message(b"x" * 5000), routing_key=KEY)  # larger than the window, so admitted alone
        broker.wait_published(2)[1].channel.ack(2)
        assert alone.exception(30) is None


def test_waiting_again_and_again_leaves_nothing_behind(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """A program may poll an outcome every few milliseconds for a long time."""
    with new_publisher() as publisher:
        [confirmation] = submit(publisher, 1)
        broker.wait_published(1)
        for _ in range(100):
            with pytest.raises(TimeoutError):
                confirmation.result(0.001)
        assert not confirmation.callbacks
        broker.published[0].channel.ack(1)
        assert confirmation.result(30).attempts == 1


def test_publishes_that_found_no_room_in_time_are_not_kept(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """This holds while the window stays full."""

    def publish_in_vain() -> None:
        with pytest.raises(PublishUnconfirmed, match="window"):
            publisher.publish(Message(bytes(100_000)), routing_key=KEY, timeout=0.002)

    with new_publisher(max_outstanding=1) as publisher:
        [held] = submit(publisher, 1)
        broker.wait_published(1)
        publish_in_vain()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(100):
                publish_in_vain()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 2_000_000
        assert publisher.outstanding == 1
        broker.published[0].channel.ack(1)
        assert held.exception(30) is None


def test_a_timed_out_large_publish_does_not_block_a_small_one(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """A message that fits is admitted, although nothing is settled."""

    def submit_one(size: int, timeout: float) -> Any:
        return publisher.submit(Message(bytes(size)), routing_key=KEY, timeout=timeout)

    with new_publisher(max_outstanding_bytes=1000) as publisher, ThreadPoolExecutor(2) as pool:
        first = submit_one(600, 20)
        large = pool.submit(submit_one, 600, 0.4)
        small = pool.submit(submit_one, 100, 20)
        with pytest.raises(PublishUnconfirmed, match="window"):
            large.result(30)
        got_in = small.result(30)
        newcomer = submit_one(100, 20)
        assert [len(published.body) for published in broker.wait_published(3)] == [600, 100, 100]
        broker.published[0].channel.ack(3, multiple=True)
        assert errors([first, got_in, newcomer]) == [None] * 3


# -- alarms ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_written_while_the_broker_blocks(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """The confirm timeout does not run. The messages are confirmed after the alarm."""
    with new_publisher(confirm_timeout=1.2) as publisher:
        publisher.connect()
        connection = broker.connection
        block(broker, publisher)
        assert publisher.blocked == "low on memory"
        confirmations = submit(publisher, 3)
        with pytest.raises(PublishBlocked, match="low on memory") as caught:
            publisher.publish(Message(b"x"), routing_key=KEY, timeout=1.5)
        assert not caught.value.may_have_arrived
        assert broker.published == []
        broker.script = acking
        connection.unblock()
        assert errors(confirmations) == [None] * 3
        assert publisher.blocked is None
        assert len(broker.connections) == 1


def test_the_time_of_blocks_never_falls(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may read it between any two steps. The broker may give a second reason during a block."""
    broker.script = acking
    readings: list[float] = []

    def set_and_read(channel: BasePublisherChannel[Any], name: str, value: object) -> None:
        object.__setattr__(channel, name, value)
        readings.append(channel.blocked_seconds)

    with new_publisher() as publisher:
        publisher.publish(Message(b""), routing_key=KEY)
        monkeypatch.setattr(BasePublisherChannel, "__setattr__", set_and_read)
        began = time.monotonic()
        for _ in range(2):
            block(broker, publisher)
            block(broker, publisher, "low on disk")
            broker.connection.unblock()
            wait_until(lambda: not publisher.blocked, timeout=30, what="the end of the block")
        took = time.monotonic() - began
        monkeypatch.undo()
    assert readings == sorted(readings)
    assert 0 < readings[-1] <= took


def test_while_blocked_a_publish_may_raise_at_once(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    with new_publisher(on_blocked="raise") as publisher:
        publisher.connect()
        block(broker, publisher, "low on disk")
        began = time.monotonic()
        with pytest.raises(PublishBlocked, match="low on disk"):
            publisher.publish(Message(b"x"), routing_key=KEY)
        assert time.monotonic() - began < 20
        broker.connection.unblock()
        wait_until(lambda: publisher.blocked is None, timeout=30, what="the end of it")
        publisher.publish(Message(b"x"), routing_key=KEY)


def test_a_block_without_a_reason_is_a_block(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher(on_blocked="raise") as publisher:
        publisher.connect()
        block(broker, publisher, "")
        with pytest.raises(PublishBlocked) as caught:
            publisher.submit(Message(b"x"), routing_key=KEY)
        assert caught.value.reason == publisher.blocked == "no reason given"


def test_the_reason_of_a_block_need_not_be_utf8(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher() as publisher:
        publisher.connect()
        broker.connection.send_bytes(method_frame(0, *CONNECTION_BLOCKED, b"\x04low\xff"))
        wait_until(lambda: publisher.blocked, timeout=30, what="the blocked state")
        assert publisher.blocked == "low\N{REPLACEMENT CHARACTER}"


def test_losing_a_blocked_connection_ends_the_block(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher() as publisher:
        publisher.connect()
        connection = broker.connection
        block(broker, publisher)
        [confirmation] = submit(publisher, 1)
        broker.script = acking
        connection.cut()
        assert confirmation.exception(30) is None
        assert publisher.blocked is None


def test_a_publish_held_by_a_block_is_no_duplicate_after_a_loss(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher() as publisher:
        publisher.connect()
        block(broker, publisher)
        confirmations = submit(publisher, 2)
        broker.connection.cut()
        published = broker.wait_published(2)
        published[1].channel.ack(2, multiple=True)
        assert errors(confirmations) == [None, None]
        assert [one.possible_duplicate for one in published] == [False, False]
        assert publisher.statistics.in_doubt == publisher.statistics.republished == 0


def test_a_publish_held_by_a_block_survives_a_connection_error(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher() as publisher:
        publisher.connect()
        block(broker, publisher)
        [confirmation] = submit(publisher, 1)
        broker.script = acking
        broker.connection.close(541, "INTERNAL_ERROR")
        assert errors([confirmation]) == [None]


def test_only_the_end_of_a_block_is_logged_as_one(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that is lost or closed tells nothing about the broker's alarm."""
    with new_publisher(name="shop") as publisher:
        publisher.connect()
        block(broker, publisher)
        assert "publisher 'shop': the broker blocks publishing: low on memory" in caplog.text
        broker.connection.unblock()
        wait_until(lambda: publisher.blocked is None, timeout=30, what="the end of it")
        assert caplog.text.count("publisher 'shop': the broker accepts publishes again") == 1
        block(broker, publisher)
        broker.connection.cut()
        wait_until(lambda: len(broker.connections) == 2 and publisher.connected, timeout=30, what="another connection")
        block(broker, publisher)
    assert caplog.text.count("the broker accepts publishes again") == 1


def test_closing_while_blocked_ends_in_time(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    publisher.connect()
    block(broker, publisher)
    [confirmation] = submit(publisher, 1)
    began = time.monotonic()
    with pytest.raises(PublishBlocked):
        publisher.close(timeout=0.2)
    assert time.monotonic() - began < 20
    assert confirmation.done()


# -- fail fast ---------------------------------------------------------------------------------------------------------


def test_a_connection_lost_between_set_ups_is_replaced_at_once(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker has refused another channel, and the publisher waits before it opens the next."""
    broker.script = acking
    registry = CollectorRegistry()
    with new_publisher(registry=registry, name="shop", reconnect_wait=lambda _: 3600) as publisher:
        publisher.publish(Message(b"1"), routing_key=KEY)
        connection = broker.connection
        broker.refusals["Confirm.Select"] = 541, "INTERNAL_ERROR - starting"
        [channel] = connection.channels.values()
        channel.close(404, "NOT_FOUND - no exchange 'gone' in vhost '/'")
        wait_until(lambda: "next attempt in 3600.0 s" in caplog.text, timeout=30, what="the refusal")
        broker.refusals.clear()
        connection.cut()
        publisher.publish(Message(b"2"), routing_key=KEY)
        labels = {"publisher": "shop"}
        assert registry.get_sample_value("reliable_mq_publisher_reconnects_total", labels) == 1


def test_while_disconnected_a_publish_may_raise_at_once(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """New messages are refused.

    Accepted ones are published again, and new ones are accepted once the publisher is connected.
    """
    with new_publisher(on_disconnected="raise") as publisher:
        [before] = submit(publisher, 1)
        broker.wait_published(1)
        broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
        broker.connection.cut()
        wait_until(lambda: not publisher.connected, timeout=30, what="the loss")
        with pytest.raises(PublishDisconnected, match="no connection to the broker") as caught:
            publisher.publish(Message(b"x"), routing_key=KEY)
        assert caught.value.reason
        assert not caught.value.may_have_arrived
        report = publisher.publish_many([Message(b"y"), Message(b"z")], routing_key=KEY)
        assert [type(error) for _, error in report.failures] == [PublishDisconnected] * 2
        assert not before.done()
        broker.script = acking
        del broker.refusals["Connection.Open"]
        assert before.exception(30) is None
        publisher.connect()
        publisher.publish(Message(b"after"), routing_key=KEY)
    assert {published.body for published in broker.published} == {b"0", b"after"}


@pytest.mark.parametrize("first_lost", ["connection", "channel"])
def test_a_caller_waiting_for_the_window_fails_on_disconnection(
    broker: ScriptedBroker, new_publisher: NewPublisher, first_lost: str
) -> None:
    """Its message was not accepted yet, so it does not wait for its deadline.

    The same happens if a channel is lost and no other can be opened.
    """
    with new_publisher(on_disconnected="raise", max_outstanding=2, delivery_timeout=60) as publisher:
        with ThreadPoolExecutor(1) as pool:
            accepted = submit(publisher, 2)
            broker.wait_published(2)
            waiting = pool.submit(publisher.submit, Message(b"waits"), routing_key=KEY)
            channel = getattr(publisher, "publisher", publisher)._channel  # the inner publisher of a blocking one
            waiters = channel._waiters
            wait_until(lambda: getattr(waiters, "waiting", waiters), timeout=30, what="a caller that waits")
            broker.refusals["Connection.Open"] = broker.refusals["Confirm.Select"] = 541, "INTERNAL_ERROR - starting"
            if first_lost == "connection":
                broker.connection.cut()
            else:
                broker.published[0].channel.close(406, "PRECONDITION_FAILED - a text that names no publish")
            assert isinstance(waiting.exception(30), PublishDisconnected)
        broker.script = acking
        broker.refusals.clear()
        assert errors(accepted) == [None, None]


def test_a_channel_that_is_closed_is_no_lost_connection(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """The message that closed the channel fails alone. Others are not refused."""
    with new_publisher(on_disconnected="raise") as publisher:
        publisher.connect()
        gate = threading.Event()

        def script(published: Published) -> None:
            if published.exchange == "missing":
                published.channel.close(404, "NOT_FOUND - no exchange 'missing' in vhost '/'")
                gate.set()
            else:
                published.channel.ack(published.number)

        broker.script = script
        [culprit] = submit(publisher, 1, exchange="missing")
        assert gate.wait(30)
        assert errors(submit(publisher, 50)) == [None] * 50
        assert isinstance(culprit.exception(30), PublishRefused)


def test_a_connection_lost_after_its_channel_is_a_lost_one(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many lost channels, the connection waits before it opens another one."""
    monkeypatch.setattr(reconnect, "CHANNEL_BURST", 0)
    monkeypatch.setattr(reconnect, "CHANNEL_REFILL", 0.01)
    accepted: list[Any] = []

    def refused(publisher: Any) -> bool:
        try:
            accepted.append(publisher.submit(Message(b"x"), routing_key=KEY))
        except PublishDisconnected:
            return True
        return False

    with new_publisher(on_disconnected="raise") as publisher:
        [culprit] = submit(publisher, 1)
        [published] = broker.wait_published(1)
        broker.silent = True
        published.channel.close(406, "PRECONDITION_FAILED - a text that names no publish")
        wait_until(lambda: not publisher.connected, timeout=30, what="the loss of the channel")
        published.channel.connection.cut()
        wait_until(lambda: refused(publisher), timeout=5, what="a refusal")
        broker.script = acking
        broker.silent = False
        broker.connections[-1].cut()  # its handshake was not answered
        assert isinstance(culprit.exception(30), PublishRefused)
        assert errors(accepted) == [None] * len(accepted)


def test_a_broker_that_was_never_there_is_no_connection_either(new_publisher: NewPublisher) -> None:
    """The first publish fails after one attempt at each host."""
    with new_publisher(f"amqp://guest:guest@127.0.0.1:{free_port()}/", on_disconnected="raise") as publisher:
        began = time.monotonic()
        with pytest.raises(PublishDisconnected):
            publisher.publish(Message(b"x"), routing_key=KEY)
        assert time.monotonic() - began < 20


# -- start and end -----------------------------------------------------------------------------------------------------


def test_heartbeats_may_come_before_the_virtual_host_is_open(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """The broker may have to ask another server whether the user may open it."""
    broker.heartbeats_before_open = 3
    with new_publisher() as publisher:
        publisher.connect()
        assert publisher.connected
    assert len(broker.connections) == 1


@pytest.mark.slow
def test_connecting_again_tries_every_host(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """The first host accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{broker.port}/"
        with new_publisher(url, connect_timeout=1.0) as publisher:
            publisher.connect()
            broker.connection.cut()
            wait_until(lambda: not publisher.connected, timeout=30, what="the loss")
            publisher.connect()
            assert publisher.connected


@pytest.mark.slow
def test_a_first_publish_keeps_its_deadline_behind_later_ones(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """It waits for an attempt to connect, although a later caller has given up."""
    broker.silent = True
    publisher = new_publisher(connect_timeout=20, delivery_timeout=2.5)

    def first() -> float:
        began = time.monotonic()
        with pytest.raises(PublishUnconfirmed):
            publisher.publish(Message(b"first"), routing_key=KEY)
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first)
        wait_until(lambda: broker.connections, timeout=30, what="the attempt to connect")
        began = time.monotonic()
        with pytest.raises(PublishUnconfirmed):
            publisher.publish(Message(b"short"), routing_key=KEY, timeout=0.2)
        wait_until(lambda: time.monotonic() - began > 2, timeout=30, what="a time shortly before the deadline")
        later = publisher.submit(Message(b"later"), routing_key=KEY)
        assert waiting.result(30) < 3.5
        assert isinstance(later.exception(30), PublishUnconfirmed)
    publisher.close()


@pytest.mark.slow
def test_a_first_publish_keeps_its_deadline_during_declaration(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """The set-up makes progress, but the message expires first."""
    broker.declare_seconds = 0.25
    topology = [Queue(f"q{number}", dead_letter=None) for number in range(40)]
    publisher = new_publisher(topology=topology, connect_timeout=0.5)
    began = time.monotonic()
    with pytest.raises(PublishUnconfirmed):
        publisher.publish(Message(b"x"), routing_key=KEY, timeout=1.6)
    assert time.monotonic() - began < 5
    publisher.close(timeout=0)


def test_a_queue_that_differs_is_said_at_the_first_call(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    text = "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': received 'quorum' but"
    broker.refusals["Queue.Declare"] = 406, f"{text} current is 'classic'"
    publisher = new_publisher(topology=[Queue("q")])
    with pytest.raises(TopologyMismatch, match="x-queue-type"):
        publisher.publish(Message(b"x"), routing_key="q")
    publisher.close()


@pytest.mark.parametrize(
    ("refused", "reply"),
    [("Connection.StartOk", (403, "ACCESS_REFUSED")), ("Connection.Open", (530, "NOT_ALLOWED - no such vhost"))],
)
def test_a_permanent_refusal_is_raised_and_not_retried(
    broker: ScriptedBroker, new_publisher: NewPublisher, refused: str, reply: tuple[int, str]
) -> None:
    broker.refusals[refused] = reply
    publisher = new_publisher()
    with pytest.raises(BrokerUnavailable, match=str(reply[0])) as caught:
        publisher.connect()
    assert caught.value.permanent
    publisher.close()
    assert len(broker.connections) == 1


def test_the_error_of_a_credentials_callback_is_the_cause(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """Its text may contain a secret, so nothing else shows it."""

    def credentials() -> tuple[str, str]:
        raise ValueError("the vault is sealed")

    url = f"amqp://127.0.0.1:{broker.port}/"
    publisher = new_publisher(url, credentials=credentials, reconnect_stop=lambda rounds: True)
    for call in publisher.connect, lambda: publisher.publish(Message(b"x"), routing_key=KEY):
        with pytest.raises(BrokerUnavailable) as caught:
            call()
        assert str(caught.value.__cause__) == "the vault is sealed"
    publisher.close()


def test_a_registry_does_not_keep_publishers_unable_to_open(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """A supervisor may make another publisher after each failure."""
    registry = CollectorRegistry()
    broker.refusals["Connection.StartOk"] = 403, "ACCESS_REFUSED"

    def fail_to_enter() -> weakref.ref[Any]:
        publisher = new_publisher(registry=registry)
        with pytest.raises(BrokerUnavailable):
            publisher.__enter__()
        return weakref.ref(getattr(publisher, "publisher", publisher))

    failed = fail_to_enter()
    wait_until(lambda: (gc.collect(), failed() is None)[1], timeout=30, what="the end of the publisher")


def test_a_publisher_that_opens_later_is_in_its_registry(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """Opening it again, and closing it, counts nothing twice."""
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"reliable_mq_publisher_{name}", {"publisher": "publisher", **labels})

    broker.script = acking
    broker.refusals["Connection.StartOk"] = 403, "ACCESS_REFUSED"
    publisher = new_publisher(registry=registry)
    with pytest.raises(BrokerUnavailable):
        publisher.connect()
    assert value("connected") is None
    broker.refusals.clear()
    publisher.publish(Message(b"x"), routing_key=KEY)
    assert (value("connected"), value("settled_total", outcome="confirmed")) == (1, 1)
    publisher.close()
    assert (value("connected"), value("settled_total", outcome="confirmed")) == (None, 1)


@pytest.mark.slow
@pytest.mark.parametrize("greeting", [None, b"SSH-2.0-OpenSSH_9.6\r\n" * 20, b""], ids=["silence", "ssh", "nothing"])
def test_a_peer_that_is_no_broker_is_said_by_connect(
    broker: ScriptedBroker, new_publisher: NewPublisher, greeting: bytes | None
) -> None:
    broker.silent = True
    broker.greeting = greeting
    publisher = new_publisher(connect_timeout=0.5)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        publisher.connect()
    assert time.monotonic() - began < 20
    publisher.close()


def test_closing_waits_for_confirms_and_ends_in_good_order(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    with new_publisher() as publisher:
        confirmations = submit(publisher, 100)
    assert all(confirmation.done() for confirmation in confirmations)
    assert errors(confirmations) == [None] * 100
    broker.wait(lambda: broker.connections[0].closed_in_good_order, "the closing handshake")
    for call in (lambda: publisher.publish(Message(b"x"), routing_key=KEY), publisher.connect, publisher.__enter__):
        with pytest.raises(UsageError, match="this publisher is closed"):
            call()


def test_leaving_raises_what_nobody_has_seen(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    def script(published: Published) -> None:
        published.channel.return_(published)
        published.channel.ack(published.number)

    def leave(count: int) -> None:
        with new_publisher() as publisher:
            submit(publisher, count)

    broker.script = script
    with pytest.raises(PublishReturned):
        leave(1)
    with pytest.raises(PublishError, match="3 messages"):
        leave(3)


def test_failures_that_nobody_sees_keep_few_messages_in_memory(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are counted."""
    monkeypatch.setattr(channel_module, "_FAILURES_KEPT_BYTES", 250)
    broker.script = lambda published: published.channel.nack(published.number)
    publisher = new_publisher(retry=ONCE)
    messages = [Message(bytes(100)) for _ in range(6)]
    for message in messages:
        publisher.submit(message, routing_key=KEY)
    publisher.flush(30)
    with pytest.raises(PublishError, match="6 messages") as caught:
        publisher.close()
    assert [error.message_id for error in caught.value.failures] == [message.message_id for message in messages[4:]]


def test_the_lost_broker_is_the_cause_of_messages_given_up(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """A message that failed before has another cause."""
    publisher = new_publisher(retry=ONCE, reconnect_stop=lambda _: True)
    confirmations = submit(publisher, 2)
    broker.wait_published(2)[0].channel.nack(1)
    wait_settled(confirmations, 0)
    broker.stop()
    wait_settled(confirmations, 0, 1)
    nacked = confirmations[0].exception(30)
    assert isinstance(nacked, PublishNacked)
    assert nacked.__cause__ is None
    with pytest.raises(PublishUnconfirmed) as caught:
        publisher.close()
    assert isinstance(caught.value.__cause__, BrokerUnavailable)


# -- reports, logs and bytes -------------------------------------------------------------------------------------------


def test_what_a_report_tells_is_not_said_in_the_log_as_well(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures of a submit without a waiting caller are logged."""
    broker.script = lambda published: published.channel.nack(published.number)

    def leave() -> None:
        with new_publisher(retry=ONCE, name="shop") as publisher:
            report = publisher.publish_many([Message(b"%d" % number) for number in range(20)], routing_key=KEY)
            assert [message.body for message, _ in report.failures] == [b"%d" % number for number in range(20)]
            assert "no caller waits" not in caplog.text
            publisher.submit(Message(b"lost"), routing_key=KEY)

    with pytest.raises(PublishNacked):
        leave()
    assert "publisher 'shop': failed publishes that no caller waits for: 1" in caplog.text


def test_a_publish_that_fails_at_once_is_not_logged_as_unawaited(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets the error, even if it is settled before the wait begins."""
    broker.script = lambda _published: None
    with new_publisher() as publisher:
        publisher.connect()
        for _ in range(50):
            with pytest.raises(PublishUnconfirmed):
                publisher.publish(Message(b"x"), routing_key=KEY, timeout=0)
    assert "no caller waits" not in caplog.text


def test_the_end_of_a_loss_is_logged_at_the_level_of_the_loss(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "reliable_mq.connection")
    with new_publisher() as publisher:
        publisher.connect()
        broker.connection.cut()
        wait_until(lambda: "connected again to" in caplog.text, timeout=30, what="connected again")
    found = [(record.levelname, record.getMessage()) for record in caplog.records if "connected" in record.getMessage()]
    assert [level for level, text in found if "connected to" in text] == ["INFO"]
    assert [level for level, text in found if "connected again to" in text] == ["WARNING"]


class CallingHandler(logging.Handler):
    """A log handler that calls a publisher for each record of the library, and keeps the errors."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self._call = call
        self.errors: list[ReliableMQError] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._call()
        except ReliableMQError as error:
            self.errors.append(error)

    def __enter__(self) -> Self:
        logging.getLogger("reliable_mq").addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger("reliable_mq").removeHandler(self)


@pytest.mark.parametrize(
    "call",
    [
        lambda publisher: publisher.publish(Message(b"log"), routing_key="logs"),
        lambda publisher: publisher.submit(Message(b"log"), routing_key="logs").result(),
        lambda publisher: publisher.close(),
    ],
    ids=["publish", "result", "close"],
)
def test_a_log_handler_that_would_wait_for_itself_is_refused(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher, call: Callable[[Publisher], object]
) -> None:
    """The publisher's own I/O thread calls it."""
    broker.script = acking
    with (
        new_publisher_of_the_sync_api(reconnect_wait=tenacity.wait_fixed(0.02)) as publisher,
        CallingHandler(lambda: call(publisher)) as handler,
    ):
        broker.connection.cut()
        wait_until(lambda: handler.errors, timeout=10, what="the refusal")
        assert submit(publisher, 1)[0].result(10).status == "confirmed"
    assert isinstance(handler.errors[0], UsageError)


def test_a_wait_that_blocks_the_io_thread_ends(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller holds the lock of a log handler, which the I/O thread waits for."""
    monkeypatch.setattr("reliable_mq.sync.confirmation.LATE", 0.5)
    broker.script = lambda published: published.channel.connection.cut()
    with (
        new_publisher_of_the_sync_api(reconnect_wait=tenacity.wait_fixed(0.02)) as publisher,
        CallingHandler(lambda: publisher.publish(Message(b"log"), routing_key="logs", timeout=0.5)) as handler,
    ):
        logging_thread = threading.Thread(target=logging.getLogger("reliable_mq").warning, args=["hello"], daemon=True)
        logging_thread.start()
        logging_thread.join(10)
        assert not logging_thread.is_alive()
        broker.script = acking
        assert submit(publisher, 1)[0].result(10).status == "confirmed"
    assert isinstance(handler.errors[0], PublishUnconfirmed)
    assert handler.errors[0].may_have_arrived


def test_a_report_that_blocks_the_io_thread_is_made(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages wait once for the I/O thread, not one after the other."""
    monkeypatch.setattr("reliable_mq.sync.confirmation.LATE", 1.0)
    broker.script = lambda published: published.channel.connection.cut()
    reports: list[PublishReport] = []

    def publish(publisher: Publisher) -> None:
        reports.append(publisher.publish_many([Message(b"log")] * 30, routing_key="logs", timeout=0.5))

    with (
        new_publisher_of_the_sync_api(reconnect_wait=tenacity.wait_fixed(0.02)) as publisher,
        CallingHandler(lambda: publish(publisher)),
    ):
        logging_thread = threading.Thread(target=logging.getLogger("reliable_mq").warning, args=["hello"], daemon=True)
        logging_thread.start()
        logging_thread.join(15)
        assert not logging_thread.is_alive()
        broker.script = acking
        confirmation = submit(publisher, 1)[0]
        assert confirmation.result(10).status == "confirmed"
        assert not confirmation.owner.stalled
    assert {type(error) for _, error in reports[0].failures} == {PublishUnconfirmed}
    assert len(reports[0].failures) == 30


@contextmanager
def blocked_io_thread(publisher: Publisher) -> Iterator[None]:
    """Block the I/O thread, as a log handler may do."""
    channel = publisher._channel
    assert channel is not None
    released = threading.Event()
    channel._io.call_soon(lambda: (released.wait(10), None)[1])
    try:
        yield
    finally:
        released.set()


@pytest.fixture
def _short_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    for grace in ("CLOSE_GRACE", "_ABORT_GRACE"):
        monkeypatch.setattr(f"reliable_mq.sync.publisher_channel.{grace}", 0.2)


@pytest.mark.usefixtures("_short_closing")
def test_close_tells_what_a_blocked_io_thread_left(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher
) -> None:
    """The cause is the failures that no user has seen. The publisher is closed."""
    broker.script = lambda published: published.channel.nack(published.number)
    publisher = new_publisher_of_the_sync_api(retry=ONCE)
    submit(publisher, 1)
    publisher.flush(10)
    with blocked_io_thread(publisher):
        submit(publisher, 3)
        with pytest.raises(
            PublishUnconfirmed, match="3 messages are not settled: the publisher's I/O thread"
        ) as caught:
            publisher.close(0.1)
        assert isinstance(caught.value.__cause__, PublishNacked)
        publisher.close()


@pytest.mark.usefixtures("_short_closing")
def test_a_blocked_io_thread_does_not_lose_rows(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher, tmp_path: Path
) -> None:
    """So closing does not raise."""
    broker.script = acking
    outbox = SQLiteOutbox(tmp_path / "outbox.db")
    publisher = new_publisher_of_the_sync_api(outbox=outbox)
    submit(publisher, 1)
    publisher.flush(10)
    with blocked_io_thread(publisher):
        submit(publisher, 3)
        publisher.close(0.1)
        assert outbox.backlog()[0] == 3
    outbox.close()


def test_the_error_of_a_flush_names_the_seconds(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher() as publisher:
        submit(publisher, 1)
        with pytest.raises(TimeoutError, match=r"outstanding after 0\.05 s$"):
            publisher.flush(timedelta(milliseconds=50))
        broker.wait_published(1)[0].channel.ack(1)


def test_a_flush_without_a_timeout_ends_with_a_deadline(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest deadline of a message, and a moment later."""
    monkeypatch.setattr("reliable_mq.sync.publisher_channel.LATE", 0.2)
    broker.script = acking
    publisher = new_publisher_of_the_sync_api(delivery_timeout=0.3)
    submit(publisher, 1)
    publisher.flush()
    with blocked_io_thread(publisher):
        submit(publisher, 2)
        submit(publisher, 1, timeout=1)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="3 messages are not settled after their deadlines: the publisher's I/O"):
            publisher.flush()
        assert time.monotonic() - began > 1
    with pytest.raises(PublishError, match="3 messages were not confirmed"):
        publisher.close()


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, 2])
def test_a_stalled_io_thread_reads_before_it_judges(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher, timeout: int | None
) -> None:
    """The confirm arrives during the stall, for example of a log handler, and waits in the socket."""
    with new_publisher_of_the_sync_api(confirm_timeout=2) as publisher:
        confirmation = publisher.submit(Message(b"late"), routing_key=KEY, timeout=timeout)
        [published] = broker.wait_published(1)

        def stall() -> None:
            threading.Event().wait(2.5)
            published.channel.ack(1)

        publisher._channel._io.call_soon(stall)
        broker.script = acking
        assert not confirmation.result(10).possible_duplicate
    assert len(broker.connections) == 1


def test_a_callback_that_would_not_run_is_refused(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """The failure is still raised when the publisher is closed."""
    broker.script = lambda published: published.channel.nack(published.number)

    async def settled(_confirmation: object) -> None:
        raise AssertionError("nothing awaits it")

    def leave() -> None:
        with new_publisher(retry=ONCE) as publisher:
            confirmation = publisher.submit(Message(b"lost"), routing_key=KEY)
            with pytest.raises(ConfigurationError, match="callback must be callable, not None"):
                confirmation.add_done_callback(None)
            with pytest.raises(ConfigurationError, match="callback is a coroutine function"):
                confirmation.add_done_callback(settled)

    with pytest.raises(PublishNacked):
        leave()


def test_close_raises_a_failure_whose_callback_was_not_added(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread for callbacks cannot start, or the event loop is another one."""

    async def add_elsewhere(confirmation: Any) -> None:
        confirmation._confirmation.add_done_callback(print)

    def leave() -> None:
        with new_publisher(retry=ONCE) as publisher:
            confirmation = publisher.submit(Message(b"lost"), routing_key=KEY)
            if isinstance(publisher, Publisher):
                monkeypatch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    confirmation.add_done_callback(print)
                monkeypatch.undo()
            else:
                with pytest.raises(UsageError, match="another event loop"):
                    asyncio.run(add_elsewhere(confirmation))
            broker.wait_published(1)[-1].channel.nack(1)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(PublishNacked):
        leave()


def test_broker_text_adds_no_lines_to_logs_and_errors(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """Control characters do not reach a terminal either."""
    caplog.set_level("INFO")
    words = "so\nbe it\x1b[2J\u202e"

    def script(published: Published) -> None:
        connection = published.channel.connection
        if connection is not broker.connections[0]:
            published.channel.return_(published, text=words)
            published.channel.ack(published.number)
            return
        connection.block(words)
        connection.close(320, words)

    broker.script = script
    with new_publisher() as publisher, pytest.raises(PublishReturned) as raised:
        publisher.publish(Message(b"x"), routing_key=KEY)
    assert str(raised.value).isprintable()
    assert raised.value.reply_text == words
    said = [record.getMessage() for record in caplog.records if record.name.startswith("reliable_mq.")]
    assert all(map(str.isprintable, said))
    assert any("connection lost: 320 so\\nbe it" in line for line in said)


def test_what_no_report_will_tell_is_raised_at_the_end(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """An invalid message ends the call, but its earlier messages are published."""

    def leave() -> None:
        with new_publisher(retry=ONCE) as publisher:
            messages = [Message(b"0"), Message(b"1"), "no message"]
            with pytest.raises(ConfigurationError, match="must be a Message"):
                publisher.publish_many(messages, routing_key=KEY)
            broker.wait_published(2)[-1].channel.nack(2, multiple=True)

    with pytest.raises(PublishError, match="2 messages"):
        leave()


def test_close_raises_failures_that_precede_an_aborted_report(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """The iterator of messages may raise after some of them have failed."""
    broker.script = lambda published: published.channel.nack(published.number)

    def leave() -> None:
        with new_publisher(retry=ONCE, max_outstanding=1) as publisher:

            def messages() -> Iterator[Message]:
                yield from (Message(b"%d" % number) for number in range(4))  # each waits for the previous one
                raise LookupError("no more messages")

            with pytest.raises(LookupError, match="no more messages"):
                publisher.publish_many(messages(), routing_key=KEY)

    with pytest.raises(PublishError, match="4 messages"):
        leave()


def test_an_aborted_report_notes_the_messages_not_submitted(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    with new_publisher(on_blocked="raise") as publisher:
        publisher.connect()
        block(broker, publisher, "low on memory")

        def messages() -> Iterator[Message]:
            yield from (Message(b"x", message_id=f"m-{number}") for number in range(4))
            raise LookupError("no more messages")

        with pytest.raises(LookupError, match="no more messages") as raised:
            publisher.publish_many(messages(), routing_key=KEY)
    [note] = raised.value.__notes__
    assert "could not submit 4 of the messages before; the first is 'm-0': " in note
    assert "low on memory" in note


def test_frames_keep_to_the_size_that_was_agreed_on(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.frame_max = 8192
    broker.script = acking
    with new_publisher() as publisher:
        body = bytes(range(256)) * 400
        publisher.publish(Message(body), routing_key=KEY)
        with pytest.raises(PublishRefused, match="headers"):
            publisher.publish(Message(b"x", headers={"h": "x" * 9000}), routing_key=KEY)
    [published] = broker.published
    assert published.body == body
    assert published.largest_frame == 8192


def test_confirms_may_come_in_pieces_and_among_heartbeats(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    with new_publisher(retry=ONCE) as publisher:
        confirmations = submit(publisher, 6)
        published = broker.wait_published(6)
        channel = published[0].channel
        channel.connection.fragment = 3
        channel.ack(2, multiple=True)
        channel.connection.send_bytes(b"\x08\0\0\0\0\0\0\xce")
        channel.return_(published[2])
        channel.ack(3)
        channel.nack(4)
        channel.connection.fragment = None
        channel.ack(6, multiple=True)
        kinds = [type(error) for error in errors(confirmations)]
        none = type(None)
        assert kinds == [none, none, PublishReturned, PublishNacked, none, none]


# -- random behaviour --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_broker_does_each_outcome_is_what_it_said(
    broker: ScriptedBroker, new_publisher: NewPublisher, seed: int
) -> None:
    """A message is confirmed, nacked or returned only if the broker did so.

    No call hangs.
    """
    rng = random.Random(seed)
    acked: set[str] = set()
    nacked: set[str] = set()
    returned: set[str] = set()
    unsettled: dict[Channel, list[Published]] = {}

    def script(published: Published) -> None:
        channel = published.channel
        held = unsettled.setdefault(channel, [])
        chance = rng.random()
        if chance < 0.004:
            channel.connection.cut()
            return
        if published.exchange == "missing":
            channel.close(404, "NOT_FOUND")
            return
        if published.routing_key == "nowhere":
            channel.return_(published)
            returned.add(published.message_id)
        held.append(published)
        if chance < 0.3:
            return  # acked later, by a multiple ack
        if chance < 0.6:
            one = held.pop(rng.randrange(len(held)))
            acked.add(one.message_id)
            channel.ack(one.number)
        elif chance < 0.65:
            one = held.pop(rng.randrange(len(held)))
            nacked.add(one.message_id)
            channel.nack(one.number)
        elif chance < 0.95:
            acked.update(one.message_id for one in held)
            held.clear()
            channel.ack(published.number, multiple=True)
        else:
            nacked.update(one.message_id for one in held)
            held.clear()
            channel.nack(published.number, multiple=True)

    broker.script = script
    retry = RetryPolicy(max_attempts=2, delays=(0.005,))
    with new_publisher(retry=retry, confirm_timeout=0.3, max_outstanding=60) as publisher:
        confirmations = []
        for number in range(300):
            exchange = "missing" if number % 90 == 50 else ""
            key = "nowhere" if number % 20 == 7 else KEY
            confirmations.append(publisher.submit(Message(b"x"), exchange=exchange, routing_key=key))
        for number, confirmation in enumerate(confirmations):
            error = confirmation.exception(30)
            one = confirmation.message_id
            if error is None:
                assert one in acked
                assert one not in returned
            elif isinstance(error, PublishReturned):
                assert one in returned
            elif isinstance(error, PublishNacked):
                assert one in nacked
            else:
                assert isinstance(error, PublishRefused)
                assert number % 90 == 50
        assert publisher.outstanding == 0


@pytest.mark.slow
def test_a_credentials_callback_that_hangs_is_asked_again(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """The next attempt calls it again, at the first connect and at later ones."""
    asked: list[int] = []
    release = threading.Event()

    def credentials() -> tuple[str, str]:
        asked.append(len(asked) + 1)
        if asked[-1] in (1, 3):
            release.wait(30)
        return "guest", "guest"

    broker.script = acking
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=credentials, connect_timeout=0.5) as publisher:
        publisher.publish(Message(b"1"), routing_key="orders", timeout=20)
        broker.connection.cut()
        publisher.publish(Message(b"2"), routing_key="orders", timeout=20)
        assert len(asked) >= 4
        release.set()
    assert {published.body for published in broker.published} == {b"1", b"2"}


@pytest.mark.slow
def test_a_hanging_credentials_callback_has_bounded_threads(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """The intervals between calls grow. Every thread ends with its call."""
    release = threading.Event()
    asked: list[threading.Thread] = []

    def credentials() -> tuple[str, str]:
        asked.append(threading.current_thread())
        release.wait(30)
        return "guest", "guest"

    url = f"amqp://127.0.0.1:{broker.port}/"
    publisher = new_publisher(url, credentials=credentials, connect_timeout=0.004)
    try:
        with pytest.raises(PublishUnconfirmed, match="never sent"):
            publisher.publish(Message(b"1"), routing_key="orders", timeout=1)
        broker.wait(lambda: len(asked) == MOST_UNANSWERED, "so many calls")
        with pytest.raises(TimeoutError):
            broker.wait(
                lambda: len(asked) > MOST_UNANSWERED, "one more call", patience=1.5 * 0.004 * 2**MOST_UNANSWERED
            )
    finally:
        release.set()
        publisher.close()
    for thread in asked:
        thread.join(10)
        assert not thread.is_alive()


def test_an_answer_that_comes_after_the_time_to_connect_is_used(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """The attempt in progress uses the answer, even if every call is slow."""

    def credentials() -> tuple[str, str]:
        time.sleep(0.5)
        return "guest", "guest"

    broker.script = acking
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=credentials, connect_timeout=0.3, reconnect_wait=tenacity.wait_none()) as it:
        it.publish(Message(b"1"), routing_key="orders", timeout=10)


def let_resolve(monkeypatch: pytest.MonkeyPatch, host: str, addresses: list[tuple[socket.AddressFamily, Any]]) -> None:
    """Let a host name have the given addresses, of which each has a family."""
    resolve = socket.getaddrinfo

    def answer(name: Any, port: Any, *rest: Any, **named: Any) -> Any:
        if name != host:
            return resolve(name, port, *rest, **named)
        if socket.AI_NUMERICHOST in rest:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_an_address_that_does_not_answer_is_followed_by_the_next(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address of the host accepts connections, as that of a frozen broker."""
    let_resolve(monkeypatch, "rabbit.test", [(socket.AF_INET, (f"127.0.0.{one}", broker.port)) for one in (2, 1)])
    broker.script = acking
    url = f"amqp://guest:guest@rabbit.test:{broker.port}/"
    with socket.create_server(("127.0.0.2", broker.port)), new_publisher(url, connect_timeout=0.5) as publisher:
        publisher.publish(Message(b"x"), routing_key=KEY, timeout=10)


class Unresponsive:
    """A listener that drops what is sent to it, as a firewall does, because its queue of connections is full."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._listener = socket.create_server(address, backlog=0)
        self._clients = [socket.socket() for _ in range(2)]
        for client in self._clients:
            client.setblocking(False)
            client.connect_ex(address)

    def __enter__(self) -> None:
        """Do nothing more."""

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._clients):
            one.close()


def test_unresponsive_addresses_leave_time_for_the_last(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reached in the first attempt."""
    hosts = [f"127.0.0.{number}" for number in (2, 3, 4, 1)]
    let_resolve(monkeypatch, "rabbit.test", [(socket.AF_INET, (host, broker.port)) for host in hosts])
    broker.script = acking
    url = f"amqp://guest:guest@rabbit.test:{broker.port}/"
    with ExitStack() as stack:
        for host in hosts[:3]:
            stack.enter_context(Unresponsive((host, broker.port)))
        with new_publisher(url, connect_timeout=1.2, reconnect_stop=lambda _: True) as publisher:
            publisher.publish(Message(b"x"), routing_key=KEY, timeout=10)


def test_the_failures_of_all_addresses_are_named(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    let_resolve(monkeypatch, "rabbit.test", [(socket.AF_INET, (host, broker.port)) for host in hosts])
    url = f"amqp://guest:guest@rabbit.test:{broker.port}/"
    text = r"test:\d+: no answer in time \(at 127.0.0.2\); Connection refused \(at 127.0.0.3, 127.0.0.4\)$"
    with (
        Unresponsive(("127.0.0.2", broker.port)),
        pytest.raises(BrokerUnavailable, match=text),
        new_publisher(url, connect_timeout=0.5, reconnect_stop=lambda _: True),
    ):
        pass


def test_attempts_share_a_lookup_that_does_not_end(
    broker: ScriptedBroker,
    new_publisher: NewPublisher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each attempt would otherwise leave a thread behind."""
    let_resolve(monkeypatch, "rabbit.test", [(socket.AF_INET, ("127.0.0.1", broker.port))])
    resolve, up = socket.getaddrinfo, threading.Event()

    def answer_later(name: str, *rest: Any) -> Any:
        found = resolve(name, *rest)
        assert name != "rabbit.test" or up.wait(30)
        return found

    monkeypatch.setattr(socket, "getaddrinfo", answer_later)
    broker.script = acking
    with new_publisher(f"amqp://guest:guest@rabbit.test:{broker.port}/", connect_timeout=0.1) as publisher:
        confirmation = publisher.submit(Message(b"x"), routing_key=KEY)
        wait_until(lambda: caplog.text.count("(connecting)") >= 5, timeout=30, what="failed attempts")
        assert sum(thread.name == "reliable_mq host name" for thread in threading.enumerate()) == 1
        up.set()
        confirmation.result(30)


class WithoutIPv6(socket.socket):
    """The sockets of a kernel without IPv6."""

    def __init__(self, family: int = -1, *rest: Any, **named: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *rest, **named)


def test_an_address_of_a_family_the_kernel_lacks_is_passed_over(
    broker: ScriptedBroker, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes last, as from a resolver, and is the first of the second attempt."""
    addresses = [(socket.AF_INET, ("127.0.0.1", broker.port)), (socket.AF_INET6, ("::1", broker.port, 0, 0))]
    let_resolve(monkeypatch, "rabbit.test", addresses)
    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    broker.script = acking
    with new_publisher(f"amqp://guest:guest@rabbit.test:{broker.port}/") as publisher:
        publisher.publish(Message(b"1"), routing_key=KEY, timeout=10)
        broker.connection.cut()
        publisher.publish(Message(b"2"), routing_key=KEY, timeout=10)


def test_a_host_only_of_a_family_the_kernel_lacks_is_unavailable(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_resolve(monkeypatch, "rabbit.test", [(socket.AF_INET6, ("::1", broker.port, 0, 0))])
    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    url = f"amqp://guest:guest@rabbit.test:{broker.port}/"
    with pytest.raises(BrokerUnavailable, match=r"^rabbit\.test:\d+: Address family not supported by protocol$"):
        Publisher(url, reconnect_stop=lambda _: True).connect()


@pytest.mark.slow
def test_counts_go_on_when_a_relay_opens_another_channel(
    broker: ScriptedBroker, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """The first one has given up."""
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"reliable_mq_publisher_{name}", {"publisher": "shop", **labels})

    def confirmed() -> float | None:
        return value("settled_total", outcome="confirmed")

    broker.script = acking
    outbox = SQLiteOutbox(tmp_path / "outbox.db")
    with new_publisher(outbox=outbox, registry=registry, name="shop", reconnect_stop=lambda _: True) as publisher:
        publisher.publish(Message(b"1"), routing_key=KEY)
        wait_until(lambda: confirmed() == 1, timeout=30, what="a confirm")
        broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
        broker.connection.cut()
        wait_until(lambda: value("connected") == 0, timeout=30, what="the end of the channel")
        publisher.publish(Message(b"2"), routing_key=KEY)
        broker.wait(lambda: broker.seen.count("Connection.Open") > 3, "attempts of other channels")
        assert (confirmed(), value("connected")) == (1, 0)
        broker.refusals.clear()
        wait_until(lambda: confirmed() == 2, timeout=30, what=lambda: f"another confirm, not {confirmed()}")
        assert (value("connected"), value("reconnects_total")) == (1, 1)
        assert publisher.statistics.confirmed == 2


def test_a_row_that_is_tried_again_is_no_message_given_up(
    broker: ScriptedBroker, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """No caller has an error. The metrics of the outbox count the attempt."""
    registry = CollectorRegistry()

    def value(name: str, outcome: str) -> float | None:
        labels = {"publisher": "shop", "outcome": outcome}
        return registry.get_sample_value(f"reliable_mq_{name}_total", labels)

    with new_publisher(outbox=SQLiteOutbox(tmp_path / "outbox.db"), registry=registry, name="shop") as publisher:
        publisher.publish(Message(b"x"), routing_key=KEY)
        first = broker.wait_published(1)[0]
        first.channel.nack(first.number)
        second = broker.wait_published(2)[1]
        second.channel.ack(second.number)
        publisher.flush(30)
        assert (value("outbox_relayed", "delayed"), value("outbox_relayed", "confirmed")) == (1, 1)
        assert (value("publisher_settled", "nacked"), value("publisher_settled", "confirmed")) == (0, 1)
        assert (publisher.statistics.nacked, publisher.statistics.nacks) == (0, 1)
