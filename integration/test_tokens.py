"""Expiring tokens on a real broker with the OAuth 2 plugin, on both APIs.

They are renewed on the open connection. A token that expires costs its connection.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from integration.support.blocking import BlockingPublisher
from integration.support.blocking_consumer import BlockingConsumer
from integration.support.seeds import soaking
from integration.support.set_up import LINES, broker_image
from integration.support.tokens import CONF, Issuer
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.codec.methods import DeleteQueue
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.testing import RabbitMQ
from reliable_mq.testing.waiting import wait_until
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

LIFETIME = 5.0  # seconds; RabbitMQ checks tokens by whole seconds
SPARE = 10.0  # seconds that a busy machine may add to a renewal; less than all rotations take
ROTATIONS = 10
ORDERS = Queue("orders", type="classic", dead_letter=None)


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer(LIFETIME)


@pytest.fixture(scope="module", params=LINES if soaking() else ["newest"])
def url(request: pytest.FixtureRequest, issuer: Issuer) -> Iterator[str]:
    with RabbitMQ(broker_image(request.param), conf=CONF, files=issuer.files) as broker:
        yield broker.url.replace("guest:guest@", "")


@pytest.fixture(autouse=True)
def honest(issuer: Issuer) -> None:
    issuer.forged = issuer.fails = False
    issuer.spare = 0.0


@pytest.fixture(params=[pytest.param("sync", marks=pytest.mark.soak), "aio"])
def kinds(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return (Publisher, Consumer) if request.param == "sync" else (BlockingPublisher, BlockingConsumer)


def renewals(registry: CollectorRegistry, outcome: str) -> float:
    labels = {"publisher": "shop", "outcome": outcome}
    return registry.get_sample_value("reliable_mq_publisher_token_renewals_total", labels) or 0.0


def renewals_of_consumer(registry: CollectorRegistry, outcome: str) -> float:
    labels = {"consumer": "billing", "queue": "orders", "outcome": outcome}
    return registry.get_sample_value("reliable_mq_consumer_token_renewals_total", labels) or 0.0


@pytest.mark.timeout(300)
def test_connections_outlive_ten_rotations_and_log_no_token(
    url: str, issuer: Issuer, kinds: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Publisher and consumer keep their first connections across all tokens."""
    caplog.set_level(logging.DEBUG)
    issuer.spare = SPARE
    new_publisher, new_consumer = kinds
    registry = CollectorRegistry()
    handled: list[bytes] = []
    lock = threading.Lock()

    def handle(delivery: Any) -> None:
        with lock:
            handled.append(delivery.body)

    published = 0
    with (
        new_publisher(
            url, topology=[ORDERS], credentials=issuer.credentials, name="shop", registry=registry
        ) as publisher,
        new_consumer(
            url, ORDERS, handle, credentials=issuer.credentials, name="billing", registry=registry
        ) as consumer,
    ):
        for rotation in range(ROTATIONS + 1):
            for counted in (renewals, renewals_of_consumer):
                wait_until(
                    lambda least=rotation, counted=counted: counted(registry, "accepted") >= least,  # type: ignore[misc]
                    timeout=60,
                    what=f"renewal {rotation}",
                )
            publisher.publish(Message(b"%d" % published), routing_key="orders")
            published += 1
        for counted in (renewals, renewals_of_consumer):
            assert counted(registry, "refused") == counted(registry, "failed") == 0
        wait_until(lambda: len(handled) == published, timeout=60, what=lambda: f"{len(handled)} of {published}")
        labels = {"publisher": "shop"}
        assert registry.get_sample_value("reliable_mq_publisher_reconnects_total", labels) == 0
        assert consumer.reconnects == 0
        texts = [repr(publisher), repr(consumer), repr(getattr(publisher, "publisher", publisher).health())]
    texts += [record.getMessage() + str(record.__dict__) for record in caplog.records]
    assert len(issuer.issued) >= 2 * (ROTATIONS + 1)
    secrets = [token.rpartition(".")[2][:40] for token in issuer.issued]
    assert [text[:200] for text in texts if any(secret in text for secret in secrets)] == []


def test_a_refused_token_is_reported_and_a_good_one_reconnects(
    url: str, issuer: Issuer, kinds: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The broker closes the connection; a good token reconnects everything."""
    registry = CollectorRegistry()
    issuer.spare = SPARE
    with kinds[0](
        url,
        topology=[ORDERS],
        credentials=issuer.credentials,
        name="shop",
        registry=registry,
        reconnect_wait=lambda _: 0.2,
    ) as publisher:
        publisher.publish(Message(b"before"), routing_key="orders")
        issuer.forged = True
        wait_until(lambda: renewals(registry, "refused") == 1, timeout=60, what="the refusal")
        wait_until(lambda: not publisher.connected, timeout=60, what="the loss")
        health = getattr(publisher, "publisher", publisher).health()
        assert (health.live, health.ready) == (True, False)
        waiting = publisher.submit(Message(b"meanwhile"), routing_key="orders")
        issuer.forged = False
        assert waiting.exception(60) is None
    [line] = [record for record in caplog.records if "refused the renewed token" in record.getMessage()]
    assert line.levelno == logging.ERROR
    assert "530" in line.getMessage()


def test_a_callback_without_a_token_is_tried_again_in_time(
    url: str, issuer: Issuer, kinds: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A failing identity provider closes no connection while the token is valid."""
    registry = CollectorRegistry()
    issuer.lifetime, issuer.spare = 20.0, SPARE
    try:
        with kinds[0](
            url, topology=[ORDERS], credentials=issuer.credentials, name="shop", registry=registry
        ) as publisher:
            publisher.connect()
            issuer.fails = True
            wait_until(lambda: renewals(registry, "failed") >= 1, timeout=60, what="a failure")
            issuer.fails = False
            wait_until(lambda: renewals(registry, "accepted") >= 1, timeout=60, what="a renewal")
            publisher.publish(Message(b"x"), routing_key="orders")
            labels = {"publisher": "shop"}
            assert registry.get_sample_value("reliable_mq_publisher_reconnects_total", labels) == 0
    finally:
        issuer.lifetime = LIFETIME
    assert any(
        "failed to get a new token; the current one expires in" in record.getMessage() for record in caplog.records
    )


@pytest.mark.parametrize("url", LINES, indirect=True)
def test_messages_wait_while_an_expired_token_has_no_successor(
    url: str, issuer: Issuer, kinds: tuple[Any, Any]
) -> None:
    """RabbitMQ 4.3 disconnects. RabbitMQ 4.0 refuses every publish, and no message is to blame."""
    with kinds[0](url, topology=[ORDERS], credentials=issuer.credentials, reconnect_wait=lambda _: 0.2) as publisher:
        publisher.publish(Message(b"before"), routing_key="orders")
        issuer.fails = True
        meanwhile = [publisher.submit(Message(b"meanwhile"), routing_key="orders")]

        def is_away() -> bool:
            """Publish until the broker refuses it, and while no attempt can succeed."""
            meanwhile.append(publisher.submit(Message(b"meanwhile"), routing_key="orders"))
            return "credentials callback raised" in getattr(publisher, "publisher", publisher).health().reason

        wait_until(is_away, timeout=60, what="an attempt without a token")
        issuer.fails = False
        assert [confirmation.exception(60) for confirmation in meanwhile if confirmation.exception(60)] == []


@pytest.mark.parametrize("url", LINES, indirect=True)
def test_a_token_of_unknown_lifetime_is_replaced_once_it_expires(
    url: str, issuer: Issuer, kinds: tuple[Any, Any]
) -> None:
    """Also for a consumer, whose next channel the broker would refuse as well."""
    new_publisher, new_consumer = kinds
    handled: list[bytes] = []
    read = 0

    def credentials() -> tuple[str, str]:
        nonlocal read
        read += 1
        token = issuer.credentials()
        return token.username, token.password

    with new_consumer(url, ORDERS, lambda delivery: handled.append(delivery.body), credentials=credentials) as consumer:
        wait_until(lambda: consumer.connected, timeout=60, what="a subscription")
        with new_publisher(url, topology=[ORDERS], credentials=credentials, mandatory=False) as publisher:

            def is_renewed() -> bool:
                publisher.publish(Message(b"x"), routing_key="orders", timeout=30)
                return read > 2

            wait_until(is_renewed, timeout=60, what="another token, as the first have expired")
            issuer.spare = SPARE
            with AdminChannel(replace(parse_url(url), credentials=issuer.credentials), name="admin") as admin:
                admin.perform(DeleteQueue("orders"))  # so the consumer declares it again

            def arrives() -> bool:
                publisher.publish(Message(b"last"), routing_key="orders", timeout=30)
                return b"last" in handled

            wait_until(arrives, timeout=60, what="another subscription")
