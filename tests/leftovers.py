"""What a test leaves behind at once, where no thread of its own has to end first."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check, at the regular end of the block, that it left no thread and no file descriptor.

    What was there before may end meanwhile: a daemon thread of an earlier test, say.
    """
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    assert set(threading.enumerate()) - threads == set()
    assert _descriptors() <= descriptors


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
