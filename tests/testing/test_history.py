"""The checker of histories accepts valid histories and rejects invalid ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.errors import ConfigurationError, PublishNacked, PublishUnconfirmed, UsageError
from reliable_mq.testing.history import History, OperationKind, OperationOutcome


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Story:
    """A history in lines: each has the actor, the start and end, and the outcome."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.history = History(clock=self.clock)

    def operation(
        self,
        kind: OperationKind,
        message_id: str,
        start: float,
        end: float | None,
        outcome: OperationOutcome = OperationOutcome.OK,
        *,
        by: str = "",
        key: str | None = None,
        timeout: float = math.inf,
    ) -> None:
        """Record one operation. An `end` of None means that it never ends."""
        self.clock.now = start
        operation = self.history.begin(kind, message_id, by=by, key=key, timeout=timeout)
        if end is not None:
            self.clock.now = end
            operation.end(outcome)

    def publish(self, message_id: str, start: float, end: float | None, **more: object) -> None:
        self.operation(OperationKind.PUBLISH, message_id, start, end, **more)  # type: ignore[arg-type]

    def handle(self, message_id: str, start: float, end: float | None = None, **more: object) -> None:
        """Record the handling of a message and its effect."""
        self.operation(OperationKind.HANDLE, message_id, start, start + 0.1 if end is None else end, **more)  # type: ignore[arg-type]
        self.operation(OperationKind.EFFECT, message_id, start, start)

    def window(self, begin: float, end: float, **more: object) -> None:
        self.clock.now = begin
        with self.history.without_majority(**more):  # type: ignore[arg-type]
            self.clock.now = end


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_history_without_faults_is_allowed(story: Story) -> None:
    for number in range(10):
        story.publish(f"m{number}", number, number + 1, key="k", timeout=5)
    for number in range(10):
        story.handle(f"m{number}", 20 + number, by="one")
        story.operation(OperationKind.ACK, f"m{number}", 20.5 + number, 20.5 + number, by="one")

    result = story.history.result()

    result.check(effects_once=True, ordered=True, exclusive=True)
    assert (result.balance.confirmed, result.balance.effects) == (10, 10)


def test_a_confirmed_message_that_never_came_out_is_caught(story: Story) -> None:
    story.publish("a", 0, 1)

    with pytest.raises(AssertionError, match=r"lost: a$"):
        story.history.result().check()


def test_a_message_that_was_dead_lettered_or_left_is_not_lost(story: Story) -> None:
    story.publish("a", 0, 1)
    story.publish("b", 0, 1)
    story.history.account.dead_lettered(["a"])
    story.history.account.left(["b"])

    story.history.result().check()


def test_a_message_that_nobody_published_is_caught(story: Story) -> None:
    story.handle("a", 1)

    with pytest.raises(AssertionError, match=r"unexpected: a$"):
        story.history.result().check()


@pytest.mark.parametrize("outcome", [OperationOutcome.FAILED, OperationOutcome.UNKNOWN])
def test_a_message_that_was_not_confirmed_may_be_missing(story: Story, outcome: OperationOutcome) -> None:
    story.publish("a", 0, 1, outcome=outcome)
    story.publish("b", 0, None)

    balance = story.history.result().balance

    balance.check()
    assert balance.failed == (outcome is OperationOutcome.FAILED)


def test_a_second_effect_is_caught(story: Story) -> None:
    story.publish("a", 0, 1)
    story.handle("a", 2)
    story.handle("a", 3)

    story.history.result().check()
    with pytest.raises(AssertionError, match=r"more than one effect: a$"):
        story.history.result().check(effects_once=True)


def test_a_handler_that_failed_has_handled_nothing(story: Story) -> None:
    story.publish("a", 0, 1)
    with pytest.raises(RuntimeError), story.history.during(OperationKind.HANDLE, "a"):
        raise RuntimeError

    with pytest.raises(AssertionError, match=r"lost: a$"):
        story.history.result().check()


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (PublishNacked("it was nacked"), 1),
        (PublishUnconfirmed("not within 30 s", sent=False), 1),
        (PublishUnconfirmed("not within 30 s"), 0),
        (KeyboardInterrupt(), 0),
    ],
)
def test_a_publish_fails_only_if_the_broker_does_not_have_it(story: Story, error: BaseException, failed: int) -> None:
    with pytest.raises(type(error)), story.history.during(OperationKind.PUBLISH, "a"):
        raise error
    story.handle("a", 2)

    balance = story.history.result().balance

    assert (balance.failed, len(balance.refuted), len(balance.recovered)) == (failed, failed, 1 - failed)


def test_a_block_that_ends_well_has_handled_it(story: Story) -> None:
    story.publish("a", 0, 1)
    with story.history.during(OperationKind.HANDLE, "a"), story.history.during(OperationKind.EFFECT, "a"):
        pass

    story.history.result().check(effects_once=True)


def test_the_first_outcome_counts(story: Story) -> None:
    operation = story.history.begin(OperationKind.PUBLISH, "a")
    operation.end(OperationOutcome.UNKNOWN)
    operation.end(OperationOutcome.OK)

    balance = story.history.result().balance

    assert (balance.attempted, balance.confirmed) == (1, 0)


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_a_call_that_ends_past_its_deadline_is_caught(story: Story) -> None:
    story.publish("a", 0, 5.0, outcome=OperationOutcome.UNKNOWN, timeout=5)
    story.publish("b", 0, 5.1, outcome=OperationOutcome.UNKNOWN, timeout=5)

    result = story.history.result()

    assert [each.message_id for each in result.late] == ["b"]
    with pytest.raises(AssertionError, match="past their deadline: <publish b"):
        result.check()
    story.history.result(tolerance=1).check()


def test_a_call_that_never_ends_is_caught_after_its_deadline(story: Story) -> None:
    story.publish("a", 0, None, timeout=5)
    story.clock.now = 5
    story.history.result().check()

    story.clock.now = 6
    with pytest.raises(AssertionError, match="past their deadline: <publish a"):
        story.history.result().check()


# -- windows without a majority ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "caught"),
    [
        (0, 9.9, False),  # ended before the window
        (0, 10, False),  # ended at the start of the window, but the confirm may have been sent before
        (0, 11.9, False),
        (0, 12, True),  # no confirm takes this long
        (10, 10, True),  # began in the window, so no confirm was sent before
        (11, 11.5, True),
        (11, 19.9, True),
        (11, 20, False),  # ended after the window
        (0, 25, False),
    ],
)
def test_a_confirm_inside_a_window_without_majority_is_caught(
    story: Story, start: float, end: float, caught: bool
) -> None:
    story.publish("a", start, end)
    story.handle("a", 30)
    story.window(10, 20, uncertainty=2)

    assert bool(story.history.result().without_majority) is caught
    if caught:
        with pytest.raises(AssertionError, match="confirmed without a majority: <publish a"):
            story.history.result().check()


def test_a_failure_inside_a_window_is_no_confirm(story: Story) -> None:
    story.publish("a", 11, 12, outcome=OperationOutcome.FAILED)
    story.publish("b", 11, 12, outcome=OperationOutcome.UNKNOWN)
    story.window(10, 20)

    story.history.result().check()


def test_a_window_concerns_those_who_are_cut_off(story: Story) -> None:
    story.publish("a", 11, 12, by="majority")
    story.publish("b", 11, 12, by="minority")
    story.window(10, 20, by=["minority"])

    assert [each.message_id for each in story.history.result().without_majority] == ["b"]


def test_a_single_name_is_no_collection_of_names(story: Story) -> None:
    with pytest.raises(ConfigurationError, match=r"by must be a collection: write \['minority'\]"):
        story.window(10, 20, by="minority")
    with pytest.raises(ConfigurationError, match=r"write \['one'\]"):
        story.history.longest_silence(OperationKind.PUBLISH, 0, by="one")


def test_a_window_that_ends_with_an_exception_is_judged(story: Story) -> None:
    def until_a_publish_fails() -> None:
        with story.history.without_majority():
            story.clock.now = 20
            raise PublishUnconfirmed("not within 10 s")

    story.publish("a", 11, 12)
    story.clock.now = 10
    with pytest.raises(PublishUnconfirmed):
        until_a_publish_fails()

    assert [each.message_id for each in story.history.result().without_majority] == ["a"]


# -- order -------------------------------------------------------------------------------------------------------------


def handled_in(story: Story, order: str) -> bool:
    """Return whether messages a to e of one key may be handled in this order."""
    for number, message_id in enumerate("abcde"):
        story.publish(message_id, number, number + 1, key="k")
    for number, message_id in enumerate(order):
        story.handle(message_id, 10 + number)
    return not story.history.result().out_of_order


@pytest.mark.parametrize("order", ["abcde", "abcabcde", "ace", "abcdea", "aabbccddee"])
def test_redeliveries_and_gaps_keep_the_order(story: Story, order: str) -> None:
    assert handled_in(story, order)


@pytest.mark.parametrize(("order", "swaps"), [("bacde", 1), ("abced", 1), ("abdcc", 1), ("edcba", 4)])
def test_a_first_handling_out_of_order_is_caught(story: Story, order: str, swaps: int) -> None:
    assert not handled_in(story, order)
    result = story.history.result()
    assert len(result.out_of_order) == swaps
    for message_id in set("abcde") - set(order):
        story.handle(message_id, 30)
    with pytest.raises(AssertionError, match=r"out of order: Swap\(key='k'"):
        story.history.result().check(ordered=True)


def test_order_is_checked_per_key_and_not_without_a_key(story: Story) -> None:
    for message_id, key in (("a", "one"), ("b", "other"), ("c", None), ("d", None)):
        story.publish(message_id, 0, 1, key=key)
    for number, message_id in enumerate("dcba"):
        story.handle(message_id, 10 + number)

    story.history.result().check(ordered=True)


def test_the_order_of_publishes_without_keys_is_not_checked(story: Story) -> None:
    for message_id in "ab":
        story.publish(message_id, 0, 1)
    for number, message_id in enumerate("ba"):
        story.handle(message_id, 10 + number)

    with pytest.raises(UsageError, match="no publish has a key"):
        story.history.result().check(ordered=True)


def test_a_block_may_have_an_ordering_key(story: Story) -> None:
    for message_id in "ab":
        with story.history.during(OperationKind.PUBLISH, message_id, key="k"):
            pass
    for number, message_id in enumerate("ba"):
        story.handle(message_id, 10 + number)

    assert story.history.result().out_of_order == (("k", "b", "a"),)


# -- one consumer at a time --------------------------------------------------------------------------------------------


def test_handlers_of_two_consumers_at_once_are_caught(story: Story) -> None:
    story.publish("a", 0, 1)
    story.publish("b", 0, 1)
    story.handle("a", 10, 20, by="one")
    story.handle("b", 19, 21, by="other")

    result = story.history.result()

    result.check()
    with pytest.raises(AssertionError, match="handled by two consumers at once: "):
        result.check(exclusive=True)


@pytest.mark.parametrize("names", [("", ""), ("one", ""), ()])
def test_handlers_without_a_name_are_not_checked_for_overlaps(story: Story, names: tuple[str, ...]) -> None:
    story.publish("a", 0, None)
    for name in names:
        story.handle("a", 10, 20, by=name)
    story.clock.now = 30

    with pytest.raises(UsageError, match="record every handler with by="):
        story.history.result().check(exclusive=True)


def test_a_handler_that_never_ends_overlaps_all_that_follow(story: Story) -> None:
    story.publish("a", 0, 1)
    story.operation(OperationKind.HANDLE, "a", 10, None, by="one")
    story.handle("a", 100, by="other")

    assert len(story.history.result().overlapping) == 1


def test_handlers_of_one_consumer_or_in_sequence_are_allowed(story: Story) -> None:
    story.publish("a", 0, 1)
    story.handle("a", 10, 20, by="one")
    story.handle("a", 15, 20, by="one")
    story.handle("a", 20, 30, by="other")

    story.history.result().check(exclusive=True)


def test_an_overlap_is_allowed_shortly_after_a_lost_connection(story: Story) -> None:
    story.publish("a", 0, 1)
    story.handle("a", 10, 30, by="one")
    story.clock.now = 11
    with story.history.disturbed(after=2):
        story.clock.now = 13
    story.handle("a", 14.9, 16, by="other")
    story.history.result().check(exclusive=True)

    story.handle("a", 17, 18, by="other")
    assert len(story.history.result().overlapping) == 1


def test_an_overlap_is_allowed_after_a_block_that_raised(story: Story) -> None:
    story.publish("a", 0, 1)
    story.handle("a", 10, 30, by="one")
    story.clock.now = 11
    with pytest.raises(TimeoutError), story.history.disturbed(after=2):
        raise TimeoutError
    story.handle("a", 12, 16, by="other")

    story.history.result().check(exclusive=True)


# -- acks --------------------------------------------------------------------------------------------------------------


def test_an_ack_before_its_handler_has_ended_is_caught(story: Story) -> None:
    story.publish("a", 0, 1)
    story.handle("a", 10, 12, by="one")
    story.operation(OperationKind.ACK, "a", 12, 12, by="one")
    story.history.result().check()

    story.publish("b", 0, 1)
    story.handle("b", 10, 12, by="one")
    story.operation(OperationKind.ACK, "b", 11, 11, by="one")
    with pytest.raises(AssertionError, match="acked before they were handled: <ack b"):
        story.history.result().check()


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_longest_silence_lasts_until_a_successful_operation(story: Story) -> None:
    for end in (1, 2, 3, 4, 9, 9.5, 20):
        story.publish(f"m{end}", 0, end)
    story.publish("failed", 0, 5, outcome=OperationOutcome.FAILED)

    assert story.history.longest_silence(OperationKind.PUBLISH, 3, until=10) == 5
    assert story.history.longest_silence(OperationKind.PUBLISH, 3, until=19) == 9.5
    assert story.history.longest_silence(OperationKind.PUBLISH, 3) == 10.5
    assert story.history.longest_silence(OperationKind.PUBLISH, 3, until=10, by=["another"]) == math.inf
    assert story.history.longest_silence(OperationKind.PUBLISH, 20) == math.inf
    assert story.history.longest_silence(OperationKind.HANDLE, 0) == math.inf


def test_counts_fit_one_line_and_a_long_list_is_shortened(story: Story) -> None:
    for number in range(7):
        story.publish(f"m{number}", 0, 9, outcome=OperationOutcome.UNKNOWN, timeout=1)

    result = story.history.result()

    assert str(result).endswith("late 7, confirmed without majority 0, out of order 0, overlapping 0")
    with pytest.raises(AssertionError, match=r"and 2 more$"):
        result.check()


# -- properties --------------------------------------------------------------------------------------------------------

TIMES = st.integers(0, 40)


@given(st.lists(st.tuples(TIMES, TIMES)), TIMES, TIMES, st.integers(0, 5))
def test_what_is_caught_in_a_window_was_certainly_sent_in_it(
    publishes: list[tuple[int, int]], begin: int, length: int, uncertainty: int
) -> None:
    story = Story()
    for number, (start, duration) in enumerate(publishes):
        story.publish(str(number), start, start + duration)
    story.window(begin, begin + length, uncertainty=uncertainty)

    caught = {int(each.message_id) for each in story.history.result().without_majority}

    for number, (start, duration) in enumerate(publishes):
        end = start + duration
        inside = begin <= end < begin + length
        assert (number in caught) == (inside and (start >= begin or end - begin >= uncertainty))


@given(st.lists(st.integers(0, 9)))
def test_an_order_is_allowed_exactly_if_first_handlings_ascend(order: list[int]) -> None:
    story = Story()
    for number in range(10):
        story.publish(str(number), number, number + 1, key="k")
    for time, number in enumerate(order):
        story.handle(str(number), 20 + time)

    first = list(dict.fromkeys(order))
    assert (not story.history.result().out_of_order) == (first == sorted(first))


@given(st.lists(st.tuples(st.sampled_from("xyz"), TIMES, st.integers(1, 10))))
def test_overlapping_handlers_are_found_wherever_there_are_any(handles: list[tuple[str, int, int]]) -> None:
    story = Story()
    for number, (by, start, duration) in enumerate(sorted(handles, key=lambda handle: handle[1])):
        story.operation(OperationKind.HANDLE, str(number), start, start + duration, by=by)

    pairs = sum(
        one[0] != other[0] and max(one[1], other[1]) < min(one[1] + one[2], other[1] + other[2])
        for number, one in enumerate(handles)
        for other in handles[:number]
    )
    assert len(story.history.result().overlapping) == pairs


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(OperationOutcome), st.booleans())))
def test_its_account_is_the_sum_of_its_operations(publishes: list[tuple[str, OperationOutcome, bool]]) -> None:
    story = Story()
    for message_id, outcome, handled in publishes:
        story.publish(message_id, 0, 1, outcome=outcome)
        if handled:
            story.handle(message_id, 2)

    balance = story.history.result().balance

    confirmed = {message_id for message_id, outcome, _ in publishes if outcome is OperationOutcome.OK}
    drained = {message_id for message_id, _, handled in publishes if handled}
    assert balance.lost == confirmed - drained
    assert balance.confirmed == len(confirmed)
    assert balance.effects == sum(handled for _, _, handled in publishes)
