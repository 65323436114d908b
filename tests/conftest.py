"""Settings of all tests that need no broker."""

from __future__ import annotations

from tests import properties

properties.load()
