"""The statements that create the table of an outbox."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine

from reliable_mq.outbox import SQLAlchemyOutbox

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "outbox.md"


def test_the_documented_sql_statements_match_the_code() -> None:
    """Users may copy them into a migration."""
    engine = create_engine("postgresql+psycopg://nobody@nowhere/nothing")
    statements = PAGE.read_text().partition("```sql\n")[2].partition("```")[0]
    assert "".join(statements.split()) == "".join(SQLAlchemyOutbox(engine).ddl.split())
