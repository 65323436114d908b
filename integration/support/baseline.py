"""Checks that a test leaves no threads or file descriptors behind."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def back_to_baseline(timeout: float = 10) -> Iterator[None]:
    """Check that the threads and descriptors of the block are gone at its end.

    The check waits up to `timeout` seconds. It is skipped if the block raises. Descriptors are counted, because their
    numbers are reused; threads are compared one by one.

    Raises:
        AssertionError: If threads or descriptors are left. The message names them.
    """
    gc.collect()
    threads_before = set(threading.enumerate())
    descriptors_before = _descriptors()
    yield

    def leftovers() -> tuple[list[str], list[str]]:
        threads = [thread.name for thread in threading.enumerate() if thread not in threads_before]
        now = _descriptors()
        new = [f"{number} → {target}" for number, target in now.items() if descriptors_before.get(number) != target]
        return threads, new if len(now) > len(descriptors_before) else []

    def back() -> bool:
        gc.collect()
        return leftovers() == ([], [])

    try:
        wait_until(back, timeout=timeout, what="back to the baseline", interval=0.1)
    except TimeoutError:
        threads, descriptors = leftovers()
        raise AssertionError(
            f"left after {timeout:g} s: threads {threads or 'none'}; descriptors {descriptors or 'none'}"
        ) from None


def _descriptors() -> dict[int, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[int(link.name)] = str(link.readlink())
        except OSError:  # the descriptor that lists the directory
            continue
    return found
