"""Suspends leaders and members of queues, and the replication of streams."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from reliable_mq.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing import ClusterNode, RabbitMQ, VirtualHost

# The processes on a leader's node that send streams to the replicas on another node.
_SENDERS: Final = """
[P || {{_, P, _, _}} <- supervisor:which_children(osiris_replica_reader_sup),
      lists:any(fun (Link) -> is_pid(Link) andalso node(Link) =:= '{node}' end, element(2, process_info(P, links)))]
"""


def suspend_leader(vhost: VirtualHost, queue: str, seconds: float) -> None:
    """Suspend the leader of a quorum queue for some seconds.

    The call returns before the leader resumes by itself.
    """
    vhost.broker.evaluate(
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost.name}">>, queue, <<"{queue}">>)), '
        "Leader = amqqueue:get_pid(Q), ok = sys:suspend(Leader), "
        f"spawn(fun() -> timer:sleep({round(seconds * 1000)}), sys:resume(Leader) end), ok"
    )


@contextmanager
def suspend_replication(leader: ClusterNode, replica: ClusterNode) -> Iterator[None]:
    """Stop a node from sending its streams to the replicas on another node.

    The nodes can still communicate otherwise. A replica that is still starting, whose stream has a majority without it,
    is waited for.
    """
    senders = _SENDERS.format(node=replica.name).strip()
    suspend = f"[begin sys:suspend(P), P end || P <- {senders}]"
    wait_until(lambda: leader.evaluate(suspend) != "[]", timeout=60, what=f"a sender to {replica.name}")
    try:
        yield
    finally:
        leader.evaluate(f"[sys:resume(P) || P <- {senders}]")


def suspend_member(node: RabbitMQ, vhost: VirtualHost, queue: str, seconds: float) -> None:
    """Suspend a node's member of a quorum queue for some seconds.

    The member delivers to the consumers of the node. It resumes by itself.
    """
    node.evaluate(
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost.name}">>, queue, <<"{queue}">>)), '
        "{Name, _} = amqqueue:get_pid(Q), Member = whereis(Name), ok = sys:suspend(Member), "
        f"spawn(fun() -> timer:sleep({round(seconds * 1000)}), sys:resume(Member) end), ok"
    )


def resume_member(node: RabbitMQ, vhost: VirtualHost, queue: str) -> None:
    """Resume a node's member of a quorum queue before it resumes by itself."""
    node.evaluate(
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost.name}">>, queue, <<"{queue}">>)), '
        "{Name, _} = amqqueue:get_pid(Q), sys:resume(whereis(Name))"
    )
