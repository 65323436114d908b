"""The I/O thread over TLS, against a real broker that requires a certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.certificates import DAY, Authority, Certificate
from integration.support.recorder import Recorded
from reliable_mq.codec.methods import Consume
from reliable_mq.core.channel_setup import consumer_setup, publisher_setup
from reliable_mq.testing.waiting import wait_until
from reliable_mq.tls import TLSOptions
from reliable_mq.topology import Queue

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.testing import RabbitMQ

pytestmark = pytest.mark.usefixtures("baseline", "connection_api")


@pytest.fixture(scope="module")
def client(authority: Authority) -> Certificate:
    return authority.issue("guest")


def options(authority: Authority, client: Certificate) -> TLSOptions:
    return TLSOptions(ca_file=authority.file, cert_file=client.cert_file, key_file=client.key_file)


def test_more_than_any_buffer_holds_goes_both_ways(
    broker: RabbitMQ, authority: Authority, client: Certificate, connection_api: str
) -> None:
    queue = f"q-{connection_api}"
    url = f"amqps://guest:guest@localhost:{broker.tls_port}/"
    large = [bytes(range(256)) * 4096 * 8] * 2  # MiB, each more than a kernel accepts at once
    tls = options(authority, client)
    with Recorded(url, lambda _: publisher_setup([Queue(queue, type="classic")], ()), tls=tls) as recorded:
        recorded.client.wait_for("ready")
        written = [recorded.encoded(queue, body) for body in large]
        broker.pause()
        recorded.call(lambda: [recorded.io.write(data) for data in written])
        for _ in range(500):
            recorded.publish(queue, b"small")
        broker.unpause()
        wait_until(
            lambda: max((tag for tag, _ in recorded.client.all("acked")), default=0) == 502,
            timeout=120,
            what="all confirms",
        )
        assert recorded.client.all("write_drained")
    consume = Consume(queue, "tag")
    with Recorded(url, lambda _: consumer_setup(queue, [], (), consume, prefetch=0), tls=tls) as recorded:
        wait_until(lambda: len(bodies(recorded)) == 502, timeout=120, what="all deliveries")
        assert bodies(recorded) == [*large, *[b"small"] * 500]


def bodies(recorded: Recorded) -> list[bytes]:
    return [delivery.body for (deliveries,) in recorded.client.all("delivered") for delivery in deliveries]


def test_a_client_can_be_known_by_its_certificate(broker: RabbitMQ, authority: Authority, client: Certificate) -> None:
    url = f"amqps://127.0.0.1:{broker.tls_port}/"
    with Recorded(url, tls=options(authority, client), mechanism="EXTERNAL") as recorded:
        recorded.client.wait_for("ready")


def test_a_broker_of_an_unknown_authority_is_refused(broker: RabbitMQ, client: Certificate, tmp_path: Path) -> None:
    with Recorded(
        f"amqps://guest:guest@localhost:{broker.tls_port}/", tls=options(Authority(tmp_path, "other"), client)
    ) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
        assert error.permanent
        assert not will_retry
        assert "does not verify" in str(error)


@pytest.mark.parametrize(
    ("given", "alert"),
    [("none", "certificate required"), ("expired", "certificate expired"), ("of another authority", "unknown ca")],
)
def test_a_client_without_a_valid_certificate_is_told_so(
    broker: RabbitMQ, authority: Authority, tmp_path: Path, given: str, alert: str
) -> None:
    """The refusal is not permanent, because a certificate file can be renewed.

    The broker refuses with an alert that arrives after the client's side of the handshake.
    """
    tls = TLSOptions(ca_file=authority.file)
    if given == "expired":
        tls = options(authority, authority.issue("expired", ends_in=-DAY))
    elif given == "of another authority":
        tls = options(authority, Authority(tmp_path, "other").issue("guest"))
    url = f"amqps://guest:guest@localhost:{broker.tls_port}/"
    with Recorded(url, tls=tls, stop=tenacity.stop_after_attempt(1)) as recorded:
        error, _ = recorded.client.wait_for("failed")
        assert not error.permanent
        assert str(broker.tls_port) in str(error)
        assert "the broker refused the client certificate (cert_file): " in str(error)
        assert alert in str(error)


def test_tls_to_a_port_without_it_is_a_failed_attempt(broker: RabbitMQ, authority: Authority) -> None:
    with Recorded(
        f"amqps://guest:guest@localhost:{broker.port}/",
        tls=TLSOptions(ca_file=authority.file),
        stop=tenacity.stop_after_attempt(1),
    ) as recorded:
        error, _ = recorded.client.wait_for("failed")
        assert "TLS failed" in str(error)


def test_no_tls_to_a_port_with_it_is_a_failed_attempt(broker: RabbitMQ) -> None:
    with Recorded(f"amqp://guest:guest@localhost:{broker.tls_port}/", stop=tenacity.stop_after_attempt(1)) as recorded:
        error, _ = recorded.client.wait_for("failed")
        assert not error.permanent
        assert str(broker.tls_port) in str(error)
        assert "closed before the handshake" in str(error)
