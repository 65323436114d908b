"""The relay of an outbox: a connection that cannot be configured, and large rows."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from sqlalchemy import NullPool, create_engine

from reliable_mq import BrokerUnavailable, ConfigurationError, Message
from reliable_mq.aio.publisher_channel import AsyncPublisherChannel
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox
from reliable_mq.outbox.sqlalchemy_table import boot_name
from reliable_mq.sync.publisher_channel import PublisherChannel
from reliable_mq.testing.waiting import wait_until
from reliable_mq.tls import TLSOptions
from tests.contract.test_health import inner
from tests.contract.test_publishing import acking
from tests.outbox.hanging import HangingOutbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reliable_mq.outbox import OutboxStatus
    from tests.contract.scripted_broker import ScriptedBroker


def wait_for_obstacle(publisher: Any, text: str) -> None:
    """Wait until the relay gives this reason why it publishes nothing."""
    relay = inner(publisher)._outbox_channel.relay
    wait_until(lambda: isinstance(relay.error, BrokerUnavailable) and text in str(relay.error), timeout=20, what=text)


def rows(status: OutboxStatus) -> tuple[int, int]:
    return status.rows, status.set_aside


def test_rows_wait_until_the_certificate_can_be_read(
    new_publisher: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay reads the files again for each attempt."""
    outbox, certificate = SQLiteOutbox(tmp_path / "outbox"), tmp_path / "tls.crt"
    tls = TLSOptions(cert_file=certificate)
    with new_publisher("amqps://127.0.0.1:1/", outbox=outbox, tls=tls) as publisher:
        for _ in range(3):
            publisher.publish(Message(b""), routing_key="q")
        wait_for_obstacle(publisher, "tls.crt' cannot be read")
        assert rows(outbox.status()) == (3, 0)
        certificate.write_text("half a certificate")
        wait_for_obstacle(publisher, "holds no PEM certificate")
        assert rows(outbox.status()) == (3, 0)
    said = [record.getMessage() for record in caplog.records if record.name == "reliable_mq.outbox.relay"]
    assert len(said) == 1
    assert "cannot publish" in said[0]
    assert "tls.crt' cannot be read" in said[0]


def test_rows_wait_if_the_channel_ends_before_it_takes_them(
    broker: ScriptedBroker, new_publisher: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_channel: object, _confirmation: object) -> NoReturn:
        raise ConfigurationError("cert_file is gone")

    monkeypatch.setattr(PublisherChannel, "submit", refuse)
    monkeypatch.setattr(AsyncPublisherChannel, "take", refuse)
    broker.script = acking
    outbox = SQLiteOutbox(tmp_path / "outbox")
    with new_publisher(outbox=outbox) as publisher:
        publisher.publish(Message(b""), routing_key="q")
        wait_for_obstacle(publisher, "cert_file is gone")
        assert rows(outbox.status()) == (1, 0)
        monkeypatch.undo()
        publisher.flush(20)


class Shared(SQLAlchemyOutbox):
    """An outbox in which another process, with a relay, stores a row after each count."""

    counts = 0

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        counted = super().backlog(up_to)
        self.counts += 1
        values = self._values(NewRow(Message(b""), "", "q", True, None), time.time())
        lease = {"claimed_by": f"{boot_name(self._dialect)}another", "claimed_until": 2.0**40}
        with self._engine.begin() as connection:  # type: ignore[union-attr]
            connection.execute(self.table.insert(), values | lease)
        return counted


@pytest.mark.parametrize("call", ["close", "flush"])
def test_no_caller_waits_for_rows_that_others_store_meanwhile(
    broker: ScriptedBroker, new_publisher: Callable[..., Any], tmp_path: Path, call: str
) -> None:
    """A table that many processes share is never empty."""
    engine = create_engine(f"sqlite:///{tmp_path}/database", poolclass=NullPool)
    outbox = Shared(engine, create=True)
    with new_publisher(outbox=outbox) as publisher, ThreadPoolExecutor(1) as pool:
        publisher.publish(Message(b""), routing_key="q")
        [published] = broker.wait_published(1)
        ended = pool.submit(getattr(publisher, call), 60)
        wait_until(lambda: outbox.counts > 1, timeout=20, what="the counts")
        published.channel.ack(published.number)
        ended.result(20)
        publisher.close(0)  # those of the other process stay


@pytest.mark.slow
def test_rows_are_released_after_their_outcomes_are_written(
    broker: ScriptedBroker, new_publisher: Callable[..., Any], tmp_path: Path
) -> None:
    """Another relay would publish a row again that the broker has confirmed, or before one of its key in flight."""
    broker.script = acking
    outbox = HangingOutbox(tmp_path / "outbox")
    publisher = new_publisher(outbox=outbox)
    publisher.connect()
    with closing(SQLiteOutbox(tmp_path / "outbox")) as another, closing(another.claims()) as claims:
        try:
            assert claims.take(10).rows == []
            outbox.hangs = "outcomes"
            publisher.publish(Message(b""), routing_key="q")
            relay = inner(publisher)._outbox_channel.relay
            wait_until(lambda: relay.statistics.confirmed == 1, timeout=20, what="the confirm")
            publisher.close(0.1)
            assert claims.take(10).rows == []
            assert another.status().rows == 1
        finally:
            outbox.answers.set()
        assert relay.join(20)
        assert another.status().rows == 0
        assert claims.take(10).rows == []


def test_the_relay_command_has_no_limit_of_its_own(broker: ScriptedBroker, tmp_path: Path) -> None:
    """The publisher that stored the row, and the broker, may have larger limits than the default."""
    broker.script = acking
    message = Message(bytes(17 * 1024 * 1024))
    with closing(SQLiteOutbox(tmp_path / "outbox")) as outbox:
        outbox.open()
        outbox.write([NewRow(message, "", "q", True, None)], [])
        command = [sys.executable, "-m", "reliable_mq.cli", "outbox", "relay", broker.url, str(tmp_path / "outbox")]
        subprocess.run([*command, "--until-empty", "--timeout", "30"], check=True, timeout=60)
        assert rows(outbox.status()) == (0, 0)
    assert [published.message_id for published in broker.published] == [message.message_id]
