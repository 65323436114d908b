"""The options of a relay into a stage, and the stage's topology.

A stage is a stream with the name of the stage. With `partitions`, it is a super stream: streams called ``STAGE-0`` and
so on, bound to a direct exchange with the name of the stage, which clients of the stream protocol expect. The lock of a
stage is a classic queue, ``STAGE.relay``, which never has a message. The active relay is its exclusive consumer.
(RabbitMQ does not enforce an exclusive consumer of a quorum queue.)

The lock is the fence between two relays: once it is given to another relay, the channel of the one before can publish
nothing more. That does not hold on a cluster for a channel whose node is frozen, or cut off from the node of the lock,
for longer than RabbitMQ's ``net_ticktime`` (60 s, so after 45 to 75 s). The node of the lock then drops its consumer,
and when the other node goes on, the publishes that its channel has read already reach the stage, behind the marker of
the next relay. The messages of these are moved twice.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from reliable_mq._util.validation import check_flag, is_text, seconds, whole_number
from reliable_mq.codec import CodecError, Properties, RawDelivery
from reliable_mq.core.new_queues import NEW_QUEUE_GRACE
from reliable_mq.core.stage.envelope import MOST_MESSAGES
from reliable_mq.errors import ConfigurationError, TopologyMismatch
from reliable_mq.topology import Binding, Declaration, Exchange, Queue

_AGE: Final = re.compile(r"[1-9][0-9]{0,8}[YMDhms]")
_SECONDS: Final = {"Y": 365 * 86_400, "M": 30 * 86_400, "D": 86_400, "h": 3600, "m": 60, "s": 1}
_LONGEST_AGE: Final = 10**9  # seconds; a queue cannot be declared with a higher ``max_age``
_LONGEST: Final = 240  # the maximum bytes of a name, so that names derived from it fit
_MOST_PARTITIONS: Final = 1000
_SEGMENTS: Final = 8  # segments of a stage with a limit of bytes, which are only dropped whole
_LARGEST_SEGMENT: Final = 500_000_000  # RabbitMQ's default
_SMALLEST_SEGMENT: Final = 1_000_000
_HEADER_KEY: Final = "header:"
_OPTIONS: Final = {  # the options, by the argument of the stage that results from them
    "x-max-age": "retention",
    "x-max-length-bytes": "max_bytes",
    "x-stream-max-segment-size-bytes": "max_bytes",
}


class MissingId(enum.Enum):
    """The treatment of a message that has no message id."""

    REFUSE = "refuse"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The options of a relay that moves a queue into a stage.

    Args:
        url: The URL of the broker, as for a `Publisher`.
        queue: The queue to move messages from, classic or quorum. It must exist.
        stage: The stream to move messages into. The relay declares it.
        partitions: The number of partitions of a super stream. None for a plain stream.
        fewer_partitions: Whether to move messages although the stage has more partitions. Messages that another relay
            has moved into these may be moved again. If false, such a stage ends the relay with an error.
        key: The value that selects the partition of a message: ``"message_id"``, ``"routing_key"``, or
            ``"header:NAME"``. The partition of a message without it depends on its body.
        retention: The minimum time for which the stage keeps a message: a number with a unit of Y, M, D, h, m or s.
            None for no limit.
        max_bytes: The size above which each partition drops its oldest messages, in bytes. None for no limit.
        missing_id: The treatment of a message without ``message_id``: refuse it, which ends the relay with an error, or
            move it, perhaps twice if a relay dies.
        messages_per_entry: The maximum number of messages of the queue in one message of the stage, 1 to 64. If it is
            1, other programs can read the stage. More take less of the broker's CPU time.
        max_outstanding: The maximum number of unacked messages.
        max_outstanding_bytes: The approximate maximum total size of the unacked messages, in bytes.
        confirm_timeout: The seconds without a confirm after which the connection is replaced.
        missing_queue_timeout: The seconds for which the queue or the stage may be missing before the relay ends.
        new_stage_grace: The seconds for which a newly made stage is not used. A broker that is killed in the first
            second of a stream forgets it, with everything that it had confirmed.
        names: The names that errors use for options, by their names here. An option that is not included keeps its
            name.

    Raises:
        ConfigurationError: If an option is invalid. The message names the option.
    """

    url: str = field(repr=False)
    queue: str
    stage: str
    partitions: int | None = None
    fewer_partitions: bool = False
    key: str = "message_id"
    retention: str | None = "7D"
    max_bytes: int | None = None
    missing_id: MissingId = MissingId.REFUSE
    messages_per_entry: int = 1
    max_outstanding: int = 2000
    max_outstanding_bytes: int = 64 * 2**20
    confirm_timeout: float = 30.0
    missing_queue_timeout: float = 60.0
    new_stage_grace: float = NEW_QUEUE_GRACE
    names: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("queue", self.queue), ("stage", self.stage)):
            if not is_text(value) or not value or len(value.encode()) > _LONGEST:
                raise ConfigurationError(f"{self._called(name)} must be a name of 1 to {_LONGEST} bytes, not {value!r}")
        if self.queue == self.stage:
            raise ConfigurationError(
                f"{self._called('queue')} and {self._called('stage')} are both {self.stage!r}: name a stream of its "
                "own for the stage"
            )
        for name, number, most in (
            ("partitions", self.partitions, _MOST_PARTITIONS),
            ("max_bytes", self.max_bytes, 2**63 - 1),
            ("messages_per_entry", self.messages_per_entry, MOST_MESSAGES),
            ("max_outstanding", self.max_outstanding, 65_535),
            ("max_outstanding_bytes", self.max_outstanding_bytes, None),
        ):
            if number is not None:
                whole_number(self._called(name), number, 1, most)
        age = self.retention
        if age is not None and not (is_text(age) and _AGE.fullmatch(age) and _seconds_of(age) <= _LONGEST_AGE):
            raise ConfigurationError(
                f"{self._called('retention')} must be a number with a unit of Y, M, D, h, m or s, such as 7D, and at "
                f"most 31Y, not {age!r}"
            )
        if self.key not in {"message_id", "routing_key"} and not (
            is_text(self.key) and self.key.startswith(_HEADER_KEY) and len(self.key) > len(_HEADER_KEY)
        ):
            raise ConfigurationError(
                f"{self._called('key')} must be message_id, routing_key or header:NAME, not {self.key!r}"
            )
        if not isinstance(self.missing_id, MissingId):
            raise ConfigurationError(f"{self._called('missing_id')} must be a MissingId, not {self.missing_id!r}")
        check_flag(self._called("fewer_partitions"), self.fewer_partitions)
        seconds(self._called("confirm_timeout"), self.confirm_timeout, positive=True)
        seconds(self._called("missing_queue_timeout"), self.missing_queue_timeout)
        seconds(self._called("new_stage_grace"), self.new_stage_grace)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams to which messages are moved."""
        if self.partitions is None:
            return (self.stage,)
        return tuple(f"{self.stage}-{number}" for number in range(self.partitions))

    @property
    def next_partition(self) -> str:
        """The stream that exists if the stage has more partitions."""
        return f"{self.stage}-{self.partitions or 0}"

    @property
    def lock(self) -> str:
        """The queue whose exclusive consumer is the active relay."""
        return f"{self.stage}.relay"

    @property
    def max_age(self) -> int | None:
        """The retention in seconds, None for no limit."""
        return None if self.retention is None else _seconds_of(self.retention)

    @property
    def kept_bytes(self) -> int | None:
        """The bytes of its newest messages that a partition keeps, None for all.

        RabbitMQ drops a whole segment at a time.
        """
        return None if self.max_bytes is None else max(self.max_bytes - _segment(self.max_bytes), 0)

    def topology(self) -> list[Declaration]:
        """Return the declarations of the stage and its lock."""
        segment: dict[str, object] = {}
        if self.max_bytes is not None:
            segment = {"x-stream-max-segment-size-bytes": _segment(self.max_bytes)}
        streams = [
            Queue(name, type="stream", max_age=self.max_age, max_length_bytes=self.max_bytes, arguments=segment)
            for name in self.streams
        ]
        lock = Queue(self.lock, type="classic", dead_letter=None)
        if self.partitions is None:
            return [*streams, lock]
        exchange = Exchange(self.stage, arguments={"x-super-stream": True})
        bindings = [
            Binding(exchange, stream, routing_key=str(number), arguments={"x-stream-partition-order": number})
            for number, stream in enumerate(streams)
        ]
        return [exchange, *streams, *bindings, lock]

    def explained(self, mismatch: TopologyMismatch) -> TopologyMismatch:
        """Return the error for a stage that exists but differs, naming the options."""
        differing = [_OPTIONS.get(difference.argument) for difference in mismatch.differences]
        named = dict.fromkeys(self._called(option) for option in differing if option is not None)
        if not named:
            return mismatch
        return TopologyMismatch(
            f"{mismatch}. The stage has this of {' and '.join(named)}: give what it exists with; messages in a stage "
            "that is deleted are lost",
            kind=mismatch.kind,
            name=mismatch.name,
            differences=mismatch.differences,
        )

    @property
    def more_partitions(self) -> str:
        """The text of the error for a stage with more partitions, naming the option."""
        return (
            f"stage {self.stage!r} has a partition {self.next_partition!r}, which would not be read: give "
            f"{self._called('partitions')} the number of its partitions, as other queries and relays of the stage have "
            "it"
        )

    def key_reader(self) -> Callable[[RawDelivery, bytes | None], bytes]:
        """Return a function that makes `shard` keys from deliveries and message ids."""
        if self.key == "message_id":
            return lambda delivery, message_id: message_id or delivery.body
        if self.key == "routing_key":
            return lambda delivery, _: delivery.routing_key.encode("utf-8", "surrogateescape")
        header = self.key.removeprefix(_HEADER_KEY)

        def value_of(delivery: RawDelivery, _: bytes | None) -> bytes:
            try:
                value = Properties(delivery.properties).headers.get(header)
            except CodecError:
                value = None
            return delivery.body if value is None else str(value).encode("utf-8", "surrogateescape")

        return value_of

    def _called(self, option: str) -> str:
        return self.names.get(option, option)


def shard(key: bytes, partitions: int) -> int:
    """Return the partition index for a key: its CRC-32 modulo ``partitions``."""
    return crc32(key) % partitions


def _segment(max_bytes: int) -> int:
    return min(max(max_bytes // _SEGMENTS, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)


def _seconds_of(age: str) -> int:
    return int(age[:-1]) * _SECONDS[age[-1]]
