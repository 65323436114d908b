"""Quorum queues that another process than the tested one has made, and those that a killed broker has lost."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliable_mq.testing import RabbitMQ

__all__ = ["elect_leaders", "let_new_queues_age", "signals_at_once"]

_SEND_SIGNALS = 'pid=$(pidof beam.smp) && echo ready && while read -r name; do kill -s "$name" $pid; done'

_LEADERLESS = (
    "[Name || Q <- rabbit_amqqueue:list(), amqqueue:get_type(Q) =:= rabbit_quorum_queue,"
    " {Name, _} <- [amqqueue:get_pid(Q)], ra_leaderboard:lookup_leader(Name) =:= undefined]"
)

_OLD = 1.5  # seconds; from one second on RabbitMQ keeps what is in a quorum queue, whatever happens to it


def let_new_queues_age() -> None:
    """Wait until a broker that is killed keeps what is in the queues that it has now; nothing shows that it does."""
    time.sleep(_OLD)


def elect_leaders(broker: RabbitMQ) -> int:
    """Let quorum queues without a leader elect one; return how many those are.

    RabbitMQ 4.0 starts a queue whose registration it has lost as a new member, a follower that nobody tells to stand
    for election (rabbitmq-server#15725). Neither time nor a restart heals it, nor can a client: the queue is found, and
    a passive declaration is answered. This is for an operator: `rabbitmqctl eval`.
    """
    return int(broker.evaluate(f"length([ra:trigger_election({{Name, node()}}) || Name <- {_LEADERLESS}])"))


@contextmanager
def signals_at_once(broker: RabbitMQ) -> Iterator[Callable[[str], None]]:
    """Yield a function that sends the broker's process a signal, by its name.

    It arrives within milliseconds, while docker takes tenths of a second to freeze or to kill a container.
    """
    container = broker.container
    api = container.client.api
    execution = api.exec_create(container.id, ["sh", "-c", _SEND_SIGNALS], stdin=True, user="root")
    stream = api.exec_start(execution["Id"], socket=True)
    try:
        assert b"ready" in stream.read(64)
        yield lambda name: stream._sock.sendall(f"{name}\n".encode())
    finally:
        stream._sock.close()
        stream.close()
        broker.let_go()
