"""Exceptions of handlers that cannot be formatted."""

from __future__ import annotations

from typing import Never

from reliable_mq import RetryLater

__all__ = ["Classless", "NotYet", "Textless", "Wordless"]


class Classless(Exception):
    """Raises another exception when `isinstance` asks for its class."""

    @property
    def __class__(self) -> Never:
        raise RuntimeError("no class")


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
