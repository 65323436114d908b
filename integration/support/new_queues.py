"""Helpers for new quorum queues, and for quorum queues without a leader."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliable_mq.testing import RabbitMQ

__all__ = ["elect_leaders", "let_new_queues_age", "signals_at_once"]

_SEND_SIGNALS = (
    "pid=$(pidof beam.smp) && echo ready && "
    'while read -r name; do kill -s "$name" $pid; [ "$name" = STOP ] && echo stopped; done'
)

_LEADERLESS = (
    "[Name || Q <- rabbit_amqqueue:list(), amqqueue:get_type(Q) =:= rabbit_quorum_queue,"
    " {Name, _} <- [amqqueue:get_pid(Q)], ra_leaderboard:lookup_leader(Name) =:= undefined]"
)

_OLD = 1.5  # seconds; RabbitMQ keeps the messages of a quorum queue through any fault once it is a second old


def let_new_queues_age() -> None:
    """Wait until the current queues keep their messages if the broker is killed.

    The broker does not show when this is the case.
    """
    time.sleep(_OLD)


def elect_leaders(broker: RabbitMQ) -> int:
    """Make quorum queues without a leader elect one; return how many there were.

    RabbitMQ 4.0 starts a queue whose registration it has lost as a new member: a follower that is never told to stand
    for election (rabbitmq-server#15725). Neither time, nor a restart, nor a client can repair it. The queue is found,
    and a passive declaration succeeds. An operator can repair it with `rabbitmqctl eval`.
    """
    return int(broker.evaluate(f"length([ra:trigger_election({{Name, node()}}) || Name <- {_LEADERLESS}])"))


@contextmanager
def signals_at_once(broker: RabbitMQ) -> Iterator[Callable[[str], None]]:
    """Yield a function that sends a signal, by its name, to the broker's process.

    The signal arrives within milliseconds. Docker takes tenths of a second to freeze or kill a container. A call with
    ``"STOP"`` returns when the signal has been sent.
    """
    container = broker.container
    api = container.client.api
    execution = api.exec_create(container.id, ["sh", "-c", _SEND_SIGNALS], stdin=True, user="root")
    stream = api.exec_start(execution["Id"], socket=True)
    try:
        assert b"ready" in stream.read(64)

        def send(name: str) -> None:
            stream._sock.sendall(f"{name}\n".encode())
            if name == "STOP":
                assert b"stopped" in stream.read(64)

        yield send
    finally:
        stream._sock.close()
        stream.close()
