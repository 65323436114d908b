"""A broker that accepts JSON Web Tokens as passwords, and an issuer of tokens."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from reliable_mq.settings import Credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

CONF: Final = textwrap.dedent(
    """
    auth_backends.1 = rabbit_auth_backend_oauth2
    auth_backends.2 = internal
    auth_oauth2.resource_server_id = rabbitmq
    auth_oauth2.signing_keys.key1 = /etc/rabbitmq/key1.pem
    auth_oauth2.default_key = key1
    auth_oauth2.algorithms.1 = RS256
    """
)


class Issuer:
    """Issues tokens, and records them.

    Attributes:
        lifetime: The lifetime of the next token, in seconds.
        spare: The seconds for which the broker accepts the next token beyond the lifetime that the client is told.
        issued: All tokens.
        forged: Whether the next token has a signature that the broker does not know.
        fails: Whether the next calls raise.
    """

    def __init__(self, lifetime: float) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.lifetime = lifetime
        self.spare = 0.0
        self.issued: list[str] = []
        self.forged = False
        self.fails = False

    @property
    def files(self) -> Mapping[str, bytes]:
        """The configuration files for the broker."""
        public = self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        # Permissions are checked again each second, not each minute. rabbitmq.conf has no name for this.
        advanced = b"[{rabbit, [{channel_tick_interval, 1000}]}]."
        plugins = b"[rabbitmq_management,rabbitmq_prometheus,rabbitmq_stream,rabbitmq_auth_backend_oauth2]."
        return {
            "/etc/rabbitmq/key1.pem": public,
            "/etc/rabbitmq/enabled_plugins": plugins,
            "/etc/rabbitmq/advanced.config": advanced,
        }

    def credentials(self) -> Credentials:
        """Return a new token. This is the callback of publishers and consumers."""
        if self.fails:
            raise OSError("the identity provider is away")
        claims = {
            "aud": ["rabbitmq"],
            "sub": "orders",  # RabbitMQ refuses the token of another user on an open connection
            "jti": str(len(self.issued)),
            "scope": ["rabbitmq.configure:*/*", "rabbitmq.read:*/*", "rabbitmq.write:*/*"],
            "exp": int(time.time() + self.lifetime + self.spare),
        }
        key = self._other if self.forged else self._key
        token = jwt.encode(claims, key, algorithm="RS256", headers={"kid": "key1"})
        self.issued.append(token)
        return Credentials("any name", token, expires_in=self.lifetime)
