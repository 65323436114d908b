"""What a connection tells the broker about itself: shown by its management UI and logs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["client_properties"]


def client_properties(connection_name: str, driver: str) -> dict[str, object]:
    """Return the ``client-properties`` of a connection.

    Args:
        connection_name: to tell connections apart.
        driver: the library that speaks AMQP, with its version.
    """
    return {
        "product": "reliable_mq",
        "version": own_version(),
        "information": f"on {driver}",
        "connection_name": connection_name,
    }


def own_version() -> str:
    try:
        return version("reliable-mq")
    except PackageNotFoundError:  # used from a source tree, without having been installed
        return "unknown"
