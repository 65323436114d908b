"""Measures the memory that Python code allocates during a test."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Self

__all__ = ["Allocations"]


class Allocations:
    """Counts the bytes that all threads allocate within the block.

    Tracing makes each allocation take several times as long. Socket buffers in the kernel are not counted.
    """

    def __enter__(self) -> Self:
        gc.collect()
        tracemalloc.start()
        self._before, _ = tracemalloc.get_traced_memory()
        return self

    def __exit__(self, *exc_info: object) -> None:
        tracemalloc.stop()

    def peak(self) -> int:
        """Return the largest number of bytes held at one time since the block began."""
        return tracemalloc.get_traced_memory()[1] - self._before
