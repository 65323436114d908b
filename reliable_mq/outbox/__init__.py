"""Outboxes: a message is durable before ``publish`` returns, survives the process, and a relay publishes it.

``Publisher(url, outbox=SQLiteOutbox(path))`` stores every message in a file first. ``SQLAlchemyOutbox(engine)`` stores
messages in a table beside your own, in your own transaction. How either works, and what it promises, is in the README
of this package.
"""

from __future__ import annotations

from reliable_mq.outbox.protocol import Claims, Outbox, OutboxStatus, SetAside
from reliable_mq.outbox.sqlite import SQLiteOutbox

__all__ = ["Claims", "Outbox", "OutboxStatus", "SQLiteOutbox", "SetAside"]
