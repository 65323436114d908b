"""Runs a program of this directory again and again, each time in a child that is forked when everything is imported.

Usage: ``python -m integration.programs.forking NAME``. Each line of stdin is a JSON list of texts, the arguments of the
program's ``main``. Writes ``pid NUMBER``, what the child writes, and ``exit STATUS``, which is negative for a signal.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def run(program: Callable[..., None], arguments: list[str]) -> None:
    """Be the child; does not return."""
    status = 1
    try:
        os.write(1, b"pid %d\n" % os.getpid())
        program(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(name: str) -> None:
    program = importlib.import_module(f"integration.programs.{name}").main
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(program, json.loads(line))
        _, status = os.waitpid(child, 0)
        os.write(1, b"exit %d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1])
