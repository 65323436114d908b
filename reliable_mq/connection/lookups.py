"""Look up the addresses of host names, on a few daemon threads of the process.

A lookup takes as long as the resolvers take: minutes, or for ever. It cannot be stopped. An attempt to connect gives up
before, and the next attempt follows. So a lookup belongs to its host, not to an attempt. The threads of the standard
library's pools are not used, because they would delay the end of the program.

Invariants:

- At most `MOST` lookups run at a time. The others wait, in the order of their hosts.
- While a host is looked up, all callers wait for the same answer. Only if it has not come after `PATIENCE` seconds,
  which are doubled each time, the host is looked up once more, as the first lookup may hang for ever.
- A caller gets its answer on its own loop, at most once, and not after it has cancelled.
- A forked child begins without lookups. Its parent's threads do not exist there.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq._util.threads import call_in_background

if TYPE_CHECKING:
    from collections.abc import Callable

#: The results of ``getaddrinfo`` that can be used, or the exception that it raised.
Found: TypeAlias = list[Any] | Exception
_Key: TypeAlias = tuple[str, int]

MOST: Final = 16  # threads
PATIENCE: Final = 60.0  # seconds


class Lookup:
    """The wait of one caller for the addresses of a host."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], done: Callable[[Found], None]) -> None:
        self._call_soon = call_soon  # thread-safe; runs a call on the loop of the caller
        self._done: Callable[[Found], None] | None = done  # called with the answer, on the loop

    @property
    def is_wanted(self) -> bool:
        return self._done is not None

    def cancel(self) -> bool:
        """Cancel the wait; return whether the answer was still to come. On the loop only."""
        was_wanted, self._done = self.is_wanted, None
        return was_wanted

    def answer(self, found: Found) -> None:
        """Pass the answer to the loop. Thread-safe."""
        self._call_soon(partial(self._answered, found))

    def _answered(self, found: Found) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(found)


@dataclass(slots=True)
class _Host:
    waiting: list[Lookup] = field(default_factory=list)
    running: int = 0  # lookups
    again_at: float = 0.0  # when the next lookup may begin


class Lookups:
    """The lookups of a process. Thread-safe."""

    def __init__(self) -> None:
        self._reset()
        _instances.add(self)

    def find(
        self, host: str, port: int, done: Callable[[Found], None], call_soon: Callable[[Callable[[], None]], object]
    ) -> Lookup:
        """Find the addresses of a host name, or the one that ``host`` is. Does not block.

        The arguments after ``port`` are those of `Lookup`. ``done`` is not called from inside this call.
        """
        lookup = Lookup(call_soon, done)
        try:
            found = _resolve(host, port, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):  # ``host`` is a name, or invalid
            pass
        else:
            lookup.answer(found)
            return lookup
        with self._lock:
            one = self._hosts.setdefault((host, port), _Host())
            one.waiting = [each for each in one.waiting if each.is_wanted]
            one.waiting.append(lookup)
            due = self._count_due()
        self._start(due)
        return lookup

    def _count_due(self) -> list[_Key]:
        """Count the lookups that are to begin, and return their hosts. With the lock."""
        now = time.monotonic()
        due = []
        for key, one in self._hosts.items():
            if self._running < MOST and now >= one.again_at and any(each.is_wanted for each in one.waiting):
                one.again_at = now + PATIENCE * 2**one.running
                one.running += 1
                self._running += 1
                due.append(key)
        return due

    def _start(self, due: list[_Key]) -> None:
        for key in due:
            call_in_background("reliable_mq host name", partial(_resolve, *key), partial(self._found, key))

    def _found(self, key: _Key, found: Found) -> None:
        with self._lock:
            one = self._hosts[key]
            one.running -= 1
            self._running -= 1
            one.again_at = 0.0
            answered, one.waiting = one.waiting, []
            if not one.running:
                del self._hosts[key]
            due = self._count_due()
        for lookup in answered:
            lookup.answer(found)
        self._start(due)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._hosts: dict[_Key, _Host] = {}
        self._running = 0


def _resolve(host: str, port: int, flags: int = 0) -> list[Any]:
    """Return the addresses for which the kernel makes sockets.

    Raises:
        OSError: If there is none.
    """
    usable, failure = [], OSError("the host name has no address")
    for one in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, socket.IPPROTO_TCP, flags):
        try:
            socket.socket(*one[:3]).close()
        except OSError as error:  # for example, the kernel has no IPv6
            failure = error
        else:
            usable.append(one)
    if not usable:
        raise failure
    return usable


_instances = each_at_fork(ForkStage.RENEW, Lookups._reset)  # noqa: SLF001  # of this module
#: `Lookups.find` of the process.
find_addresses: Final = Lookups().find
