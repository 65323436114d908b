"""Check hosts (TCP, TLS, login) and the broker (version, limits, alarms, nodes).

The behaviour of RabbitMQ 4.0.5 and 4.3.6 was observed; that of other versions is taken from RabbitMQ's documentation.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import Snapshot
from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.core.reconnect import is_permanent
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ReliableMQError
from reliable_mq.monitoring.management import ManagementAPI, ManagementError
from reliable_mq.settings import ConnectionSettings, Endpoint
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.tls import TLSOptions, server_hostname
from reliable_mq.topology.arguments import REPLICATED

_BROKER: Final = "broker"
_PLAIN_PORT: Final = 5672
_TLS_PORT: Final = 5671
_SOON: Final = 30  # minimum days until a certificate expires; below, it should be renewed
_LEADERS: Final = 3  # minimum leaders for a warning: fewer may be on one node by chance in a young cluster
# Ports that users mistake for AMQP's.
_PORTS: Final = {
    port: f"{port} is {meaning}. AMQP uses 5672, or 5671 with TLS."
    for port, meaning in {
        1883: "the port of MQTT",
        5552: "the port of the stream protocol",
        15672: "the port of the management API",
        15692: "the port of Prometheus metrics",
        61613: "the port of STOMP",
    }.items()
}
_BY_BROKER: Final = re.compile(r"by the broker: (?P<code>\d+) (?P<text>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A host that accepts this user. `settings` connects to this host only."""

    settings: ConnectionSettings
    server: ServerInfo
    frame_max: int


def examine_host(settings: ConnectionSettings, endpoint: Endpoint) -> tuple[list[Finding], HostEntry | None]:
    """Check one host: TCP, TLS, login. Blocks for up to three connect timeouts."""
    findings: list[Finding] = []
    for finding in _network(settings, endpoint):
        findings.append(finding)
        if finding.status is Status.PROBLEM:
            return findings, None
    alone = replace(settings, endpoints=(endpoint,))
    try:
        with AdminChannel(alone, name="reliable-mq doctor") as channel:
            entry = HostEntry(alone, channel.server, channel.frame_max)
    except (BrokerUnavailable, ConfigurationError) as error:
        return [*findings, _refused(settings, endpoint, error)], None
    text = f"logged in as {_user(settings)}, virtual host {settings.virtual_host!r}"
    return [*findings, Finding(Status.OK, str(endpoint), "login", text)], entry


def _network(settings: ConnectionSettings, endpoint: Endpoint) -> Iterator[Finding]:
    host, timeout = str(endpoint), settings.connect_timeout
    began = time.monotonic()
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), timeout)
    except OSError as error:
        why = "no response in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        fix = "Is the broker running? Is the port correct? Does a firewall block it?"
        if isinstance(error, socket.gaierror):
            fix = "Is the host name correct? Can this machine resolve it?"
        yield Finding(Status.PROBLEM, host, "reachable", f"cannot be reached: {why}", fix)
        return
    with connection:
        elapsed = (time.monotonic() - began) * 1000
        yield Finding(Status.OK, host, "reachable", f"accepts connections ({elapsed:.0f} ms)")
        if settings.tls is not None:
            yield _tls(settings.tls, endpoint, connection)
        elif endpoint.is_loopback:
            yield Finding(
                Status.OK, host, "TLS", "not used, and not needed: the connection does not leave this machine"
            )
        else:
            text = "not used: anyone on the network path can read and change the password and every message"
            fix = "Enable TLS in the broker (listeners.ssl.default = 5671), and use amqps://."
            yield Finding(Status.WARNING, host, "TLS", text, fix)


def _tls(options: TLSOptions, endpoint: Endpoint, connection: socket.socket) -> Finding:
    host = str(endpoint)
    try:
        context = options.build_context()
        with context.wrap_socket(connection, server_hostname=server_hostname(options, endpoint.host)) as wrapped:
            certificate, version = wrapped.getpeercert() or {}, wrapped.version()
    except ssl.SSLCertVerificationError as error:
        text = f"the certificate cannot be verified: {error.verify_message}"
        fix = (
            "Set the certificate authority that signed it (cacertfile=... in the URL), or the host name that it was "
            "issued for (server_name_indication=...)."
        )
        return Finding(Status.PROBLEM, host, "TLS", text, fix)
    except ConfigurationError as error:
        return Finding(Status.PROBLEM, host, "TLS", f"not tried: {error}", "Correct the options of TLS in the URL.")
    except OSError as error:
        text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        fix = "Does the broker use TLS on this port (5671 by default)? Does it accept this client's certificate?"
        if endpoint.port == _PLAIN_PORT:
            fix = "5672 is the port without TLS. Use 5671 (listeners.ssl.default = 5671 in the broker)."
        return Finding(Status.PROBLEM, host, "TLS", f"the handshake failed: {text}", _PORTS.get(endpoint.port, fix))
    return remaining_validity(host, version or "TLS", certificate.get("notAfter"), datetime.now(UTC))


def remaining_validity(host: str, version: str, not_after: object, now: datetime) -> Finding:
    """Check how long a verified certificate is valid.

    `not_after` has the format of Python's ssl, e.g. ``"Jun 26 21:41:46 2031 GMT"``. `version` is the version of TLS.
    """
    if not isinstance(not_after, str):
        return Finding(
            Status.UNCHECKED, host, "TLS", f"{version}; neither the certificate nor its expiry date is verified"
        )
    expires = datetime.fromtimestamp(ssl.cert_time_to_seconds(not_after), UTC)
    days = (expires - now).days
    text = (
        f"{version}, certificate and host name verified; the certificate expires on {expires:%Y-%m-%d}, in {days} days"
    )
    if days < _SOON:
        fix = "Renew it. After it expires, clients that verify it cannot connect."
        return Finding(Status.WARNING, host, "TLS", text, fix)
    return Finding(Status.OK, host, "TLS", text)


def _refused(settings: ConnectionSettings, endpoint: Endpoint, error: ReliableMQError) -> Finding:
    """Explain a failed handshake: credentials, virtual host, limit or another cause."""
    match = _BY_BROKER.search(str(error))
    code, text = (int(match["code"]), match["text"]) if match else (0, str(error))
    host = str(endpoint)
    if code == ReplyCode.ACCESS_REFUSED:
        fix = "Check the user and the password. By default, guest can log in only from the broker's own machine."
        return Finding(Status.PROBLEM, host, "credentials", f"{_user(settings)} cannot log in: {text}", fix)
    if code == ReplyCode.NOT_ALLOWED and is_permanent(error):  # else a limit on the number of connections is reached
        virtual_host = settings.virtual_host
        fix = f"rabbitmqctl set_permissions -p {virtual_host!r} USER CONFIGURE WRITE READ"
        if "not found" in text:
            fix = f"Is its name correct? Create it with: rabbitmqctl add_vhost {virtual_host!r}"
        return Finding(Status.PROBLEM, host, "virtual host", text, fix)
    fix = "See the broker's log. Is this an AMQP port?"
    if settings.tls is None and endpoint.port == _TLS_PORT:
        fix = "5671 is the port for TLS. Use amqps://."
    if "CERTIFICATE_REQUIRED" in text:  # with TLS 1.3, the broker refuses after the handshake of the client
        fix = "Give a client certificate that the broker accepts (certfile=... and keyfile=... in the URL)."
    return Finding(Status.PROBLEM, host, "login", text, _PORTS.get(endpoint.port, fix))


def _user(settings: ConnectionSettings) -> str:
    if settings.mechanism == "EXTERNAL":
        return "the user named in the client's certificate"
    credentials = settings.resolve_credentials()
    return "nobody" if credentials is None else f"user {credentials.username!r}"


_MOST_HEARTBEAT: Final = 60  # seconds; above, a dead connection is detected late
_LEAST_HEARTBEAT: Final = 5  # seconds; below, a busy peer is mistaken for a dead one


def examine_version(server: ServerInfo) -> Iterator[Finding]:
    """Describe the consequences of the version."""
    version = server.version_tuple
    name = f"{server.product or 'an unnamed broker'} {server.version}"
    if server.product != "RabbitMQ" or not version:
        text = f"{name}: not tested; its retries, poison messages and confirms may behave differently"
        yield Finding(Status.UNCHECKED, _BROKER, "version", text, "RabbitMQ 4.0 and newer are tested.")
        return
    yield _support(name, version)
    newest = {fact.check: fact for fact in _FACTS if version >= fact.since}
    for fact in newest.values():
        yield Finding(fact.status, _BROKER, fact.check, fact.text, fact.fix)


def _support(name: str, version: tuple[int, ...]) -> Finding:
    if version >= (4,):
        return Finding(Status.OK, _BROKER, "version", name)
    fix = "Upgrade to RabbitMQ 4."
    if version >= (3, 12):
        text = (
            f"{name}, which is neither tested nor maintained any more: queues are declared without the arguments that "
            "it does not know (such as x-delivery-limit=-1, but its quorum queues have no limit by default)"
        )
        return Finding(Status.WARNING, _BROKER, "version", text, fix)
    return Finding(Status.PROBLEM, _BROKER, "version", f"{name}, which is too old and not supported", fix)


_UNREADABLE: Final = (
    "30 minutes, unless consumer_timeout is set; clients cannot read it. If a delivery is unacked longer, "
)
_KEEP_BELOW: Final = (
    "A handler, and the delays for which a message is held in the process, must take less time. If it is not 30 "
    "minutes, pass it to your consumers (consumer_timeout=...), which warn before it expires."
)


class _Fact(NamedTuple):
    """The behaviour of RabbitMQ since a version."""

    check: str
    since: tuple[int, ...]
    status: Status
    text: str
    fix: str = ""


_FACTS: Final = (
    _Fact(
        "retries",
        (0,),
        Status.OK,
        "basic.nack, basic.reject and lost connections all count against a delivery limit, if one is set",
    ),
    _Fact(
        "retries",
        (4,),
        Status.OK,
        "basic.nack, basic.reject and lost connections all count against a quorum queue's delivery limit, and all "
        "increase x-delivery-count; a retry policy keeps its own count",
    ),
    _Fact(
        "retries",
        (4, 3),
        Status.OK,
        "basic.reject and lost connections count against a quorum queue's delivery limit, but basic.nack does not: a "
        "consumer that nacks a poison message receives it forever; a retry policy keeps its own count",
    ),
    _Fact(
        "poison messages",
        (0,),
        Status.WARNING,
        "quorum queues have no delivery limit by default: a message that no consumer can process returns forever",
        "Consume with a retry policy, which dead-letters a message after the last attempt.",
    ),
    _Fact(
        "poison messages",
        (4,),
        Status.OK,
        "quorum queues have a delivery limit of 20 by default; a message that exceeds it is dropped if there is no "
        "dead-letter exchange (see the queues below); queues that reliable_mq declares have no limit (-1)",
    ),
    _Fact(
        "consumer timeout",
        (0,),
        Status.NOTE,
        _UNREADABLE + "the channel is closed with 406, and all its unacked deliveries are requeued",
        _KEEP_BELOW,
    ),
    _Fact(
        "consumer timeout",
        (4, 3),
        Status.NOTE,
        _UNREADABLE
        + "the consumer is cancelled, and gets no messages until it settles the delivery (quorum queues only)",
        _KEEP_BELOW,
    ),
    _Fact(
        "new queues",
        (0,),
        Status.OK,
        "if the broker is killed within a second after a quorum queue was declared, the queue and its confirmed "
        "messages can be lost; reliable_mq allows for this (new_queue_grace) if the same process declared the queue, "
        "but cannot know of a queue that another process declared less than a second ago",
    ),
)


def examine_limits(settings: ConnectionSettings, frame_max: int) -> Iterator[Finding]:
    """Check the negotiated heartbeat and frame size."""
    heartbeat = settings.heartbeat
    status, fix = Status.WARNING, "Use 10 to 20 s (heartbeat=... in the URL)."
    if heartbeat < _LEAST_HEARTBEAT:
        text = "a busy peer can be mistaken for a dead one"
    elif heartbeat > _MOST_HEARTBEAT:
        text = f"a dead connection may be detected only after {settings.silence_noticed_within} s"
    else:
        status, fix = Status.OK, ""
        text = f"a dead connection is detected within {settings.silence_noticed_within} s"
    yield Finding(status, _BROKER, "heartbeat", f"{heartbeat} s: {text}", fix)
    text = f"{frame_max:,} bytes: the properties and headers of a message must fit into one frame"
    yield Finding(Status.OK, _BROKER, "frame size", text)


def examine_alarms(api: ManagementAPI) -> Finding:
    """Check whether a memory or disk alarm blocks publishers."""
    try:
        api.get("health", "checks", "alarms")
    except ManagementError as error:
        if error.status != 503:
            return Finding(Status.UNCHECKED, _BROKER, "alarms", f"the management API did not report them: {error}")
        fix = "Free memory or disk space on the node, or consume the queued messages."
        text = f"an alarm is in effect, and publishers are blocked: {error}"
        return Finding(Status.PROBLEM, _BROKER, "alarms", text, fix)
    return Finding(Status.OK, _BROKER, "alarms", "none")


def examine_cluster(settings: ConnectionSettings, snapshot: Snapshot) -> Iterator[Finding]:
    """Check nodes, hosts and leaders of a cluster. A single node has no findings."""
    if snapshot.nodes is None:
        text = "could not be checked: whether this is a cluster, and whether its nodes are running"
        yield Finding(Status.UNCHECKED, _BROKER, "nodes", text, "Give the user the tag 'monitoring'.")
        return
    if len(snapshot.nodes) < 2:
        return
    yield from _nodes(snapshot.nodes)
    if len(settings.endpoints) == 1:
        text = (
            f"the URL names only one host of a cluster of {len(snapshot.nodes)} nodes: while it is down, "
            "clients cannot connect, although the other nodes are running"
        )
        fix = "Name all of them (amqp://user@one,two,three/), unless the host is a load balancer."
        yield Finding(Status.WARNING, _BROKER, "hosts", text, fix)
    leaders = Counter(queue.node for queue in snapshot.queues.values() if queue.type in REPLICATED and queue.node)
    if len(leaders) == 1 and leaders.total() >= _LEADERS:
        ((node, count),) = leaders.items()
        text = f"all {count} leaders of quorum queues and streams are on {node}: it does the work of the whole cluster"
        fix = "Run rabbitmq-queues rebalance all. For new queues, set queue_leader_locator = balanced in rabbitmq.conf."
        yield Finding(Status.WARNING, _BROKER, "leaders", text, fix)


def _nodes(nodes: tuple[Mapping[str, Any], ...]) -> Iterator[Finding]:
    down = sorted(str(node["name"]) for node in nodes if not node.get("running"))
    drained = sorted(str(node["name"]) for node in nodes if node.get("being_drained"))
    if not down and not drained:
        yield Finding(Status.OK, _BROKER, "nodes", f"all {len(nodes)} are running")
    if down:
        running = len(nodes) - len(down)
        status, consequence = Status.WARNING, "the others continue"
        if 2 * running <= len(nodes):
            status, consequence = Status.PROBLEM, "no majority: quorum queues and streams confirm nothing"
        text = f"{running} of {len(nodes)} are running, {', '.join(down)} not: {consequence}"
        fix = "Start it again. If it is gone for good, remove it: rabbitmqctl forget_cluster_node NODE."
        yield Finding(status, _BROKER, "nodes", text, fix)
    if drained:
        text = f"in maintenance: {', '.join(drained)}; a node in maintenance accepts no connections and leads no queues"
        yield Finding(Status.WARNING, _BROKER, "nodes", text, "After the maintenance, run rabbitmq-upgrade revive.")
