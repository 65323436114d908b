"""A queue, a stage and a relay's channel as data, for the relay session's tests.

A `Channel` is one epoch. The relay writes frames into it, and the broker carries them out one by one when told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from reliable_mq.codec import RawDelivery
from reliable_mq.core.stage.envelope import MOST_MESSAGES, message_id_of, unstaged
from reliable_mq.core.stage.options import StageOptions
from reliable_mq.core.stage.session import (
    TRANSITIONS,
    EpochState,
    StageSession,
)
from tests.core.deliveries import properties
from tests.transitions import follows

FRAME_MAX = 131_072


class CheckedSession(follows(TRANSITIONS), StageSession):  # type: ignore[misc]
    """A session that only allows the state changes of the table."""


def stage_options(partitions: int = 1, **changed: Any) -> StageOptions:
    changed = {"messages_per_entry": MOST_MESSAGES, **changed}
    return StageOptions(url="amqp://localhost/", queue="orders", stage="stage", partitions=partitions, **changed)


@dataclass
class Queued:
    """A message in the queue."""

    message_id: str
    body: bytes = b"body"
    redelivered: bool = False
    returns: int = 0
    acked_at: float | None = None

    @property
    def properties(self) -> bytes:
        return properties(message_id=self.message_id or None)

    @property
    def delivered_properties(self) -> bytes:
        """Return the properties with the count that a quorum queue adds."""
        counted = {"x-acquired-count": self.returns} if self.returns else None
        return properties(headers=counted, message_id=self.message_id or None)

    def returned(self) -> None:
        self.redelivered = True
        self.returns += 1


@dataclass
class Stage:
    """The partitions of a stage: for each one, properties and bodies by offset."""

    names: tuple[str, ...]
    logs: dict[str, list[tuple[bytes, bytes]]] = field(init=False)

    def __post_init__(self) -> None:
        self.logs = {name: [] for name in self.names}

    def originals(self) -> list[bytes]:
        """Return the properties of all staged messages, without headers and markers."""
        entries = (unstaged(*each) for log in self.logs.values() for each in log)
        ids = [message_id_of(each.properties) for entry in entries if entry is not None for each in entry.originals]
        return [properties(message_id=message_id.decode() if message_id else None) for message_id in ids]

    def from_offset(self, name: str, start: int | str) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """Yield messages from an offset, or those of the last chunk (at most three)."""
        log = self.logs[name]
        first = max(len(log) - 3, 0) if start == "last" else int(start)
        yield from enumerate(log[first:], first)


class Channel:
    """The channel of one epoch, with the frames not yet carried out by the broker."""

    def __init__(self, stage: Stage, queue: deque[Queued]) -> None:
        self._stage = stage
        self._queue = queue
        self._tags = count(1)
        self._sequence = count(1)
        self.unacked: dict[int, Queued] = {}
        self.work: deque[tuple[str, object]] = deque()
        self.confirms: deque[int] = deque()

    def write(self, frames: bytes) -> None:
        self.work.extend(parsed(frames))

    def carry_out(self, now: float, most: int = 1_000_000) -> list[Queued]:
        """Carry out the next frames, and return the messages that were acked."""
        acked: list[Queued] = []
        for _ in range(min(most, len(self.work))):
            kind, value = self.work.popleft()
            if kind == "publish":
                routing_key, raw, body = value  # type: ignore[misc]
                self._stage.logs[routing_key].append((raw, body))
                self.confirms.append(next(self._sequence))
            else:
                tag, multiple = value  # type: ignore[misc]
                tags = [each for each in self.unacked if each <= tag] if multiple else [tag]
                for each in tags:
                    message = self.unacked.pop(each, None)
                    if message is not None:
                        message.acked_at = now
                        acked.append(message)
        return acked

    def deliver(self, most: int) -> list[RawDelivery]:
        """Take messages from the head of the queue."""
        taken = []
        for _ in range(min(most, len(self._queue))):
            message = self._queue.popleft()
            tag = next(self._tags)
            self.unacked[tag] = message
            taken.append(
                RawDelivery(
                    "work-1", tag, message.redelivered, "", "orders", message.delivered_properties, message.body
                )
            )
        return taken

    def read(self, name: str, start: int | str, most: int = 1_000_000) -> list[tuple[int, RawDelivery]]:
        """Return deliveries from a partition."""
        return [
            (offset, RawDelivery("tail-1", next(self._tags), False, "", name, raw, body))
            for _, (offset, (raw, body)) in zip(range(most), self._stage.from_offset(name, start), strict=False)
        ]

    def die(self) -> None:
        """Lose the channel: drop the waiting frames, and requeue unacked messages."""
        self.take_back()
        self.work.clear()

    def take_back(self) -> None:
        """Requeue the unacked messages, and ignore later acks of them."""
        for message in reversed(self.unacked.values()):
            message.returned()
            self._queue.appendleft(message)
        self.unacked.clear()


def parsed(frames: bytes) -> list[tuple[str, object]]:
    """Return the publishes and acks in order."""
    found: list[tuple[str, object]] = []
    at = 0
    publish: list[object] = []
    missing = 0
    while at < len(frames):
        kind, size = frames[at], int.from_bytes(frames[at + 3 : at + 7])
        payload = frames[at + 7 : at + 7 + size]
        at += size + 8
        if kind == 1 and payload[:4] == b"\0\x3c\0\x28":
            exchange = payload[6]
            start = 7 + exchange
            publish = [payload[start + 1 : start + 1 + payload[start]].decode()]
        elif kind == 2:
            missing = int.from_bytes(payload[4:12])
            publish += [payload[12:], b""]
        elif kind == 3:
            publish[2] += payload  # type: ignore[operator]
            missing -= len(payload)
        else:
            assert payload[:4] == b"\0\x3c\0\x50", payload
            found.append(("ack", (int.from_bytes(payload[4:12]), bool(payload[12]))))
        if len(publish) == 3 and not missing:
            found.append(("publish", tuple(publish)))
            publish = []
    return found


def moving(session: StageSession, channel: Channel, number: int, now: float = 0.0, most: int = 1_000_000) -> None:
    """Bring an epoch to the state MOVING."""
    session_name = number.to_bytes(8)
    channel.write(session.opened(number, 1, FRAME_MAX, session_name, now))
    channel.carry_out(now)
    confirm(session, channel, number, now)
    assert session.state is EpochState.READING
    while session.next_read is not None:
        name, start = session.next_read
        over = False
        while not over:
            messages = channel.read(name, start, most)
            assert messages, "the marker was not found"
            over, frames = session.tail_read(name, messages, now)
            channel.write(frames)
            channel.carry_out(now)
            if not over:
                start = messages[-1][0] + 1
    assert session.state is EpochState.MOVING


def confirm(session: StageSession, channel: Channel, number: int, now: float = 0.0) -> None:
    """Pass on all confirms of the broker, and carry out the acks."""
    while channel.confirms:
        session.confirmed(number, channel.confirms.popleft(), False)
    channel.write(session.acks(now))


__all__ = [
    "FRAME_MAX",
    "Channel",
    "CheckedSession",
    "Queued",
    "Stage",
    "confirm",
    "moving",
    "parsed",
    "stage_options",
]
