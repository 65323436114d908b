"""Check a cluster: nodes, the hosts of the URL, leaders, copies of queues.

Pure functions: a snapshot in, findings out. A broker of one node has no findings here: it has one copy of everything,
and whoever runs it knows.

A quorum queue and a stream work while more than half of their members are online. A queue's members are chosen when it
is declared: a node that joins the cluster later holds no copy until somebody adds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import QueueView, Snapshot
from reliable_mq.settings import ConnectionSettings

__all__ = ["examine_cluster", "examine_copies"]

_BROKER: Final = "broker"
_COPIES: Final = 3  # with which one may be lost
_LEADERS: Final = 3  # of as many, not all are on one node by chance of a young cluster
_REPLICATED: Final = ("quorum", "stream")


def examine_cluster(settings: ConnectionSettings, snapshot: Snapshot) -> Iterator[Finding]:
    """Check nodes, hosts and leaders.

    Args:
        settings: of the connection, for its hosts.
        snapshot: of the virtual host, with the nodes of its cluster.
    """
    if snapshot.nodes is None:
        text = "whether this is a cluster, and whether its nodes run, could not be looked at"
        yield Finding(Status.UNCHECKED, _BROKER, "nodes", text, "Give the user the tag 'monitoring'.")
        return
    if len(snapshot.nodes) < 2:
        return
    yield from _nodes(snapshot.nodes)
    if len(settings.endpoints) == 1:
        text = (
            f"the URL names one host of a cluster of {len(snapshot.nodes)} nodes: while that one is down, nobody "
            "connects, though the others work on"
        )
        fix = "Name all of them (amqp://user@one,two,three/), unless that host is a load balancer."
        yield Finding(Status.WARNING, _BROKER, "hosts", text, fix)
    leaders = Counter(queue.node for queue in snapshot.queues.values() if queue.type in _REPLICATED and queue.node)
    if len(leaders) == 1 and leaders.total() >= _LEADERS:
        ((node, count),) = leaders.items()
        text = f"all {count} leaders of quorum queues and streams are on {node}: it does the work of the whole cluster"
        fix = "rabbitmq-queues rebalance all; and queue_leader_locator = balanced in rabbitmq.conf, for queues to come."
        yield Finding(Status.WARNING, _BROKER, "leaders", text, fix)


def _nodes(nodes: tuple[Mapping[str, Any], ...]) -> Iterator[Finding]:
    down = sorted(str(node["name"]) for node in nodes if not node.get("running"))
    drained = sorted(str(node["name"]) for node in nodes if node.get("being_drained"))
    if not down and not drained:
        yield Finding(Status.OK, _BROKER, "nodes", f"all {len(nodes)} run")
    if down:
        running = len(nodes) - len(down)
        status, consequence = Status.WARNING, "the others carry on"
        if 2 * running <= len(nodes):
            status, consequence = Status.PROBLEM, "no majority: quorum queues and streams confirm nothing"
        text = f"{running} of {len(nodes)} run, not {', '.join(down)}: {consequence}"
        fix = "Start it again; or take it out of the cluster, if it is gone: rabbitmqctl forget_cluster_node NODE."
        yield Finding(status, _BROKER, "nodes", text, fix)
    if drained:
        text = f"in maintenance: {', '.join(drained)}, which accepts no connections and leads no queue"
        yield Finding(Status.WARNING, _BROKER, "nodes", text, "rabbitmq-upgrade revive, when it is done.")


def examine_copies(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """Check on how many nodes a queue is, and whether they are online."""
    nodes = len(snapshot.nodes or ())
    if nodes < 2:
        return
    subject = f"queue {queue.name!r}"
    if queue.type == "classic":
        if queue.raw.get("durable", True) and not queue.raw.get("exclusive") and not queue.raw.get("auto_delete"):
            text = (
                f"a classic queue, with its only copy on {queue.node or 'one node'} of {nodes}: while that node is "
                "down nobody publishes or consumes, and without its disk the messages are gone"
            )
            yield Finding(Status.WARNING, subject, "copies", text, 'Declare a quorum queue: Queue(..., type="quorum").')
        return
    members, online = queue.members, queue.online
    if queue.type not in _REPLICATED or not members:
        return
    if len(members) < min(_COPIES, nodes):
        means = (
            "one that dies stops the queue" if len(members) > 1 else "without that node's disk its messages are gone"
        )
        text = f"{len(members)} of {nodes} nodes {'has' if len(members) == 1 else 'have'} a copy of it: {means}"
        program = "rabbitmq-queues add_member" if queue.type == "quorum" else "rabbitmq-streams add_replica"
        yield Finding(Status.WARNING, subject, "copies", text, f"{program} {queue.name} NODE, on one node more each.")
    away = sorted(members - online)
    if away:
        left = len(members) - len(away)
        status, consequence = Status.WARNING, "it works, with less to spare"
        if 2 * left <= len(members):
            status, consequence = Status.PROBLEM, "no majority: nothing is confirmed or delivered"
        elif 2 * (left - 1) <= len(members):
            consequence = "one more that dies stops it"
        text = f"{left} of {len(members)} members are online, not {', '.join(away)}: {consequence}"
        yield Finding(status, subject, "members", text, "Start these nodes, or take the members out and add others.")
