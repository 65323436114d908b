"""An outbox refuses a server that cannot skip locked rows. No server is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from reliable_mq import ConfigurationError
from reliable_mq.outbox import SQLAlchemyOutbox, sqlalchemy, sqlalchemy_table


def dialect(name: str, version: tuple[int, ...] | None, *, is_mariadb: bool = False) -> Any:
    return SimpleNamespace(name=name, server_version_info=version, is_mariadb=is_mariadb)


@pytest.mark.parametrize(
    ("old", "said"),
    [
        (dialect("mysql", (10, 5, 29), is_mariadb=True), "MariaDB 10.6 or later, for SKIP LOCKED, not 10.5.29"),
        (dialect("mariadb", (10, 5, 29), is_mariadb=True), "MariaDB 10.6 or later"),
        (dialect("mysql", (5, 7, 44)), "MySQL 8.0.1 or later, for SKIP LOCKED, not 5.7.44"),
        (dialect("mysql", (8, 0, 0)), "MySQL 8.0.1 or later"),
    ],
)
def test_a_server_without_skip_locked_is_refused(old: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        sqlalchemy_table.refuse_old_server(old)


@pytest.mark.parametrize(
    "new",
    [
        dialect("mysql", (10, 6, 0), is_mariadb=True),
        dialect("mariadb", (11, 8), is_mariadb=True),
        dialect("mysql", (8, 0, 1)),
        dialect("mysql", (9, 7, 0)),
        dialect("mysql", None),
        dialect("sqlite", (3, 35, 0)),
        dialect("postgresql", (9, 6)),
    ],
)
def test_every_other_server_is_taken(new: Any) -> None:
    sqlalchemy_table.refuse_old_server(new)


@pytest.mark.parametrize("use", [SQLAlchemyOutbox.open, SQLAlchemyOutbox.create_table, SQLAlchemyOutbox.claims])
@pytest.mark.parametrize("exists", [False, True])
def test_an_outbox_checks_its_server_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[SQLAlchemyOutbox], object], exists: bool
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'database'}")
    if exists:
        SQLAlchemyOutbox(engine).create_table()
    checked = sqlalchemy_table.refuse_old_server
    monkeypatch.setattr(sqlalchemy, "refuse_old_server", lambda _dialect: checked(dialect("mysql", (5, 7, 44))))
    with pytest.raises(ConfigurationError, match=r"MySQL 8\.0\.1"):
        use(SQLAlchemyOutbox(engine, create=not exists))
    assert sa.inspect(engine).has_table("reliable_mq_outbox") == exists
    engine.dispose()
