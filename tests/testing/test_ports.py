"""The ports of the lab's servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from reliable_mq.testing.containers import free_port


@pytest.mark.parametrize(
    ("local", "ports"),
    [
        ("32768\t60999\n", {*range(10_000, 32_768), *range(61_000, 65_000)}),
        ("10050\t65535\n", set(range(10_000, 10_050))),
        ("1024\t65535\n", set(range(10_000, 65_000))),
    ],
)
def test_a_port_is_outside_the_local_range_if_it_leaves_any(
    local: str, ports: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: local)

    assert {free_port() for _ in range(20)} <= ports
