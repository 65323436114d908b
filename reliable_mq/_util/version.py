"""The client properties of a connection, which the broker shows and logs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

__all__ = ["OWN_VERSION", "client_properties", "own_version"]


def own_version() -> str:
    """Return the version of this package."""
    try:
        return version("reliable-mq")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


#: Looked up once, and before a server forks its workers: it takes as long as the rest of a connection.
OWN_VERSION: Final = own_version()


def client_properties(connection_name: str, driver: str) -> dict[str, object]:
    """Return the ``client-properties`` of a connection by a driver, with its version."""
    return {
        "product": "reliable_mq",
        "version": OWN_VERSION,
        "information": f"on {driver}",
        "connection_name": connection_name,
    }
