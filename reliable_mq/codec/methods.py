"""The methods of a channel: setup steps, their replies, opening and closing.

The drivers' encoders are not used. They refuse names and arguments that brokers accept, such as queue names in any
language and byte strings.

Invariants:

- An encoded method is one whole frame.
- A reply is decoded to the type that the step's docstring names.
- A frame that does not fit its method number raises `CodecError`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from reliable_mq.codec.frames import method_frame
from reliable_mq.codec.tables import CodecError, encode_short_string, encode_table
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence


Arguments = Mapping[str, object]


class ReplyCode(enum.IntEnum):
    """The reason of a ``basic.return``, a ``channel.close`` or a ``connection.close``."""

    CONTENT_TOO_LARGE = 311
    NO_ROUTE = 312
    NO_CONSUMERS = 313
    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541


@dataclass(frozen=True, slots=True)
class DeclareQueue:
    """``queue.declare``; the reply is a `QueueState`."""

    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckQueue:
    """Passive ``queue.declare`` of an existing queue; the reply is a `QueueState`."""

    name: str


@dataclass(frozen=True, slots=True)
class DeleteQueue:
    """``queue.delete``, including all messages; a missing queue is not an error."""

    name: str


@dataclass(frozen=True, slots=True)
class DeclareExchange:
    """``exchange.declare``."""

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckExchange:
    """Passive ``exchange.declare``: the exchange must exist."""

    name: str


@dataclass(frozen=True, slots=True)
class Bind:
    """``queue.bind`` or ``exchange.bind``, depending on the destination's `kind`."""

    kind: Literal["queue", "exchange"]
    destination: str
    source: str
    routing_key: str = ""
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfirmSelect:
    """``confirm.select``."""


@dataclass(frozen=True, slots=True)
class SetPrefetch:
    """``basic.qos`` for later consumers: a number of messages, 0 for no limit."""

    count: int


#: An argument that only consumers of a stream may have, and a header of their deliveries.
STREAM_OFFSET: Final = "x-stream-offset"


@dataclass(frozen=True, slots=True)
class Consume:
    """``basic.consume``; the reply is the consumer tag."""

    queue: str
    consumer_tag: str
    automatic_ack: bool = False
    exclusive: bool = False
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cancel:
    """``basic.cancel``: no delivery follows the reply; earlier ones stay outstanding."""

    consumer_tag: str


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue's name and its numbers of ready messages and consumers."""

    name: str
    messages: int
    consumers: int

    @property
    def in_doubt(self) -> bool:
        """Whether the counts may be unknown to the broker.

        RabbitMQ reports 0 messages and 0 consumers for a quorum queue whose leader does not respond within 250 ms,
        during an election for example (``stat`` in ``rabbit_quorum_queue.erl``).
        """
        return not self.messages and not self.consumers


Step = (
    DeclareQueue
    | CheckQueue
    | DeleteQueue
    | DeclareExchange
    | CheckExchange
    | Bind
    | ConfirmSelect
    | SetPrefetch
    | Consume
    | Cancel
)


MethodReply = QueueState | str | None


CONNECTION_TUNE: Final = (10, 30)
CONNECTION_CLOSED: Final = (10, 50)
CONNECTION_BLOCKED: Final = (10, 60)
CONNECTION_UNBLOCKED: Final = (10, 61)
UPDATE_SECRET: Final = (10, 70)
CONNECTION_SECRET_UPDATED: Final = (10, 71)
CHANNEL_OPEN_OK: Final = (20, 11)
CHANNEL_CLOSED: Final = (20, 40)
CHANNEL_CLOSE_OK: Final = (20, 41)
CANCELLED: Final = (60, 30)

_QUEUE_DECLARE_OK: Final = (50, 11)
_CONSUME_OK: Final = (60, 21)

_INDEX: Final = Struct(">HH")
_COUNTS: Final = Struct(">II")
_TUNE: Final = Struct(">HIH")
_UINT16: Final = Struct(">H")
_UINT32: Final = Struct(">I")
_ARGUMENTS: Final = 11  # offset of the arguments in the frame of a method
_NOTHING: Final = b"\0\0"  # the ticket at the beginning of most methods, which is obsolete

Index = tuple[int, int]


class Tune(NamedTuple):
    """The limits in ``connection.tune``; 0 means no limit."""

    channel_max: int
    frame_max: int
    heartbeat: int


def method_of(frame: bytes) -> Index | None:
    """Return the class and method numbers of a frame; None if it has no method."""
    return _INDEX.unpack_from(frame, 7) if frame[0] == 1 and len(frame) > _ARGUMENTS else None


def encode_steps(channel: int, steps: Sequence[Step]) -> tuple[bytes, list[Index]]:
    """Encode the methods of several steps in one piece.

    Returns:
        The frames, and the numbers of the replies' methods.

    Raises:
        ConfigurationError: If a name or an argument cannot be encoded. The message names it, and the step.
    """
    frames: list[bytes] = []
    answers: list[Index] = []
    for step in steps:
        try:
            (class_id, method_id), arguments = _method(step)
        except ConfigurationError as error:
            raise ConfigurationError(f"{type(step).__name__} cannot be sent: {error}") from error
        frames.append(method_frame(channel, class_id, method_id, arguments))
        answers.append((class_id, method_id + 1))
    return b"".join(frames), answers


def decode_reply(frame: bytes) -> MethodReply:
    """Return the reply to a step from the frame of its method.

    Raises:
        CodecError: If the frame is broken.
    """
    index = method_of(frame)
    if index == _QUEUE_DECLARE_OK:
        name, end = _short_string(frame, _ARGUMENTS)
        if end + _COUNTS.size >= len(frame):
            raise CodecError("truncated queue.declare-ok")
        messages, consumers = _COUNTS.unpack_from(frame, end)
        return QueueState(name, messages, consumers)
    return decode_text(frame) if index == _CONSUME_OK else None


def decode_text(frame: bytes) -> str:
    """Return the first argument of a method, a short string.

    For ``connection.blocked``, ``basic.cancel`` and ``basic.consume-ok``.

    Raises:
        CodecError: If the frame is broken.
    """
    return _short_string(frame, _ARGUMENTS)[0]


def decode_close(frame: bytes) -> tuple[int, str, Index]:
    """Return the code and text of ``connection.close`` or ``channel.close``.

    They are followed by the method over which the broker closed it; (0, 0) stands for none.

    Raises:
        CodecError: If the frame is broken.
    """
    text, end = _short_string(frame, _ARGUMENTS + 2)
    if end + _INDEX.size >= len(frame):
        raise CodecError("truncated close")
    return _UINT16.unpack_from(frame, _ARGUMENTS)[0], text, _INDEX.unpack_from(frame, end)


def encode_channel_open(channel: int) -> bytes:
    return method_frame(channel, 20, 10, b"\0")


def encode_channel_close(channel: int) -> bytes:
    """Encode ``channel.close`` with code 200."""
    return method_frame(channel, *CHANNEL_CLOSED, _UINT16.pack(200) + b"\0" + _INDEX.pack(0, 0))


def encode_channel_close_ok(channel: int) -> bytes:
    return method_frame(channel, *CHANNEL_CLOSE_OK, b"")


def encode_update_secret(secret: str, reason: str) -> bytes:
    """Encode ``connection.update-secret`` with another token."""
    token = secret.encode()
    return method_frame(0, *UPDATE_SECRET, _UINT32.pack(len(token)) + token + encode_short_string(reason, "reason"))


def negotiated(frame: bytes, *, channel_max: int, frame_max: int) -> tuple[bytes, Tune]:
    """Lower the limits in ``connection.tune``, for a driver that accepts every offer.

    Raises:
        CodecError: If the frame is broken.
    """
    if len(frame) <= _ARGUMENTS + _TUNE.size:
        raise CodecError("truncated connection.tune")
    offered = Tune._make(_TUNE.unpack_from(frame, _ARGUMENTS))
    tune = offered._replace(
        channel_max=min(offered.channel_max or channel_max, channel_max),
        frame_max=min(offered.frame_max or frame_max, frame_max),
    )
    return frame[:_ARGUMENTS] + _TUNE.pack(*tune) + frame[_ARGUMENTS + _TUNE.size :], tune


def _method(step: Step) -> tuple[Index, bytes]:
    match step:
        case DeclareQueue():
            bits = step.durable << 1 | step.exclusive << 2 | step.auto_delete << 3
            return (50, 10), _queue(step.name) + bytes([bits]) + encode_table(step.arguments)
        case CheckQueue():
            return (50, 10), _queue(step.name) + b"\1" + encode_table({})
        case DeleteQueue():
            return (50, 40), _queue(step.name) + b"\0"
        case DeclareExchange():
            bits = step.durable << 1 | step.auto_delete << 2 | step.internal << 3
            names = encode_short_string(step.name, "exchange") + encode_short_string(step.type, "type")
            return (40, 10), _NOTHING + names + bytes([bits]) + encode_table(step.arguments)
        case CheckExchange():
            names = encode_short_string(step.name, "exchange") + encode_short_string("direct", "type")
            return (40, 10), _NOTHING + names + b"\1" + encode_table({})
        case Bind():
            names = encode_short_string(step.destination, "destination") + encode_short_string(step.source, "source")
            names += encode_short_string(step.routing_key, "routing_key")
            index = (50, 20) if step.kind == "queue" else (40, 30)
            return index, _NOTHING + names + b"\0" + encode_table(step.arguments)
        case ConfirmSelect():
            return (85, 10), b"\0"
        case SetPrefetch():
            if not 0 <= step.count <= 0xFFFF:
                raise ConfigurationError(f"prefetch must be from 0 to 65535, not {step.count}")
            return (60, 10), b"\0\0\0\0" + _UINT16.pack(step.count) + b"\0"
        case Consume():
            bits = step.automatic_ack << 1 | step.exclusive << 2
            tag = encode_short_string(step.consumer_tag, "consumer_tag")
            return (60, 20), _queue(step.queue) + tag + bytes([bits]) + encode_table(step.arguments)
        case _:  # Cancel
            return CANCELLED, encode_short_string(step.consumer_tag, "consumer_tag") + b"\0"


def _queue(name: str) -> bytes:
    return _NOTHING + encode_short_string(name, "queue")


def _short_string(frame: bytes, start: int) -> tuple[str, int]:
    end = start + 1 + frame[start] if start < len(frame) else start
    if end >= len(frame):
        raise CodecError("truncated method")
    return frame[start + 1 : end].decode("utf-8", "replace"), end
