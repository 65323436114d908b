"""The broker's verdicts on single messages: nacks, returns, refusals, alarms.

Other tests check messages that are refused before they are sent.
"""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.publishing import book, submit
from reliable_mq import (
    Binding,
    ConfigurationError,
    Exchange,
    Message,
    PublishBlocked,
    Publisher,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    Queue,
    RetryPolicy,
)
from reliable_mq.testing.waiting import wait_until
from tests.core.published import Unencodable

if TYPE_CHECKING:
    from reliable_mq import Confirmation
    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = [pytest.mark.usefixtures("baseline", "publisher_api"), pytest.mark.both_lines]

ORDERS = Queue("orders", dead_letter=None)


def test_f12_channel_is_closed_over_some_of_100_messages(vhost: VirtualHost, checker: Audit) -> None:
    """A 404 fails only the messages to the missing exchange.

    All others are confirmed on the same connection.
    """
    before_a_culprit: set[str] = set()
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        for culprits in ([0], [50], [99], [10, 11, 60]):
            confirmations = []
            for number in range(100):
                message = Message(b"x")
                checker.attempted(message.message_id)
                exchange = "missing" if number in culprits else ""
                confirmations.append(publisher.submit(message, exchange=exchange, routing_key="orders"))
            errors = [book(checker, one) for one in confirmations]
            assert [number for number, error in enumerate(errors) if error] == culprits
            for number in culprits:
                error = errors[number]
                assert isinstance(error, PublishRefused)
                assert error.reply_code == 404
                assert "missing" in error.reply_text
                assert error.message_id == confirmations[number].message_id
            before_a_culprit.update(one.message_id for one in confirmations[: culprits[-1]])
    copies = vhost.live_counts()["orders"]
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    # Only messages before a culprit may be duplicated, because their confirms are lost with the channel.
    assert balance.duplicated <= before_a_culprit
    assert copies == balance.drained + len(balance.duplicated)


def test_f12_messages_to_a_missing_exchange_hold_up_no_others(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """An error that names the exchange costs a few channels, not one per message."""
    count = 300
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        proxy.stop_reading("to_broker")  # the broker has not read any message when the last one is submitted
        good, wrong = [], []
        for _ in range(count):
            good.append(submit(checker, publisher, "orders"))
            wrong.append(publisher.submit(Message(b"x"), exchange="missing", routing_key="orders"))
        proxy.heal()
        assert {type(one.exception(30)) for one in wrong} == {PublishRefused}
        assert [book(checker, one) for one in good] == [None] * count
        assert proxy.seen("channel.open") < 20
        assert proxy.connections == 1
    copies = vhost.live_counts()["orders"]
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    assert copies == count + len(balance.duplicated)


def test_f12_a_crash_over_a_single_publish_does_not_refuse_it(broker: RabbitMQ, vhost: VirtualHost) -> None:
    """The broker closes the connection with 541, but still stores the message.

    The second copy is a duplicate.
    """
    orders = Queue("orders", type="classic", dead_letter=None)
    queue = (
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost.name}">>, queue, <<"orders">>)), '
        "Pid = amqqueue:get_pid(Q), "
    )
    crash = (
        "[exit(Channel, crash) || Channel <- rabbit_channel:list(), "
        f'proplists:get_value(vhost, rabbit_channel:info(Channel, [vhost])) =:= <<"{vhost.name}">>], ok'
    )
    with Publisher(vhost.url, topology=[orders]) as publisher:
        publisher.connect()
        broker.evaluate(f"{queue}sys:suspend(Pid)")  # the queue accepts the message later
        try:
            confirmation = publisher.submit(Message(b"x"), routing_key="orders")
            waiting = (
                f"{queue}{{messages, M}} = process_info(Pid, messages), length([1 || {{'$gen_cast', _}} <- M]) > 0"
            )
            wait_until(lambda: broker.evaluate(waiting) == "true", timeout=30, what="routed", interval=0.2)
            broker.evaluate(crash)
            wait_until(lambda: not publisher.connected, timeout=30, what="crashed")
        finally:
            broker.evaluate(f"{queue}sys:resume(Pid)")
        assert confirmation.result(30).possible_duplicate
    assert vhost.live_counts() == {"orders": 2}


@pytest.mark.parametrize(
    "headers", [{"price": Decimal("1.5")}, {"x-stream-filter-value": 5}], ids=["decimal", "filter"]
)
def test_a_stream_refuses_a_header_that_crashes_the_broker(vhost: VirtualHost, headers: dict[str, Any]) -> None:
    """The broker closes the connection with 541 as it converts the message to AMQP 1.0."""
    events = Queue("events", type="stream")
    with Publisher(vhost.url, topology=[events], new_queue_grace=0) as publisher:
        publisher.connect()
        others = [publisher.submit(Message(b"x"), routing_key="events") for _ in range(2)]
        with pytest.raises(PublishRefused) as caught:
            publisher.publish(Message(b"x", headers=headers), routing_key="events")
        assert caught.value.reply_code == 541
        assert [one.exception(30) for one in others] == [None, None]


def test_a_channel_that_missed_the_end_of_a_full_queue_heals(
    broker: RabbitMQ, vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """A channel that believes its queue is full nacks forever; another one does not.

    No message is a duplicate, unless the machine stalls for the confirm timeout, which costs the connection.
    """
    proxy = fault_proxy(vhost.url)
    full = (
        f'Name = rabbit_misc:r(<<"{vhost.name}">>, queue, <<"orders">>), '
        "{ok, Q} = rabbit_amqqueue:lookup(Name), Event = {amqqueue:get_pid(Q), {machine, {queue_status, "
        "reject_publish}}}, [gen_server:cast(Channel, {queue_event, Name, Event}) || Channel <- rabbit_channel:list(), "
        f'proplists:get_value(vhost, rabbit_channel:info(Channel, [vhost])) =:= <<"{vhost.name}">>], ok'
    )
    retry = RetryPolicy(max_attempts=1000, delays=(0.05,))
    with Publisher(proxy.url, topology=[ORDERS], confirm_timeout=1.0, retry=retry, delivery_timeout=30) as publisher:
        publisher.publish(Message(b"before"), routing_key="orders")
        broker.evaluate(full)
        confirmations = [publisher.submit(Message(b"after"), routing_key="orders") for _ in range(20)]
        receipts = [confirmation.result(60) for confirmation in confirmations]
        stalled = proxy.connections > 1
        assert all(receipt.attempts >= 2 for receipt in receipts), "nacked at least once"
        assert stalled or not any(receipt.possible_duplicate for receipt in receipts)
    count = vhost.live_counts()["orders"]
    assert count == 21 or (stalled and count > 21)


def test_f12_a_refused_property_fails_its_message_alone(vhost: VirtualHost) -> None:
    """A foreign user_id (406) fails only its own message."""
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        before = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(20)]
        foreign = publisher.submit(Message(b"x", user_id="somebody else"), routing_key="orders")
        after = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(20)]
        error = foreign.exception()
        assert isinstance(error, PublishRefused)
        assert not error.may_have_arrived
        assert [one.exception() for one in before + after] == [None] * 40
        assert [one.result().possible_duplicate for one in after] == [False] * 20


TEXTS = {
    "exchange": (lambda: Message(b"x"), "missing", 404),
    "exchange of a long name": (lambda: Message(b"x"), "m" * 250, 404),
    "internal exchange": (lambda: Message(b"x"), "internal", 403),
    "user_id": (lambda: Message(b"x", user_id="some'body"), "", 406),
    "size": (lambda: Message(b"x" * (17 * 1024 * 1024)), "", 406),
    "expiration": (lambda: Message.from_wire(b"x", b"\1\0\3abc"), "", 406),
    "reply_to": (lambda: Message(b"x", reply_to="amq.rabbitmq.reply-to"), "", 406),
    "key of CC": (lambda: Message(b"x", headers={"CC": ["secret.1"]}), "events", 403),
    "key of BCC": (lambda: Message(b"x", headers={"BCC": ["public", "secret.2"]}), "events", 403),
    "CC": (lambda: Message.from_wire(b"x", b"\x20\0\0\0\0\x09\2CCS\0\0\0\1x"), "", 406),
}


def test_f12_the_brokers_text_names_the_culprit(any_vhost: VirtualHost) -> None:
    """One more channel is enough, and later messages are published once.

    This holds for every broker line.
    """
    limit = 64 * 1024 * 1024
    with any_vhost.connect() as connection:
        channel = connection.channel()
        channel.exchange_declare("internal", internal=True)
        channel.exchange_declare("events", exchange_type="topic")
    refused = {"exchange": "events", "write": "^(?!secret)", "read": ""}
    any_vhost.broker.management.call("PUT", "topic-permissions", any_vhost.name, "guest", body=refused)
    with Publisher(any_vhost.url, topology=[ORDERS], max_message_bytes=limit) as publisher:
        publisher.connect()
        for flaw, (make, exchange, code) in TEXTS.items():
            before = publisher.submit(Message(b"x"), routing_key="orders")
            wrong = publisher.submit(make(), exchange=exchange, routing_key="orders")
            after = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(50)]
            error = wrong.exception(30)
            assert isinstance(error, PublishRefused), flaw
            assert error.reply_code == code, flaw
            assert not error.may_have_arrived, flaw
            assert before.result(30).attempts <= 2, flaw
            assert not any(one.result(30).possible_duplicate for one in after), flaw


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_f15_nacked_messages_are_exactly_those_reported(vhost: VirtualHost, checker: Audit, queue_type: str) -> None:
    """A full queue nacks; after the retries, exactly those messages are reported.

    The others are in the queue. A quorum queue notices with a delay that it is full, hence the number of messages.
    """
    count = 2000 if queue_type == "quorum" else 500
    full = Queue(
        "full",
        type=queue_type,
        dead_letter=None,
        arguments={"x-max-length": 50, "x-overflow": "reject-publish"},
    )
    retry = RetryPolicy(max_attempts=2, delays=(0.05,))
    with Publisher(vhost.url, topology=[full], retry=retry) as publisher:
        confirmations = [submit(checker, publisher, "full") for _ in range(count)]
        errors = [book(checker, one) for one in confirmations]
        nacked = [error for error in errors if error is not None]
        assert nacked
        assert {type(error) for error in nacked} == {PublishNacked}
        assert {error.attempts for error in nacked} == {2}
        assert publisher.statistics.nacked == len(nacked)
    checker.drain(vhost, ["full"])
    balance = checker.close()
    assert balance.drained == balance.confirmed == count - len(nacked)


def test_f15_a_nacked_message_is_confirmed_once_there_is_room(vhost: VirtualHost, checker: Audit) -> None:
    """A retry after the nack succeeds once the queue has room; it is no duplicate."""
    full = Queue(
        "full", type="classic", dead_letter=None, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    retry = RetryPolicy(max_attempts=1000, delays=(0.05,))
    with Publisher(vhost.url, topology=[full], retry=retry) as publisher:
        assert book(checker, submit(checker, publisher, "full")) is None
        waiting = submit(checker, publisher, "full")
        wait_until(lambda: publisher.statistics.nacks >= 2, timeout=10, what="nacks")
        checker.drain(vhost, ["full"])
        assert book(checker, waiting) is None
        assert waiting.result().attempts >= 3
        assert not waiting.result().possible_duplicate
    checker.drain(vhost, ["full"])
    assert not checker.close().duplicated


def test_f16_unroutable_messages_fail_and_others_do_not(vhost: VirtualHost) -> None:
    """An unroutable mandatory message fails with the broker's code and text.

    The broker acks it anyway.
    """
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        confirmations = {
            number: publisher.submit(Message(b"x"), routing_key="nowhere" if number % 3 == 0 else "orders")
            for number in range(60)
        }
        for number, confirmation in confirmations.items():
            error = confirmation.exception()
            if number % 3:
                assert error is None
            else:
                assert isinstance(error, PublishReturned)
                assert (error.reply_code, error.reply_text) == (312, "NO_ROUTE")
                assert (error.exchange, error.routing_key) == ("", "nowhere")


def test_f16_unroutable_among_equal_message_ids(vhost: VirtualHost) -> None:
    """Of two outstanding messages with one id, the unroutable one fails.

    The order does not matter.
    """
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        for keys in (["nowhere", "orders"], ["orders", "nowhere"], ["orders", "nowhere", "orders"]):
            confirmations = [publisher.submit(Message(b"x", message_id="same"), routing_key=key) for key in keys]
            failed = [isinstance(one.exception(), PublishReturned) for one in confirmations]
            assert failed == [key == "nowhere" for key in keys]


def test_f16_unroutable_message_is_dropped_where_not_mandatory(vhost: VirtualHost) -> None:
    """Without mandatory, the broker confirms the message that it drops."""
    with Publisher(vhost.url, topology=[ORDERS], mandatory=False) as publisher:
        assert publisher.publish(Message(b"x"), routing_key="nowhere").status == "confirmed"


def test_f17_unroutable_messages_are_reported_after_a_reconnect(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """Returns are matched on the second connection as on the first."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        proxy.cut()
        with pytest.raises(PublishReturned):
            publisher.publish(Message(b"x"), routing_key="nowhere")
        assert proxy.connections == 2


def test_f17_a_return_whose_ack_was_lost_is_asked_for_again(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The connection is lost between return and ack.

    The message is published again, to a queue that exists by then.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        proxy.drop_confirms()
        confirmation = publisher.submit(Message(b"x"), routing_key="late")
        proxy.wait_for(lambda: proxy.seen("basic.return") == 1)
        with vhost.connect() as connection:
            connection.channel().queue_declare("late", durable=True)
        proxy.cut()
        proxy.heal()
        assert confirmation.result(20).possible_duplicate


@pytest.mark.parametrize("alarm", ["memory", "disk"])
def test_f18_f19_alarm_blocks_publishing(
    private_broker: RabbitMQ, private_vhost: VirtualHost, checker: Audit, alarm: str
) -> None:
    """The state shows the alarm, publishes fail in time, and close works.

    The errors say whether the message was sent.
    """
    with Publisher(private_vhost.url, topology=[ORDERS], delivery_timeout=4) as publisher:
        assert book(checker, submit(checker, publisher, "orders", timeout=60)) is None
        private_broker.alarm(alarm)
        first = submit(checker, publisher, "orders")  # the broker blocks a connection when it publishes
        wait_until(lambda: publisher.blocked, timeout=10, what="the blocked state")
        second = submit(checker, publisher, "orders")
        started = time.monotonic()
        assert book(checker, first, timeout=20) is not None
        error = book(checker, second, timeout=20)
        assert isinstance(error, PublishBlocked)
        assert "memory" in error.reason if alarm == "memory" else "disk" in error.reason
        assert time.monotonic() - started < 20
        started = time.monotonic()
        publisher.close(timeout=1)
        assert time.monotonic() - started < 20
    private_broker.clear_alarm(alarm)
    checker.drain(private_vhost, ["orders"])
    checker.close()


def test_f18_publishing_goes_on_when_the_alarm_is_over(
    private_broker: RabbitMQ, private_vhost: VirtualHost, checker: Audit
) -> None:
    """Messages that wait for the end of an alarm are confirmed after it."""
    with Publisher(private_vhost.url, topology=[ORDERS], confirm_timeout=1) as publisher:
        publisher.connect()
        private_broker.alarm("memory")
        confirmations = [submit(checker, publisher, "orders") for _ in range(10)]
        wait_until(lambda: publisher.blocked, timeout=10, what="the blocked state")
        confirmations += [submit(checker, publisher, "orders") for _ in range(10)]
        private_broker.clear_alarm("memory")
        assert [book(checker, one) for one in confirmations] == [None] * 20
        assert publisher.blocked is None
    checker.drain(private_vhost, ["orders"])
    checker.close()


@pytest.mark.soak
def test_f18_a_connection_lost_under_an_alarm_costs_no_message(
    private_broker: RabbitMQ, private_vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """Outstanding messages are published again, even on a blocked connection."""
    proxy = fault_proxy(private_vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        private_broker.alarm("memory")
        confirmations = [submit(checker, publisher, "orders") for _ in range(10)]
        wait_until(lambda: publisher.blocked, timeout=10, what="the blocked state")
        proxy.cut()
        wait_until(lambda: publisher.statistics.republished, timeout=30, what="messages published again")
        private_broker.clear_alarm("memory")
        assert [book(checker, one) for one in confirmations] == [None] * 10
    checker.drain(private_vhost, ["orders"])
    checker.close()


@pytest.mark.soak
def test_f18_blocked_may_be_raised_at_once(private_broker: RabbitMQ, private_vhost: VirtualHost) -> None:
    """With on_blocked="raise", a new message is refused at once."""
    with Publisher(private_vhost.url, topology=[ORDERS], on_blocked="raise") as publisher:
        publisher.connect()
        private_broker.alarm("memory")
        first = publisher.submit(Message(b"x"), routing_key="orders")
        wait_until(lambda: publisher.blocked, timeout=10, what="the blocked state")
        with pytest.raises(PublishBlocked, match="memory"):
            publisher.publish(Message(b"x"), routing_key="orders")
        private_broker.clear_alarm("memory")
        first.result(30)


def test_f31_oversize_messages_are_refused_before_they_are_sent(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """A body over the limit, or headers over a frame, fail only their own publish.

    The connection stays open.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], max_message_bytes=1000) as publisher:
        with pytest.raises(PublishRefused, match="max_message_bytes"):
            publisher.publish(Message(b"x" * 1001), routing_key="orders")
        with pytest.raises(PublishRefused, match="headers"):
            publisher.publish(Message(b"x", headers={"h": "x" * 200_000}), routing_key="orders")
        assert proxy.seen("basic.publish") == 0
        publisher.publish(Message(b"x" * 1000), routing_key="orders")
        assert proxy.connections == 1


@pytest.mark.parametrize("frame_max", [8192, 131072])
def test_f31_the_largest_accepted_headers_can_be_republished(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, frame_max: int
) -> None:
    """The limit is exact to the byte, and leaves room for the duplicate header."""
    proxy = fault_proxy(vhost.url)

    def submit_headers(publisher: Publisher, size: int) -> Confirmation:
        return publisher.submit(Message(b"x" * 20_000, headers={"h": "x" * size}), routing_key="orders")

    with Publisher(f"{proxy.url}?frame_max={frame_max}", topology=[ORDERS]) as publisher:
        publisher.connect()
        taken, refused = 0, frame_max
        while refused - taken > 1:
            size = (taken + refused) // 2
            try:
                submit_headers(publisher, size)
            except PublishRefused:
                refused = size
            else:
                taken = size
        assert frame_max - 200 < taken < frame_max
        publisher.flush(20)
        proxy.hold_confirms()
        largest = submit_headers(publisher, taken)
        proxy.wait_for(lambda: proxy.held_confirms > 0)
        proxy.cut()
        proxy.heal()
        assert largest.result(20).possible_duplicate
        publisher.flush(20)
        assert proxy.connections == 2


def test_a_message_that_cannot_be_encoded_fails_alone(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The message is refused; all others are confirmed on the same connection.

    Its place in the window is freed.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], max_outstanding=10) as publisher:
        for number in range(15):
            before = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(5)]
            message = Unencodable.after(1, b"x", f"broken {number}")  # the first call checks the size
            broken = publisher.submit(message, routing_key="orders")
            after = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(5)]
            error = broken.exception(20)
            assert isinstance(error, PublishRefused)
            assert not error.may_have_arrived
            assert [one.exception(20) for one in before + after] == [None] * 10
        wait_until(lambda: publisher.outstanding == 0, timeout=10, what="the places freed")  # just after the outcomes
        assert proxy.connections == 1


def test_f31_too_large_headers_are_refused_before_connecting(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """The frame size that the settings allow is known before connecting."""
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    with Publisher(f"{proxy.url}?frame_max=8192", topology=[ORDERS]) as publisher:
        with pytest.raises(PublishRefused, match="headers"):
            publisher.publish(Message(b"x", headers={"h": "x" * 9000}), routing_key="orders")
        fitting = publisher.submit(Message(b"x", headers={"h": "x" * 8000}), routing_key="orders")
        proxy.accept_connections()
        assert fitting.result(20).attempts == 1


def test_f31_a_body_over_the_brokers_own_limit_fails_alone(vhost: VirtualHost) -> None:
    """If the broker's limit is lower than the client's, its 406 fails one message."""
    with Publisher(vhost.url, topology=[ORDERS], max_message_bytes=64 * 1024 * 1024) as publisher:
        small = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(10)]
        large = publisher.submit(Message(b"x" * (17 * 1024 * 1024)), routing_key="orders")
        small += [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(10)]
        assert isinstance(large.exception(60), PublishRefused)
        assert [one.exception(60) for one in small] == [None] * 20


def test_wrong_arguments_are_named_before_anything_is_sent(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The error names the argument, and nothing is sent."""
    proxy = fault_proxy(vhost.url)
    wrong: dict[str, dict[str, object]] = {
        "message": {"message": "text"},
        "routing_key": {"message": Message(b"x"), "routing_key": "k" * 256},
        "exchange": {"message": Message(b"x"), "exchange": 7},
        "timeout": {"message": Message(b"x"), "timeout": -1},
    }
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        for field, arguments in wrong.items():
            with pytest.raises(ConfigurationError, match=field):
                publisher.publish(**{"routing_key": "orders", **arguments})
        publisher.publish(Message(b"x"), routing_key="orders")
        assert proxy.seen("basic.publish") == 1


def test_topology_is_declared_with_exchanges_and_bindings(vhost: VirtualHost) -> None:
    """The exchanges, queues and bindings exist once the publisher is connected."""
    events = Exchange("events", type="topic")
    with Publisher(vhost.url, topology=[events, ORDERS, Binding(events, ORDERS, routing_key="order.*")]) as publisher:
        publisher.publish(Message(b"x"), exchange="events", routing_key="order.created")
        with pytest.raises(PublishReturned):
            publisher.publish(Message(b"x"), exchange="events", routing_key="invoice.created")


def test_a_channel_is_confirming_and_never_transactional(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The publisher selects confirms and sends no method of the tx class."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        assert proxy.seen("confirm.select") == 1
        assert proxy.seen("tx.select") == proxy.seen("tx.commit") == proxy.seen("tx.rollback") == 0
