"""The demo's shop, which publishes, handles and audits orders, and the outages.

One order in fifty fails at its first attempt, as if a payment service had not responded. One in five hundred cannot be
processed at all and ends in the dead-letter queue. The idempotency store makes handlers idempotent, so that an order
that is delivered again after an outage has its effect once.

The audit records each order before it is published, and again when it was handled or, at the end, found in the
dead-letter queue, which can be inspected until then. The audit is independent of publishers and consumers.

Two commands of the user kill and restart the broker, at moments that depend on the progress, not on a clock.
"""

from __future__ import annotations

import enum
import secrets
import shlex
import subprocess
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from tenacity import wait_exponential

from reliable_mq.codec.methods import DeleteQueue
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.quarantine import Quarantine
from reliable_mq.core.retry.delay_queues import DelayQueues
from reliable_mq.errors import PublishUnconfirmed, ReliableMQError
from reliable_mq.message import Message
from reliable_mq.retry import RetryPolicy
from reliable_mq.settings import ConnectionSettings
from reliable_mq.stores.memory import MemoryStore
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.consumer import Consumer
from reliable_mq.sync.publisher import Publisher
from reliable_mq.testing.audit import Audit
from reliable_mq.topology import DEAD_SUFFIX, Queue

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_NAME: Final = "reliable-mq demo"
_AT_A_TIME: Final = 50  # orders between two waits
_HANDLERS: Final = 4
_ATTEMPTS: Final = 3
_LEFT_WAIT: Final = 0.5  # seconds for the broker to report an empty queue
_COMMAND_TIMEOUT: Final = 120.0  # seconds
_GRACE: Final = 5.0  # seconds for outstanding confirms when the demo is interrupted


def fails_once(number: int) -> bool:
    """Return whether the first attempt at this order fails."""
    return number % 50 == 0


def is_poison(number: int) -> bool:
    """Return whether no handler can process this order."""
    return number % 500 == 77


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts of orders.

    Attributes:
        retried: Failed attempts that were retried.
        republished: Orders that were published again because their outcome was unknown.
        duplicates: Deliveries that were skipped because their order was handled before.
    """

    published: int
    confirmed: int
    handled: int
    dead_lettered: int
    retried: int
    republished: int
    duplicates: int


class Shop:
    """A publisher and a consumer of orders. A context manager that deletes its queues.

    Args:
        registry: The registry for the metrics of the publisher and the consumer. None registers none.

    Attributes:
        broker: The broker's product and version. Set when the context is entered.
        queue: The queue of the orders.
        queues: The names of the work queue and its dead-letter queue.
        failure: The reason why not all orders were published.
        not_deleted: The reason why the queues were not emptied and deleted.
    """

    broker: str

    def __init__(
        self,
        url: str,
        settings: ConnectionSettings,
        *,
        orders: int,
        rate: float,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.orders = orders
        self.audit = Audit()
        self.failure: Exception | None = None
        self.not_deleted: ReliableMQError | None = None
        self._url = url
        self._settings = settings
        self._rate = rate
        self._published = 0
        self._handled = 0
        self._delivered = 0
        self._given_up: set[str] = set()  # messages that the audit expects in the dead-letter queue
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._enough = threading.Event()
        self._all_settled = threading.Event()
        self.queue = Queue(f"reliable-mq-demo-{secrets.token_hex(4)}")
        self.queues = (self.queue.name, f"{self.queue.name}{DEAD_SUFFIX}")
        retry = RetryPolicy(max_attempts=_ATTEMPTS, delays=(0.2, 0.5))
        delays = DelayQueues(self.queue.name, retry)
        self._beside = (Quarantine.of(self.queue).name, *(delays.queue(step).name for step in delays.own))
        soon = wait_exponential(multiplier=0.1, max=1.0)  # short, because a user watches
        self.publisher = Publisher(
            url, topology=[self.queue], reconnect_wait=soon, name=f"{_NAME} publisher", registry=registry
        )
        self.consumer = Consumer(
            url,
            self.queue,
            self._handle,
            concurrency=_HANDLERS,
            retry=retry,
            idempotency=MemoryStore(),
            reconnect_wait=soon,
            name=f"{_NAME} consumer",
            registry=registry,
        )
        self._till = threading.Thread(target=self._publish_all, name=f"{_NAME} orders", daemon=True)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Connect and begin."""
        # Fails at once if the login or the queues are refused.
        with AdminChannel(self._settings, name=_NAME) as channel:
            self.broker = f"{channel.server.product} {channel.server.version}"
        with ExitStack() as opened:
            opened.callback(self._take_down)
            opened.enter_context(self.consumer)
            self.publisher.connect()
            self._till.start()
            opened.callback(self._till.join)
            opened.callback(self.publisher.close, _GRACE)
            opened.callback(self._closing.set)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def progress(self) -> Progress:
        sent, received = self.publisher.statistics, self.consumer.statistics
        return Progress(
            published=self._published,
            confirmed=sent.confirmed,
            handled=self._handled,
            dead_lettered=len(self._given_up),
            retried=received.retried,
            republished=sent.republished,
            duplicates=received.duplicates,
        )

    def end(self) -> None:
        """Stop publishing orders. Published orders are still settled and handled."""
        self._enough.set()

    def is_done(self) -> bool:
        """Return whether all orders are settled, and confirmed ones reached their end.

        A confirmed order ends when it is handled or dead-lettered.
        """
        if not self._all_settled.is_set():
            return False
        if self._handled + len(self._given_up) < self.publisher.statistics.confirmed:
            return False
        return self._is_idle() and self.audit.balance().lost <= self._given_up

    def _is_idle(self) -> bool:
        """Return whether all is settled and nothing was delivered since the last call."""
        received = self.consumer.statistics
        delivered, self._delivered = self._delivered, received.delivered
        settled = received.acked + received.rejected + received.requeued + received.lost
        return delivered == received.delivered == settled

    # Publishing, on a separate thread

    def _publish_all(self) -> None:
        try:
            due = time.monotonic()
            for number in range(self.orders):
                if number % _AT_A_TIME == 0 and self._rate:
                    now = time.monotonic()
                    self._closing.wait(max(0.0, due - now))
                    due = max(due, now) + _AT_A_TIME / self._rate  # time lost in an outage is not made up for
                if self._closing.is_set():
                    return
                if self._enough.is_set():
                    break
                self._publish(number)
            self.publisher.flush()
        except Exception as error:  # noqa: BLE001  # reported by the watching thread
            self.failure = error
        finally:
            self._all_settled.set()

    def _publish(self, number: int) -> None:
        order: dict[str, object] = {"order": number, "customer": f"customer-{number % 997}"}
        if not is_poison(number):
            order["amount"] = 100 + number % 9900
        message = Message.json(order)
        self.audit.attempted(message.message_id)
        self._published += 1
        self.publisher.submit(message, routing_key=self.queue.name).add_done_callback(self._settled)

    def _settled(self, confirmation: Confirmation) -> None:
        error = confirmation.exception()
        if error is None:
            self.audit.confirmed(confirmation.message_id)
        elif not isinstance(error, PublishUnconfirmed):
            self.audit.failed(confirmation.message_id)

    # Handling, on the consumers' threads

    def _handle(self, delivery: Delivery) -> None:
        order = delivery.json()
        if fails_once(order["order"]) and delivery.attempt == 1:
            raise ConnectionError("the payment service did not answer")
        message_id = delivery.message_id or ""
        if "amount" not in order:
            if delivery.attempt >= _ATTEMPTS:
                self._given_up.add(message_id)
            raise KeyError("amount")
        self.audit.effect(message_id)
        self.audit.handled(message_id)
        with self._lock:
            self._handled += 1

    # Closing

    def _take_down(self) -> None:
        """Record the orders that are left in the queues, and delete the queues.

        Without the broker this fails, but must not hide the reason why the demo ended.
        """
        try:
            self._empty_and_delete()
        except ReliableMQError as error:
            self.not_deleted = error

    def _empty_and_delete(self) -> None:
        for name in (*self.queues, *self._beside):
            record = self.audit.dead_lettered if name == self.queues[1] else self.audit.left
            with Consumer(self._url, name, None, prefetch=_AT_A_TIME, name=_NAME) as consumer:
                while True:
                    with consumer.get(_AT_A_TIME, _LEFT_WAIT) as deliveries:
                        record([delivery.message_id or "" for delivery in deliveries])
                    if not deliveries:
                        break
        with AdminChannel(self._settings, name=_NAME) as channel:
            for name in (*self.queues, *self._beside):
                channel.perform(DeleteQueue(name))


class BrokerState(enum.Enum):
    RUNNING = "running"
    KILLED = "killed"
    STARTING = "starting"


class Outages:
    """A controller that kills the broker ``times`` times, evenly over the job.

    Only one thread may use it. The commands run on another thread.

    Attributes:
        done: The number of outages.
        failure: The failure of a command, which ends the demo.
    """

    def __init__(self, kill: str | None, restart: str | None, *, times: int) -> None:
        self.done = 0
        self.state = BrokerState.RUNNING
        self.failure: str | None = None
        self._commands = None if kill is None or restart is None else (kill, restart)
        self._times = 0 if self._commands is None else times
        self._thread: threading.Thread | None = None

    def advance(self, part: float, *, connected: bool) -> None:
        """Kill the broker if that is due and the clients are connected. Does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and connected:
            self.state = BrokerState.RUNNING
        due = self.done < self._times and part >= (self.done + 1) / (self._times + 1)
        if due and connected and self._thread is None and self.failure is None and self._commands is not None:
            self.done += 1
            self._thread = threading.Thread(target=self._outage, args=self._commands, name="outage")
            self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether the broker is still to be killed or restarted."""
        return self.failure is None and (self.done < self._times or self._thread is not None)

    def end(self) -> None:
        """Stop killing, and wait until a killed broker is restarted."""
        self._times = self.done
        if self._thread is not None:
            self._thread.join()

    def _outage(self, kill: str, restart: str) -> None:
        self.state = BrokerState.KILLED
        self._run(kill)
        self.state = BrokerState.STARTING
        self._run(restart)

    def _run(self, command: str) -> None:
        try:
            subprocess.run(  # noqa: S603  # the user's own command
                shlex.split(command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=_COMMAND_TIMEOUT,
                start_new_session=True,  # Ctrl-C must not keep the broker from being restarted
            )
        except subprocess.CalledProcessError as error:
            self.failure = f"{command!r} failed with status {error.returncode}: {error.stderr.strip()}"
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.failure = f"{command!r} failed: {error}"
