"""A credentials provider for Spark tests, which Spark's processes import."""

from __future__ import annotations

__all__ = ["guest"]


def guest() -> tuple[str, str]:
    """Return user and password."""
    return "guest", "guest"
