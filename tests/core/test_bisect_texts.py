"""The publishes that a channel error may mean.

The texts are those of RabbitMQ 4.0 and 4.3.
"""

from __future__ import annotations

import enum

import pytest

from reliable_mq.codec import join_properties
from reliable_mq.core.publisher.bisect import named_by
from reliable_mq.core.publisher.publication import BrokerReply, Publication
from reliable_mq.message import Message

PLAIN = Message(b"x")


class Name(str, enum.Enum):  # noqa: UP042  # the older kind, which users have
    """Names whose text in an f-string is not what is sent."""

    MISSING = "missing"
    EVENTS = "events"
    KEY = "x.y"


def wired(**segments: bytes) -> Message:
    """Return a message that this package would not have made."""
    return Message.from_wire(b"x", join_properties(segments))


def publication(message: Message = PLAIN, exchange: str = "", routing_key: str = "key") -> Publication:
    return Publication(message, exchange, routing_key, True, len(message.body), 0.0, None)


OTHERS = [
    publication(),
    publication(exchange="miss"),
    publication(exchange="events", routing_key="other"),
    publication(Message(b"xx", priority=3)),
    publication(Message(b"x", user_id="guest", expiration=1, headers={"CC": ["a"], "h": 1})),
    publication(Message(b"x", headers={"CCC": 1})),
    publication(Message(b"x", headers={"BCC": ["a"], "h": "x.y"}), exchange="events", routing_key="other"),
    publication(Message(b"x", reply_to="replies")),
    publication(Message._from_wire(b"x", b"\x80\0\5text", "damaged")),
]


@pytest.mark.parametrize(
    ("code", "text", "culprit"),
    [
        (404, "NOT_FOUND - no exchange 'missing' in vhost '/'", publication(exchange="missing")),
        (404, "NOT_FOUND - no exchange 'missing' in vhost '/'", publication(exchange=Name.MISSING)),
        (404, "NOT_FOUND - no exchange 'mi'ss ö\n' in vhost 'v'", publication(exchange="mi'ss ö\n")),
        (404, f"NOT_FOUND - no exchange '{'m' * 228}...", publication(exchange="m" * 250)),
        (
            403,
            "ACCESS_REFUSED - write access to exchange 'amq.direct' in vhost '/' refused for user 'u'",
            publication(exchange="amq.direct"),
        ),
        (
            403,
            "ACCESS_REFUSED - write access to topic 'x.y' in exchange 'events' in vhost '/' refused for user 't'",
            publication(exchange="events", routing_key="x.y"),
        ),
        (
            403,
            "ACCESS_REFUSED - write access to topic 'x.y' in exchange 'events' in vhost '/' refused for user 't'",
            publication(exchange=Name.EVENTS, routing_key=Name.KEY),
        ),
        (
            403,
            "ACCESS_REFUSED - write access to topic 'x.y' in exchange 'events' in vhost '/' refused for user 't'",
            publication(Message(b"x", headers={"CC": ["a", "x.y"]}), exchange="events"),
        ),
        (
            403,
            "ACCESS_REFUSED - write access to topic 'x.y' in exchange 'events' in vhost '/' refused for user 't'",
            publication(Message(b"x", headers={"CC": ["a"], "BCC": ["x.y", "b"]}), exchange="events"),
        ),
        (
            403,
            "ACCESS_REFUSED - cannot publish to internal exchange 'int' in vhost '/'",
            publication(exchange="int"),
        ),
        (
            406,
            "PRECONDITION_FAILED - invalid expiration 'abc': no_integer",
            publication(wired(expiration=b"\3abc")),
        ),
        (
            406,
            "PRECONDITION_FAILED - user_id property set to 'some'body' but authenticated user was 'guest'",
            publication(Message(b"x", user_id="some'body")),
        ),
        (
            406,
            'PRECONDITION_FAILED - invalid message: {unacceptable_type_in_header,"CC",longstr}',
            publication(wired(headers=b"\0\0\0\x09\2CCS\0\0\0\1x")),
        ),
        (
            406,
            'PRECONDITION_FAILED - invalid message: {unacceptable_type_in_header,"BCC",longstr}',
            publication(wired(headers=b"\0\0\0\x0a\3BCCS\0\0\0\1x")),
        ),
        (
            406,
            "PRECONDITION_FAILED - fast reply consumer does not exist",
            publication(Message(b"x", reply_to="amq.rabbitmq.reply-to")),
        ),
        (
            406,
            "PRECONDITION_FAILED - message size 17 is larger than configured max size 16",
            publication(Message(b"x" * 17)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_text_names_what_it_objects_to_and_nothing_else(code: int, text: str, culprit: Publication) -> None:
    """All publishes with the flaw are named, in order."""
    again = Publication(culprit.message, culprit.exchange, culprit.routing_key, False, culprit.size, 0.0, None)
    assert named_by(BrokerReply(code, text), [*OTHERS, culprit, *OTHERS, again]) == [culprit, again]


def test_the_default_exchange_has_a_name_in_errors() -> None:
    """RabbitMQ calls it amq.default when it refuses access."""
    to_default, to_events = publication(), publication(exchange="events")
    text = "ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '/' refused for user 'u'"
    assert named_by(BrokerReply(403, text), [to_events, to_default]) == [to_default]


def test_a_cc_that_is_no_list_of_keys_names_nobody() -> None:
    """RabbitMQ refuses its type first."""
    wrong = publication(wired(headers=b"\0\0\0\x09\2CCS\0\0\0\1x"), exchange="events")
    text = "ACCESS_REFUSED - write access to topic 'x' in exchange 'events' in vhost '/' refused for user 't'"
    assert named_by(BrokerReply(403, text), [wrong]) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (404, "NOT_FOUND - no queue 'miss' in vhost '/'"),
        (404, "no exchange 'miss' in vhost '/'"),
        (404, "NOT_FOUND..."),
        (403, "ACCESS_REFUSED"),
        (406, "PRECONDITION_FAILED - something new"),
        (406, ""),
        (504, "CHANNEL_ERROR - no exchange 'miss' in vhost '/'"),
    ],
)
def test_a_text_that_is_not_known_names_nobody(code: int, text: str) -> None:
    """All publishes are suspects then."""
    assert named_by(BrokerReply(code, text), OTHERS) == []
