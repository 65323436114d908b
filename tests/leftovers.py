"""A check for threads and file descriptors that a block of a test leaves open."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that the block leaves no new thread and no new file descriptor open.

    The check is skipped if the block raises. Older threads, such as a daemon thread of an earlier test, may end during
    the block.
    """
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    assert set(threading.enumerate()) - threads == set()
    assert _descriptors() <= descriptors


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
