"""Validated settings of a connection: hosts, credentials, TLS and tuning.

Invariants:

- No ``repr``, ``str`` or error message of these classes contains a password or a token.
- Credentials are resolved at every connect, so the next connect uses a rotated password.
- Every value is in the range that RabbitMQ and both drivers accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import quote

from reliable_mq._util.validation import (
    SHORT_STRING_BYTES,
    Duration,
    ip_address,
    is_coroutine_function,
    is_text,
    seconds,
    whole_number,
)
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.tls import TLSOptions

__all__ = ["ConnectionSettings", "Credentials", "CredentialsCallback", "Endpoint", "Mechanism"]

Mechanism = Literal["PLAIN", "EXTERNAL"]

_LONGEST_PATH: Final = 127  # characters of a path, such as a virtual host, in AMQP 0-9-1, which aiormq checks


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port. ``str()`` returns ``host:port``, with IPv6 in brackets."""

    host: str
    port: int

    def __post_init__(self) -> None:
        _check_short_string("host", self.host)
        whole_number("port", self.port, 1, 65535)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is a loopback address or ``localhost``; no name is resolved."""
        address = ip_address(self.host)
        return self.host.lower() == "localhost" if address is None else address.is_loopback


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user name and a password or token, which ``repr`` hides.

    Args:
        username: The user name. With a token, RabbitMQ takes the user from the token and accepts any text here.
        password: The password or token.
        expires_in: The remaining lifetime of a token from a callback, in seconds or as a timedelta. Before the token
            expires, an open connection gets another one from the callback. None for a password that does not expire.

    Raises:
        ConfigurationError: If a value is not text or not UTF-8, contains a NUL character (the separator of SASL PLAIN),
            the password is empty (RabbitMQ refuses that), or ``expires_in`` is not a duration.
    """

    username: str
    password: str = field(repr=False)
    expires_in: Duration | None = None

    def __post_init__(self) -> None:
        values: dict[str, object] = {"username": self.username, "password": self.password}
        for name, value in values.items():
            if not isinstance(value, str):
                raise ConfigurationError(f"{name} must be text, not {type(value).__name__}")
            if "\0" in value:
                raise ConfigurationError(f"{name} holds a NUL character, which SASL PLAIN cannot carry")
            if not is_text(value):  # a driver's error would contain the value
                raise ConfigurationError(
                    f"{name} holds bytes that are not UTF-8, as of a variable in another encoding: store it in UTF-8"
                )
        if not self.password:
            raise ConfigurationError(f"the password of user {self.username!r} is empty, which RabbitMQ refuses")
        lifetime: object = self.expires_in
        if self.expires_in is not None:
            if isinstance(lifetime, str | bytes):  # perhaps the token
                raise ConfigurationError("expires_in must be a number of seconds or a timedelta, not text")
            object.__setattr__(self, "expires_in", seconds("expires_in", self.expires_in, positive=True))

    @property
    def lifetime(self) -> float | None:
        """The value of `expires_in` in seconds; None if the password does not expire."""
        return None if self.expires_in is None else seconds("expires_in", self.expires_in)


CredentialsCallback = Callable[[], "Credentials | tuple[str, str]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """The settings of a connection. `reliable_mq.url.parse_url` creates them.

    ``repr`` omits credentials and callbacks. ``str`` is a URL without user and options.

    Args:
        endpoints: The hosts, in the given order; at least one, and none twice.
        virtual_host: The name of the virtual host, not percent-encoded.
        tls: The TLS options; None for plaintext.
        credentials: Static credentials, or a callback that returns a user name and a password and is called at every
            connect. None with ``EXTERNAL``, and only there.
        mechanism: ``"PLAIN"``, or ``"EXTERNAL"``, with which the client's certificate names the user.
        heartbeat: The heartbeat in seconds, 1 to 65534. Below 5, RabbitMQ's documentation warns of false alarms.
            Heartbeats cannot be switched off, because a vanished peer would never be noticed. The default of 20 is the
            upper end of the recommended range; a vanished peer is noticed within 52 s (`silence_noticed_within`).
        connect_timeout: The maximum time for the TCP, TLS and AMQP handshakes of one endpoint together, in seconds. A
            credentials callback has the same time before.
        connection_name: The connection's name in the management UI; None for the caller's choice.
        frame_max: The maximum frame size in bytes, from 8192 (RabbitMQ 4.1 refuses less) to 131072 (pika refuses more).
        channel_max: The highest channel number to request, from 1 to 65535 (RabbitMQ refuses 0, "no limit").

    Raises:
        ConfigurationError: If a value is invalid. The message names the field, the given value and the accepted values.
    """

    endpoints: tuple[Endpoint, ...]
    virtual_host: str = "/"
    tls: TLSOptions | None = None
    credentials: Credentials | CredentialsCallback | None = field(default=None, repr=False)
    mechanism: Mechanism = "PLAIN"
    heartbeat: int = 20
    connect_timeout: float = 10.0
    connection_name: str | None = None
    frame_max: int = 131072
    channel_max: int = 2047

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigurationError("endpoints is empty: give at least one host")
        for index, endpoint in enumerate(self.endpoints):
            if endpoint in self.endpoints[:index]:
                raise ConfigurationError(f"host {endpoint} is given twice")
        _check_short_string("virtual_host", self.virtual_host)
        if len(self.virtual_host) > _LONGEST_PATH:
            raise ConfigurationError(
                f"virtual_host has {len(self.virtual_host)} characters; {_LONGEST_PATH} is the most"
            )
        if self.tls is not None and not isinstance(self.tls, TLSOptions):
            raise ConfigurationError(f"tls must be TLSOptions, not {type(self.tls).__name__}")
        self._check_authentication()
        # aiormq turns 65535 into 0, which switches heartbeats off.
        whole_number("heartbeat", self.heartbeat, 1, 65534, unit="seconds; heartbeats cannot be switched off")
        object.__setattr__(self, "connect_timeout", seconds("connect_timeout", self.connect_timeout, positive=True))
        if self.connection_name is not None:
            _check_short_string("connection_name", self.connection_name)
        whole_number("frame_max", self.frame_max, 8192, 131072, unit="bytes")
        whole_number("channel_max", self.channel_max, 1, 65535)

    def __str__(self) -> str:
        hosts = ",".join(map(str, self.endpoints))
        return f"{'amqp' if self.tls is None else 'amqps'}://{hosts}/{quote(self.virtual_host, safe='')}"

    @property
    def first_attempts_timeout(self) -> float:
        """The seconds after which every host has had its first attempt."""
        prepared = callable(self.credentials) or self.tls is not None  # by calls and files, which may take as long
        attempt = self.connect_timeout * (2 if prepared else 1)
        return attempt * len(self.endpoints) + 1.0

    @property
    def silence_noticed_within(self) -> int:
        """The maximum time until heartbeats reveal a vanished peer, in seconds.

        pika looks for input every heartbeat and 5 s, and gives up after an interval without any. aiormq looks every
        half heartbeat, and gives up after two heartbeats and 2 s without input.
        """
        pika = 2 * (self.heartbeat + 5)
        aiormq = 2 * (self.heartbeat + 1) + max(1, self.heartbeat // 2)
        return max(pika, aiormq)

    def resolve_credentials(self) -> Credentials | None:
        """Return the credentials for one connect; None with ``EXTERNAL``.

        Blocks while the user's callback runs.

        Raises:
            BrokerUnavailable: If the callback raised. A retry may help.
            ConfigurationError: If the callback did not return a user name and a password.
        """
        if self.credentials is None or isinstance(self.credentials, Credentials):
            return self.credentials
        try:
            answer: object = self.credentials()
        except ConfigurationError as error:  # from `Credentials`: after an expired token, a valid one may follow
            raise BrokerUnavailable(f"the credentials callback raised {type(error).__name__}: {error}") from error
        except Exception as error:
            # The error's text may contain a secret, so only the cause keeps it.
            raise BrokerUnavailable(f"the credentials callback raised {type(error).__name__}") from error
        if isinstance(answer, Credentials):
            return answer
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ConfigurationError(
                f"the credentials callback must return (username, password), not {type(answer).__name__}"
            )
        try:
            return Credentials(*answer)
        except ConfigurationError as error:
            if not all(isinstance(part, str) for part in answer):
                raise
            text = f"the credentials callback returned credentials that are refused: {error}"
            raise BrokerUnavailable(text) from error

    def _check_authentication(self) -> None:
        if self.mechanism == "EXTERNAL":
            if self.credentials is not None:
                raise ConfigurationError(
                    "mechanism EXTERNAL takes the user from the certificate: leave credentials out"
                )
            if self.tls is None or not self.tls.has_client_certificate:
                raise ConfigurationError("mechanism EXTERNAL needs TLS with a client certificate: give cert_file")
        elif self.mechanism != "PLAIN":
            raise ConfigurationError(f"mechanism must be PLAIN or EXTERNAL, not {self.mechanism!r}")
        elif is_coroutine_function(self.credentials):
            raise ConfigurationError("credentials must be a plain callable: a coroutine function is not awaited")
        elif isinstance(self.credentials, Credentials) and self.credentials.expires_in is not None:
            raise ConfigurationError("expires_in needs a callback, which returns the next token: give credentials=fn")
        elif not isinstance(self.credentials, Credentials) and not callable(self.credentials):
            raise ConfigurationError(
                f"credentials must be Credentials or a callable, not {type(self.credentials).__name__}"
            )


def _check_short_string(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} must be text that is not empty, not {value!r}")
    if not is_text(value):
        raise ConfigurationError(f"{name} must be text that UTF-8 can carry, not {value!r}")
    if len(value.encode()) > SHORT_STRING_BYTES:
        raise ConfigurationError(f"{name} has {len(value.encode())} bytes in UTF-8; {SHORT_STRING_BYTES} is the most")
