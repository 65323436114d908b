"""What is closed when the interpreter exits. No broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq import Consumer, UsageError
from reliable_mq.sync import consumer as module

if TYPE_CHECKING:
    import pytest


def test_a_consumer_that_cannot_be_closed_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Consumer] = []

    def close(consumer: Consumer) -> None:
        closed.append(consumer)
        raise UsageError("not from here")

    consumers = {Consumer("amqp://guest:guest@127.0.0.1:1/", "orders") for _ in range(3)}
    monkeypatch.setattr(Consumer, "close", close)
    monkeypatch.setattr(module, "_open_consumers", consumers)
    module._close_at_exit()
    assert set(closed) == consumers
