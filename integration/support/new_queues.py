"""Quorum queues that another process than the tested one has made, and those that a killed broker has lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliable_mq.testing import RabbitMQ

__all__ = ["elect_leaders", "let_new_queues_age"]

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
