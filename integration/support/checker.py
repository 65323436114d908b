"""The fault matrix's checker: the account of what was published, closed by draining the broker with plain pika.

Draining does not go through what is tested. It ends only when the broker itself says that every queue is empty, with
nothing unacked and nothing on its way to a dead-letter queue; a consumer that still runs keeps it from ending.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reliable_mq.testing.audit import Audit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pika.channel import Channel
    from pika.spec import BasicProperties

    from integration.support.management import VirtualHost
    from reliable_mq.testing.audit import AuditResult


class Checker(Audit):
    """An `Audit` that can drain queues and that reports its counts, also when all is well.

    Args:
        report: is given the line of counts each time that the account is closed.
    """

    def __init__(self, report: Callable[[str], None] = print) -> None:
        super().__init__()
        self._report = report

    def drain(
        self, vhost: VirtualHost, queues: Sequence[str], *, dead_letters: Sequence[str] = (), timeout: float = 60
    ) -> None:
        """Take everything out of work queues and dead-letter queues and book it, until the broker says they are empty.

        A queue that does not exist is empty. A message without an id is booked as ``"<no message id>"``.

        Raises:
            TimeoutError: something was left after `timeout` seconds: the counts are in the message.
        """
        deadline = time.monotonic() + timeout
        while True:
            for queue in queues:
                self.left(_take_all(vhost, queue, deadline))
            for queue in dead_letters:
                self.dead_lettered(_take_all(vhost, queue, deadline))
            live = vhost.live_counts()
            remaining = {queue: live[queue] for queue in (*queues, *dead_letters) if live.get(queue)}
            if not remaining:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not drained within {timeout:g} s: {remaining}")

    def close(self, *, effects_once: bool = False) -> AuditResult:
        """Report the counts, then raise unless they add up.

        Raises:
            AssertionError: see `Balance.check`.
        """
        balance = self.balance()
        self._report(str(balance))
        balance.check(effects_once=effects_once)
        return balance


def _take_all(vhost: VirtualHost, queue: str, deadline: float) -> list[str]:
    """Consume and ack until the queue has nothing ready; return the message ids, in order."""
    taken: list[str] = []
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1000)
        if not _exists(vhost, queue):
            return taken
        last_tag = 0

        def on_message(_channel: Channel, method: object, properties: BasicProperties, _body: bytes) -> None:
            nonlocal last_tag
            last_tag = method.delivery_tag
            taken.append(properties.message_id or "<no message id>")

        channel.basic_consume(queue, on_message)
        acked = 0
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


def _exists(vhost: VirtualHost, queue: str) -> bool:
    return vhost.queue(queue) is not None
