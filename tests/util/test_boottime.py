"""The name of the machine's boot."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from reliable_mq._util import boottime


def test_a_boot_that_cannot_be_read_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name from the wall clock would change within a boot, or outlast it."""
    monkeypatch.setattr(boottime, "_BOOT", tmp_path / "boot_id")
    name, base = boottime.boot()
    assert name == ""
    assert base + boottime.since_boot() == pytest.approx(time.time() * 1e6, abs=10e6)
    (tmp_path / "boot_id").write_text("one\n")
    assert boottime.boot()[0] == "one"
