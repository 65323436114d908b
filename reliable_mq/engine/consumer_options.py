"""The options of a consumer, declared, described and checked for both APIs.

Invariants: an option is refused here if RabbitMQ would refuse it, if it contradicts another one, or if it would lose
messages by mistake. This happens before anything is connected, with a message that names the option. A session and a
set-up made here fit each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

from reliable_mq._util.validation import Duration, check_flag, is_text, is_whole_number, seconds, whole_number
from reliable_mq._util.version import OWN_VERSION
from reliable_mq.codec import LARGEST_BODY
from reliable_mq.codec.methods import STREAM_OFFSET, Consume, SetPrefetch
from reliable_mq.core.channel_setup import NO_STREAM, consumer_setup, pull_setup
from reliable_mq.core.consumer.acks import AckBatcher, StreamOffset, check_prefetch
from reliable_mq.core.consumer.consumer_timeout import WARN_AT
from reliable_mq.core.consumer.delivery_watch import DeliveryWatch
from reliable_mq.core.consumer.dispatch import Batcher
from reliable_mq.core.consumer.handler import ClaimPolicy
from reliable_mq.core.consumer.handler_signature import check_handler
from reliable_mq.core.consumer.kill_switch import KillSwitchMonitor
from reliable_mq.core.consumer.lifecycle import ConsumerLifecycle
from reliable_mq.core.consumer.quarantine import Quarantine
from reliable_mq.core.consumer.session import ConsumerSession
from reliable_mq.core.idempotency import LEASE, check_options
from reliable_mq.core.new_queues import NEW_QUEUE_GRACE
from reliable_mq.core.reconnect import ReconnectPolicy
from reliable_mq.core.retry.dead_letters import DeadLetters
from reliable_mq.core.retry.delay_queues import DelayQueues
from reliable_mq.errors import ConfigurationError
from reliable_mq.retry import KillSwitch, RetryPolicy
from reliable_mq.stores.protocol import AsyncIdempotencyStore, IdempotencyStore
from reliable_mq.topology import DEFAULT, Declaration, DefaultDeadLetter, Queue, declarations
from reliable_mq.topology.arguments import CONSUMER_TIMEOUT as TIMEOUT_ARGUMENT
from reliable_mq.topology.arguments import SINGLE_ACTIVE_CONSUMER, Arguments, check_name
from reliable_mq.tracing.tracing import CopyTracing, Tracing
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.new_queues import NewQueueListener
    from reliable_mq.core.reconnect import ReconnectStop, ReconnectWait
    from reliable_mq.engine.publisher import BasePublisher
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions
    from reliable_mq.tracing.consuming import ConsumerTracer

PublisherT = TypeVar("PublisherT", bound="BasePublisher[Any, Any, Any, Any]")
AckMode = Literal["manual", "automatic"]
Offset = str | int | datetime

_LARGEST_PREFETCH: Final = 65535  # it has 16 bits on the wire
_LONGEST_NAME: Final = 200  # bytes; consumer tags, which are short strings, begin with it
_OFFSETS: Final = ("first", "last", "next")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_REST: Final = 0.01  # seconds between acks sent while no handler runs; at this rate they cost nothing
_DELAYED_RETRY: Final = "x-delayed-retry-"  # the beginning of the names of its arguments
_READ_ABOVE: Final = 1024 * 1024  # bytes above `max_body_bytes` that are still read, to dead-letter with a reason

_BATCH_WAIT: Final = 1.0  # seconds, by default
_REPUBLISH_TIMEOUT: Final = 60.0  # seconds for the confirm of a dead letter; after that it is published again

CONSUMER_TIMEOUT: Final = 1800.0  # seconds: RabbitMQ's default


class ConsumerOptions:
    """The checked options of one consumer, and the objects built from them.

    Attributes:
        name, prefetch, concurrency, registry, handler, tracing, exclusive: The arguments, unchanged.
        store: The ``idempotency`` argument.
        ack_interval, stop_timeout, new_queue_grace: The arguments, in seconds.
        settings: The connection settings.
        queue_name: The name of the queue.
        is_stream: Whether the queue is known to be a stream.
        batch: Whether the handler takes a list.
        dead_letter: The name of the queue for messages that are given up. None if no such queue is known here.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        queue: Queue | str,
        handler: Callable[[Any], object] | None = None,
        *,
        topology: Iterable[Declaration] = (),
        prefetch: int = 200,
        concurrency: int = 1,
        retry: RetryPolicy | None = None,
        kill_switch: KillSwitch | None = None,
        idempotency: IdempotencyStore | AsyncIdempotencyStore | None = None,
        idempotency_key: Callable[[Delivery], str | None] | None = None,
        idempotency_lease: Duration = LEASE,
        idempotency_namespace: str | None = None,
        ack_every: int | None = None,
        ack_interval: Duration = 0.2,
        ack_mode: AckMode = "manual",
        batch_size: int | None = None,
        batch_wait: Duration = _BATCH_WAIT,
        dead_letter: Queue | str | DefaultDeadLetter | None = DEFAULT,
        offset: Offset | None = None,
        exclusive: bool = False,
        consumer_arguments: Mapping[str, object] | None = None,
        max_body_bytes: int | None = None,
        max_header_bytes: int | None = None,
        consumer_timeout: Duration | None = CONSUMER_TIMEOUT,
        stop_timeout: Duration = 30.0,
        new_queue_grace: Duration = NEW_QUEUE_GRACE,
        reconnect_wait: ReconnectWait | None = None,
        reconnect_stop: ReconnectStop | None = None,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
        heartbeat: int | None = None,
        connect_timeout: Duration | None = None,
        name: str = "consumer",
        registry: CollectorRegistry | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Create a consumer. Connects nothing.

        Args:
            url: See ``Publisher``.
            queue: A ``Queue``, which is declared at every connect together with its dead-letter queue. A plain name
                refers to an existing queue, which is not declared.
            handler: A callable that receives one `Delivery`, or a list of them if ``batch_size`` is given. A plain
                function runs on a thread. A coroutine function runs in a task, and only an ``AsyncConsumer`` accepts
                one. A batch handler may return a list with a verdict for each item (``Ack``, ``RetryLater(...)``,
                ``DeadLetter(...)``), in the order that its own list has at the end of the call. If it raises, each item
                is retried separately. None to use ``get`` only.
            topology: Further queues, exchanges and bindings to declare at every connect.
            prefetch: The maximum number of unacked deliveries. 100 to 300 is usually best. 0 means no limit.
            concurrency: The maximum number of running handlers, each in a thread or task. Above 1, handlers run out of
                order. One more handler may run, for messages from quarantine.
            retry: How often, after which delays and where a failed delivery is retried. The default is
                ``RetryPolicy()``: 5 attempts, after 1, 10, 60 and 60 s.
            kill_switch: A ``KillSwitch`` that pauses the consumer while too many handler calls fail. None never pauses.
            idempotency: A store that remembers handled messages, so that duplicates have no effect. With asyncio, a
                blocking store is called on a thread, and a store with coroutine functions is awaited.
            idempotency_key: A function that returns the key of a delivery. The default is its ``message_id``.
            idempotency_lease: Seconds for which the claim on a delivery is valid while it is being handled. Choose a
                value above the run time of a handler.
            idempotency_namespace: A name that separates equal queue names in a store shared by several brokers or
                virtual hosts. The default is the name given to the broker's cluster, if any, and the virtual host, for
                example ``"shop/orders"``. Choose a namespace yourself if several clusters without a name share the
                store, or deliver the same messages.
            ack_every: The number of finished deliveries that are acked with one frame. The default is half of the
                prefetch, at most 100.
            ack_interval: Seconds after which finished deliveries are acked, however few they are. While no handler runs
                they are acked sooner.
            ack_mode: ``"manual"`` or ``"automatic"``. With ``"automatic"`` the broker forgets a message when it sends
                it, so a message is delivered at most once, and neither retried nor dead-lettered.
            batch_size: The maximum number of deliveries in one call of the handler. None passes a single delivery
                without a list.
            batch_wait: Seconds that an incomplete batch waits for more deliveries, below 3/4 of the consumer timeout.
            dead_letter: A ``Queue``, or its name, for messages that are given up. The default is the dead-letter queue
                of ``queue``. With None these messages are rejected, and lost if the broker has no dead-letter exchange
                for them.
            offset: The start position in a stream: ``"first"``, ``"last"``, ``"next"`` (the default), an offset, or an
                aware ``datetime``. If the connection is lost before the first delivery, ``"last"`` and ``"next"`` then
                mean the time of the first subscription, and messages from shortly before it may come, too.
            exclusive: Whether to refuse other consumers of a classic queue. RabbitMQ ignores this on other queues,
                which have ``Queue(..., single_active_consumer=True)``.
            consumer_arguments: Further arguments of ``basic.consume``, for example ``{"x-priority": 5}``.
            max_body_bytes: The maximum size of a body, in bytes. A delivery with a larger body is dead-lettered without
                a call of the handler. None means no limit. A body that exceeds the limit by more than 1 MiB is not read
                into memory if the queue itself has a dead-letter queue: the broker dead-letters it.
            max_header_bytes: The same limit for the encoded properties and headers. Neither goes with automatic acks.
            consumer_timeout: Seconds after which the broker requeues an unacked delivery. Use None if it never does. It
                is a setting of the broker that no client can read. The arguments of the queue override it. After three
                quarters of it a warning is logged.
            stop_timeout: Seconds that ``stop`` waits for running handlers. After that tasks are cancelled, and all
                unfinished deliveries are delivered again.
            new_queue_grace: See ``Publisher``. It applies to messages that are published again: the original of a retry
                or a dead letter is acked once the confirm of its copy is final.
            reconnect_wait: See ``Publisher``.
            reconnect_stop: See ``Publisher``.
            credentials: See ``Publisher``.
            tls: See ``Publisher``.
            heartbeat: See ``Publisher``.
            connect_timeout: See ``Publisher``.
            name: The name used for threads and tasks, in metrics, in dead letters, and for the consumer at the broker.
            registry: The registry for Prometheus metrics. None registers no metrics.
            tracing: A ``Tracing``, for OpenTelemetry spans of handlers and acks. Handlers then run in the trace context
                of their message. None disables tracing.

        Raises:
            ConfigurationError: If an option is invalid or contradicts another option. The message names it.
        """
        if isinstance(idempotency, type) or not (idempotency is None or isinstance(idempotency, IdempotencyStore)):
            _refuse(f"idempotency must be an IdempotencyStore, not {idempotency!r}")
        self._lease = check_options(
            idempotency_key, idempotency_namespace, idempotency_lease, has_store=idempotency is not None
        )
        if not isinstance(queue, Queue | str) or not queue:
            _refuse(f"queue must be a Queue or the name of one, not {queue!r}")
        self.queue_name = check_name("queue", queue) if isinstance(queue, str) else queue.name
        if not is_text(name) or not 1 <= len(name.encode()) <= _LONGEST_NAME:
            _refuse(f"name must be text of 1 to {_LONGEST_NAME} bytes, not {name!r}")
        if handler is not None:
            check_handler(handler)
        whole_number("prefetch", prefetch, 0, _LARGEST_PREFETCH)
        whole_number("concurrency", concurrency, 1)
        self._limits: dict[str, Any] = {"max_body_bytes": max_body_bytes, "max_header_bytes": max_header_bytes}
        for limit, value in self._limits.items():
            if value is not None:
                whole_number(limit, value, 0)
        if retry is not None and not isinstance(retry, RetryPolicy):
            _refuse(f"retry must be a RetryPolicy, not {retry!r}")
        if kill_switch is not None and not isinstance(kill_switch, KillSwitch):
            _refuse(f"kill_switch must be a KillSwitch, not {kill_switch!r}")
        if tracing is not None and not isinstance(tracing, Tracing):
            _refuse(f"tracing must be a Tracing, not {tracing!r}")
        if ack_every is not None:
            whole_number("ack_every", ack_every, 1)
        if batch_size is not None:
            whole_number("batch_size", batch_size, 1)
        check_flag("exclusive", exclusive)
        if exclusive and isinstance(queue, Queue) and queue.type != "classic":
            _refuse(
                f"exclusive is ignored by RabbitMQ on a {queue.type} queue; give queue {queue.name!r} "
                "single_active_consumer=True, so that one consumer at a time gets its messages"
            )
        if ack_mode not in ("manual", "automatic"):
            _refuse(f"ack_mode must be 'manual' or 'automatic', not {ack_mode!r}")

        self.settings = parse_url(
            url, tls=tls, credentials=credentials, heartbeat=heartbeat, connect_timeout=connect_timeout
        )
        self._reconnect = reconnect_wait, reconnect_stop
        self.new_reconnect_policy()  # refuses an invalid reconnect_wait or reconnect_stop
        self._republishing: dict[str, Any] = {
            "url": url,
            "new_queue_grace": new_queue_grace,
            "max_message_bytes": LARGEST_BODY,  # the broker delivered them, whatever its limit is
            "tls": tls,
            "credentials": credentials,
            "heartbeat": heartbeat,
            "connect_timeout": connect_timeout,
            "name": f"{name}-dead-letters",
            "tracing": None if tracing is None else CopyTracing(tracing),
        }
        self.name = name
        self.registry = registry
        self.tracing = tracing
        self.handler = handler
        self.prefetch = prefetch
        self.concurrency = concurrency
        self.batch = batch_size is not None
        self.stop_timeout = seconds("stop_timeout", stop_timeout)
        self.new_queue_grace = seconds("new_queue_grace", new_queue_grace)
        self.ack_interval = seconds("ack_interval", ack_interval)
        self._consumer_timeout = None
        if consumer_timeout is not None:
            self._consumer_timeout = seconds("consumer_timeout", consumer_timeout, positive=True)
        self.dead_letter = self._dead_letter(queue, dead_letter)
        self._drops = dead_letter is None  # the user has chosen this, so there is no warning
        also = [dead_letter] if isinstance(dead_letter, Queue) else []
        self.topology = declarations([*declarations(topology), *also])
        self._queue = queue
        self._pushed = handler is not None
        self._retry = RetryPolicy() if retry is None else retry
        self._kill_switch = kill_switch
        self.store = idempotency
        self._key = idempotency_key
        self._namespace = idempotency_namespace
        self._ack_every = ack_every
        self._ack_mode: AckMode = ack_mode
        self._batch_size = batch_size
        self._batch_wait = seconds("batch_wait", batch_wait)
        if batch_size is None and self._batch_wait != _BATCH_WAIT:
            _refuse("batch_wait has no effect without batch_size=: give the size of a batch")
        self.exclusive = exclusive
        self._arguments = _arguments(consumer_arguments, queue, offset)
        self._broker_retries = self._retried_by_the_broker(queue)
        self._delay_queues = self._new_delay_queues(queue)
        self._quarantine = self._new_quarantine(queue)
        self._all_declared = declarations([*self._declared, *([queue] if isinstance(queue, Queue) else [])])
        self.is_stream = STREAM_OFFSET in self._arguments or (isinstance(queue, Queue) and queue.type == "stream")

        given = {
            "retry": retry is not None,
            "kill_switch": kill_switch is not None,
            "idempotency": idempotency is not None,
            "batch_size": self.batch,
            "dead_letter": dead_letter not in (DEFAULT, None),
            **{limit: value is not None for limit, value in self._limits.items()},
        }
        self._check_combination(given)
        self._check_prefetch(prefetch)
        wait, timeout = self._batch_wait, self.consumer_timeout
        if self.batch and timeout is not None and wait >= timeout * WARN_AT:
            _refuse(f"batch_wait={wait:g} does not fit a consumer timeout of {timeout:g} s: keep below 3/4 of it")

    @property
    def warnings(self) -> list[str]:
        """The warnings about options that are allowed but risky."""
        found = []
        if self.prefetch == 0:
            found.append("prefetch=0 is no limit: a large backlog fills the memory of this process")
        undecided = self.dead_letter is None and not self._drops
        if undecided and self._pushed and self._ack_mode == "manual" and not self.is_stream:
            found.append(
                f"no dead-letter queue is known for queue {self.queue_name!r}: a message that is given up is rejected, "
                "and lost unless the queue has a dead-letter exchange; set dead_letter, or None to accept that"
            )
        return found

    @property
    def largest_body(self) -> int:
        """The maximum size of a body that is read, in bytes.

        A delivery with a larger body is rejected unread, and the broker dead-letters it. Bodies are read anyway if that
        would lose the message, because only this consumer knows a dead-letter queue.
        """
        most = self._limits["max_body_bytes"]
        ours_alone = self.dead_letter is not None and not self._broker_dead_letters
        return LARGEST_BODY if most is None or ours_alone else min(most + _READ_ABOVE, LARGEST_BODY)

    @property
    def republishes(self) -> bool:
        """Whether dead letters, retries or quarantined messages may be published."""
        return self.dead_letter is not None or self._delay_queues is not None or self._quarantine is not None

    @property
    def single_active(self) -> bool:
        """Whether the queue is known to have a single active consumer."""
        queue = self._queue
        return isinstance(queue, Queue) and (
            queue.single_active_consumer or queue.arguments.get(SINGLE_ACTIVE_CONSUMER) is True
        )

    @property
    def ends_with_subscription(self) -> bool:
        """Whether the queue is deleted before it can have another subscription."""
        auto_delete = isinstance(self._queue, Queue) and self._queue.auto_delete
        return self._pushed and auto_delete and (self.single_active or self.exclusive)

    @property
    def consumer_timeout(self) -> float | None:
        """The broker's consumer timeout in seconds, as far as it is known.

        The arguments of the queue override it.
        """
        queue = self._queue.arguments.get(TIMEOUT_ARGUMENT) if isinstance(self._queue, Queue) else None
        given = [value / 1000 for value in (queue, self._arguments.get(TIMEOUT_ARGUMENT)) if isinstance(value, int)]
        return min(given, default=self._consumer_timeout)

    def change_prefetch(self, prefetch: int) -> None:
        """Change the prefetch of future sessions.

        Raises:
            ConfigurationError: If it does not fit ``ack_every`` or ``batch_size``. The prefetch is then unchanged.
        """
        whole_number("prefetch", prefetch, 1 if self.is_stream else 0, _LARGEST_PREFETCH)
        self._check_prefetch(prefetch)
        self.prefetch = prefetch

    def new_session(self) -> ConsumerSession:
        """Return a new session."""
        acks = None
        if self._ack_mode == "manual":
            interval = self.ack_interval if self._pushed else 0.0  # the next get() waits for room in the prefetch
            acks = AckBatcher(ack_every=self._ack_every, ack_interval=interval, prefetch=self.prefetch, rest=_REST)
        dead_letters = None
        if self.dead_letter is not None:
            dead_letters = DeadLetters(
                self.dead_letter, consumer=self.name, version=OWN_VERSION, declared=self._all_declared
            )
        queue, single_active = self._quarantine, self.single_active
        return ConsumerSession(
            queue=self.queue_name,
            retry=self._retry,
            random=random.Random(),
            dead_letters=dead_letters,
            broker_dead_letters=self._broker_dead_letters,
            acks=acks,
            batcher=None if self._batch_size is None else Batcher(self._batch_size, self._batch_wait),
            **self._limits,
            stream_offset=StreamOffset(start_moves=self._start_moves) if self.is_stream else None,
            delay_queues=self._delay_queues,
            broker_retries=self._broker_retries,
            kill_switch=None if self._kill_switch is None else KillSwitchMonitor(self._kill_switch),
            consumer_timeout=self.consumer_timeout,
            grouped=self.store is not None,
            quarantine=None if queue is None else Quarantine(queue, self.quarantine_tag, single_active=single_active),
            lifecycle=ConsumerLifecycle(
                consumer_tag=self.name,
                prefetch=self.prefetch,
                stop_timeout=self.stop_timeout,
                single_active=single_active,
                subscribes=self._pushed,
            ),
        )

    def new_delivery_watch(self) -> DeliveryWatch | None:
        """Return a new watch, or None unless ready messages are certainly meant for now."""
        queue = self._queue
        if not self._pushed or not isinstance(queue, Queue) or queue.type != "quorum" or self.single_active:
            return None
        if queue.delayed_retry is not None or any(name.startswith(_DELAYED_RETRY) for name in queue.arguments):
            return None
        return DeliveryWatch(len(self.settings.endpoints))

    def new_reconnect_policy(self) -> ReconnectPolicy:
        """Return a new policy for the connection attempts of one connection."""
        wait, stop = self._reconnect
        return ReconnectPolicy(hosts=len(self.settings.endpoints), wait=wait, stop=stop)

    def new_publisher(self, kind: Callable[..., PublisherT]) -> PublisherT:
        """Return a new publisher for retries and dead letters.

        It does not retry nacked messages. The session does. It never gives up connecting, since the consumer was
        connected with the same settings.
        """
        publisher = kind(
            **self._republishing, delivery_timeout=_REPUBLISH_TIMEOUT, retry=RetryPolicy(1), on_blocked="raise"
        )
        publisher._options.proven = True  # noqa: SLF001  # no user has this publisher
        return publisher

    def new_tracer(self) -> ConsumerTracer | None:
        """Return a new tracer for the consumer, or None without tracing."""
        if self.tracing is None:
            return None
        from reliable_mq.tracing.consuming import ConsumerTracer  # noqa: PLC0415  # it imports OpenTelemetry

        return ConsumerTracer(self.tracing, name=self.name, queue=self.queue_name, endpoints=self.settings.endpoints)

    def new_claiming(self, clock: Callable[[], float]) -> ClaimPolicy | None:
        """Return a new policy for claiming deliveries, or None without a store."""
        if self.store is None:
            return None
        return ClaimPolicy(
            queue=self.queue_name,
            namespace=self._namespace,
            key=self._key,
            lease=self._lease,
            max_attempts=self._retry.max_attempts,
            transaction=getattr(self.store, "transaction", None),
            clock=clock,
        )

    def setup(
        self, server: ServerInfo, consumer_tag: str, following: Offset | None, listener: NewQueueListener | None = None
    ) -> SetupGenerator:
        """Return the set-up steps after which the broker delivers messages.

        A stream is read from ``following``. `listener` is notified of the quorum queues that the steps declare.
        """
        consume = self.consume(consumer_tag, following)
        return consumer_setup(
            self._queue, self._declared, server.version_tuple, consume, prefetch=self.prefetch, listener=listener
        )

    def pull_setup(self, server: ServerInfo, listener: NewQueueListener | None = None) -> SetupGenerator:
        """Return the set-up steps before ``basic.get``. `listener` is as in `setup`."""
        return pull_setup(self._queue, self._declared, server.version_tuple, listener)

    def consume(self, consumer_tag: str, following: Offset | None) -> Consume:
        """Return the subscribing step of `setup`."""
        arguments = self._arguments
        if isinstance(self._queue, str) and not self.is_stream:  # a stream would skip messages at each reconnect
            arguments = {**NO_STREAM, **arguments}
        if following is not None:
            arguments = {**arguments, STREAM_OFFSET: following}
        return Consume(self.queue_name, consumer_tag, self._ack_mode == "automatic", self.exclusive, arguments)

    @property
    def has_quarantine(self) -> bool:
        """Whether the queue has a quarantine."""
        return self._quarantine is not None

    @property
    def quarantine_tag(self) -> str:
        """The consumer tag of the subscription to quarantine."""
        return f"{self.name}#quarantine"

    def subscribe_to_quarantine(self) -> StepGenerator:
        """Return the steps after which the broker also delivers from the quarantine."""
        if self._quarantine is not None:
            yield SetPrefetch(1)
            yield Consume(self._quarantine.name, self.quarantine_tag)

    @property
    def _start_moves(self) -> bool:
        start = self._arguments.get(STREAM_OFFSET, "next")
        return isinstance(start, str) and start != "first"

    @property
    def _broker_dead_letters(self) -> bool:
        return isinstance(self._queue, Queue) and self._queue.dead_letter_name is not None

    @property
    def _declared(self) -> list[Declaration]:
        """The declarations of every connect, without the queue itself."""
        beside: list[Declaration] = [] if self._quarantine is None else [self._quarantine]
        if self._delay_queues is not None:
            beside += [self._delay_queues.queue(step) for step in self._delay_queues.own]
        return [*self.topology, *beside]

    def _new_quarantine(self, queue: Queue | str) -> Queue | None:
        """Return the quarantine, if the broker counts returns and there is a handler."""
        if isinstance(queue, str) or queue.type != "quorum" or not self._pushed or self._ack_mode == "automatic":
            return None
        if self._broker_retries:
            return None  # the broker counts returns and failures together, and limits both
        return Quarantine.of(queue, single_active=self.single_active)

    def _retried_by_the_broker(self, queue: Queue | str) -> bool:
        able = isinstance(queue, Queue) and queue.delayed_retry is not None
        if self._retry.backend == "broker" and not able:
            _refuse("retry has backend='broker', which needs a Queue(..., delayed_retry=(shortest, longest))")
        return able and self._retry.backend != "memory" and self._ack_mode == "manual"

    def _new_delay_queues(self, queue: Queue | str) -> DelayQueues | None:
        """Return the delay queues, if they are used and messages may wait in them."""
        elsewhere = self._retry.backend != "queues" or self._broker_retries
        if elsewhere or self._ack_mode == "automatic" or isinstance(queue, str):
            return None
        stays = queue.type != "stream" and queue.durable and not (queue.exclusive or queue.auto_delete)
        return DelayQueues(queue.name, self._retry) if stays and self._retry.max_attempts > 1 else None

    def _dead_letter(self, queue: Queue | str, given: object) -> str | None:
        if isinstance(given, DefaultDeadLetter):
            return queue.dead_letter_name if isinstance(queue, Queue) else None
        if given is None:
            return None
        if not isinstance(given, Queue | str) or not given:
            _refuse(f"dead_letter must be a Queue, the name of one or None, not {given!r}")
        name = check_name("dead_letter", given) if isinstance(given, str) else given.name
        if name == self.queue_name:
            _refuse("dead_letter is the queue itself: what is given up would come back forever")
        return name

    def _check_combination(self, given: dict[str, bool]) -> None:
        """Refuse given options that contradict ``ack_mode``, a stream or ``get``."""
        automatic = self._ack_mode == "automatic"
        if automatic:
            _refuse_with(given, "ack_mode='automatic': the broker forgets what it sends")
        if not self._pushed:
            given = {option: given[option] for option in ("kill_switch", "idempotency", "batch_size")}
            given |= {"ack_mode='automatic'": automatic, "a stream": self.is_stream}
            _refuse_with(given, "a consumer without a handler: what get() gives is settled one by one")
            single = isinstance(self._queue, Queue) and self._queue.type == "quorum" and self.single_active
            _refuse_with({"single_active_consumer=True": single}, "get() on a quorum queue: RabbitMQ refuses it")
        if self.is_stream:
            given = {"ack_mode='automatic'": automatic, "prefetch=0": self.prefetch == 0}
            _refuse_with(given, "a stream: RabbitMQ refuses it")

    def _check_prefetch(self, prefetch: int) -> None:
        ack_every = self._ack_every if self._ack_mode == "manual" else None
        check_prefetch(prefetch, ack_every=ack_every, batch_size=self._batch_size)


def _refuse_with(given: Mapping[str, bool], reason: str) -> None:
    for option, is_given in given.items():
        if is_given:
            _refuse(f"{option} does not go with {reason}")


def _arguments(given: Mapping[str, object] | None, queue: Queue | str, offset: Offset | None) -> dict[str, object]:
    arguments: dict[str, object] = dict(Arguments("the consumer (consumer_arguments)", {} if given is None else given))
    if offset is not None:
        if isinstance(queue, Queue) and queue.type != "stream":
            _refuse(f"offset is for streams, and queue {queue.name!r} is of type {queue.type}")
        if STREAM_OFFSET in arguments:
            _refuse(f"offset is given beside {STREAM_OFFSET} in consumer_arguments: leave one of them out")
        arguments[STREAM_OFFSET] = _checked_offset(offset)
    return arguments


def _checked_offset(offset: object) -> Offset:
    if isinstance(offset, datetime):
        if offset.tzinfo is None:
            _refuse("offset must be an aware datetime: which time a naive one means is not known")
        if offset < _EPOCH:
            _refuse(f"offset must not lie before 1970, which AMQP cannot carry, and is {offset}: give 'first'")
        try:
            return offset.astimezone(UTC)
        except OverflowError:
            _refuse(f"offset must lie before the year 10000 in UTC, and is {offset}: give 'next'")
    if isinstance(offset, str) and offset in _OFFSETS:
        return offset
    if not is_whole_number(offset, 0, 2**63 - 1):
        _refuse(f"offset must be 'first', 'last', 'next', a number of at least 0 or a datetime, not {offset!r}")
    return offset


def _refuse(text: str) -> NoReturn:
    raise ConfigurationError(text)
