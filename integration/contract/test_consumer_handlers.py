"""The input of a handler, its verdicts, and their effect on the delivery."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from integration.support.consuming import Gate, Handler, dead_letters, numbered, publish, running, send
from reliable_mq import Ack, Consumer, DeadLetter, Message, Publisher, Queue, RetryLater, RetryPolicy
from reliable_mq.codec import split_properties
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until
from tests.hostile_exceptions import NotYet, Textless

if TYPE_CHECKING:
    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")
QUICK = RetryPolicy(3, delays=(0.05, 0.1))
PREFIX = "x-reliable-mq-"


def declare(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()


def raises(error: BaseException) -> Callable[[Delivery], None]:
    def fail(_delivery: Delivery) -> None:
        raise error

    return fail


# One delivery


def test_a_delivery_shows_what_was_published(any_vhost: VirtualHost) -> None:
    """Body, headers, every property and the source; this is the first attempt."""
    message = Message.json(
        {"order": 1},
        headers={"tenant": "a", "share": 0.25},
        correlation_id="c1",
        reply_to="answers",
        priority=3,
        expiration=3600,
        type="order",
        user_id="guest",
        app_id="shop",
        content_encoding="identity",
    )
    handler = Handler()
    with Consumer(any_vhost.url, ORDERS, handler):
        send(any_vhost, "orders", [message])
        [delivery] = handler.wait_done(1)
    assert delivery.json() == {"order": 1}
    assert (delivery.message_id, delivery.correlation_id, delivery.reply_to) == (message.message_id, "c1", "answers")
    assert (delivery.priority, delivery.expiration, delivery.type) == (3, 3600.0, "order")
    assert (delivery.user_id, delivery.app_id, delivery.persistent) == ("guest", "shop", True)
    assert (delivery.content_type, delivery.content_encoding) == ("application/json", "identity")
    assert {name: delivery.headers[name] for name in ("tenant", "share")} == {"tenant": "a", "share": 0.25}
    assert (delivery.queue, delivery.exchange, delivery.routing_key) == ("orders", "", "orders")
    assert (delivery.attempt, delivery.redelivered, delivery.offset) == (1, False, None)


def test_a_handlers_result_is_ignored_unless_it_is_a_verdict(vhost: VirtualHost) -> None:
    """A handler that returns has succeeded, whatever else it returns."""
    answers = [None, False, 0, Ack, [Ack], ValueError("no")]
    with Consumer(vhost.url, ORDERS, lambda delivery: answers[int(delivery.body)]) as consumer:
        publish(vhost, "orders", numbered(6))
        wait_until(lambda: consumer.statistics.acked == 6, timeout=10, what="acked")
        assert (consumer.statistics.failed, consumer.statistics.handled) == (0, 6)


def test_handlers_run_side_by_side_as_many_as_told(vhost: VirtualHost) -> None:
    """Four handlers run at once, and a fifth does not start."""
    together = threading.Barrier(5)
    handler = Handler(then=lambda _: together.wait(30))
    with Consumer(vhost.url, ORDERS, handler, concurrency=4) as consumer:
        publish(vhost, "orders", numbered(8))
        for round_ in (1, 2):
            handler.wait_begun(4 * round_)
            wait_until(lambda: together.n_waiting == 4, timeout=10, what="four in their handlers")
            assert len(handler.begun) == 4 * round_
            together.wait(30)
        handler.wait_done(8)
    assert consumer.statistics.handled == 8


def test_one_handler_at_a_time_keeps_the_order(vhost: VirtualHost) -> None:
    """With concurrency 1, with a store and without."""
    for store in (None, MemoryStore()):
        handler = Handler()
        with Consumer(vhost.url, ORDERS, handler, idempotency=store):
            publish(vhost, "orders", numbered(500))
            handler.wait_done(500)
        assert handler.bodies == numbered(500)


# Retries


def test_a_failing_handler_is_retried_then_dead_lettered(any_vhost: VirtualHost) -> None:
    """Attempts are counted on every broker.

    The original is acked when its dead letter is confirmed.
    """
    times: list[float] = []

    def fail(_delivery: Delivery) -> None:
        times.append(time.monotonic())
        raise ValueError("no such customer")

    handler = Handler(then=fail)
    with Consumer(any_vhost.url, ORDERS, handler, retry=RetryPolicy(4, delays=(0.1, 0.3))) as consumer:
        [message_id] = publish(any_vhost, "orders", [b"poison"])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
    assert handler.attempts == [1, 2, 3, 4]
    assert handler.redelivered == [False, True, True, True]
    for (earlier, later), delay in zip(pairwise(times), (0.1, 0.3, 0.3), strict=True):
        assert later - earlier >= delay
    [dead] = dead_letters(any_vhost, "orders.dead", 1)
    headers = dead["properties"]["headers"]
    assert dead["payload"] == "poison"
    assert dead["properties"]["message_id"] == message_id
    assert headers[PREFIX + "dead-letter-reason"] == "4 of 4 attempts failed"
    assert headers[PREFIX + "exception-type"] == "ValueError"
    assert headers[PREFIX + "exception-message"] == "no such customer"
    assert headers[PREFIX + "attempts"] == 4
    assert headers[PREFIX + "original-queue"] == "orders"
    assert headers[PREFIX + "consumer"] == "consumer"
    assert headers[PREFIX + "first-failure"] <= headers[PREFIX + "last-failure"]
    assert any_vhost.live_counts(["orders"])["orders"] == 0


@pytest.mark.soak
def test_retry_later_chooses_the_delay_but_counts(vhost: VirtualHost) -> None:
    """The handler's delay replaces the policy's, which is an hour.

    After the last attempt the message is dead-lettered.
    """
    handler = Handler(then=raises(RetryLater(0.05)))
    with Consumer(vhost.url, ORDERS, handler, retry=RetryPolicy(3, delays=(3600,))) as consumer:
        publish(vhost, "orders", numbered(1))
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
    assert handler.attempts == [1, 2, 3]


@pytest.mark.parametrize("store", [False, True])
def test_a_verdict_that_is_returned_counts_as_one_that_is_raised(vhost: VirtualHost, store: bool) -> None:
    """The handler's delay replaces the policy's, which is an hour."""
    verdicts = {b"0": DeadLetter("bad"), b"1": RetryLater(0.05), b"2": None}
    handler = Handler()

    def handle(delivery: Delivery) -> object:
        handler(delivery)
        return verdicts[delivery.body] if delivery.attempt == 1 else None

    options: dict[str, Any] = {"idempotency": MemoryStore()} if store else {}
    with Consumer(vhost.url, ORDERS, handle, retry=RetryPolicy(3, delays=(3600,)), **options) as consumer:
        publish(vhost, "orders", numbered(3))
        wait_until(lambda: settled(consumer) == 3, timeout=10, what="all settled")
        assert (consumer.statistics.handled, consumer.statistics.dead_lettered) == (2, 1)
    assert sorted(one.body for one in handler.begun) == [b"0", b"1", b"1", b"2"]
    [dead] = dead_letters(vhost, "orders.dead", 1)
    assert dead["payload"] == "0"
    assert dead["properties"]["headers"][PREFIX + "dead-letter-reason"] == "bad"


def test_verdicts_and_exceptions_in_a_group_are_seen(vhost: VirtualHost) -> None:
    """A dead letter wins over exceptions that the policy gives up on, then delays.

    A task group in a handler raises such groups.
    """
    raised = {
        b"0": ExceptionGroup("tasks", [RetryLater(0.05), ExceptionGroup("more", [DeadLetter("bad")])]),
        b"1": ExceptionGroup("tasks", [RetryLater(0.05), ValueError("given up on")]),
        b"2": ExceptionGroup("tasks", [RetryLater(0.01), RetryLater(0.05), OSError("retried")]),
    }

    def handle(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise raised[delivery.body]

    policy = RetryPolicy(3, delays=(3600,), retry_on=OSError)
    with Consumer(vhost.url, ORDERS, handle, retry=policy) as consumer:
        publish(vhost, "orders", numbered(3))
        wait_until(lambda: settled(consumer) == 3, timeout=10, what="all settled")
    dead = {one["payload"]: one["properties"]["headers"] for one in dead_letters(vhost, "orders.dead", 2)}
    reasons = {body: headers[PREFIX + "dead-letter-reason"] for body, headers in dead.items()}
    inside = "tasks (2 sub-exceptions): RetryLater: in 0.05 s; ValueError: given up on"
    assert reasons == {"0": "bad", "1": f"the retry policy gives up on ExceptionGroup: {inside}"}


class NeverAsked(type):
    def __subclasscheck__(cls, subclass: type) -> bool:
        raise RuntimeError("user code")


class Unasked(Exception, metaclass=NeverAsked):
    pass


def changed() -> RetryLater:
    later = RetryLater(1)
    later.delay = "soon"  # type: ignore[assignment]
    return later


@pytest.mark.parametrize("store", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_an_undescribable_exception_costs_only_one_attempt(vhost: VirtualHost, store: bool) -> None:
    """Workers, tasks and the connection survive."""
    raised = {
        b"0": NotYet,
        b"1": Textless,
        b"2": lambda: DeadLetter(Textless()),  # type: ignore[arg-type]
        b"3": Unasked,
        b"4": changed,
    }

    def handle(delivery: Delivery) -> None:
        if delivery.body in raised:
            error = raised[delivery.body]()
            raise error

    options: dict[str, Any] = {"idempotency": MemoryStore()} if store else {}
    policy = RetryPolicy(2, delays=(0.05,), retry_on=(Unasked, Textless))
    with Consumer(vhost.url, ORDERS, handle, retry=policy, **options) as consumer:
        publish(vhost, "orders", numbered(10))
        wait_until(lambda: settled(consumer) == 10, timeout=20, what="all settled")
        assert (consumer.statistics.handled, consumer.statistics.dead_lettered) == (5, 5)
        assert consumer.reconnects == 0


@pytest.mark.soak
def test_retry_later_without_a_delay_follows_the_policy(vhost: VirtualHost) -> None:
    """The message is handled when an attempt succeeds."""

    def until_the_third(delivery: Delivery) -> None:
        if delivery.attempt < 3:
            raise RetryLater

    handler = Handler(then=until_the_third)
    with Consumer(vhost.url, ORDERS, handler, retry=QUICK) as consumer:
        publish(vhost, "orders", numbered(1))
        handler.wait_done(1)
        wait_until(lambda: consumer.statistics.acked == 3, timeout=10, what="acked, with those that were retried")
        assert (consumer.statistics.failed, consumer.statistics.dead_lettered) == (2, 0)
    assert handler.attempts == [1, 2, 3]


@pytest.mark.soak
def test_dead_letter_ends_it_at_once_with_its_reason(vhost: VirtualHost) -> None:
    """This happens on the first attempt, whatever the policy is."""
    handler = Handler(then=raises(DeadLetter("customer 7 is blocked\nfor good")))
    with Consumer(vhost.url, ORDERS, handler) as consumer:
        publish(vhost, "orders", numbered(1))
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
    assert handler.attempts == [1]
    [dead] = dead_letters(vhost, "orders.dead", 1)
    assert dead["properties"]["headers"][PREFIX + "dead-letter-reason"] == "customer 7 is blocked\\nfor good"


@pytest.mark.parametrize("store", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_handler_that_would_end_its_thread_has_failed(vhost: VirtualHost, store: bool) -> None:
    """sys.exit() in a handler ends neither the worker nor the program."""
    check_that_only_the_attempt_ends(vhost, [SystemExit(3), GeneratorExit()], store)


@pytest.mark.parametrize("store", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_a_handler_that_raises_keyboardinterrupt_has_failed(vhost: VirtualHost, store: bool) -> None:
    """In a thread, KeyboardInterrupt comes from the handler itself.

    One from the user is raised in the main thread. On an event loop, it ends the program.
    """
    check_that_only_the_attempt_ends(vhost, [KeyboardInterrupt()], store)


def check_that_only_the_attempt_ends(vhost: VirtualHost, errors: list[BaseException], store: bool) -> None:
    def leave_once(delivery: Delivery) -> None:
        if int(delivery.body) < len(errors) and delivery.attempt == 1:
            raise errors[int(delivery.body)]

    handler = Handler(then=leave_once)
    options: dict[str, Any] = {"idempotency": MemoryStore()} if store else {}  # its lease is longer than the test
    with Consumer(vhost.url, ORDERS, handler, retry=QUICK, **options) as consumer:
        publish(vhost, "orders", numbered(3))
        handler.wait_done(3)
        assert consumer.statistics.failed == len(errors)
    assert sorted(handler.bodies) == numbered(3)


@pytest.mark.soak
def test_messages_waiting_for_a_retry_hold_up_no_others(vhost: VirtualHost) -> None:
    """A long delay does not delay a message with a short one (row 56, in the process)."""

    def fail_first(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise RetryLater(60 if delivery.body == b"slow" else 0.05)

    handler = Handler(then=fail_first)
    with Consumer(vhost.url, ORDERS, handler) as consumer:
        publish(vhost, "orders", [b"slow", b"quick", b"quick"])
        handler.wait_done(2)
        assert consumer.statistics.retried == 3
    assert handler.bodies == [b"quick"] * 2
    wait_until(lambda: sum(vhost.live_counts().values()) == 1, timeout=10, what="the slow one waits, and no other")


def test_redelivered_and_attempt_are_told_apart(any_vhost: VirtualHost) -> None:
    """A message redelivered after its consumer stopped is at its first attempt."""
    with Gate() as gate:
        first = Handler(then=gate)
        with Consumer(any_vhost.url, ORDERS, first) as consumer:
            publish(any_vhost, "orders", numbered(3))
            first.wait_begun(1)
            wait_until(lambda: consumer.statistics.delivered == 3, timeout=10, what="delivered")
            consumer.stop()
            wait_until(lambda: consumer.statistics.requeued == 2, timeout=10, what="requeued")
            gate.open()
    second = Handler()
    with Consumer(any_vhost.url, ORDERS, second):
        second.wait_done(2)
    assert second.bodies == [b"1", b"2"]
    assert second.redelivered == [True, True]
    assert second.attempts == [1, 1]


@pytest.mark.soak
def test_f27_a_requeue_loop_ends_at_our_cap_on_every_broker(any_vhost: VirtualHost) -> None:
    """The broker's own counts and limits do not matter; only failures count."""
    handler = Handler(then=raises(ValueError("never")))
    with Consumer(any_vhost.url, ORDERS, handler, retry=RetryPolicy(6, delays=(0.01,))) as consumer:
        for round_ in range(1, 4):
            publish(any_vhost, "orders", numbered(1))
            wait_until(lambda round_=round_: consumer.statistics.dead_lettered == round_, timeout=10, what="dead")
    assert handler.attempts == [1, 2, 3, 4, 5, 6] * 3


# Dead letters


def test_a_handler_cannot_change_what_is_published_again(vhost: VirtualHost) -> None:
    """A handler that changes the body in place, then fails, leaves the message as is."""
    bodies: list[bytes] = []

    def unpack(delivery: Delivery) -> None:
        bodies.append(delivery.body)
        delivery.body = delivery.body.decode()  # type: ignore[misc, assignment]  # must not be possible

    with Consumer(vhost.url, ORDERS, unpack, retry=QUICK) as consumer:
        send(vhost, "orders", [Message(b"as it came")])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=20, what="dead-lettered")
    [letter] = dead_letters(vhost, "orders.dead", 1)
    assert letter["payload"] == "as it came"
    assert bodies == [b"as it came"] * 3


def test_a_dead_letter_is_the_message_byte_for_byte(any_vhost: VirtualHost) -> None:
    """Properties and foreign headers are unchanged.

    Values that RabbitMQ would act upon are moved to headers of this library.
    """
    message = Message(
        b"\x00\xff body",
        headers={"CC": ["audit"], "nested": {"a": [1, 2.5, None, {"b": b"\xff"}]}, "share": 0.1, "when": None},
        content_type="text/x",
        content_encoding="y",
        correlation_id="c",
        reply_to="r",
        priority=9,
        expiration=60,
        type="t",
        user_id="guest",
        app_id="a",
    )
    seen = Handler(then=raises(DeadLetter("look at it")))
    audit = Queue("audit", dead_letter=None)
    with Consumer(any_vhost.url, ORDERS, seen, topology=[audit]) as consumer:
        send(any_vhost, "orders", [message])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
    [original] = seen.begun
    with Consumer(any_vhost.url, "orders.dead") as dead, dead.get(timeout=10) as [letter]:
        assert letter.body == original.body == message.body
        before, after = split_properties(original.properties), split_properties(letter.properties)
        assert after.keys() == before.keys() - {"user_id", "expiration"}
        assert {name: after[name] for name in after if name != "headers"} == {
            name: before[name] for name in after if name != "headers"
        }
        headers = letter.headers
        assert {name: value for name, value in headers.items() if not name.startswith(PREFIX)} == {
            name: value for name, value in original.headers.items() if name != "CC"
        }
        assert headers[PREFIX + "original-cc"] == ["audit"]
        assert headers[PREFIX + "original-user-id"] == "guest"
        assert headers[PREFIX + "original-expiration"] == "60000"
    any_vhost.wait_for_messages("audit", 1)


@pytest.mark.parametrize("kind", ["name", "queue"])
def test_dead_letters_go_where_they_are_told(vhost: VirtualHost, kind: str) -> None:
    """They go to a queue that the consumer declares, or to an existing one."""
    bin_ = Queue("bin", type="classic", dead_letter=None)
    target, topology = ("bin", [bin_]) if kind == "name" else (bin_, [])
    handler = Handler(then=raises(DeadLetter("no")))
    with Consumer(vhost.url, ORDERS, handler, dead_letter=target, topology=topology) as consumer:
        publish(vhost, "orders", numbered(2))
        wait_until(lambda: consumer.statistics.dead_lettered == 2, timeout=10, what="dead-lettered")
    vhost.wait_for_messages("bin", 2)


def test_without_a_dead_letter_queue_a_message_is_rejected(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rejection is logged, and the broker's own dead-lettering keeps it.

    There is no warning at the start, because the consumer was configured this way.
    """
    handler = Handler(then=raises(DeadLetter("no")))
    with Consumer(vhost.url, ORDERS, handler, dead_letter=None) as consumer:
        assert "no dead-letter queue" not in caplog.text
        publish(vhost, "orders", numbered(2))
        wait_until(lambda: consumer.statistics.rejected == 2, timeout=10, what="rejected")
    assert caplog.text.count("rejected: no") == 2
    assert [
        dead["properties"]["headers"]["x-first-death-reason"] for dead in dead_letters(vhost, "orders.dead", 2)
    ] == [
        "rejected",
        "rejected",
    ]


def test_an_alarm_holds_up_dead_letters_but_not_handlers(private_broker: Any, private_vhost: VirtualHost) -> None:
    """It blocks the connection of dead letters, not that of deliveries and acks."""

    def fail_odd(delivery: Delivery) -> None:
        if int(delivery.body) % 2:
            raise DeadLetter("odd")

    handler = Handler(then=fail_odd)
    with Consumer(private_vhost.url, ORDERS, handler) as consumer:
        publish(private_vhost, "orders", [b"1"])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="the connection is opened")
        with Gate() as gate:
            handler._then, before = gate, handler._then
            publish(private_vhost, "orders", numbered(40, first=2))
            handler.wait_begun(2)
            private_broker.alarm("memory")
            handler._then = before
        handler.wait_done(20)
        wait_until(lambda: consumer.statistics.acked >= 20, timeout=10, what="handled ones acked")
        private_broker.clear_alarm("memory")
        wait_until(lambda: consumer.statistics.dead_lettered == 21, timeout=60, what="the odd ones dead-lettered")


# Batches


class Batches:
    """A batch handler that records its batches."""

    def __init__(self, answer: Callable[[list[Delivery]], object] = lambda _: None) -> None:
        self.given: list[list[bytes]] = []
        self._answer = answer
        self._changed = threading.Condition()

    def __call__(self, deliveries: list[Delivery]) -> object:
        with self._changed:
            self.given.append([delivery.body for delivery in deliveries])
            self._changed.notify_all()
        return self._answer(deliveries)

    def wait_for(self, count: int) -> list[list[bytes]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.given) >= count, 30), self.given
        return self.given


def test_a_batch_is_full_or_has_waited_and_none_acks_all(vhost: VirtualHost) -> None:
    """Full batches are handled at once, the rest after batch_wait."""
    handler = Batches()
    declare(vhost)
    publish(vhost, "orders", numbered(10))
    started = time.monotonic()
    with Consumer(vhost.url, ORDERS, handler, batch_size=4, batch_wait=1.0) as consumer:
        assert handler.wait_for(3) == [numbered(4), numbered(4, first=4), numbered(2, first=8)]
        assert time.monotonic() - started >= 1.0
        wait_until(lambda: consumer.statistics.acked == 10, timeout=10, what="all acked")


@pytest.mark.parametrize("store", [False, True])
def test_a_batch_handler_gives_a_verdict_per_item(vhost: VirtualHost, store: bool) -> None:
    """One answer has Ack, None, RetryLater and DeadLetter; a retried item comes alone."""

    def judge(deliveries: list[Delivery]) -> object:
        if len(deliveries) == 1:
            assert deliveries[0].attempt == 2
            return None
        return [Ack, Ack(), RetryLater(0.05), DeadLetter("bad"), None]

    handler = Batches(judge)
    options: dict[str, Any] = {"idempotency": MemoryStore()} if store else {}
    options["retry"] = RetryPolicy(backend="memory")
    with Consumer(vhost.url, ORDERS, handler, batch_size=5, batch_wait=10, **options) as consumer:
        publish(vhost, "orders", numbered(5))
        wait_until(lambda: settled(consumer) == 5, timeout=10, what="all settled")
        assert (consumer.statistics.handled, consumer.statistics.dead_lettered) == (4, 1)
    assert handler.given == [numbered(5), [b"2"]]
    assert [dead["payload"] for dead in dead_letters(vhost, "orders.dead", 1)] == ["3"]


@pytest.mark.parametrize("store", [False, True])
def test_a_batch_that_raises_is_tried_item_by_item(vhost: VirtualHost, checker: Audit, store: bool) -> None:
    """Each item is tried alone, because the culprit is unknown.

    Attempts are counted from there, and good items are handled once.
    """

    def fail(deliveries: list[Delivery]) -> None:
        if any(delivery.body == b"3" for delivery in deliveries):
            raise ValueError("one of them is bad")
        for delivery in deliveries:
            checker.effect(delivery.message_id or "")
            checker.handled(delivery.message_id or "")

    handler = Batches(fail)
    declare(vhost)
    publish(vhost, "orders", numbered(5), checker)
    options: dict[str, Any] = {"idempotency": MemoryStore()} if store else {}
    with Consumer(vhost.url, ORDERS, handler, batch_size=5, retry=QUICK, **options) as consumer:
        wait_until(lambda: settled(consumer) == 5, timeout=10, what="all settled")
    assert handler.given[0] == numbered(5)
    assert sorted(map(tuple, handler.given[1:])) == sorted([(body,) for body in numbered(5)] + [(b"3",)] * 2)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close(effects_once=True)
    assert (balance.handled, balance.dead_lettered) == (4, 1)


TOUCHES: tuple[Callable[[list[Delivery]], object], ...] = (
    lambda batch: batch.sort(key=lambda one: one.body, reverse=True),
    lambda batch: batch.clear(),
    lambda batch: batch.pop(),
    lambda batch: batch.append(batch[0]),
)


@pytest.mark.parametrize("store", [False, True])
def test_a_batch_handler_may_do_as_it_likes_with_its_list(vhost: VirtualHost, store: bool) -> None:
    """Only the poison message is dead-lettered, even if its place has changed.

    The list belongs to the handler.
    """
    touch = TOUCHES[0]

    def handle(batch: list[Delivery]) -> list[object] | None:
        if batch[0].body == b"whole":
            touch(batch)
            return None
        if len(batch) == 9:
            touch(batch)
        return [DeadLetter("bad") if one.body == b"2" else Ack for one in batch]

    options: dict[str, Any] = {"idempotency": MemoryStore()} if store else {}
    with Consumer(vhost.url, ORDERS, handle, batch_size=9, batch_wait=30, **options) as consumer:
        for round_, one in enumerate(TOUCHES, 1):
            touch, done = one, 18 * round_
            publish(vhost, "orders", numbered(9))
            wait_until(lambda done=done: settled(consumer) == done - 9, timeout=10, what="all settled")
            publish(vhost, "orders", [b"whole"] * 9)
            wait_until(lambda done=done: consumer.statistics.acked == done, timeout=10, what="the worker goes on")
            assert (consumer.statistics.handled, consumer.statistics.dead_lettered) == (done - round_, round_)
    assert [dead["payload"] for dead in dead_letters(vhost, "orders.dead", len(TOUCHES))] == ["2"] * len(TOUCHES)


def test_a_wrong_answer_of_a_batch_handler_fails_the_batch(vhost: VirtualHost) -> None:
    """It is tried item by item; an item with a wrong answer is dead-lettered."""
    answer: object = None
    handler = Batches(lambda deliveries: answer if len(deliveries) > 1 else None)
    with Consumer(vhost.url, ORDERS, handler, batch_size=3, batch_wait=30) as consumer:
        for wrong in ([Ack], [Ack] * 9, "ok", 5, {"0": Ack}):
            answer, before = wrong, consumer.statistics.acked
            handler.given.clear()
            publish(vhost, "orders", numbered(3))
            wait_until(
                lambda before=before: consumer.statistics.acked == before + 3, timeout=10, what="handled one by one"
            )
            assert handler.given == [numbered(3), [b"0"], [b"1"], [b"2"]]


def test_batches_of_several_workers_and_the_prefetch(vhost: VirtualHost) -> None:
    """The prefetch has room for a batch per worker; each message is in one batch."""
    together = threading.Barrier(2)
    handler = Batches(lambda _: [None] * 10 if together.wait(30) >= 0 else None)
    with Consumer(vhost.url, ORDERS, handler, batch_size=10, batch_wait=10, prefetch=20, concurrency=2) as consumer:
        publish(vhost, "orders", numbered(100))
        wait_until(lambda: consumer.statistics.acked == 100, timeout=30, what="all acked")
    assert sorted(int(body) for batch in handler.given for body in batch) == list(range(100))
    assert {len(batch) for batch in handler.given} == {10}


def settled(consumer: Consumer) -> int:
    """Return the number of messages handled or dead-lettered, without retries."""
    return consumer.statistics.handled + consumer.statistics.dead_lettered


# Metrics


def test_the_metrics_of_a_run(vhost: VirtualHost) -> None:
    """The metrics count deliveries, results, acks and ack frames.

    Nothing is outstanding at the end.
    """
    registry = CollectorRegistry()

    def fail_nines(delivery: Delivery) -> None:
        if delivery.body.endswith(b"9"):
            raise ValueError("no")

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"reliable_mq_{name}", {"consumer": "billing", "queue": "orders"})

    handler = Handler(then=fail_nines)
    with Consumer(vhost.url, ORDERS, handler, retry=QUICK, name="billing", registry=registry) as consumer:
        publish(vhost, "orders", numbered(100))
        wait_until(lambda: consumer.statistics.acked == 120, timeout=20, what="all settled")
        assert value("consumer_connected") == 1
        assert value("consumer_unacked") == 0
        assert value("consumer_deliveries_total") == 120
        assert value("consumer_handled_total") == 90
        assert value("consumer_failed_attempts_total") == 30
        assert value("consumer_retried_total") == value("consumer_delayed_total") == 20
        assert value("consumer_dead_lettered_total") == 10
        sent, saved = value("consumer_acks_sent_total"), value("consumer_acks_saved_total")
        assert sent is not None
        assert saved is not None
        assert sent + saved == 120
        assert sent < 120
        assert value("consumer_handler_seconds_count") == 120
    assert value("consumer_connected") is None, "a consumer that is closed is registered no more"


def test_two_consumers_share_a_queue(vhost: VirtualHost, checker: Audit) -> None:
    """Each message goes to one of them."""
    one, other = Handler(account=checker), Handler(account=checker)
    first = Consumer(vhost.url, ORDERS, one, prefetch=10, name="one")
    second = Consumer(vhost.url, ORDERS, other, prefetch=10, name="other")
    with running(first), running(second):
        wait_until(lambda: first.connected and second.connected, timeout=10, what="both consume")
        publish(vhost, "orders", numbered(1000), checker)
        wait_until(lambda: len(one.done) + len(other.done) >= 1000, timeout=30, what="all handled")
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close()
    assert balance.handled == 1000
    assert not balance.duplicated
    assert one.done
    assert other.done
