"""Exceptions of handlers that do not bear to be described."""

from __future__ import annotations

from reliable_mq import RetryLater

__all__ = ["NotYet", "Textless"]


class NotYet(RetryLater):
    """Without the constructor of `RetryLater`."""

    def __init__(self) -> None:
        pass


class Textless(Exception):
    """Its text ends the thread that asks for it."""

    def __str__(self) -> str:
        raise SystemExit(3)
