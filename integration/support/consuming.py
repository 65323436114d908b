"""Consuming under faults: messages, and handlers that record their deliveries."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from reliable_mq import Message, Publisher
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reliable_mq import Consumer, Delivery, Queue, ReliableMQError
    from reliable_mq.testing import VirtualHost
    from reliable_mq.testing.audit import Audit


_CONSUMERS = """
rabbit_json:encode([maps:from_list([
    {{Key, case {{Key, Value}} of
        {{queue_name, {{resource, _, queue, Name}}}} -> Name;
        {{arguments, Table}} -> rabbit_misc:amqp_table(Table);
        _ -> Value
    end}}
    || {{Key, Value}} <- Consumer,
    lists:member(Key, [queue_name, consumer_tag, ack_required, prefetch_count, active, arguments])
]) || Consumer <- rabbit_amqqueue:consumers_all(<<"{vhost}">>)])
"""


def publish(
    vhost: VirtualHost,
    routing_key: str,
    bodies: Iterable[bytes],
    account: Audit | None = None,
    *,
    new_queue_grace: float = 0.0,
) -> list[str]:
    """Publish directly to the broker, with confirms. Return the message ids, in order.

    With a grace, the broker may be killed afterwards, although this process has only just created the queue.
    """
    messages = [Message(body) for body in bodies]
    send(vhost, routing_key, messages, account, new_queue_grace=new_queue_grace)
    return [message.message_id for message in messages]


def send(
    vhost: VirtualHost,
    routing_key: str,
    messages: Iterable[Message],
    account: Audit | None = None,
    exchange: str = "",
    *,
    new_queue_grace: float = 0.0,
) -> None:
    """Publish messages directly to the broker, with confirms, and record them."""
    with Publisher(vhost.url, name="test-publisher", new_queue_grace=new_queue_grace) as publisher:
        for message in messages:
            if account is not None:
                account.attempted(message.message_id)
            publisher.submit(message, exchange=exchange, routing_key=routing_key)
        publisher.flush(60)
    if account is not None:  # leaving the publisher raises unless all are confirmed
        for message in messages:
            account.confirmed(message.message_id)


def numbered(count: int, first: int = 0) -> list[bytes]:
    """Return bodies that are all different."""
    return [b"%d" % number for number in range(first, first + count)]


class Handler:
    """A handler that records its deliveries and lets a test wait for them.

    Args:
        then: Called with each delivery. An exception that it raises is the handler's failure.
        account: Where each handled message and its effect are recorded.

    Attributes:
        begun: All deliveries, in the order in which their handlers started.
        attempts, redelivered: The values of these deliveries at that time. A later attempt changes the delivery.
        done: The deliveries that were handled.
    """

    def __init__(self, then: Callable[[Delivery], object] | None = None, account: Audit | None = None) -> None:
        self.begun: list[Delivery] = []
        self.attempts: list[int] = []
        self.redelivered: list[bool] = []
        self.done: list[Delivery] = []
        self._handled: set[bytes] = set()  # the bodies of `done`
        self._then = then
        self._account = account
        self._changed = threading.Condition()

    def __call__(self, delivery: Delivery) -> None:
        with self._changed:
            self.begun.append(delivery)
            self.attempts.append(delivery.attempt)
            self.redelivered.append(delivery.redelivered)
            self._changed.notify_all()
        if self._then is not None:
            self._then(delivery)
        if self._account is not None:
            self._account.effect(delivery.message_id or "")
            self._account.handled(delivery.message_id or "")
        with self._changed:
            self.done.append(delivery)
            self._handled.add(delivery.body)
            self._changed.notify_all()

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of the handled deliveries, in order."""
        return [delivery.body for delivery in list(self.done)]

    def wait_begun(self, count: int, timeout: float = 60) -> list[Delivery]:
        """Wait until `count` handlers have started; return the first `count` deliveries."""
        self.wait_until(lambda: len(self.begun) >= count, timeout, lambda: f"{count} begun, not {len(self.begun)}")
        return self.begun[:count]

    def wait_done(self, count: int, timeout: float = 60) -> list[Delivery]:
        """Wait until `count` deliveries are handled; return the first `count`."""
        self.wait_until(lambda: len(self.done) >= count, timeout, lambda: f"{count} handled, not {len(self.done)}")
        return self.done[:count]

    def wait_bodies(self, bodies: Iterable[bytes], timeout: float = 60) -> None:
        """Wait until each of these bodies was handled at least once."""
        wanted = set(bodies)
        self.wait_until(
            lambda: wanted <= self._handled,
            timeout,
            lambda: f"handled: {len(wanted - self._handled)} are missing",
        )

    def wait_until(self, condition: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
        """Wait for a condition, which is checked whenever a handler starts or ends."""
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise TimeoutError(f"not within {timeout:g} s: {what()}")


class Gate:
    """Blocks handlers until it is opened; then it stays open.

    Used as ``Handler(then=gate)``.
    """

    def __init__(self, holds: Callable[[Delivery], bool] = lambda _: True) -> None:
        self._holds = holds
        self._open = threading.Event()

    def __call__(self, delivery: Delivery) -> None:
        if self._holds(delivery):
            assert self._open.wait(120), "the test never opened the gate"

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.open()


def restarted(kind: type[Consumer], url: str, queue: Queue, times: int) -> list[bytes]:
    """Run consumers one after the other, each stopped in its first handler. Return the handled bodies.

    Each has prefetched at least ten messages. ``kind`` is the class of the consumers.
    """
    handled: list[bytes] = []
    for _ in range(times):
        with Gate() as gate:
            handler = Handler(then=gate)
            with kind(url, queue, handler) as consumer:
                wait_until(lambda now=consumer: now.statistics.delivered >= 10, timeout=20, what="delivered")
                handler.wait_begun(1)
                consumer.stop()
                wait_until(lambda now=consumer: not now.connected, timeout=20, what="stopping")
                gate.open()
        handled += handler.bodies
    return handled


class Running:
    """``consumer.run()`` on a thread, and the exception that it raised."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="running")

    def _run(self) -> None:
        try:
            self.consumer.run()
        except BaseException as error:  # passed to the test
            self.error = error

    def start(self) -> Self:
        self._thread.start()
        return self

    def join(self, timeout: float = 30) -> BaseException | None:
        """Wait until ``run`` returns; return the exception that it raised, if any."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "run() does not return"
        return self.error

    @property
    def returned(self) -> bool:
        return not self._thread.is_alive()


@contextmanager
def running(consumer: Consumer) -> Iterator[Running]:
    """Run a consumer on a thread. At the end, stop it and raise its error, if any."""
    run = Running(consumer).start()
    try:
        yield run
    finally:
        consumer.stop()
        error = run.join(60)
    if error is not None:
        raise error


def run_to_its_error(consumer: Consumer, kind: type[ReliableMQError], timeout: float = 30) -> ReliableMQError:
    """Run a consumer until it ends with an error of this type; return the error."""
    run = Running(consumer).start()
    error = run.join(timeout)
    assert isinstance(error, kind), error
    return error


def consumers(vhost: VirtualHost) -> list[dict[str, Any]]:
    """Return the current consumers of a virtual host, as the broker knows them.

    Each has its queue, tag, ack mode, prefetch and arguments.
    """
    answer = vhost.broker.evaluate(_CONSUMERS.format(vhost=vhost.name))
    found: list[dict[str, Any]] = json.loads(answer)
    return found


def dead_letters(vhost: VirtualHost, queue: str, count: int, timeout: float = 30) -> list[dict[str, Any]]:
    """Wait for dead letters; return them in order, as `VirtualHost.peek` shows them."""
    vhost.wait_for_messages(queue, count, timeout=timeout)
    return vhost.peek(queue)
