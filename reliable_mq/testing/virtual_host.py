"""A virtual host for one test, observed without the tested code.

All observations use plain pika, the management API and the processes of the queues. They never use publishers or
consumers of this package.
"""

from __future__ import annotations

import base64
import re
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pika

from reliable_mq.codec.methods import ReplyCode
from reliable_mq.testing.management import ManagementAPIError
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliable_mq.testing.cluster import RabbitMQCluster
    from reliable_mq.testing.rabbitmq import RabbitMQ

    BrokerOrCluster: TypeAlias = RabbitMQ | RabbitMQCluster

# For quorum queues, the counts of rabbitmqctl and the management API are seconds old, so this expression queries the
# queues. A query may miss changes that are not on the disk, such as the acks of a client that has just disconnected.
# Therefore, a command that changes nothing goes first: it completes only after all earlier changes.
_LIVE_COUNTS: Final = """
[begin
    {{resource, _, queue, Name}} = amqqueue:get_name(Q),
    Count = case amqqueue:get_type(Q) of
        rabbit_quorum_queue ->
            Leader = amqqueue:get_pid(Q),
            {{ok, _, _}} = ra:process_command(Leader, rabbit_fifo:make_garbage_collection(), 30000),
            Ask = fun(Query) -> {{ok, Reply, _}} = ra:consistent_query(Leader, Query, 30000), Reply end,
            {{OnTheirWay, _}} = Ask({{rabbit_fifo, query_stat_dlx, []}}),
            Ask({{rabbit_fifo, query_messages_total, []}}) + OnTheirWay;
        _ ->
            [{{messages, Messages}}] = rabbit_amqqueue:info(Q, [messages]),
            Messages
    end,
    {{base64:encode(Name), Count}}
end || Q <- rabbit_amqqueue:list(base64:decode("{vhost}"))]
"""
# An expression may be evaluated twice, so a first one finds the connections, and a second one closes them. That one
# does the same as `rabbitmqctl close_all_connections`. The second field of a connection is its node and its name.
_OPEN_CONNECTIONS: Final = """
[element(2, element(2, Open)) || Open <- rabbit_connection_tracking:list(base64:decode("{vhost}"))]
"""
_CLOSE_CONNECTIONS: Final = """
begin
    Named = fun(Open) -> lists:member(element(2, element(2, Open)), {names}) end,
    Open = lists:filter(Named, rabbit_connection_tracking:list(base64:decode("{vhost}"))),
    rabbit_connection_tracking_handler:close_connections(Open, base64:decode_to_string("{reason}"), 0)
end
"""
_HEARTBEAT: Final = 15  # seconds; a broker that is silent for about 40 s ends the connection
_LEADER_ANSWERS: Final = 0.25  # seconds, after which RabbitMQ reports no messages and no consumers of a quorum queue
_COUNTED: Final = re.compile(r'\{<<"([^"]*)">>,(\d+)\}')


class VirtualHost:
    """A virtual host on a broker or a cluster. It does not exist before `create`.

    Args:
        broker: A `RabbitMQ` or a `RabbitMQCluster`.
        name: The name of the virtual host.

    Attributes:
        broker: The broker or cluster.
        name: The name of the virtual host.
        url: The AMQP URL of the virtual host for user guest, who has all permissions. The URL of a cluster has all
            hosts.
    """

    def __init__(self, broker: BrokerOrCluster, name: str) -> None:
        self.broker = broker
        self.name = name
        self.url = broker.url_of(name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} on {self.broker}>"

    def create(self) -> None:
        """Create the virtual host, with all permissions for user guest."""
        api = self.broker.management
        api.call("PUT", "vhosts", self.name, body={})
        api.call("PUT", "permissions", self.name, "guest", body={"configure": ".*", "write": ".*", "read": ".*"})

    def add_user(self, name: str) -> None:
        """Add a user with all permissions in the virtual host, and the name as password.

        The user belongs to the broker and is not deleted with the virtual host.
        """
        api = self.broker.management
        api.call("PUT", "users", name, body={"password": name, "tags": ""})
        api.call("PUT", "permissions", self.name, name, body={"configure": ".*", "write": ".*", "read": ".*"})

    def delete(self) -> None:
        """Delete the virtual host with its content, and close every connection to it."""
        self.broker.management.call("DELETE", "vhosts", self.name)

    def connect(self, **parameters: Any) -> Any:
        """Return a ``pika.BlockingConnection``, in a cluster to a running node.

        The connection is opened within 30 s. It has no heartbeat, because a test that blocks in another call would lose
        it. Therefore, a call waits without limit for a broker that is silent, for example paused, unless `parameters`
        has ``heartbeat``. They override these attributes of pika's ``URLParameters``.
        """
        settings = pika.URLParameters(self.broker.reachable_url_of(self.name))
        settings.heartbeat = 0
        settings.socket_timeout = settings.stack_timeout = settings.blocked_connection_timeout = 30
        for name, value in parameters.items():
            setattr(settings, name, value)
        return pika.BlockingConnection(settings)

    def queue(self, name: str) -> dict[str, Any] | None:
        """Return a queue as the management API shows it, or None if it does not exist."""
        try:
            answer: dict[str, Any] = self.broker.management.call("GET", "queues", self.name, name)
        except ManagementAPIError as error:
            if error.status != 404:
                raise
            return None
        return answer

    def delete_queue(self, name: str) -> None:
        """Delete a queue, even if it has messages or consumers."""
        self.broker.management.call("DELETE", "queues", self.name, name)

    def close_connections(self, reason: str = "closed by the test") -> int:
        """Close every connection to the virtual host from the broker's side.

        Return the number of connections that the broker knew.
        """
        names = self.broker.evaluate(_OPEN_CONNECTIONS.format(vhost=_base64(self.name)))
        count = names.count("<<")
        if count:
            arguments = {"vhost": _base64(self.name), "reason": _base64(reason), "names": names}
            self.broker.evaluate(_CLOSE_CONNECTIONS.format(**arguments))
        return count

    def peek(self, queue: str, count: int = 1000) -> list[dict[str, Any]]:
        """Return messages at the head of a queue, as the broker's JSON.

        Use this for messages that pika cannot decode. The messages are requeued, which marks them as redelivered. Each
        has ``payload``, ``properties``, ``routing_key`` and ``redelivered``.
        """
        wanted = {"count": count, "ackmode": "ack_requeue_true", "encoding": "auto"}
        messages: list[dict[str, Any]] = self.broker.management.call(
            "POST", "queues", self.name, queue, "get", body=wanted
        )
        return messages

    def take_all(self, queue: str, *, timeout: float = 60.0) -> list[str]:
        """Consume and ack all ready messages of a queue. Return their ids in order.

        A queue that does not exist is empty. The id of a message without one is ``"<no message id>"``. Blocks until no
        message is ready, but at most about `timeout` seconds.

        Raises:
            pika.exceptions.AMQPHeartbeatTimeout: If the broker is silent for about 40 s.
        """
        taken: list[str] = []
        if self.queue(queue) is None:
            return taken
        deadline = time.monotonic() + timeout
        with self.connect(heartbeat=_HEARTBEAT) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1000)
            last_tag = acked = 0

            def on_message(_channel: Any, method: Any, properties: Any, _body: bytes) -> None:
                nonlocal last_tag
                last_tag = method.delivery_tag
                taken.append(properties.message_id or "<no message id>")

            channel.basic_consume(queue, on_message)
            while time.monotonic() < deadline:
                connection.process_data_events(time_limit=0.1)
                if last_tag > acked:
                    channel.basic_ack(last_tag, multiple=True)
                    acked = last_tag
                    continue
                count = channel.queue_declare(queue, passive=True).method
                if count.consumer_count and not count.message_count:  # without this consumer, nothing is known
                    # The reply came after every delivery that the broker had sent before it.
                    connection.process_data_events(time_limit=0)
                    if last_tag == acked:
                        break
        return taken

    def bodies(self, queue: str) -> list[tuple[str, bytes]]:
        """Take all ready messages of a queue. Return their ids and bodies in order.

        Raises:
            pika.exceptions.AMQPHeartbeatTimeout: If the broker is silent for about 40 s.
        """
        found: list[tuple[str, bytes]] = []
        with self.connect(heartbeat=_HEARTBEAT) as connection:
            channel = connection.channel()
            while True:
                method, properties, body = channel.basic_get(queue, auto_ack=True)
                if method is None:
                    return found
                found.append((properties.message_id, body))

    def live_counts(self, queues: Iterable[str] = ()) -> dict[str, int]:
        """Return the current number of messages of each queue.

        The number includes ready and unacked messages, and those on their way to a dead-letter queue. Use it only to
        check for 0, because a message on its way may count twice.

        Args:
            queues: The names that must be in the result, with 0 for a queue that does not exist.
        """
        answer = self.broker.evaluate(_LIVE_COUNTS.format(vhost=_base64(self.name)))
        found = {base64.b64decode(name).decode(): int(count) for name, count in _COUNTED.findall(answer)}
        return {**dict.fromkeys(queues, 0), **found}

    def wait_for_consumers(self, queue: str, count: int, *, timeout: float = 30.0) -> None:
        """Block until a queue exists, and has exactly `count` consumers.

        Raises:
            pika.exceptions.AMQPHeartbeatTimeout: If the broker is silent for about 40 s.
            TimeoutError: If it does not within `timeout` seconds.
        """
        self._wait_for("consumer_count", queue, count, timeout)

    def wait_for_messages(self, queue: str, count: int, *, timeout: float = 30.0) -> None:
        """Block until a queue exists, and has exactly `count` ready messages.

        Unacked ones do not count.

        Raises:
            pika.exceptions.AMQPHeartbeatTimeout: If the broker is silent for about 40 s.
            TimeoutError: If it does not within `timeout` seconds.
        """
        self._wait_for("message_count", queue, count, timeout)

    def _wait_for(self, what: str, queue: str, count: int, timeout: float) -> None:
        state = ""
        with self.connect(heartbeat=_HEARTBEAT) as connection:
            channel = connection.channel()

            def reached() -> bool:
                nonlocal channel, state
                began = time.monotonic()
                try:
                    answer = channel.queue_declare(queue, passive=True).method
                except pika.exceptions.ChannelClosedByBroker as closed:
                    if closed.reply_code != ReplyCode.NOT_FOUND:
                        raise
                    channel, state = connection.channel(), "which does not exist"
                    return False
                empty = not (answer.message_count or answer.consumer_count)
                if empty and time.monotonic() - began >= _LEADER_ANSWERS:
                    state = "whose leader may not have answered"
                    return False
                seen = int(getattr(answer, what))
                state = f"it is {seen}"
                return seen == count

            wait_until(reached, timeout=timeout, what=lambda: f"{what} {count} of {queue!r}, {state}")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
