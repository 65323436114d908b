"""The checks of a queue at the start of a query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reliable_mq.codec.methods import DeclareQueue
from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.queue_checks import CheckResult, QueueClaims, delivery_limit, judge
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from pathlib import Path

QUORUM = {"x-queue-type": "quorum"}
DEAD = {"x-dead-letter-exchange": ""}
V40, V312 = (4, 0, 5), (3, 12, 0)


def verdict(values: dict[str, object], version: tuple[int, ...] = V40, **more: bool) -> CheckResult:
    return judge(DeclareQueue("q", arguments=values, **more), version)


@pytest.mark.parametrize(
    ("values", "version"),
    [
        ({}, V40),
        ({"x-queue-type": "classic"}, V40),
        ({**QUORUM, "x-delivery-limit": -1}, V40),
        ({**QUORUM, "x-delivery-limit": -1, **DEAD}, V40),
        (QUORUM, V312),
    ],
)
def test_a_sound_queue_is_not_spoken_of(values: dict[str, object], version: tuple[int, ...]) -> None:
    """Sound queues are classic queues and quorum queues without a limit."""
    assert verdict(values, version) == CheckResult()


@pytest.mark.parametrize(
    ("values", "limit"), [(QUORUM, "20 (the broker's default)"), ({**QUORUM, "x-delivery-limit": 3}, "3")]
)
def test_a_limit_without_a_dead_letter_exchange_drops_messages(values: dict[str, object], limit: str) -> None:
    """The text has the number of deliveries and the fix."""
    dropped = verdict(values).dropped
    assert f"delivery limit of {limit}:" in dropped
    assert "x-delivery-limit=-1, or with a dead-letter exchange" in dropped


def test_a_limit_with_a_dead_letter_exchange_is_a_warning() -> None:
    """A message that is read too often is dead-lettered."""
    found = verdict({**QUORUM, **DEAD})
    assert found.dropped == ""
    assert "after 21 deliveries they are dead-lettered" in found.warnings[0]


def test_what_cannot_be_read_is_refused() -> None:
    """Streams in queue mode, and queues that are deleted with their consumer."""
    assert "option stream" in verdict({"x-queue-type": "stream"}).refused
    assert "auto-delete" in verdict({}, auto_delete=True).refused


def test_what_had_better_be_known_is_a_warning() -> None:
    """A queue that is not durable, or a consumer timeout shorter than a batch."""
    assert "not durable" in verdict({}, durable=False).warnings[0]
    assert (
        "x-consumer-timeout=5000 ms"
        in verdict({**QUORUM, "x-delivery-limit": -1, "x-consumer-timeout": 5000}).warnings[0]
    )


@pytest.mark.parametrize(
    ("values", "version", "limit"),
    [
        (QUORUM, V40, 20),
        (QUORUM, V312, None),
        ({**QUORUM, "x-delivery-limit": 3}, V312, 3),
        ({**QUORUM, "x-delivery-limit": 0}, V40, 0),
        ({**QUORUM, "x-delivery-limit": -1}, V40, None),
        ({"x-delivery-limit": 3}, V40, None),
        ({}, V40, None),
    ],
)
def test_the_delivery_limit_of_a_queue_is_known(
    values: dict[str, object], version: tuple[int, ...], limit: int | None
) -> None:
    assert delivery_limit(DeclareQueue("q", arguments=values), version) == limit


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (("amqp://localhost/", "shop"), ("amqp://127.0.0.1/", "shop"), True),
        (("amqp://localhost/", "rabbit@a"), ("amqp://localhost/", "rabbit@b"), True),
        (("amqp://localhost/", ""), ("amqp://localhost/", ""), True),
        (("amqp://localhost/", "shop"), ("amqp://localhost/other", "shop"), False),
        (("amqp://localhost/", "shop"), ("amqp://127.0.0.1/", "till"), False),
        (("amqp://localhost/", ""), ("amqp://127.0.0.1/", ""), False),
    ],
)
def test_a_queue_is_the_same_by_whatever_address_it_is_read(
    tmp_path: Path, first: tuple[str, str], second: tuple[str, str], refused: bool
) -> None:
    """The key is the cluster name with the virtual host, or else the URL."""
    one, two = (QueueClaims(tmp_path, parse_url(url)) for url, _ in (first, second))
    one.claim(["a", "b"], cluster=first[1])
    one.claim(["a", "b"], cluster=first[1])  # already claimed
    two.claim(["c"], cluster=second[1])
    two.release()
    if not refused:
        two.claim(["c", "b"], cluster=second[1], patience=0)
        two.release()
    else:
        with pytest.raises(ConfigurationError, match="queue 'b' is read twice in this application"):
            two.claim(["c", "b"], cluster=second[1], patience=0)
    one.release()
    two.claim(["c", "b"], cluster=second[1], patience=0)
    two.release()
