"""The table of queue arguments, compared with RabbitMQ, which knows the types of queues for each argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

import pytest
from pika.exceptions import ChannelClosedByBroker

from reliable_mq.topology import QueueType
from reliable_mq.topology.arguments import ARGUMENTS, Argument

if TYPE_CHECKING:
    from reliable_mq.testing import VirtualHost

#: Values that are no whole numbers, and numbers with another range.
VALUES: Final = {
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": "dead",
    "x-delayed-retry-type": "failed",
    "x-max-age": "1D",
    "x-max-priority": 5,
    "x-overflow": "reject-publish",
    "x-dead-letter-strategy": "at-least-once",
    "x-queue-leader-locator": "balanced",
    "x-queue-version": 2,
    "x-single-active-consumer": True,
    "x-stream-filter-size-bytes": 16,
}
CURRENT: Final = [each for each in ARGUMENTS.values() if not each.until and each.name != "x-queue-type"]


def value(argument: Argument) -> object:
    return VALUES.get(argument.name, 1_000_000)


@pytest.mark.both_lines
@pytest.mark.parametrize("kind", get_args(QueueType))
def test_each_argument_is_accepted_for_its_types(any_vhost: VirtualHost, kind: str) -> None:
    arguments = {each.name: value(each) for each in CURRENT if kind in each.kinds}
    with any_vhost.connect() as connection:
        connection.channel().queue_declare("q", durable=True, arguments={"x-queue-type": kind, **arguments})
    queue = any_vhost.queue("q")
    assert queue is not None
    assert queue["arguments"] == {"x-queue-type": kind, **arguments}


@pytest.mark.parametrize("kind", get_args(QueueType))
def test_each_argument_is_refused_for_other_types(vhost: VirtualHost, kind: str) -> None:
    others = [each for each in CURRENT if kind not in each.kinds]
    assert others
    with vhost.connect() as connection:
        for other in others:
            arguments = {"x-queue-type": kind, other.name: value(other)}
            with pytest.raises(ChannelClosedByBroker, match=f"invalid arg '{other.name}' for queue 'q'"):
                connection.channel().queue_declare("q", durable=True, arguments=arguments)
