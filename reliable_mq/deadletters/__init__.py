"""Tools for dead letters: browse, count, replay, purge, export and import them.

::

    with DeadLetterQueue("amqp://...", "orders.dead") as dead:
        print(dead.statistics().by_cause)
        report = dead.replay(Filter(exception="*Timeout*", older_than=3600), rate=100)

They work on every queue that allows ``basic.get``, whether this package or RabbitMQ itself dead-lettered the messages.
``reliable-mq dlq`` offers the same operations in a shell.
"""

from __future__ import annotations

from reliable_mq.deadletters.filter import Filter, Statistics
from reliable_mq.deadletters.importing import ImportReport
from reliable_mq.deadletters.message import DeadMessage, Origin
from reliable_mq.deadletters.queue import DeadLetterQueue
from reliable_mq.deadletters.replay import ReplayReport, Target

__all__ = ["DeadLetterQueue", "DeadMessage", "Filter", "ImportReport", "Origin", "ReplayReport", "Statistics", "Target"]
