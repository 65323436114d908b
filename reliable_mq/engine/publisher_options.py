"""What a publisher is asked to do: checked as a whole, and made into the parts that do it, for either face.

Invariants: a wrong argument is refused here, before anything is connected, with a text that names it; what cannot be
sent is refused before anything is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from reliable_mq._util.validation import Duration, seconds
from reliable_mq.codec import header_frame_size, publish_head
from reliable_mq.core import channel_setup
from reliable_mq.core.new_queues import NEW_QUEUE_GRACE
from reliable_mq.core.publisher.session import PublishingSession
from reliable_mq.core.publisher.window import PublishWindow
from reliable_mq.core.reconnect import ReconnectPolicy
from reliable_mq.errors import ConfigurationError, PublishRefused
from reliable_mq.message import Message
from reliable_mq.retry import RetryPolicy
from reliable_mq.topology import declarations

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from tenacity.stop import stop_base
    from tenacity.wait import wait_base

    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.core.new_queues import NewQueueListener
    from reliable_mq.settings import ConnectionSettings
    from reliable_mq.topology import Declaration

__all__ = ["DEFAULT_RETRY", "PublisherOptions"]

DEFAULT_RETRY: Final = RetryPolicy(max_attempts=6, delays=(0.1, 0.3, 1.0, 3.0, 5.0), jitter=0.5)
"""How a nacked publish is tried again: six attempts over about ten seconds, since a full queue empties or does not."""

_CONTENT_TOO_LARGE: Final = 311  # the AMQP reply code for a body that is too large
_TARGETS_KEPT: Final = 4096  # pairs of exchange and routing key known to be valid
_DUPLICATE_HEADER_BYTES: Final = 64  # what the header of a possible duplicate adds, at most


class PublisherOptions:
    """The arguments of a publisher, as its class describes them.

    Attributes:
        max_outstanding, mandatory, delivery_timeout: as given, the latter in seconds.
        raise_when_blocked: whether a publish is refused while the broker blocks.
        new_queue_grace: seconds for which confirms of a quorum queue that this process made are not final; 0 for none.
        settings: what a connection needs to know.
        first_verdict: seconds after which every host has had its first attempt.

    Raises:
        ConfigurationError: one is wrong.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        name: str,
        topology: Iterable[Declaration] = (),
        max_outstanding: int = 2000,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        max_message_bytes: int = 16 * 1024 * 1024,
        mandatory: bool = True,
        confirm_timeout: Duration = 30.0,
        delivery_timeout: Duration = 120.0,
        retry: RetryPolicy = DEFAULT_RETRY,
        on_blocked: Literal["wait", "raise"] = "wait",
        new_queue_grace: Duration = NEW_QUEUE_GRACE,
        reconnect_wait: wait_base | None = None,
        reconnect_stop: stop_base | None = None,
    ) -> None:
        if on_blocked not in ("wait", "raise"):
            raise ConfigurationError(f"on_blocked must be 'wait' or 'raise', not {on_blocked!r}")
        if not isinstance(retry, RetryPolicy):
            raise ConfigurationError(f"retry must be a RetryPolicy, not {retry!r}")
        if retry.for_consumers:
            raise ConfigurationError(
                f"retry has {retry.for_consumers[0]}, which is for consumers: a publisher tries again what the broker "
                "nacks, in its own memory, and nothing else; leave it out"
            )
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"name must be text that is not empty, not {name!r}")
        if not isinstance(mandatory, bool):
            raise ConfigurationError(f"mandatory must be True or False, not {mandatory!r}")
        if not isinstance(max_message_bytes, int) or isinstance(max_message_bytes, bool) or max_message_bytes < 0:
            raise ConfigurationError(f"max_message_bytes must be a whole number, not {max_message_bytes!r}")
        self.name = name
        self.settings = settings
        self.mandatory = mandatory
        self.max_outstanding = max_outstanding
        self.raise_when_blocked = on_blocked == "raise"
        self.delivery_timeout = seconds("delivery_timeout", delivery_timeout, positive=True)
        self.new_queue_grace = seconds("new_queue_grace", new_queue_grace)
        self.first_verdict = settings.connect_timeout * len(settings.endpoints) + 1.0
        self._topology = declarations(topology)
        self._max_message_bytes = max_message_bytes
        self._retry = retry
        self._confirm_timeout = seconds("confirm_timeout", confirm_timeout, positive=True)
        self.window = PublishWindow(max_outstanding, max_outstanding_bytes)
        self._reconnect = reconnect_wait, reconnect_stop
        self.new_recovery()  # so that a wrong reconnect_wait or reconnect_stop is refused here
        self._targets: set[tuple[str, str]] = set()

    def new_session(self, random: Random) -> PublishingSession[Any]:
        """Make a session; `random` is the source of its jitter."""
        session: PublishingSession[Any] = PublishingSession(
            retry=self._retry,
            confirm_timeout=self._confirm_timeout,
            delivery_timeout=self.delivery_timeout,
            random=random,
            new_queue_grace=self.new_queue_grace,
        )
        session.frame_max = self.settings.frame_max  # until a broker has had its say
        return session

    def new_recovery(self) -> ReconnectPolicy:
        """Make what decides about connecting again."""
        wait, stop = self._reconnect
        return ReconnectPolicy(hosts=len(self.settings.endpoints), wait=wait, stop=stop)

    def setup(self, server: ServerInfo, maker: NewQueueListener | None = None) -> SetupGenerator:
        """Return the steps that make a channel ready to publish on; `maker` is told of the quorum queues they make."""
        return channel_setup.publisher_setup(self._topology, server.version_tuple, maker)

    def check(self, message: Message, exchange: str, routing_key: str, frame_max: int) -> int:
        """Refuse what cannot be sent; return the size of the body, bytes.

        Args:
            message: to publish.
            exchange: where to.
            routing_key: with which key.
            frame_max: of the latest connection, bytes.

        Raises:
            ConfigurationError: an argument is wrong.
            PublishRefused: the message is too large.
        """
        if not isinstance(message, Message):
            raise ConfigurationError(f"message must be a Message, not {type(message).__name__}: wrap it, Message(body)")
        if (exchange, routing_key) not in self._targets:
            publish_head(1, exchange, routing_key, self.mandatory)  # refuses what cannot be encoded, naming it
            if len(self._targets) >= _TARGETS_KEPT:
                self._targets.clear()
            self._targets.add((exchange, routing_key))
        size = len(message.body)
        if size > self._max_message_bytes or message.encoded_properties is not None:
            self._check_size(message, size, frame_max)
        return size

    def _check_size(self, message: Message, size: int, frame_max: int) -> None:
        if size > self._max_message_bytes:
            raise PublishRefused(
                f"message {message.message_id} was not sent: its body has {size} bytes, and max_message_bytes is "
                f"{self._max_message_bytes}; split it, or raise the limit here and in the broker (max_message_size)",
                message_id=message.message_id,
                reply_code=_CONTENT_TOO_LARGE,
                reply_text="refused before sending",
            )
        header = header_frame_size(message.encoded_properties or b"")
        if header + _DUPLICATE_HEADER_BYTES > frame_max:
            raise PublishRefused(
                f"message {message.message_id} was not sent: its properties and headers take {header} bytes, "
                f"and one frame of this connection holds {frame_max}; move data into the body",
                message_id=message.message_id,
                reply_code=_CONTENT_TOO_LARGE,
                reply_text="refused before sending",
            )
