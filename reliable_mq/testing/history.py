"""Histories of operations on messages with their times, and checks of them.

As in Jepsen, each operation (publish, handle, effect, ack) has a start, an end and an outcome, which is ok, failed or
unknown. An `Audit` compares sums. A `History` also records its operations in an audit, and checks conditions that
depend on times:

- *late*: an operation that went on after its deadline. A call may fail at its deadline, but may not outlive it.
- *without majority*: a publish reported as confirmed in a window in which the broker had no majority to confirm with.
- *out of order*: messages of one key that were first handled in a different order than they were published.
- *overlapping*: handlers of two consumers that ran at the same time, where one at a time was promised.
- *acked early*: an ack by a consumer before any of its own handlers of the message had ended.

Invariants:
- An operation that never ended has an unknown outcome and lasts forever.
- A window is half-open. If its begin is uncertain, operations that may have ended before the window are not judged.
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

from reliable_mq._util.validation import check_collection
from reliable_mq.errors import PublishError, UsageError
from reliable_mq.testing.audit import Audit, first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reliable_mq.testing.audit import AuditResult

__all__ = ["History", "HistoryResult", "Operation", "OperationKind", "OperationOutcome", "Window"]

_UNCERTAINTY = 2.0  # seconds within which a busy client reports a received confirm


class OperationKind(enum.Enum):
    """The kinds of operations in a history."""

    PUBLISH = "publish"
    HANDLE = "handle"
    EFFECT = "effect"
    ACK = "ack"


class OperationOutcome(enum.Enum):
    """The outcome of an operation as its caller knows it."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False, repr=False)
class Operation:
    """One operation. `end` is thread-safe, and only its first call counts.

    Attributes:
        kind: The kind of operation.
        message_id: The id of the message.
        by: The name of the publisher or consumer.
        key: The key by which messages are ordered, or None if no order was promised.
        start, ended: The times of start and end, in seconds of the history's clock. `ended` is infinite until the end.
        deadline: The latest time at which the operation must end, in seconds of the same clock.
        outcome: The outcome, which is unknown until the end.
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
        """Record that the operation ends now.

        Args:
            outcome: The outcome. A publish is ok if it was confirmed, and failed if the broker certainly does not have
                the message. An unknown outcome is also final: the operation may have taken effect.
        """
        self._on_end(self, outcome)

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.message_id} by {self.by!r} {self.start:.3f}-{self.ended:.3f} {self.outcome}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A half-open interval ``[begin, end)`` of the history's clock.

    Attributes:
        uncertainty: The time after `begin` in which operations that started before it may still end, in seconds.
        by: The publishers or consumers that the window concerns, or None for all.
    """

    begin: float
    end: float
    uncertainty: float = 0.0
    by: frozenset[str] | None = None

    def concerns(self, operation: Operation) -> bool:
        """Return whether an operation certainly ended in the window."""
        begin = self.begin if operation.start >= self.begin else self.begin + self.uncertainty
        return begin <= operation.ended < self.end and (self.by is None or operation.by in self.by)


class Swap(NamedTuple):
    """A pair of messages of a key, handled in this order but published in the other."""

    key: str
    earlier: str
    later: str


class History:
    """A collector of operations. Thread-safe. No method blocks for long.

    Args:
        account: The audit that records the operations, or None for a new audit.
        clock: A function that returns the time in seconds and never goes backwards.
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
        """All operations so far, in the order of their starts."""
        with self._lock:
            return list(self._operations)

    # -- record --------------------------------------------------------------------------------------------------------

    def begin(
        self, kind: OperationKind, message_id: str, *, by: str = "", key: str | None = None, timeout: float = math.inf
    ) -> Operation:
        """Record the start of an operation. Call this before the operation.

        Args:
            kind: The kind of operation.
            message_id: The id of the message.
            by: The name of the publisher or consumer.
            key: The ordering key of a publish. Messages of one key are expected in the order of the publishes' starts.
            timeout: The maximum duration of the operation, in seconds.
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
        self, kind: OperationKind, message_id: str, *, by: str = "", key: str | None = None, timeout: float = math.inf
    ) -> Iterator[Operation]:
        """Record the block as an operation, which fails if the block raises an exception.

        The outcome of a publish is unknown after an exception, unless it is a ``PublishError`` without
        ``may_have_arrived``. The arguments are those of `begin`.
        """
        operation = self.begin(kind, message_id, by=by, key=key, timeout=timeout)
        try:
            yield operation
        except BaseException as error:
            refused = isinstance(error, PublishError) and not error.may_have_arrived
            certain = refused or kind is not OperationKind.PUBLISH
            operation.end(OperationOutcome.FAILED if certain else OperationOutcome.UNKNOWN)
            raise
        operation.end()

    @contextmanager
    def without_majority(
        self, *, by: Collection[str] | None = None, uncertainty: float = _UNCERTAINTY
    ) -> Iterator[None]:
        """Record the block as a window in which nothing can be confirmed.

        The block must begin after the fault, and end before the fault is healed.

        Args:
            by: The publishers that cannot reach a majority, or None for all.
            uncertainty: The time in which a confirm sent before the window may still be reported, in seconds.

        Raises:
            ConfigurationError: If `by` is a string.
        """
        who = _names(by)
        begin = self.clock()
        try:
            yield
        finally:
            self._without_majority.append(Window(begin=begin, end=self.clock(), uncertainty=uncertainty, by=who))

    @contextmanager
    def disturbed(self, *, after: float = 0.0) -> Iterator[None]:
        """Record the block as a window in which two consumers may be active.

        Two consumers may overlap after a fault because a handler can outlive the connection of its delivery.

        Args:
            after: The time by which the window extends beyond the block, in seconds.
        """
        begin = self.clock()
        try:
            yield
        finally:
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
        """Return the duration of the longest silence after a fault, in seconds.

        A silence is a time in which no operation of this kind ends with outcome ok. The result is infinite if none does
        after the fault.

        Args:
            kind: The kind of operation.
            since: The time of the fault.
            until: The end of the examined time, by default the end of the last operation with outcome ok.
            by: The publishers or consumers whose operations are examined, or None for all.

        Raises:
            ConfigurationError: If `by` is a string.
        """
        who = _names(by)
        ends = sorted(
            each.ended
            for each in self.operations
            if each.kind is kind
            and each.outcome is OperationOutcome.OK
            and since < each.ended <= until
            and (who is None or each.by in who)
        )
        if not ends:
            return math.inf
        moments = [since, *ends] if until == math.inf else [since, *ends, until]
        return max(after - before for before, after in pairwise(moments))

    def result(self, *, tolerance: float = 0.0) -> HistoryResult:
        """Examine the history so far and return the result.

        Args:
            tolerance: The time by which an operation may exceed its deadline on a busy machine, in seconds.
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
            keys=frozenset(each.key for each in publishes if each.key is not None),
            consumers=frozenset(each.by for each in handles),
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


def _names(by: Collection[str] | None) -> frozenset[str] | None:
    check_collection("by", by)
    return None if by is None else frozenset(by)


def _out_of_order(publishes: Sequence[Operation], handles: Sequence[Operation]) -> Iterator[Swap]:
    """Yield messages of a key that were first handled out of order."""
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

    A handler that begins outside the allowed windows is paired with each running handler of another consumer.
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
    """The result of a history: the balance of its audit, and the wrong operations.

    Attributes:
        balance: The lost, unexpected and repeated messages, and the effects.
        operations: The number of operations.
        keys: The ordering keys of the publishes.
        consumers: The names of the consumers that handled messages, with an empty name if a handler has none.
        late: The operations that outlived their deadline.
        without_majority: The publishes that were confirmed without a majority.
        out_of_order: The messages of a key that were handled in a different order than published.
        overlapping: The handlers of two consumers that ran at the same time.
        acked_early: The acks of messages whose handler had not ended.
    """

    balance: AuditResult
    operations: int
    keys: frozenset[str]
    consumers: frozenset[str]
    late: tuple[Operation, ...]
    without_majority: tuple[Operation, ...]
    out_of_order: tuple[Swap, ...]
    overlapping: tuple[tuple[Operation, Operation], ...]
    acked_early: tuple[Operation, ...]

    def __str__(self) -> str:
        """Return the counts in one line, even if they are wrong."""
        return (
            f"{self.balance}, late {len(self.late)}, confirmed without majority {len(self.without_majority)}, "
            f"out of order {len(self.out_of_order)}, overlapping {len(self.overlapping)}"
        )

    def check(self, *, effects_once: bool = False, ordered: bool = False, exclusive: bool = False) -> None:
        """Check that the promises of the library allow the history.

        Args:
            effects_once: True to also require exactly one effect of every handled message.
            ordered: True to also require the order of each key.
            exclusive: True to also require that only one consumer at a time handled messages.

        Raises:
            AssertionError: If a check fails. The message has the counts and the first few cases of each fault.
            UsageError: If the check cannot fail: `effects_once` without a handled message or an effect, `ordered`
                without a publish that has a key, or `exclusive` without the name of each handler's consumer.
        """
        if ordered and not self.keys:
            raise UsageError("ordered cannot be checked: no publish has a key, so record publishes with key=")
        if exclusive and ("" in self.consumers or not self.consumers):
            raise UsageError("exclusive cannot be checked: record every handler with by=, the name of its consumer")
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
