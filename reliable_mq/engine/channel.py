"""The base of the two channels of a publisher: to the broker, and to its outbox.

Invariants: a failure that no user has looked at is kept until the publisher is left, the last hundred of them whole;
in a forked child, whose parent has the threads and sockets, a channel is marked and serves nobody.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq.core.publisher.publication import Publication

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from weakref import WeakSet

    from reliable_mq.errors import ReliableMQError

__all__ = ["BaseChannel"]

_FAILURES_KEPT: Final = 100  # that no user has looked at, to be raised when the publisher is left

P = TypeVar("P", bound=Publication)


class BaseChannel(Generic[P]):
    """A channel of a publisher.

    Args:
        guard: guards the state that callers read, and the callbacks of all confirmations; they may be on other threads.

    Attributes:
        fatal: the error that has ended the channel, if one has; nothing ends one to an outbox for good.
        forked: whether this is a copy in a forked child.
    """

    def __init__(self, guard: AbstractContextManager[object]) -> None:
        self.fatal: ReliableMQError | None = None
        self.forked = False
        self._guard = guard
        self._closed = False
        self._failures: deque[P] = deque(maxlen=_FAILURES_KEPT)
        self._unobserved = 0  # failures that no user has looked at, those that _failures has dropped included
        _channels.add(self)

    def take_failures(self) -> tuple[list[P], int]:
        """Return failed confirmations that no user has looked at, and their number.

        They are the last hundred; the number is of all.
        """
        with self._guard:
            unseen = [failed for failed in self._failures if not failed.result_observed]
            count, self._unobserved = self._unobserved, 0
            self._failures.clear()
        return unseen, count

    def failure_observed(self) -> None:
        """Note that a user looked at a failure; the caller holds the guard."""
        self._unobserved -= 1

    def _keep_failure(self, confirmation: P) -> None:
        """Keep a failure that no user has looked at. Under the guard."""
        self._failures.append(confirmation)
        self._unobserved += 1

    def check_closable(self) -> None:
        """Raise UsageError if closing would wait for the caller itself."""

    def forget(self) -> None:
        """Disable this copy in a forked child."""
        self.forked = True

    def _call_outside(self, call: Callable[[], object]) -> None:
        """Run code that is not ours, soon, and not here. Does not block."""
        raise NotImplementedError

    def _call_outside_later(self, call: Callable[[], object]) -> None:
        """As `_call_outside`, for code that may wait for more of its kind."""
        self._call_outside(call)


# A forked child has copies of the channels; their threads, loops and sockets are the parent's.
_channels: WeakSet[BaseChannel[Any]] = each_at_fork(ForkStage.MARK, lambda channel: channel.forget())
