"""A RabbitMQ cluster in containers, with faults of nodes, disks and links.

Example::

    with RabbitMQCluster() as cluster:
        publisher = Publisher(cluster.url)
        cluster.leader_of("orders").kill()
        cluster.heal()

Invariants:
- Every node keeps its name, address and host ports for the life of the cluster, even if it loses its disk.
- A partition drops packets between nodes, at both ends of a link, and only in the network namespaces of the containers.
  Clients on the host reach every running node.
- A request to the cluster as a whole goes to a running node that is not cut off.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import quote

from docker.errors import DockerException
from docker.types import IPAMConfig, IPAMPool

from reliable_mq.errors import ConfigurationError, LabError, UsageError
from reliable_mq.testing.containers import OWNER_LABEL, File, connect_to_docker, owner
from reliable_mq.testing.rabbitmq import RabbitMQ
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from docker.models.networks import Network

    from reliable_mq.testing.management import Management

T = TypeVar("T")

_LARGEST: Final = 9
_TIMEOUT: Final = 180.0
_DATA: Final = "/var/lib/rabbitmq"
_COOKIE: Final = f"{_DATA}/.erlang.cookie"
_NETWORK_ATTEMPTS: Final = 10
_EMPTY_DISK: Final = f"find {_DATA} -mindepth 1 ! -name .erlang.cookie -delete"
# A consistent query goes through the leader's log, which proves that a majority still follows the leader.
_LEADER: Final = """
{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(base64:decode("{vhost}"), queue, base64:decode("{queue}"))),
Running = [{running}],
case amqqueue:get_type(Q) of
    rabbit_quorum_queue ->
        {{Name, _}} = amqqueue:get_pid(Q),
        Ask = fun (Member, <<>>) ->
                      case ra:consistent_query({{Name, Member}}, {{rabbit_fifo, query_messages_total, []}}, 1000) of
                          {{ok, _, {{_, Leader}}}} -> atom_to_binary(Leader);
                          _ -> <<>>
                      end;
                  (_, Found) -> Found
              end,
        lists:foldl(Ask, <<>>, Running);
    _ ->
        Holder = node(amqqueue:get_pid(Q)),
        case lists:member(Holder, Running) of true -> atom_to_binary(Holder); false -> <<>> end
end
"""
_TRANSFER: Final = """
{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(base64:decode("{vhost}"), queue, base64:decode("{queue}"))),
case amqqueue:get_type(Q) of
    rabbit_quorum_queue ->
        {{Name, _}} = amqqueue:get_pid(Q),
        ra:transfer_leadership({{Name, '{leader}'}}, {{Name, '{node}'}});
    rabbit_stream_queue ->
        rabbit_stream_coordinator:restart_stream(Q, #{{preferred_leader_node => '{node}'}});
    Type ->
        Type
end
"""
_MEMBERS_HERE: Final = "lists:sort(rabbit_nodes:list_running())"
# Quorum queues that lose their majority if this node stops.
_CRITICAL: Final = "[amqqueue:get_name(Q) || Q <- rabbit_quorum_queue:list_with_minimum_quorum()]"
# The queues without a replica yet. A queue that has one already is not changed. The broker says that it has added a
# replica to a stream while it still deletes the lost one, so the members of the stream decide.
_ADD_REPLICAS: Final = """
[Refused || {{_, {{error, _, _}}}} = Refused <- rabbit_quorum_queue:grow('{node}', <<".*">>, <<".*">>, all)] ++
[{{Name, rabbit_stream_queue:add_replica(VHost, Queue, '{node}')}}
 || Q <- rabbit_amqqueue:list(), amqqueue:get_type(Q) =:= rabbit_stream_queue,
    not lists:member('{node}', maps:get(nodes, amqqueue:get_type_state(Q))),
    {{resource, VHost, queue, Queue}} = Name <- [amqqueue:get_name(Q)]]
"""
# The leader of the coordinator adds a node at its next tick, which is done here at once. There is no coordinator before
# the first stream.
_COMPLETE_COORDINATOR: Final = """
Name = rabbit_stream_coordinator,
Nodes = rabbit_nodes:list_members(),
case [Node || Node <- Nodes, is_pid(rpc:call(Node, erlang, whereis, [Name]))] of
    [] -> <<"complete">>;
    [Node | _] ->
        case ra:members({Name, Node}, 1000) of
            {ok, Members, _} when length(Members) =:= length(Nodes) -> <<"complete">>;
            {ok, Members, Leader} ->
                Tick = {Name, tick, [erlang:system_time(millisecond)]},
                {ok, {_, Effects}, _} = ra:leader_query(Leader, Tick),
                [ra:cast_aux_command(Leader, Command) || {aux, Command} <- Effects],
                Members;
            Other -> Other
        end
end
"""


class ClusterNode(RabbitMQ):
    """One node of a `RabbitMQCluster`, with every fault of `RabbitMQ`.

    Attributes:
        name: The node's Erlang name, such as ``"rabbit@rabbit-1"``.
    """

    def __init__(self, image: str | None, hostname: str, **options: Any) -> None:
        super().__init__(image, **options)
        self.name = f"rabbit@{hostname}"
        self.hostname = hostname
        self.network_address = ""
        self.cut_off = False
        self.disk_lost = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self.host}:{self.port}>"

    def launch(self) -> Self:
        """Raise an error, because the cluster launches its nodes.

        Raises:
            UsageError: Always.
        """
        raise UsageError("launch the cluster, which launches its nodes")

    def create_in(self, network: Network, addresses: Mapping[str, str], cookie: bytes) -> None:
        """Create and start the container, without waiting for the broker."""
        self.network_address = addresses[self.hostname]
        self.cut_off = self.disk_lost = False
        api = network.client.api
        self.create(
            self.image,
            files={**self._files, _COOKIE: File(cookie, user="rabbitmq", mode=0o400)},
            environment=self._environment,
            hostname=self.hostname,
            extra_hosts=dict(addresses),
            volumes=[_DATA],  # `lose_disk` reaches nothing else, and not every image declares it
            network=network.name,
            networking_config={network.name: api.create_endpoint_config(ipv4_address=self.network_address)},
        )

    def unreachable(self, rules: Iterable[tuple[str, str]]) -> None:
        """Drop packets from (``"INPUT"``) and to (``"OUTPUT"``) other addresses."""
        self._unreachable = set(rules)
        self._set_packet_filter()

    def refuse(self, peers: Iterable[str]) -> None:
        """Refuse TCP connections to other addresses at once.

        A machine does the same if no server listens.
        """
        self._refused = set(peers)
        self._set_packet_filter()


class RabbitMQCluster:
    """A cluster of nodes. A context manager that launches and removes them.

    Not thread-safe. Each method that injects a fault blocks until the fault is in effect. Each node needs about 150 MB
    of memory, so share one cluster among the tests of a session.

    Args:
        nodes: The number of nodes, from 1 to 9. A majority survives the loss of one node only if there are at least 3.
        image: The docker image, as for `RabbitMQ`.
        conf: More lines for the ``rabbitmq.conf`` of every node.
        files: More files in every node, as for `RabbitMQ`.
        environment: More environment variables for every node, as for `RabbitMQ`.

    Attributes:
        nodes: The nodes. Each is a `RabbitMQ` that can be killed, stopped, started, paused and starved alone.

    Raises:
        ConfigurationError: If `nodes` is out of range, or the system is not Linux.
    """

    def __init__(
        self,
        nodes: int = 3,
        image: str | None = None,
        *,
        conf: str = "",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not 1 <= nodes <= _LARGEST:
            raise ConfigurationError(f"a cluster has 1 to {_LARGEST} nodes, not {nodes!r}")
        names = [f"rabbit-{number}" for number in range(1, nodes + 1)]
        lines = ["cluster_formation.peer_discovery_backend = classic_config"]
        lines += [f"cluster_formation.classic_config.nodes.{n} = rabbit@{name}" for n, name in enumerate(names, 1)]
        lines += [f"cluster_formation.target_cluster_size_hint = {nodes}", conf, ""]
        self.nodes = tuple(
            ClusterNode(image, name, conf="\n".join(lines), files=files, environment=environment) for name in names
        )
        self._links: set[tuple[str, str]] = set()
        self._drained: set[ClusterNode] = set()
        self._network: Network | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(node.name for node in self.nodes)}>"

    # life

    def launch(self) -> Self:
        """Create the network and the nodes. Blocks until the nodes form a cluster.

        Raises:
            LabError: If docker or the image is not available.
            TimeoutError: If there is no cluster within 180 s.
            UsageError: If the cluster was launched already.
        """
        if self._network is not None:
            raise UsageError("the cluster was launched already: remove() it first")
        self._links.clear()
        self._drained.clear()
        self._network, addresses = _create_network([node.hostname for node in self.nodes])
        network, cookie = self._network, secrets.token_hex(16).encode()
        try:
            self._each(self.nodes, lambda node: node.create_in(network, addresses, cookie))
            self.wait_ready()
        except BaseException:
            self.remove()
            raise
        return self

    def remove(self) -> None:
        """Kill the nodes and remove them with their data. Repeated calls are safe."""
        self._each(self.nodes, lambda node: node.remove())
        if self._network is not None:
            with contextlib.suppress(DockerException):
                self._network.remove()
            self._network = None

    def __enter__(self) -> Self:
        return self.launch()

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    # where it is

    @property
    def url(self) -> str:
        """The AMQP URL of the default virtual host with all hosts, for user guest."""
        return self.url_of("/")

    def url_of(self, virtual_host: str) -> str:
        """Return the AMQP URL of a virtual host with all hosts, for user guest."""
        hosts = ",".join(f"{node.host}:{node.port}" for node in self.nodes)
        return f"amqp://guest:guest@{hosts}/{quote(virtual_host, safe='')}"

    def reachable_url_of(self, virtual_host: str) -> str:
        """Return the AMQP URL of a virtual host at one node of `running`."""
        return self.running[0].url_of(virtual_host)

    @property
    def running(self) -> tuple[ClusterNode, ...]:
        """The nodes that are neither dead, paused nor cut off by a partition.

        Drained nodes come last.

        Raises:
            UsageError: If there is no such node.
        """
        reachable = [node for node in self.nodes if not node.cut_off and node.status() == "running"]
        found = tuple(sorted(reachable, key=self._drained.__contains__))
        if not found:
            raise UsageError("no node of the cluster runs and is reachable: heal() it first")
        return found

    @property
    def management(self) -> Management:
        """The management API of the first running node."""
        return self.running[0].management

    @property
    def version(self) -> str:
        """The RabbitMQ version of the first running node."""
        return self.running[0].version

    def evaluate(self, expression: str) -> str:
        """Evaluate an expression on the first running node, as `RabbitMQ.evaluate` does."""
        return self.running[0].evaluate(expression)

    def rabbitmqctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on the first running node, as `RabbitMQ.rabbitmqctl` does."""
        return self.running[0].rabbitmqctl(*arguments)

    def leader_of(self, queue: str, virtual_host: str = "/", *, timeout: float = 60.0) -> ClusterNode:
        """Return the node that leads a queue or stream.

        The leader of a classic queue is the node with its only copy. The leader of a quorum queue is the node that a
        majority follows. Blocks until there is a leader.

        Args:
            queue: The name of the queue or stream.
            virtual_host: The name of its virtual host.
            timeout: The maximum wait, in seconds.

        Raises:
            LabError: If there is no such queue.
            TimeoutError: If no leader is elected within `timeout`.
        """
        names = {node.name: node for node in self.nodes}
        asked = _base64(vhost=virtual_host, queue=queue)

        def leader() -> str:
            running = self.running
            return running[0].evaluate(_LEADER.format(running=", ".join(f"'{n.name}'" for n in running), **asked))

        return names[wait_until(leader, timeout=timeout, what=f"a leader of {queue!r}", interval=0.2)]

    # faults

    def start(self, *nodes: ClusterNode) -> None:
        """Start dead nodes in parallel. Blocks until each node answers.

        A node that was the last of a majority to die may wait for another node, so start these together. A node that
        lost its disk joins the cluster again, and gets a replica of every quorum queue and stream. It also joins the
        stream coordinator, without which no stream gets another leader. The broker alone takes up to a minute for that.

        Args:
            nodes: The nodes to start, by default all dead nodes.

        Raises:
            TimeoutError: If a node does not answer or join, or a queue gets no replica, within 180 s.
        """
        chosen = nodes or self.nodes
        dead = [node for node in chosen if node.status() == "exited"]
        lost = [node for node in chosen if node.disk_lost]
        # A majority forgets a node, and the dead nodes may be part of this majority.
        self._each([node for node in dead if node not in lost], lambda node: node.start(timeout=_TIMEOUT))
        empty = [node for node in dead if node in lost]
        self._forget(empty)
        self._each(empty, lambda node: node.start(timeout=_TIMEOUT))
        self._drained.difference_update(dead)
        if lost:
            self._wait_for_members()
            what = "a stream coordinator on every node:"
            _evaluate_until("complete", lost[0], _COMPLETE_COORDINATOR, what, _TIMEOUT)
        for node in lost:
            expression, what = _ADD_REPLICAS.format(node=node.name), f"{node.name} has a replica of"
            _evaluate_until("[]", node, expression, what, _TIMEOUT)
            node.disk_lost = False

    def partition(self, *nodes: ClusterNode, one_way: bool = False) -> None:
        """Drop the packets between some nodes and the others, until `heal`.

        Clients on the host reach both groups. Partitions add up: after ``partition(a)`` and ``partition(b)`` in a
        cluster of three nodes, each node is alone. A node that restarts meanwhile stays cut off.

        Args:
            nodes: The smaller group. Requests to the cluster as a whole go to the other group.
            one_way: True to drop only packets to `nodes`, which then receive nothing but can still send to the others.

        Raises:
            ConfigurationError: If `nodes` is empty or has all nodes.
            LabError: If docker's host has no ``iptables``.
        """
        others = [node for node in self.nodes if node not in nodes]
        if not nodes or not others:
            raise ConfigurationError("name the nodes to cut off: at least one, and not all")
        for node in nodes:
            node.cut_off = True
            for other in others:
                self._links.add((other.network_address, node.network_address))
                if not one_way:
                    self._links.add((node.network_address, other.network_address))
        self._filter_links()

    def lose_disk(self, node: ClusterNode) -> None:
        """Kill a node and delete all its data. It stays down until `start` or `heal`.

        Raises:
            UsageError: If no other node is running, or if less than a majority of the nodes would keep their disks.
        """
        if not [other for other in self.running if other is not node]:
            raise UsageError("the last node that runs cannot lose its disk: there would be no cluster to join again")
        if 2 * sum(other.disk_lost or other is node for other in self.nodes) >= len(self.nodes):
            raise UsageError("a majority must keep their disks, or no node can join again: heal() first, or add nodes")
        if node.status() == "paused":
            node.unpause()
        if node.status() == "running":
            node.kill()
        container = node.container
        container.client.containers.run(
            container.image.id,
            ["-c", _EMPTY_DISK],
            entrypoint="sh",
            user="0",
            volumes_from=[container.id],
            labels={OWNER_LABEL: owner()},
            network_mode="none",
            remove=True,
        )
        node.disk_lost = True

    def transfer_leader(self, queue: str, node: ClusterNode, virtual_host: str = "/", *, timeout: float = 60.0) -> None:
        """Move the leader of a quorum queue or stream to a node. Blocks until it leads.

        Args:
            queue: The name of the queue or stream.
            node: A node that has a replica.
            virtual_host: The name of its virtual host.
            timeout: The maximum wait, in seconds.

        Raises:
            LabError: If there is no such queue.
            TimeoutError: If another node still leads after `timeout`.
            UsageError: If the queue is a classic queue, which has only one copy.
        """

        def moved() -> bool:
            leader = self.leader_of(queue, virtual_host, timeout=timeout)
            if leader is node:
                return True
            names = _base64(vhost=virtual_host, queue=queue)
            if self.evaluate(_TRANSFER.format(leader=leader.name, node=node.name, **names)) == "rabbit_classic_queue":
                raise UsageError(f"{queue!r} is a classic queue: it has one copy, and no leader to move")
            return False

        wait_until(moved, timeout=timeout, what=f"{node.name} leads {queue!r}", interval=0.2)

    def drain(self, node: ClusterNode) -> None:
        """Put a node into maintenance mode, as before an upgrade.

        The node closes its client connections, accepts no new ones, and moves the leaders of its queues to other nodes.
        """
        self._drained.add(node)
        node.evaluate("rabbit_maintenance:drain()")

    def revive(self, node: ClusterNode) -> None:
        """End the maintenance mode of a node. Blocks until it accepts connections."""
        node.evaluate("rabbit_maintenance:revive()")
        self._drained.discard(node)
        node.wait_ready()

    def heal(self) -> None:
        """Undo every fault. Blocks until all nodes form one cluster again.

        Raises:
            TimeoutError: If they do not within 180 s.
        """
        self._links.clear()
        for node in self.nodes:
            node.cut_off = False
        self._filter_links()
        self._each(self.nodes, lambda node: node.lose_packets(0))
        self._each([node for node in self.nodes if node.status() == "paused"], lambda node: node.unpause())
        self.start()
        for node in tuple(self._drained):
            self.revive(node)
        self._each(self.nodes, lambda node: node.heal())
        self.wait_ready()

    # waiting

    def wait_ready(self, timeout: float = _TIMEOUT) -> None:
        """Block until the cluster is whole.

        In a whole cluster, every node answers and sees all others. If it has at least 3 nodes, any one of them can stop
        without a quorum queue losing its majority. Call this between two steps of a rolling restart.

        Args:
            timeout: The maximum duration of each wait, in seconds.

        Raises:
            TimeoutError: If a wait exceeds `timeout`. The message names the unmet condition, with the nodes that each
                node sees if they form no cluster.
        """
        self._each(self.nodes, lambda node: node.wait_ready(timeout))
        self._wait_for_members(timeout)
        if len(self.nodes) > 2:
            what = "every quorum queue has a majority without"
            self._each(self.nodes, lambda node: _evaluate_until("[]", node, _CRITICAL, f"{what} {node.name}:", timeout))

    def _forget(self, nodes: Sequence[ClusterNode]) -> None:
        """Remove nodes from the cluster.

        For each of its queues, the broker connects to the node, which takes three seconds if nothing has its address.
        """
        members = self.evaluate("rabbit_nodes:list_members()") if nodes else ""  # an earlier start may have failed
        known = [node for node in nodes if f"'{node.name}'" in members]
        running = self.running if known else ()
        try:
            with contextlib.suppress(LabError):  # it takes longer without iptables
                self._each(running, lambda node: node.refuse([lost.network_address for lost in known]))
            for node in known:
                self.rabbitmqctl("forget_cluster_node", node.name)
        finally:
            self._each(running, lambda node: node.refuse([]))

    def _wait_for_members(self, timeout: float = _TIMEOUT) -> None:
        expected = "[" + ",".join(f"'{node.name}'" for node in self.nodes) + "]"
        seen: dict[str, str] = {}

        def complete() -> bool:
            seen.update(self._each(self.nodes, lambda node: (node.name, _evaluated(node, _MEMBERS_HERE))))
            return set(seen.values()) == {expected}

        wait_until(complete, timeout=timeout, what=lambda: f"one cluster: {seen}", interval=0.2)

    def _filter_links(self) -> None:
        """Drop packets at both ends of each link, so that a restart opens no gap."""

        def filtered(node: ClusterNode) -> None:
            here = node.network_address
            outgoing = {("OUTPUT", to) for sender, to in self._links if sender == here}
            node.unreachable(outgoing | {("INPUT", sender) for sender, to in self._links if to == here})

        self._each(self.nodes, filtered)

    def _each(self, nodes: Iterable[ClusterNode], call: Callable[[ClusterNode], T]) -> list[T]:
        """Call a function with each node in parallel. Return the results in order."""
        with ThreadPoolExecutor(_LARGEST, thread_name_prefix="reliable-mq-lab") as pool:
            return list(pool.map(call, nodes))


def _evaluate_until(value: str, node: ClusterNode, expression: str, what: str, timeout: float) -> None:
    """Block until an expression has a value. A timeout shows the last value."""
    found = ""

    def complete() -> bool:
        nonlocal found
        found = _evaluated(node, expression)
        return found == value

    wait_until(complete, timeout=timeout, what=lambda: f"{what} {found}", interval=0.2)


def _evaluated(node: ClusterNode, expression: str) -> str:
    """Return the value of an expression, or the error of a node that is not ready."""
    try:
        return node.evaluate(expression)
    except LabError as error:
        return str(error)


def _create_network(hostnames: list[str]) -> tuple[Network, dict[str, str]]:
    """Create a network for one cluster. Return it with an address for each host name.

    Docker assigns a chosen address only in a chosen subnet, so a first network is created to find a free subnet.
    """
    client = connect_to_docker().client
    labels, error = {OWNER_LABEL: owner()}, None
    for _ in range(_NETWORK_ATTEMPTS):
        name = f"reliable-mq-{secrets.token_hex(4)}"
        try:
            first = client.networks.create(name, driver="bridge", labels=labels)
            first.reload()
            pool = first.attrs["IPAM"]["Config"][0]
            first.remove()
            subnet = IPv4Network(pool["Subnet"])
            ipam = IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet), gateway=str(subnet[1]))])
            network = client.networks.create(name, driver="bridge", labels=labels, ipam=ipam)
        except DockerException as failure:  # another process got the same subnet meanwhile
            error = failure
        else:
            return network, {hostname: str(subnet[10 + number]) for number, hostname in enumerate(hostnames)}
    raise LabError(f"docker cannot create a network: {error}") from error


def _base64(**texts: str) -> dict[str, str]:
    return {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
