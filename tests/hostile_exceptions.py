"""Exceptions of handlers that cannot be formatted."""

from __future__ import annotations

from reliable_mq import RetryLater

__all__ = ["NotYet", "Textless"]


class NotYet(RetryLater):
    """Skips the constructor of `RetryLater`."""

    def __init__(self) -> None:
        pass


class Textless(Exception):
    """Ends the thread that formats it."""

    def __str__(self) -> str:
        raise SystemExit(3)
