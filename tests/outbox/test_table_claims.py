"""Relays of one table, where no server is needed: in SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from reliable_mq.outbox import sqlalchemy_claims
from tests.outbox.claims_contract import ClaimsContract, TableOutbox


@pytest.fixture(params=["one writer at a time", "rows locked one by one"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TableOutbox]:
    """Of either way to take rows; here, a lock is no more than a word."""
    if request.param == "rows locked one by one":
        monkeypatch.setattr(sqlalchemy_claims, "skips_locked", lambda _connection: True)
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    with TableOutbox(engine) as made:
        yield made
    engine.dispose()


class TestClaims(ClaimsContract):
    pass
