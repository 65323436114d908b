"""A scripted channel that reads streams: replicas that lag or have just started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from reliable_mq.codec import RawDelivery, join_properties
from reliable_mq.codec.methods import CheckQueue, MethodReply, QueueState, Step
from reliable_mq.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime

    from reliable_mq.settings import ConnectionSettings


class Replica:
    """The replica of the stream ``events`` on one node.

    Each read of its end takes the next of the given pairs of end and count; the last pair stays. It delivers nothing
    and counts nothing until the channel has waited for `silent_for` seconds. The last `coming` messages are published
    after the subscriptions. Without any pairs, the node has no replica.
    """

    def __init__(self, *looks: tuple[int, int], first: int = 0, silent_for: float = 0.0, coming: int = 0) -> None:
        self.exists = bool(looks)
        self.first = first
        self.coming = coming
        self.silent_for = silent_for
        self._looks = list(looks)
        self.end, self.count = looks[0] if looks else (0, 0)

    @property
    def next_end(self) -> int:
        return self._looks[0][0]

    def look(self) -> None:
        self.end, self.count = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


class ScriptedChannel:
    """A channel on the node of the first host that responds."""

    replicas: Mapping[str, Replica] = {}
    usable = True
    waited = 0.0  # simulated seconds

    def __init__(self, settings: ConnectionSettings, *, name: str) -> None:
        answering = [endpoint.host for endpoint in settings.endpoints if endpoint.host in self.replicas]
        self._replica = self.replicas[answering[0]] if answering else None
        self._arrived: list[RawDelivery] = []
        self._tags = 0
        self._watched: dict[str, int] = {}  # position by tag

    def __enter__(self) -> Self:
        if self._replica is None:
            raise BrokerUnavailable("no host answers")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def replica(self) -> Replica:
        assert self._replica is not None
        return self._replica

    def consume(
        self, stream: str, offset: int | str | datetime, prefetch: int, arguments: Mapping[str, object] | None = None
    ) -> str:
        if not self.replica.exists:
            raise BrokerUnavailable("the stream has no replica on this node")
        if offset == "last":
            self.replica.look()
        end = self.replica.end
        places = {"first": self.replica.first, "last": end - 1, "next": end - self.replica.coming}
        at = offset if isinstance(offset, int) else places.get(str(offset), end)  # no message is that new
        self._tags += 1
        if self.replica.first <= at < end:
            self._arrived.append(_delivery(str(self._tags), at))
        return str(self._tags)

    def watch(self, stream: str, position: int) -> str:
        """Subscribe to the message at a position, which comes when the next look at the end would show it."""
        self._tags += 1
        self._watched[str(self._tags)] = position
        return str(self._tags)

    def take(self, timeout: float, least: int = 1, of: Collection[str] = ()) -> list[RawDelivery]:
        for tag in self._watched.keys() & set(of):
            return [_delivery(tag, self._watched[tag])] if self._watched[tag] < self.replica.next_end else []
        if self._arrived and timeout >= self.replica.silent_for:
            type(self).waited += self.replica.silent_for
            self.replica.silent_for = 0.0
            taken = [delivery for delivery in self._arrived if not of or delivery.consumer_tag in of]
            self._arrived = [delivery for delivery in self._arrived if delivery not in taken]
            return taken
        type(self).waited += timeout
        self.replica.silent_for = max(self.replica.silent_for - timeout, 0.0)
        return []

    def carry_out(self, step: Step) -> MethodReply:
        return self.perform(step)

    def perform(self, step: Step) -> MethodReply:
        assert isinstance(step, CheckQueue)
        return QueueState(step.name, self.replica.count if self.replica.silent_for <= 0 else 0, 0)

    def cancel(self, *consumer_tags: str) -> None:
        self._arrived = [delivery for delivery in self._arrived if delivery.consumer_tag not in consumer_tags]

    def ack(self) -> None:
        pass


def _delivery(tag: str, offset: int) -> RawDelivery:
    value = b"\x0fx-stream-offsetl" + offset.to_bytes(8)
    properties = join_properties({"headers": len(value).to_bytes(4) + value})
    return RawDelivery(tag, 1, False, "", "", properties, b"")
