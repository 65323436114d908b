"""Message: errors are raised at construction, and a message never changes.

A constructed message can be sent and copied.
"""

from __future__ import annotations

import copy
import enum
import os
import pickle
import sys
import threading
import traceback
import uuid
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from time import time_ns
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import message as module
from reliable_mq.codec import Properties, decode_table, encode_properties, join_properties
from reliable_mq.errors import ConfigurationError, ReliableMQError
from reliable_mq.message import Message, MessageProperties, new_message_id

EVERYTHING: MessageProperties = {
    "headers": {"a": 1, "nested": {"list": [1.5, None, b"x"]}},
    "content_type": "text/plain",
    "content_encoding": "gzip",
    "message_id": "id-1",
    "correlation_id": "c",
    "reply_to": "r",
    "priority": 9,
    "expiration": 1.5,
    "timestamp": datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC),
    "type": "t",
    "user_id": "u",
    "app_id": "app",
    "persistent": False,
}
ATTRIBUTES = tuple(MessageProperties.__annotations__)


def test_a_plain_message_has_only_an_id_and_persistence() -> None:
    message = Message(b"body")
    assert message.body == b"body"
    assert uuid.UUID(message.message_id).version == 7
    assert message.persistent is True
    assert message.headers == {}
    for name in set(ATTRIBUTES) - {"message_id", "persistent", "headers"}:
        assert getattr(message, name) is None


def test_every_property_is_shown_as_it_was_given() -> None:
    message = Message(b"body", **EVERYTHING)
    assert {name: getattr(message, name) for name in ATTRIBUTES} == EVERYTHING
    assert Properties(encode_properties(message)).expiration == "1500"


@pytest.mark.parametrize("name", sorted(EVERYTHING.keys() - {"message_id"}))
def test_each_property_alone_is_sent(name: str) -> None:
    """Each value counts as present even if it is the only one set."""
    given: Any = {name: EVERYTHING[name]}  # type: ignore[literal-required]
    message = Message(b"", **given)
    assert getattr(message, name) == given[name]
    seen = Properties(encode_properties(message))
    assert seen.message_id == message.message_id
    assert seen.delivery_mode == (1 if name == "persistent" else 2)


def test_a_body_that_can_change_is_copied() -> None:
    source = bytearray(b"abcd")
    messages = [Message(source), Message(memoryview(source)), Message(memoryview(source)[::2])]
    source[:] = b"xxxx"
    assert [message.body for message in messages] == [b"abcd", b"abcd", b"ac"]
    assert all(type(message.body) is bytes for message in messages)
    body = b"kept"
    assert Message(body).body is body


def test_later_changes_of_headers_do_not_change_the_message() -> None:
    headers: dict[str, Any] = {"list": [1]}
    message = Message(b"", headers=headers)
    headers["list"].append(2)
    message.headers["list"].append(3)  # type: ignore[attr-defined]
    assert message.headers == {"list": [1]}
    with pytest.raises(TypeError):
        message.headers["a"] = 1  # type: ignore[index]


def test_times_are_shown_as_they_go_onto_the_wire() -> None:
    tokyo = timezone(timedelta(hours=9))
    message = Message(
        b"", timestamp=datetime(2024, 1, 1, 9, 0, 0, 999_999, tokyo), expiration=timedelta(milliseconds=2.4)
    )
    assert message.timestamp == datetime(2024, 1, 1, tzinfo=UTC)
    assert message.expiration == 0.002


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"body": "text"}, r"body must be bytes, not str: use body\.encode\(\), or Message\.json"),
        ({"body": None}, "body must be bytes, bytearray or memoryview, not NoneType"),
        ({"body": {"a": 1}}, "body must be bytes, bytearray or memoryview, not dict"),
        ({"body": 5}, "body must be bytes, bytearray or memoryview, not int"),
        ({"message_id": ""}, "message_id must not be empty"),
        ({"message_id": 5}, "message_id must be a str, not int"),
        ({"message_id": uuid.UUID(int=1)}, "message_id must be a str, not UUID"),
        ({"message_id": "x" * 256}, "message_id is 256 bytes long"),
        ({"content_type": b"text/plain"}, "content_type must be a str, not bytes"),
        ({"headers": "a"}, "headers must be a mapping"),
        ({"headers": {"CC": "queue"}}, r"headers\['CC'\] must be a list"),
        ({"headers": {"a": float("nan")}}, r"headers\['a'\] is nan"),
        ({"priority": 256}, "priority must be an int from 0 to 255"),
        ({"expiration": -1}, "expiration must be seconds"),
        ({"timestamp": 5}, "timestamp must be an aware datetime"),
        ({"persistent": None}, "persistent must be True or False"),
        ({"persistent": 2}, "persistent must be True or False"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Message(**{"body": b"", **arguments})


def test_an_unknown_property_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="delivery_mode"):
        Message(b"", delivery_mode=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="delivery_mode"):
        Message(b"").replace(delivery_mode=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "name", ["body", "message_id", "headers", "priority", "type", "anything", "encoded_properties"]
)
def test_nothing_can_be_assigned_or_deleted(name: str) -> None:
    message = Message(b"body", **EVERYTHING)
    before = encode_properties(message)
    with pytest.raises(AttributeError, match="immutable"):
        setattr(message, name, b"x")
    with pytest.raises(AttributeError, match="immutable"):
        delattr(message, name)
    assert (message.body, encode_properties(message)) == (b"body", before)


def test_equality_is_identity_and_a_message_can_be_a_key() -> None:
    message = Message(b"", message_id="a")
    other = Message(b"", message_id="a")
    assert message != other
    assert {message: 1, other: 2}[message] == 1


@pytest.mark.parametrize("message", [Message(b"body"), Message(b"body", **EVERYTHING)], ids=["plain", "full"])
def test_a_message_can_be_pickled_and_copied(message: Message) -> None:
    copies = [copy.copy(message), copy.deepcopy(message)]
    copies += [pickle.loads(pickle.dumps(message, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in copies:
        assert type(other) is Message
        assert (other.body, other.message_id) == (message.body, message.message_id)
        assert encode_properties(other) == encode_properties(message)


PLAIN_PROPERTIES = encode_properties(Message(b"", priority=1))


@pytest.mark.parametrize(
    ("state", "field"),
    [
        (("text", None, "id"), "body must be bytes"),
        ((bytearray(b"x"), None, "id"), "body must be bytes"),
        ((b"", None, ""), "message_id must not be empty"),
        ((b"", None, "i" * 256), "message_id is 256 bytes long"),
        ((b"", None, None), "message_id must be str"),
        ((b"", PLAIN_PROPERTIES, 7), "message_id must be str"),
        ((b"", "text", "id"), "properties must be bytes"),
        ((b"", PLAIN_PROPERTIES[:-1], "id"), "truncated|do not end"),
        ((b"", b"", "id"), "flags are missing"),
    ],
)
def test_a_damaged_pickle_is_refused_and_the_field_named(state: tuple[object, ...], field: str) -> None:
    """Unpickling never returns a message that could not be sent."""
    make, _ = Message(b"").__reduce__()
    with pytest.raises(ConfigurationError, match=f"a pickled message is damaged: .*{field}"):
        make(*state)


def test_a_pickle_keeps_what_came_from_the_wire() -> None:
    """Once without an id on the wire, and once with an id that only tracks it."""
    raw = join_properties({"priority": b"\1"})
    for tracked in ("", "tracked\0"):
        message = Message._from_wire(b"body", raw, tracked)
        other = pickle.loads(pickle.dumps(message))
        assert (other.body, other.encoded_properties, other.message_id) == (b"body", raw, tracked)


def test_an_id_is_what_the_broker_returns() -> None:
    """Surrogate escapes that form UTF-8 are text on the wire."""
    assert Message(b"", message_id="\udcc3\udca9").message_id == "é"
    assert Message(b"", message_id="\udcc3\udca9", type="t").message_id == "é"
    assert Message(b"").replace(message_id="\udcc3\udca9").message_id == "é"
    assert Message(b"", message_id="\udcc3").message_id == "\udcc3"


@given(
    st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=40)
    | st.text(st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF), min_size=1, max_size=40)
    | st.text(min_size=1).map(lambda text: text.encode("utf-8", "replace").decode("ascii", "surrogateescape"))
)
def test_an_id_equals_the_one_in_the_properties(message_id: str) -> None:
    try:
        message = Message(b"", message_id=message_id)
    except ConfigurationError:  # AMQP cannot carry it
        return
    others = [Message(b"", message_id=message_id, priority=1), Message(b"").replace(message_id=message_id)]
    for one in (message, *others, *map(copy.copy, others)):
        assert one.message_id == message.message_id == Properties(encode_properties(one)).message_id


class Name(str, enum.Enum):  # noqa: UP042  # the older kind, which users have
    ORDER = "order"


def test_an_id_that_is_a_member_of_an_enum_is_its_text() -> None:
    message = Message(b"", message_id=Name.ORDER)
    assert f"{message.message_id}" == "order"
    assert copy.copy(message).message_id == "order"


@pytest.mark.parametrize(
    ("properties", "message_id"),
    [(None, "\udcc3\udca9"), (encode_properties(Message(b"", message_id="é", priority=1)), "\udcc3\udca9")],
)
def test_an_unpickled_id_is_what_the_broker_returns(properties: bytes | None, message_id: str) -> None:
    make, _ = Message(b"").__reduce__()
    assert make(b"", properties, message_id).message_id == "é"


class Boasting(bytes):
    """Bytes that report a wrong length and wrong content."""

    __slots__ = ()

    def __len__(self) -> int:
        return 1_000_000

    def __bytes__(self) -> bytes:
        return b"something else"


def test_a_body_that_is_a_subclass_of_bytes_is_copied_as_it_is() -> None:
    for message in (Message(Boasting(b"body")), Message(b"").replace(body=Boasting(b"body"))):
        assert type(message.body) is bytes
        assert message.body == b"body"


def test_a_repr_shows_neither_body_nor_headers() -> None:
    message = Message(b"secret", headers={"token": "secret"}, message_id="id-7")
    assert repr(message) == "<Message id-7: 6 bytes>"


def test_json() -> None:
    message = Message.json({"é": [1, None, 2.5]}, type="order")
    assert message.body == '{"é":[1,null,2.5]}'.encode()
    assert (message.content_type, message.type) == ("application/json", "order")
    assert Message.json(1, content_type="application/x+json").content_type == "application/x+json"


def endless() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}, endless(), {(1, 2): 3}, "\ud800"], ids=type)
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written as JSON"):
        Message.json(value)


@pytest.mark.parametrize("value", [uuid.UUID(int=1), Decimal(1), datetime(2026, 1, 1, tzinfo=UTC)], ids=type)
def test_the_refusal_of_a_type_that_json_lacks_names_a_fix(value: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Message.json({"value": value})
    fix = 'Message(json.dumps(obj, default=str).encode(), content_type="application/json")'
    assert str(refused.value).endswith(f"is not JSON serializable: convert it, or encode it yourself: {fix}")


def test_replace_changes_what_is_named_and_keeps_the_rest() -> None:
    message = Message(b"body", **EVERYTHING)
    changed = message.replace(priority=None, type="other", persistent=True, body=bytearray(b"new"), user_id=None)
    assert changed.body == b"new"
    expected = {**EVERYTHING, "priority": None, "type": "other", "persistent": True, "user_id": None}
    assert {name: getattr(changed, name) for name in ATTRIBUTES} == expected
    assert {name: getattr(message, name) for name in ATTRIBUTES} == EVERYTHING
    assert message.replace(body=b"bytes").body == b"bytes"
    assert message.replace(app_id=None, content_type=None).body is message.body
    assert Message(b"").replace(user_id=None).user_id is None


def test_replace_keeps_the_id_unless_told_otherwise() -> None:
    message = Message(b"body")
    assert message.replace(priority=1).message_id == message.message_id
    for changed in (message.replace(message_id="other"), message.replace(message_id=None)):
        assert changed.message_id != message.message_id
        assert Properties(encode_properties(changed)).message_id == changed.message_id


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"priority": 256}, "priority must be"),
        ({"message_id": ""}, "message_id must not be empty"),
        ({"message_id": 0}, "message_id must be a str"),
        ({"persistent": None}, "persistent must be"),
        ({"body": "text"}, "body must be"),
    ],
)
def test_replace_refuses_what_construction_refuses(changes: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Message(b"").replace(**changes)


def test_replace_keeps_what_it_could_not_have_made_byte_for_byte() -> None:
    float_header = b"\0\0\0\7\1ff\x3f\x40\0\0"
    raw = join_properties({"headers": float_header, "timestamp": b"\xff" * 8, "cluster_id": b"\1c"})
    message = Message._from_wire(b"body", raw, "tracked")
    changed = encode_properties(message.replace(priority=1))
    assert changed == join_properties(
        {"headers": float_header, "priority": b"\1", "timestamp": b"\xff" * 8, "cluster_id": b"\1c"}
    )


def test_a_message_from_the_wire_goes_out_as_it_came() -> None:
    raw = join_properties({"timestamp": b"\xff" * 8, "expiration": b"\3abc", "delivery_mode": b"\1"})
    message = Message._from_wire(b"body", raw, "tracked")
    assert (message.body, message.message_id) == (b"body", "tracked")
    assert encode_properties(message) is raw
    assert (message.timestamp, message.expiration, message.persistent) == (None, None, False)
    assert repr(message) == "<Message tracked: 4 bytes>"


def test_a_delivery_can_be_published_again_byte_for_byte() -> None:
    raw = join_properties({"message_id": b"\2id", "timestamp": b"\xff" * 8})
    message = Message.from_wire(b"body", raw)
    assert (message.body, message.message_id, encode_properties(message)) == (b"body", "id", raw)
    assert Message.from_wire(b"", b"\0\0").message_id == ""  # no id is generated


def test_what_is_no_properties_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="properties are not"):
        Message.from_wire(b"", b"\x80\0\5text")


def test_a_plain_message_is_small() -> None:
    """A million of them may be outstanding."""
    message = Message(b"")
    assert message.encoded_properties is None
    assert sys.getsizeof(message) <= 64
    assert sys.getsizeof(message.message_id) <= 90


def test_a_configuration_error_is_one_of_ours_and_a_value_error() -> None:
    with pytest.raises(ReliableMQError):
        Message("x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="body"):
        Message("x")  # type: ignore[arg-type]


# -- message ids


def test_ids_are_uuids_of_version_7_in_the_order_of_time() -> None:
    ids = []
    for _ in range(1000):
        before = time_ns() // 1_000_000
        message_id = new_message_id()
        parsed = uuid.UUID(message_id)
        assert str(parsed) == message_id
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert before <= parsed.int >> 80 <= time_ns() // 1_000_000
        ids.append(message_id)
    assert len(set(ids)) == 1000
    # Ids from the same clock tick are ordered randomly.
    moments = [message_id[:18] for message_id in ids]
    assert moments == sorted(moments)


def test_ids_are_ordered_within_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_700_000_000_123_000_000, 1_700_000_000_124_000_000, 250))
    monkeypatch.setattr(module, "time_ns", lambda: next(clock))
    ids = [new_message_id() for _ in range(4000)]
    assert ids == sorted(ids)
    assert {uuid.UUID(message_id).int >> 80 for message_id in ids} == {1_700_000_000_123}


def test_threads_never_get_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even at the same instant."""
    monkeypatch.setattr(module, "time_ns", lambda: 1_700_000_000_000_000_000)
    ids: list[str] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        ids.extend([new_message_id() for _ in range(2000)])

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 16_000


def test_a_forked_child_makes_other_ids_than_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time_ns", lambda: 1_700_000_000_000_000_000)
    new_message_id()  # prepares digits that the child must not use
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, "\n".join(new_message_id() for _ in range(50)).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        theirs = pipe.read().decode().split("\n")
    assert os.waitpid(child, 0)[1] == 0
    ours = [new_message_id() for _ in range(50)]
    assert len(theirs) == 50
    assert not set(ours) & set(theirs)


def test_headers_in_the_message_are_those_of_the_table() -> None:
    table = {"CC": ["a"], "n": -(2**40)}
    message = Message(b"", headers=table)
    raw = encode_properties(message)
    assert decode_table(raw[2 : 2 + 4 + int.from_bytes(raw[2:6])]) == table


def test_a_message_that_was_refused_can_be_looked_at() -> None:
    """A traceback may format a partly constructed message."""
    with pytest.raises(ConfigurationError) as caught:
        Message(b"body", headers={"h": object()})
    traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert repr(Message.__new__(Message)) == "<Message, half made>"
