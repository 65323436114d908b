"""Waiting on the way into an outbox, on the sync face. No broker is needed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from integration.support.waiting import wait_until
from reliable_mq import Message, Publisher, UsageError
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.outbox.writer import OutboxWriter

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


def test_an_opening_that_is_interrupted_leaves_no_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the lock, and others from relaying what is in the file."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OutboxWriter, "start", interrupted)
    publisher = Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=SQLiteOutbox(tmp_path / "outbox"), name="test-open")
    with pytest.raises(KeyboardInterrupt), publisher:
        pytest.fail("it was entered")
    wait_until(
        lambda: not any(thread.name.startswith("test-open") for thread in threading.enumerate()),
        timeout=10,
        what="the end of its threads",
    )
