"""The modules that start threads."""

from __future__ import annotations

import re
from pathlib import Path

import reliable_mq

PLACES = {
    "testing/store_contract.py",  # the callers of a tested store: each test waits for its own
    "testing/cluster.py",  # commands to several nodes: each has a deadline
    "cli/demo/scenario.py",  # the shop and its outages: a restart of the broker is awaited at exit
    "_util/threads.py",
    "sync/io_thread.py",
    "engine/workers.py",
    "outbox/relay.py",
}
STARTS = re.compile(r"threading\.Thread\(|ThreadPoolExecutor|\bto_thread\(|run_in_executor")


def test_threads_start_in_a_few_places() -> None:
    """Other modules use `start_daemon`: no thread may delay the interpreter's exit."""
    package = Path(reliable_mq.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if STARTS.search(path.read_text())}
    assert found == PLACES
