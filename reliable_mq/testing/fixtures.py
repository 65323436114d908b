"""Pytest fixtures for tests of services that use RabbitMQ.

Put this into the top-level ``conftest.py``::

    pytest_plugins = ["reliable_mq.testing.fixtures"]

Tests can then use the fixtures::

    def test_reconnects(virtual_host: VirtualHost, fault_proxy: FaultProxyFactory):
        proxy = fault_proxy(virtual_host.url)
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
`virtual_host`      test     a fresh `VirtualHost` on `rabbitmq`, deleted after the test
`new_vhost`         test     a function that makes fresh virtual hosts on a broker or a cluster
`fault_proxy`       test     a function that starts a `FaultProxy` before a URL
`audit`             test     an `Audit`; its counts are printed at the end of the run
==================  =======  ===========================================================================================
"""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq import testing  # lazy names: its brokers need docker, but a test with only the proxy does not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliable_mq.testing import Audit, FaultProxy, FaultProxyFactory, RabbitMQ, RabbitMQCluster, VirtualHost

__all__ = [
    "ACCOUNT",
    "audit",
    "fault_proxy",
    "new_vhost",
    "pytest_terminal_summary",
    "rabbitmq",
    "rabbitmq_cluster",
    "rabbitmq_image",
    "virtual_host",
]

ACCOUNT = "account"  # a property of a test's report, which also arrives from the processes of pytest-xdist

# Pytest then explains the failed assertions of the contracts.
pytest.register_assert_rewrite("reliable_mq.testing.store_contract", "reliable_mq.testing.outbox_contract")


@pytest.fixture(scope="session")
def rabbitmq_image() -> str | None:
    """Return the docker image of the brokers, or None for the default of `RabbitMQ`."""
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
    """Return the broker that all tests of the session share.

    A test may inject any fault into the broker, which is healed after each test. The first use launches the broker,
    which takes about 10 s.

    Raises:
        ConfigurationError: If the system is not Linux, or the extra ``testing`` is missing.
        LabError: If docker or the image is not available.
    """
    yield _session_rabbitmq
    _session_rabbitmq.heal()


@pytest.fixture
def rabbitmq_cluster(_session_rabbitmq_cluster: RabbitMQCluster) -> Iterator[RabbitMQCluster]:
    """Return the cluster of three nodes that all tests of the session share.

    The cluster is healed after each test. The first use launches the cluster, which takes about 20 s.

    Raises:
        ConfigurationError: If the system is not Linux, or the extra ``testing`` is missing.
        LabError: If docker or the image is not available.
    """
    yield _session_rabbitmq_cluster
    _session_rabbitmq_cluster.heal()


@pytest.fixture
def new_vhost() -> Iterator[Callable[[RabbitMQ | RabbitMQCluster], VirtualHost]]:
    """Return a function that creates virtual hosts, which are deleted after the test."""
    with ExitStack() as made:

        def make(broker: RabbitMQ | RabbitMQCluster) -> VirtualHost:
            virtual_host = testing.VirtualHost(broker, f"test-{uuid.uuid4().hex[:12]}")
            virtual_host.create()
            made.callback(virtual_host.delete)
            made.callback(broker.heal)
            return virtual_host

        yield make


@pytest.fixture
def virtual_host(rabbitmq: RabbitMQ, new_vhost: Callable[[RabbitMQ | RabbitMQCluster], VirtualHost]) -> VirtualHost:
    """Return a new virtual host on `rabbitmq`, which is deleted after the test."""
    return new_vhost(rabbitmq)


@pytest.fixture
def audit(request: pytest.FixtureRequest) -> Audit:
    """Return an audit for one test. Its counts are printed at the end of the run."""
    return testing.Audit(lambda counts: request.node.user_properties.append((ACCOUNT, counts)))


def recorded(terminalreporter: pytest.TerminalReporter, name: str) -> list[tuple[str, object]]:
    """Return the values that tests recorded under a name, each with the test's name."""
    return [
        (report.nodeid.partition("::")[2], value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
        for each, value in report.user_properties
        if each == name
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of every audit."""
    accounts = [f"{test}: {value}" for test, value in recorded(terminalreporter, ACCOUNT)]
    if accounts:
        terminalreporter.section("accounts")
        for account in sorted(accounts):
            terminalreporter.write_line(account)


@pytest.fixture
def fault_proxy() -> Iterator[FaultProxyFactory]:
    """Return a function that starts fault proxies, which are closed after the test.

    Yields:
        A factory that takes the arguments of `FaultProxy`: the broker's URL, and options.

    Raises:
        UsageError: At the end of the test, if a function given to `FaultProxy.rewrite` raised an error.
    """
    with ExitStack() as proxies:

        def make(url: str, **options: Any) -> FaultProxy:
            return proxies.enter_context(testing.FaultProxy(url, **options))

        yield make
