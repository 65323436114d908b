"""Forked child processes, and their end by a signal."""

from __future__ import annotations

import os
from collections.abc import Callable


def end_of_forked_child(number: int, begin: Callable[[], object] = lambda: None) -> int:
    """Fork a child that calls ``begin``, send it a signal, and return its exit code.

    The exit code is 0 if the signal does not end the child, and 1 if ``begin`` raises. The child has always ended when
    the call returns.
    """
    ready, say_ready = os.pipe()
    may_end, let_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(let_end)
            begin()
            os.write(say_ready, b".")
            os.read(may_end, 1)  # A signal that ends the child is delivered before the end of the file.
            os._exit(0)
        finally:
            os._exit(1)
    os.close(say_ready)
    os.close(may_end)
    if os.read(ready, 1):
        os.kill(child, number)
    os.close(let_end)
    os.close(ready)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
