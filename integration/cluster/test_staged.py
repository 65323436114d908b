"""A query in staged mode on a cluster whose leaders die.

The files have each message once.
"""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING

import pytest

from integration.support.staged_pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from reliable_mq.testing import RabbitMQCluster, VirtualHost

KILLS = 6


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_f20_kills_of_leaders_leave_all_once_in_staged_files(
    rabbitmq_cluster: RabbitMQCluster,
    cluster_vhost: VirtualHost,
    tmp_path: Path,
    rng: Random,
    report: Callable[[str], None],
) -> None:
    """The leaders of the queue, the stage and its lock are killed.

    Each node is back before the next one dies.
    """
    pipeline = Pipeline(cluster_vhost, tmp_path, rng)
    killed = rng.sample(["orders", "orders.stage", "orders.stage.relay"] * (KILLS // 3), KILLS)
    with pipeline.apart(tmp_path / "log") as (running, _):
        for number in pipeline.moments(KILLS, running, broker=True):
            rabbitmq_cluster.leader_of(killed[number], cluster_vhost.name).kill()
            Event().wait(rng.uniform(0.0, 10.0))  # other leaders may or may not be elected by then
            rabbitmq_cluster.start()
            rabbitmq_cluster.wait_ready()
    assert pipeline.restarts == 0
    report(pipeline.check_apart(tmp_path / "rest", f"{KILLS} kills of a leader"))
