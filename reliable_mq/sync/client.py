"""Whom an I/O thread serves, and what it hands out; the same on either face."""

from __future__ import annotations

from reliable_mq.connection.client import Client, TimerHandle

__all__ = ["Client", "TimerHandle"]
