"""The order of the package's hooks in a forked child and at exit.

It does not depend on the order of imports.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy

import reliable_mq
from reliable_mq import AsyncConsumer, AsyncPublisher, Consumer, Publisher
from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.errors import UsageError
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox
from reliable_mq.stores import MemoryStore, RedisStore, SQLAlchemyStore, SQLiteStore

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = ["reliable_mq.sync.consumer", "reliable_mq.sync.publisher"]

PROBES = """
import importlib, os, sys

sys.path.insert(0, {path!r})
for name in {modules!r}:
    importlib.import_module(name)

from reliable_mq._util import hooks
from reliable_mq.engine import channel
from reliable_mq.sync import consumer, publisher


def say(what):
    os.write(1, f"{{what}}\\n".encode())
"""

FORK = """
class Lane:
    def forget(self):
        say("marked")

    def __del__(self):
        say("gone")

for stage in reversed(hooks.ForkStage):
    for number in (1, 2):
        hooks.at_fork(stage, lambda stage=stage, number=number: say(f"{stage.name} {number}"))
lane = Lane()
channel._channels.add(lane)
publisher._open_publishers.add(lane)
del lane
child = os.fork()
if not child:
    os._exit(0)
_, status = os.waitpid(child, 0)
say(f"status {status}")
os._exit(0)
"""

EXIT = """
class Open:
    def __init__(self, what):
        self.what = what

    def close(self, timeout=None):
        say(self.what)

for stage in reversed(hooks.ExitStage):
    hooks.at_exit(stage, lambda stage=stage: say(stage.name))
publisher._open_publishers.add(Open("publisher"))
consumer._open_consumers.add(Open("consumer"))
"""

FAILURES = """
def fail(error):
    raise error

import logging
logging.basicConfig(level=logging.ERROR)
hooks.at_fork(hooks.ForkStage.RENEW, lambda: fail(ValueError("of a fork")))
hooks.at_fork(hooks.ForkStage.FORGET, lambda: say("forked"))
hooks.at_exit(hooks.ExitStage.CONSUMERS, lambda: fail(ValueError("of an exit")))
hooks.at_exit(hooks.ExitStage.KEPT, lambda: fail(KeyboardInterrupt("of a user")))
hooks.at_exit(hooks.ExitStage.PUBLISHERS, lambda: say("exited"))
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""

INTERRUPTED = """
import signal, threading

class Open:
    pass

def hold(one, after):
    after.callback(released.set)
    if threading.current_thread() is other:
        holding.set()
        assert interrupted.wait(20)

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

def interrupt(*_):
    raise KeyboardInterrupt

holding, interrupted, released = (threading.Event() for _ in range(3))
held, one = hooks.HeldAtFork(hold), Open()
held.add(one)
signal.signal(signal.SIGALRM, interrupt)
other = threading.Thread(target=fork)
other.start()
assert holding.wait(20)
signal.setitimer(signal.ITIMER_REAL, 0.05)
fork()  # waits for the other thread until the signal
say(f"released {released.is_set()}")
interrupted.set()
other.join()
say(f"released {released.is_set()}")
third = threading.Thread(target=fork, daemon=True)
third.start()
third.join(20)
say(f"hangs {third.is_alive()}")
os._exit(0)
"""

CHILD = """
from multiprocessing import get_context
{imports}

def work():
    {in_child}
    from reliable_mq._util import hooks
    hooks.at_exit(hooks.ExitStage.PUBLISHERS, lambda: print("exited", flush=True))

if __name__ == "__main__":
    child = get_context({method!r}).Process(target=work)
    child.start()
    child.join()
    print(child.exitcode, flush=True)
"""


def run(program: str, modules: list[str]) -> subprocess.CompletedProcess[str]:
    path = str(Path(reliable_mq.__file__).parent.parent)
    whole = PROBES.format(path=path, modules=modules) + program
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("modules", [MODULES, MODULES[::-1]], ids=["consumer-first", "publisher-first"])
def test_hooks_in_a_forked_child_run_by_stage(modules: list[str]) -> None:
    """Copies are marked before the last references to them are dropped.

    Within a stage, hooks run in the order in which they were added.
    """
    done = run(FORK, modules)
    said = done.stdout.split("\n")
    expected = ["RENEW 1", "RENEW 2", "marked", "MARK 1", "MARK 2", "RELEASE 1", "RELEASE 2", "gone", "FORGET 1"]
    assert said == [*expected, "FORGET 2", "status 0", ""], done.stderr


@pytest.mark.slow
def test_a_fork_that_stops_waiting_leaves_the_others_alone() -> None:
    """Python reports the exception of a signal handler in a hook, and forks all the same."""
    done = run(INTERRUPTED, MODULES)
    assert done.stdout.split("\n") == ["released False", "released True", "hangs False", ""], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("modules", [MODULES, MODULES[::-1]], ids=["consumer-first", "publisher-first"])
def test_consumers_are_closed_at_exit_before_publishers(modules: list[str]) -> None:
    """Running handlers may publish until they return."""
    done = run(EXIT, modules)
    said = done.stdout.split("\n")
    assert said == ["consumer", "CONSUMERS", "KEPT", "publisher", "PUBLISHERS", "PROBES", ""], done.stderr


@pytest.mark.slow
def test_a_hook_that_fails_keeps_no_other_from_running() -> None:
    """Its error is logged. An interruption is raised after the other hooks."""
    done = run(FAILURES, MODULES)
    assert done.stdout == "forked\nexited\n"
    for part in (
        "failed in stage RENEW",
        "of a fork",
        "failed in stage CONSUMERS",
        "of an exit",
        "KeyboardInterrupt",
    ):
        assert part in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["by the parent", "by the child"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_of_multiprocessing_runs_the_hooks_at_exit(tmp_path: Path, method: str, imported: str) -> None:
    """A forked child ends with ``os._exit``. A spawned one then ends as any interpreter, and runs the hooks again."""
    line = "import reliable_mq._util.hooks"
    imports, in_child = (line, "pass") if imported == "by the parent" else ("", line)
    program = tmp_path / "program.py"
    program.write_text(CHILD.format(imports=imports, in_child=in_child, method=method))
    path = {"PYTHONPATH": str(Path(reliable_mq.__file__).parent.parent)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | path)
    assert set(done.stdout.split()) == {"exited", "0"}, done.stderr


def test_every_hook_of_the_package_is_in_the_registry() -> None:
    """Python's own registries define no order across modules."""
    package = Path(reliable_mq.__file__).parent
    own = re.compile(r"register_at_fork|\batexit\b")
    assert [path.name for path in package.rglob("*.py") if own.search(path.read_text())] == ["hooks.py"]


async def handler(_delivery: object) -> None:
    """Handle a delivery. This is never called."""


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "create",
    [
        lambda _: Publisher("amqp://localhost"),
        lambda _: AsyncPublisher("amqp://localhost"),
        lambda _: Consumer("amqp://localhost", "orders", print),
        lambda _: AsyncConsumer("amqp://localhost", "orders", handler),
        lambda _: DeadLetterQueue("amqp://localhost", "orders.dead"),
        lambda _: MemoryStore(),
        lambda _: RedisStore("redis://localhost"),
        lambda path: SQLiteStore(path / "store.db"),
        lambda path: SQLiteOutbox(path / "orders.outbox"),
        lambda path: SQLAlchemyStore(sqlalchemy.create_engine(f"sqlite:///{path}/store.db")),
        lambda path: SQLAlchemyOutbox(sqlalchemy.create_engine(f"sqlite:///{path}/outbox.db")),
    ],
)
def test_what_has_threads_or_connections_has_no_copy(
    create: Callable[[Path], Any], duplicate: Callable[[Any], object], tmp_path: Path
) -> None:
    """A process pool or Spark would pickle it, and a shallow copy would share its locks."""
    one = create(tmp_path)
    with pytest.raises(UsageError, match=f"{type(one).__name__} cannot be pickled or copied, because .* each process"):
        duplicate(one)
