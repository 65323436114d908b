"""Forked children, and how signals end them."""

from __future__ import annotations

import os
from collections.abc import Callable


def end_of_forked_child(number: int, begin: Callable[[], object] = lambda: None) -> int:
    """Fork a child that calls ``begin``, send it a signal, and return its exit code.

    That is 0 if the signal does not end it, and 1 if ``begin`` raises. No child outlives the call.
    """
    ready, say_ready = os.pipe()
    may_end, let_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(let_end)
            begin()
            os.write(say_ready, b".")
            os.read(may_end, 1)  # a signal that ends the child comes before the end of the file
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
