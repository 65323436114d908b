"""Descriptions of failures: bounded, printable, and never raising."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import DeadLetter, RetryLater
from reliable_mq.core.consumer.attempts import Failure, describe, printable, shown

BAD = DeadLetter("bad")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Nameless(type):
    def __getattribute__(cls, name: str) -> object:
        if name in {"__name__", "__qualname__"}:
            raise SystemExit(3)
        return super().__getattribute__(name)


class Odd(Exception, metaclass=Nameless):
    """An exception without a class name or ``__class__``; its text is a subclass."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise SystemExit(3)

    def __str__(self) -> str:
        return OddText("odd")


class OddText(str):
    __slots__ = ()

    def isprintable(self) -> bool:
        raise SystemExit(3)

    __getitem__ = isprintable  # type: ignore[assignment]


class NotYet(RetryLater):
    """A `RetryLater` that does not call the parent's constructor."""

    def __init__(self, order: object) -> None:
        self.order = order


class Never(DeadLetter):
    """A `DeadLetter` that does not call the parent's constructor."""

    def __init__(self, order: object) -> None:
        self.order = order


class Hidden(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> tuple[Exception, ...]:  # type: ignore[override]
        raise SystemExit(3)


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


@pytest.mark.parametrize(
    "make",
    [
        Unprintable,
        Odd,
        lambda: NotYet(Unprintable()),
        lambda: Never(Unprintable()),
        lambda: DeadLetter(Unprintable()),
        lambda: Hidden("two", [Odd(), DeadLetter(Unprintable())]),
    ],
    ids=["text", "class", "RetryLater without its constructor", "DeadLetter without it", "reason", "group"],
)
def test_nothing_that_an_exception_does_ends_its_description(make: Callable[[], BaseException]) -> None:
    error = make()  # created here, because a test runner that looks at it would end
    failure = describe(error, 0.0)
    for text in (failure.exception_type, failure.exception_message, failure.verdict or ""):
        assert text.isprintable()
        assert type(text) is str
    assert shown(error).isprintable()


def test_verdicts_whose_constructor_never_ran_are_still_verdicts() -> None:
    later, never = describe(NotYet("order 7"), 0.0), describe(Never("order 7"), 0.0)
    assert (later.delay, later.verdict, later.kinds) == (None, None, ())
    assert (never.delay, never.verdict, never.kinds) == (None, "order 7", ())
    assert (describe(Never(""), 0.0).verdict or "").endswith("test_failure.Never"), "a reason is never empty"


@pytest.mark.parametrize("delay", ["soon", -1, float("nan"), 1e12, [5]], ids=str)
def test_a_delay_that_is_none_is_that_of_the_policy_and_said(delay: Any) -> None:
    later = RetryLater(5)
    later.delay = delay
    failure = describe(later, 0.0)
    assert failure.delay is None
    assert failure.exception_message == "in 5 s (its delay is not a number of seconds: the delay of the policy is used)"


def test_a_delay_that_was_changed_counts() -> None:
    later = RetryLater(5)
    later.delay = timedelta(minutes=1)  # type: ignore[assignment]
    assert describe(later, 0.0).delay == 60.0


def test_a_dead_letter_wins_in_a_group_then_policy_then_delay() -> None:
    inner = ExceptionGroup("in it", [RetryLater(5), RetryLater()])
    later = describe(ExceptionGroup("all", [RetryLater(3), inner, KeyError("k")]), 0.0)
    assert (later.delay, later.verdict, later.kinds) == (5.0, None, ((KeyError, ExceptionGroup),))
    dead = describe(ExceptionGroup("all", [RetryLater(3), ExceptionGroup("in it", [DeadLetter("x")]), BAD]), 0.0)
    assert dead.verdict == "x"
    alone = describe(ExceptionGroup("all", [inner]), 0.0)
    assert (alone.delay, alone.kinds) == (5.0, ())


def test_a_group_is_described_with_what_is_in_it() -> None:
    group = BaseExceptionGroup("tasks", [ValueError("no"), SystemExit(3), *[KeyError(number) for number in range(5)]])
    failure = describe(group, 0.0)
    assert failure.exception_type == "BaseExceptionGroup"
    assert failure.exception_message == (
        "tasks (7 sub-exceptions): ValueError: no; SystemExit: 3; KeyError: 0; KeyError: 1; KeyError: 2; and 2 more"
    )
    assert failure.kinds[:2] == ((ValueError, BaseExceptionGroup), (SystemExit, BaseExceptionGroup))


class Both(RetryLater, ExceptionGroup[Exception]):  # type: ignore[misc]
    """A verdict that is also an exception group."""

    def __init__(self, *_args: object) -> None:
        super().__init__(9)


def test_a_verdict_that_is_a_group_is_a_verdict() -> None:
    assert describe(Both("x", [ValueError()]), 0.0).delay == 9.0


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
