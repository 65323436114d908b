"""The package's hooks around a fork and at exit, and objects of one process.

Python runs ``os.register_at_fork`` hooks in the order of registration and ``atexit`` hooks in the opposite order, and a
program may import the modules of this package in any order. So the package registers with Python once, here.

Invariants:

- Hooks run by stage, in the order of `ForkStage` and `ExitStage`. Within a stage they run in the order in which they
  were added.
- A hook that raises does not keep other hooks from running.
- The hooks at exit run before those of all modules that were imported before the last hook was added. So logging, for
  example, still works.
- A forked child of `multiprocessing` runs the hooks at exit as well, although it ends with ``os._exit``.
"""

from __future__ import annotations

import atexit
import enum
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Generic, NoReturn, TypeVar
from weakref import WeakSet

from reliable_mq._util.logs import get_logger
from reliable_mq.errors import UsageError

logger = get_logger(__name__)


class OfOneProcess:
    """An object with threads or connections, which cannot be pickled or copied.

    A forked child has a copy all the same, which must leave them to the parent.
    """

    def __init__(self) -> None:
        self._made_in = os.getpid()

    @property
    def _is_forked(self) -> bool:
        """Whether this is a copy in a forked child."""
        return os.getpid() != self._made_in

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} cannot be pickled or copied, because its threads and connections belong to one "
            "process: create another in each process"
        )


class ForkStage(enum.IntEnum):
    """The stages in a forked child."""

    RENEW = enum.auto()
    """Renew state of the process: locks that a thread of the parent may hold, random digits."""

    MARK = enum.auto()
    """Mark the copies of the parent's publishers and consumers, before anything uses or ends them."""

    RELEASE = enum.auto()
    """Close descriptors that would keep a lock of the parent beyond its end."""

    FORGET = enum.auto()
    """Drop the last references to the marked copies."""


class ExitStage(enum.IntEnum):
    """The stages when the interpreter exits."""

    CONSUMERS = enum.auto()
    """Close consumers first: their handlers may publish until they return."""

    KEPT = enum.auto()
    """Close publishers that the package keeps for later use."""

    PUBLISHERS = enum.auto()
    """Close publishers next: outstanding messages are published."""

    PROBES = enum.auto()
    """End the probes last: until then they report the end of the others."""


Stage = TypeVar("Stage", bound=enum.IntEnum)
T = TypeVar("T")

_in_child: list[tuple[ForkStage, Callable[[], object]]] = []
_at_exit: list[tuple[ExitStage, Callable[[], object]]] = []


def at_fork(stage: ForkStage, hook: Callable[[], object]) -> None:
    """Call ``hook`` in every forked child, before the child continues."""
    _in_child.append((stage, hook))


def each_at_fork(stage: ForkStage, hook: Callable[[T], object]) -> WeakSet[T]:
    """Return a set of objects; call ``hook`` with each of them in a forked child."""
    objects: WeakSet[T] = WeakSet()

    def call_with_each() -> None:
        for one in objects:
            hook(one)

    at_fork(stage, call_with_each)
    return objects


def around_fork(before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call ``before`` on a thread that forks, and ``after`` on it when it has forked.

    Neither is called in the child. Python reports an exception of either, and forks all the same.
    """
    os.register_at_fork(before=before, after_in_parent=after)


class HeldAtFork(Generic[T]):
    """Objects that a thread holds while it forks, so that no other thread uses them.

    A library that no fork renews, as SQLite, has locks of its own. One that a thread has at the fork stays locked in
    the child for ever.

    Args:
        hold: A callable that is called with each object before the fork, and with a stack of callbacks, which are
            called after it in both processes.
    """

    def __init__(self, hold: Callable[[T, ExitStack], object]) -> None:
        self._hold = hold
        self._objects: WeakSet[T] = WeakSet()
        self._forking = threading.RLock()  # held by a thread that forks; a signal handler may fork meanwhile
        #: The ends of forks that have begun, by thread.
        self._forks: defaultdict[int, list[ExitStack]] = defaultdict(list)
        around_fork(self._before, self._after)
        at_fork(ForkStage.RENEW, self._after)

    def add(self, one: T) -> None:
        with self._forking:
            self._objects.add(one)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._objects))

    def _before(self) -> None:
        after = ExitStack()
        self._forks[threading.get_ident()].append(after)
        after.callback(self._release)
        self._forking.acquire()
        for one in self:
            self._hold(one, after)

    def _after(self) -> None:
        if forks := self._forks[threading.get_ident()]:  # none if `_before` was interrupted at once
            forks.pop().close()

    def _release(self) -> None:
        with suppress(RuntimeError):  # a signal handler has interrupted the wait for it
            self._forking.release()


def at_exit(stage: ExitStage, hook: Callable[[], object]) -> None:
    """Call ``hook`` when the interpreter exits, or a child of `multiprocessing` ends."""
    _at_exit.append((stage, hook))
    atexit.unregister(_exit)
    atexit.register(_exit)


def _exit() -> None:
    _run(_at_exit)


def _run(hooks: list[tuple[Stage, Callable[[], object]]]) -> None:
    interruption: BaseException | None = None
    for stage, hook in sorted(hooks, key=lambda entry: entry[0]):  # stable
        try:
            hook()
        except Exception:
            logger.exception("%s failed in stage %s", hook, stage.name)
        except BaseException as error:  # noqa: BLE001  # raised when the others have run
            interruption = error
    if interruption is not None:
        raise interruption


def _follow_multiprocessing() -> None:
    """Run the hooks at exit in a child of `multiprocessing`, too.

    A child that was forked, also by a fork server, ends with ``os._exit`` after its finalizers. It forgets those that
    were registered before it begins. A program that has not imported `multiprocessing` has no such child.
    """
    util = sys.modules.get("multiprocessing.util")
    if util is None:
        return

    def finalize(_: object = None) -> None:
        util.Finalize(None, _exit, exitpriority=0)

    util.register_after_fork(_exit, finalize)
    if sys.modules["multiprocessing"].parent_process() is not None:  # the child has begun
        finalize()


os.register_at_fork(after_in_child=lambda: _run(_in_child))
at_fork(ForkStage.RENEW, _follow_multiprocessing)
_follow_multiprocessing()
