"""Certificate authorities for one test run, and the certificates they issue."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

DAY = timedelta(days=1)
TLS_CONF = """
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
HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Certificate:
    """The PEM files of a certificate and its key."""

    cert_file: Path
    key_file: Path


# A strict SSL context rejects certificates whose authority does not have this key usage.
SIGNING = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """A certificate authority with its files in one directory.

    `file` is its own certificate. A second authority with the same name claims the same key, as a forger would.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._key_identifier = hashlib.sha256(name.encode()).digest()[:20]
        own = (
            self._builder(self._name, self._key, DAY, self._key_identifier)
            .add_extension(x509.BasicConstraints(True, None), True)
            .add_extension(SIGNING, True)
        )
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str, ends_in: timedelta = DAY) -> Certificate:
        """Issue a certificate for `name` (a common name) and `hosts`, and its key.

        The hosts are host names or addresses.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest
        builder = self._builder(_name(name), key, ends_in, identifier)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False)
        issued = Certificate(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        issued.cert_file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        issued.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return issued

    def files_of_broker(self, own: Certificate) -> dict[str, bytes]:
        """Return the files of a broker with `TLS_CONF` and this certificate of its own."""
        paths = {"ca.pem": self.file, "broker.crt": own.cert_file, "broker.key": own.key_file}
        return {f"/tls/{name}": path.read_bytes() for name, path in paths.items()}

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, ends_in: timedelta, key_identifier: bytes
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 30 * DAY)
            .not_valid_after(now + ends_in)
            # A strict SSL context, the default from Python 3.13 on, requires both.
            .add_extension(x509.SubjectKeyIdentifier(key_identifier), False)
            .add_extension(x509.AuthorityKeyIdentifier(self._key_identifier, None, None), False)
        )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
