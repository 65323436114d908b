"""Dead letters: the unchanged message, with its history in our headers."""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.codec import Properties, split_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.retry.dead_letters import DeadLetters, RepublishRequest
from tests.core.deliveries import BROKEN_TABLE, delivery, failures, short, too_deep

SOURCE = ChannelGeneration(1, 1, "orders")
DEAD = DeadLetters("orders.dead", consumer="shop\n1", version="9.9")


def dead_letter(item: Delivery, reason: str = "why") -> RepublishRequest:
    item.came_from(SOURCE)
    return DEAD.make(item, reason)


def view(republish: RepublishRequest) -> Properties:
    return Properties(republish.properties)


def test_it_says_where_from_why_who_and_how_often() -> None:
    item = delivery(exchange="shop", routing_key="new.order", headers={"tenant": "a"}, message_id="m1")
    item.set_failures(failures(2, at=1_700_000_000.9))
    made = dead_letter(item, "bad\x00currency")
    assert (made.routing_key, made.body) == ("orders.dead", b"body")
    assert made.reason == "bad\\x00currency"
    at = datetime.fromtimestamp(1_700_000_000, UTC)
    assert view(made).headers == {
        "tenant": "a",
        headers.FORMAT: 1,
        headers.DEAD_LETTER_REASON: "bad\\x00currency",
        headers.CONSUMER: "shop\\n1",
        headers.PACKAGE_VERSION: "9.9",
        headers.ATTEMPTS: 2,
        headers.ORIGINAL_QUEUE: "orders",
        headers.ORIGINAL_EXCHANGE: "shop",
        headers.ORIGINAL_ROUTING_KEY: "new.order",
        headers.FIRST_FAILURE: at,
        headers.LAST_FAILURE: at,
        headers.EXCEPTION_TYPE: "ValueError",
        headers.EXCEPTION_MESSAGE: "no",
    }
    assert view(made).message_id == "m1"


def test_without_a_failure_there_is_nothing_to_say_of_one() -> None:
    table = view(dead_letter(delivery())).headers
    assert table[headers.ATTEMPTS] == 0
    assert not {headers.FIRST_FAILURE, headers.LAST_FAILURE, headers.EXCEPTION_TYPE} & table.keys()


def test_failures_that_only_others_saw_are_counted() -> None:
    item = delivery()
    item.set_failures(failures(0))
    item.failures.count = 3
    table = view(dead_letter(item)).headers
    assert table[headers.ATTEMPTS] == 3
    assert headers.EXCEPTION_TYPE not in table


def test_no_message_id_is_made_up() -> None:
    assert view(dead_letter(delivery(message_id=None))).message_id is None


def test_a_dead_letter_drops_the_brokers_delivery_counts() -> None:
    made = dead_letter(delivery(headers={"x-delivery-count": 3, "x-acquired-count": 4, "tenant": "a"}))
    assert not {"x-delivery-count", "x-acquired-count"} & view(made).headers.keys()
    assert view(made).headers["tenant"] == "a"


def test_properties_that_harm_a_republish_move_into_headers() -> None:
    made = dead_letter(
        delivery(headers={"CC": ["a", "b"], "BCC": ["c"]}, user_id=short("guest"), expiration=short("1500"))
    )
    table = view(made).headers
    assert (table[headers.ORIGINAL_CC], table[headers.ORIGINAL_BCC]) == (["a", "b"], ["c"])
    assert (table[headers.ORIGINAL_USER_ID], table[headers.ORIGINAL_EXPIRATION]) == ("guest", "1500")
    assert not {"CC", "BCC"} & table.keys()
    assert (view(made).user_id, view(made).expiration) == (None, None)


def test_every_other_byte_is_copied() -> None:
    float_entry = b"\x05sharef" + struct.pack(">f", 0.1)
    late_entry = b"\x04lateT" + struct.pack(">Q", 1_700_000_000_000)
    twice = b"\x03twoI\x00\x00\x00\x01" + b"\x03twoI\x00\x00\x00\x02"
    table = float_entry + late_entry + twice
    raw = struct.pack(">I", len(table)) + table
    item = delivery(headers=raw, timestamp=struct.pack(">Q", 1_700_000_000_000), delivery_mode=b"\x03")
    before, after = split_properties(item.properties), split_properties(dead_letter(item).properties)
    assert {name: value for name, value in after.items() if name != "headers"} == {
        name: value for name, value in before.items() if name != "headers"
    }
    assert after["headers"][4:].startswith(table)


def test_dead_lettering_again_keeps_origin_and_drops_old_errors() -> None:
    item = delivery(exchange="shop", routing_key="new.order")
    item.set_failures(failures(5))
    first = dead_letter(item)
    again = Delivery("ctag", 2, False, "", "orders.dead", first.properties, first.body)
    again.came_from(ChannelGeneration(1, 1, "orders.dead"))
    table = view(DEAD.make(again, "still no use")).headers
    assert table[headers.ORIGINAL_QUEUE] == "orders"
    assert table[headers.ORIGINAL_EXCHANGE] == "shop"
    assert table[headers.ORIGINAL_ROUTING_KEY] == "new.order"
    assert table[headers.ATTEMPTS] == 0
    assert headers.EXCEPTION_TYPE not in table


def test_a_replayed_message_that_dies_elsewhere_is_of_that_queue() -> None:
    """It keeps its first publish. It is no dead letter any more, so its old queue says nothing about this death."""
    replayed = {
        headers.FORMAT: 1,
        headers.ORIGINAL_QUEUE: "invoices",
        headers.ORIGINAL_EXCHANGE: "shop",
        headers.ORIGINAL_ROUTING_KEY: "new.order",
    }
    table = view(dead_letter(delivery(exchange="", routing_key="orders", headers=replayed))).headers
    assert table[headers.ORIGINAL_QUEUE] == "orders"
    assert table[headers.ORIGINAL_EXCHANGE] == "shop"
    assert table[headers.ORIGINAL_ROUTING_KEY] == "new.order"


def test_an_origin_without_our_format_is_not_believed() -> None:
    table = view(dead_letter(delivery(headers={headers.ORIGINAL_QUEUE: "elsewhere"}))).headers
    assert table[headers.ORIGINAL_QUEUE] == "orders"


def test_a_dead_letter_drops_the_attempt_header() -> None:
    table = view(dead_letter(delivery(headers={headers.FORMAT: 1, headers.ATTEMPT: 4}))).headers
    assert headers.ATTEMPT not in table


def test_names_that_are_no_text_are_kept_as_bytes() -> None:
    made = dead_letter(delivery(routing_key="a\udcff", user_id=short("b\udcfe")))
    assert view(made).headers[headers.ORIGINAL_ROUTING_KEY] == b"a\xff"
    assert view(made).headers[headers.ORIGINAL_USER_ID] == b"b\xfe"


def test_a_broken_header_table_is_kept_behind_ours() -> None:
    made = dead_letter(delivery(headers=BROKEN_TABLE))
    segment = split_properties(made.properties)["headers"]
    assert segment.endswith(BROKEN_TABLE[4:])
    assert headers.DEAD_LETTER_REASON.encode() in segment
    assert view(made).message_id == "m1"


def test_a_dead_letter_with_too_deep_headers_keeps_its_origin() -> None:
    """A dead letter is dead-lettered again, from the dead-letter queue.

    Our headers are read even if the others cannot be decoded.
    """
    first = dead_letter(delivery(headers=too_deep(bytes(4))))
    again = Delivery("ctag", 1, False, "", "orders.dead", first.properties, b"body")
    again.came_from(ChannelGeneration(1, 1, "orders.dead"))
    second = DEAD.make(again, "another")
    ours = view(second).headers_beginning(headers.PREFIX)
    assert ours[headers.ORIGINAL_QUEUE] == "orders"
    assert ours[headers.DEAD_LETTER_REASON] == "another"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00",
        b"\xff\xff\xff",
        delivery(headers=b"\x00\x00\x00\x09\x02CC?abcde").properties,
        delivery(headers={"CC": "no list, but text"} | {"deep": None}).properties.replace(b"\x04deepV", b"\x04deep?"),
    ],
    ids=["truncated", "garbage", "broken table with a CC", "broken table behind a CC"],
)
def test_what_cannot_be_sent_again_travels_whole_in_one_header(raw: bytes) -> None:
    item = Delivery("ctag", 1, False, "shop", "new.order", raw, b"body")
    made = dead_letter(item)
    table = view(made).headers
    assert table[headers.ORIGINAL_PROPERTIES] == raw
    assert table[headers.DEAD_LETTER_REASON] == "why"
    assert view(made).delivery_mode == 2
    assert "CC" not in table


def test_a_cc_that_we_cannot_encode_makes_it_travel_whole_too() -> None:
    nested = b"V"
    for _ in range(40):  # deeper than this package would write
        nested = b"A" + struct.pack(">I", len(nested)) + nested
    entry = b"\x02CC" + nested
    item = delivery(headers=struct.pack(">I", len(entry)) + entry)
    assert view(dead_letter(item)).headers[headers.ORIGINAL_PROPERTIES] == item.properties


@given(st.binary(max_size=80), st.text(st.characters(codec=None), max_size=600))
def test_any_properties_make_a_dead_letter(raw: bytes, reason: str) -> None:
    made = dead_letter(Delivery("ctag", 1, False, "", "orders", raw, b"body"), reason)
    after = split_properties(made.properties)
    assert headers.DEAD_LETTER_REASON.encode() in after["headers"]
    assert not {"user_id", "expiration"} & after.keys()
