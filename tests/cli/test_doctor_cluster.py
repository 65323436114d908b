"""The checks of ``doctor`` for a cluster: nodes, hosts, leaders and replicas."""

from __future__ import annotations

from typing import Any

import pytest

from reliable_mq.cli.doctor.broker import examine_cluster
from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import QueueView, Snapshot
from reliable_mq.cli.doctor.queues import examine_copies, examine_queues
from reliable_mq.url import parse_url

OK, WARNING, PROBLEM, UNCHECKED = Status.OK, Status.WARNING, Status.PROBLEM, Status.UNCHECKED
THREE = ("rabbit@a", "rabbit@b", "rabbit@c")
ALL_HOSTS = "amqp://u:p@a,b,c"


def nodes(*names: str, down: tuple[str, ...] = (), drained: tuple[str, ...] = ()) -> tuple[dict[str, Any], ...]:
    return tuple({"name": name, "running": name not in down, "being_drained": name in drained} for name in names)


def queue(name: str = "q", kind: str = "quorum", **fields: Any) -> QueueView:
    replicated = {"members": list(THREE), "online": list(THREE), "leader": THREE[0]} if kind != "classic" else {}
    return QueueView({"name": name, "type": kind, "durable": True, "node": THREE[0], **replicated, **fields})


def cluster(
    *queues: QueueView, of: tuple[dict[str, Any], ...] | None = nodes(*THREE), url: str = ALL_HOSTS
) -> list[Finding]:
    return list(examine_cluster(parse_url(url), Snapshot({each.name: each for each in queues}, nodes=of)))


def copies(view: QueueView, of: tuple[dict[str, Any], ...] | None = nodes(*THREE)) -> list[tuple[Status, str]]:
    return [(each.status, each.check) for each in examine_copies(Snapshot({view.name: view}, nodes=of), view)]


def test_a_cluster_that_is_well_is_said_to_be() -> None:
    spread = [queue(node, leader=node) for node in THREE]
    assert cluster(*spread) == [Finding(OK, "broker", "nodes", "all 3 are running")]
    assert copies(spread[0]) == []


@pytest.mark.parametrize("of", [(), nodes("rabbit@a")])
def test_of_a_single_node_nothing_is_said(of: tuple[dict[str, Any], ...]) -> None:
    assert cluster(*(queue(name) for name in "xyz"), of=of, url="amqp://u:p@a") == []
    assert copies(queue(members=["rabbit@a"], online=["rabbit@a"]), of) == []
    assert copies(queue(kind="classic"), of) == []


def test_nodes_that_may_not_be_read_are_said_to_be_unchecked() -> None:
    (found,) = cluster(of=None)
    assert (found.status, found.check) == (UNCHECKED, "nodes")
    assert "monitoring" in found.fix
    assert copies(queue(kind="classic"), None) == []


@pytest.mark.parametrize(
    ("down", "status", "text"),
    [(THREE[:1], WARNING, "the others continue"), (THREE[:2], PROBLEM, "no majority")],
)
def test_nodes_that_are_down_are_named(down: tuple[str, ...], status: Status, text: str) -> None:
    (found,) = cluster(of=nodes(*THREE, down=down))
    assert (found.status, found.check) == (status, "nodes")
    assert text in found.text
    assert all(node in found.text for node in down)


def test_a_node_in_maintenance_is_named() -> None:
    (found,) = cluster(of=nodes(*THREE, drained=("rabbit@b",)))
    assert (found.status, found.check) == (WARNING, "nodes")
    assert "rabbit@b" in found.text
    assert "revive" in found.fix


def test_a_url_with_one_host_of_several_is_warned_of() -> None:
    _, found = cluster(url="amqp://u:p@a")
    assert (found.status, found.check) == (WARNING, "hosts")
    assert "one host of a cluster of 3 nodes" in found.text


@pytest.mark.parametrize(("count", "warned"), [(2, False), (3, True)])
def test_leaders_that_are_all_on_one_node_are_warned_of(count: int, warned: bool) -> None:
    found = cluster(*(queue(f"q{number}") for number in range(count)), queue("c", "classic"))
    assert [each.check for each in found] == ["nodes", *(["leaders"] if warned else [])]
    if warned:
        assert "all 3 leaders" in found[1].text
        assert "rabbit@a" in found[1].text


@pytest.mark.parametrize("kind", ["quorum", "stream"])
@pytest.mark.parametrize(("members", "text"), [(1, "disk"), (2, "if one of them dies, the queue stops")])
def test_fewer_than_three_members_are_warned_of(kind: str, members: int, text: str) -> None:
    view = queue(kind=kind, members=THREE[:members], online=THREE[:members])
    snapshot = Snapshot({"q": view}, nodes=nodes(*THREE))
    (found,) = examine_copies(snapshot, view)
    assert (found.status, found.check) == (WARNING, "copies")
    assert f"{members} of 3 nodes" in found.text
    assert text in found.text
    assert "add_member" in found.fix or "add_replica" in found.fix


def test_two_members_of_two_nodes_are_all_there_can_be() -> None:
    pair = nodes(*THREE[:2])
    assert copies(queue(members=THREE[:2], online=THREE[:2]), pair) == []
    assert copies(queue(members=THREE[:1], online=THREE[:1]), pair) == [(WARNING, "copies")]


@pytest.mark.parametrize(
    ("members", "online", "status", "text"),
    [
        (3, 2, WARNING, "if one more dies, the queue stops"),
        (3, 1, PROBLEM, "no majority"),
        (5, 4, WARNING, "less redundancy"),
        (5, 3, WARNING, "if one more dies, the queue stops"),
        (5, 2, PROBLEM, "no majority"),
        (2, 1, PROBLEM, "no majority"),
    ],
)
def test_members_that_are_offline_are_named(members: int, online: int, status: Status, text: str) -> None:
    names = [f"rabbit@{number}" for number in range(members)]
    view = queue(members=names, online=names[:online])
    *_, found = examine_copies(Snapshot({"q": view}, nodes=nodes(*names)), view)
    assert (found.status, found.check) == (status, "members")
    assert text in found.text
    assert f"{online} of {members} members are online" in found.text
    assert names[-1] in found.text


def test_a_member_on_a_node_that_is_down_is_offline() -> None:
    """RabbitMQ reports later that a member of a stream is offline."""
    down = nodes(*THREE, down=THREE[1:])
    assert copies(queue(kind="stream"), down) == [(PROBLEM, "members")]


def test_a_classic_queue_of_a_cluster_has_one_copy() -> None:
    assert copies(queue(kind="classic")) == [(WARNING, "copies")]


@pytest.mark.parametrize("fields", [{"durable": False}, {"exclusive": True}, {"auto_delete": True}])
def test_a_classic_queue_that_is_not_meant_to_last_may_have_one(fields: dict[str, Any]) -> None:
    assert copies(queue(kind="classic", **fields)) == []


def test_the_copies_of_a_queue_are_looked_at_with_its_arguments() -> None:
    view = queue("old", "classic")
    findings = examine_queues(Snapshot({"old": view}, nodes=nodes(*THREE)), ["old"], (4, 3, 6))
    assert [(each.status, each.check) for each in findings] == [(WARNING, "copies")]
