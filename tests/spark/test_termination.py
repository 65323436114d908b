"""SIGTERM in the process of a reader, which Spark sends twice."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LINES = 8
_PROGRAM = f"""
import os, signal, sys
from itertools import count
from reliable_mq.spark.queue_source import on_termination

def terminated_twice(line):
    lines = count()

    def interrupt(frame, event, argument):
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGTERM)
        return interrupt

    on_termination(lambda: print("requeued", flush=True))
    signal.alarm(20)  # ends it where nothing else does
    sys.settrace(interrupt)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    while True:
        signal.pause()

for line in range({_LINES}):
    child = os.fork() or terminated_twice(line)
    print(line, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_a_signal_that_interrupts_the_one_before_changes_nothing() -> None:
    """It may arrive at any line of the first handler; the process requeues once."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PROGRAM]  # about the fork
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [said for line in range(_LINES) for said in ("requeued", f"{line} 0")]
    assert not done.stderr
