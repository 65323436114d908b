"""A publisher over TLS: every connect verifies the broker's certificate."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
import tenacity

from integration.support.certificates import DAY, HOSTS, TLS_CONF, Authority, Certificate
from integration.support.publishing import book, submit
from integration.support.spark import read_to_the_end
from reliable_mq import BrokerUnavailable, Message, Publisher, Queue, TLSOptions
from reliable_mq.spark.options import StreamOptions, read_options, write_options
from reliable_mq.spark.sink import BatchSink
from reliable_mq.spark.stream_offsets import StreamRange
from reliable_mq.spark.stream_reader import RangeReader
from reliable_mq.testing import RabbitMQ, VirtualHost
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing import Audit, FaultProxyFactory

pytestmark = pytest.mark.usefixtures("baseline", "publisher_api")

ORDERS = Queue("orders", dead_letter=None)
EVENTS = Queue("events", type="stream")
QUICK = tenacity.wait_fixed(0.1)
CERTIFICATE_OPTIONAL = TLS_CONF.replace("fail_if_no_peer_cert = true", "fail_if_no_peer_cert = false")


@pytest.fixture(scope="module")
def good(authority: Authority) -> Certificate:
    return authority.issue("broker", *HOSTS)


@pytest.fixture(scope="module")
def tls_broker(authority: Authority, good: Certificate) -> Iterator[RabbitMQ]:
    with RabbitMQ(conf=CERTIFICATE_OPTIONAL, files=authority.files_of_broker(good)) as broker:
        yield broker


@pytest.fixture
def tls_vhost(tls_broker: RabbitMQ, authority: Authority, good: Certificate) -> Iterator[VirtualHost]:
    tls_broker.change_certificate(authority.files_of_broker(good))
    vhost = VirtualHost(tls_broker, "tls")
    vhost.create()
    yield vhost
    vhost.delete()


@pytest.fixture
def bad(request: pytest.FixtureRequest, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate that must be refused."""
    match request.param:
        case "expired":
            return authority.issue("expired", *HOSTS, ends_in=-DAY)
        case "of another host":
            return authority.issue("other", "other.example", "192.0.2.1")
        case _:
            name = "ca" if request.param == "of a forged authority" else "other"
            return Authority(tmp_path_factory.mktemp("other"), name).issue("broker", *HOSTS)


BAD = (
    ("expired", "certificate has expired"),
    ("of another host", "mismatch"),
    ("of an unknown authority", "unable to get local issuer certificate"),
    ("of a forged authority", "signature failure"),
)


def url(vhost: VirtualHost, user: str = "guest:guest@", host: str = "localhost") -> str:
    return f"amqps://{user}{host}:{vhost.broker.tls_port}/{vhost.name}"


@pytest.mark.parametrize("host", ["localhost", pytest.param("127.0.0.1", marks=pytest.mark.soak)])
def test_f53_good_certificate_is_accepted(
    tls_vhost: VirtualHost, checker: Audit, authority: Authority, host: str
) -> None:
    """Everything works as without TLS, including large messages and reconnects."""
    with Publisher(
        url(tls_vhost, host=host), tls=TLSOptions(ca_file=authority.file), topology=[ORDERS], reconnect_wait=QUICK
    ) as publisher:
        confirmations = [submit(checker, publisher, "orders", b"x" * size) for size in (0, 1, 100_000, 3_000_000) * 5]
        assert [book(checker, confirmation) for confirmation in confirmations] == [None] * 20
        wait_until(tls_vhost.close_connections, timeout=20, what="the connection to be known and closed")
        assert book(checker, submit(checker, publisher, "orders")) is None
    checker.drain(tls_vhost, ["orders"])
    checker.close()


def test_the_fault_proxy_holds_confirms_and_cuts_over_tls(
    tls_vhost: VirtualHost, checker: Audit, authority: Authority, fault_proxy: FaultProxyFactory
) -> None:
    """Messages whose confirms were not received are published again."""
    own, trusting = authority.issue("proxy", "127.0.0.1"), TLSOptions(ca_file=authority.file)
    proxy = fault_proxy(url(tls_vhost), cert_file=own.cert_file, key_file=own.key_file, tls=trusting)
    assert proxy.url.startswith("amqps://")
    with Publisher(proxy.url, tls=trusting, topology=[ORDERS], reconnect_wait=QUICK) as publisher:
        assert book(checker, submit(checker, publisher, "orders")) is None
        proxy.hold_confirms()
        held = [submit(checker, publisher, "orders", b"x" * size) for size in (1, 100_000) * 5]
        wait_until(
            lambda: tls_vhost.live_counts()["orders"] == 11, timeout=20, what="all there, with their confirms held"
        )
        proxy.wait_for(lambda: proxy.held_confirms)
        assert not any(confirmation.done() for confirmation in held)
        assert proxy.cut() == 1
        proxy.heal()
        assert [book(checker, confirmation) for confirmation in held] == [None] * 10
    checker.drain(tls_vhost, ["orders"])
    assert len(checker.close().duplicated) == 10


def test_f53_certificate_says_who_the_client_is(tls_vhost: VirtualHost, authority: Authority) -> None:
    """SASL EXTERNAL needs no password: the certificate's common name is the user."""
    own = authority.issue("guest")
    tls = TLSOptions(ca_file=authority.file, cert_file=own.cert_file, key_file=own.key_file)
    with Publisher(url(tls_vhost, user="") + "?auth_mechanism=external", tls=tls, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"x", user_id="guest"), routing_key="orders")


def test_f53_certificate_of_nobody_the_broker_knows(tls_vhost: VirtualHost, authority: Authority) -> None:
    """A valid certificate for an unknown user is refused permanently."""
    own = authority.issue("nobody")
    tls = TLSOptions(ca_file=authority.file, cert_file=own.cert_file, key_file=own.key_file)
    publisher = Publisher(url(tls_vhost, user="") + "?auth_mechanism=external", tls=tls)
    with pytest.raises(BrokerUnavailable, match="403") as caught:
        publisher.connect()
    assert caught.value.permanent


def test_spark_reads_the_certificates_that_its_options_name(tls_vhost: VirtualHost, authority: Authority) -> None:
    """A sink and a range use their own connections."""
    own = authority.issue("guest")
    given = {
        "url": url(tls_vhost, user="") + "?auth_mechanism=external", "connection.caFile": str(authority.file),
        "connection.certFile": str(own.cert_file), "connection.keyFile": str(own.key_file),
    }  # fmt: skip
    with Publisher(url(tls_vhost), tls=TLSOptions(ca_file=authority.file), topology=[EVENTS]) as publisher:
        publisher.connect()
    sink = BatchSink(write_options(given | {"routingKey": "events"}), ("body",))
    assert sink.write(iter([pa.RecordBatch.from_pydict({"body": ["a", "b"]})])).rows == 2
    options = read_options(given | {"stream": "events"}, streaming=False)
    assert isinstance(options, StreamOptions)
    batches = RangeReader(options, StreamRange("events", 0, 2), ("body",)).batches()
    assert [row["body"] for batch in batches for row in batch.to_pylist()] == [b"a", b"b"]


@pytest.mark.parametrize("mode", [{}, {"stage": "orders.stage"}], ids=["queue", "staged"])
def test_queries_read_the_certificates_that_their_options_name(
    tls_vhost: VirtualHost, authority: Authority, mode: dict[str, str]
) -> None:
    """The reader of a queue uses them; so do relay, offset reader and task of a stage."""
    with Publisher(url(tls_vhost), tls=TLSOptions(ca_file=authority.file), topology=[ORDERS]) as publisher:
        message = Message(b"x")
        assert publisher.publish_many([message], routing_key="orders").ok
    own = authority.issue("guest")
    given = {
        "url": url(tls_vhost, user="") + "?auth_mechanism=external", "queue": "orders",
        "connection.certFile": str(own.cert_file), "connection.keyFile": str(own.key_file),
    }  # fmt: skip
    with pytest.raises(BrokerUnavailable, match="certificate does not verify"):
        read_to_the_end(given | mode)
    parts, _ = read_to_the_end(given | mode | {"connection.caFile": str(authority.file)})
    assert [*chain(*parts)] == [message.message_id]


@pytest.mark.parametrize(("bad", "reason"), BAD, indirect=["bad"])
def test_f53_bad_certificate_is_refused(
    tls_vhost: VirtualHost, authority: Authority, bad: Certificate, reason: str
) -> None:
    """A certificate that does not verify fails the first connect; nothing is sent."""
    tls_vhost.broker.change_certificate(authority.files_of_broker(bad))
    publisher = Publisher(url(tls_vhost), tls=TLSOptions(ca_file=authority.file), topology=[ORDERS])
    for call in (publisher.connect, lambda: publisher.publish(Message(b"x"), routing_key="orders")):
        with pytest.raises(BrokerUnavailable, match=reason) as caught:
            call()
        assert caught.value.permanent
    assert tls_vhost.queue("orders") is None


@pytest.mark.parametrize(
    ("bad", "reason"), [BAD[0], *(pytest.param(*one, marks=pytest.mark.soak) for one in BAD[1:])], indirect=["bad"]
)
def test_f53_certificate_goes_bad_and_is_renewed(
    tls_vhost: VirtualHost, checker: Audit, authority: Authority, good: Certificate, bad: Certificate, reason: str
) -> None:
    """After a first connect, a bad certificate is retried until it is renewed."""
    with Publisher(
        url(tls_vhost), tls=TLSOptions(ca_file=authority.file), topology=[ORDERS], reconnect_wait=QUICK
    ) as publisher:
        assert book(checker, submit(checker, publisher, "orders")) is None
        tls_vhost.broker.change_certificate(authority.files_of_broker(bad))
        wait_until(tls_vhost.close_connections, timeout=20, what="the connection to be known and closed")
        wait_until(lambda: not publisher.connected, timeout=20, what="the loss to be noticed")
        confirmations = [submit(checker, publisher, "orders") for _ in range(10)]
        with pytest.raises(BrokerUnavailable, match=reason):
            publisher.connect()
        assert not any(confirmation.done() for confirmation in confirmations)
        tls_vhost.broker.change_certificate(authority.files_of_broker(good))
        assert [book(checker, confirmation) for confirmation in confirmations] == [None] * 10
    checker.drain(tls_vhost, ["orders"])
    checker.close()


def test_f53_no_authority_given_means_the_systems(tls_vhost: VirtualHost) -> None:
    """The system's authorities do not know the test's, so the broker is refused."""
    with pytest.raises(BrokerUnavailable, match="verify") as caught:
        Publisher(url(tls_vhost)).connect()
    assert caught.value.permanent


def test_f53_verification_can_be_off_only_in_code_and_loudly(
    tls_vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """verify=False connects to any server and logs a warning at every connect."""
    with Publisher(url(tls_vhost), tls=TLSOptions(verify=False), topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
    assert "TLS verification is off" in caplog.text
