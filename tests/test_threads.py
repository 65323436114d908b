"""The modules that start threads: each is listed with the purpose of its threads."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "reliable_mq"
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"

DELAYING: Final = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "to_thread", "run_in_executor"}
DAEMONS: Final = {"DaemonThread", "start_daemon", "call_in_background"}
#: Module -> purpose. Pools and callbacks of `_util/threads.py` start their threads there.
MODULES: Final = {
    "_util/sqlalchemy.py": "the event loop of an asynchronous engine",
    "_util/threads.py": "pools, callbacks and calls in the background",
    "cli/bounded_http.py": "the web server of a command",
    "cli/consume.py": "the time limit of a command",
    "cli/demo/scenario.py": "the shop of the demo, and its outage",
    "cli/stage.py": "a drain of each relay",
    "connection/connection.py": "the callback for credentials",
    "connection/lookups.py": "the addresses of hosts",
    "connection/token_renewer.py": "the callback for credentials",
    "engine/outbox_channel.py": "an outbox that closes slowly",
    "engine/workers.py": "handlers",
    "health.py": "the server of probes",
    "monitoring/queue_depths.py": "the depths of queues",
    "outbox/relay.py": "the relay and the writer of an outbox",
    "outbox/row_count.py": "the count of an outbox",
    "spark/metrics.py": "files of metrics",
    "spark/queue_source.py": "the end of a reader",
    "spark/sink.py": "the end of an idle publisher",
    "sync/io_thread.py": "the event loop of a connection",
    "sync/outbox_channel.py": "an outbox that opens slowly",
    "testing/cluster.py": "nodes that start together",
    "testing/proxy.py": "the fault proxy",
    "testing/store_contract.py": "claimants of a contract",
    "web/jobs.py": "operations on dead letters",
}
#: The modules that start other threads than daemons.
MAY_DELAY: Final = {
    "_util/threads.py",
    "cli/demo/scenario.py",  # the shop and its outages: a restart of the broker is awaited at exit
    "spark/queue_source.py",  # a timer
    "spark/sink.py",  # a timer
    "testing/cluster.py",  # commands to several nodes: each has a deadline
    "testing/store_contract.py",  # the callers of a tested store: each test waits for its own
}


def modules_that_use(names: set[str]) -> set[str]:
    """Return the modules that call or subclass one of `names`."""
    return {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if not names.isdisjoint(_used(path))}


@cache
def _used(path: Path) -> frozenset[str | None]:
    names: set[str | None] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        names |= {name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", None) for name in used}
    return frozenset(names)


def test_threads_start_where_they_are_known_to() -> None:
    assert modules_that_use(DELAYING | DAEMONS) == MODULES.keys()


def test_threads_that_delay_the_exit_start_in_a_few_modules() -> None:
    """The other modules start daemons, so that no thread delays the interpreter's exit."""
    assert modules_that_use(DELAYING) == MAY_DELAY


def test_the_architecture_page_names_all_modules_with_threads() -> None:
    row = re.search(r"^\| Where do threads start\? \| (.*) \|$", ARCHITECTURE.read_text(), re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`([\w/]+\.py)`", row[1])) == MODULES.keys()
