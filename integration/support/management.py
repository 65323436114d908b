"""RabbitMQ's management API, as far as tests ask it, and a virtual host that one test has for itself.

Counts out of the management API lag by its statistics interval (1 s in our images); `VirtualHost.live_counts` does not.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pika

from integration.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from integration.support.broker import Broker


# What rabbitmqctl and the management API print of quorum queues is seconds old; this asks the queues themselves. A
# query is answered without what is not on the disk yet, such as the acks of a client that has just gone away. A command
# is answered when all before it is there; this one changes nothing.
_LIVE_COUNTS = """
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
_COUNTED = re.compile(r'\{<<"([^"]*)">>,(\d+)\}')


class ManagementError(RuntimeError):
    """The API answered with an error status."""

    def __init__(self, method: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{method} {path}: {status} {text[:300]}")
        self.status = status


class Management:
    """One broker's management API. Every call is one connection, closed at its end; `timeout` (seconds) bounds it."""

    def __init__(self, url: str, *, user: str = "guest", password: str = "guest", timeout: float = 15) -> None:
        self.url = url
        self._timeout = timeout
        self._authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    def call(self, method: str, *segments: str, body: Any = None, query: str = "") -> Any:
        """Call ``/api/<segments>`` (each is percent-encoded) and return the decoded answer, None where it is empty.

        Raises:
            ManagementError: the status is 400 or above.
            OSError: the broker does not answer.
        """
        path = "/api/" + "/".join(quote(segment, safe="") for segment in segments) + query
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": self._authorization, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise ManagementError(method, path, error.code, error.read().decode(errors="replace")) from None
        return json.loads(content) if content else None

    def alarmed(self) -> bool:
        """Whether a memory or disk alarm is in effect."""
        try:
            self.call("GET", "health", "checks", "alarms")
        except ManagementError as error:
            if error.status != 503:
                raise
            return True
        return False

    def connections(self, vhost: str) -> list[dict[str, Any]]:
        """The connections to a virtual host, as the (lagging) statistics know them."""
        return [c for c in self.call("GET", "connections") if c.get("vhost") == vhost]


class VirtualHost:
    """A virtual host of one test's own.

    Attributes:
        name: its name on the broker.
        broker: the broker it is on.
        url: AMQP URL to it, as guest, who may do everything in it.
    """

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.url = broker.url_of(name)

    def create(self) -> None:
        api = self.broker.management
        api.call("PUT", "vhosts", self.name, body={})
        api.call("PUT", "permissions", self.name, "guest", body={"configure": ".*", "write": ".*", "read": ".*"})

    def add_user(self, name: str) -> None:
        """Add a user who may do everything in it, with the name as password. Users are the broker's, and stay."""
        api = self.broker.management
        api.call("PUT", "users", name, body={"password": name, "tags": ""})
        api.call("PUT", "permissions", self.name, name, body={"configure": ".*", "write": ".*", "read": ".*"})

    def delete(self) -> None:
        """Delete it, with everything in it and every connection to it."""
        self.broker.management.call("DELETE", "vhosts", self.name)

    def connect(self, **parameters: Any) -> pika.BlockingConnection:
        """A plain pika connection, independent of what is tested; `parameters` override pika's `URLParameters`.

        The default is no heartbeat (a test that sits in another call would lose the connection) and 30 s for every
        blocking step.
        """
        settings = pika.URLParameters(self.url)
        settings.heartbeat = 0
        settings.socket_timeout = settings.stack_timeout = settings.blocked_connection_timeout = 30
        for name, value in parameters.items():
            setattr(settings, name, value)
        return pika.BlockingConnection(settings)

    def queue(self, name: str) -> dict[str, Any] | None:
        """What the management API knows of a queue (type, arguments, lagging counts), or None where there is none."""
        try:
            answer: dict[str, Any] = self.broker.management.call("GET", "queues", self.name, name)
        except ManagementError as error:
            if error.status != 404:
                raise
            return None
        return answer

    def delete_queue(self, name: str) -> None:
        """Delete a queue from outside, whatever is in it and whoever consumes from it."""
        self.broker.management.call("DELETE", "queues", self.name, name)

    def close_connections(self, reason: str = "closed by the test") -> int:
        """Close every connection to this virtual host from the broker's side; return how many were known."""
        output = self.broker.rabbitmqctl("close_all_connections", "--vhost", self.name, reason)
        closed = re.search(r"Closed (\d+) connection", output)
        return int(closed[1]) if closed else 0

    def peek(self, queue: str, count: int = 1000) -> list[dict[str, Any]]:
        """Messages at the head of a queue, as JSON of the broker's making, for what pika cannot decode.

        They are put back, which marks them redelivered. Each has ``payload``, ``properties``, ``routing_key``
        and ``redelivered``.
        """
        wanted = {"count": count, "ackmode": "ack_requeue_true", "encoding": "auto"}
        messages: list[dict[str, Any]] = self.broker.management.call(
            "POST", "queues", self.name, queue, "get", body=wanted
        )
        return messages

    def live_counts(self, queues: Iterable[str] = ()) -> dict[str, int]:
        """All messages of each queue (ready, unacked, and on their way to a dead-letter queue), as of now.

        For knowing whether there are any: a message that is on its way may count twice.

        Args:
            queues: names that must be in the answer, with 0 where there is no such queue.
        """
        answer = self.broker.evaluate(_LIVE_COUNTS.format(vhost=self.name))
        found = {base64.b64decode(name).decode(): int(count) for name, count in _COUNTED.findall(answer)}
        return {**dict.fromkeys(queues, 0), **found}

    def wait_for_consumers(self, queue: str, count: int, *, timeout: float = 30) -> None:
        """Wait until a queue has exactly `count` consumers.

        Raises:
            TimeoutError: it did not come to that within `timeout` seconds.
        """
        self._wait_for("consumer_count", queue, count, timeout)

    def wait_for_messages(self, queue: str, count: int, *, timeout: float = 30) -> None:
        """Wait until a queue holds exactly `count` messages that are ready (not those that are unacked).

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
                seen = getattr(channel.queue_declare(queue, passive=True).method, what)
                return seen == count

            wait_until(reached, timeout=timeout, what=lambda: f"{what} {count} of {queue!r}, it is {seen}")
