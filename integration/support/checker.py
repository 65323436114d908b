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

    from reliable_mq.testing import VirtualHost
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
                self.left(vhost.take_all(queue, timeout=deadline - time.monotonic()))
            for queue in dead_letters:
                self.dead_lettered(vhost.take_all(queue, timeout=deadline - time.monotonic()))
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
