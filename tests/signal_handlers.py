"""The handler of SIGTERM is restored after each test.

Spark's readers replace it, and their handler ends the process. A later test in the same process may send SIGTERM to
itself.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def restored_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
