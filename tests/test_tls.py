"""The context of TLSOptions, with test certificates and a server on loopback."""

from __future__ import annotations

import logging
import pickle
import socket
import ssl
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from integration.support.certificates import SIGNING
from reliable_mq.errors import ConfigurationError
from reliable_mq.tls import TLSOptions, server_hostname

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PASSWORD = "canary-of-the-key"
DAY = timedelta(days=1)
DEADLINE = 30.0


class Authority:
    """A certificate authority with its files in one directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self.name, self.key, DAY)
            .add_extension(x509.BasicConstraints(True, None), True)
            .add_extension(SIGNING, True)
        )
        self.pem = certificate.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self.pem)

    def issue(self, name: str, *hosts: str, ends_in: timedelta = DAY, password: str | None = None) -> Issued:
        """Write a certificate for `hosts` (names or addresses) and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key, ends_in)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False)
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password.encode())
        issued = Issued(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        certificate = builder.sign(self.key, hashes.SHA256())
        issued.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        issued.key_file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return issued

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, ends_in: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 30 * DAY)
            .not_valid_after(now + ends_in)
            # A strict context requires both; the defaults of Python are strict since 3.13.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
        )


@dataclass(frozen=True)
class Issued:
    cert_file: Path
    key_file: Path


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ca")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def good(authority: Authority) -> Issued:
    return authority.issue("good", "localhost", "127.0.0.1")


@contextmanager
def broker(certificate: Issued, *, client_authority: Authority | None = None) -> Iterator[int]:
    """Run a TLS server that sends one client the common name of its certificate.

    Yield the port.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert_file, certificate.key_file)
    if client_authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_authority.file)

    def greet(listener: socket.socket) -> None:
        try:
            plain, _ = listener.accept()
            with plain:
                plain.settimeout(DEADLINE)
                with context.wrap_socket(plain, server_side=True) as secured:
                    peer = secured.getpeercert()
                    name = dict(pair for (pair,) in peer["subject"])["commonName"] if peer else "nobody"
                    secured.sendall(name.encode())
        except OSError:
            pass  # one side refused the other; the test checks the error of the client

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)
        thread = threading.Thread(target=greet, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join(DEADLINE)
            assert not thread.is_alive()


def greeting(port: int, options: TLSOptions, host: str = "localhost") -> str:
    """Connect as a driver does, and return the greeting of the server."""
    context = options.build_context()
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE) as plain,
        context.wrap_socket(plain, server_hostname=options.server_name or host) as secured,
    ):
        return secured.recv(100).decode()


# -- accepted and refused servers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_good_certificate_is_accepted_by_name_and_by_address(authority: Authority, good: Issued, host: str) -> None:
    with broker(good) as port:
        assert greeting(port, TLSOptions(ca_file=authority.file), host) == "nobody"


def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    expired = authority.issue("expired", "localhost", ends_in=-DAY)
    with broker(expired) as port, pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        greeting(port, TLSOptions(ca_file=authority.file))


def test_a_certificate_of_another_host_is_refused(authority: Authority) -> None:
    other = authority.issue("other", "other.example")
    with broker(other) as port, pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        greeting(port, TLSOptions(ca_file=authority.file))


def test_a_certificate_of_an_unknown_authority_is_refused(good: Issued, stranger: Authority) -> None:
    with broker(good) as port, pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        greeting(port, TLSOptions(ca_file=stranger.file))


def test_without_an_authority_only_the_system_ones_are_trusted(good: Issued) -> None:
    with broker(good) as port, pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        greeting(port, TLSOptions())


def test_the_systems_authorities_are_trusted_where_none_is_given(
    authority: Authority, good: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with broker(good) as port:
        assert greeting(port, TLSOptions()) == "nobody"
    other = authority.issue("system-other", "other.example")
    with broker(other) as port, pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        greeting(port, TLSOptions())


def test_a_server_name_is_verified_in_place_of_the_host(authority: Authority) -> None:
    other = authority.issue("named", "other.example")
    with broker(other) as port:
        assert greeting(port, TLSOptions(ca_file=authority.file, server_name="other.example")) == "nobody"


@pytest.mark.parametrize(
    ("options", "host", "name"),
    [
        (TLSOptions(), "fe80::1%eth0", "fe80::1"),
        (TLSOptions(), "broker.example", "broker.example"),
        (TLSOptions(server_name="other.example"), "fe80::1%eth0", "other.example"),
        (TLSOptions(), "broker.example.", "broker.example"),
        (TLSOptions(server_name="other.example."), "broker.example", "other.example"),
    ],
)
def test_a_zone_or_a_final_dot_is_in_no_certificate(options: TLSOptions, host: str, name: str) -> None:
    assert server_hostname(options, host) == name


def test_authorities_can_be_given_as_data_and_as_a_directory(
    authority: Authority, stranger: Authority, good: Issued, tmp_path: Path
) -> None:
    for data in (authority.pem.decode(), ssl.PEM_cert_to_DER_cert(authority.pem.decode())):
        with broker(good) as port:
            assert greeting(port, TLSOptions(ca_data=data)) == "nobody"
    # OpenSSL finds no certificate in a directory without hashed names, and `ca_data` still counts.
    with broker(good) as port:
        assert greeting(port, TLSOptions(ca_path=tmp_path, ca_data=authority.pem.decode())) == "nobody"
    with broker(good) as port, pytest.raises(ssl.SSLCertVerificationError):
        greeting(port, TLSOptions(ca_path=tmp_path))


def test_old_versions_of_tls_are_not_spoken(authority: Authority) -> None:
    assert TLSOptions(ca_file=authority.file).build_context().minimum_version is ssl.TLSVersion.TLSv1_2
    newer = TLSOptions(ca_file=authority.file, minimum_version=ssl.TLSVersion.TLSv1_3)
    assert newer.build_context().minimum_version is ssl.TLSVersion.TLSv1_3


# -- client certificates -----------------------------------------------------------------------------------------------


def test_mutual_tls_shows_the_clients_certificate(authority: Authority, good: Issued) -> None:
    client = authority.issue("client-a")
    options = TLSOptions(ca_file=authority.file, cert_file=client.cert_file, key_file=client.key_file)
    assert options.has_client_certificate
    with broker(good, client_authority=authority) as port:
        assert greeting(port, options) == "client-a"


def test_mutual_tls_refuses_a_client_of_another_authority(
    authority: Authority, stranger: Authority, good: Issued
) -> None:
    client = stranger.issue("client-s")
    options = TLSOptions(ca_file=authority.file, cert_file=client.cert_file, key_file=client.key_file)
    with broker(good, client_authority=authority) as port, pytest.raises((ssl.SSLError, ConnectionError)):
        greeting(port, options)


@pytest.mark.parametrize("password", [PASSWORD, PASSWORD.encode(), lambda: PASSWORD], ids=["str", "bytes", "callable"])
def test_an_encrypted_key_is_opened_with_its_password(authority: Authority, good: Issued, password: Any) -> None:
    client = authority.issue("client-e", password=PASSWORD)
    options = TLSOptions(
        ca_file=authority.file,
        cert_file=client.cert_file,
        key_file=client.key_file,
        key_password=password,
    )
    assert PASSWORD not in repr(options)
    with broker(good, client_authority=authority) as port:
        assert greeting(port, options) == "client-e"


def test_certificate_and_key_may_be_one_file(authority: Authority, good: Issued, tmp_path: Path) -> None:
    client = authority.issue("client-1")
    both = tmp_path / "both.pem"
    both.write_bytes(client.cert_file.read_bytes() + client.key_file.read_bytes())
    with broker(good, client_authority=authority) as port:
        assert greeting(port, TLSOptions(ca_file=authority.file, cert_file=both)) == "client-1"


def test_files_are_read_at_every_connect(authority: Authority, good: Issued, tmp_path: Path) -> None:
    both = tmp_path / "renewed.pem"
    options = TLSOptions(ca_file=authority.file, cert_file=both)
    for name in ("client-old", "client-new"):
        client = authority.issue(name)
        both.write_bytes(client.cert_file.read_bytes() + client.key_file.read_bytes())
        with broker(good, client_authority=authority) as port:
            assert greeting(port, options) == name


# -- verification off, and contexts of the user ------------------------------------------------------------------------


def test_each_connect_without_verification_logs_a_warning(
    stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    expired = stranger.issue("expired", "other.example", ends_in=-DAY)
    options = TLSOptions(verify=False)
    assert not caplog.records
    for connects in (1, 2):
        with broker(expired) as port:
            assert greeting(port, options) == "nobody"
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * connects
        assert "verify=False" in caplog.text


def test_a_context_of_the_users_is_taken_as_it_is(
    authority: Authority, good: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=authority.file)
    options = TLSOptions(context=context)
    assert options.build_context() is context
    with broker(good) as port:
        assert greeting(port, options) == "nobody"
    assert not caplog.records


def test_a_context_that_does_not_verify_needs_the_words_as_well(caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    with pytest.raises(ConfigurationError, match=r"context does not verify.*TLSOptions\(verify=False\)"):
        TLSOptions(context=context)
    assert TLSOptions(context=context, verify=False).build_context() is context
    assert "verify=False" in caplog.text


def test_a_context_that_stops_verifying_is_refused_at_connect() -> None:
    context = ssl.create_default_context()
    options = TLSOptions(context=context)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.raises(ConfigurationError, match="context does not verify"):
        options.build_context()


# -- bad options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "no"}, "verify must be True or False"),
        ({"verify": None}, "verify must be True or False"),
        ({"minimum_version": ssl.TLSVersion.TLSv1}, "minimum_version must be"),
        ({"minimum_version": "1.2"}, "minimum_version must be"),
        ({"server_name": ""}, "server_name must be"),
        ({"server_name": 5}, "server_name must be"),
        ({"server_name": ".example.com"}, "server_name must be"),
        ({"server_name": "broker..example.com"}, "server_name must be"),
        ({"server_name": "broker\0"}, "server_name must be"),
        ({"key_file": "k.pem"}, "key_file is given without cert_file"),
        ({"key_password": "p"}, "key_password is given without cert_file"),
        ({"verify": False, "ca_file": "ca.pem"}, "verify=False would ignore"),
        ({"context": "default"}, "context must be an ssl.SSLContext"),
        ({"context": ssl.create_default_context(), "ca_file": "ca.pem"}, "ca_file is given beside context"),
        ({"context": ssl.create_default_context(), "minimum_version": ssl.TLSVersion.TLSv1_3}, "minimum_version is"),
        ({"context": ssl.create_default_context(), "verify": False}, "beside a context that verifies"),
        ({"context": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)}, "context is a server's"),
    ],
)
def test_wrong_or_contradictory_tls_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TLSOptions(**options)


def test_a_file_that_cannot_be_read_is_named_with_its_field(authority: Authority, tmp_path: Path) -> None:
    client = authority.issue("client-f")
    missing = tmp_path / "missing.pem"
    for options in (
        TLSOptions(ca_file=missing),
        TLSOptions(cert_file=missing),
        TLSOptions(cert_file=client.cert_file, key_file=missing),
    ):
        with pytest.raises(ConfigurationError, match=r"^(ca|cert|key)_file '.*missing\.pem' cannot be read") as caught:
            options.build_context()
        assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(ConfigurationError, match=r"^ca_path .* is not a directory"):
        TLSOptions(ca_path=missing).build_context()


@pytest.mark.slow
def test_a_file_with_the_wrong_content_is_named_with_its_field(authority: Authority, tmp_path: Path) -> None:
    client, other = authority.issue("client-g"), authority.issue("client-h")
    encrypted = authority.issue("client-i", password=PASSWORD)
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")

    def refuse() -> str:
        raise LookupError(PASSWORD)

    for message, options in (
        ("^ca_file .* holds no PEM certificate", TLSOptions(ca_file=junk)),
        ("^ca_data is not a certificate", TLSOptions(ca_data="junk")),
        ("^ca_data is not a certificate", TLSOptions(ca_data="")),
        ("^ca_data is not a certificate", TLSOptions(ca_data=b"junk")),
        ("^cert_file .* holds no PEM certificate", TLSOptions(cert_file=junk, key_file=client.key_file)),
        ("^key_file .* holds no PEM private key", TLSOptions(cert_file=client.cert_file, key_file=junk)),
        ("^cert_file .* holds no PEM private key", TLSOptions(cert_file=client.cert_file)),
        ("^key_file .* is not the key", TLSOptions(cert_file=client.cert_file, key_file=other.key_file)),
        ("^key_password is missing", TLSOptions(cert_file=encrypted.cert_file, key_file=encrypted.key_file)),
        (
            "^key_file .* with this key_password",
            TLSOptions(cert_file=encrypted.cert_file, key_file=encrypted.key_file, key_password="wrong"),
        ),
        (
            "^key_password could not be had: its callable raised LookupError$",
            TLSOptions(cert_file=encrypted.cert_file, key_file=encrypted.key_file, key_password=refuse),
        ),
        *(
            (
                "^key_password must be text or bytes, up to 1024 bytes in UTF-8$",
                TLSOptions(cert_file=encrypted.cert_file, key_file=encrypted.key_file, key_password=wrong),
            )
            for wrong in (5, lambda: None, "x" * 1025, "\udcff")
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            options.build_context()


def test_options_without_a_context_can_be_pickled(authority: Authority) -> None:
    options = TLSOptions(ca_file=authority.file, server_name="broker")
    assert pickle.loads(pickle.dumps(options)) == options
