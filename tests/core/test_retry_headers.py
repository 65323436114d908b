"""A message leaves a delay queue unchanged."""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.codec import Properties, decode_table, encode_table, join_properties, split_properties
from reliable_mq.codec.tables import walk_table
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import NewerFormat
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.retry.retry_headers import DEATHS, PLAIN, RetryState, decode_retry_headers, encode_retry_headers
from tests.core.deliveries import BROKEN_TABLE, delivery, failures, properties, short, too_deep


def waited(packed: bytes, exchange: str = "", routing_key: str = "orders") -> Delivery:
    """Return the delivery from a delay queue.

    Its headers are sorted, and the broker has added headers of the dead-lettering.
    """
    segments = split_properties(packed)
    table = segments["headers"]
    entries = {name: table[start:end] for name, start, end in walk_table(table, 4, len(table))}
    for name in DEATHS:
        entries[name.encode()] = encode_table({name: "the broker's"})[4:]
    body = b"".join(entries[name] for name in sorted(entries))
    segments["headers"] = struct.pack(">I", len(body)) + body
    return Delivery("ctag", 9, False, exchange, routing_key, join_properties(segments), b"body")


def same(one: Delivery, other: Delivery) -> bool:
    def parts(item: Delivery) -> object:
        segments = split_properties(item.properties)
        table = segments.pop("headers", bytes(4))
        return item.exchange, item.routing_key, segments, {table[a:b] for _, a, b in walk_table(table, 4, len(table))}

    return parts(one) == parts(other)


def through(item: Delivery, path: tuple[int, ...] = (), *, suspect: bool = False) -> tuple[Delivery, RetryState]:
    packed = encode_retry_headers(item, path, suspect=suspect)
    assert packed is not None
    out = waited(packed)
    return out, decode_retry_headers(out)


def test_everything_that_would_do_harm_gives_way_and_comes_back() -> None:
    table = {"CC": ["a"], "BCC": ["b"], "tenant": 1, "x-death": [{"queue": "theirs"}], "x-first-death-queue": "theirs"}
    item = delivery(
        exchange="shop", routing_key="new.order", headers=table, user_id=short("guest"), expiration=short("1500")
    )
    item.set_failures(failures(2, at=1_700_000_000.0))
    packed = encode_retry_headers(item)
    assert packed is not None
    view = Properties(packed)
    assert not {"CC", "BCC", "x-death", "x-first-death-queue"} & view.headers.keys()
    assert (view.user_id, view.expiration, view.message_id) == (None, None, "m1")
    assert (view.headers[headers.FORMAT], view.headers[headers.ATTEMPT]) == (1, 3)
    assert view.headers[headers.ORIGINAL_CC] == ["a"]
    out, transit = through(item)
    assert transit == PLAIN
    assert same(out, item)
    assert out.headers == table
    assert out.attempt == 3
    assert out.failures is not None
    assert out.failures.first_at == 1_700_000_000.0
    assert out.failures.last == item.failures.last


def test_the_way_that_is_left_and_the_suspicion_travel_along() -> None:
    item = delivery()
    out, transit = through(item, (20_000, 500), suspect=True)
    assert transit == RetryState((20_000, 500), suspect=True)
    assert same(out, item)
    assert (out.attempt, out.failures) == (1, None)


def test_names_that_are_no_text_come_back() -> None:
    item = delivery(exchange="e\udcff", routing_key="k\udcfe", user_id=short("u\udcfd"))
    assert same(through(item)[0], item)


def test_failures_that_only_others_saw_are_counted() -> None:
    item = delivery()
    item.set_failures(failures(0))
    item.failures.count = 3
    out, _ = through(item)
    assert out.failures is not None
    assert (out.failures.count, out.failures.first_at, out.failures.last) == (3, None, None)


def test_the_brokers_counts_of_the_queue_before_do_not_travel() -> None:
    item = delivery(headers={"x-delivery-count": 7, "x-acquired-count": 9, "tenant": 1})
    assert through(item)[0].headers == {"tenant": 1}


def test_a_dead_letter_that_waits_stays_one() -> None:
    """Its headers describe its dead-lettering, not its wait."""
    table = {
        headers.FORMAT: 1,
        headers.DEAD_LETTER_REASON: "why",
        headers.ORIGINAL_CC: ["a"],
        headers.ORIGINAL_QUEUE: "orders",
        headers.FIRST_FAILURE: datetime(2024, 1, 1, tzinfo=UTC),
    }
    item = delivery(routing_key="orders.dead", headers=table)
    item.set_failures(failures(1))
    out, _ = through(item)
    assert out.headers == table
    assert out.attempt == 2


def test_a_replayed_message_that_waits_keeps_its_origin() -> None:
    """The origin counts only with its format, so both come back."""
    table = {headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders", headers.ORIGINAL_EXCHANGE: "shop"}
    out, _ = through(delivery(headers=table))
    assert out.headers == table


def test_the_trace_context_of_a_dead_letter_comes_back() -> None:
    """A handler of a dead-letter queue has it in every attempt."""
    table = {headers.FORMAT: 1, headers.TRACE_CONTEXT: "00-1-2-01"}
    item = delivery(headers=table)
    item.attempt_context = "00-3-4-01"
    out, _ = through(item)
    assert out.headers == table
    assert out.attempt_context == "00-3-4-01"


def test_a_header_that_would_be_overwritten_is_not_encoded() -> None:
    assert encode_retry_headers(delivery(headers={"CC": ["a"], headers.ORIGINAL_CC: ["b"]})) is None


def test_twice_through_is_the_same_as_once() -> None:
    item = delivery(exchange="shop", headers={"CC": ["a"], headers.FORMAT: 1, "z": 1}, expiration=short("1"))
    once, _ = through(item)
    twice, _ = through(once)
    assert same(twice, item)


@pytest.mark.parametrize(
    "raw", [b"\x00", delivery(headers=BROKEN_TABLE).properties], ids=["broken", "a table that cannot be walked"]
)
def test_what_would_not_come_out_the_same_does_not_go_in(raw: bytes) -> None:
    assert encode_retry_headers(Delivery("ctag", 1, False, "", "orders", raw, b"")) is None


def test_headers_too_deep_to_be_read_travel_unread() -> None:
    item = delivery(headers=too_deep(bytes(4)))
    assert same(through(item)[0], item)


def test_a_message_that_never_waited_is_left_alone() -> None:
    item = delivery(headers={headers.FORMAT: 1, headers.ATTEMPT: 4, "x-death": []})
    before = item.properties
    assert decode_retry_headers(item) == PLAIN
    assert (item.attempt, item.properties) == (4, before)


def test_a_newer_format_is_an_error() -> None:
    with pytest.raises(NewerFormat):
        decode_retry_headers(delivery(headers={headers.FORMAT: 2, headers.RETRY: {}}))


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("path", "long"),
        ("path", [1] * 17),
        ("path", [0]),
        ("path", [-1]),
        ("path", [True]),
        ("path", [2**62]),
        ("path", [1, "2"]),
        ("suspect", 1),
        ("exchange", 7),
        ("routing-key", "k" * 256),
        ("user-id", b"u" * 256),
        ("moved", ["tenant", "x-delivery-count", 4]),
        ("moved", "CC"),
        ("moved", [["CC"], {"CC": True}]),
    ],
    ids=repr,
)
def test_what_is_out_of_range_in_our_header_is_not_believed(claim: str, value: object) -> None:
    table = {headers.FORMAT: 1, headers.ATTEMPT: 2, headers.RETRY: {claim: value}, "tenant": 1}
    item = delivery(exchange="e", routing_key="k", headers=table)
    assert decode_retry_headers(item) == PLAIN
    assert (item.exchange, item.routing_key, item.user_id, item.headers) == ("e", "k", None, {"tenant": 1})


@pytest.mark.parametrize("version", [0, "1", True, None])
def test_without_our_format_nothing_is_believed(version: object) -> None:
    item = delivery(exchange="e", headers={headers.FORMAT: version, headers.RETRY: {"exchange": "x", "path": [1]}})
    assert decode_retry_headers(item) == PLAIN
    assert item.exchange == "e"


values = (
    st.none()
    | st.booleans()
    | st.integers(-(2**31), 2**31 - 1)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
    | st.lists(st.integers(0, 9))
)
names = st.sampled_from(["CC", "BCC", headers.FORMAT, *DEATHS]) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=6
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@given(st.dictionaries(names, values, max_size=6), texts, texts, st.integers(0, 5), st.booleans())
def test_anything_readable_comes_out_as_it_went_in(
    table: dict[str, object], exchange: str, user: str, failed: int, expires: bool
) -> None:
    more = {"expiration": short("5")} if expires else {}
    item = Delivery(
        "ctag", 1, False, exchange, "k", properties(headers=table or None, user_id=short(user), **more), b""
    )
    item.set_failures(failures(failed) if failed else None)
    out, _ = through(item)
    assert same(out, item)
    assert out.attempt == failed + 1


@given(st.binary(max_size=60))
def test_unpacking_anything_changes_nothing_that_is_not_ours(raw: bytes) -> None:
    entries = encode_table({headers.FORMAT: 1, headers.RETRY: {"exchange": "x"}})[4:]
    try:
        decode_table(struct.pack(">I", len(raw)) + raw)
    except ValueError:
        return
    item = delivery(headers=struct.pack(">I", len(raw) + len(entries)) + raw + entries)
    decode_retry_headers(item)
    assert item.exchange == "x"


times = st.integers(0, 253402300799).map(lambda at: datetime.fromtimestamp(at, UTC))
anything = st.recursive(
    values | times | st.binary(max_size=5) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
claims = ["exchange", "routing-key", "path", "suspect", "moved", "user-id", "expiration", "lost", "first-failure"]
claims += ["alone", "last-failure", "exception-type", "exception-message"]


@given(anything, st.dictionaries(st.sampled_from(claims), anything))
def test_whatever_our_headers_hold_can_be_unpacked(attempt: object, table: dict[str, object]) -> None:
    item = delivery(headers={headers.FORMAT: 1, headers.ATTEMPT: attempt, headers.RETRY: table, "tenant": 1})
    decode_retry_headers(item)
    assert item.headers["tenant"] == 1
    assert headers.RETRY not in item.headers
