"""Messages that cannot be sent are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from reliable_mq.core.publisher import window
from reliable_mq.core.publisher.window import MessageLimits, is_too_large
from reliable_mq.errors import ConfigurationError, PublishRefused
from reliable_mq.message import Message

FRAME_MAX = 131072


def limits(max_message_bytes: int = 2**20) -> MessageLimits:
    return MessageLimits(max_message_bytes, mandatory=True)


@pytest.mark.parametrize("wrong", [-1, True, "1"])
def test_a_limit_is_a_whole_number(wrong: int) -> None:
    with pytest.raises(ConfigurationError, match="max_message_bytes must be a whole number"):
        limits(wrong)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="message"):
        limits().check(b"x", "", "q", FRAME_MAX)  # type: ignore[arg-type]


@pytest.mark.parametrize(("exchange", "routing_key", "names"), [("", ["q"], "routing_key"), ({}, "q", "exchange")])
def test_a_target_that_is_no_text_is_refused_by_name(exchange: Any, routing_key: Any, names: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{names} must be a str"):
        limits().check(Message(b"x"), exchange, routing_key, FRAME_MAX)


def test_a_target_that_cannot_be_encoded_is_refused_each_time() -> None:
    made = limits()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="routing_key"):
            made.check(Message(b"x"), "", "k" * 256, FRAME_MAX)


def test_known_targets_are_forgotten_at_some_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_TARGETS_KEPT", 3)
    made = limits()
    for number in range(10):
        assert made.check(Message(b"xy"), "", f"q{number}", FRAME_MAX) == 2
        assert len(made._targets) <= 3


@pytest.mark.parametrize(
    ("code", "text", "too_large"),
    [
        (311, "the body has 2 bytes, and the limit is 1", True),
        (406, "PRECONDITION_FAILED - message size 17 is larger than configured max size 16", True),
        (406, "PRECONDITION_FAILED - invalid expiration 'soon': no_integer", False),
        (None, "the connection was reset", False),
    ],
)
def test_a_refusal_for_the_size_is_known_by_code_or_text(code: int | None, text: str, too_large: bool) -> None:
    assert is_too_large(code, text) is too_large


def test_a_message_that_is_too_large_is_refused() -> None:
    made = limits(10)
    assert made.check(Message(b"x" * 10), "", "q", FRAME_MAX) == 10
    with pytest.raises(PublishRefused, match="max_message_bytes") as caught:
        made.check(Message(b"x" * 11), "", "q", FRAME_MAX)
    assert caught.value.reply_code == 311
    small, large = Message(b"x", headers={"h": "x" * 100}), Message(b"x", headers={"h": "x" * 8192})
    assert made.check(small, "", "q", 8192) == 1
    with pytest.raises(PublishRefused, match="headers"):
        made.check(large, "", "q", 8192)


def test_a_frame_holds_the_headers_of_a_message_and_some_more() -> None:
    """The limit always includes the header that marks a possible duplicate."""
    message = Message(b"x", headers={"h": "x" * 8000})
    assert limits().fits_frame(message, 10, 8192)
    assert not limits().fits_frame(message, 100, 8192)
