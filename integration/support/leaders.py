"""Leaders of quorum queues that do not respond for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliable_mq.testing import VirtualHost


def suspend_leader(vhost: VirtualHost, queue: str, seconds: float) -> None:
    """Suspend the leader of a quorum queue. It resumes by itself after so many seconds; returns before that."""
    vhost.broker.evaluate(
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost.name}">>, queue, <<"{queue}">>)), '
        "Leader = amqqueue:get_pid(Q), ok = sys:suspend(Leader), "
        f"spawn(fun() -> timer:sleep({round(seconds * 1000)}), sys:resume(Leader) end), ok"
    )
