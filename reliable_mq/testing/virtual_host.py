"""A virtual host of a test's own, seen without the tested code.

It is seen through plain pika, the management API and the queues' own processes, never through publishers and consumers
of this package.
"""

from __future__ import annotations

import base64
import re
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pika

from reliable_mq.testing.management import ManagementAPIError
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliable_mq.testing.cluster import RabbitMQCluster
    from reliable_mq.testing.rabbitmq import RabbitMQ

    BrokerOrCluster: TypeAlias = RabbitMQ | RabbitMQCluster

__all__ = ["VirtualHost"]

# The numbers of rabbitmqctl and the management API on quorum queues are seconds old; this asks the queues themselves. A
# query is answered without changes that are not on the disk yet, such as the acks of a client that has just left. A
# command is answered when all before it is there; this one changes nothing.
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
end || Q <- rabbit_amqqueue:list(<<"{vhost}">>)]
"""
# What `rabbitmqctl close_all_connections` has the broker do.
_CLOSE_CONNECTIONS: Final = """
begin
    Open = rabbit_connection_tracking:list(<<"{vhost}">>),
    rabbit_connection_tracking_handler:close_connections(Open, base64:decode_to_string("{reason}"), 0),
    length(Open)
end
"""
_COUNTED: Final = re.compile(r'\{<<"([^"]*)">>,(\d+)\}')


class VirtualHost:
    """A virtual host on a broker or a cluster. Not created before `create`.

    Args:
        broker: a `RabbitMQ` or a `RabbitMQCluster`.
        name: of the virtual host.

    Attributes:
        broker: as given.
        name: as given.
        url: the AMQP URL to it, as guest, who may do everything in it; of a cluster, with all hosts.
    """

    def __init__(self, broker: BrokerOrCluster, name: str) -> None:
        self.broker = broker
        self.name = name
        self.url = broker.url_of(name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} on {self.broker}>"

    def create(self) -> None:
        """Create it, for guest."""
        api = self.broker.management
        api.call("PUT", "vhosts", self.name, body={})
        api.call("PUT", "permissions", self.name, "guest", body={"configure": ".*", "write": ".*", "read": ".*"})

    def add_user(self, name: str) -> None:
        """Add a user who may do everything in it, with the name as password.

        Users are the broker's, and stay.
        """
        api = self.broker.management
        api.call("PUT", "users", name, body={"password": name, "tags": ""})
        api.call("PUT", "permissions", self.name, name, body={"configure": ".*", "write": ".*", "read": ".*"})

    def delete(self) -> None:
        """Delete it, with everything in it and every connection to it."""
        self.broker.management.call("DELETE", "vhosts", self.name)

    def connect(self, **parameters: Any) -> Any:
        """Return a ``pika.BlockingConnection``; of a cluster, to a node that runs.

        It has no heartbeat (a test that sits in another call would lose the connection) and 30 s for every blocking
        step, unless `parameters` override these attributes of pika's ``URLParameters``.
        """
        settings = pika.URLParameters(self.broker.reachable_url_of(self.name))
        settings.heartbeat = 0
        settings.socket_timeout = settings.stack_timeout = settings.blocked_connection_timeout = 30
        for name, value in parameters.items():
            setattr(settings, name, value)
        return pika.BlockingConnection(settings)

    def queue(self, name: str) -> dict[str, Any] | None:
        """Return the management API's view of a queue, None where there is none."""
        try:
            answer: dict[str, Any] = self.broker.management.call("GET", "queues", self.name, name)
        except ManagementAPIError as error:
            if error.status != 404:
                raise
            return None
        return answer

    def delete_queue(self, name: str) -> None:
        """Delete a queue from outside, whatever is in it and whoever consumes from it."""
        self.broker.management.call("DELETE", "queues", self.name, name)

    def close_connections(self, reason: str = "closed by the test") -> int:
        """Close every connection to it from the broker's side; return how many were known."""
        encoded = base64.b64encode(reason.encode()).decode()
        return int(self.broker.evaluate(_CLOSE_CONNECTIONS.format(vhost=self.name, reason=encoded)))

    def peek(self, queue: str, count: int = 1000) -> list[dict[str, Any]]:
        """Return messages at the head of a queue, as the broker's JSON.

        For messages that pika cannot decode. They are put back, which marks them
        redelivered. Each has ``payload``, ``properties``, ``routing_key``
        and ``redelivered``.
        """
        wanted = {"count": count, "ackmode": "ack_requeue_true", "encoding": "auto"}
        messages: list[dict[str, Any]] = self.broker.management.call(
            "POST", "queues", self.name, queue, "get", body=wanted
        )
        return messages

    def take_all(self, queue: str, *, timeout: float = 60.0) -> list[str]:
        """Consume and ack all that is ready in a queue; return the message ids, in order.

        A queue that does not exist is empty. A message without an id is ``"<no message id>"``. Blocks until the broker
        has no more, at most `timeout` seconds.
        """
        taken: list[str] = []
        if self.queue(queue) is None:
            return taken
        deadline = time.monotonic() + timeout
        with self.connect() as connection:
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
                elif channel.queue_declare(queue, passive=True).method.message_count == 0:
                    # The reply came after every delivery that the broker had sent before it.
                    connection.process_data_events(time_limit=0)
                    if last_tag == acked:
                        break
        return taken

    def bodies(self, queue: str) -> list[tuple[str, bytes]]:
        """Take all that is ready in a queue; return message id and body of each, in order."""
        found: list[tuple[str, bytes]] = []
        with self.connect() as connection:
            channel = connection.channel()
            while True:
                method, properties, body = channel.basic_get(queue, auto_ack=True)
                if method is None:
                    return found
                found.append((properties.message_id, body))

    def live_counts(self, queues: Iterable[str] = ()) -> dict[str, int]:
        """Return the number of messages of each queue, as of now.

        Ready, unacked, and on their way to a dead-letter queue.

        For knowing whether there are any: a message that is on its way may count twice.

        Args:
            queues: names that must be in the answer, with 0 where there is no such queue.
        """
        answer = self.broker.evaluate(_LIVE_COUNTS.format(vhost=self.name))
        found = {base64.b64decode(name).decode(): int(count) for name, count in _COUNTED.findall(answer)}
        return {**dict.fromkeys(queues, 0), **found}

    def wait_for_consumers(self, queue: str, count: int, *, timeout: float = 30.0) -> None:
        """Block until a queue has exactly `count` consumers.

        Raises:
            TimeoutError: it did not come to that within `timeout` seconds.
        """
        self._wait_for("consumer_count", queue, count, timeout)

    def wait_for_messages(self, queue: str, count: int, *, timeout: float = 30.0) -> None:
        """Block until exactly `count` messages of a queue are ready, not unacked.

        Raises:
            TimeoutError: it did not come to that within `timeout` seconds.
        """
        self._wait_for("message_count", queue, count, timeout)

    def _wait_for(self, what: str, queue: str, count: int, timeout: float) -> None:
        seen = -1
        with self.connect() as connection:
            channel = connection.channel()

            def reached() -> bool:
                nonlocal seen
                seen = int(getattr(channel.queue_declare(queue, passive=True).method, what))
                return seen == count

            wait_until(reached, timeout=timeout, what=lambda: f"{what} {count} of {queue!r}, it is {seen}")
