"""The relay's session: publishes, acks, and the end of an epoch."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from reliable_mq.codec import Properties, RawDelivery
from reliable_mq.core.stage import session as module
from reliable_mq.core.stage.envelope import marker, unstaged
from reliable_mq.core.stage.options import MissingId, shard
from reliable_mq.core.stage.session import REQUEUED_AFTER, TRANSITIONS, EpochState
from reliable_mq.core.stage.tail import SETTLED_AFTER
from tests.core.deliveries import properties
from tests.core.staging import (
    FRAME_MAX,
    Channel,
    CheckedSession,
    Queued,
    Stage,
    confirm,
    moving,
    parsed,
    stage_options,
)
from tests.transitions import changes


class Bench:
    """A session with a queue and a stage."""

    def __init__(self, messages: int = 0, partitions: int = 1, **changed: Any) -> None:
        self.options = stage_options(partitions, **changed)
        self.session = CheckedSession(self.options)
        self.stage = Stage(self.options.streams)
        self.queue = deque(Queued(f"m{number}") for number in range(messages))
        self.channel = Channel(self.stage, self.queue)
        self.epoch = 0

    def begin(self, now: float = 0.0) -> None:
        self.epoch += 1
        self.channel = Channel(self.stage, self.queue)
        moving(self.session, self.channel, self.epoch, now)

    def end(self) -> None:
        self.channel.die()
        self.session.lost()

    def close(self, now: float) -> None:
        self.channel.write(self.session.ending(now))
        self.channel.carry_out(now)
        self.confirm(now)
        self.end()

    def move(self, most: int, now: float = 0.0) -> None:
        self.channel.write(self.session.delivered(self.channel.deliver(most), now))
        self.channel.carry_out(now)

    def confirm(self, now: float = 0.0) -> None:
        confirm(self.session, self.channel, self.epoch, now)
        self.channel.carry_out(now)


def test_deliveries_are_acked_once_their_entry_is_confirmed() -> None:
    """They are not acked earlier."""
    bench = Bench(3)
    bench.begin()
    bench.move(3)
    assert (bench.session.outstanding, bench.session.unconfirmed) == (3, 1)
    assert bench.session.held > 0
    assert len(bench.channel.unacked) == 3
    bench.confirm()
    assert (bench.session.outstanding, bench.session.unconfirmed, bench.session.held) == (0, 0, 0)
    assert not bench.channel.unacked
    assert bench.session.statistics.moved == 3


def test_a_redelivered_message_of_the_tail_is_acked_only() -> None:
    """An earlier epoch has moved it."""
    bench = Bench(4)
    bench.begin()
    assert bench.session.is_new
    bench.move(2)
    bench.end()
    bench.begin()
    assert not bench.session.is_new
    assert bench.session.tail == 2
    bench.move(4)
    bench.confirm()
    assert bench.session.statistics.moved_before == 2
    assert bench.session.tail == 0
    assert not bench.queue
    assert len(bench.stage.originals()) == 4


def test_a_stage_is_new_until_it_has_a_message() -> None:
    """The markers of earlier epochs do not count."""
    bench = Bench(1)
    for _ in range(3):
        bench.begin()
        assert bench.session.is_new
        bench.end()
    bench.begin()
    bench.move(1)
    bench.end()
    bench.begin()
    assert not bench.session.is_new


def test_a_copy_accounts_for_one_message() -> None:
    """A message that was published twice is in the queue twice, and staged twice."""
    bench = Bench()
    bench.queue.extend([Queued("m"), Queued("m")])
    bench.begin()
    bench.move(2)
    bench.end()
    bench.queue.extend([Queued("m", redelivered=True)])
    bench.begin()
    bench.move(1)
    assert bench.session.tail == 1
    bench.move(2)
    bench.confirm()
    assert len(bench.stage.originals()) == 3


def test_a_message_delivered_again_on_its_channel_ends_an_epoch() -> None:
    """Its copy is not confirmed, or its ack came too late.

    The messages before it are moved.
    """
    for late_ack in (False, True):
        bench = Bench(3)
        bench.begin()
        bench.channel.write(bench.session.delivered(bench.channel.deliver(2), 0.0))
        if late_ack:
            bench.channel.carry_out(0.0)
            confirm(bench.session, bench.channel, bench.epoch)
        bench.channel.take_back()
        bench.queue.appendleft(Queued("urgent"))
        bench.move(4)
        assert bench.session.state is EpochState.ENDING
        assert len(bench.stage.originals()) == 3
        bench.end()
        bench.begin()
        bench.move(4)
        bench.confirm()
        assert bench.session.statistics.moved_before == 3
        assert not bench.queue
        assert len(bench.stage.originals()) == len(set(bench.stage.originals())) == 4


def test_a_message_of_the_tail_may_come_twice_on_a_channel() -> None:
    """The next epoch reads the tail, and the copy accounts for the message again."""
    bench = Bench(1)
    bench.begin()
    bench.move(1)
    bench.end()
    bench.begin()
    bench.session.delivered(bench.channel.deliver(1), 0.0)
    bench.channel.take_back()
    bench.move(1)
    assert bench.session.state is EpochState.ENDING
    bench.end()
    bench.begin()
    bench.move(1)
    assert not bench.queue
    assert len(bench.stage.originals()) == 1


def test_equal_messages_that_others_returned_do_not_end_an_epoch() -> None:
    """Each was returned once, so none is redelivered on this channel."""
    bench = Bench()
    bench.queue.extend(Queued("m", redelivered=True, returns=1) for _ in range(3))
    bench.begin()
    for _ in range(3):
        bench.move(1)
    assert bench.session.state is EpochState.MOVING
    assert len(bench.stage.originals()) == 3


def test_a_message_that_was_not_delivered_before_is_new() -> None:
    """A publisher used the id of a message in the tail again."""
    bench = Bench(1)
    bench.begin()
    bench.move(1)
    bench.confirm()
    bench.end()
    bench.queue.append(Queued("m0"))
    bench.begin()
    bench.move(1)
    assert bench.session.tail == 1
    assert len(bench.stage.originals()) == 2


def test_the_same_id_with_another_body_is_another_message() -> None:
    """Otherwise it would be lost."""
    bench = Bench(1)
    bench.begin()
    bench.move(1)
    bench.end()
    bench.queue[0].body = b"changed"
    bench.begin()
    bench.move(1)
    assert len(bench.stage.originals()) == 2


def test_a_message_without_id_ends_the_relay() -> None:
    """The messages before it are moved, those behind it are not."""
    bench = Bench(1)
    bench.queue.extend([Queued(""), Queued("behind")])
    bench.begin()
    bench.move(2)
    assert "has no message_id" in str(bench.session.error)
    bench.move(1)
    bench.confirm()
    assert len(bench.stage.originals()) == 1
    assert [each.message_id for each in bench.channel.unacked.values()] == ["", "behind"]


def test_without_ids_messages_may_come_twice_if_allowed() -> None:
    """They are never lost, but may be staged twice.

    The relay cannot know whether they were moved, and they are not in the tail.
    """
    bench = Bench(missing_id=MissingId.REPEAT)
    bench.queue.extend([Queued(""), Queued("")])
    bench.begin()
    bench.move(2)
    bench.end()
    bench.begin()
    assert bench.session.tail == 0
    bench.queue.append(Queued("with"))
    bench.move(3)
    bench.confirm()
    assert len(bench.stage.originals()) == 5


def test_without_an_id_a_tail_is_not_looked_at() -> None:
    """Only messages with an id are compared with the tail."""
    bench = Bench(1, missing_id=MissingId.REPEAT)
    bench.begin()
    bench.move(1)
    bench.end()
    bench.queue.appendleft(Queued("", redelivered=True))
    bench.begin()
    bench.move(2)
    assert len(bench.stage.originals()) == 2
    assert bench.session.statistics.moved_before == 1


def test_messages_of_others_in_the_stage_are_no_copies() -> None:
    """They do not affect the tail."""
    bench = Bench(1, partitions=2)
    bench.stage.logs["stage-0"].append((properties(message_id="m0"), b"body"))
    bench.begin()
    assert bench.session.tail == 0


def test_the_key_decides_on_the_partition() -> None:
    """Messages with the same key always go to the same partition."""
    bench = Bench(20, partitions=3)
    bench.begin()
    bench.move(20)
    assert [len(log) for log in bench.stage.logs.values()] == [2, 2, 2]
    assert len(bench.stage.originals()) == 20
    for number, log in enumerate(bench.stage.logs.values()):
        for raw, body in log[1:]:
            entry = unstaged(raw, body)
            assert entry is not None
            assert {shard(each.properties[3:], 3) for each in entry.originals} == {number}


def test_low_stays_until_the_tail_is_accounted_for() -> None:
    """A third relay needs the messages that the second one has not seen again."""
    bench = Bench(3)
    bench.begin()
    bench.move(3)
    bench.end()
    bench.begin()
    bench.move(1)
    bench.queue.append(Queued("new"))
    rest = [bench.queue.popleft() for _ in range(2)]
    bench.move(1)
    bench.end()
    bench.queue.extendleft(reversed(rest))
    bench.begin()
    bench.move(10)
    bench.confirm()
    assert len(bench.stage.originals()) == 4


def test_the_ack_of_a_message_of_the_tail_may_be_forgotten_too() -> None:
    """A broker that is killed may forget the ack, but not a later copy."""
    bench = Bench(2)
    bench.begin()
    bench.move(1)
    bench.end()
    bench.begin()
    forgotten = bench.queue[0]
    bench.move(1)
    assert (bench.session.tail, forgotten.acked_at) == (0, 0.0)
    bench.move(1)
    bench.confirm()
    bench.end()
    bench.queue.append(forgotten)
    bench.begin()
    bench.move(1)
    assert len(bench.stage.originals()) == 2


def test_an_empty_queue_resolves_the_tail_after_a_while() -> None:
    """The broker may need a moment to requeue the deliveries of a lost channel."""
    bench = Bench(1)
    bench.begin()
    bench.move(1)
    bench.confirm()
    bench.end()
    bench.begin()
    bench.session.drained(1.0)
    assert bench.session.tail == 1
    bench.session.drained(SETTLED_AFTER)
    assert bench.session.tail == 0
    bench.session.lost()
    bench.session.drained(100.0)


def test_a_shared_queue_may_requeue_messages_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seems empty, or has many new messages, while it holds those of a node that is away."""
    monkeypatch.setattr(module, "PASSED", 3)
    bench = Bench(2)
    bench.begin()
    bench.move(2)
    bench.end()
    first = bench.queue.popleft()
    bench.queue.clear()
    bench.session.shared = True
    bench.begin()
    bench.session.drained(REQUEUED_AFTER - 1.0)
    bench.queue.extend(Queued(f"n{number}") for number in range(4))
    bench.move(4, now=REQUEUED_AFTER - 1.0)
    assert bench.session.tail == 2
    bench.queue.append(first)
    bench.move(1, now=REQUEUED_AFTER - 1.0)
    assert bench.session.statistics.moved_before == 1
    bench.session.drained(REQUEUED_AFTER)
    assert bench.session.tail == 0


@pytest.mark.parametrize("partitions", [1, 2])
def test_the_next_epoch_reads_no_entry_that_was_settled(partitions: int) -> None:
    """This holds for entries of all epochs before a marker that ends one."""
    bench, now = Bench(partitions=partitions), 0.0
    for epoch in range(1, 4):
        bench.queue.extend(Queued(f"{epoch}-{number}") for number in range(6))
        bench.begin(now)
        for _ in range(6):
            bench.move(1, now)
        bench.confirm(now)
        assert bench.session.tail == 6 * (epoch - 1)
        assert bench.session.unsettled(now) >= 6 * epoch
        if epoch < 3:
            bench.close(now)  # too early
    now += SETTLED_AFTER
    bench.session.drained(now)
    assert bench.session.unsettled(now) == 0
    bench.close(now)
    bench.begin(now)
    assert bench.session.tail == 0


def test_an_epoch_ends_with_a_marker_only_while_it_moves() -> None:
    bench = Bench(1)
    assert bench.session.ending(SETTLED_AFTER) == b""
    bench.begin()
    assert [kind for kind, _ in parsed(bench.session.ending(SETTLED_AFTER))] == ["publish"]
    bench.session.failed()
    assert bench.session.ending(SETTLED_AFTER) == b""


def test_many_new_messages_resolve_the_tail_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue delivers requeued messages first."""
    monkeypatch.setattr(module, "PASSED", 3)
    bench = Bench(1)
    bench.begin()
    bench.move(1)
    bench.confirm()
    bench.end()
    bench.begin()
    bench.queue.extend(Queued(f"n{number}") for number in range(4))
    bench.move(3, now=1.0)
    assert bench.session.tail == 1
    bench.move(1, now=SETTLED_AFTER)
    assert bench.session.tail == 0


def reached(state: EpochState) -> Bench:
    bench = Bench()
    if state is EpochState.MOVING:
        bench.begin()
    elif state is not EpochState.CLOSED:
        bench.channel.write(bench.session.opened(1, 1, FRAME_MAX, bytes(8), 0.0))
        bench.channel.carry_out(0.0)
    if state is EpochState.READING:
        confirm(bench.session, bench.channel, 1)
    if state is EpochState.ENDING:
        bench.session.failed()
    assert bench.session.state is state
    return bench


def test_every_transition_of_the_table_happens() -> None:
    CheckedSession.seen.clear()
    for state in EpochState:
        reached(state).session.failed()
        reached(state).session.lost()
    assert CheckedSession.seen == {(before, after) for before, after in changes(TRANSITIONS) if before is not after}


def test_what_fails_ends_the_epoch() -> None:
    """The confirms of this epoch no longer count. The next epoch reads the tail."""
    bench = Bench(1)
    bench.begin()
    bench.move(1)
    bench.session.failed()
    assert bench.session.state is EpochState.ENDING
    bench.session.failed()
    bench.confirm()
    assert bench.channel.unacked
    assert bench.session.delivered([delivery(3)], 0.0) == b""
    assert bench.session.next_read is None
    assert not bench.session.wants_subscription


def test_a_stage_that_does_not_confirm_is_overdue() -> None:
    """The timeout does not run while the stage confirms or the broker does not read."""
    bench = Bench(2, confirm_timeout=30.0)
    assert not bench.session.overdue(100.0)
    bench.begin()
    assert not bench.session.overdue(100.0)
    bench.move(1, now=100.0)
    assert not bench.session.overdue(129.0)
    assert bench.session.overdue(130.0)
    bench.session.waited(125.0)
    bench.move(1, now=150.0)
    assert not bench.session.overdue(154.0)
    assert bench.session.overdue(155.0)
    bench.confirm(now=155.0)
    assert not bench.session.overdue(500.0)


def test_the_end_of_an_idle_epoch_is_not_overdue() -> None:
    """The timeout begins with the markers, however long ago the last confirm was."""
    bench = Bench(confirm_timeout=30.0)
    bench.begin()
    bench.session.ending(100.0)
    assert not bench.session.overdue(129.0)
    assert bench.session.overdue(130.0)


def test_a_tail_that_does_not_come_is_overdue() -> None:
    """The broker delivers nothing from the stage."""
    bench = Bench(confirm_timeout=30.0)
    bench.channel.write(bench.session.opened(1, 1, FRAME_MAX, bytes(8), 0.0))
    bench.channel.carry_out(0.0)
    confirm(bench.session, bench.channel, 1)
    assert bench.session.state is EpochState.READING
    assert bench.session.overdue(30.0)


def test_a_tail_that_is_read_behind_its_marker_is_overdue() -> None:
    """Another program publishes into the stage, so that the last chunk is no longer that of the marker."""
    bench = Bench(confirm_timeout=30.0)
    bench.channel.write(bench.session.opened(1, 1, FRAME_MAX, bytes(8), 0.0))
    bench.channel.carry_out(0.0)
    confirm(bench.session, bench.channel, 1)
    for now in range(5, 30, 5):
        assert not bench.session.overdue(float(now))
        log = bench.stage.logs["stage-0"]
        log.append((properties(message_id="other"), b""))
        over, _ = bench.session.tail_read("stage-0", bench.channel.read("stage-0", len(log) - 1), float(now))
        assert not over
    assert bench.session.overdue(30.0)


def test_messages_behind_the_end_of_a_read_are_acked() -> None:
    """Other programs may publish into the stage."""
    bench = Bench()
    bench.channel.write(bench.session.opened(1, 1, FRAME_MAX, bytes(8), 0.0))
    bench.channel.carry_out(0.0)
    confirm(bench.session, bench.channel, 1)
    bench.stage.logs["stage-0"].append((properties(message_id="other"), b""))
    over, frames = bench.session.tail_read("stage-0", bench.channel.read("stage-0", "last"), 0.0)
    assert over
    assert bench.session.tail_messages == 2
    assert parsed(frames) == [("ack", (2, True))]
    assert parsed(bench.session.passed_over([delivery(3)], 0.0)) == [("ack", (3, False))]


def test_a_stage_of_a_newer_version_ends_the_relay() -> None:
    """A new connection would not help: each one adds another marker to the stage."""
    bench = Bench()
    newer = marker(b"formerly").replace(b"\xff\x01\0\xff", b"\xff\x02\0\xff")
    bench.stage.logs["stage-0"].append((newer, b""))
    bench.channel.write(bench.session.opened(1, 1, FRAME_MAX, bytes(8), 0.0))
    bench.channel.carry_out(0.0)
    confirm(bench.session, bench.channel, 1)
    over, frames = bench.session.tail_read("stage-0", bench.channel.read("stage-0", "last"), 0.0)
    assert (over, parsed(frames)) == (False, [("ack", (2, True))])
    assert "version 2" in str(bench.session.error)
    assert bench.session.state is EpochState.READING


def test_the_prefetch_grows_as_sizes_become_known() -> None:
    """The prefetch is bounded in bytes."""
    bench = Bench(100, max_outstanding=2000, max_outstanding_bytes=100_000)
    session = bench.session
    assert session.prefetch == 8
    bench.begin()
    assert session.wants_subscription
    session.prefetch_granted = 8
    assert not session.wants_subscription
    bench.queue[0].body = b"x" * 1000
    bench.move(1)
    assert session.prefetch == 64
    assert session.wants_subscription
    session.prefetch_granted = 64
    assert session.prefetch in range(70, 100)
    assert not session.wants_subscription
    for _ in range(5):
        bench.move(8)
    assert session.prefetch > 100
    bench.queue[0].body = b"x" * 60_000
    bench.move(1)
    assert session.prefetch == 1
    assert session.wants_subscription
    assert not session.wants_pause
    bench.queue[0].body = b"x" * 60_000
    bench.move(1)
    assert session.wants_pause


def test_the_prefetch_shrinks_with_the_returns_of_a_delivery() -> None:
    """A queue may drop a message after a number of returns."""
    bench = Bench(max_outstanding=2000)
    bench.begin()
    bench.session.prefetch_granted = 2000
    for tag, (count, expected) in enumerate([(0, 2000), (1, 500), (2, 125), (5, 1), (300, 1), (70_000, 1)], 2):
        raw = properties(message_id=f"m{tag}", headers={"x-delivery-count": count})
        bench.session.delivered([delivery(tag, raw)], 0.0)
        assert bench.session.prefetch == expected
    bench.channel.confirms.extend(range(2, 8))
    bench.confirm()
    assert bench.session.prefetch == 2000


@pytest.mark.parametrize("count", ["5", -3])
def test_a_count_that_is_none_is_ignored(count: object) -> None:
    """A publisher can set the header to any value."""
    bench = Bench(max_outstanding=2000)
    bench.begin()
    bench.session.prefetch_granted = 2000
    bench.session.delivered([delivery(2, properties(message_id="m", headers={"x-delivery-count": count}))], 0.0)
    assert bench.session.prefetch == 2000


@pytest.mark.parametrize("value", [b"\x10x-delivery-countI\0\0\0\5", {"x-delivery-count": 5}])
@pytest.mark.parametrize(("counted", "expected"), [({"x-delivery-count": 1}, 500), ({}, 2000)])
def test_a_count_within_a_value_is_none(value: object, counted: dict[str, object], expected: int) -> None:
    """A value may hold the headers of another message."""
    bench = Bench(max_outstanding=2000)
    bench.begin()
    bench.session.prefetch_granted = 2000
    raw = properties(message_id="m", headers={"original": value, **counted})
    bench.session.delivered([delivery(2, raw)], 0.0)
    assert bench.session.prefetch == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([10] * 130, [64, 64, 2]),
        ([30_000] * 5, [2, 2, 1]),
        ([65_000, 65_000, 10], [1, 2]),
        ([100_000, 10, 10, 100_000], [1, 2, 1]),
    ],
)
def test_an_entry_is_bounded_in_messages_and_bytes(sizes: list[int], expected: list[int]) -> None:
    """A message above the limit of bytes has an entry of its own. The order is kept."""
    bench = Bench()
    bench.queue.extend(Queued(f"m{number}", bytes(size)) for number, size in enumerate(sizes))
    bench.begin()
    bench.move(len(sizes))
    entries = [unstaged(*each) for each in bench.stage.logs["stage-0"][1:]]
    assert [len(each.originals) for each in entries if each is not None] == expected
    assert [message.properties for message in bench.channel.unacked.values()] == bench.stage.originals()
    bench.confirm()
    assert bench.session.statistics.moved == len(sizes)
    assert not bench.channel.unacked


def test_an_entry_of_one_message_can_be_read_by_others() -> None:
    """With one message for each entry, the body and the id are those of the message."""
    bench = Bench(messages_per_entry=1)
    bench.queue.extend(Queued(f"m{number}", b"body %d" % number) for number in range(3))
    bench.begin()
    bench.move(3)
    found = [(Properties(raw).message_id, body) for raw, body in bench.stage.logs["stage-0"][1:]]
    assert found == [("m0", b"body 0"), ("m1", b"body 1"), ("m2", b"body 2")]
    bench.confirm()
    assert not bench.channel.unacked


def test_late_confirms_and_acks_without_a_channel_do_nothing() -> None:
    """They belong to an epoch that is over."""
    bench = Bench(1)
    bench.begin()
    bench.move(1)
    bench.end()
    bench.session.confirmed(1, 2, False)
    assert bench.session.acks(0.0) == b""
    assert (bench.session.outstanding, bench.session.held, bench.session.tail, bench.session.unconfirmed) == (
        0,
        0,
        0,
        0,
    )
    bench.session.failed()
    assert bench.session.state is EpochState.CLOSED


def delivery(tag: int, raw: bytes | None = None, key: str = "orders") -> RawDelivery:
    raw = properties(message_id=f"m{tag}") if raw is None else raw
    return RawDelivery("work-1", tag, True, "", key, raw, b"body")
