"""The admission to a publisher: limits of a message, a window, one publish per id.

A full window makes ``submit`` wait, so that neither the process nor the broker is flooded. A returned message is only
identified by its ``message_id``, so two outstanding publishes with the same id could not be distinguished. The second
one waits until the first is settled.

Invariants:

- A message that cannot be sent is refused by `MessageLimits` before any part of it is sent.
- `PublishWindow` never holds more than ``max_count`` messages, nor more than ``max_bytes``. The exception is a single
  message larger than ``max_bytes``, which is admitted alone, because it could never be sent otherwise.
- An admitted message is released once. Without admitted messages the window is empty, even if callers were interrupted.
- `MessageIdQueue` admits one publication per id at a time. The others follow in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from reliable_mq._util.validation import whole_number
from reliable_mq.codec import encode_properties, header_frame_size, publish_head
from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core.publisher.publication import Publication, PublicationState
from reliable_mq.errors import ConfigurationError, PublishRefused
from reliable_mq.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

_TARGETS_KEPT: Final = 4096  # pairs of exchange and routing key known to be valid
_DUPLICATE_HEADER_BYTES: Final = 64  # the maximum size of the header that marks a possible duplicate

P = TypeVar("P", bound=Publication)


def is_too_large(code: int | None, text: str) -> bool:
    """Return whether this package or the broker refused a message for its size."""
    return code == ReplyCode.CONTENT_TOO_LARGE or "is larger than" in text


def no_message(value: object) -> ConfigurationError:
    """Return the error for a value in place of a `Message`."""
    return ConfigurationError(
        f"message must be a Message, not {type(value).__name__}: wrap it, Message(body) or Message.json(...)"
    )


class MessageLimits:
    """The limits of a message, wherever it is published. Thread-safe.

    Args:
        max_message_bytes: The maximum size of a body, in bytes.
        mandatory: Whether every publish is mandatory.

    Raises:
        ConfigurationError: If ``max_message_bytes`` is not a whole number.
    """

    def __init__(self, max_message_bytes: int, *, mandatory: bool) -> None:
        self._max_message_bytes = whole_number("max_message_bytes", max_message_bytes, 0)
        self._mandatory = mandatory
        self._targets: set[tuple[str, str]] = set()

    def check(self, message: Message, exchange: str, routing_key: str, frame_max: int) -> int:
        """Refuse a message that cannot be sent. Return the size of its body in bytes.

        Args:
            message: The message to publish.
            exchange: The name of its exchange.
            routing_key: Its routing key.
            frame_max: The maximum frame size of the latest connection, in bytes.

        Raises:
            ConfigurationError: If an argument is invalid.
            PublishRefused: If the message is too large.
        """
        if not isinstance(message, Message):
            raise no_message(message)
        try:
            known = (exchange, routing_key) in self._targets
        except TypeError:  # one of them is not a string but, for example, a list
            known = False
        if not known:
            publish_head(1, exchange, routing_key, self._mandatory)  # refuses a name that cannot be encoded
            if len(self._targets) >= _TARGETS_KEPT:
                self._targets.clear()
            self._targets.add((exchange, routing_key))
        size = len(message.body)
        if size > self._max_message_bytes or message.encoded_properties is not None:
            self._check_size(message, size, frame_max)
        return size

    @staticmethod
    def fits_frame(message: Message, header_bytes: int, frame_max: int) -> bool:
        """Return whether a frame can hold a message's headers and ``header_bytes``."""
        header = header_frame_size(encode_properties(message))
        return header + header_bytes + _DUPLICATE_HEADER_BYTES <= frame_max

    def _check_size(self, message: Message, size: int, frame_max: int) -> None:
        if size > self._max_message_bytes:
            raise PublishRefused(
                f"message {message.message_id} was not sent: its body has {size} bytes, and max_message_bytes is "
                f"{self._max_message_bytes}; split it, or raise the limit here and in the broker (max_message_size)",
                message_id=message.message_id,
                reply_code=ReplyCode.CONTENT_TOO_LARGE.value,
                reply_text="refused before sending",
            )
        header = header_frame_size(message.encoded_properties or b"")
        if header + _DUPLICATE_HEADER_BYTES > frame_max:
            raise PublishRefused(
                f"message {message.message_id} was not sent: its properties and headers take {header} bytes, "
                f"and one frame of this connection holds {frame_max}; move data into the body",
                message_id=message.message_id,
                reply_code=ReplyCode.CONTENT_TOO_LARGE.value,
                reply_text="refused before sending",
            )


class PublishWindow:
    """Admission by count and bytes. Not thread-safe, the caller holds a lock."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = whole_number("max_outstanding", max_count, 1)
        self.max_bytes = whole_number("max_outstanding_bytes", max_bytes, 1)
        self.count = 0
        self.bytes = 0

    def fits(self, size: int) -> bool:
        return self.count < self.max_count and (not self.count or self.bytes + size <= self.max_bytes)

    def take(self, size: int) -> None:
        self.count += 1
        self.bytes += size

    def release(self, count: int, size: int) -> None:
        self.count -= count
        self.bytes -= size

    def clear(self) -> None:
        """Free every place when no message holds one.

        Callers that were interrupted may have miscounted.
        """
        self.count = self.bytes = 0

    def worth_waking(self, on_wire: int) -> bool:
        """Return whether to wake the callers that wait for a place.

        Waking a thread for every single place would cost more than the publish itself. So callers are woken when at
        most half a window of publishes is on the wire. Publishes that wait for another attempt do not count, because
        they would keep the callers waiting as well.
        """
        return on_wire * 2 <= self.max_count


class MessageIdQueue(Generic[P]):
    """The admission of one publication per ``message_id`` at a time.

    The other publications wait in the state `PublicationState.WAITING`. Not thread-safe.

    Attributes:
        repeated: The number of publications of a `Message` that was outstanding, since the caller last reset it.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._admitted: dict[str, P] = {}
        self._waiting: dict[str, deque[P]] = {}

    def __len__(self) -> int:
        return len(self._admitted)

    def enter(self, publications: Iterable[P]) -> list[P]:
        """Admit and return publications whose id is free, in order. The others wait."""
        admitted: list[P] = []
        enter = self._admitted.setdefault
        for publication in publications:
            key = publication.message.message_id
            holder = enter(key, publication)
            if holder is publication:
                admitted.append(publication)
            else:
                publication.state = PublicationState.WAITING
                self.repeated += holder.message is publication.message
                self._waiting.setdefault(key, deque()).append(publication)
        return admitted

    def holder(self, message_id: str) -> P | None:
        return self._admitted.get(message_id)

    def leave(self, publications: Iterable[P]) -> list[P]:
        """Free the ids of publications off the wire. Admit and return the next of each."""
        holders, waiting = self._admitted, self._waiting
        admitted: list[P] = []
        for publication in publications:
            key = publication.message.message_id
            if key in waiting:
                holders[key] = following = waiting[key].popleft()
                following.state = PublicationState.READY
                admitted.append(following)
                if not waiting[key]:
                    del waiting[key]
            else:
                del holders[key]
        return admitted

    def withdraw(self, publication: P) -> bool:
        """Remove a waiting publication. Return whether it was waiting."""
        key = publication.message.message_id
        queue = self._waiting.get(key)
        if queue is None or publication not in queue:
            return False
        queue.remove(publication)
        if not queue:
            del self._waiting[key]
        return True
