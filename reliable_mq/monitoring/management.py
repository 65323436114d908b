"""A read-only client of RabbitMQ's management API.

``doctor`` uses it, and the Spark source to find the partitions of a super stream, because AMQP cannot list bindings.
"""

from __future__ import annotations

import base64
import http
import http.client
import json
import re
import ssl
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self
from urllib.parse import SplitResult, quote, unquote, urlsplit

from reliable_mq._util.threads import CancelHandle, DaemonExecutor
from reliable_mq._util.validation import is_host
from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from reliable_mq.tls import TLSOptions, server_hostname

_PORTS: Final = {"http": 15672, "https": 15671}
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]+")
_PATH: Final = "/%:@!$&'()*+,;="  # may stand in a path as they are, RFC 3986
_MOST: Final = 64 * 1024 * 1024  # bytes of a response
_CHUNK: Final = 64 * 1024
_TOTAL: Final = 60.0  # seconds for a whole call
_SHOWN: Final = 200  # characters of an error's body


class ManagementError(Exception):
    """An error of the API, or a missing response.

    Attributes:
        status: The HTTP status, or 0 without a response.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, repr=False)
class ManagementAPI:
    """The management API of one node, for reading.

    Attributes:
        scheme: ``"http"`` or ``"https"``.
        credentials: The credentials to send, or None to send none.
        context: The TLS context for ``https``, which decides about verification.
        server_name: The name to send (SNI) and to verify for ``https``.
        prefix: The prefix of the API's paths, if one is configured.
        timeout: The timeout of connecting and of each read, in seconds.
    """

    scheme: str
    host: str
    port: int
    credentials: Credentials | None
    context: ssl.SSLContext | None = None
    server_name: str = ""
    prefix: str = ""
    timeout: float = 10.0

    @classmethod
    def at(cls, url: str, settings: ConnectionSettings, *, option: str) -> Self:
        """Return the API at ``http[s]://[user:password@]host[:port][/prefix]``.

        A URL without a user uses the credentials of `settings`. On a host of the AMQP connection, TLS verifies the same
        name as for AMQP.

        Args:
            url: The URL in the form above.
            settings: The settings of the AMQP connection.
            option: The option in which the user gave the URL, for error messages.

        Raises:
            ConfigurationError: If the URL is invalid, or there is no user.
        """
        parts, host, credentials = _checked(url, settings, option)
        shares_host = any(host == each.host.lower() for each in settings.endpoints)
        options = settings.tls if shares_host else None
        return cls(
            parts.scheme,
            host,
            parts.port or _PORTS[parts.scheme],
            credentials or settings.resolve_credentials(),
            context=_context(settings) if parts.scheme == "https" else None,
            server_name=server_hostname(options or TLSOptions(), host),
            prefix=quote(parts.path.rstrip("/"), safe=_PATH),
        )

    @staticmethod
    def check(url: str, settings: ConnectionSettings, *, option: str) -> None:
        """Raise the errors of `at` for an invalid URL, without resolving credentials."""
        _checked(url, settings, option)

    @classmethod
    def candidates(cls, url: str | None, settings: ConnectionSettings, *, option: str) -> list[Self]:
        """Return the API `at` a URL or, without a URL, the APIs `beside` AMQP."""
        return cls.beside(settings) if url is None else [cls.at(url, settings, option=option)]

    @classmethod
    def beside(cls, settings: ConnectionSettings) -> list[Self]:
        """Return the API at the default address of each host, with TLS if AMQP uses TLS.

        TLS verifies the same name as for AMQP.

        The address is a guess, and another service may listen there. So the password is sent only to this machine, or
        to a host whose certificate is verified (`sends_password`).
        """
        credentials = settings.resolve_credentials()
        scheme = "http" if settings.tls is None else "https"
        context = _context(settings) if settings.tls is not None else None
        verified = context is not None and context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
        return [
            cls(
                scheme,
                each.host,
                _PORTS[scheme],
                credentials if verified or each.is_loopback else None,
                context=context,
                server_name=server_hostname(settings.tls or TLSOptions(), each.host),
                timeout=settings.connect_timeout,
            )
            for each in settings.endpoints
        ]

    @property
    def sends_password(self) -> bool:
        """Whether requests carry a password."""
        return self.credentials is not None

    @property
    def is_readable_on_the_way(self) -> bool:
        """Whether a password would be sent to another machine in plaintext."""
        return self.scheme == "http" and not Endpoint(self.host, self.port).is_loopback

    @property
    def is_there(self) -> bool:
        """Whether a server at this address requires a login. Sends no password."""
        try:
            replace(self, credentials=None).get("whoami")
        except ManagementError as error:
            return error.status == http.HTTPStatus.UNAUTHORIZED
        return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    def get(self, *segments: str) -> Any:
        """Return the decoded response to ``GET /api/<segments>``.

        The segments are percent-encoded here.

        Raises:
            ManagementError: If there is no response, or it is an error.
        """
        path = f"{self.prefix}/api/" + "/".join(quote(segment, safe="") for segment in segments)
        headers = {"Accept": "application/json"}
        if self.credentials is not None:
            token = base64.b64encode(f"{self.credentials.username}:{self.credentials.password}".encode()).decode()
            headers["Authorization"] = f"Basic {token}"
        try:
            # The timeout of a socket applies to each read: a server that trickles would block the caller forever.
            with closing(DaemonExecutor("management API", 1)) as executor:
                status, content = executor.call(partial(self._response, path, headers), _TOTAL)
        except ssl.SSLCertVerificationError as error:
            raise ManagementError(f"{self}: the certificate does not verify: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
            raise ManagementError(f"{self}: {why}") from error
        if status >= 400:
            raise ManagementError(f"{self}: {status} {_reason(content)}", status)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ManagementError(f"{self}: the answer is not JSON; is this RabbitMQ's management API?") from error

    def _response(self, path: str, headers: dict[str, str], call: CancelHandle) -> tuple[int, bytes]:
        with closing(self._connection()) as connection:
            connection.request("GET", path, headers=headers)
            with call.using(connection.sock, connection.close):
                response = connection.getresponse()
                return response.status, self._content(response)

    def _content(self, response: http.client.HTTPResponse) -> bytes:
        content = bytearray()
        while chunk := response.read(_CHUNK):
            content += chunk
            if len(content) > _MOST:
                raise ManagementError(f"{self}: the answer has more than {_MOST >> 20} MiB")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return bytes(content)

    def _connection(self) -> http.client.HTTPConnection:
        if self.context is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        return _TLSConnection(self.host, self.port, self.timeout, self.context, self.server_name)


def rows(api: ManagementAPI, *segments: str, named: bool = False) -> list[dict[str, Any]]:
    """Return a response that is a list of objects, each with a name if ``named``.

    Raises:
        ManagementError: As for `ManagementAPI.get`, or if the response is something else.
    """
    found = api.get(*segments)
    if not isinstance(found, list) or not all(_is_row(row, named=named) for row in found):
        raise ManagementError(f"{api}: this is not RabbitMQ's API: the answer about {segments[0]} is of another shape")
    return found


def _is_row(row: object, *, named: bool) -> bool:
    return isinstance(row, dict) and (not named or isinstance(row.get("name"), str))


class _TLSConnection(http.client.HTTPSConnection):
    """A connection that sends and verifies another name than its host."""

    def __init__(self, host: str, port: int, timeout: float, context: ssl.SSLContext, server_name: str) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._wrap = partial(context.wrap_socket, server_hostname=server_name)

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._wrap(self.sock)


def _context(settings: ConnectionSettings) -> ssl.SSLContext:
    return ssl.create_default_context() if settings.tls is None else settings.tls.build_context()


def _reason(content: bytes) -> str:
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text[:_SHOWN]
    return str(answer.get("reason") or answer.get("error") if isinstance(answer, dict) else answer)[:_SHOWN]


def _checked(url: str, settings: ConnectionSettings, option: str) -> tuple[SplitResult, str, Credentials | None]:
    """Return the checked parts of a management URL, its host, and its credentials."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if not host or not _HOST.fullmatch(host) or not is_host(host) or parts.scheme not in _PORTS:
        raise ConfigurationError(f"{option} must be http[s]://[user:password@]host[:port]")
    if parts.username is not None:
        return parts, host, Credentials(unquote(parts.username), unquote(parts.password or ""))
    if settings.credentials is None:
        raise ConfigurationError(f"{option} needs a user: http[s]://user:password@host[:port]")
    return parts, host, None
