"""The options of a consumer. Invalid ones are refused before it connects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from reliable_mq import ConfigurationError, Message, Publisher, Queue, RetryPolicy
from reliable_mq.codec import LARGEST_BODY, encode_ack
from reliable_mq.codec.methods import CheckQueue, Consume, DeclareQueue, SetPrefetch
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.core.consumer.delivery import ChannelGeneration
from reliable_mq.core.consumer.handler import Failed
from reliable_mq.core.idempotency import namespace_of
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.stores import MemoryStore
from tests.core.deliveries import delivery, failure
from tests.core.sessions import RETURNED
from tests.core.steps import steps_of

ORDERS = Queue("orders")
WEST = timezone(timedelta(hours=-1))
EVENTS = Queue("events", type="stream")
SINGLE = Queue("orders", single_active_consumer=True)
SHORT = Queue("orders", arguments={"x-consumer-timeout": 60_000})
SERVER = ServerInfo("RabbitMQ", "4.3.0", (4, 3, 0))


def handle(_delivery: object) -> None:
    pass


async def awaited(_delivery: object) -> str:
    return "key"


def options(queue: Any = ORDERS, handler: object = handle, **given: Any) -> ConsumerOptions:
    return ConsumerOptions("amqp://guest:guest@localhost/", queue, handler, **{"name": "test", **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"queue": 5}, "queue must be a Queue or the name of one, not 5"),
        ({"queue": ""}, "queue must be"),
        ({"queue": "é" * 128}, "queue has 256 bytes"),
        ({"queue": "a\0b"}, "queue holds a NUL"),
        ({"name": ""}, "name must be text of 1 to 200 bytes"),
        ({"name": "é" * 101}, "name must be text"),
        ({"name": None}, "name must be text"),
        ({"name": "\ud800"}, "name must be text"),
        ({"handler": 5}, "handler must be callable, not 5"),
        ({"handler": lambda _: (yield)}, "handler is a generator function"),
        ({"prefetch": -1}, "prefetch must be a whole number from 0 to 65535, not -1"),
        ({"prefetch": 65536}, "prefetch must be"),
        ({"prefetch": True}, "prefetch must be"),
        ({"prefetch": 1.5}, "prefetch must be"),
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1, not 0"),
        ({"max_body_bytes": -1}, "max_body_bytes must be"),
        ({"max_header_bytes": "1k"}, "max_header_bytes must be"),
        ({"retry": 3}, "retry must be a RetryPolicy, not 3"),
        ({"idempotency": "redis://localhost"}, "idempotency must be an IdempotencyStore, not 'redis://localhost'"),
        ({"idempotency": MemoryStore}, "idempotency must be an IdempotencyStore, not <class 'reliable_mq"),
        ({"idempotency_key": "id"}, "idempotency_key must be callable"),
        ({"idempotency_key": str}, "idempotency_key has no effect without idempotency=: give a store"),
        ({"idempotency_lease": 60}, "idempotency_lease has no effect without idempotency=: give a store"),
        ({"idempotency_namespace": "shop"}, "idempotency_namespace has no effect without idempotency=: give a store"),
        ({"idempotency_key": awaited}, "idempotency_key is a coroutine function"),
        ({"idempotency_lease": 0}, "idempotency_lease must be"),
        ({"idempotency_namespace": 5}, "idempotency_namespace must be text, not 5"),
        ({"idempotency_namespace": "\ud800"}, "idempotency_namespace must be text"),
        ({"ack_every": 0}, "ack_every must be"),
        ({"ack_every": 11, "prefetch": 10}, "ack_every=11 does not fit prefetch=10"),
        ({"ack_interval": -1}, "ack_interval must be"),
        ({"ack_mode": "never"}, "ack_mode must be 'manual' or 'automatic', not 'never'"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": 11, "prefetch": 10}, "batch_size=11 does not fit prefetch=10"),
        ({"batch_wait": "1s"}, "batch_wait must be"),
        ({"batch_wait": 5}, "batch_wait has no effect without batch_size="),
        ({"batch_size": 5, "batch_wait": 1350}, "batch_wait=1350 does not fit a consumer timeout of 1800 s"),
        ({"batch_size": 5, "batch_wait": 8, "consumer_timeout": 10}, "does not fit a consumer timeout of 10 s"),
        ({"batch_size": 5, "batch_wait": 45, "queue": SHORT}, "does not fit a consumer timeout of 60 s"),
        ({"exclusive": 1}, "exclusive must be True or False"),
        ({"exclusive": True}, "exclusive is ignored by RabbitMQ on a quorum queue"),
        ({"consumer_timeout": 0}, "consumer_timeout must be"),
        ({"stop_timeout": float("nan")}, "stop_timeout must be"),
        ({"dead_letter": 5}, "dead_letter must be a Queue"),
        ({"dead_letter": ""}, "dead_letter must be a Queue"),
        ({"dead_letter": "d" * 256}, "dead_letter has 256 bytes"),
        ({"dead_letter": "orders"}, "dead_letter is the queue itself"),
        ({"dead_letter": Queue("orders")}, "dead_letter is the queue itself"),
        ({"dead_letter": Queue("orders.dead")}, "queue 'orders.dead' is in the topology twice"),
        ({"topology": [Queue("orders.quarantine")]}, "queue 'orders.quarantine' is in the topology twice"),
        ({"retry": RetryPolicy(delays=(4e8,))}, "message_ttl of queue 'orders.retry.400000000000' must be at most"),
        ({"topology": [5]}, "topology holds a int"),
        ({"topology": Queue("q")}, "topology must be a list, not one Queue"),
        ({"topology": None}, "topology must be a list, not one NoneType"),
        ({"topology": "q", "dead_letter": Queue("dead")}, "topology must be a list, not one str"),
        ({"consumer_arguments": 5}, "consumer_arguments"),
        ({"consumer_arguments": {"x-priority": object()}}, "x-priority"),
        ({"offset": "first"}, "offset is for streams, and queue 'orders' is of type quorum"),
        ({"queue": EVENTS, "offset": "begin"}, "offset must be 'first', 'last', 'next'"),
        ({"queue": EVENTS, "offset": -1}, "offset must be"),
        ({"queue": EVENTS, "offset": True}, "offset must be"),
        ({"queue": EVENTS, "offset": 2**63}, "offset must be"),
        ({"queue": EVENTS, "offset": 1.5}, "offset must be"),
        ({"queue": EVENTS, "offset": datetime(2026, 1, 1)}, "offset must be an aware datetime"),  # noqa: DTZ001
        ({"queue": EVENTS, "offset": datetime(1969, 1, 1, tzinfo=UTC)}, "offset must not lie before 1970"),
        ({"queue": EVENTS, "offset": datetime.max.replace(tzinfo=WEST)}, "offset must lie before the year 10000"),
        ({"queue": EVENTS, "offset": 5, "consumer_arguments": {"x-stream-offset": 6}}, "offset is given beside"),
        ({"queue": EVENTS, "prefetch": 0}, "prefetch=0 does not go with a stream"),
        ({"queue": EVENTS, "ack_mode": "automatic"}, "ack_mode='automatic' does not go with a stream"),
        ({"ack_mode": "automatic", "retry": RetryPolicy()}, "retry does not go with ack_mode='automatic'"),
        ({"ack_mode": "automatic", "idempotency": MemoryStore()}, "idempotency does not go with ack_mode='automatic'"),
        ({"ack_mode": "automatic", "batch_size": 5}, "batch_size does not go with ack_mode='automatic'"),
        ({"ack_mode": "automatic", "dead_letter": "x"}, "dead_letter does not go with ack_mode='automatic'"),
        ({"ack_mode": "automatic", "max_body_bytes": 9}, "max_body_bytes does not go with ack_mode='automatic'"),
        ({"ack_mode": "automatic", "max_header_bytes": 0}, "max_header_bytes does not go with ack_mode='automatic'"),
        ({"handler": None, "idempotency": MemoryStore()}, "idempotency does not go with a consumer without a handler"),
        ({"handler": None, "batch_size": 5}, "batch_size does not go with a consumer without a handler"),
        ({"handler": None, "ack_mode": "automatic"}, "ack_mode='automatic' does not go with a consumer without"),
        ({"handler": None, "queue": EVENTS}, "a stream does not go with a consumer without a handler"),
        ({"handler": None, "queue": SINGLE}, "single_active_consumer=True does not go with get() on a quorum queue"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        options(**given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "largest"),
    [
        ({}, LARGEST_BODY),
        ({"max_body_bytes": 1000}, 1000 + 2**20),
        ({"max_body_bytes": LARGEST_BODY}, LARGEST_BODY),
        ({"max_body_bytes": 1000, "dead_letter": "elsewhere"}, 1000 + 2**20),
        ({"max_body_bytes": 1000, "queue": Queue("orders", dead_letter=None)}, 1000 + 2**20),
        ({"max_body_bytes": 1000, "queue": "orders"}, 1000 + 2**20),
        ({"max_body_bytes": 1000, "queue": "orders", "dead_letter": "elsewhere"}, LARGEST_BODY),
        ({"max_body_bytes": 1000, "handler": None}, 1000 + 2**20),
    ],
)
def test_a_huge_body_is_read_only_if_we_alone_can_dead_letter_it(given: dict[str, Any], largest: int) -> None:
    assert options(**given).largest_body == largest


@pytest.mark.parametrize(
    ("offset", "argument"),
    [
        ("first", "first"),
        (0, 0),
        (datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_known_position_replaces_the_stream_offset_argument(offset: Any, argument: object) -> None:
    made = options(EVENTS, offset=offset, consumer_arguments={"x-priority": 1})
    assert made.consume("tag", None).arguments == {"x-priority": 1, "x-stream-offset": argument}
    assert made.consume("tag", 77).arguments == {"x-priority": 1, "x-stream-offset": 77}


def test_a_plain_name_with_an_offset_is_a_stream() -> None:
    assert options("events", offset=5).is_stream
    assert options("events", consumer_arguments={"x-stream-offset": 5}).is_stream
    assert not options("events").is_stream


def test_the_set_up_declares_a_queue_and_checks_a_name() -> None:
    orders = Queue("orders", type="classic")
    made = options(orders, prefetch=7, exclusive=True, dead_letter=Queue("bin", dead_letter=None))
    steps = steps_of(made.setup(SERVER, "tag", None))
    declared = [step.name for step in steps if isinstance(step, DeclareQueue)]
    assert declared == ["bin", "orders.retry.1000", "orders.retry.10000", "orders.retry.60000", "orders.dead", "orders"]
    assert steps[-2:] == [SetPrefetch(7), Consume("orders", "tag", exclusive=True)]
    assert list(options("orders").pull_setup(SERVER)) == [CheckQueue("orders")]
    assert list(options(EVENTS).setup(SERVER, "tag", 9))[-1] == Consume(
        "events", "tag", arguments={"x-stream-offset": 9}
    )


def test_a_stream_given_by_its_name_needs_an_offset() -> None:
    """It refuses a priority. Without an offset, it would skip messages at each reconnect."""
    assert options("events").consume("tag", None).arguments == {"x-priority": 0}
    assert options("events", consumer_arguments={"x-priority": 5}).consume("tag", None).arguments == {"x-priority": 5}
    assert options("events", offset="next").consume("tag", None).arguments == {"x-stream-offset": "next"}


@pytest.mark.parametrize(
    ("queue", "given", "name"),
    [
        (ORDERS, {}, "orders.dead"),
        (Queue("orders", dead_letter="bin"), {}, "bin"),
        (Queue("orders", dead_letter=None), {}, None),
        (ORDERS, {"dead_letter": None}, None),
        (ORDERS, {"dead_letter": "bin"}, "bin"),
        (ORDERS, {"dead_letter": Queue("bin")}, "bin"),
        ("orders", {}, None),
    ],
)
def test_dead_letters_go_to_the_queues_own_unless_told(queue: Any, given: dict[str, Any], name: str | None) -> None:
    assert options(queue, **given).dead_letter == name


@pytest.mark.parametrize(
    ("queue", "given", "count"),
    [
        (ORDERS, {}, 0),
        (ORDERS, {"prefetch": 0}, 1),
        ("orders", {}, 1),
        ("orders", {"dead_letter": None}, 0),
        (Queue("orders", dead_letter=None), {}, 1),
        ("orders", {"ack_mode": "automatic"}, 0),
        ("orders", {"handler": None}, 0),
        (EVENTS, {}, 0),
    ],
)
def test_what_had_better_be_known_is_warned_of(queue: Any, given: dict[str, Any], count: int) -> None:
    assert len(options(queue, **given).warnings) == count


@pytest.mark.parametrize("option", ["batch_size", "ack_every"])
def test_a_prefetch_that_does_not_fit_changes_nothing(option: str) -> None:
    made = options(prefetch=100, **{option: 50})
    for wrong, named in ((49, f"{option}=50 does not fit prefetch=49"), (-1, "prefetch must be")):
        with pytest.raises(ConfigurationError, match=named):
            made.change_prefetch(wrong)
        assert made.prefetch == 100
    made.change_prefetch(50)
    assert made.prefetch == 50
    made.change_prefetch(0)
    with pytest.raises(ConfigurationError):
        options(EVENTS).change_prefetch(0)


def test_ack_every_follows_the_prefetch_unless_given() -> None:
    made = options(prefetch=10)
    assert made.new_session().poll(0.0).report_after == 5
    made.change_prefetch(1000)
    assert made.new_session().poll(0.0).report_after == 100
    assert options(prefetch=10, ack_every=3).new_session().poll(0.0).report_after == 3


def test_a_session_fits_the_options() -> None:
    assert options().new_session().stream_offset is None
    assert options(EVENTS).new_session().stream_offset is not None
    assert options(ack_mode="automatic").new_session().automatic


@pytest.mark.parametrize(
    ("queue", "given", "name"),
    [
        (ORDERS, {}, "orders.dead"),
        (Queue("orders", dead_letter="bin"), {}, None),
        (ORDERS, {"dead_letter": Queue("bin")}, "bin"),
        ("orders", {"dead_letter": "bin", "topology": [Queue("bin")]}, "bin"),
        ("orders", {"dead_letter": "bin"}, None),
    ],
)
def test_a_declared_dead_letter_queue_is_declared_again(queue: Any, given: dict[str, Any], name: str | None) -> None:
    session = options(queue, retry=RetryPolicy(1), **given).new_session()
    session.opened(1, 1)
    item = delivery(1)
    session.delivered([item], 0.0)
    session.poll(0.0)
    session.finished([Failed(item, failure())], 0.0)
    [letter] = session.poll(0.0).publish
    session.published(letter, RETURNED, 0.0)
    assert [one.name for one in session.poll(0.0).declare] == ([] if name is None else [name])


def test_what_is_pulled_is_acked_at_once() -> None:
    """The next request needs its place in the prefetch."""
    session = options(handler=None, ack_interval=60).new_session()
    session.opened(1, 1)
    item = delivery(1)
    session.delivered([item], 0.0)
    session.poll(0.0)
    session.finished([item], 0.0)
    assert session.poll(0.0).data


def test_acks_are_batched_while_a_handler_runs_and_sent_at_rest() -> None:
    session = options(ack_interval=60).new_session()
    session.opened(1, 1)
    items = [delivery(1), delivery(2), delivery(3)]
    session.delivered(items[:2], 5.0)
    session.poll(5.0)
    session.finished(items[:1], 5.0)
    assert session.poll(5.0).data == b""
    assert session._acks.deadline == 65.0
    session.finished(items[1:2], 5.0)
    assert session._acks.deadline_if(idle=not session.running) < 5.0
    assert session.poll(5.0).data == encode_ack(1, 2, multiple=True)
    assert 5.0 < session.rested_at < 5.1
    session.delivered(items[2:], 5.0)
    session.poll(5.0)
    session.finished(items[2:], 5.0)
    actions = session.poll(5.0)
    assert actions.data == b"", "one after the other would be an ack for each"
    assert actions.wake_at == session.rested_at
    assert session.poll(session.rested_at).data == encode_ack(1, 3, multiple=False)


@pytest.mark.parametrize(("given", "key"), [({}, "shop//|a%7Cb|m"), ({"idempotency_namespace": "x"}, "x|a%7Cb|m")])
def test_claiming_is_by_virtual_host_and_queue(given: dict[str, Any], key: str) -> None:
    claiming = options("a|b", idempotency=MemoryStore(), **given).new_claiming(lambda: 0.0)
    assert claiming is not None
    assert (
        claiming.key_of(delivery(message_id="m", source=ChannelGeneration(1, 1, "a|b", namespace_of("shop", "/"))))
        == key
    )
    assert options().new_claiming(lambda: 0.0) is None


@pytest.mark.parametrize(
    ("given", "timeout"),
    [
        ({}, 1800.0),
        ({"consumer_timeout": timedelta(hours=1)}, 3600.0),
        ({"consumer_timeout": None}, None),
        ({"queue": SHORT}, 60.0),
        ({"queue": SHORT, "consumer_timeout": 10}, 60.0),
        ({"queue": SHORT, "consumer_arguments": {"x-consumer-timeout": 30_000}}, 30.0),
        ({"queue": "orders", "consumer_arguments": {"x-consumer-timeout": 30_000}, "consumer_timeout": None}, 30.0),
    ],
)
def test_the_queues_consumer_timeout_wins_over_the_brokers(given: Any, timeout: float | None) -> None:
    assert options(**given).consumer_timeout == timeout


def test_a_batch_may_wait_for_less_than_the_consumer_timeout() -> None:
    """At the timeout, RabbitMQ takes back the messages of an incomplete batch."""
    assert options(SHORT, batch_size=5, batch_wait=44).batch
    assert options(batch_size=5, batch_wait=3600, consumer_timeout=None).batch


@pytest.mark.parametrize(
    ("queue", "single"),
    [
        ("orders", False),
        (ORDERS, False),
        (Queue("orders", single_active_consumer=True), True),
        (Queue("orders", arguments={"x-single-active-consumer": True}), True),
    ],
)
def test_a_queue_says_whether_it_has_one_active_consumer(queue: Queue | str, single: bool) -> None:
    """So does its quarantine."""
    made = options(queue)
    assert made.single_active is single
    quarantine = made._quarantine
    assert (quarantine is not None and quarantine.single_active_consumer) is single


@pytest.mark.parametrize(
    ("handler", "given", "ends"),
    [(handle, {}, False), (handle, {"exclusive": True}, True), (None, {"exclusive": True}, False)],
)
def test_a_temporary_queue_may_allow_no_second_consumer(handler: object, given: dict[str, Any], ends: bool) -> None:
    queue = Queue("orders", type="classic", auto_delete=True)
    assert options(queue, handler, **given).ends_with_subscription is ends


def test_whatever_was_delivered_may_be_published_again() -> None:
    """A broker with a higher limit delivers messages that a publisher refuses by default."""
    publisher = options().new_publisher(Publisher)
    message = Message(bytes(17 * 1024 * 1024))
    assert publisher._options.limits.check(message, "", "orders.dead", 131072) == len(message.body)
