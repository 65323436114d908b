"""A cluster of three nodes that all tests here share, and traffic on it."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from integration.support.set_up import broker_image
from integration.support.traffic import Traffic
from reliable_mq.testing.fixtures import _session_rabbitmq_cluster, rabbitmq_cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from integration.support.rounds import Round
    from reliable_mq.testing import RabbitMQCluster, VirtualHost

LINE = "RELIABLE_MQ_CLUSTER_LINE"  # "newest", or "4.0"

__all__ = ["_session_rabbitmq_cluster", "rabbitmq_cluster"]


@pytest.fixture(scope="session")
def rabbitmq_image() -> str:
    return broker_image(os.environ.get(LINE, "newest"))


@pytest.fixture
def cluster_vhost(
    rabbitmq_cluster: RabbitMQCluster, new_vhost: Callable[[RabbitMQCluster], VirtualHost]
) -> VirtualHost:
    """A fresh virtual host on the healthy cluster."""
    return new_vhost(rabbitmq_cluster)


@pytest.fixture
def traffic(
    cluster_vhost: VirtualHost,
    rabbitmq_cluster: RabbitMQCluster,
    rng: Random,
    tmp_path: Path,
    report: Callable[[str], None],
    record_round: Callable[[Round], None],
) -> Callable[..., Traffic]:
    """A function `(*, pinned=...) -> Traffic`."""
    return partial(Traffic, cluster_vhost, rabbitmq_cluster, rng, tmp_path, report, record_round)
