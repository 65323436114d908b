"""The CPU time of a family of processes."""

from __future__ import annotations

import subprocess
import sys
import time

from integration.bench.contenders.spark import Family
from reliable_mq.testing.waiting import wait_until


def test_processes_apart_do_not_count() -> None:
    """Processes set apart are not counted, and neither are their children."""
    everyone, rest = Family(), Family(apart=("an executor",))
    work = "import time\nwhile time.process_time() < 0.3: pass\ninput()"
    executor = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])  # an executor"
    process = subprocess.Popen([sys.executable, "-c", executor], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: everyone.cpu_seconds() - rest.cpu_seconds() > 0.25, timeout=60, what="work apart")
    finally:
        process.communicate(b"\n")


def test_a_process_that_only_measures_does_not_count() -> None:
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert Family().cpu_seconds() - Family(itself=False).cpu_seconds() >= 0.1
