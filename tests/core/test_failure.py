"""Failures are described where they happen: bounded, printable, and without ever raising."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import DeadLetter, RetryLater
from reliable_mq.core.failure import Failure, describe, printable


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_a_builtin_exception_is_named_without_its_module() -> None:
    assert describe(ValueError("no such thing"), 12.5) == Failure("ValueError", "no such thing", 12.5)


def test_any_other_is_named_with_it() -> None:
    failure = describe(Unprintable(), 0.0)
    assert failure.exception_type.endswith("test_failure.Unprintable")
    assert failure.exception_message == "(its text cannot be shown)"


def test_what_the_handler_chose_is_kept() -> None:
    assert describe(RetryLater(7), 0.0).delay == 7.0
    assert describe(RetryLater(), 0.0).delay is None
    chosen = describe(DeadLetter("bad\ncurrency"), 0.0)
    assert (chosen.exception_type, chosen.verdict) == ("reliable_mq.retry.DeadLetter", "bad\\ncurrency")


def test_control_characters_are_escaped_and_long_texts_cut() -> None:
    assert printable("a\x1b[31m\r\n\u202e\ud800é") == "a\\x1b[31m\\r\\n\\u202e\\ud800é"
    assert printable("x" * 600) == "x" * 509 + "..."
    assert printable("x" * 512) == "x" * 512


@given(st.text(st.characters(codec=None)), st.integers(3, 40))
def test_any_text_becomes_bounded_and_encodable(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()
    shown.encode()
