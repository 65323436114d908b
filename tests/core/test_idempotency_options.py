"""The options of a consumer for its idempotency store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from reliable_mq import ConfigurationError
from reliable_mq.core.idempotency import LEASE, check_options


async def awaited(_delivery: object) -> str:
    return "key"


def check(key: Any = None, namespace: Any = None, lease: Any = LEASE, has_store: bool = True) -> float:
    return check_options(key, namespace, lease, has_store=has_store)


def test_the_lease_is_returned_in_seconds() -> None:
    assert check(str, "shop", timedelta(minutes=1)) == 60.0
    assert check(has_store=False) == LEASE


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"key": "id"}, "idempotency_key must be callable, not 'id'"),
        ({"key": awaited}, "idempotency_key is a coroutine function"),
        ({"namespace": 5}, "idempotency_namespace must be text, not 5"),
        ({"lease": 0}, "idempotency_lease must be"),
        ({"key": str, "has_store": False}, "idempotency_key has no effect without idempotency=: give a store"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(**given)
    assert says in str(caught.value)
