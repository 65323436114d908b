"""Whole numbers and JSON in the arguments of users."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import TYPE_CHECKING

import pytest

from reliable_mq import ConfigurationError
from reliable_mq._util.validation import decode_json, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("value", [1, 5, 2**70])
def test_a_whole_number_above_its_bound_is_returned(value: int) -> None:
    assert whole_number("limit", value, 1) is value


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_anything_else_is_refused_by_the_name_of_its_option(value: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        whole_number("limit", value, 1)
    assert str(refused.value) == f"limit must be a whole number of at least 1, not {value!r}"


def test_both_bounds_and_the_unit_are_named() -> None:
    assert whole_number("size", 10, 0, 10, unit="bytes") == 10
    with pytest.raises(ConfigurationError) as refused:
        whole_number("size", 11, 0, 10, unit="bytes")
    assert str(refused.value) == "size must be a whole number from 0 to 10 (bytes), not 11"


@pytest.mark.parametrize("kind", [str, str.encode], ids=["text", "bytes"])
def test_json_of_many_levels_is_refused_before_it_is_decoded(kind: Callable[[str], str | bytes]) -> None:
    """Brackets in strings are no levels."""
    assert decode_json(kind("[" * 500 + "]" * 500)) == json.loads("[" * 500 + "]" * 500)
    assert decode_json(kind(json.dumps(['[{"' * 2000, {}] * 400))) == ['[{"' * 2000, {}] * 400
    for text in ("[" * 501 + "]" * 501, '{"a":' * 501 + "1" + "}" * 501, '["]", ' * 501, "[" * 100_000):
        with pytest.raises(RecursionError):
            decode_json(kind(text))
    with pytest.raises(ValueError, match="Expecting value"):
        decode_json(kind("[" * 400))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_the_levels_of_json_are_counted_in_any_encoding(encoding: str) -> None:
    """In UTF-16, the bytes of these characters are those of a quote and of brackets."""
    flat = json.dumps(["\u2200", "\u5b57" * 600], ensure_ascii=False)
    assert decode_json(flat.encode(encoding)) == ["\u2200", "\u5b57" * 600]
    with pytest.raises(RecursionError, match="JSON of 602 levels"):
        decode_json(f"[{flat}, {'[' * 601}{']' * 601}]".encode(encoding))


def test_destructors_have_room_while_json_is_decoded() -> None:
    """A garbage collection may run in the middle of it."""
    destroyed: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            destroyed.append(_frames(400))

    before = gc.get_threshold()
    gc.collect()
    try:
        gc.set_threshold(600)
        Cycle()
        with contextlib.suppress(RecursionError):
            decode_json("[" * 32_000)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert destroyed == [400]


def _frames(count: int) -> int:
    return 1 + _frames(count - 1) if count > 1 else 1
