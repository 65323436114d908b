"""Deliveries: what a handler can read, and damaged properties."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from reliable_mq import ConsumeError
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery, message_name
from tests.core.deliveries import BROKEN_TABLE, delivery, failures, properties, short


def test_every_property_can_be_read() -> None:
    item = delivery(
        headers={"tenant": "a", "share": 0.75},
        message_id="m7",
        content_type=short("application/json"),
        content_encoding=short("identity"),
        correlation_id=short("c1"),
        reply_to=short("answers"),
        type=short("order"),
        user_id=short("guest"),
        app_id=short("shop"),
        expiration=short("2500"),
        priority=b"\x04",
        delivery_mode=b"\x02",
        timestamp=(1_700_000_000).to_bytes(8),
        body=b'{"total": 3}',
        source=ChannelGeneration(1, 1, "orders"),
    )
    assert item.headers == {"tenant": "a", "share": 0.75}
    assert (item.content_type, item.content_encoding) == ("application/json", "identity")
    assert (item.message_id, item.correlation_id, item.reply_to) == ("m7", "c1", "answers")
    assert (item.type, item.user_id, item.app_id) == ("order", "guest", "shop")
    assert (item.expiration, item.priority, item.persistent) == (2.5, 4, True)
    assert item.timestamp == datetime.fromtimestamp(1_700_000_000, UTC)
    assert item.json() == {"total": 3}
    assert item.queue == "orders"


@pytest.mark.parametrize("name", ["body", "exchange", "routing_key", "properties", "headers", "message_id"])
def test_what_arrived_cannot_be_replaced(name: str) -> None:
    """Otherwise a handler could change the next attempt and the dead letter."""
    item = delivery(body=b"as it came")
    with pytest.raises(AttributeError):
        setattr(item, name, "changed")
    assert item.body == b"as it came"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_a_delivery_goes_to_another_process_as_it_is(duplicate: Callable[[Delivery], Delivery]) -> None:
    """A handler may pass it to a pool of processes, also after it has read the headers."""
    item = Delivery("c", 7, True, "shop", "orders", properties(headers={"tenant": "a"}, message_id="m7"), b"body")
    item.came_from(ChannelGeneration(1, 1, "orders"))
    item.set_failures(failures(2))
    assert item.headers == {"tenant": "a"}
    copied = duplicate(item)
    assert (copied.headers, copied.message_id, copied.attempt, copied.queue) == (item.headers, "m7", 3, "orders")


def test_what_is_not_there_is_none() -> None:
    item = delivery(message_id=None)
    assert item.headers == {}
    absent = (item.message_id, item.expiration, item.priority, item.timestamp, item.offset, item.content_type)
    assert absent == (None,) * 6
    assert not item.persistent


def test_an_expiration_that_is_no_number_is_none() -> None:
    assert delivery(expiration=short("soon")).expiration is None


def test_the_attempt_is_one_more_than_what_failed() -> None:
    item = delivery()
    assert item.attempt == 1
    item.set_failures(failures(2))
    assert item.attempt == 3


def test_the_offset_of_a_stream_is_a_header() -> None:
    assert delivery(headers={"x-stream-offset": 41}).offset == 41
    assert delivery(headers={"x-stream-offset": "41"}).offset is None


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (delivery(headers=BROKEN_TABLE), "headers"),
        (Delivery("ctag", 1, False, "", "orders", b"\x00", b""), "message_id"),
    ],
    ids=["headers", "properties"],
)
def test_reading_what_is_broken_raises_and_leaves_a_mark(broken: Delivery, name: str) -> None:
    assert broken.flaw is None
    with pytest.raises(ConsumeError, match="are broken"):
        getattr(broken, name)
    assert broken.flaw


def test_broken_headers_leave_the_other_properties_readable() -> None:
    item = delivery(headers=BROKEN_TABLE, message_id="m1")
    assert item.message_id == "m1"
    assert item.flaw is None


def test_the_repr_shows_neither_body_nor_headers() -> None:
    shown = repr(delivery(4, body=b"secret", headers={"password": "secret"}))
    assert shown == "<Delivery 4 with routing key 'orders', 6 bytes>"


@pytest.mark.parametrize(
    "name", ["body", "delivery_tag", "exchange", "failures", "properties", "routing_key", "source"]
)
def test_a_handler_cannot_change_what_is_acked_or_republished(name: str) -> None:
    item = delivery(7)
    with pytest.raises(AttributeError):
        setattr(item, name, None)
    assert item.delivery_tag == 7


def test_a_message_is_named_whatever_is_wrong_with_it() -> None:
    """Naming a message changes nothing about it."""
    assert message_name(delivery(message_id="m7")) == "message 'm7'"
    assert message_name(delivery(message_id=None, body=b"1234")) == "a message without an id (4 bytes)"
    broken = Delivery("ctag", 1, False, "", "orders", b"\xff", b"")
    assert message_name(broken) == "a message without an id (0 bytes)"
    assert broken.flaw is None


def test_a_delivery_that_is_to_be_acked_names_the_way_out() -> None:
    made = delivery()
    with pytest.raises(AttributeError, match=r"no attribute 'ack': return from the handler to ack the delivery"):
        made.ack()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        made.other()  # type: ignore[attr-defined]
