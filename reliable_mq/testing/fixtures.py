"""Pytest fixtures for services that use RabbitMQ.

Put this into the top-level ``conftest.py``::

    pytest_plugins = ["reliable_mq.testing.fixtures"]

and then, in a test::

    def test_reconnects(fault_proxy: reliable_mq.testing.FaultProxyFactory):
        proxy = fault_proxy("amqp://guest:guest@localhost:5672/")
        with connect_my_service(proxy.url) as service:
            proxy.wait_for(lambda: proxy.live_connections == 1)
            proxy.cut()
            proxy.wait_for(lambda: proxy.connections == 2)
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reliable_mq.testing.proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing.proxy import FaultProxyFactory

__all__ = ["fault_proxy"]

# So that pytest explains their failed assertions.
pytest.register_assert_rewrite("reliable_mq.testing.store_contract", "reliable_mq.testing.outbox_contract")


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
            return proxies.enter_context(FaultProxy(url, seed=seed))

        yield make
