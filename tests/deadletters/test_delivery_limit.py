"""A queue with a delivery limit is not read any more before RabbitMQ drops its messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reliable_mq.codec.methods import DeclareQueue, MethodReply
from reliable_mq.core.channel_setup import Pipeline, StepRefused
from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.deadletters.channel import GetChannel
from reliable_mq.deadletters.delivery_limit import DeliveryLimit
from reliable_mq.errors import ConsumeError
from reliable_mq.url import parse_url

V40, V43 = (4, 0, 5), (4, 3, 6)


def letter(count: int, *, redelivered: bool = True) -> Any:
    return SimpleNamespace(delivery_count=count, redelivered=redelivered)


def reads(version: tuple[int, ...], limit: int, *, lost: bool) -> tuple[int, int]:
    """Return how many operations were not refused, and how many were refused before the queue drops a message.

    Args:
        version: The version of the broker.
        limit: The delivery limit of the queue.
        lost: Whether each operation that was not refused loses its connection.
    """
    queue = DeliveryLimit("q", limit, version, quorum=True)
    count = read = refused = 0
    while refused < 9:
        letters = [letter(0), letter(count)]
        try:
            queue.check()
        except ConsumeError:
            return read, 9  # nothing was taken
        try:
            queue.check(letters)
        except ConsumeError:
            refused += 1
            count += version < (4, 3)
        else:
            assert count <= limit
            read += 1
            count += version < (4, 3) or lost
        if count > limit:
            return read, refused - 1
    return read, refused


@pytest.mark.parametrize(
    ("version", "limit", "expected"),
    [
        (V40, 0, (0, 9)),
        (V40, 1, (0, 9)),
        (V40, 2, (1, 1)),
        (V40, 5, (1, 4)),
        (V40, 20, (16, 4)),
        (V40, 100, (16, 9)),
        (V43, 0, (0, 9)),
        (V43, 1, (1, 9)),
        (V43, 5, (4, 9)),
        (V43, 20, (16, 9)),
    ],
)
def test_reading_is_refused_before_messages_are_dropped(
    version: tuple[int, ...], limit: int, expected: tuple[int, int]
) -> None:
    assert reads(version, limit, lost=True) == expected


def test_a_refusal_names_the_version_the_limit_and_the_count() -> None:
    for version, text in ((V40, "4.0.5 counts each read"), (V43, "4.3.6 counts each lost connection")):
        with pytest.raises(ConsumeError, match=rf"{text} .* limit \(20, .* the highest count is 16;"):
            DeliveryLimit("q", 20, version).check([letter(16)])
    DeliveryLimit("q", None, V40).check([letter(16)])


def test_the_count_of_another_queue_is_ignored() -> None:
    """A client that moves a message may publish all its headers."""
    DeliveryLimit("q", 20, V43).check([letter(100, redelivered=False)])


def test_a_queue_whose_first_return_may_drop_is_not_read() -> None:
    """Even an operation that is refused would take messages and return them."""
    dead = DeadLetterQueue("amqp://localhost", "q")
    dead._limit = DeliveryLimit("q", 1, V40, quorum=True)
    for operation in (dead.statistics, dead.purge, lambda: dead.replay(dry_run=True)):
        with pytest.raises(ConsumeError, match="highest count is 0;"):
            operation()  # would raise UsageError if it took a message, because it is not connected


class Broker:
    """Has a queue with these properties and arguments, and names the first one in which a declaration differs."""

    def __init__(self, version: tuple[int, ...], existing: dict[str, object] | None, *, cut: bool = False) -> None:
        self.server = SimpleNamespace(version_tuple=version)
        self._existing = None if existing is None else {"durable": True, "auto_delete": False, **existing}
        self._cut = cut

    def perform(self, step: Pipeline) -> tuple[object, ...]:
        answered: Any = (MethodReply,)
        declared = step.steps[-1]
        assert isinstance(declared, DeclareQueue)
        if self._existing is None:
            raise StepRefused(403, "ACCESS_REFUSED - configure access is refused", answered=answered)
        given = {"durable": declared.durable, "auto_delete": declared.auto_delete, **declared.arguments}
        for name in {**given, **self._existing}:
            received, current = given.get(name), self._existing.get(name)
            if received != current:
                text = _inequivalent(name, received, current)
                raise StepRefused(406, text[:80] if self._cut else text, answered=answered)
        return (*answered, MethodReply)


def channel_of(broker: Broker | None, queue: str) -> GetChannel:
    channel: Any = GetChannel(parse_url("amqp://localhost"), queue, name="test")
    if broker is not None:
        channel.server, channel.perform = broker.server, broker.perform
    made: GetChannel = channel
    return made


def _inequivalent(name: str, received: object, current: object) -> str:
    def shown(value: object, other: object) -> str:
        if isinstance(value, bool):
            return f"'{str(value).lower()}'"
        if value is None:
            return "none"
        kind = "signedint" if isinstance(value, int) else "longstr"
        return f"the value '{value}' of type '{kind}'" if other is None else f"'{value}'"

    values = f"received {shown(received, current)} but current is {shown(current, received)}"
    return f"PRECONDITION_FAILED - inequivalent arg '{name}' for queue 'q' in vhost '/': {values}"


QUORUM: dict[str, object] = {"x-queue-type": "quorum"}


@pytest.mark.parametrize(
    ("version", "existing", "limit", "counts"),
    [
        (V40, {**QUORUM, "x-delivery-limit": -1}, None, (False, False)),
        (V40, {**QUORUM, "x-delivery-limit": -1, "x-max-length": 9}, None, (False, False)),
        (V40, {**QUORUM, "x-delivery-limit": 5, "x-max-length": 9, "x-a": "a"}, 5, (True, False)),
        (V40, QUORUM, 20, (True, False)),
        ((3, 13, 7), QUORUM, None, (False, False)),
        ((3, 13, 7), {**QUORUM, "x-delivery-limit": 5}, 5, (True, False)),
        (V43, {**QUORUM, "x-delivery-limit": -1}, None, (False, True)),
        (V43, {**QUORUM, "x-delivery-limit": 5}, 5, (False, True)),
        (V43, QUORUM, 20, (False, True)),
        (V40, {}, None, (False, False)),
        (V43, {"x-queue-type": "stream"}, None, (False, False)),
        (V40, None, 20, (True, False)),
        (V43, None, 20, (False, False)),
    ],
)
def test_the_limit_is_that_of_the_arguments(
    version: tuple[int, ...], existing: dict[str, object] | None, limit: int | None, counts: tuple[bool, bool]
) -> None:
    """Without permission, RabbitMQ's default is assumed, and a consumer might do harm."""
    channel = channel_of(Broker(version, existing), "q")
    found = DeliveryLimit.of("q", version, channel.find_declaration())
    assert channel.by_consumers is (existing is not None)
    assert (found.limit, (found.counts_reads, found.counts_lost_connections)) == (limit, counts)


def test_a_reserved_name_is_not_declared() -> None:
    channel = channel_of(None, "amq.gen-1")
    assert DeliveryLimit.of("amq.gen-1", V40, channel.find_declaration()).limit == 20
    assert not channel.by_consumers


@pytest.mark.parametrize(
    ("existing", "cut", "harmless"),
    [
        ({**QUORUM, "auto_delete": True}, False, False),
        ({"auto_delete": True}, False, False),
        ({"durable": False}, False, True),
        ({"durable": False, "auto_delete": True}, False, False),
        ({"x-max-length": 9}, True, True),
        ({"auto_delete": True}, True, False),
        ({"durable": False}, True, False),
    ],
)
def test_a_consumer_takes_messages_only_if_it_deletes_nothing(
    existing: dict[str, object], cut: bool, harmless: bool
) -> None:
    """RabbitMQ cuts texts with long names, and compares arguments only if the rest is equal."""
    channel = channel_of(Broker(V40, existing, cut=cut), "q")
    channel.find_declaration()
    assert channel.by_consumers is harmless
