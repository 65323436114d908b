"""Stage a queue: move its messages into a stream, each once.

A stream can be read by offset, by many readers and repeatedly; a queue cannot. `StageRelay` moves a queue into a
stream, or into the partitions of a super stream: it publishes the messages, one or several in an entry, waits for the
confirm, and then acks them. ``format("rabbitmq")`` uses it for the option ``stage``, and so does ``reliable-mq stage``.
"""

from __future__ import annotations

from reliable_mq.core.stage.options import MissingId, StageOptions
from reliable_mq.stage.relay import StageRelay

__all__ = ["MissingId", "StageOptions", "StageRelay"]
