"""The I/O thread over TLS, against a real broker that requires a certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.certificates import DAY, Authority, Certificate
from integration.support.recorder import Recorded
from reliable_mq.codec.methods import Consume
from reliable_mq.core.channel_setup import consumer_setup, publisher_setup
from reliable_mq.testing import RabbitMQ
from reliable_mq.testing.waiting import wait_until
from reliable_mq.tls import TLSOptions
from reliable_mq.topology import Queue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("baseline", "connection_api")

CONF = """
listeners.ssl.default = 5671
ssl_options.cacertfile = /tls/ca.pem
ssl_options.certfile = /tls/broker.crt
ssl_options.keyfile = /tls/broker.key
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
ssl_cert_login_from = common_name
auth_mechanisms.1 = PLAIN
auth_mechanisms.2 = EXTERNAL
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ca")


@pytest.fixture(scope="module")
def client(authority: Authority) -> Certificate:
    return authority.issue("guest")


@pytest.fixture(scope="module")
def tls_broker(authority: Authority) -> Iterator[RabbitMQ]:
    own = authority.issue("broker", "localhost", "127.0.0.1")
    files = {
        "/tls/ca.pem": authority.file.read_bytes(),
        "/tls/broker.crt": own.cert_file.read_bytes(),
        "/tls/broker.key": own.key_file.read_bytes(),
    }
    with RabbitMQ(conf=CONF, files=files) as broker:
        yield broker


def options(authority: Authority, client: Certificate) -> TLSOptions:
    return TLSOptions(ca_file=authority.file, cert_file=client.cert_file, key_file=client.key_file)


def test_more_than_any_buffer_holds_goes_both_ways(
    tls_broker: RabbitMQ, authority: Authority, client: Certificate, connection_api: str
) -> None:
    queue = f"q-{connection_api}"
    url = f"amqps://guest:guest@localhost:{tls_broker.tls_port}/"
    large = [bytes(range(256)) * 4096 * 8] * 2  # MiB, each more than a kernel accepts at once
    tls = options(authority, client)
    with Recorded(url, lambda _: publisher_setup([Queue(queue, type="classic")], ()), tls=tls) as recorded:
        recorded.client.wait_for("ready")
        written = [recorded.encoded(queue, body) for body in large]
        recorded.call(lambda: [recorded.io.write(data) for data in written])
        for _ in range(500):
            recorded.publish(queue, b"small")
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


def test_a_client_can_be_known_by_its_certificate(
    tls_broker: RabbitMQ, authority: Authority, client: Certificate
) -> None:
    url = f"amqps://127.0.0.1:{tls_broker.tls_port}/"
    with Recorded(url, tls=options(authority, client), mechanism="EXTERNAL") as recorded:
        recorded.client.wait_for("ready")


def test_a_broker_of_an_unknown_authority_is_refused(tls_broker: RabbitMQ, client: Certificate, tmp_path: Path) -> None:
    with Recorded(
        f"amqps://guest:guest@localhost:{tls_broker.tls_port}/", tls=options(Authority(tmp_path, "other"), client)
    ) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
        assert error.permanent
        assert not will_retry
        assert "does not verify" in str(error)


@pytest.mark.parametrize("given", ["none", "expired"])
def test_a_client_without_a_valid_certificate_is_told_so(
    tls_broker: RabbitMQ, authority: Authority, given: str
) -> None:
    """The refusal is not permanent, because a certificate file can be renewed.

    The broker refuses with an alert that arrives after the client's side of the handshake.
    """
    tls = TLSOptions(ca_file=authority.file)
    if given == "expired":
        tls = options(authority, authority.issue("expired", ends_in=-DAY))
    url = f"amqps://guest:guest@localhost:{tls_broker.tls_port}/"
    with Recorded(url, tls=tls, stop=tenacity.stop_after_attempt(1)) as recorded:
        error, _ = recorded.client.wait_for("failed")
        assert not error.permanent
        assert str(tls_broker.tls_port) in str(error)
        assert f"certificate {'required' if given == 'none' else 'expired'}" in str(error)


def test_tls_to_a_port_without_it_is_a_failed_attempt(tls_broker: RabbitMQ, authority: Authority) -> None:
    with Recorded(
        f"amqps://guest:guest@localhost:{tls_broker.port}/",
        tls=TLSOptions(ca_file=authority.file),
        stop=tenacity.stop_after_attempt(1),
    ) as recorded:
        error, _ = recorded.client.wait_for("failed")
        assert "TLS failed" in str(error)


def test_no_tls_to_a_port_with_it_is_a_failed_attempt(tls_broker: RabbitMQ) -> None:
    with Recorded(
        f"amqp://guest:guest@localhost:{tls_broker.tls_port}/", stop=tenacity.stop_after_attempt(1)
    ) as recorded:
        error, _ = recorded.client.wait_for("failed")
        assert not error.permanent
        assert str(tls_broker.tls_port) in str(error)
        assert "closed before the handshake" in str(error)
