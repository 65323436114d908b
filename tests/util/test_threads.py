"""Where the package starts threads."""

from __future__ import annotations

import re
from pathlib import Path

import reliable_mq

PLACES = {
    "testing/store_contract.py",  # the callers of a store that is tested: each test waits for its own
    "testing/cluster.py",  # commands to several nodes: each of them has a deadline
    "cli/demo/scenario.py",  # the shop and its outages: a restart of the broker is waited for at exit
    "_util/threads.py",
    "sync/io_thread.py",
    "engine/workers.py",
    "outbox/relay.py",
}
STARTS = re.compile(r"threading\.Thread\(|ThreadPoolExecutor|\bto_thread\(|run_in_executor")


def test_threads_start_in_a_few_places() -> None:
    """Elsewhere `start_daemon` starts them: none may keep the interpreter from ending."""
    package = Path(reliable_mq.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if STARTS.search(path.read_text())}
    assert found == PLACES
