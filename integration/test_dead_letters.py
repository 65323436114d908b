"""Dead letters on both lines: reading leaves no trace, and replays lose nothing."""

from __future__ import annotations

import io
import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from integration.support.leaders import suspend_leader
from reliable_mq import (
    Binding,
    ConfigurationError,
    ConsumeError,
    Consumer,
    DeadLetter,
    Exchange,
    Message,
    Publisher,
    Queue,
    RetryPolicy,
    StaleDelivery,
    TopologyMismatch,
    UsageError,
)
from reliable_mq.codec import encode_properties, join_properties, rewrite_properties
from reliable_mq.core import headers
from reliable_mq.deadletters import DeadLetterQueue, Filter, ImportReport, Origin, Target
from reliable_mq.deadletters.replay import RateLimit
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq import Delivery
    from reliable_mq.core.consumer.delivery import ChannelGeneration
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

ORDERS = Queue("orders")


class Unpaid(Exception):
    """The exception of the handlers here."""


def publish(vhost: VirtualHost, messages: Sequence[Message], queue: Queue = ORDERS, routing_key: str = "") -> None:
    with Publisher(vhost.url, topology=[queue]) as publisher:
        assert publisher.publish_many(messages, routing_key=routing_key or queue.name).ok


def dead_letters(vhost: VirtualHost, messages: Sequence[Message]) -> None:
    """Let a consumer give messages up: even bodies raise Unpaid, others DeadLetter."""
    publish(vhost, messages)

    def handle(delivery: Delivery) -> None:
        if int(delivery.body) % 2:
            raise DeadLetter(f"order {int(delivery.body)} is odd")
        raise Unpaid(f"order {int(delivery.body)}")

    with Consumer(vhost.url, ORDERS, handle, retry=RetryPolicy(1), name="shop") as consumer:
        wait_until(lambda: consumer.statistics.dead_lettered == len(messages), timeout=60, what="dead letters")


def numbered(count: int) -> list[Message]:
    return [Message(str(number).encode(), message_id=f"id-{number}", headers={"n": number}) for number in range(count)]


def bodies(vhost: VirtualHost, queue: str, count: int) -> list[bytes]:
    with Consumer(vhost.url, queue, None, prefetch=0, dead_letter=None) as consumer:
        found: list[bytes] = []
        while len(found) < count:
            with consumer.get(count - len(found), timeout=30) as deliveries:
                if not deliveries:
                    break
                found += [delivery.body for delivery in deliveries]
        return found


@pytest.fixture
def all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer until a queue has its messages back, as it may have a slow disk."""
    monkeypatch.setattr("reliable_mq.deadletters.channel._SEEN", 60.0)


def test_a_dead_letter_tells_what_happened(any_vhost: VirtualHost) -> None:
    began = datetime.now(UTC) - timedelta(seconds=2)
    dead_letters(any_vhost, numbered(2))
    with DeadLetterQueue(any_vhost.url, ORDERS) as dead:
        assert (dead.name, len(dead)) == ("orders.dead", 2)
        even, odd = dead.browse()
    assert (even.position, even.body, even.message_id, even.headers["n"]) == (1, b"0", "id-0", 0)
    assert even.origin == ("orders", "", "orders")
    assert even.exception_type.endswith("Unpaid")
    assert (even.exception_message, even.attempts, even.consumer) == ("order 0", 1, "shop")
    assert even.died_at is not None
    assert began <= even.died_at <= datetime.now(UTC)
    assert odd.reason == "order 1 is odd"
    assert odd.package_version


def test_dead_letters_are_counted_when_the_leader_is_late(any_vhost: VirtualHost) -> None:
    """A leader that does not respond makes RabbitMQ report no messages or consumers."""
    publish(any_vhost, numbered(5), Queue("orders.dead", dead_letter=None))
    with DeadLetterQueue(any_vhost.url, "orders.dead") as dead:
        suspend_leader(any_vhost, "orders.dead", 1.0)
        assert len(dead) == 5


@pytest.mark.usefixtures("all_seen")
def test_looking_leaves_the_queue_as_it_was(any_vhost: VirtualHost) -> None:
    """List, statistics and export repeatedly return the same messages in order."""
    dead_letters(any_vhost, numbered(230))
    exports = []
    with DeadLetterQueue(any_vhost.url, ORDERS) as dead:
        for _ in range(3):
            statistics = dead.statistics()
            assert (statistics.messages, statistics.by_queue) == (230, {"orders": 230})
            assert sorted(statistics.by_cause.values()) == [115, 115]
            exports.append(io.BytesIO())
            assert dead.export(exports[-1]) == 230
        assert len(dead) == 230
    lines = [[json.loads(line) for line in export.getvalue().splitlines()] for export in exports]
    for line in (line for export in lines for line in export):
        del line["redelivered"]
    assert lines[0] == lines[1] == lines[2]
    assert "x-delivery-count" not in lines[2][0]["headers"]
    assert bodies(any_vhost, "orders.dead", 230) == [str(number).encode() for number in range(230)]


def test_browsing_some_keeps_all_though_requeues_move_them(
    any_vhost: VirtualHost,
) -> None:
    """Requeued messages go behind new ones (4.0) or earlier requeued ones (4.3)."""
    dead_letters(any_vhost, numbered(30))
    with DeadLetterQueue(any_vhost.url, ORDERS) as dead:
        assert [message.body for message in dead.browse(limit=5)] == [b"0", b"1", b"2", b"3", b"4"]
        for _ in range(5):
            assert len(list(dead.browse(limit=5))) == 5
        assert sorted(int(message.body) for message in dead.browse()) == list(range(30))


@pytest.mark.usefixtures("all_seen")
@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_a_look_asks_once_a_batch_and_not_for_every_message(any_vhost: VirtualHost, kind: str) -> None:
    """A quorum queue scans all unacked gets at each further get."""
    queue = Queue("letters", type=kind, dead_letter=None)  # type: ignore[arg-type]
    publish(any_vhost, numbered(430), queue)
    with DeadLetterQueue(any_vhost.url, "letters") as dead:
        for _ in range(2):
            taken = [(message.body, message.delivery.consumer_tag) for message in dead.browse()]
            assert [int(body) for body, _ in taken] == list(range(430))
            assert sum(not consumer for _, consumer in taken) == 3
        assert [len(list(dead.browse(limit=limit))) for limit in (1, 2, 5)] == [1, 2, 5]
        assert dead.purge(Filter(headers={"n": "17"})) == 1
        assert len(dead) == 429


def cpu_seconds(vhost: VirtualHost) -> float:
    """Return the CPU time of this process and of the broker."""
    return time.process_time() + vhost.broker.cpu_seconds


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_100_000_dead_letters_are_counted_by_exception_in_time(
    any_vhost: VirtualHost, kind: str, report: Callable[[str], None]
) -> None:
    """This takes less than a minute, with headers as consumers publish them."""
    dead_letters(any_vhost, numbered(1))
    with DeadLetterQueue(any_vhost.url, ORDERS) as dead:
        [letter] = dead.browse()
    ours = {name: value for name, value in letter.headers.items() if name.startswith(headers.PREFIX)}
    assert ours[headers.EXCEPTION_TYPE].endswith("Unpaid")
    causes = [f"shop.{name}" for name in ("Unpaid", "Unpaid", "OutOfStock", "UnknownAddress")]
    letters = [
        Message(b"%d" % number, headers={**ours, headers.EXCEPTION_TYPE: causes[number % len(causes)]})
        for number in range(100_000)
    ]
    publish(any_vhost, letters, Queue("letters", type=kind, dead_letter=None))  # type: ignore[arg-type]
    with DeadLetterQueue(any_vhost.url, "letters") as dead:
        worked, began = cpu_seconds(any_vhost), time.monotonic()
        counted = dead.statistics()
        seconds, worked = time.monotonic() - began, cpu_seconds(any_vhost) - worked
    report(f"counted in {seconds:.1f} s, with {worked:.1f} s of CPU time")
    assert counted.by_cause == {"shop.Unpaid": 50_000, "shop.OutOfStock": 25_000, "shop.UnknownAddress": 25_000}
    assert counted.by_queue == {"orders": 100_000}
    assert min(seconds, worked) < 60, "a busy machine takes longer, but has no more to do"


@pytest.mark.usefixtures("all_seen")
def test_a_classic_queue_has_its_letters_back_by_one_command(
    any_vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """The letters return in order, behind those that were acked.

    The channel that is closed for it does not count as lost.
    """
    publish(any_vhost, numbered(430), Queue("letters", type="classic", dead_letter=None))
    with DeadLetterQueue(any_vhost.url, "letters") as dead:
        channel = dead._channel
        for _ in range(2):
            before = channel._source
            assert [int(message.body) for message in dead.browse()] == list(range(430))
            assert len(dead) == 430
            assert channel._source is not before
        assert dead.purge(Filter(headers={"n": "217"})) == 1
        assert [int(message.body) for message in dead.browse(limit=210)] == list(range(210))
        assert [int(message.body) for message in dead.browse()] == [n for n in range(430) if n != 217]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.usefixtures("all_seen")
def test_a_batch_of_large_letters_is_small(any_vhost: VirtualHost) -> None:
    """Batches are limited in bytes, so that browsing does not take gigabytes."""
    letters = [Message(bytes([number]) * 4 * 1024 * 1024) for number in range(20)]
    publish(any_vhost, letters, Queue("letters", dead_letter=None))
    read = []
    with DeadLetterQueue(any_vhost.url, "letters") as dead:
        browsed = dead.browse(progress=lambda count, total: read.append((count, total)))
        assert [message.body[0] for message in browsed] == list(range(20))
        assert len(dead) == 20
    assert read == [(8, 20), (16, 20), (20, 20)]


def test_browsing_does_not_delete_an_auto_delete_queue(any_vhost: VirtualHost) -> None:
    """The queue gets no consumer, and all messages keep their places."""
    with any_vhost.connect() as connection:
        connection.channel().queue_declare("letters", durable=True, auto_delete=True)
    with Publisher(any_vhost.url) as publisher:
        assert publisher.publish_many(numbered(50), routing_key="letters").ok
    with DeadLetterQueue(any_vhost.url, "letters") as dead:
        for _ in range(2):
            taken = list(dead.browse())
            assert [int(message.body) for message in taken] == list(range(50))
            assert not any(message.delivery.consumer_tag for message in taken)
    assert any_vhost.live_counts() == {"letters": 50}


def test_a_queue_that_is_not_durable_may_be_looked_at(vhost_40: VirtualHost) -> None:
    """RabbitMQ 4.3 has only exclusive queues of this kind."""
    with vhost_40.connect() as connection:
        connection.channel().queue_declare("letters", durable=False)
    with Publisher(vhost_40.url) as publisher:
        assert publisher.publish_many(numbered(5), routing_key="letters").ok
    with DeadLetterQueue(vhost_40.url, "letters") as dead:
        assert [bool(message.delivery.consumer_tag) for message in dead.browse()] == [False, True, True, True, True]
        assert len(dead) == 5


def test_who_may_not_configure_a_queue_may_look_at_it(
    any_vhost: VirtualHost, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are read one by one, with a log line if that may take long."""
    monkeypatch.setattr("reliable_mq.deadletters.queue._MANY", 20)
    publish(any_vhost, numbered(70), Queue("letters", dead_letter=None))
    name = f"reader-{any_vhost.name}"
    api = any_vhost.broker.management
    api.call("PUT", "users", name, body={"password": "secret", "tags": ""})
    body = {"configure": "^$", "write": "", "read": ".*"}
    api.call("PUT", "permissions", any_vhost.name, name, body=body)
    with DeadLetterQueue(any_vhost.url.replace("guest:guest", f"{name}:secret"), "letters") as dead:
        for _ in range(2):
            assert [int(message.body) for message in dead.browse()] == list(range(70))
    (said,) = (record.getMessage() for record in caplog.records if record.name == "reliable_mq.deadletters.queue")
    assert "reading the 70 messages of queue" in said
    api.call("DELETE", "users", name)


@pytest.mark.usefixtures("all_seen")
def test_what_others_take_meanwhile_is_not_waited_for(any_vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker reports 30 messages, of which others take 25 before the read."""
    monkeypatch.setattr("reliable_mq.deadletters.channel._QUIET", 0.2)
    publish(any_vhost, numbered(30), Queue("letters", dead_letter=None))
    with DeadLetterQueue(any_vhost.url, "letters") as dead, any_vhost.connect() as connection:
        channel = connection.channel()
        take = dead._channel._consume

        def late(source: ChannelGeneration, wanted: int) -> None:
            for _ in range(25):
                assert channel.basic_get("letters")[0] is not None
            take(source, wanted)

        monkeypatch.setattr(dead._channel, "_consume", late)
        assert [message.body for message in dead.browse()] == [b"0", b"26", b"27", b"28", b"29"]
        assert len(dead) == 5


def test_a_look_whose_connection_is_lost_loses_nothing(any_vhost: VirtualHost) -> None:
    publish(any_vhost, numbered(450), Queue("letters", dead_letter=None))
    with DeadLetterQueue(any_vhost.url, "letters") as dead:
        browsing = dead.browse()
        for _ in range(250):
            next(browsing)
        assert any_vhost.close_connections() == 1
        with pytest.raises(StaleDelivery):
            list(browsing)
        wait_until(lambda: len(dead) == 450, timeout=20, what="everything back")
        assert sorted(int(message.body) for message in dead.browse()) == list(range(450))


@pytest.mark.parametrize("broker", ["newest"], indirect=True)
def test_a_replay_knows_what_was_cut_off_from_what_was_looked_at(vhost: VirtualHost) -> None:
    """This is for quorum queues of RabbitMQ 4.3.

    Headers that the message had before are ignored.
    """
    known = {headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders"}
    publish(vhost, [Message(b"%d" % number, headers=known) for number in range(30)], ORDERS, "orders.dead")
    with DeadLetterQueue(vhost.url, ORDERS) as dead:
        assert dead.statistics().messages == 30
        browsing = dead.browse(limit=7)
        next(browsing)
        assert vhost.close_connections() == 1
        browsing.close()  # type: ignore[attr-defined]
        wait_until(lambda: len(dead) == 30, timeout=20, what="everything back")
        assert dead.statistics().messages == 30
        report = dead.replay()
        assert (report.replayed, report.delivered_before, report.possible_duplicates) == (30, 30, 7)


@pytest.mark.usefixtures("all_seen")
def test_a_browse_that_is_left_early_requeues_what_it_took(vhost: VirtualHost) -> None:
    dead_letters(vhost, numbered(3))
    with DeadLetterQueue(vhost.url, ORDERS) as dead:
        browsing = dead.browse()
        next(browsing)
        assert len(dead) == 0
        with pytest.raises(UsageError, match=r"browse\(\) is in progress: exhaust or close it before replay"):
            dead.replay()
        browsing.close()  # type: ignore[attr-defined]
        assert len(dead) == 3


@pytest.mark.usefixtures("all_seen")
def test_what_is_replayed_is_handled_with_all_its_attempts(any_vhost: VirtualHost) -> None:
    """The copy is the original byte for byte, except for the counts of failures."""
    store = MemoryStore()
    failing = True
    seen: list[tuple[bytes, int, object]] = []

    def handle(delivery: Delivery) -> None:
        if failing:
            raise Unpaid("no")
        seen.append((delivery.body, delivery.attempt, dict(delivery.headers).get("n")))

    publish(any_vhost, numbered(20))
    retry = RetryPolicy(3, delays=(0.01,))
    with Consumer(any_vhost.url, ORDERS, handle, retry=retry, idempotency=store) as consumer:
        wait_until(lambda: consumer.statistics.dead_lettered == 20, timeout=20, what="dead letters")
    failing = False
    with DeadLetterQueue(any_vhost.url, ORDERS) as dead:
        assert dead.replay(dry_run=True).replayed == 20
        assert len(dead) == 20
        report = dead.replay(idempotency=store)
        assert (report.examined, report.replayed, report.failed, report.delivered_before) == (20, 20, 0, 20)
        assert report.possible_duplicates == (None if any_vhost.broker.version.startswith("4.0.") else 0)
        assert len(dead) == 0
    with Consumer(any_vhost.url, ORDERS, handle, retry=retry, idempotency=store):
        wait_until(lambda: len(seen) == 20, timeout=20, what="everything handled")
    assert sorted(seen) == sorted((str(number).encode(), 1, number) for number in range(20))
    assert any_vhost.live_counts()["orders.dead"] == 0


def test_a_replay_without_the_store_keeps_the_stored_attempts(vhost: VirtualHost) -> None:
    """A store that has counted all attempts dead-letters the copy at once.

    The option `idempotency` resets them.
    """
    store = MemoryStore()
    calls: list[bytes] = []

    def handle(delivery: Delivery) -> None:
        calls.append(delivery.body)
        raise Unpaid("no")

    publish(vhost, numbered(1))
    with Consumer(vhost.url, ORDERS, handle, retry=RetryPolicy(1), idempotency=store) as consumer:
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=20, what="a dead letter")
        for known, expected in ((None, 1), (store, 2)):
            with DeadLetterQueue(vhost.url, ORDERS) as dead:
                assert dead.replay(idempotency=known).replayed == 1
            wait_until(lambda: vhost.live_counts()["orders.dead"] == 1, timeout=20, what="a dead letter")
            assert len(calls) == expected


def test_a_copy_that_dies_in_another_queue_is_of_that_queue(vhost: VirtualHost) -> None:
    """It was published to both queues and died in one; its replay as published dies in the other, twice.

    Before the last death it waits in a delay queue.
    """
    events, mail = Exchange("events"), Queue("mail")
    bindings = [Binding(events, queue, routing_key="paid") for queue in (ORDERS, mail)]

    def fail(_delivery: Delivery) -> None:
        raise Unpaid("no")

    def origin_of_death(queue: Queue, retry: RetryPolicy, **replay: bool) -> Origin | None:
        with Consumer(vhost.url, queue, fail, retry=retry) as consumer:
            wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=20, what="a dead letter")
        with DeadLetterQueue(vhost.url, queue) as dead:
            (letter,) = dead.browse()
            assert dead.replay(**replay).replayed == 1
        return letter.origin

    with Publisher(vhost.url, topology=[events, ORDERS, mail, *bindings]) as publisher:
        publisher.publish(Message(b""), exchange="events", routing_key="paid")
    assert bodies(vhost, "mail", 1) == [b""]
    assert origin_of_death(ORDERS, RetryPolicy(1), as_published=True) == ("orders", "events", "paid")
    assert bodies(vhost, "orders", 1) == [b""]
    assert origin_of_death(mail, RetryPolicy(1)) == ("mail", "events", "paid")
    assert origin_of_death(mail, RetryPolicy(2, delays=(0.01,))) == ("mail", "events", "paid")
    assert (bodies(vhost, "mail", 1), vhost.live_counts()["orders"]) == ([b""], 0)


def test_only_what_is_chosen_moves_and_the_rest_keeps_its_order(any_vhost: VirtualHost) -> None:
    dead_letters(any_vhost, numbered(250))
    with DeadLetterQueue(any_vhost.url, ORDERS) as dead:
        assert dead.replay(Filter(message_ids=["id-7", "id-249", "id-none"])).replayed == 2
        assert dead.replay(Filter(headers={"n": "9"}), to="orders").replayed == 1
        assert dead.replay(Filter(older_than=3600)).replayed == 0
        assert dead.purge(Filter(reason="ORDER 11 IS")) == 1
        assert dead.purge(Filter(queue="orders", newer_than=3600, exception="*", headers={"n": "4"})) == 1
    assert bodies(any_vhost, "orders", 3) == [b"7", b"249", b"9"]
    assert bodies(any_vhost, "orders.dead", 245) == [str(n).encode() for n in range(250) if n not in {4, 7, 9, 11, 249}]


@pytest.mark.usefixtures("all_seen")
def test_a_limit_is_kept(any_vhost: VirtualHost) -> None:
    dead_letters(any_vhost, numbered(30))
    with DeadLetterQueue(any_vhost.url, ORDERS) as dead:
        assert dead.replay(Filter(exception="*.Unpaid"), limit=3).replayed == 3
        assert dead.purge(limit=2) == 2
        assert dead.export(io.BytesIO(), limit=4) == 4
        assert len(dead) == 25
    assert len(bodies(any_vhost, "orders", 3)) == 3


FOREIGN = {
    "headers": {"float": 0.75, "tags": ["a", None, {"deep": b"\xff"}], "x-mine": 1},
    "content_type": "text/plain",
    "correlation_id": "c",
    "priority": 3,
}


@pytest.mark.parametrize("strategy", ["at-most-once", "at-least-once"])
def test_dead_letters_of_others_go_back_by_what_the_broker_says(any_vhost: VirtualHost, strategy: str) -> None:
    """A client rejected the messages, and RabbitMQ dead-lettered them.

    The replay reads x-death and does not send it.
    """
    work = {"x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "lost"}
    work |= {"x-dead-letter-strategy": strategy, "x-overflow": "reject-publish"}
    message = Message(b"\xff body", user_id="guest", expiration=3600, **FOREIGN)  # type: ignore[arg-type]
    with any_vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("lost", durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_declare("work", durable=True, arguments=work)
        channel.exchange_declare("shop", "topic", durable=True)
        channel.queue_bind("work", "shop", "order.*")
        with Publisher(any_vhost.url) as publisher:
            publisher.publish(message, exchange="shop", routing_key="order.new")
        method, _, _ = channel.basic_get("work")
        channel.basic_reject(method.delivery_tag, requeue=False)
    wait_until(lambda: any_vhost.live_counts()["lost"] == 1, timeout=20, what="the dead letter")
    with DeadLetterQueue(any_vhost.url, "lost") as dead:
        (letter,) = dead.browse()
        assert letter.origin == ("work", "shop", "order.new")
        assert (letter.reason, letter.attempts, letter.exception_type) == ("rejected", None, "")
        assert letter.died_at is not None
        assert dead.replay(as_published=True).replayed == 1
    with Consumer(any_vhost.url, "work", None, dead_letter=None) as consumer, consumer.get(1, timeout=10) as deliveries:
        (copy,) = deliveries
        assert (copy.body, copy.exchange, copy.routing_key) == (message.body, "shop", "order.new")
        theirs = {name: value for name, value in copy.headers.items() if not name.startswith(headers.PREFIX)}
        assert theirs == FOREIGN["headers"]
        assert copy.headers[headers.ORIGINAL_USER_ID] == "guest"
        assert (copy.message_id, copy.priority, copy.user_id) == (message.message_id, 3, None)


def test_what_was_rejected_after_a_retry_goes_back_to_its_queue(any_vhost: VirtualHost) -> None:
    """RabbitMQ says that it died first in the delay queue, which no longer exists."""
    store = MemoryStore()
    calls: list[tuple[bytes, int]] = []

    def fail(delivery: Delivery) -> None:
        calls.append((delivery.body, delivery.attempt))
        raise Unpaid("no")

    routed = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dead"}
    work, shop = Queue("orders", arguments=routed), Exchange("shop")
    topology = [Queue("orders.dead", dead_letter=None), work, shop, Binding(shop, work, routing_key="new")]
    message = Message(b"1", user_id="guest", expiration=3600)
    with Publisher(any_vhost.url, topology=topology) as publisher:
        publisher.publish(message, exchange="shop", routing_key="new")
    retry = RetryPolicy(2, delays=(0.2,))
    with (
        Consumer(any_vhost.url, work, fail, retry=retry, dead_letter=None, idempotency=store),
        DeadLetterQueue(any_vhost.url, "orders.dead") as dead,
    ):
        wait_until(lambda: any_vhost.live_counts()["orders.dead"] == 1, timeout=20, what="the dead letter")
        any_vhost.delete_queue("orders.retry.200")
        (letter,) = dead.browse(Filter(queue="orders", exception="*.Unpaid"))
        assert letter.origin == ("orders", "shop", "new")
        assert (letter.reason, letter.exception_message, letter.attempts) == ("rejected", "no", 1)
        copy = letter.replayed().headers
        assert (copy[headers.ORIGINAL_USER_ID], copy[headers.ORIGINAL_EXPIRATION]) == ("guest", "3600000")
        assert dead.replay(idempotency=store).ok
        wait_until(lambda: len(calls) == 4, timeout=20, what="two more attempts")
        wait_until(lambda: any_vhost.live_counts()["orders.dead"] == 1, timeout=20, what="the dead letter")
        assert [one.origin for one in dead.browse()] == [letter.origin]
    assert calls == [(b"1", 1), (b"1", 2)] * 2


def test_what_cannot_go_back_stays(any_vhost: VirtualHost) -> None:
    """Messages without an origin, with a missing one, or of a newer version stay.

    They are reported, and the others are replayed.
    """
    newer = {headers.FORMAT: 99, headers.ORIGINAL_QUEUE: "orders"}
    gone = {headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "no such queue"}
    known = {headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders"}
    heads = (newer, None, gone, known)
    letters = [Message(str(number).encode(), headers=head) for number, head in enumerate(heads)]
    publish(any_vhost, letters, ORDERS, "orders.dead")
    with DeadLetterQueue(any_vhost.url, "orders.dead") as dead:
        report = dead.replay()
        assert (report.examined, report.replayed, report.failed, report.ok) == (4, 1, 3, False)
        told = {message.body: str(error) for message, error in report.failures}
        assert "format 99" in told[b"0"]
        assert "its origin is unknown" in told[b"1"]
        assert "312 NO_ROUTE" in told[b"2"]
        assert [message.body for message in dead.browse()] == [b"0", b"1", b"2"]
        assert dead.replay(Filter(message_ids=[letters[1].message_id]), to=Target("amq.direct", "nowhere")).failed == 1
        assert dead.replay(Filter(message_ids=[letters[1].message_id]), to="orders").replayed == 1


def test_a_replay_goes_on_after_an_ack_costs_its_connection(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Messages whose acks were lost are acked when they are redelivered."""
    dead_letters(vhost, numbered(10))
    proxy = fault_proxy(vhost.url)
    with DeadLetterQueue(proxy.url, ORDERS) as dead:
        proxy.cut_after(5, "to_broker", of="basic.ack", times=3)
        assert dead.replay().replayed == 10
        assert len(dead) == 0
    assert proxy.connections > 3
    assert sorted(bodies(vhost, "orders", 10)) == [str(number).encode() for number in range(10)]


def test_a_replay_goes_on_after_a_half_open_connection(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """No bytes arrive any more, which heartbeats detect. RabbitMQ holds messages for the connection until then."""
    known = {headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders"}
    publish(vhost, [Message(b"%d" % number, headers=known) for number in range(600)], ORDERS, "orders.dead")
    proxy = fault_proxy(vhost.url)

    def cut(done: int, _total: int) -> None:
        if done == 200:
            proxy.black_hole(new_connections=False)

    with DeadLetterQueue(proxy.url, ORDERS, heartbeat=5) as dead:
        report = dead.replay(progress=cut)
        assert (report.replayed, report.failed, len(dead)) == (600, 0, 0)
    assert {int(body) for _, body in vhost.bodies("orders")} == set(range(600))


def test_equal_letters_are_all_replayed_over_a_lost_connection(
    any_vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """The broker has read the acks of the published letters.

    Equal letters that are redelivered then are different ones.
    """
    known = encode_properties(Message(b"", headers={headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders"}))
    without_id = rewrite_properties(known, clear=("message_id",))
    orders = Queue("orders", dead_letter=Queue("orders.dead", type="classic", dead_letter=None))
    publish(any_vhost, [Message.from_wire(b"tick", without_id) for _ in range(6)], orders, "orders.dead")
    proxy = fault_proxy(any_vhost.url)
    with DeadLetterQueue(proxy.url, ORDERS) as dead:
        assert dead.statistics().messages == 6  # each is redelivered from then on
        proxy.cut_after(3, "to_broker", of="basic.ack", reset=False)
        dead.replay(rate=3)
        assert (proxy.connections > 2, len(dead)) == (True, 0)
    assert bodies(any_vhost, "orders", 6) == [b"tick"] * 6


def test_a_rate_is_kept(vhost: VirtualHost) -> None:
    dead_letters(vhost, numbered(30))
    with DeadLetterQueue(vhost.url, ORDERS) as dead:
        began = time.monotonic()
        seen: list[tuple[int, int]] = []
        assert dead.replay(rate=20, progress=lambda done, total: seen.append((done, total))).replayed == 30
        assert 1.4 <= time.monotonic() - began < 15
    assert seen == [(20, 30), (30, 30)]


def test_a_rate_is_not_exceeded_after_many_that_do_not_match(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that other messages took is not made up for."""
    published: list[float] = []
    note = RateLimit.published

    def noted(limit: RateLimit, now: float) -> None:
        published.append(now)
        note(limit, now)

    monkeypatch.setattr(RateLimit, "published", noted)  # messages on the way may be delayed and arrive together
    known = {headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders"}
    others = [Message(b"", headers=known) for _ in range(1000)]
    meant = [Message(b"", headers={**known, "meant": True}) for _ in range(150)]
    publish(vhost, [*others, *meant], ORDERS, "orders.dead")
    with DeadLetterQueue(vhost.url, ORDERS) as dead:
        assert dead.replay(Filter(headers={"meant": "true"}), rate=50).replayed == 150
    assert len(bodies(vhost, "orders", 150)) == len(published) == 150
    assert max(sum(first <= time < first + 1 for time in published) for first in published) <= 51
    assert published[-1] - published[0] >= 2.9


RAW = [
    join_properties({}),
    join_properties({"timestamp": (1_700_000_000_000).to_bytes(8), "delivery_mode": b"\2"}),
    join_properties({"headers": b"\0\0\0\7\1ff\x3f\x40\0\0", "message_id": b"\2id", "cluster_id": b"\1c"}),
    join_properties({"message_id": b"\2\xff\xfe", "content_type": b"\1\xfe"}),
    encode_properties(Message(b"", headers={"bytes": b"\xff\0", "f": 0.1}, expiration=3600, persistent=False)),
    encode_properties(Message(b"", headers={headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders"})),
]


def test_an_export_is_imported_byte_for_byte(any_vhost: VirtualHost) -> None:
    """Bodies are not text, and properties have no JSON form.

    Earlier reads do not matter.
    """
    sent = [(body, raw) for raw in RAW for body in (b"text \xc3\xa9 \n", b"\xff\x00\n\x80", b"")]
    publish(any_vhost, [Message.from_wire(body, raw) for body, raw in sent], Queue("dead", dead_letter=None))
    publish(any_vhost, [], Queue("copies", dead_letter=None))
    file = io.BytesIO()
    with DeadLetterQueue(any_vhost.url, "dead") as dead:
        assert dead.statistics().messages == len(sent)
        assert dead.export(file) == len(sent)
    file.seek(0)
    with DeadLetterQueue(any_vhost.url, "copies") as dead:
        assert dead.import_lines(file) == ImportReport(len(sent), len(sent))
    with Consumer(any_vhost.url, "copies", None) as consumer, consumer.get(len(sent), timeout=10) as deliveries:
        assert sorted((each.body, each.properties) for each in deliveries) == sorted(sent)


def test_lines_that_cannot_be_imported_are_told_by_their_number(vhost: VirtualHost) -> None:
    publish(vhost, [])
    lines = [b'{"body": "a"}', b"{", b'{"body": "b", "headers": {"CC": ["x"]}}', b'{"body": "c", "user_id": "nobody"}']
    with DeadLetterQueue(vhost.url, ORDERS) as dead:
        report = dead.import_lines(lines)
        assert (report.confirmed, [line for line, _ in report.failures]) == (1, [2, 3, 4])
        for (_, error), text in zip(report.failures, ("not JSON", "CC or BCC", "406"), strict=True):
            assert text in str(error)
        # Messages that shared the closed channel are published again.
        assert {message.body for message in dead.browse()} == {b"a"}


def test_a_queue_that_one_cannot_get_from_says_why(any_vhost: VirtualHost) -> None:
    publish(any_vhost, [Message(b"")], Queue("stream", type="stream"))
    with pytest.raises(TopologyMismatch, match="no queue 'missing'"), DeadLetterQueue(any_vhost.url, "missing"):
        pass
    with DeadLetterQueue(any_vhost.url, "stream") as dead, pytest.raises(ConsumeError, match="540"):
        wait_until(lambda: list(dead.browse()), timeout=10, what="an error")


def test_a_wrong_argument_is_refused_by_its_name(vhost: VirtualHost) -> None:
    publish(vhost, [])
    with DeadLetterQueue(vhost.url, ORDERS) as dead:
        for wrong in ({"limit": 0}, {"rate": 0}, {"to": "orders.dead"}, {"idempotency": object()}):
            with pytest.raises(ConfigurationError, match=next(iter(wrong))):
                dead.replay(**wrong)  # type: ignore[arg-type]
        for nowhere in ("", Target("", "")):
            with pytest.raises(ConfigurationError, match="to is empty"):
                dead.replay(to=nowhere, dry_run=True)
        with pytest.raises(ConfigurationError, match="contradict"):
            dead.replay(to="orders", as_published=True)


@pytest.mark.usefixtures("all_seen")
def test_on_40_browsing_stops_before_the_delivery_limit_drops(vhost_40: VirtualHost) -> None:
    """RabbitMQ 4.0 counts requeues and drops at 20.

    RabbitMQ 4.3 does not count them, and a queue without a limit drops nothing.
    """
    with vhost_40.connect() as connection:
        connection.channel().queue_declare("limited", durable=True, arguments={"x-queue-type": "quorum"})
    for name in ("limited", "orders.dead"):
        publish(vhost_40, numbered(2), ORDERS, name)
        with DeadLetterQueue(vhost_40.url, name) as dead:
            for look in range(18):
                if name == "limited" and look >= 16:
                    with pytest.raises(ConsumeError, match="highest count is 16;"):
                        list(dead.browse())
                    break
                assert len(list(dead.browse())) == 2
            assert len(dead) == 2


@pytest.mark.usefixtures("all_seen")
def test_on_40_a_low_delivery_limit_drops_nothing(vhost_40: VirtualHost) -> None:
    """A refused operation counts, too, so it may be repeated."""
    limited = {"x-queue-type": "quorum", "x-delivery-limit": 5, "x-max-length": 1000}
    with vhost_40.connect() as connection:
        connection.channel().queue_declare("limited", durable=True, arguments=limited)
    publish(vhost_40, numbered(2), ORDERS, "limited")
    with DeadLetterQueue(vhost_40.url, "limited") as dead:
        assert dead.counts_reads
        assert len(list(dead.browse())) == 2
        for count in (1, 2, 3, 4):
            with pytest.raises(ConsumeError, match=rf"delivery limit \(5, .* highest count is {count};"):
                list(dead.browse())
            assert len(dead) == 2


@pytest.mark.parametrize("broker", ["newest"], indirect=True)
def test_lost_connections_stop_before_the_delivery_limit_drops(vhost: VirtualHost) -> None:
    """RabbitMQ 4.3 counts a connection that is lost while it holds messages, but no requeue."""
    with vhost.connect() as connection:
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": 20}
        connection.channel().queue_declare("limited", durable=True, arguments=arguments)
    publish(vhost, numbered(2), ORDERS, "limited")
    with DeadLetterQueue(vhost.url, "limited") as dead:
        assert not dead.counts_reads
        for _ in range(16):
            assert len(list(dead.browse())) == 2
            browsing = dead.browse()
            next(browsing)
            assert vhost.close_connections() == 1
            browsing.close()  # type: ignore[attr-defined]
            wait_until(lambda: len(dead) == 2, timeout=20, what="everything back")
        for _ in range(6):
            with pytest.raises(ConsumeError, match=r"lost connection .* limit \(20, .* highest count is 16;"):
                list(dead.browse())
            with pytest.raises(ConsumeError, match="delivery limit"):
                dead.replay(to="orders")
        assert len(dead) == 2
