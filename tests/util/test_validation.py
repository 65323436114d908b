"""Whole numbers in the arguments of users."""

from __future__ import annotations

import pytest

from reliable_mq import ConfigurationError
from reliable_mq._util.validation import whole_number


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
