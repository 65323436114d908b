"""Make the commands only once."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import typer.main
import typer.testing

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Making all commands takes typer longer than running one."""
    with pytest.MonkeyPatch.context() as patch:
        made_once = cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", made_once)
        patch.setattr(typer.testing, "_get_command", made_once)
        yield
