"""Stream mode without a broker."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from reliable_mq.core.statistics import StageStatistics, StageStatus
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.spark import staged_source
from reliable_mq.spark.options import StagedOptions, read_options
from reliable_mq.spark.staged_source import StagedSource
from reliable_mq.spark.stream_source import StreamSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.spark.options import StreamOptions

ANY = ReadMaxRows(2**62)


class Closing:
    """A server that accepts connections and closes them."""

    def __init__(self) -> None:
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"amqp://127.0.0.1:{self._listener.getsockname()[1]}/"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._listener:
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    if connection.recv(1) == b"!":
                        return
                    self.connections += 1

    def close(self) -> None:
        with socket.create_connection(self._listener.getsockname()) as connection:
            connection.sendall(b"!")
        self._thread.join()


@pytest.fixture
def closing_server() -> Iterator[Closing]:
    with closing(Closing()) as server:
        yield server


def source(url: str) -> StreamSource:
    options: StreamOptions = read_options({"url": url, "stream": "events"}, streaming=True)  # type: ignore[assignment]
    return StreamSource(options, ["body"])


@pytest.mark.slow
def test_a_broker_that_is_away_is_asked_for_once_a_second(
    closing_server: Closing, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark asks a hundred times a second. Only one warning is logged."""
    reader = source(closing_server.url)
    began = time.monotonic()
    while closing_server.connections < 2:
        assert reader.latestOffset({"events": 5}, ANY) == {"events": 5}
    assert time.monotonic() - began >= 1.0
    assert [record.message[:28] for record in caplog.records if "new messages" in record.message] == [
        "cannot look for new messages"
    ]
    reader.stop()


class LostRelay:
    """A relay that lost its connection and is not the active one any more. It waits by its own clock, `now`."""

    error = None
    tail_messages = 0

    def __init__(self) -> None:
        self.closed = False
        self.now = 0.0
        self.statistics = StageStatistics()
        self._active = [True, True]
        self._waits = 0

    def start(self) -> None:
        pass

    def wait_declared(self, _timeout: float) -> None:
        pass

    def status(self) -> StageStatus:
        return StageStatus(active=1, outstanding=0, held_bytes=0)

    def wait_active(self, timeout: float) -> bool:
        active = bool(self._active and self._active.pop())
        self.now += 0 if active else timeout
        return active

    def wait_moved(self, _timeout: float) -> bool:
        self._waits += 1
        assert self._waits < 10, "it waits forever"
        return False

    def wait_settled(self, _timeout: float) -> None:
        pass

    def close(self, _timeout: float) -> None:
        self.closed = True


class ReadingRelay(LostRelay):
    """A relay that reads the end of the stage before it is active."""

    def wait_active(self, timeout: float) -> bool:
        self.now += timeout
        self.tail_messages += 1
        return self.tail_messages == 50

    def wait_moved(self, _timeout: float) -> bool:
        return True


class PassedOverRelay(LostRelay):
    """An active relay of a queue that delivers only to another consumer."""

    def wait_active(self, _timeout: float) -> bool:
        return True

    def wait_moved(self, timeout: float) -> bool:
        self._waits += 1
        assert self._waits < 200, "it waits forever"
        self.now += timeout
        return False

    def status(self) -> StageStatus:
        return StageStatus(active=1, outstanding=0, held_bytes=0, ready=max(100 - self._waits, 50))


def move_ready(url: str, relay: LostRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an available-now query move messages by a relay; then it asks in vain for the end of the stage."""
    monkeypatch.setattr(staged_source, "StageRelay", lambda *args, **named: relay)
    monkeypatch.setattr(staged_source, "time", SimpleNamespace(monotonic=lambda: relay.now))
    given = {"url": url, "queue": "orders", "stage": "events", "connection.timeout": "1s"}
    options = read_options(given, streaming=True)
    assert isinstance(options, StagedOptions)
    reader = StagedSource(options, ["body"])
    reader.prepareForTriggerAvailableNow()
    with pytest.raises(BrokerUnavailable):
        reader.latestOffset({"initial": {"events": 0}}, ANY)
    reader.stop()


def test_an_available_now_query_waits_for_no_other_relay(
    closing_server: Closing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own relay was active at first. Otherwise the query would never end."""
    relay = LostRelay()
    move_ready(closing_server.url, relay, monkeypatch)
    assert relay.closed
    assert "another relay is active" in caplog.text


def test_an_available_now_query_waits_for_the_tail_to_be_read(
    closing_server: Closing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That takes longer than another relay is waited for."""
    relay = ReadingRelay()
    move_ready(closing_server.url, relay, monkeypatch)
    assert relay.tail_messages == 50
    assert "another relay is active" not in caplog.text


def test_an_available_now_query_ends_if_others_get_all_messages(
    closing_server: Closing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue has a single active consumer, for example. As long as that one makes progress, the query waits."""
    relay = PassedOverRelay()
    move_ready(closing_server.url, relay, monkeypatch)
    assert relay.status().ready == 50
    assert "queue 'orders' is not empty" in caplog.text
