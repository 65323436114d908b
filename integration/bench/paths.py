"""The directories of the benchmark."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUILD", "OUTPUT", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / ".bench"
BUILD = OUTPUT / "build"
