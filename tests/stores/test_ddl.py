"""The table of a store, as the manual shows it for migrations."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import create_engine

from reliable_mq.stores import SQLAlchemyStore

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "idempotency.md"


def plain(sql: str) -> str:
    return re.sub(r"\s+", " ", sql).replace("( ", "(").replace(" )", ")").strip()


def test_the_manual_shows_the_statements_that_create_the_table() -> None:
    [block] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    store = SQLAlchemyStore(create_engine("postgresql+psycopg://localhost/orders"))
    assert [plain(sql) for sql in block.split(";") if sql.strip()] == [plain(sql) for sql in store.ddl]


def test_another_name_of_the_table_is_that_of_its_index_too() -> None:
    store = SQLAlchemyStore(create_engine("postgresql+psycopg://localhost/orders"), table="mine.done")
    assert "CREATE TABLE IF NOT EXISTS mine.done (" in store.ddl[0]
    assert store.ddl[1] == "CREATE INDEX IF NOT EXISTS done_expires ON mine.done (expires)"
