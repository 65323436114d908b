"""Quorum queues that another process than the tested one has made: it cannot know that they are new."""

from __future__ import annotations

import time

__all__ = ["let_new_queues_age"]

_OLD = 1.5  # seconds; from one second on RabbitMQ keeps what is in a quorum queue, whatever happens to it


def let_new_queues_age() -> None:
    """Wait until a broker that is killed keeps what is in the queues that it has now; nothing shows that it does."""
    time.sleep(_OLD)
