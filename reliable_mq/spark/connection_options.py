"""The connection options beside the URL, including TLS and credentials.

Errors name the Spark option, not the Python argument that it sets.

Invariants: a credentials provider is imported in the process that calls it. Neither its result nor the text of an
exception that it raises is shown. TLS files are read on each host that connects.
"""

from __future__ import annotations

import importlib
import re
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import ConnectionSettings
from reliable_mq.tls import TLSOptions
from reliable_mq.url import parse_url

_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TLS: Final = {  # the Spark option for each argument that errors of `TLSOptions` name
    "ca_file": "connection.caFile",
    "cert_file": "connection.certFile",
    "key_file": "connection.keyFile",
    "server_name": "connection.serverName",
}


#: How errors refer to an argument: most begin with its name.
_ARGUMENT: Final = re.compile(r"^credentials are\b|^\w+|the tls argument|give credentials\b")


@contextmanager
def _naming(options: Mapping[str, str]) -> Iterator[None]:
    """Replace argument names in errors with the Spark options they map to."""
    try:
        yield
    except ConfigurationError as error:
        text = _ARGUMENT.sub(lambda found: options.get(found[0], found[0]), str(error))
        raise ConfigurationError(text) from error


class _NamedTLSOptions(TLSOptions):
    """TLS options whose errors name the Spark option."""

    def build_context(self) -> ssl.SSLContext:
        with _naming(_TLS):
            return super().build_context()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Options of a connection. The files are read on each host that connects."""

    heartbeat: int | None = None  # seconds
    timeout: float | None = None  # seconds for the handshakes with one host
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    provider: str | None = None  # ``package.module:function``; the function returns user and password

    def arguments(self) -> dict[str, Any]:
        tls = {name: value for name in _TLS if (value := getattr(self, name)) is not None}
        if "key_file" in tls and "cert_file" not in tls:
            raise ConfigurationError(
                "connection.keyFile is given without connection.certFile: a key is of no use alone"
            )
        return {
            "heartbeat": self.heartbeat,
            "connect_timeout": self.timeout,
            "tls": _NamedTLSOptions(**tls) if tls else None,
            "credentials": None if self.provider is None else _imported(self.provider),
        }

    def settings(self, url: str) -> ConnectionSettings:
        arguments = self.arguments()
        tls = next((option for name, option in _TLS.items() if getattr(self, name) is not None), "")
        options = {  # the options, by the words of an error message that name their arguments
            "heartbeat": self.heartbeat and "connection.heartbeat",
            "connect_timeout": self.timeout and "connection.timeout",
            "credentials are": self.provider and "credentialsProvider is",
            "give credentials": "give credentialsProvider",
            "tls": tls,
            "the tls argument": tls,
        }
        with _naming({argument: option for argument, option in options.items() if option}):
            return parse_url(url, **arguments)


class _Provider:
    """A wrapper of a credentials function that hides the text of its errors."""

    def __init__(self, path: str, function: Callable[[], Any]) -> None:
        self._path = path
        self._function = function

    def __call__(self) -> Any:
        try:
            return self._function()
        except Exception as error:  # noqa: BLE001
            failed = type(error).__name__
        raise ConfigurationError(f"credentialsProvider {self._path!r} raised {failed}, whose text is not shown")


def _imported(path: str) -> _Provider:
    if not _PATH.fullmatch(path):
        raise ConfigurationError(f"credentialsProvider must be package.module:function, not {path[:80]!r}")
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001
        why = f"it raised {type(error).__name__}"
    else:
        if not callable(found):
            raise ConfigurationError(f"credentialsProvider {path!r} is a {type(found).__name__}, and no function")
        return _Provider(path, found)
    raise ConfigurationError(
        f"credentialsProvider {path!r} cannot be imported on host {socket.gethostname()} by {sys.executable}: {why}; "
        "install it for the driver and for every executor (spark.submit.pyFiles does not reach every process)"
    )
