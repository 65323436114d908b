"""How a batch of queue mode is split into parts for its tasks."""

from __future__ import annotations

import pytest

from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.spark.queue_source import _split

MIB = 2**20


def deliveries(count: int, size: int) -> list[Delivery]:
    body = bytes(size)  # shared by all, because only the length counts
    return [Delivery("tag", number, False, "", "orders", b"\x00\x00", body) for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("count", "size", "least", "records", "parts"),
    [
        (1, 10, None, None, 1),
        (1000, 10, None, None, 1),
        (60, MIB, None, None, 4),  # one part per 16 MiB
        (60, MIB, 2, None, 4),
        (60, MIB, 10, None, 10),
        (3, 10, 10, None, 3),  # no part is empty
        (1, 120 * MIB, None, None, 1),  # a message is in one part whatever its size
        (1000, 10, 200, None, 16),  # no more than are worthwhile
        (1000, 10, 200, 10, 100),  # unless the size limit requires more
        (60, MIB, None, 25, 4),
    ],
)
def test_a_batch_is_split_by_16_mib_or_the_requested_number(
    count: int, size: int, least: int | None, records: int | None, parts: int
) -> None:
    """The parts are in order, of about the same size, and complete."""
    batch = deliveries(count, size)
    found = list(_split(batch, least, records))
    assert len(found) == parts
    assert [each for part in found for each in part] == batch
    assert max(map(len, found)) - min(map(len, found)) <= 1
