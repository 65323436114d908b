"""Row 61: a broker is killed while a quorum queue or stream is brand new.

That is younger than a second and a half. Tests here set the grace themselves; all other suites treat new queues as
old.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import pika
import pytest
import tenacity

from integration.support.consuming import numbered, publish
from integration.support.new_queues import elect_leaders, let_new_queues_age, signals_at_once
from integration.support.publishing import Load
from integration.support.seeds import soaking
from integration.support.set_up import broker_image
from reliable_mq import (
    Consumer,
    DeadLetter,
    Delivery,
    Message,
    Publisher,
    PublishUnconfirmed,
    Queue,
    RetryLater,
    RetryPolicy,
)
from reliable_mq.testing import RabbitMQ
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from reliable_mq.testing import Audit, Direction, FaultProxyFactory, Frame, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

GRACE = 2.0
CONNECT = 4.0  # seconds that are allowed for a connection
AMPLE = 6.0  # seconds of grace, enough for the actions of a test
ORDERS = Queue("orders", dead_letter=None)
SOON = tenacity.wait_fixed(0.1)
LETTERS = 50
PLENTY = 100  # seconds for a broker to start under load, and for later steps
# Seconds after which a delay queue repeats its dead-lettering to a queue without a leader. RabbitMQ 4.0 leaves such
# queues.
DEAD_LETTERED_AGAIN = 180


def made_before(vhost: VirtualHost, *queues: Queue) -> None:
    """Declare queues as another process would have, and let them age."""
    with Publisher(vhost.url, topology=queues) as publisher:
        publisher.connect()
    let_new_queues_age()


def kill_and_start(broker: RabbitMQ) -> None:
    """Kill and start the broker; elect leaders on RabbitMQ 4.0.

    An operator has to do that on 4.0, or a queue that it has lost confirms no messages.
    """
    broker.kill()
    broker.start()
    if broker.version.startswith("4.0."):
        wait_until(lambda: not elect_leaders(broker), timeout=PLENTY, what="leaders")


@pytest.mark.soak
def test_a_broker_loses_confirmed_messages_in_a_brand_new_queue(private_vhost: VirtualHost) -> None:
    """The grace exists for this loss.

    If this test fails, RabbitMQ is fixed, and only earlier versions need the grace.
    """
    broker = private_vhost.broker
    lost = 0
    for name in ("one", "two", "three"):  # the broker saves twice a second, so one may be in time
        with Publisher(private_vhost.url, topology=[Queue(name, dead_letter=None)], new_queue_grace=0) as publisher:
            publisher.publish(Message(b"confirmed"), routing_key=name)
            kill_and_start(broker)
        lost += not private_vhost.live_counts()[name]
        if lost:
            break
    assert lost


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("private_broker", ["4.0"], indirect=True)
def test_rabbitmq_4_0_leaves_a_queue_it_lost_without_a_leader(
    private_vhost: VirtualHost, publisher_api: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No message is confirmed before an operator helps, and no confirmed one is lost.

    If this test fails, 4.0 is fixed.
    """
    broker = private_vhost.broker
    for name in ("one", "two", "three"):  # the broker saves twice a second, so one may be in time
        with Publisher(
            private_vhost.url,
            topology=[Queue(name, dead_letter=None)],
            new_queue_grace=AMPLE,
            confirm_timeout=4,
            reconnect_wait=SOON,
        ) as publisher:
            confirmation = publisher.submit(Message(b"x"), routing_key=name)
            private_vhost.wait_for_messages(name, 1)
            broker.kill()
            broker.start()
            wait_until(lambda: publisher.connected, timeout=PLENTY, what="connected again")
            with suppress(TimeoutError):
                confirmation.result(10)
            stuck = not confirmation.done()
            assert elect_leaders(broker) == stuck
            assert confirmation.result(PLENTY).possible_duplicate
        assert private_vhost.live_counts()[name]
        if stuck:
            break
    assert stuck
    assert "does a quorum queue have no leader?" in caplog.text


@pytest.mark.timeout(300)
def test_f61_the_broker_is_killed_while_work_queues_are_new(
    private_vhost: VirtualHost, publisher_api: str, rng: Random, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """The broker is killed again once it is back.

    A lost queue is declared again at the reconnect, and is new again. For one of two publishers, the broker's host
    vanishes before the first kill: it sends no reset, so the connection stays open. That publisher notices it, too.
    """
    broker = private_vhost.broker
    old, silent = Queue("old", dead_letter=None), Queue("silent", dead_letter=None)
    made_before(private_vhost, old)
    proxy = fault_proxy(private_vhost.url)
    with (
        Publisher(
            proxy.url, topology=[old, silent], new_queue_grace=2 * AMPLE, connect_timeout=4, reconnect_wait=SOON
        ) as deserted,
        Publisher(
            private_vhost.url,
            topology=[ORDERS],
            new_queue_grace=GRACE,
            delivery_timeout=2 * PLENTY,  # a message may wait for both starts
            reconnect_wait=SOON,
        ) as publisher,
    ):
        confirmation = deserted.submit(Message(b"x"), routing_key="silent")
        private_vhost.wait_for_messages("silent", 1)
        deserted.publish(Message(b"confirmed after it, by the same channel"), routing_key="old")
        with Load(checker, publisher, "orders") as load:
            publisher.connect()
            proxy.black_hole(new_connections=False)
            for latest in (1.0, 0.7):
                time.sleep(rng.uniform(0.0, latest))
                kill_and_start(broker)
                wait_until(lambda: publisher.connected, timeout=PLENTY, what="connected again")
            load.wait_for_confirms(100)
        receipt = confirmation.result(PLENTY)
    assert load.errors == []
    checker.drain(private_vhost, ["orders"])
    checker.close()
    assert receipt.attempts >= 2
    assert receipt.possible_duplicate
    assert private_vhost.live_counts()["silent"]  # on a busy machine, the first one may have been saved, too


@pytest.mark.soak
def test_f61_the_broker_is_killed_while_its_first_stream_is_new(publisher_api: str, rng: Random) -> None:
    """RabbitMQ then also creates the process that knows all streams.

    If it loses that process, the stream is not usable as a stream.
    """
    events = Queue("events", type="stream")
    with RabbitMQ(broker_image("newest")) as broker:
        with Publisher(
            broker.url, topology=[events], new_queue_grace=GRACE, reconnect_wait=SOON, delivery_timeout=10
        ) as publisher:
            began = time.monotonic()
            publisher.connect()
            confirmations = [publisher.submit(Message(b"x"), routing_key=events.name) for _ in range(100)]
            time.sleep(rng.uniform(0.1, 0.6))
            early = any(one.done() for one in confirmations)
            assert not early or time.monotonic() - began > 0.95 * GRACE
            kill_and_start(broker)
            failures = [one.exception(PLENTY) for one in confirmations]
        assert {type(failure) for failure in failures} <= {type(None), PublishUnconfirmed}
        confirmed = {one.message_id for one in confirmations if one.exception() is None}
        if confirmed:  # the stream was saved in time
            found: set[str | None] = set()
            with Consumer(broker.url, events, lambda delivery: found.add(delivery.message_id), offset="first"):
                wait_until(lambda: confirmed <= found, timeout=PLENTY, what="what was confirmed")


class Failing:
    """A handler that fails first attempts with a given exception.

    It records the messages that it handles.
    """

    def __init__(self, checker: Audit, failure: Exception | None) -> None:
        self.calls = 0
        self._checker = checker
        self._failure = failure

    def __call__(self, delivery: Delivery) -> None:
        self.calls += 1
        if self._failure is not None and (delivery.attempt == 1 or isinstance(self._failure, DeadLetter)):
            raise self._failure
        if delivery.message_id is not None:
            self._checker.handled(delivery.message_id)


def returned_twice(vhost: VirtualHost, queue: str) -> None:
    """Reject messages twice, so that they are suspect. RabbitMQ 4.3 counts no nack."""
    with vhost.connect() as connection:
        for _ in range(2):
            with suppress(pika.exceptions.ChannelClosed):
                channel = connection.channel()
                tags = [channel.basic_get(queue)[0].delivery_tag for _ in range(LETTERS)]
                for tag in tags:
                    channel.basic_reject(tag, requeue=True)
                channel.close()


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["delay queue", "dead-letter queue", "quarantine"])
def test_f61_a_kill_while_a_consumers_queue_is_new_loses_nothing(
    private_vhost: VirtualHost, consumer_api: str, kind: str, rng: Random, checker: Audit
) -> None:
    """The consumer acks originals only when their copies are safe.

    The work queue is old. The dead-letter case does not fail without a grace: that queue is declared with the
    subscription and is 0.3 s old at the first ack of an original. Neither broker line has lost a queue of that age so
    far.
    """
    broker = private_vhost.broker
    queue = Queue("work", dead_letter=None)
    made_before(private_vhost, queue)
    publish(private_vhost, "work", numbered(LETTERS), checker)
    failure: Exception | None = None
    if kind == "delay queue":
        failure = RetryLater(2.0)  # not a delay of the policy, so its queue is declared when needed
    elif kind == "dead-letter queue":
        failure = DeadLetter("as the test wants it")
    else:
        returned_twice(private_vhost, "work")
    handler = Failing(checker, failure)
    with Consumer(
        private_vhost.url,
        queue,
        handler,
        retry=RetryPolicy(5, delays=(0.2,)),
        dead_letter=Queue("letters", dead_letter=None),
        new_queue_grace=GRACE,
        reconnect_wait=SOON,
    ) as consumer:
        if failure is not None:
            wait_until(lambda: handler.calls >= LETTERS, timeout=PLENTY, what="first attempts")
        time.sleep(rng.uniform(0.0, 1.5))
        kill_and_start(broker)
        if kind == "dead-letter queue":
            letters = partial(private_vhost.live_counts, ["letters"])  # those that were not lost are there twice
            wait_until(lambda: letters()["letters"] >= LETTERS, timeout=PLENTY, what="dead letters", interval=0.5)
        else:
            patience = PLENTY + (DEAD_LETTERED_AGAIN if broker.version.startswith("4.0.") else 0)
            try:
                wait_until(lambda: checker.balance().handled >= LETTERS, timeout=patience, what="all handled")
            except TimeoutError:
                # Messages may never expire in a delay queue that 4.0 lost and an operator revived.
                if not broker.version.startswith("4.0."):
                    raise
            else:
                assert kind != "quarantine" or consumer.statistics.quarantined
        assert kind == "quarantine" or not consumer.statistics.quarantined
        consumer.stop()
    delay_queues = [name for name in private_vhost.live_counts() if ".retry." in name]
    checker.drain(private_vhost, ["work", "work.quarantine", *delay_queues], dead_letters=["letters"])
    checker.close()


def test_f61_an_original_is_acked_once_its_letters_queue_is_old(
    vhost: VirtualHost, consumer_api: str, fault_proxy: FaultProxyFactory
) -> None:
    """The confirm of the dead letter is immediate, but not final before that."""
    queue = Queue("work", dead_letter=None)
    made_before(vhost, queue)
    publish(vhost, "work", numbered(1))
    proxy = fault_proxy(vhost.url)

    def refuse(_delivery: Delivery) -> None:
        raise DeadLetter("as the test wants it")

    began = time.monotonic()
    with Consumer(
        proxy.url, queue, refuse, dead_letter=Queue("letters", dead_letter=None), new_queue_grace=AMPLE
    ) as consumer:
        proxy.wait_for(lambda: proxy.forwarded("basic.ack", "to_client"), timeout=PLENTY, what="the confirm")
        wait_until(lambda: consumer.statistics.acked, timeout=PLENTY, what="the original is acked")
        assert time.monotonic() - began > 0.95 * AMPLE
    vhost.wait_for_messages("letters", 1)
    assert vhost.live_counts()["work"] == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_making_1_200_queues_may_outlast_the_connect_timeout(
    publisher_api: str, fault_proxy: FaultProxyFactory, report: Callable[[str], None]
) -> None:
    """The broker answers all the time.

    It is a separate broker, because the queues are deleted with it.
    """
    queues = [Queue(f"orders-{number}", dead_letter=None) for number in range(1200)]
    with RabbitMQ(broker_image("newest")) as broker:
        proxy = fault_proxy(broker.url)
        for what in ("made", "found"):
            began = time.monotonic()
            with Publisher(
                proxy.url, topology=queues, connect_timeout=CONNECT, delivery_timeout=600, new_queue_grace=GRACE
            ) as publisher:
                publisher.connect()
                took = time.monotonic() - began
                publisher.publish(Message(b"x"), routing_key="orders-1199")
            report(f"{len(queues)} queues are {what} in {took:.1f} s")
            assert what == "found" or took > CONNECT, "too few queues to show it"
        assert proxy.connections == 2


def test_classic_queues_have_no_grace(vhost: VirtualHost, publisher_api: str) -> None:
    queue = Queue("q", type="classic", dead_letter=None)
    with Publisher(vhost.url, topology=[queue], new_queue_grace=60) as publisher:
        began = time.monotonic()
        publisher.publish(Message(b"x"), routing_key="q", timeout=30)
        assert time.monotonic() - began < 30


def test_a_publish_into_a_queue_that_was_made_waits(vhost: VirtualHost, publisher_api: str) -> None:
    began = time.monotonic()
    with Publisher(vhost.url, topology=[ORDERS], new_queue_grace=GRACE) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        assert time.monotonic() - began > 0.95 * GRACE


def test_a_publish_into_a_queue_that_was_found_does_not_wait(vhost: VirtualHost, publisher_api: str) -> None:
    with Publisher(vhost.url, topology=[ORDERS], new_queue_grace=0) as publisher:  # does not record the queue as new
        publisher.connect()
    with Publisher(vhost.url, topology=[ORDERS], new_queue_grace=60) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders", timeout=30)


def test_a_second_publisher_skips_the_grace_of_a_proven_queue(
    vhost: VirtualHost, publisher_api: str, fault_proxy: FaultProxyFactory
) -> None:
    """The grace applies once to a queue, not once per publisher."""
    with Publisher(vhost.url, topology=[ORDERS], new_queue_grace=GRACE) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], new_queue_grace=GRACE) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        assert proxy.seen("confirm.select-ok") == 1, "it waited for answers that prove the queue's age"


def test_all_connections_of_a_process_know_of_its_new_queues(vhost: VirtualHost, publisher_api: str) -> None:
    """It does not matter which connection declared a queue.

    Here, a publisher without a topology publishes to a queue of a consumer.
    """
    began = time.monotonic()
    with (
        Consumer(vhost.url, ORDERS, lambda _delivery: None, new_queue_grace=60) as consumer,
        Publisher(vhost.url, new_queue_grace=GRACE) as publisher,
    ):
        wait_until(lambda: consumer.connected, timeout=30, what="subscribed")
        publisher.publish(Message(b"x"), routing_key="orders")
        assert time.monotonic() - began > 0.95 * GRACE


def test_a_lost_connection_republishes_messages_of_a_new_queue(
    vhost: VirtualHost, publisher_api: str, fault_proxy: FaultProxyFactory
) -> None:
    """After the loss, it is unknown whether the broker is alive.

    The first connection gets no answer that proves the queue's age, however long the test takes.
    """
    proxy = fault_proxy(vhost.url)
    answers = count()

    def unproven(_: Direction, frame: Frame) -> list[Frame]:
        lost = frame.name == "confirm.select-ok" and proxy.connections == 1 and next(answers)  # 0 opens the channel
        return [] if lost else [frame]

    proxy.rewrite(unproven, "to_client")
    with Publisher(proxy.url, topology=[ORDERS], new_queue_grace=GRACE, reconnect_wait=SOON) as publisher:
        confirmation = publisher.submit(Message(b"x"), routing_key="orders")
        vhost.wait_for_messages("orders", 1)
        assert not confirmation.done()
        proxy.cut()
        receipt = confirmation.result(30)
    assert receipt.possible_duplicate
    assert receipt.attempts == 2
    vhost.wait_for_messages("orders", 2)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_f61_a_freeze_and_kill_with_a_new_queue_loses_nothing(private_vhost: VirtualHost, publisher_api: str) -> None:
    """A frozen broker does not save its queue, though time passes for the publisher."""
    broker = private_vhost.broker
    for number in range(5):
        queue = Queue(f"orders-{number}", dead_letter=None)
        began = time.monotonic()
        with Publisher(
            private_vhost.url, topology=[queue], new_queue_grace=AMPLE, delivery_timeout=200, reconnect_wait=SOON
        ) as publisher:
            confirmation = publisher.submit(Message(b"x"), routing_key=queue.name)
            private_vhost.wait_for_messages(queue.name, 1)
            broker.pause()
            if time.monotonic() - began > AMPLE:  # on a busy machine, the queue may have been old when the broker froze
                broker.unpause()
                continue
            with pytest.raises(TimeoutError):
                confirmation.result(2 * AMPLE)
            kill_and_start(broker)
            assert confirmation.result(PLENTY).possible_duplicate
        break
    else:
        pytest.fail("five times, the broker froze too late")
    assert private_vhost.live_counts()[queue.name]


@pytest.mark.timeout(300)
def test_f61_a_kill_at_the_thaw_with_a_new_queue_loses_nothing(private_vhost: VirtualHost, publisher_api: str) -> None:
    """The broker resumes after the grace and is killed at the first confirm.

    It has then run for less time than a queue needs.
    """
    broker = private_vhost.broker
    left = 3 if soaking() else 1  # the broker saves twice a second, so it may save at once
    for number in range(left + 4):
        queue = Queue(f"orders-{number}", dead_letter=None)
        with signals_at_once(broker) as send_signal:
            began = time.monotonic()
            with Publisher(
                private_vhost.url, topology=[queue], new_queue_grace=GRACE, reconnect_wait=SOON
            ) as publisher:
                confirmation = publisher.submit(Message(b"x"), routing_key=queue.name)
                private_vhost.wait_for_messages(queue.name, 1)
                send_signal("STOP")
                if time.monotonic() - began > GRACE:  # on a busy machine, the queue may have been old by then
                    send_signal("CONT")
                    continue
                confirmation.add_done_callback(lambda _: send_signal("KILL"))
                with pytest.raises(TimeoutError):
                    confirmation.result(1.5 * GRACE)
                send_signal("CONT")
                confirmation.result(PLENTY)
                broker.wait_for_status("exited")
                broker.start()
        assert private_vhost.live_counts()[queue.name]
        left -= 1
        if not left:
            break
    else:
        pytest.fail("the broker froze too late, again and again")


def test_a_queue_is_old_once_its_connections_broker_has_answered(
    vhost: VirtualHost, publisher_api: str, fault_proxy: FaultProxyFactory
) -> None:
    """This also holds for a queue without publishes.

    A later loss of the connection does not make it new again.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], new_queue_grace=GRACE, reconnect_wait=SOON) as publisher:
        publisher.connect()
        proxy.wait_for(lambda: proxy.forwarded("confirm.select-ok") == 1 + 7, 30, what="the answers that prove its age")
        proxy.cut(reset=False)  # after the answer, which the publisher reads first
        proxy.heal()
        wait_until(lambda: proxy.connections == 2 and publisher.connected, timeout=30, what="connected again")
        asked = proxy.seen("confirm.select-ok")
        publisher.publish(Message(b"x"), routing_key="orders")
        assert proxy.seen("confirm.select-ok") == asked, "it waited for another answer"
