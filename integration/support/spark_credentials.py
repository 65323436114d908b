"""A provider of credentials for tests of Spark: its processes import this module."""

from __future__ import annotations

__all__ = ["guest"]


def guest() -> tuple[str, str]:
    """User and password."""
    return "guest", "guest"
