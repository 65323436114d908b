"""Clients are closed when the interpreter exits. No broker."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from reliable_mq import Consumer, Message, Publisher, PublishUnconfirmed, UsageError
from reliable_mq.outbox import SQLiteOutbox, sqlite_relay
from reliable_mq.sync import consumer as module
from reliable_mq.sync import publisher as publisher_module
from reliable_mq.testing.waiting import wait_until
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = "amqp://guest:guest@127.0.0.1:1/"

LATE = """
from reliable_mq import Consumer, Message, Publisher
from reliable_mq.outbox import SQLiteOutbox

class Service:
    client = {client}
    message = Message(b"")

    def __del__(self):
        self.client.{call}

service = Service()
"""


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


def test_a_publisher_that_cannot_be_closed_keeps_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[Publisher] = []

    def close(publisher: Publisher, _timeout: float) -> None:
        closed.append(publisher)
        raise RuntimeError("can't create new thread at interpreter shutdown")

    publishers = {Publisher(NOBODY) for _ in range(3)}
    monkeypatch.setattr(Publisher, "close", close)
    monkeypatch.setattr(publisher_module, "_open_publishers", publishers)
    publisher_module._close_at_exit()
    assert set(closed) == publishers
    assert caplog.text.count("RuntimeError: can't create new thread") == 3


def test_lost_messages_are_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback would show only the library, which is not at fault."""
    lost = PublishUnconfirmed("message 1 was not confirmed", message_id="1")

    def close(_publisher: Publisher, _timeout: float = 0.0) -> None:
        raise lost

    publisher = Publisher(NOBODY)
    monkeypatch.setattr(Publisher, "close", close)
    monkeypatch.setattr(publisher_module, "_open_publishers", {publisher})
    publisher_module._close_at_exit()
    publisher._give_up()
    publisher.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [record.getMessage() for record in caplog.records][1:] == [
        "messages were lost at exit: message 1 was not confirmed",
        "a publisher was interrupted with unconfirmed messages: message 1 was not confirmed",
        "leaving a publisher because of KeyboardInterrupt, with messages unconfirmed: message 1 was not confirmed",
    ]
    assert "Traceback" not in caplog.text


def test_outboxes_are_flushed_and_closed_at_exit_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.12 refuses to start threads when the interpreter exits."""
    monkeypatch.setattr(publisher_module, "_open_publishers", set())
    publishers = [Publisher(NOBODY, outbox=SQLiteOutbox(tmp_path / f"outbox {number}")) for number in range(2)]
    for publisher in publishers:
        publisher.publish(Message(b""), routing_key="q")
    with refusing_threads(""):
        publisher_module._close_at_exit()
    assert caplog.text.count("1 messages stay in") == 2, "the outboxes were not asked"
    assert "Traceback" not in caplog.text
    assert all(publisher._is_closed for publisher in publishers)
    assert not sqlite_relay._open_claims


def test_an_outbox_whose_broker_refuses_is_closed_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted messages are stored then, although no connection is left to close."""
    opened: set[Publisher] = set()
    monkeypatch.setattr(publisher_module, "_open_publishers", opened)
    publisher = Publisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"), reconnect_stop=lambda _rounds: True)
    publisher.publish(Message(b""), routing_key="q")
    channel = publisher._outbox_channel
    assert channel is not None
    wait_until(lambda: channel.relay.statistics.interruptions >= 2, timeout=20, what="an attempt to send the row")
    assert opened == {publisher}
    publisher_module._close_at_exit()
    assert publisher._is_closed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "call"),
    [
        (f"Publisher({NOBODY!r})", "publish(self.message, routing_key='q')"),
        (f"Publisher({NOBODY!r}, outbox=SQLiteOutbox('outbox'))", "publish(self.message, routing_key='q')"),
        (f"Consumer({NOBODY!r}, 'orders', print)", "run()"),
    ],
)
def test_a_client_that_starts_after_the_exit_began_fails(client: str, call: str, tmp_path: Path) -> None:
    """Threads cannot run any more when the objects of modules are deleted. Python 3.11 would wait for one for ever."""
    program = LATE.format(client=client, call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert "RuntimeError: can't create new thread at interpreter shutdown" in done.stderr
