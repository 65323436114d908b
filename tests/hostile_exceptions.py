"""Exceptions of handlers that cannot be formatted."""

from __future__ import annotations

from reliable_mq import RetryLater

__all__ = ["NotYet", "Textless", "Wordless"]


class NotYet(RetryLater):
    """Skips the constructor of `RetryLater`."""

    def __init__(self) -> None:
        pass


class Textless(Exception):
    """Ends the thread that formats it."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Wordless(Exception):
    """Raises another exception when it is formatted."""

    def __str__(self) -> str:
        raise AttributeError("no text")
