"""The base of a publisher's channels: to the broker and to the outbox.

Invariants: failures that no user has seen are counted until the publisher is closed. The confirmations of the last ones
are kept, at most a hundred with at most 64 MiB of messages. In a forked child a channel is marked as forked and serves
no caller, because its threads and sockets belong to the parent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq.core.publisher.publication import Publication, summary
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from weakref import WeakSet

    from reliable_mq.errors import PublishError, ReliableMQError

_FAILURES_KEPT: Final = 100  # unseen failures, raised when the publisher is left
_FAILURES_KEPT_BYTES: Final = 64 * 1024 * 1024  # of their messages, except for the last one

P = TypeVar("P", bound=Publication)


class BaseChannel(Generic[P]):
    """A channel of a publisher.

    Args:
        guard: A lock for the state that callers read and for the callbacks of all confirmations. Callers may be on
            other threads.
        delivery_timeout: Seconds from acceptance to the deadline of a message without a timeout of its own.

    Attributes:
        fatal: The error that ended the channel, or None. A channel to an outbox never ends permanently.
        forked: Whether this is a copy in a forked child.
    """

    _made_before_fork: ClassVar[str]  # the text of the error in a forked child

    def __init__(self, guard: AbstractContextManager[object], delivery_timeout: float) -> None:
        self.fatal: ReliableMQError | None = None
        self.forked = False
        self._guard = guard
        self._delivery_timeout = delivery_timeout
        self._closed = False
        self._failures: deque[P] = deque()
        self._failures_bytes = 0
        self._unobserved = 0  # unseen failures, including those that _failures has dropped
        _channels.add(self)

    def take_failures(self) -> PublishError | None:
        """Return one error for all failures that no user has seen, None without one."""
        with self._guard:
            unseen = list(filter(lambda failed: not failed.result_observed, self._failures))  # see `Condition`
            count, self._unobserved = self._unobserved, 0
            self._failures.clear()
            self._failures_bytes = 0
        errors = [error for confirmation in unseen if (error := confirmation.failure())]
        return summary(errors, count) if count else None

    def failure_observed(self) -> None:
        """Note that a user has seen a failure. The caller holds the guard."""
        self._unobserved = max(self._unobserved - 1, 0)  # a close may have raised it already

    def _keep_failure(self, confirmation: P) -> None:
        """Keep a failure that no user has seen. The caller holds the guard."""
        self._unobserved += 1
        kept = self._failures
        kept.append(confirmation)
        self._failures_bytes += confirmation.size
        while len(kept) > _FAILURES_KEPT or (self._failures_bytes > _FAILURES_KEPT_BYTES and len(kept) > 1):
            self._failures_bytes -= kept.popleft().size

    def check_usable(self) -> None:
        """Raise UsageError in a forked child, where no message would ever be settled."""
        if self.forked:
            raise UsageError(self._made_before_fork)

    def check_closable(self) -> None:
        """Raise UsageError if the caller cannot wait for the end of the channel."""
        self.check_usable()

    def timeout_of(self, confirmation: P) -> float:
        """Return the seconds from acceptance to the deadline."""
        return self._delivery_timeout if confirmation.timeout is None else confirmation.timeout

    def forget(self) -> None:
        """Disable this copy in a forked child."""
        self.forked = True

    def _call_outside(self, call: Callable[[], object]) -> None:
        """Schedule a call of code from outside this package, which may wait for others.

        Does not block.
        """
        raise NotImplementedError


# In a forked child these are copies. Their threads, loops and sockets belong to the parent.
_channels: WeakSet[BaseChannel[Any]] = each_at_fork(ForkStage.MARK, lambda channel: channel.forget())
