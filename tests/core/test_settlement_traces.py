"""Settlements of deliveries with a traced attempt are separate actions.

They come in addition to the frames.
"""

from __future__ import annotations

from itertools import chain

import pytest

from reliable_mq.codec import Properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Failed, Skipped, SkipReason
from reliable_mq.core.consumer.settlement import LogEvent, LogEventKind
from reliable_mq.core.retry.retry_headers import LONGEST_CONTEXT, encode_retry_headers
from tests.core.deliveries import delivery, failure
from tests.core.sessions import SteppedSession, fail, make, only_republish
from tests.core.test_retry_headers import through

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def begun(session: SteppedSession, count: int) -> list[Delivery]:
    session.delivered([delivery(tag) for tag in range(1, count + 1)], 0.0)
    return session.take_work()


def settled(session: SteppedSession) -> list[tuple[str, list[int], int]]:
    found = chain.from_iterable(session._take("settled", ()))
    return [(one.method, [item.delivery_tag for item in one.deliveries], one.total) for one in found]


def test_an_ack_of_several_names_those_that_are_traced() -> None:
    session = make(acks=AckBatcher(ack_every=4, ack_interval=5.0, prefetch=100))
    deliveries = begun(session, 6)
    for number in (0, 2, 4):
        deliveries[number].attempt_context = CONTEXT
    session.finished(deliveries[:4], 1.0)
    assert settled(session) == [("ack", [1, 3], 4)]
    session.finished(deliveries[4:], 2.0)
    session.take_output(10.0)
    assert settled(session) == [("ack", [5], 2)]


def test_an_ack_ahead_of_a_slow_handler_names_its_own() -> None:
    session = make()
    first, second, third = begun(session, 3)
    third.attempt_context = first.attempt_context = CONTEXT
    session.finished([third], 0.0)
    session.take_output(10.0)
    assert settled(session) == [("ack", [3], 1)]
    session.finished([first, second], 20.0)
    session.take_output(30.0)
    assert settled(session) == [("ack", [1], 2)]


def test_nothing_is_named_without_traces() -> None:
    session = make()
    session.finished(begun(session, 2), 0.0)
    assert session.take_output(10.0)
    assert settled(session) == []


def test_a_reject_is_named() -> None:
    session = make(max_attempts=1, dead_letters=False)
    first, second = begun(session, 2)
    first.attempt_context = CONTEXT
    session.finished([Failed(first, failure()), Failed(second, failure())], 0.0)
    session.take_output(0.0)
    assert settled(session) == [("reject", [1], 1)]


def test_a_requeue_is_named() -> None:
    session = make()
    first, second = begun(session, 2)
    first.attempt_context = CONTEXT
    session.stop(0.0)
    session.recalled([first, second])
    session.take_output(0.0)
    assert settled(session) == [("nack", [1], 2)]


def test_an_ack_that_goes_before_a_requeue_is_named() -> None:
    session = make()
    first, second = begun(session, 2)
    first.attempt_context = CONTEXT
    session.finished([first, Skipped(second, SkipReason.CANCELLED)], 0.0)
    session.take_output(0.0)
    assert settled(session) == [("ack", [1], 1)]
    session.take_output(10.0)
    assert settled(session) == []


def test_a_requeue_is_named_when_it_is_sent() -> None:
    session = make()
    [first] = begun(session, 1)
    first.attempt_context = CONTEXT
    session.finished([Skipped(first, SkipReason.CANCELLED)], 0.0)
    session.lost(1)
    session.take_output(10.0)
    assert settled(session) == []


def test_a_reject_on_a_lost_channel_is_not_named() -> None:
    session = make(max_attempts=1, dead_letters=False)
    [first] = begun(session, 1)
    first.attempt_context = CONTEXT
    session.finished([Failed(first, failure())], 0.0)
    session.lost(1)
    session.take_output(10.0)
    assert settled(session) == []


def test_a_lost_channel_settles_nothing() -> None:
    session = make()
    [first] = begun(session, 1)
    first.attempt_context = CONTEXT
    session.finished([first], 0.0)
    session.lost(1)
    session.take_output(10.0)
    assert settled(session) == []


def test_the_context_of_an_attempt_goes_through_a_delay_queue() -> None:
    item = delivery()
    item.attempt_context = CONTEXT
    out, _ = through(item)
    assert out.attempt_context == CONTEXT
    again = encode_retry_headers(out)
    assert again is not None
    assert CONTEXT.encode() in again


@pytest.mark.parametrize("context", ["x" * (LONGEST_CONTEXT + 1), None])
def test_another_value_is_no_context(context: str | None) -> None:
    item = delivery()
    item.attempt_context = context
    out, _ = through(item)
    assert out.attempt_context is None


def test_a_dead_letter_keeps_the_context_of_the_last_attempt() -> None:
    session = make(max_attempts=1)
    [first] = begun(session, 1)
    first.attempt_context = CONTEXT
    fail(session, first)
    assert Properties(only_republish(session).properties).headers[headers.TRACE_CONTEXT] == CONTEXT
    [notice] = session.take_notices()
    assert notice.ids == {"trace_id": CONTEXT[3:35], "span_id": CONTEXT[36:52]}


def test_a_log_line_without_a_trace_has_no_ids() -> None:
    item = delivery()
    assert LogEvent(LogEventKind.RETRIED, item, "").ids is None
    assert LogEvent(LogEventKind.PAUSED, None, "").ids is None
    item.attempt_context = "rubbish"
    assert LogEvent(LogEventKind.RETRIED, item, "").ids is None
