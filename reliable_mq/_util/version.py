"""The client properties of a connection, which the broker shows and logs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def own_version() -> str:
    try:
        return version("reliable-mq")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


#: Looked up once, at import, before a server forks its workers: the lookup takes as long as the rest of a connect.
OWN_VERSION: Final = own_version()


def client_properties(connection_name: str, driver: str) -> dict[str, object]:
    """Return the ``client-properties``; ``driver`` is the driver's name and version."""
    return {
        "product": "reliable_mq",
        "version": OWN_VERSION,
        "information": f"on {driver}",
        "connection_name": connection_name,
    }
