"""What Python code allocates while a test looks, and does not free."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Self

__all__ = ["Allocations"]


class Allocations:
    """Counts the bytes that are allocated in the block, in all threads. What is allocated costs several times as much.

    It is not what the kernel has in its buffers of sockets.
    """

    def __enter__(self) -> Self:
        gc.collect()
        tracemalloc.start()
        self._before, _ = tracemalloc.get_traced_memory()
        return self

    def __exit__(self, *exc_info: object) -> None:
        tracemalloc.stop()

    def peak(self) -> int:
        """Return the most bytes that were held at one time since the block began."""
        return tracemalloc.get_traced_memory()[1] - self._before
