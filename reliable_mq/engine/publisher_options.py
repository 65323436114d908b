"""The options of a publisher, declared and checked for both APIs.

Invariant: an invalid option is refused here, before anything is connected, with a message that names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from reliable_mq._util.validation import Duration, check_flag, is_text, seconds
from reliable_mq.core import channel_setup
from reliable_mq.core.new_queues import NEW_QUEUE_GRACE
from reliable_mq.core.publisher.session import PublisherSession
from reliable_mq.core.publisher.window import MessageLimits, PublishWindow
from reliable_mq.core.reconnect import ReconnectPolicy
from reliable_mq.errors import ConfigurationError
from reliable_mq.outbox.protocol import Outbox
from reliable_mq.retry import RetryPolicy
from reliable_mq.topology import declarations
from reliable_mq.tracing import Tracing
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from prometheus_client import CollectorRegistry

    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.core.new_queues import NewQueueListener
    from reliable_mq.core.reconnect import ReconnectStop, ReconnectWait
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions
    from reliable_mq.topology import Declaration
    from reliable_mq.tracing.publishing import PublisherTracer

DEFAULT_RETRY: Final = RetryPolicy(max_attempts=6, delays=(0.1, 0.3, 1.0, 3.0, 5.0), jitter=0.5)
"""The retries of a nacked publish: six attempts in about ten seconds, after which a full queue has room or stays full.
"""


class PublisherOptions:
    """The checked options of one publisher, and the objects built from them.

    Attributes:
        name, mandatory, max_outstanding, outbox, registry, tracing: The arguments, unchanged.
        confirm_timeout, delivery_timeout, new_queue_grace: The arguments, in seconds.
        raise_when_blocked: Whether a publish is refused while the broker blocks publishing.
        raise_when_disconnected: Whether a publish is refused while there is no connection.
        settings: The connection settings.
        limits: The limits for each message.
        window: The window of unconfirmed messages.
        proven: As in `ReconnectPolicy`. To be set before the publisher connects.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        topology: Iterable[Declaration] = (),
        max_outstanding: int = 2000,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        max_message_bytes: int = 16 * 1024 * 1024,
        mandatory: bool = True,
        confirm_timeout: Duration = 30.0,
        delivery_timeout: Duration = 120.0,
        retry: RetryPolicy = DEFAULT_RETRY,
        on_blocked: Literal["wait", "raise"] = "wait",
        on_disconnected: Literal["wait", "raise"] = "wait",
        new_queue_grace: Duration = NEW_QUEUE_GRACE,
        outbox: Outbox | None = None,
        reconnect_wait: ReconnectWait | None = None,
        reconnect_stop: ReconnectStop | None = None,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
        heartbeat: int | None = None,
        connect_timeout: Duration | None = None,
        name: str = "publisher",
        registry: CollectorRegistry | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Create a publisher. Connects nothing.

        Args:
            url: ``amqp://`` or ``amqps://``, with several hosts separated by commas, or a sequence of URLs that differ
                only in their hosts.
            topology: The queues, exchanges and bindings to declare at every connect.
            max_outstanding: The maximum number of unconfirmed messages. At the limit ``submit`` waits.
            max_outstanding_bytes: The maximum total size of the unconfirmed bodies, in bytes. A larger message is
                published alone.
            max_message_bytes: The maximum size of a body, in bytes. A larger message is refused before anything is
                sent. RabbitMQ's own default is 16 MiB.
            mandatory: Whether a message that is routed to no queue fails (``PublishReturned``). If False, the broker
                drops it.
            confirm_timeout: Seconds without any confirm while messages are outstanding. After that the connection is
                replaced and all unconfirmed messages are published again. The time starts again while a large message
                is still being sent.
            delivery_timeout: Seconds from ``submit`` after which a message is given up (``PublishUnconfirmed``).
            retry: How often, and after which delays, a nacked message is published again before the failure is reported
                (``PublishNacked``). It must not set ``retry_on``, ``give_up_on`` or ``backend``, which are for
                consumers. With an outbox, the relay delays a nacked row at once, with delays of its own.
            on_blocked: How a new message behaves while the broker blocks publishing (memory or disk alarm): ``"wait"``
                until the deadline, or ``"raise"`` ``PublishBlocked`` at once.
            on_disconnected: How a publish behaves while there is no connection: ``"wait"`` for one until the deadline,
                or ``"raise"`` ``PublishDisconnected`` at once, for new messages and for messages that wait for the
                window. Messages accepted earlier are published again in either case. The first publish waits until
                every host has had one attempt. ``"raise"`` cannot be combined with an outbox, which stores messages
                with or without a connection.
            new_queue_grace: Seconds for which confirms of a quorum queue or stream that this process has just declared
                are provisional, because RabbitMQ may lose a queue younger than a second if it is killed. Such a message
                stays outstanding until the broker has answered several requests, the last one sent after that time. If
                the connection is lost before that, the message is published again. 0 makes confirms final at once.
            outbox: A store that keeps messages durably before they are published (`reliable_mq.outbox`). ``publish``
                then returns once a message is stored, whether or not the broker is reachable. A relay in this process
                publishes stored messages until they are confirmed, including messages from earlier processes.
            reconnect_wait: The wait in seconds after each round over the hosts: a function of the number of rounds
                since the connection was lost, or a tenacity wait. The default is exponential from 0.2 s to 30 s, with
                jitter. It runs on the I/O thread or event loop, and must not block.
            reconnect_stop: Whether to give up after a round over the hosts: a function of the number of rounds, or a
                tenacity stop. The default is never. After giving up, all unconfirmed messages fail and the publisher
                has ended. Like ``reconnect_wait``, it must not block.
            credentials: One ``Credentials``, or a plain callable that returns ``(username, password)`` or
                ``Credentials``, for passwords and tokens that change. The callable runs on a thread, at every connect
                and before a token with ``expires_in`` expires.
            tls: A ``TLSOptions`` with certificates and authorities. ``amqps`` always verifies the broker unless the
                options disable that.
            heartbeat: The heartbeat in seconds. The default is the URL's, else 20. An event loop that stalls for
                half a heartbeat is logged. After two to three heartbeats the broker closes the connection.
            connect_timeout: Seconds for a call of ``credentials``, then for the handshakes with one host, and then for
                each answer during set-up. The default is the URL's, else 10.
            name: The name used for threads and in metrics. It also names the connection in RabbitMQ's management UI,
                unless the URL has a name.
            registry: The registry for Prometheus metrics. None registers no metrics.
            tracing: A ``Tracing``, for an OpenTelemetry span of every message. None disables tracing.

        Raises:
            ConfigurationError: If an option is invalid. The message names it.
        """
        if outbox is not None and not isinstance(outbox, Outbox):
            raise ConfigurationError(f"outbox must be an outbox of reliable_mq.outbox, not {outbox!r}")
        self.settings = parse_url(
            url, tls=tls, credentials=credentials, heartbeat=heartbeat, connect_timeout=connect_timeout
        )
        if on_blocked not in ("wait", "raise"):
            raise ConfigurationError(f"on_blocked must be 'wait' or 'raise', not {on_blocked!r}")
        if on_disconnected not in ("wait", "raise"):
            raise ConfigurationError(f"on_disconnected must be 'wait' or 'raise', not {on_disconnected!r}")
        if on_disconnected == "raise" and outbox is not None:
            raise ConfigurationError(
                "on_disconnected='raise' contradicts outbox, which stores messages without a connection: leave one out"
            )
        if not isinstance(retry, RetryPolicy):
            raise ConfigurationError(f"retry must be a RetryPolicy, not {retry!r}")
        if retry.for_consumers:
            raise ConfigurationError(
                f"retry has {retry.for_consumers[0]}, which is for consumers: a publisher tries again what the broker "
                "nacks, in its own memory, and nothing else; leave it out"
            )
        if not is_text(name) or not name:
            raise ConfigurationError(f"name must be text that is not empty, not {name!r}")
        check_flag("mandatory", mandatory)
        if tracing is not None and not isinstance(tracing, Tracing):
            raise ConfigurationError(f"tracing must be a Tracing, not {tracing!r}")
        self.name = name
        self.tracing = tracing
        self.mandatory = mandatory
        self.max_outstanding = max_outstanding
        self.raise_when_blocked = on_blocked == "raise"
        self.raise_when_disconnected = on_disconnected == "raise"
        self.delivery_timeout = seconds("delivery_timeout", delivery_timeout, positive=True)
        self.new_queue_grace = seconds("new_queue_grace", new_queue_grace)
        self.outbox = outbox
        self.registry = registry
        self._topology = declarations(topology)
        self._retry = retry
        self.confirm_timeout = seconds("confirm_timeout", confirm_timeout, positive=True)
        self.limits = MessageLimits(max_message_bytes, mandatory=mandatory)
        self.window = PublishWindow(max_outstanding, max_outstanding_bytes)
        self.proven = False
        self._reconnect = reconnect_wait, reconnect_stop
        self.new_reconnect_policy()  # refuses an invalid reconnect_wait or reconnect_stop

    def new_session(self, random: Random) -> PublisherSession[Any]:
        """Return a new session. `random` is the source of its jitter."""
        session: PublisherSession[Any] = PublisherSession(
            retry=self._retry,
            confirm_timeout=self.confirm_timeout,
            delivery_timeout=self.delivery_timeout,
            random=random,
            new_queue_grace=self.new_queue_grace,
        )
        session.frame_max = self.settings.frame_max  # until it is negotiated
        return session

    def new_reconnect_policy(self) -> ReconnectPolicy:
        """Return a new policy for the connection attempts of one connection."""
        wait, stop = self._reconnect
        return ReconnectPolicy(hosts=len(self.settings.endpoints), wait=wait, stop=stop, proven=self.proven)

    def setup(self, server: ServerInfo, listener: NewQueueListener | None = None) -> SetupGenerator:
        """Return the set-up steps of a publishing channel.

        `listener` is notified of the quorum queues that the steps declare.
        """
        return channel_setup.publisher_setup(self._topology, server.version_tuple, listener)

    def new_tracer(self) -> PublisherTracer | None:
        """Return a new tracer for the publisher, or None without tracing."""
        if self.tracing is None:
            return None
        from reliable_mq.tracing.publishing import PublisherTracer  # noqa: PLC0415  # it imports OpenTelemetry

        return PublisherTracer(self.tracing, name=self.name, endpoints=self.settings.endpoints)
