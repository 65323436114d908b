"""The identity that a connection reports to the broker."""

from __future__ import annotations

from importlib import metadata

import pytest

from reliable_mq._util import version


def test_a_connection_says_whose_it_is_and_on_what() -> None:
    assert version.client_properties("orders", "pika 1.4.4") == {
        "product": "reliable_mq",
        "version": metadata.version("reliable-mq"),
        "information": "on pika 1.4.4",
        "connection_name": "orders",
    }


def test_it_works_without_having_been_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    assert version.own_version() == "unknown"
