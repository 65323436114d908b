"""The tail of a stage: the start of each read, and the settled offset."""

from __future__ import annotations

import pytest

from reliable_mq.core.stage.envelope import UNKNOWN, Mark
from reliable_mq.core.stage.tail import SETTLED_AFTER, Moved, Settled, Tail

US, OTHER = b"ourepoch", b"formerly"
OUR_MARKER = Mark(UNKNOWN, US, True)
OLD_MARKER = Mark(UNKNOWN, OTHER, True)


def entry(low: int) -> Mark:
    return Mark(low, OTHER, False)


def read(tail: Tail, log: list[Mark | None], first: int = 0, chunk: int = 2, gap: int = -1) -> list[int | str]:
    """Read a log to the end, and return where each read began.

    The first offset is ``first``. There is no message at ``gap``.
    """
    begun: list[int | str] = []
    while tail.start is not None:
        begun.append(tail.start)
        start = first + len(log) - chunk if tail.start == "last" else tail.start
        for offset in range(max(start, first), first + len(log)):
            mark = log[offset - first]
            if offset == gap:
                continue
            if tail.read(offset, mark, [] if mark is None else [str(offset).encode()]):
                break
        else:
            raise AssertionError("the marker was not seen")
    return begun


def test_an_empty_stage_has_no_tail() -> None:
    """The marker is the first message of the stage."""
    tail = Tail(US)
    assert read(tail, [OUR_MARKER]) == ["last"]
    assert (tail.low, tail.marker, tail.identities) == (0, 0, [])


def test_the_mark_before_the_marker_says_where_to_begin() -> None:
    """The messages below the mark are settled."""
    tail = Tail(US)
    assert read(tail, [entry(0)] * 90 + [entry(88)] * 10 + [OUR_MARKER]) == ["last", 88]
    assert (tail.low, tail.marker) == (88, 100)
    assert tail.identities == [str(offset).encode() for offset in range(88, 100)]


def test_a_tail_within_the_last_chunk_is_read_once() -> None:
    """The chunk with the marker has the whole tail."""
    tail = Tail(US)
    assert read(tail, [entry(0), entry(0), entry(2), OUR_MARKER], chunk=2) == ["last"]
    assert tail.identities == [b"2"]


def test_behind_markers_it_looks_further_back() -> None:
    """Relays that died before they had read the tail left markers."""
    tail = Tail(US)
    log = [entry(0)] * 100 + [entry(99)] + [OLD_MARKER] * 200 + [OUR_MARKER]
    assert read(tail, log) == ["last", 301 - 64, 0]
    assert (tail.low, tail.identities) == (99, [b"99", b"100"])


def test_messages_of_others_have_no_mark() -> None:
    """They are no entries, and have no information."""
    tail = Tail(US)
    assert read(tail, [entry(0), None, None, None, OUR_MARKER]) == ["last", 0]
    assert tail.identities == [b"0"]


def test_a_stage_of_markers_alone_has_no_tail() -> None:
    """No relay has moved a message yet."""
    tail = Tail(US)
    assert read(tail, [OLD_MARKER] * 5 + [OUR_MARKER]) == ["last", 0]
    assert (tail.low, tail.identities) == (0, [])
    assert tail.is_empty
    read(tail := Tail(US), [OLD_MARKER, Mark(1, OTHER, True), OUR_MARKER])
    assert not tail.is_empty  # all entries before the second marker are settled


def test_a_tail_that_retention_has_cut_is_read_from_there() -> None:
    """The stream begins later than requested."""
    tail = Tail(US)
    assert read(tail, [entry(10)] * 50 + [OUR_MARKER], first=1000) == ["last", 10]
    assert len(tail.identities) == 50
    tail = Tail(US)
    assert read(tail, [OLD_MARKER] * 50 + [OUR_MARKER], first=1000) == ["last", 1050 - 64, 1050 - 1024]
    assert tail.identities == []


@pytest.mark.parametrize("between", [OLD_MARKER, entry(90)])
def test_a_gap_where_a_read_begins_is_no_cut(between: Mark) -> None:
    """RabbitMQ leaves a gap when it rolls a segment. The entries before it exist."""
    tail = Tail(US)
    log = [entry(90)] * 136 + [OLD_MARKER] + [between] * 60 + [OLD_MARKER] * 3 + [OUR_MARKER]
    assert read(tail, log, gap=136)[:2] == ["last", 136]
    assert tail.low == 90
    assert tail.identities[:46] == [str(offset).encode() for offset in range(90, 136)]


def test_markers_of_others_do_not_end_a_read() -> None:
    """Only our marker is behind all publishes of earlier epochs."""
    tail = Tail(US)
    assert not tail.read(0, OLD_MARKER)
    assert not tail.read(1, entry(0), [b"1"])
    assert tail.read(2, OUR_MARKER)
    assert tail.identities == [b"1"]


def test_low_is_that_of_the_tail_until_it_is_resolved() -> None:
    """A later relay needs the tail of this relay too."""
    settled = Settled(5, 100)
    number = settled.published()
    settled.acked(number, 0.0)
    assert settled.low(SETTLED_AFTER, resolved=False) == 5
    assert settled.low(SETTLED_AFTER, resolved=True) == 102


def test_an_ack_counts_after_a_while() -> None:
    """A queue may lose an ack until then."""
    settled = Settled(0, 100)
    numbers = [settled.published() for _ in range(4)]
    assert numbers == [1, 2, 3, 4]
    settled.acked(1, 0.0)
    settled.acked(2, 1.0)
    assert settled.low(SETTLED_AFTER - 0.1, resolved=True) == 101
    assert settled.low(SETTLED_AFTER, resolved=True) == 102
    assert settled.low(SETTLED_AFTER + 1.0, resolved=True) == 103


def test_acks_in_a_steady_stream_count_as_well() -> None:
    """Each ack counts at the right time, however close together they come."""
    settled = Settled(0, 0)
    for number in range(1, 1001):
        assert settled.published() == number
        settled.acked(number, number * 0.01)
    assert settled.low(SETTLED_AFTER + 5.0, resolved=True) == pytest.approx(500, abs=30)
    assert settled.low(SETTLED_AFTER + 5.0, resolved=True) <= 501


def test_a_gap_holds_low_back() -> None:
    """The first publish is not acked."""
    settled = Settled(0, 0)
    for _ in range(3):
        settled.published()
    settled.acked(2, 0.0)
    settled.acked(3, 0.0)
    assert settled.low(SETTLED_AFTER, resolved=True) == 1
    settled.acked(1, 50.0)
    assert settled.low(50.0 + SETTLED_AFTER, resolved=True) == 4


def test_a_message_comes_again_if_it_was_returned_since() -> None:
    moved = Moved(2)
    moved.add(1, 3)
    assert not moved.has(1, 3)
    assert moved.has(1, 4)
    assert not moved.has(2, 4)


def test_the_latest_acked_messages_are_kept_and_all_unacked_ones() -> None:
    moved = Moved(2)
    for key in (1, 1, 2, 3, 4):
        moved.add(key, 0)
    for key in (1, 2, 3):
        moved.acked(key)
    assert [key for key in range(6) if moved.has(key, 1)] == [1, 2, 3, 4]
    for key in (1, 4):
        moved.acked(key)
    assert [key for key in range(6) if moved.has(key, 1)] == [1, 4]
