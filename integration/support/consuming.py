"""Consuming under faults: handlers that keep what they were given, and messages for them."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from reliable_mq import Message, Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reliable_mq import Consumer, Delivery, ReliableMQError
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
    """Publish, confirmed, around any proxy. Returns the message ids, in order.

    With a grace, the broker may be killed then, though this process has only just made the queue.
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
    """Publish messages, confirmed, around any proxy, and book them."""
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
    """Bodies that tell messages apart."""
    return [b"%d" % number for number in range(first, first + count)]


class Handler:
    """A handler that keeps the deliveries it was given, and lets a test wait for them.

    Args:
        then: what to do with each; what it raises is the handler's failure.
        account: where to book what was handled, and its effect.

    Attributes:
        begun: every delivery, in the order in which handlers began.
        attempts, redelivered: what they said of themselves then; a later attempt changes them.
        done: those that were handled.
    """

    def __init__(self, then: Callable[[Delivery], object] | None = None, account: Audit | None = None) -> None:
        self.begun: list[Delivery] = []
        self.attempts: list[int] = []
        self.redelivered: list[bool] = []
        self.done: list[Delivery] = []
        self._handled: set[bytes] = set()  # the bodies of these
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
        """The bodies of what was handled, in that order."""
        return [delivery.body for delivery in list(self.done)]

    def wait_begun(self, count: int, timeout: float = 30) -> list[Delivery]:
        """Wait until handlers have begun `count` times; return the deliveries of the first `count`."""
        self.wait_until(lambda: len(self.begun) >= count, timeout, lambda: f"{count} begun, not {len(self.begun)}")
        return self.begun[:count]

    def wait_done(self, count: int, timeout: float = 30) -> list[Delivery]:
        """Wait until `count` were handled; return the first `count`."""
        self.wait_until(lambda: len(self.done) >= count, timeout, lambda: f"{count} handled, not {len(self.done)}")
        return self.done[:count]

    def wait_bodies(self, bodies: Iterable[bytes], timeout: float = 60) -> None:
        """Wait until each of these was handled, however often."""
        wanted = set(bodies)
        self.wait_until(
            lambda: wanted <= self._handled,
            timeout,
            lambda: f"handled: {len(wanted - self._handled)} are missing",
        )

    def wait_until(self, condition: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
        """Wait for something about this handler; `condition` is asked whenever it begins or ends."""
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise TimeoutError(f"not within {timeout:g} s: {what()}")


class Gate:
    """Holds up handlers that pass it, until it is opened; closes itself never. For ``Handler(then=gate)``."""

    def __init__(self, holds: Callable[[Delivery], bool] = lambda _: True) -> None:
        self._holds = holds
        self._open = threading.Event()

    def __call__(self, delivery: Delivery) -> None:
        if self._holds(delivery):
            assert self._open.wait(60), "the test never opened the gate"

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.open()


class Running:
    """``consumer.run()`` on a thread, and what it raised."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="running")

    def _run(self) -> None:
        try:
            self.consumer.run()
        except BaseException as error:  # handed to the test
            self.error = error

    def start(self) -> Self:
        self._thread.start()
        return self

    def join(self, timeout: float = 30) -> BaseException | None:
        """Wait for the end of ``run``; return what it raised, if anything."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "run() does not return"
        return self.error

    @property
    def returned(self) -> bool:
        return not self._thread.is_alive()


@contextmanager
def running(consumer: Consumer) -> Iterator[Running]:
    """Run a consumer on a thread; stop it at the end and raise what it raised, unless the test looks at that itself."""
    run = Running(consumer).start()
    try:
        yield run
    finally:
        consumer.stop()
        error = run.join(60)
    if error is not None:
        raise error


def run_to_its_error(consumer: Consumer, kind: type[ReliableMQError], timeout: float = 30) -> ReliableMQError:
    """Run a consumer until it ends by itself, with an error of this kind."""
    run = Running(consumer).start()
    error = run.join(timeout)
    assert isinstance(error, kind), error
    return error


def consumers(vhost: VirtualHost) -> list[dict[str, Any]]:
    """The consumers of a virtual host as the broker knows them now: queue, tag, ack, prefetch, arguments."""
    answer = vhost.broker.evaluate(_CONSUMERS.format(vhost=vhost.name))
    found: list[dict[str, Any]] = json.loads(answer)
    return found


def dead_letters(vhost: VirtualHost, queue: str, count: int, timeout: float = 30) -> list[dict[str, Any]]:
    """Wait for dead letters to be ready; return them as `VirtualHost.peek` shows them, in their order."""
    vhost.wait_for_messages(queue, count, timeout=timeout)
    return vhost.peek(queue)
