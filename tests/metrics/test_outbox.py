"""The metrics of a publisher with an outbox: names, labels, and sources of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from reliable_mq import Message, OutboxError, ReliableMQError
from reliable_mq.core.outbox import KeptPlaces, NewRow, OutboxRow
from reliable_mq.core.statistics import OutboxStatistics, OutboxStatus, RelayStatus
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import register
from reliable_mq.outbox import SQLiteOutbox, row_count
from reliable_mq.outbox.relay import OutboxRelay
from reliable_mq.testing.waiting import wait_until
from tests.outbox.hanging import HangingOutbox

STATUS = OutboxStatus(rows=7, delayed=2, held=3, set_aside=4, unreadable=5, oldest_age=1.5)
RELAY = RelayStatus(unanswered_seconds=0.25)
STATISTICS = OutboxStatistics(stored=101, not_stored=102, confirmed=103, delayed=104, set_aside=105, interruptions=106)
COUNTERS = {
    "outbox_stored_total orders": 101,
    "outbox_relayed_total orders confirmed": 103,
    "outbox_relayed_total orders delayed": 104,
    "outbox_relayed_total orders set_aside": 105,
    "outbox_failures_total orders store": 102,
    "outbox_failures_total orders relay": 106,
}
OF_RELAY = {"outbox_unanswered_seconds orders": 0.25}
GAUGES = {
    "outbox_waiting orders": 7,
    "outbox_delayed orders": 2,
    "outbox_held orders": 3,
    "outbox_set_aside orders": 4,
    "outbox_unreadable orders": 5,
    "outbox_oldest_age_seconds orders": 1.5,
}


def scrape(*statuses: OutboxStatus | None) -> dict[str, float]:
    """Return the scrape of publishers with one name and these outbox statuses."""
    registry = CollectorRegistry()
    for status in statuses:
        register(registry, lambda status=status: readings(("orders",), RELAY, status, STATISTICS))  # type: ignore[misc]
    return {
        f"{sample.name.removeprefix('reliable_mq_')} {' '.join(sample.labels.values())}": sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_every_count_has_its_metric() -> None:
    """The expected scrape is complete: a missing or new metric fails the test."""
    assert scrape(STATUS) == COUNTERS | OF_RELAY | GAUGES


def test_an_unreadable_outbox_exports_no_gauges_of_its_rows() -> None:
    """An invented gauge would hide the failure."""
    assert scrape(None) == COUNTERS | OF_RELAY


def test_what_is_in_an_outbox_that_publishers_share_is_no_sum() -> None:
    """Each publisher reports the whole outbox."""
    shown = scrape(STATUS, STATUS)
    assert {name: shown[name] for name in GAUGES | OF_RELAY} == GAUGES | OF_RELAY
    assert shown["outbox_stored_total orders"] == 202


class Silent:
    """A publisher of rows that never settles any."""

    ended = False

    def connect(self) -> None:
        """Do nothing: it is always connected."""

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Do nothing: the rows stay outstanding."""

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        return []

    def kept(self) -> KeptPlaces:
        return KeptPlaces()

    def watch(self, wake: Callable[[], object]) -> None:
        """Do nothing: no row is ever settled."""


class Moody(SQLiteOutbox):
    """An outbox whose status sometimes fails."""

    answers = True
    asked = 0

    def status(self) -> OutboxStatus:
        self.asked += 1
        if not self.answers:
            raise OutboxError("not now")
        return super().status()


def test_a_relay_reports_counts_only_while_the_outbox_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status has the oldest age; failures are counted and relaying continues."""
    monkeypatch.setattr(row_count, "_EVERY", 0.01)
    monkeypatch.setattr(row_count, "_SHARE", 0)
    outbox = Moody(tmp_path / "outbox", poll_interval=0.01)
    outbox.write([NewRow(Message(b""), "", "q", True, None)] * 2, [])
    relay = OutboxRelay(outbox, Silent(), settle=lambda _: None, limit=10, max_bytes=2**20, name="relay", measured=True)
    assert relay.status is None
    relay.start(outbox.claims())
    try:
        wait_until(lambda: relay.status is not None, timeout=20, what="a status")
        assert relay.status is not None
        assert relay.status.rows == 2
        assert 0 <= relay.status.oldest_age < 60
        outbox.answers = False
        wait_until(lambda: relay.status is None, timeout=20, what="no status")
        assert relay.statistics.interruptions >= 1
        assert relay.error is None
        outbox.answers = True
        wait_until(lambda: relay.status is not None, timeout=20, what="a status")
    finally:
        relay.stop(0)
        assert relay.join(20)
        outbox.close()


@pytest.mark.parametrize("call", ["status", "take"])
def test_a_relay_reports_no_counts_while_the_outbox_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(row_count, "_EVERY", 0.01)
    monkeypatch.setattr(row_count, "_SHARE", 0)
    monkeypatch.setattr(row_count, "_HANGS_AFTER", 0.3)
    outbox = HangingOutbox(tmp_path / "outbox")
    relay = OutboxRelay(outbox, Silent(), settle=lambda _: None, limit=10, max_bytes=2**20, name="relay", measured=True)
    relay.start(outbox.claims())
    try:
        wait_until(lambda: relay.status is not None, timeout=20, what="a status")
        outbox.hangs = call
        wait_until(lambda: relay.status is None, timeout=20, what="no status")
        if call == "take":
            wait_until(lambda: relay.own_status.unanswered_seconds > 0.3, timeout=20, what="a long wait")
        outbox.answers.set()
        wait_until(lambda: relay.status is not None, timeout=20, what="a status")
        wait_until(lambda: relay.own_status.unanswered_seconds < 0.3, timeout=20, what="a short wait, or none")
    finally:
        outbox.answers.set()
        relay.stop(0)
        assert relay.join(20)
        outbox.close()


def test_a_relay_that_nobody_measures_counts_nothing(tmp_path: Path) -> None:
    """Without a registry, the relay does not read the status."""
    outbox = Moody(tmp_path / "outbox")
    relay = OutboxRelay(outbox, Silent(), settle=lambda _: None, limit=10, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    relay.stop(0)
    assert relay.join(20)
    assert outbox.asked == 0
    assert relay.status is None
    outbox.close()
