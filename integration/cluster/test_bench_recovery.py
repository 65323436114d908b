"""``make bench-recovery`` measures every fault that it names.

The recovery times are only compared with a generous limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.bench.recovery import CONTENDERS, Faults, Ours, OursAsync, measure, table

if TYPE_CHECKING:
    from random import Random

    from reliable_mq.testing import RabbitMQCluster

ENDLESS = 120.0  # seconds


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", [21, 64])
def test_messages_of_all_contenders_are_measured(rabbitmq_cluster: RabbitMQCluster, rng: Random, row: int) -> None:
    [(what, harm, elsewhere)] = [fault[1:] for fault in Faults(rabbitmq_cluster).all if fault[0] == row]

    times = measure(rabbitmq_cluster, harm, rng, elsewhere=elsewhere)

    assert times.keys() == {kind.label for kind in CONTENDERS}
    for kind in (Ours, OursAsync):
        assert 0 < min(times[kind.label]) <= max(times[kind.label]) < ENDLESS
    lines = table({(row, what, label): [seconds] for label, seconds in times.items()}).markdown().splitlines()
    assert sum(f"{row}: {what}" in line for line in lines) == len(CONTENDERS)
