"""The properties of a dead letter of any origin, and the message that is replayed.

No header makes a dead letter unreadable.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import Message
from reliable_mq.codec import Properties, encode_properties, encode_table, join_properties, rewrite_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.retry.dead_letters import DeadLetters
from reliable_mq.core.retry.retry_headers import encode_retry_headers
from reliable_mq.deadletters import DeadMessage, Origin
from tests.core.deliveries import delivery, failures, short

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LATER = datetime(2026, 1, 3, tzinfo=UTC)


def dead(properties: bytes, body: bytes = b"body", *, redelivered: bool = False) -> DeadMessage:
    delivery = Delivery("", 1, redelivered, "", "orders.dead", properties, body)
    delivery.came_from(ChannelGeneration(1, 1, "orders.dead"))
    return DeadMessage(delivery, 1)


def with_headers(table: dict[str, object]) -> DeadMessage:
    return dead(encode_properties(Message(b"", headers=table, message_id="m")))  # type: ignore[arg-type]


def test_a_body_that_was_cut_is_not_replayed() -> None:
    """The Spark sink truncates large bodies; only the source has the complete one."""
    assert "its body had 5 bytes" in with_headers({headers.ORIGINAL_SIZE: 5}).unreadable
    assert with_headers({headers.ORIGINAL_SIZE: 0}).unreadable == ""


def test_properties_that_travel_in_a_header_are_not_replayed() -> None:
    """They may be cut, and the copy would not have them."""
    assert "its properties were broken" in with_headers({headers.ORIGINAL_PROPERTIES: b"\x20"}).unreadable


def test_what_was_in_no_queue_has_the_exchange_of_its_publish() -> None:
    """For example, a row that a Spark sink could not send."""
    table = {headers.FORMAT: 1, headers.ORIGINAL_EXCHANGE: "events", headers.ORIGINAL_ROUTING_KEY: "k"}
    assert with_headers(table).origin == Origin("", "events", "k")


def test_our_own_dead_letters_are_read_with_our_own_names() -> None:
    original = Delivery("", 1, False, "shop", "order.new", encode_properties(Message(b"", message_id="m")), b"x")
    original.came_from(ChannelGeneration(1, 1, "orders"))
    made = DeadLetters("orders.dead", consumer="shop", version="1.2.3").make(original, "too late")
    message = dead(made.properties)
    assert message.origin == Origin("orders", "shop", "order.new")
    assert (message.reason, message.consumer, message.package_version) == ("too late", "shop", "1.2.3")
    assert (message.attempts, message.message_id, message.cause) == (0, "m", "too late")


def test_what_the_last_attempt_raised_is_told() -> None:
    message = with_headers(
        {
            headers.FORMAT: 1,
            headers.ORIGINAL_QUEUE: "q",
            headers.EXCEPTION_TYPE: "app.Error",
            headers.EXCEPTION_MESSAGE: "no",
            headers.FIRST_FAILURE: AT,
            headers.LAST_FAILURE: LATER,
            headers.ATTEMPTS: 3,
        }
    )
    assert (message.cause, message.exception_message, message.attempts) == ("app.Error", "no", 3)
    assert (message.first_failure, message.last_failure, message.died_at) == (AT, LATER, LATER)
    assert message.origin == Origin("q")


def death(queue: str, reason: str, when: datetime, keys: list[str] | None = None) -> dict[str, object]:
    routing = ["k"] if keys is None else keys
    return {"queue": queue, "reason": reason, "time": when, "exchange": "e", "routing-keys": routing, "count": 9}


def test_the_death_headers_of_rabbitmq_give_origin_and_reason() -> None:
    """The first death has the origin, the last one has the time and the reason."""
    message = with_headers(
        {
            "x-death": [death("wait", "expired", LATER, ["w"]), death("work", "rejected", AT, ["a", "b"])],
            "x-first-death-queue": "work",
            "x-first-death-exchange": "shop",
            "x-first-death-reason": "rejected",
        }
    )
    assert message.origin == Origin("work", "shop", "a")
    assert (message.reason, message.died_at, message.attempts) == ("expired", LATER, None)
    assert with_headers({"x-death": [death("work", "maxlen", AT)]}).origin == Origin("work", "e", "k")
    assert with_headers({"x-first-death-queue": "work"}).origin == Origin("work", None, None)
    assert with_headers({"x-first-death-reason": "expired"}).reason == "expired"


def test_our_headers_beat_the_brokers_unless_of_a_newer_format() -> None:
    table = {
        headers.ORIGINAL_QUEUE: "ours",
        headers.DEAD_LETTER_REASON: "r",
        "x-death": [death("theirs", "expired", AT)],
    }
    assert with_headers({headers.FORMAT: 1, **table}).origin == Origin("ours")
    newer = with_headers({headers.FORMAT: 2, **table})
    assert "format 2" in newer.unreadable
    assert newer.origin == Origin("theirs", "e", "k")
    assert with_headers(table).unreadable == ""


def test_the_broker_says_where_a_replayed_message_died() -> None:
    """Our headers are from before the replay: they are right about the first publish only."""
    table = {
        headers.FORMAT: 1,
        headers.ORIGINAL_QUEUE: "ours",
        headers.ORIGINAL_EXCHANGE: "shop",
        headers.ORIGINAL_ROUTING_KEY: "order.new",
    }
    assert with_headers(table).origin == Origin("ours", "shop", "order.new")
    died = with_headers({**table, "x-death": [death("theirs", "expired", AT)]})
    assert died.origin == Origin("theirs", "shop", "order.new")


# -- a message that had waited in a queue of ours ----------------------------------------------------------------------

WAITED = (("orders", "rejected"), ("orders.retry.1000", "expired"))
QUARANTINED = (("orders.quarantine", "rejected"),)
PLACE = {headers.ORIGINAL_QUEUE: "orders", headers.ORIGINAL_EXCHANGE: "shop", headers.ORIGINAL_ROUTING_KEY: "order.new"}


def waited(item: Delivery, deaths: tuple[tuple[str, str], ...] = WAITED, *, suspect: bool = False) -> DeadMessage:
    """Return what the broker dead-letters after an attempt has failed. The latest death comes first."""
    item.set_failures(failures(2, at=AT.timestamp()))
    packed = encode_retry_headers(item, suspect=suspect)
    assert packed is not None
    table = {
        "x-death": [
            {"queue": queue, "reason": reason, "time": LATER, "exchange": "", "routing-keys": [queue]}
            for queue, reason in deaths
        ],
        "x-first-death-queue": deaths[-1][0],
        "x-first-death-reason": deaths[-1][1],
        "x-first-death-exchange": "",
        "x-last-death-reason": deaths[0][1],
    }
    return dead(rewrite_properties(packed, set_headers=table))


@pytest.mark.parametrize(("deaths", "suspect"), [(WAITED, False), (WAITED, True), (QUARANTINED, True)])
def test_what_waited_has_its_origin_from_before(deaths: tuple[tuple[str, str], ...], suspect: bool) -> None:
    """The broker names the delay queue or quarantine as the place of the first death."""
    table = {"CC": ["other"], "a": 1, "x-death": [death("before", "expired", AT)], "x-first-death-queue": "before"}
    more = {"user_id": short("bob"), "expiration": short("5000")}
    message = waited(delivery(exchange="shop", routing_key="order.new", headers=table, **more), deaths, suspect=suspect)
    assert message.origin == Origin("orders", "shop", "order.new")
    assert (message.attempts, message.exception_type, message.exception_message) == (2, "ValueError", "no")
    assert (message.reason, message.cause, message.unreadable) == ("rejected", "ValueError", "")
    assert (message.first_failure, message.last_failure, message.died_at) == (AT, AT, LATER)
    copy = message.replayed()
    assert (copy.message_id, copy.user_id, copy.expiration) == ("m1", None, None)
    assert dict(copy.headers) == {
        "a": 1,
        headers.FORMAT: 1,
        headers.ORIGINAL_CC: ["other"],
        headers.ORIGINAL_USER_ID: "bob",
        headers.ORIGINAL_EXPIRATION: "5000",
        **PLACE,
    }


def test_what_was_replayed_and_waited_keeps_its_first_publish() -> None:
    """It died in another queue than before."""
    table = {headers.FORMAT: 1, **PLACE, headers.ORIGINAL_QUEUE: "before", headers.ORIGINAL_USER_ID: "bob"}
    message = waited(delivery(headers=table))
    assert message.origin == Origin("orders", "shop", "order.new")
    assert dict(message.replayed().headers) == {headers.FORMAT: 1, headers.ORIGINAL_USER_ID: "bob", **PLACE}


def test_a_dead_letter_of_ours_that_waited_stays_one() -> None:
    """A consumer of the dead-letter queue has retried and rejected it."""
    table = {headers.FORMAT: 1, headers.DEAD_LETTER_REASON: "why", headers.EXCEPTION_TYPE: "E", **PLACE}
    deaths = (("orders.dead", "rejected"), ("orders.dead.retry.1000", "expired"))
    message = waited(delivery(routing_key="orders.dead", headers={**table, headers.ATTEMPTS: 5}), deaths)
    assert message.origin == Origin("orders", "shop", "order.new")
    assert (message.reason, message.cause, message.attempts) == ("why", "E", 5)
    assert dict(message.replayed().headers) == {headers.FORMAT: 1, **PLACE}


def test_the_trace_of_what_waited_is_kept() -> None:
    item = delivery()
    item.attempt_context = _CONTEXT
    message = waited(item)
    assert message.trace_id == "c" * 32
    assert message.replayed().headers[headers.TRACE_CONTEXT] == _CONTEXT


def test_what_waits_has_no_origin_without_a_death() -> None:
    """For example, an administrator has moved it, and the queue is unknown."""
    packed = encode_retry_headers(delivery(exchange="shop"))
    assert packed is not None
    assert dead(packed).origin is None


def test_a_newer_format_below_the_retry_is_not_replayed() -> None:
    table = {headers.FORMAT: 1, headers.RETRY: {"moved": [headers.FORMAT]}, headers.ORIGINAL + headers.FORMAT: 2}
    assert "format 2" in with_headers(table).unreadable


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.binary(max_size=5) | st.just(AT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["queue", "time", "x"]), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [
        "x-death",
        "x-first-death-queue",
        "x-first-death-reason",
        "x-last-death-reason",
        "x-delivery-count",
        headers.FORMAT,
        headers.ATTEMPT,
        headers.ATTEMPTS,
        headers.TRACE_CONTEXT,
        headers.ORIGINAL_QUEUE,
        headers.LAST_FAILURE,
        headers.DEAD_LETTER_REASON,
        "other",
    ]
)


@given(st.dictionaries(NAMES, ANYTHING, max_size=6))
def test_no_header_breaks_the_reading(table: dict[str, object]) -> None:
    properties = join_properties({"headers": encode_table(table), "message_id": b"\2id"})  # type: ignore[arg-type]
    message = dead(properties)
    assert message.message_id == "id"
    assert message.cause
    replayed = message.replayed()
    assert not any(name.startswith("x-death") for name in replayed.headers)


CLAIMS = ["exchange", "routing-key", "path", "suspect", "moved", "user-id", "expiration", "lost", "first-failure"]
CLAIMS += ["last-failure", "exception-type", "exception-message"]
DEATH_QUEUES = st.sampled_from(["orders.retry.1000", "q.retry." + "9" * 5000, ".quarantine", ""]) | ANYTHING


@given(
    st.dictionaries(NAMES, ANYTHING, max_size=6),
    st.dictionaries(
        st.sampled_from(CLAIMS), ANYTHING | st.just("k" * 256) | st.just(["CC", headers.FORMAT, "x-death"])
    ),
    DEATH_QUEUES,
)
def test_no_retry_header_breaks_the_reading(table: dict[str, object], retry: dict[str, object], queue: object) -> None:
    said = {headers.ATTEMPT: 2, **table, headers.FORMAT: 1, headers.RETRY: retry, "x-first-death-queue": queue}
    properties = join_properties({"headers": encode_table(said), "message_id": b"\2id"})  # type: ignore[arg-type]
    message = dead(properties)
    assert message.cause
    replayed = message.replayed()
    assert replayed.message_id == "id"
    assert not {headers.RETRY, headers.ATTEMPT, "x-first-death-queue"} & replayed.headers.keys()


@given(st.binary(max_size=60))
def test_no_properties_break_the_reading(raw: bytes) -> None:
    message = dead(raw)
    assert message.cause


def test_headers_that_are_broken_leave_those_that_matter() -> None:
    """For example, next to a 32-bit float that cannot be decoded."""
    ours = encode_table({headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "q"})
    broken = b"\3badT" + (2**63).to_bytes(8) + b"\3worF"
    table = (len(ours) - 4 + len(broken)).to_bytes(4) + ours[4:] + broken
    assert dead(join_properties({"headers": table})).cause == "unknown"


# -- the replayed message ----------------------------------------------------------------------------------------------


def test_what_is_replayed_is_the_original_without_what_counts() -> None:
    theirs = {"a": 1, "f": 0.75, "x-mine": b"\xff", headers.POSSIBLE_DUPLICATE: True}
    kept = {headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "q", headers.ORIGINAL_CC: ["other"]}
    counted = {
        headers.ATTEMPT: 3,
        headers.ATTEMPTS: 3,
        headers.DEAD_LETTER_REASON: "r",
        headers.EXCEPTION_TYPE: "E",
        headers.LAST_FAILURE: AT,
        headers.CONSUMER: "c",
        headers.PACKAGE_VERSION: "1",
        headers.PREFIX + "of-a-newer-version": 1,
        "x-death": [death("q", "rejected", AT)],
        "x-first-death-queue": "q",
        "x-last-death-reason": "rejected",
        "x-delivery-count": 7,
        "x-acquired-count": 7,
    }
    message = with_headers({**theirs, **counted, **kept})
    assert dict(message.replayed().headers) == {**theirs, **kept}
    properties = join_properties(
        {"headers": encode_table({**theirs, **kept, **counted}), "priority": b"\3", "message_id": b"\1m"}  # type: ignore[dict-item]
    )
    replayed = dead(properties).replayed()
    assert replayed.encoded_properties == join_properties(
        {"headers": encode_table({**theirs, **kept}), "priority": b"\3", "message_id": b"\1m"}  # type: ignore[dict-item]
    )
    assert replayed.body == b"body"


def test_replay_moves_what_rabbitmq_acts_on_into_our_headers() -> None:
    table = encode_table({"CC": ["other"], "BCC": ["third"], "a": 1})
    raw = join_properties({"headers": table, "expiration": b"\x045000", "user_id": b"\3bob", "message_id": b"\1m"})
    message = dead(raw).replayed()
    assert (message.expiration, message.user_id) == (None, None)
    assert dict(message.headers) == {
        "a": 1,
        headers.FORMAT: 1,
        headers.ORIGINAL_CC: ["other"],
        headers.ORIGINAL_BCC: ["third"],
        headers.ORIGINAL_USER_ID: "bob",
        headers.ORIGINAL_EXPIRATION: "5000",
    }


@pytest.mark.parametrize("raw", [join_properties({}), join_properties({"delivery_mode": b"\2", "cluster_id": b"\1c"})])
def test_where_nothing_counts_nothing_changes(raw: bytes) -> None:
    message = dead(raw)
    assert message.properties == raw
    assert message.replayed().encoded_properties == raw


def test_what_the_broker_counts_is_no_part_of_the_message() -> None:
    """RabbitMQ adds the counts when a quorum queue redelivers a message."""
    counted = join_properties({"headers": encode_table({"x-delivery-count": 4, "x-acquired-count": 5})})
    message = dead(counted)
    assert (message.delivery_count, message.headers, message.properties) == (4, {}, join_properties({}))
    both = dead(join_properties({"headers": encode_table({"x-delivery-count": 4, "a": 1})}))
    assert Properties(both.properties).headers == {"a": 1}


def test_a_fingerprint_is_that_of_the_content_at_every_delivery() -> None:
    """It excludes RabbitMQ's delivery counts and the place in the queue."""
    once, again = with_headers({"a": 1}), with_headers({"a": 1, "x-delivery-count": 7, "x-acquired-count": 9})
    assert once.fingerprint == again.fingerprint
    assert len(once.fingerprint) == 32
    others = {with_headers({"a": 2}).fingerprint, dead(once.properties, b"other").fingerprint, once.fingerprint}
    assert len(others) == 3


def test_an_empty_header_table_does_not_change_a_fingerprint() -> None:
    """Some clients send one. It is dropped with the counts that RabbitMQ adds at later deliveries."""
    once, again, none = (
        dead(join_properties(segments | {"message_id": short("m")}))
        for segments in (
            {"headers": encode_table({})},
            {"headers": encode_table({"x-delivery-count": 1})},
            {},
        )
    )
    assert once.fingerprint == again.fingerprint == none.fingerprint
    assert once.properties != again.properties
    assert dead(b"\xff").fingerprint != once.fingerprint


def test_another_body_keeps_every_property() -> None:
    message = with_headers({"a": 1}).replayed(b"mended")
    assert (message.body, message.message_id, message.headers) == (b"mended", "m", {"a": 1})


_CONTEXT = f"00-{'c' * 32}-{'d' * 16}-01"


@pytest.mark.parametrize(
    ("table", "trace_id"),
    [
        (
            {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", headers.TRACE_CONTEXT: f"00-{'c' * 32}-{'d' * 16}-01"},
            "a" * 32,
        ),
        ({headers.TRACE_CONTEXT: f"00-{'c' * 32}-{'d' * 16}-01"}, "c" * 32),
        ({"traceparent": "rubbish"}, ""),
        ({"traceparent": 7}, ""),
        ({}, ""),
    ],
)
def test_a_trace_id_comes_from_the_message_or_its_last_attempt(table: dict[str, object], trace_id: str) -> None:
    message = with_headers(table)
    assert message.trace_id == trace_id
    assert dict(message.replayed().headers) == table
