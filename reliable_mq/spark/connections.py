"""How a source or a sink connects: ``connection.*`` and credentials.

Invariants: what is sent to executors is text and numbers; a provider is imported where it is called, and neither its
result nor the text of an exception of it is shown.
"""

from __future__ import annotations

import importlib
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import ConnectionSettings
from reliable_mq.tls import TLSOptions
from reliable_mq.url import parse_url

__all__ = ["ConnectionOptions"]

_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Options of a connection. The files are read on each host that connects."""

    heartbeat: int | None = None  # seconds
    timeout: float | None = None  # seconds for one attempt on one host
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    provider: str | None = None  # ``package.module:function``, which returns user and password

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a `Publisher`, or of `parse_url`.

        Raises:
            ConfigurationError: the provider cannot be imported here, or TLS options contradict each other.
        """
        tls = None
        if (self.ca_file, self.cert_file, self.key_file, self.server_name) != (None, None, None, None):
            tls = TLSOptions(
                ca_file=self.ca_file, cert_file=self.cert_file, key_file=self.key_file, server_name=self.server_name
            )
        return {
            "heartbeat": self.heartbeat,
            "connect_timeout": self.timeout,
            "tls": tls,
            "credentials": None if self.provider is None else _imported(self.provider),
        }

    def settings(self, url: str) -> ConnectionSettings:
        """Return the settings of a connection.

        Raises:
            ConfigurationError: as `arguments`; or an option contradicts the URL.
        """
        return parse_url(url, **self.arguments())


class _Provider:
    """Calls a function for user and password, and hides the text of its errors."""

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
