"""A strict parser of AMQP URLs: an unknown or malformed part is an error.

The drivers' own parsers turn ``heartbeat=30s`` into 0, ``no_verify_ssl=false`` into no verification, and a user
without a password into a bare ``TypeError``.

Grammar::

    amqp[s]://[user:password@]host[:port][,host[:port]]...[/virtual-host][?key=value[&key=value]...]

- User, password, virtual host and option values are percent-encoded UTF-8. An IPv6 address is enclosed in brackets.
- The virtual host is ``/`` if the URL has no path, if the path is ``/`` alone (RabbitMQ's URI specification calls that
  the empty name, but it is commonly used for the default), and for ``/%2F``. Any other name is one path segment.
- Without user and password, ``guest`` is assumed, for loopback hosts only: RabbitMQ refuses it from anywhere else.

Invariant: No error and no log line shows a password, or a part of a malformed URL that could be one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, get_args
from urllib.parse import unquote_to_bytes

from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import Duration, ip_address, is_host
from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import ConnectionSettings, Credentials, CredentialsCallback, Endpoint, Mechanism
from reliable_mq.tls import TLSOptions

__all__ = ["parse_url", "redacted", "split_user"]

logger = get_logger(__name__)

_DEFAULT_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_GUEST: Final = Credentials("guest", "guest")
_MECHANISMS: Final = get_args(Mechanism)
_HIGHEST_PORT: Final = 65535
_TLS_KEYS: Final = ("cacertfile", "certfile", "keyfile", "server_name_indication", "verify")
_NUMBERS: Final = ("heartbeat", "channel_max", "frame_max")
_KEYS: Final = ("auth_mechanism", *_NUMBERS, "connection_timeout", "name", *_TLS_KEYS)

_HOST: Final = re.compile(r"[A-Za-z0-9._-]+")
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_AUTHORITY_END: Final = re.compile(r"[/?]")
_USER_INFO: Final = re.compile(r"(?P<scheme>[^/?#]*://)(?P<user>[^/?#]*@)")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_USER: Final = re.compile(r"[^/?#=&\s]*")
# The options of a URL that may be shown, and the allowed characters of their values. Any other value may be a secret.
_HARMLESS_KEYS: Final = frozenset({"application_name", "charset", "host", "port", "sslmode", "unix_socket"})
_HARMLESS: Final = re.compile(r"(?:[A-Za-z0-9._:/,+-]|%2F|%3A)*")
# A timeout below this number of milliseconds was probably meant in seconds.
_LEAST_MILLISECONDS: Final = 100
_FALSE_ALARMS_BELOW: Final = 5


def parse_url(
    url: str | Sequence[str],
    *,
    tls: TLSOptions | None = None,
    credentials: Credentials | CredentialsCallback | None = None,
    mechanism: Mechanism | None = None,
    heartbeat: int | None = None,
    connect_timeout: Duration | None = None,
    connection_name: str | None = None,
    frame_max: int | None = None,
    channel_max: int | None = None,
) -> ConnectionSettings:
    """Return the settings of a URL and of the options beside it.

    Does no I/O: TLS files are read at connect.

    The keys of a URL's query are RabbitMQ's: ``heartbeat`` (seconds), ``connection_timeout`` (**milliseconds**, as
    RabbitMQ specifies; the argument `connect_timeout` is in seconds), ``channel_max``, ``frame_max`` (bytes),
    ``auth_mechanism`` (``plain`` or ``external``) and ``name`` (of the connection). ``amqps`` also has ``cacertfile``,
    ``certfile``, ``keyfile``, ``server_name_indication`` and ``verify``, whose only value is ``verify_peer``. Only
    `TLSOptions(verify=False)` switches verification off.

    Args:
        url: A URL, which may name several hosts, or several URLs that differ only in their hosts.
        tls: The TLS options for ``amqps``, in place of the URL's TLS keys.
        credentials: The credentials, in place of the URL's user and password. A callable is called at every connect.
        mechanism: ``"PLAIN"`` or ``"EXTERNAL"``.
        heartbeat: The heartbeat in seconds.
        connect_timeout: The maximum time for the handshakes with one host, in seconds or as a timedelta.
        connection_name: The connection's name in the management UI.
        frame_max: The maximum size of a frame in bytes.
        channel_max: The highest channel number.

    Raises:
        ConfigurationError: If the URL or an option is invalid, or an option is given both in the URL and as an
            argument. The message never shows a password. `ConnectionSettings` lists the accepted values.
    """
    parsed = _parse_all(url)
    options = _options_of(parsed.query)
    arguments = {
        "mechanism": mechanism,
        "heartbeat": heartbeat,
        "connect_timeout": connect_timeout,
        "connection_name": connection_name,
        "frame_max": frame_max,
        "channel_max": channel_max,
    }
    for name, value in arguments.items():
        if value is not None:
            if name in options:
                raise ConfigurationError(f"{name} is given twice: in the URL and as an argument")
            options[name] = value
    settings = ConnectionSettings(
        endpoints=parsed.endpoints,
        virtual_host=parsed.virtual_host,
        tls=_tls_of(parsed, tls),
        credentials=_credentials_of(parsed, credentials, options.get("mechanism")),
        **options,
    )
    _warn(settings)
    return settings


def split_user(url: str) -> tuple[str, str]:
    """Return a URL without its user and password, and these with their ``@``.

    They end at the last ``@`` before the path. `urlsplit` takes a bracket in a password for a part of an IPv6 address.
    """
    found = _USER_INFO.match(url)
    return (url, "") if found is None else (found["scheme"] + url[found.end() :], found["user"])


def redacted(url: str) -> str:
    """Return a URL of any scheme without its secrets, for a log line or an error.

    A password becomes ``***``, and so does the value of each option that is not known to be harmless. Parts of a
    malformed URL that may belong to a password are not shown.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    user_info, at, rest = rest.rpartition("@")
    shown = scheme + separator + (_redacted_user_info(user_info) + at if at else "")
    location, question, query = rest.partition("?")
    hosts, slash, path = location.partition("/")
    for host in hosts.split(","):
        _, colon, port = host.rpartition("]")[2].partition(":")
        if colon and not _DIGITS.fullmatch(port):
            # The URL may be user:password without a host, so the rest may belong to the password.
            return shown + hosts[: hosts.index(host)] + host.removesuffix(port) + "***"
    shown += hosts + slash + path + question
    return shown + "&".join(map(_redacted_option, query.split("&"))) if question else shown


def _redacted_user_info(user_info: str) -> str:
    user, colon, _ = user_info.partition(":")
    return (user if _USER.fullmatch(user) else "***") + (":***" if colon else "")


def _redacted_option(piece: str) -> str:
    key, equals, value = piece.partition("=")
    if not equals:
        return "***"
    return f"{key[:40]}={value if key in _HARMLESS_KEYS and _HARMLESS.fullmatch(value) else '***'}"


@dataclass(frozen=True, slots=True)
class _Parsed:
    """The decoded parts of one URL, not yet validated together."""

    scheme: str
    credentials: Credentials | None = field(repr=False)
    endpoints: tuple[Endpoint, ...]
    virtual_host: str
    query: Mapping[str, str]


def _parse_all(url: object) -> _Parsed:
    if isinstance(url, str):
        return _parse_one(url)
    if not isinstance(url, Sequence) or isinstance(url, bytes | bytearray) or not url:
        raise ConfigurationError(f"url must be text or a sequence of texts with at least one, not {type(url).__name__}")
    first, *others = map(_parse_one, url)
    for number, other in enumerate(others, start=2):
        for name in ("scheme", "credentials", "virtual_host", "query"):
            if getattr(other, name) != getattr(first, name):
                raise ConfigurationError(f"URL {number} differs from the first in its {name}: only hosts may differ")
    return replace(first, endpoints=tuple(chain.from_iterable(each.endpoints for each in (first, *others))))


def _parse_one(url: object) -> _Parsed:
    if not isinstance(url, str):
        raise ConfigurationError(f"url must be text, not {type(url).__name__}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigurationError(
            "the URL holds a space, a line end or a character that is not ASCII: percent-encode it"
        )
    location, user_info = split_user(url)
    scheme, separator, rest = location.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in _DEFAULT_PORTS:
        raise ConfigurationError("the URL must begin with amqp:// or amqps://")
    if "#" in rest:
        raise ConfigurationError("the URL holds a '#': write it as %23")
    if "@" in rest or user_info.count("@") > 1:
        # This prevents reading a part of a password as a port, a virtual host or an option.
        raise ConfigurationError(
            "the URL holds an '@' after the one that ends the password, or a password with '/', '?' or '@' in it: "
            "percent-encode them (%40, %2F, %3F)"
        )
    end = _AUTHORITY_END.search(rest)
    hosts, rest = (rest, "") if end is None else (rest[: end.start()], rest[end.start() :])
    path, _, query = rest.partition("?")
    return _Parsed(
        scheme=scheme,
        credentials=_parse_user_info(user_info.removesuffix("@")) if user_info else None,
        endpoints=tuple(_parse_host(host, _DEFAULT_PORTS[scheme]) for host in hosts.split(",")),
        virtual_host=_parse_path(path),
        query=_parse_query(query) if "?" in rest else {},
    )


def _parse_user_info(user_info: str) -> Credentials:
    username, colon, password = user_info.partition(":")
    user = _decoded("user name", username)
    if not user:
        raise ConfigurationError("the URL has an '@' but no user name before it: write user:password@host")
    if not colon:
        raise ConfigurationError(f"user {user!r} in the URL has no password: write user:password@host")
    return Credentials(user, _decoded("password", password))


def _parse_host(text: str, default_port: int) -> Endpoint:
    host, bracket, tail = text.partition("]")
    if bracket:
        address = _decoded("host", host.removeprefix("["))
        if not (host.startswith("[") and ":" in address and ip_address(address) is not None):
            raise ConfigurationError("the URL has a host in brackets that is not an IPv6 address")
        host, colon, port = address, tail[:1], tail[1:]
        if tail and colon != ":":
            raise ConfigurationError(f"the URL has something other than a port after [{address}]")
    else:
        host, colon, port = text.partition(":")
        if not host:
            raise ConfigurationError("the URL has no host, or an empty one in its list")
        if not _HOST.fullmatch(host):
            raise ConfigurationError(
                "the URL has a host with a character other than letters, digits, '.', '-' and '_' "
                "(write an international name in its xn-- form)"
            )
        if not is_host(host):
            raise ConfigurationError("the URL has a host with no character, or more than 63, between its dots")
        if ":" in port:
            raise ConfigurationError("the URL has a host with several ':' in it: write an IPv6 address in brackets")
    if not colon:
        return Endpoint(host, default_port)
    # The error does not show the port: in user:password without a host, that is the password.
    if not _DIGITS.fullmatch(port) or not 1 <= int(port) <= _HIGHEST_PORT:
        raise ConfigurationError(f"the URL has a port that is not a number from 1 to {_HIGHEST_PORT}")
    return Endpoint(host, int(port))


def _parse_path(path: str) -> str:
    segment = path.removeprefix("/")
    if "/" in segment:
        raise ConfigurationError("the URL has more than one '/' in its path: write a '/' in a virtual host as %2F")
    return _decoded("virtual host", segment) or "/"


def _parse_query(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for piece in query.split("&"):
        key, equals, text = piece.partition("=")
        if key not in _KEYS:
            # The key is shown, cut short, but never its value, which may be a secret.
            raise ConfigurationError(f"unknown option {key[:40]!r} in the URL; known are {', '.join(_KEYS)}")
        if not equals or not text:
            raise ConfigurationError(f"option {key} in the URL has no value")
        if key in options:
            raise ConfigurationError(f"option {key} is in the URL twice")
        options[key] = _decoded(key, text)
    return options


def _decoded(part: str, text: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise ConfigurationError(f"the {part} in the URL has a '%' without two hexadecimal digits: write it as %25")
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"the {part} in the URL is not UTF-8 once decoded") from None


def _options_of(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `ConnectionSettings` in the query, with their types."""
    options: dict[str, Any] = {key: _number(key, query[key]) for key in _NUMBERS if key in query}
    if "connection_timeout" in query:
        milliseconds = _number("connection_timeout", query["connection_timeout"])
        if milliseconds < _LEAST_MILLISECONDS:
            raise ConfigurationError(
                f"connection_timeout={milliseconds} in the URL is below {_LEAST_MILLISECONDS}: "
                "it is in milliseconds there, as RabbitMQ specifies"
            )
        options["connect_timeout"] = milliseconds / 1000
    if "auth_mechanism" in query:
        mechanism = query["auth_mechanism"].upper()
        if mechanism not in _MECHANISMS:
            raise ConfigurationError(
                f"auth_mechanism={query['auth_mechanism']} in the URL is not one of {', '.join(_MECHANISMS).lower()}"
            )
        options["mechanism"] = mechanism
    if "name" in query:
        options["connection_name"] = query["name"]
    return options


def _number(key: str, text: str) -> int:
    if not _DIGITS.fullmatch(text):
        raise ConfigurationError(f"{key}={text} in the URL is not a whole number")
    return int(text)


def _tls_of(parsed: _Parsed, tls: TLSOptions | None) -> TLSOptions | None:
    keys = [key for key in _TLS_KEYS if key in parsed.query]
    if parsed.scheme == "amqp":
        if keys or tls is not None:
            option = keys[0] if keys else "tls"
            raise ConfigurationError(
                f"{option} is given, but the URL begins with amqp://, which is plaintext: use amqps://"
            )
        return None
    if parsed.query.get("verify", "verify_peer") != "verify_peer":
        raise ConfigurationError(
            "verify in the URL can only be verify_peer: certificates are always verified, unless the code says "
            "tls=TLSOptions(verify=False)"
        )
    if parsed.query.get("server_name_indication") == "disable":
        raise ConfigurationError("server_name_indication=disable in the URL would leave the host name unverified")
    if tls is None:
        return TLSOptions(
            ca_file=parsed.query.get("cacertfile"),
            cert_file=parsed.query.get("certfile"),
            key_file=parsed.query.get("keyfile"),
            server_name=parsed.query.get("server_name_indication"),
        )
    if keys:
        raise ConfigurationError(f"{keys[0]} is in the URL beside the tls argument: give TLS options in one place")
    return tls


def _credentials_of(
    parsed: _Parsed, credentials: Credentials | CredentialsCallback | None, mechanism: str | None
) -> Credentials | CredentialsCallback | None:
    if parsed.credentials is not None:
        if credentials is not None:
            raise ConfigurationError("credentials are given twice: in the URL and as an argument")
        return parsed.credentials
    if credentials is not None or mechanism == "EXTERNAL":
        return credentials
    away = [str(endpoint) for endpoint in parsed.endpoints if not endpoint.is_loopback]
    if away:
        raise ConfigurationError(
            f"the URL has no user and password for {away[0]}: write user:password@host, or give credentials "
            "(guest is assumed for loopback hosts only)"
        )
    return _GUEST


def _warn(settings: ConnectionSettings) -> None:
    away = [str(endpoint) for endpoint in settings.endpoints if not endpoint.is_loopback]
    if away and settings.tls is None:
        logger.warning(
            "plaintext AMQP to %s: credentials and messages can be read on the network; use amqps://", away[0]
        )
    if settings.heartbeat < _FALSE_ALARMS_BELOW:
        logger.warning(
            "a heartbeat of %d s is too short: below 5 s, a busy peer may be considered dead", settings.heartbeat
        )
