"""Pytest fixtures for services that use RabbitMQ.

Put this into the top-level ``conftest.py``::

    pytest_plugins = ["reliable_mq.testing.fixtures"]

and then, in a test::

    def test_reconnects(rabbitmq: reliable_mq.testing.RabbitMQ, fault_proxy: reliable_mq.testing.FaultProxyFactory):
        proxy = fault_proxy(rabbitmq.url)
        with connect_my_service(proxy.url) as service:
            proxy.wait_for(lambda: proxy.live_connections == 1)
            proxy.cut()
            proxy.wait_for(lambda: proxy.connections == 2)

==================  =======  ===========================================================================================
fixture             scope    value
==================  =======  ===========================================================================================
`rabbitmq_image`    session  the image of the brokers; define one of this name to choose another
`rabbitmq`          test     the `RabbitMQ` that all tests of the session share, healed after each
`rabbitmq_cluster`  test     the `RabbitMQCluster` of three nodes that they share, healed after each
`fault_proxy`       test     a function that starts a `FaultProxy` before a URL
==================  =======  ===========================================================================================
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reliable_mq import testing  # whose brokers need docker, which a test with the proxy alone does not

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing import FaultProxy, FaultProxyFactory, RabbitMQ, RabbitMQCluster

__all__ = ["fault_proxy", "rabbitmq", "rabbitmq_cluster", "rabbitmq_image"]

# So that pytest explains their failed assertions.
pytest.register_assert_rewrite("reliable_mq.testing.store_contract", "reliable_mq.testing.outbox_contract")


@pytest.fixture(scope="session")
def rabbitmq_image() -> str | None:
    """Return the image of the brokers: None for the default of `RabbitMQ`."""
    return None


@pytest.fixture(scope="session")
def _session_rabbitmq(rabbitmq_image: str | None) -> Iterator[RabbitMQ]:
    testing.remove_leftovers()
    with testing.RabbitMQ(rabbitmq_image) as broker:
        yield broker


@pytest.fixture(scope="session")
def _session_rabbitmq_cluster(rabbitmq_image: str | None) -> Iterator[RabbitMQCluster]:
    testing.remove_leftovers()
    with testing.RabbitMQCluster(image=rabbitmq_image) as cluster:
        yield cluster


@pytest.fixture
def rabbitmq(_session_rabbitmq: RabbitMQ) -> Iterator[RabbitMQ]:
    """Return the broker that all tests of the session share; inject any fault into it.

    The first use launches it, which takes some 10 s, and after each test it is healed.

    Raises:
        ConfigurationError: this is not Linux, or the extra ``testing`` is missing.
        LabError: docker or the image cannot be had.
    """
    yield _session_rabbitmq
    _session_rabbitmq.heal()


@pytest.fixture
def rabbitmq_cluster(_session_rabbitmq_cluster: RabbitMQCluster) -> Iterator[RabbitMQCluster]:
    """Return the cluster of three nodes that all tests of the session share.

    The first use launches it, which takes some 20 s, and after each test it is healed.

    Raises:
        ConfigurationError: this is not Linux, or the extra ``testing`` is missing.
        LabError: docker or the image cannot be had.
    """
    yield _session_rabbitmq_cluster
    _session_rabbitmq_cluster.heal()


@pytest.fixture
def fault_proxy() -> Iterator[FaultProxyFactory]:
    """Make started fault proxies, and close them all when the test has ended.

    Yields:
        A factory with the arguments of `FaultProxy`: the broker's URL, and a seed.

    Raises:
        UsageError: at the end of the test, where a function given to `FaultProxy.rewrite` had raised.
    """
    with ExitStack() as proxies:

        def make(url: str, *, seed: int = 0) -> FaultProxy:
            return proxies.enter_context(testing.FaultProxy(url, seed=seed))

        yield make
