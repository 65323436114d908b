"""Record operations on messages with their times, and check the history.

In the manner of Jepsen: each operation (publish, handle, effect, ack) has a start, an end and an outcome, which is ok,
failed or unknown. An `Audit` compares sums; a `History` books into one, and checks in addition what depends on times:

- *late*: ended after its deadline, or never ended. A call may fail at its deadline; it may not outlive it.
- *without majority*: reported as confirmed within a window in which the broker had no majority to confirm with.
- *out of order*: messages of one key that were handled for the first time in another order than they were published in.
- *overlapping*: handled by two consumers at the same time where one at a time was promised.
- *acked early*: acked before any handler of the message had ended.

Invariants: an operation that never ended has an unknown outcome, and lasts for ever. A window is half-open, and where
its begin is uncertain, no operation is judged that could have ended before it.
"""

from __future__ import annotations

import enum
import math
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from reliable_mq.testing.audit import Audit, first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reliable_mq.testing.audit import AuditResult

__all__ = ["History", "HistoryResult", "Operation", "OperationKind", "OperationOutcome", "Window"]

_UNCERTAINTY = 2.0  # seconds, within which a busy client reports a confirm that it has received


class OperationKind(enum.Enum):
    """The operations of a history."""

    PUBLISH = "publish"
    HANDLE = "handle"
    EFFECT = "effect"
    ACK = "ack"


class OperationOutcome(enum.Enum):
    """The outcome of an operation, as its caller knows it."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False, repr=False)
class Operation:
    """One operation. `end` is thread-safe; the first outcome counts.

    Attributes:
        kind: of operation.
        message_id: of its message.
        by: who did it: the name of a publisher or consumer.
        key: by which messages are ordered; None where no order was promised.
        start, ended: seconds of the history's clock; `ended` is infinite until it has ended.
        deadline: by which it had to end, in seconds of the same clock.
        outcome: unknown until it has ended.
    """

    kind: OperationKind
    message_id: str
    by: str
    key: str | None
    start: float
    deadline: float
    _on_end: Callable[[Operation, OperationOutcome], None]
    ended: float = math.inf
    outcome: OperationOutcome = OperationOutcome.UNKNOWN

    def end(self, outcome: OperationOutcome = OperationOutcome.OK) -> None:
        """Record the end, now.

        Args:
            outcome: of a publish: ok if it was confirmed, failed if the broker certainly does not have it. An unknown
                outcome is final, too: the operation may have taken effect.
        """
        self._on_end(self, outcome)

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.message_id} by {self.by!r} {self.start:.3f}-{self.ended:.3f} {self.outcome}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A half-open interval ``[begin, end)`` of the history's clock.

    Attributes:
        uncertainty: seconds after `begin` in which operations that started before it may still end.
        by: whose operations it concerns; None for everybody's.
    """

    begin: float
    end: float
    uncertainty: float = 0.0
    by: frozenset[str] | None = None

    def concerns(self, operation: Operation) -> bool:
        """Whether an operation ended in it for certain."""
        begin = self.begin if operation.start >= self.begin else self.begin + self.uncertainty
        return begin <= operation.ended < self.end and (self.by is None or operation.by in self.by)


class Swap(NamedTuple):
    """Two messages of a key, handled in this order and published in the other."""

    key: str
    earlier: str
    later: str


class History:
    """Collect operations. Thread-safe; no method waits for more than a few updates.

    Args:
        account: in which operations are booked as they end; a new one if None.
        clock: returns seconds, never less than before.
    """

    def __init__(self, account: Audit | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.account = Audit() if account is None else account
        self.clock = clock
        self._lock = Lock()
        self._operations: list[Operation] = []
        self._without_majority: list[Window] = []
        self._disturbed: list[Window] = []

    @property
    def operations(self) -> list[Operation]:
        """All operations so far, in the order in which they began."""
        with self._lock:
            return list(self._operations)

    # -- record --------------------------------------------------------------------------------------------------------

    def begin(
        self, kind: OperationKind, message_id: str, *, by: str = "", key: str | None = None, timeout: float = math.inf
    ) -> Operation:
        """Record the start of an operation: before the call, not after.

        Args:
            kind: of operation.
            message_id: of its message.
            by: the name of the publisher or consumer.
            key: of a publish: messages of one key are expected in the order in which they began to be published.
            timeout: seconds within which the operation has to end.
        """
        if kind is OperationKind.PUBLISH:
            self.account.attempted(message_id)
        with self._lock:
            start = self.clock()
            operation = Operation(kind, message_id, by, key, start, start + timeout, self._end)
            self._operations.append(operation)
        return operation

    @contextmanager
    def during(
        self, kind: OperationKind, message_id: str, *, by: str = "", timeout: float = math.inf
    ) -> Iterator[Operation]:
        """Record an operation as long as the block; an exception is its failure."""
        operation = self.begin(kind, message_id, by=by, timeout=timeout)
        try:
            yield operation
        except BaseException:
            operation.end(OperationOutcome.FAILED)
            raise
        operation.end()

    @contextmanager
    def without_majority(
        self, *, by: Collection[str] | None = None, uncertainty: float = _UNCERTAINTY
    ) -> Iterator[None]:
        """Record the block as a window in which nothing can be confirmed.

        It begins after the fault, and ends before that is healed.

        Args:
            by: the publishers that cannot reach a majority; None for all.
            uncertainty: seconds in which a confirm that was sent before the window may still be reported.
        """
        begin = self.clock()
        yield
        who = None if by is None else frozenset(by)
        self._without_majority.append(Window(begin=begin, end=self.clock(), uncertainty=uncertainty, by=who))

    @contextmanager
    def disturbed(self, *, after: float = 0.0) -> Iterator[None]:
        """Record the block as a window in which two consumers may be active.

        A handler outlives the connection of its delivery.

        Args:
            after: seconds for which it goes on after the block.
        """
        begin = self.clock()
        yield
        self._disturbed.append(Window(begin=begin, end=self.clock() + after))

    def _end(self, operation: Operation, outcome: OperationOutcome) -> None:
        with self._lock:
            if operation.ended != math.inf:
                return
            operation.ended = self.clock()
            operation.outcome = outcome
        message_id = operation.message_id
        match operation.kind, outcome:
            case OperationKind.PUBLISH, OperationOutcome.OK:
                self.account.confirmed(message_id)
            case OperationKind.PUBLISH, OperationOutcome.FAILED:
                self.account.failed(message_id)
            case OperationKind.HANDLE, OperationOutcome.OK:
                self.account.handled(message_id)
            case OperationKind.EFFECT, OperationOutcome.OK:
                self.account.effect(message_id)

    # -- check ---------------------------------------------------------------------------------------------------------

    def longest_silence(
        self, kind: OperationKind, since: float, until: float = math.inf, *, by: Collection[str] | None = None
    ) -> float:
        """Return the seconds of the longest silence after a fault.

        A silence is a time in which no operation of this kind ends well. It is infinite if none ended well at all.

        Args:
            kind: of operation.
            since: the time of the fault.
            until: the time up to which silences are looked at; by default the end of the last operation.
            by: whose operations are looked at; None for everybody's.
        """
        ends = sorted(
            each.ended
            for each in self.operations
            if each.kind is kind
            and each.outcome is OperationOutcome.OK
            and since < each.ended <= until
            and (by is None or each.by in by)
        )
        if not ends:
            return math.inf
        moments = [since, *ends] if until == math.inf else [since, *ends, until]
        return max(after - before for before, after in pairwise(moments))

    def result(self, *, tolerance: float = 0.0) -> HistoryResult:
        """Examine the history so far.

        Args:
            tolerance: seconds by which an operation may end after its deadline, on a machine that is busy.
        """
        operations = self.operations
        now = self.clock()
        with self._lock:
            windows, disturbed = list(self._without_majority), list(self._disturbed)
        publishes = [each for each in operations if each.kind is OperationKind.PUBLISH]
        handles = [each for each in operations if each.kind is OperationKind.HANDLE]
        return HistoryResult(
            balance=self.account.balance(),
            operations=len(operations),
            late=tuple(each for each in operations if min(each.ended, now) > each.deadline + tolerance),
            without_majority=tuple(
                each
                for each in publishes
                if each.outcome is OperationOutcome.OK and any(window.concerns(each) for window in windows)
            ),
            out_of_order=tuple(_out_of_order(publishes, handles)),
            overlapping=tuple(_overlapping(handles, disturbed)),
            acked_early=tuple(_acked_early(operations)),
        )


def _out_of_order(publishes: Sequence[Operation], handles: Sequence[Operation]) -> Iterator[Swap]:
    """Yield messages of a key whose first handling was not in their order."""
    positions: dict[str, tuple[str, int]] = {}
    for position, publish in enumerate(publishes):
        if publish.key is not None:
            positions.setdefault(publish.message_id, (publish.key, position))
    newest: dict[str, tuple[int, str]] = {}
    seen: set[str] = set()
    for handle in handles:
        if handle.message_id in seen or handle.message_id not in positions:
            continue
        seen.add(handle.message_id)
        key, position = positions[handle.message_id]
        before = newest.get(key)
        if before is not None and before[0] > position:
            yield Swap(key, before[1], handle.message_id)
        else:
            newest[key] = position, handle.message_id


def _overlapping(handles: Sequence[Operation], allowed: Sequence[Window]) -> Iterator[tuple[Operation, Operation]]:
    """Yield pairs of handlers of two consumers that ran at the same time.

    Of the handlers that run when another one begins outside of the allowed windows, each is paired with it.
    """
    running: list[Operation] = []
    for handle in handles:
        running = [each for each in running if each.ended > handle.start]
        if not any(window.begin <= handle.start < window.end for window in allowed):
            yield from ((each, handle) for each in running if each.by != handle.by)
        running.append(handle)


def _acked_early(operations: Sequence[Operation]) -> Iterator[Operation]:
    handled: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    for each in operations:
        if each.kind is OperationKind.HANDLE:
            whose = each.message_id, each.by
            handled[whose] = min(handled[whose], each.ended)
    for each in operations:
        if each.kind is OperationKind.ACK and each.start < handled[each.message_id, each.by]:
            yield each


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryResult:
    """The result: the balance of the account, and the operations that are wrong.

    Attributes:
        balance: lost, unexpected and repeated messages, and effects.
        operations: how many there were.
        late: operations that outlived their deadline.
        without_majority: publishes confirmed where there was no majority.
        out_of_order: messages of a key, handled in another order than published.
        overlapping: handlers of two consumers at the same time.
        acked_early: acks of messages whose handler had not ended.
    """

    balance: AuditResult
    operations: int
    late: tuple[Operation, ...]
    without_majority: tuple[Operation, ...]
    out_of_order: tuple[Swap, ...]
    overlapping: tuple[tuple[Operation, Operation], ...]
    acked_early: tuple[Operation, ...]

    def __str__(self) -> str:
        """Return the counts in one line, whether or not they are correct."""
        return (
            f"{self.balance}, late {len(self.late)}, confirmed without majority {len(self.without_majority)}, "
            f"out of order {len(self.out_of_order)}, overlapping {len(self.overlapping)}"
        )

    def check(self, *, effects_once: bool = False, ordered: bool = False, exclusive: bool = False) -> None:
        """Raise unless the history is one that the promise allows.

        Args:
            effects_once: also require exactly one effect of every handled message.
            ordered: also require the order of each key.
            exclusive: also require that one consumer at a time handled messages.

        Raises:
            AssertionError: with the counts, and the first few of each fault.
        """
        self.balance.check(effects_once=effects_once)
        faults: dict[str, Sequence[object]] = {
            "past their deadline": self.late,
            "confirmed without a majority": self.without_majority,
            "acked before they were handled": self.acked_early,
        }
        if ordered:
            faults["out of order"] = self.out_of_order
        if exclusive:
            faults["handled by two consumers at once"] = self.overlapping
        wrong = [f"{what}: {first_few(found)}" for what, found in faults.items() if found]
        if wrong:
            raise AssertionError(f"the history is not allowed: {self}\n" + "\n".join(wrong))
