"""Waiting on the way into an outbox, on the sync face. No broker is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from reliable_mq import Message, Publisher, UsageError
from reliable_mq.outbox import SQLiteOutbox

if TYPE_CHECKING:
    from pathlib import Path


def test_who_flushes_while_the_publisher_is_closed_is_told(tmp_path: Path) -> None:
    """Nobody relays any more: what is left would be waited for without end."""
    publisher = Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=SQLiteOutbox(tmp_path / "outbox"))
    publisher.publish(Message(b"1"), routing_key="orders")
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(publisher.flush)
        with pytest.raises(TimeoutError):
            publisher.flush(0.1)
        publisher.close(0)
        with pytest.raises(UsageError, match="for the next start"):
            flushed.result(20)
    with pytest.raises(UsageError, match="for the next start"):
        publisher.flush()
