"""The deliveries of each batch, and the time of their ack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.queue_batches import Batches, QueuePosition, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

SESSION = "here"
START = QueuePosition.first(["a", "b"])
LARGE = 1 << 30


def deliveries(first: int, count: int, queue: str = "a", size: int = 10) -> list[Delivery]:
    source = ChannelGeneration(1, 1, queue)
    made = [Delivery("tag", first + number, False, "", queue, b"\0\0", b"x" * size) for number in range(count)]
    for delivery in made:
        delivery.came_from(source)
    return made


def tags(of: Sequence[Delivery]) -> list[int]:
    return [delivery.delivery_tag for delivery in of]


def plan(batches: Batches, start: QueuePosition, most: int = LARGE, most_bytes: int = LARGE) -> QueuePosition:
    return batches.plan(start, most=most, most_bytes=most_bytes)


def test_a_batch_is_acked_once_it_is_committed_and_only_once() -> None:
    """Planning the next batch acks nothing."""
    batches = Batches(SESSION)
    batches.arrived(deliveries(1, 5))
    first = plan(batches, START, most=3)
    assert tags(batches.deliveries(START, first)) == [1, 2, 3]
    assert batches.committed(START) == []
    assert tags(batches.committed(first)) == [1, 2, 3]
    assert batches.committed(first) == []
    second = plan(batches, first)
    assert tags(batches.deliveries(first, second)) == [4, 5]
    assert tags(batches.committed(second)) == [4, 5]
    assert batches.held == 0


def test_a_batch_that_is_planned_again_is_the_same() -> None:
    """Later deliveries wait for the next batch."""
    batches = Batches(SESSION)
    batches.arrived(deliveries(1, 2))
    end = plan(batches, START)
    batches.arrived(deliveries(3, 2))
    assert batches.knows(START)
    assert plan(batches, START) == end
    assert tags(batches.deliveries(START, end)) == [1, 2]


def test_without_deliveries_there_is_no_batch() -> None:
    """The end equals the start."""
    batches = Batches(SESSION)
    assert plan(batches, START) == START
    assert batches.deliveries(START, START) == []


def test_a_batch_of_another_process_is_empty_and_acks_nothing() -> None:
    """This holds even if its numbers match a batch of this process."""
    batches = Batches(SESSION)
    batches.arrived(deliveries(1, 5))
    end = plan(batches, START)
    elsewhere = QueuePosition("elsewhere", end.sequence, end.queues)
    assert batches.deliveries(START, elsewhere) == []
    assert batches.committed(elsewhere) == []
    assert tags(batches.deliveries(START, end)) == [1, 2, 3, 4, 5]


def test_batches_continue_at_the_earlier_position_after_restart() -> None:
    """Counts continue from the earlier position."""
    batches = Batches(SESSION)
    batches.arrived(deliveries(1, 5))
    before = QueuePosition("before", 100, {"a": 60, "b": 40})
    end = plan(batches, before)
    assert end == QueuePosition(SESSION, 105, {"a": 65, "b": 40})
    assert tags(batches.deliveries(before, end)) == [1, 2, 3, 4, 5]


def test_a_batch_ends_before_it_has_too_many_bytes() -> None:
    """A single delivery that exceeds the limit is a batch by itself."""
    batches = Batches(SESSION)
    batches.arrived([*deliveries(1, 1, size=5000), *deliveries(2, 4, size=100)])
    two = 2 * size_of(deliveries(1, 1, size=100)[0])
    first = plan(batches, START, most_bytes=two)
    assert tags(batches.deliveries(START, first)) == [1]
    second = plan(batches, first, most_bytes=two)
    assert tags(batches.deliveries(first, second)) == [2, 3]


def test_a_queue_of_which_enough_was_taken_is_passed_over() -> None:
    """The other queues continue, and the skipped deliveries keep their place."""
    batches = Batches(SESSION)
    batches.arrived([*deliveries(1, 2, "a"), *deliveries(3, 2, "b"), *deliveries(5, 1, "a")])
    batches.remaining = {"a": 1, "b": 9}
    assert batches.waits()
    end = plan(batches, START, most=9)
    assert tags(batches.deliveries(START, end)) == [1, 3, 4]
    assert end.queues == {"a": 1, "b": 2}
    assert tags(batches.waiting) == [2, 5]
    assert batches.remaining == {"a": 0, "b": 7}
    assert not batches.waits()


def test_a_queue_counts_as_planned_until_its_batch_is_committed() -> None:
    """The batches of other queues do not matter."""
    batches = Batches("s")
    batches.arrived([*deliveries(1, 2, "a"), *deliveries(3, 2, "b")])
    first = plan(batches, START, most=2)
    assert batches.planned("a")
    assert not batches.planned("b")
    batches.committed(first)
    second = plan(batches, first)
    assert not batches.planned("a")
    assert batches.planned("b")
    batches.committed(second)
    assert not batches.planned("b")


def test_with_the_channel_goes_what_is_in_no_batch() -> None:
    """Deliveries in a batch can still be read; they will be redelivered."""
    batches = Batches(SESSION)
    batches.arrived(deliveries(1, 3))
    end = plan(batches, START, most=2)
    assert tags(batches.lost()) == [1, 2]
    assert not batches.waits()
    assert tags(batches.deliveries(START, end)) == [1, 2]
    assert tags(batches.committed(end)) == [1, 2]
    assert batches.held == 0


def test_at_the_end_everything_is_requeued() -> None:
    """This includes uncommitted batches and waiting deliveries."""
    batches = Batches(SESSION)
    batches.arrived(deliveries(1, 3))
    end = plan(batches, START, most=2)
    assert tags(batches.take_all()) == [1, 2, 3]
    assert batches.held == 0
    assert batches.committed(end) == []


def test_the_horizon_is_all_that_is_known_to_be_there() -> None:
    """It is the sum of waiting deliveries and ready messages at the broker."""
    batches = Batches(SESSION)
    batches.arrived(deliveries(1, 3))
    plan(batches, START, most=2)
    assert batches.horizon({"a": 10, "b": 5}) == QueuePosition(SESSION, 18, {"a": 13, "b": 5})


def test_positions_survive_the_checkpoint() -> None:
    """A position is JSON. Positions of other sources are refused."""
    position = QueuePosition(SESSION, 3, {"a": 1, "b": 2})
    assert QueuePosition.parse(json.loads(json.dumps(position.as_json()))) == position
    for other in ({"s": 5}, {"session": 1, "sequence": 2, "queues": {}}, None, []):
        with pytest.raises(ConfigurationError, match="checkpointLocation of its own"):
            QueuePosition.parse(other)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(1, 6)),
            st.tuples(st.just("plan"), st.integers(1, 5)),
            st.tuples(st.just("commit"), st.just(0)),
            st.tuples(st.just("lose"), st.just(0)),
        )
    )
)
def test_every_delivery_is_read_in_order_and_acked_at_most_once(steps: list[tuple[str, int]]) -> None:
    """This holds for any order of events, and the held bytes match the deliveries."""
    batches, tag = Batches(SESSION), 1
    start = end = START
    read: list[int] = []
    acked: list[int] = []
    for step, number in steps:
        if step == "arrive":
            batches.arrived(deliveries(tag, number))
            tag += number
        elif step == "plan" and end == start:
            end = plan(batches, start, most=number)
            read += tags(batches.deliveries(start, end))
        elif step == "commit":
            acked += tags(batches.committed(end))
            start = end
        elif step == "lose":
            batches.lost()
        here = [*batches.waiting, *batches.deliveries(start, end)]
        assert batches.held == sum(map(size_of, here))
    assert read == sorted(set(read))
    assert acked == read[: len(acked)]
