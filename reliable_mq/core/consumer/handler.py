"""The handling of deliveries, step by step, on the handler's thread or task.

`handling` is a generator. It yields the step to carry out (call the handler, claim keys, ...), receives the answer or
an exception, and returns the result of each delivery. So the order of claim, effect and completion is defined here, in
one place, for both APIs. The sync API blocks in a step, and the asyncio API awaits it.

Without a store: call the handler. With one::

    claim --done--> duplicate        --in progress--> wait, no attempt        --store failed--> wait, no attempt
          --unreadable--> as where the store failed
          --new--> call the handler --not now--> release --> not begun
                                    --raised--> release (failed) --> failed
                                                      --its transaction may be committed--> claim again later
                                                      --the store failed in it--> claim again later
                                    --returned, done by its own transaction--> handled
                                    --returned--> complete --taken--> handled
                                                           --token stale--> claim again later, then complete
                                                           --store failed--> complete again later, without the handler

A settlement without an answer is repeated: regularly and at the end (`settling`), and before its key is claimed.

Several deliveries may be claimed together. Those whose handlers have ended are settled together after the last handler
of the group. If a handler runs long, another thread or task takes over the others meanwhile (`GroupProgress`,
`settling_rest`). Otherwise the effects of handlers that have returned would happen again if the connection is lost and
the leases end, and deliveries that have not begun, or whose key another holder has claimed, would wait although other
handlers are idle.

Invariants:

- Every delivery has exactly one result, and is settled or released either by its group or by the one that has taken it
  over.
- With a store, no handler is called without a new claim, and no delivery is reported as handled before the store has it
  as done.
- A handler that has returned is not called again because the store did not answer, or has lost its claim.
- A failed attempt is released before it is reported, or before its key is claimed again, so that the next attempt can
  claim it.
- If the handler raised although its own transaction is or may be committed, or raised the store's error, an attempt is
  counted only if the store still has the claim. Otherwise a message whose effect is done would be dead-lettered after
  its last attempt. The handler may still raise `DeadLetter`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import InitVar, dataclass, replace
from itertools import repeat
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from reliable_mq.core.consumer.attempts import Failure, describe, printable, shown
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.dispatch import verdicts
from reliable_mq.core.idempotency import (
    Claim,
    ClaimStatus,
    CommitStatus,
    InboxClaim,
    SettlementRetries,
    StoreHealth,
    checked_key,
    key_prefix,
)
from reliable_mq.errors import IdempotencyStoreError

T = TypeVar("T")

_STALE: Final = "the lease ended before the handler did, and another holder took over; or the store lost the claim"
_REFUSED: Final = Claim("", ClaimStatus.IN_PROGRESS)  # its handler has returned: claim again, then complete
_NO_ATTEMPT: Final = {  # why the failure of a handler is none, by the state of its transaction
    CommitStatus.NONE: "its transaction failed",
    CommitStatus.UNKNOWN: "whether its transaction was committed is not known, and asked again",
    CommitStatus.DONE: "its handler raised after its transaction was committed",
}
_UNREADABLE: Final = "its record was written by a newer version of this package: use that version here, too"


class SkipReason(enum.Enum):
    """The reason why a handler was not called, or will be called again."""

    DUPLICATE = "duplicate"  # the store has the key as done
    IN_PROGRESS = "in progress"  # another holder has claimed the key
    EXHAUSTED = "exhausted"  # the store has counted the maximum of failed attempts
    UNIDENTIFIED = "unidentified"  # there is no key to claim
    STORE_FAILED = "store failed"  # the store did not answer, or refused the token
    NOT_BEGUN = "not begun"  # the handler was not called; the claim was released
    CANCELLED = "cancelled"  # the handler's task was cancelled; the claim was released


class NotStarted(Exception):
    """The handler must not be called now. It is thrown into the generator."""


class _HandlerExit(Exception):
    """Replaces a handler's ``GeneratorExit``, which would close the generator early."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def failure_of_handler(error: BaseException) -> BaseException:
    """Return the exception to throw into `handling` if the handler raised ``error``."""
    # Not isinstance, which reads the exception's __class__.
    return _HandlerExit(error) if issubclass(type(error), GeneratorExit) else error


@dataclass(frozen=True, slots=True)
class Skipped:
    """A delivery that was neither handled nor failed."""

    delivery: Delivery
    reason: SkipReason
    detail: str = ""  # the error of the store, if it failed


@dataclass(frozen=True, slots=True)
class Failed:
    """A delivery whose handler raised, or returned a verdict other than an ack.

    Attributes:
        alone: Whether the failure concerns this delivery only. Otherwise it is the failure of a batch, which names no
            culprit.
        detail: The error of the store, if it failed to release the claim.
    """

    delivery: Delivery
    failure: Failure
    alone: bool = True
    detail: str = ""


#: The result of a delivery: the delivery itself if it was handled.
Result: TypeAlias = Delivery | Skipped | Failed


@dataclass(slots=True)  # not frozen, which would double the cost of the one made for each delivery
class RunHandler:
    """A call of the handler with ``argument``. The answer is its value or its error."""

    argument: Delivery | list[Delivery]


@dataclass(frozen=True, slots=True)
class ClaimKeys:
    """A claim of keys. The answer is one `Claim` per key."""

    keys: list[str]
    lease: float


@dataclass(frozen=True, slots=True)
class Complete:
    """The completion of claims. The answer is one truth value per claim."""

    claims: list[Claim]


@dataclass(frozen=True, slots=True)
class Release:
    """The release of claims, as failed or untried. The answer is a bool per claim."""

    claims: list[Claim]
    failed: bool


Step: TypeAlias = RunHandler | ClaimKeys | Complete | Release


@dataclass(eq=False, kw_only=True)
class ClaimPolicy:
    """The keys and the lease by which deliveries are claimed."""

    queue: str
    namespace: str | None = None  # of the queue; None for that of a delivery's virtual host
    key: Callable[[Delivery], str | None] | None  # returns the key of a delivery; None for the ``message_id``
    lease: float  # the seconds after which an unsettled claim may be taken over
    max_attempts: int  # the number of failed attempts after which the handler is no longer called
    transaction: Callable[..., Any] | None = None  # the store's method of that name, if it has one
    clock: InitVar[Callable[[], float]]  # returns the current time in seconds, on a monotonic clock

    def __post_init__(self, clock: Callable[[], float]) -> None:
        self.retries = SettlementRetries()
        self.store = StoreHealth(clock)
        self._prefix: tuple[str, str] | None = None  # the namespace of the last delivery and the prefix of its key

    def key_of(self, delivery: Delivery) -> str | None:
        """Return the key to claim for a delivery, or None without a key."""
        key = delivery.message_id if self.key is None else checked_key(copy_context().run(self.key, delivery))
        if not key:
            return None
        namespace = delivery.source.namespace if self.namespace is None else self.namespace
        prefix = self._prefix
        if prefix is None or prefix[0] != namespace:
            self._prefix = prefix = namespace, key_prefix(namespace, self.queue)
        return prefix[1] + key


class _Handover(Generic[T]):
    """Items that the owner takes one by one. Another thread may take the rest."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()  # each step is one operation on it
        self._added: list[T] = []
        self._own: list[T] = []

    def add(self, *items: T) -> None:
        self._added += items
        self._items += items

    def take(self, *, own: bool) -> Iterator[T]:
        """Yield the items that belong to the caller, which is the owner if ``own``."""
        with suppress(IndexError):
            while True:
                item = self._items.popleft()
                if own:
                    self._own.append(item)
                yield item

    def lost(self) -> Iterator[T]:
        """Return the items of the other thread, after the owner has taken the rest."""
        deque(self.take(own=True), maxlen=0)
        own = set(map(id, self._own))
        return (item for item in self._added if id(item) not in own)


class GroupRemainder(NamedTuple):
    """The results and unbegun deliveries of a group that are left to settle."""

    results: list[Delivery | Failed]
    unbegun: list[Delivery]
    settled: list[Result]  # for which nothing is left to do but to report them

    @property
    def deliveries(self) -> list[Delivery]:
        return [*map(delivery_of, self.results), *self.unbegun, *map(delivery_of, self.settled)]


class GroupProgress:
    """The deliveries of a group that have not begun, and its results.

    The group adds and takes them. One other thread may take them over at any time.

    Attributes:
        epoch: The epoch of the waiting work to which the group belongs.
        claims: The claims of the group.
        ended: The results of handlers that have ended, to be settled.
        settled: The results that are settled, or need no settlement, to be reported.
        interrupted: Whether deliveries that had not begun were taken over.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.claims: dict[Delivery, Claim] = {}
        self.interrupted = False
        self.ended = _Handover[Delivery | Failed]()
        self.settled = _Handover[Result]()
        self._waiting = _Handover[Delivery]()

    def begin(self, deliveries: Iterable[Delivery]) -> Iterator[Delivery]:
        """Yield the deliveries that the group is to begin, one after the other."""
        self._waiting.add(*deliveries)  # all at once: another thread must not take over the first ones alone
        return self._waiting.take(own=True)

    def take_over(self) -> GroupRemainder:
        """Return the rest, which the caller is to settle instead of the group."""
        rest = GroupRemainder(
            list(self.ended.take(own=False)),
            list(self._waiting.take(own=False)),
            list(self.settled.take(own=False)),
        )
        self.interrupted = self.interrupted or bool(rest.unbegun)
        return rest

    def left(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Return those of the group's deliveries that nobody takes over. It has ended."""
        reported = map(delivery_of, self.settled.lost())
        lost = {*map(delivery_of, self.ended.lost()), *self._waiting.lost(), *reported}
        return [delivery for delivery in deliveries if delivery not in lost]


def delivery_of(result: Result) -> Delivery:
    """Return the delivery of a result."""
    return result if isinstance(result, Delivery) else result.delivery


Handling: TypeAlias = Generator[Step, Any, list[Result]]


def handling(
    deliveries: Sequence[Delivery],
    *,
    batch: bool,
    claiming: ClaimPolicy | None,
    wall_clock: Callable[[], float],
    progress: GroupProgress | None = None,
) -> Handling:
    """Handle deliveries, step by step.

    Args:
        deliveries: The deliveries, at least one. The handler is called for one after the other, or once if ``batch``.
        batch: Whether the handler takes a list.
        claiming: The policy for claims. None without a store.
        wall_clock: A callable that returns the time of a failure, in seconds since 1970.
        progress: The progress of the group, of which somebody else may take over deliveries.

    Returns:
        The result of each delivery that nobody has taken over, in any order.
    """
    progress = progress or GroupProgress()
    results: list[Result] = []
    if claiming is None:
        left = yield from _call_handler(list(deliveries), batch, wall_clock, progress)
        return [*progress.ended.take(own=True), *(Skipped(delivery, SkipReason.NOT_BEGUN) for delivery in left)]
    unclaimed = [delivery for delivery in deliveries if delivery.claim in (None, _REFUSED)]
    progress.claims = claims = yield from _claim(unclaimed, claiming, results, wall_clock)
    done = [(delivery, delivery.claim) for delivery in deliveries if delivery.claim not in (None, _REFUSED)]
    yield from _complete(claiming, done, results)
    progress.settled.add(*results)
    left = yield from _call_handler(list(claims), batch, wall_clock, progress)
    own = GroupRemainder(list(progress.ended.take(own=True)), left, list(progress.settled.take(own=True)))
    return (yield from settling_rest(claiming, claims, own))


def settling_rest(claiming: ClaimPolicy, claims: dict[Delivery, Claim], rest: GroupRemainder) -> Handling:
    """Settle and release the rest of a group with these claims. Return its results."""
    results = list(rest.settled)
    results += yield from _settle_results(claiming, claims, rest.results)
    results += yield from _release_untried(claiming, {one: claims[one] for one in rest.unbegun}, SkipReason.NOT_BEGUN)
    return results


def settling(claiming: ClaimPolicy) -> Generator[Step, Any, None]:
    """Retry the settlements that the store did not answer."""
    for claims, failed in claiming.retries.settlements():
        answer = yield from _settle(claiming, claims, failed)
        for claim in claims if isinstance(answer, str) and len(claims) > 1 else ():  # one of them may be to blame
            if isinstance((yield from _settle(claiming, [claim], failed)), str):
                claiming.retries.postpone(claim, failed)
                break


def _settle_results(
    claiming: ClaimPolicy,
    claims: dict[Delivery, Claim],
    ended: Sequence[Delivery | Failed],
) -> Generator[Step, Any, list[Result]]:
    """Settle the claims of handlers that have ended."""
    results: list[Result] = []
    failed = [result for result in ended if isinstance(result, Failed)]
    handled = [result for result in ended if isinstance(result, Delivery)]
    for counts in (True, False) if failed else ():
        some = [result for result in failed if result.alone is counts]
        untried = {claims[result.delivery] for result in some if _is_of_store(result)}
        answer = yield from _settle(claiming, [claims[result.delivery] for result in some], counts, untried)
        results.extend(map(_failed_or_unknown, some, repeat(answer) if isinstance(answer, str) else answer))
    if claiming.transaction is not None:
        results.extend(delivery for delivery in handled if _is_completed(delivery))
        handled = [delivery for delivery in handled if not _is_completed(delivery)]
    yield from _complete(claiming, [(delivery, claims[delivery]) for delivery in handled], results)
    return results


def _is_completed(delivery: Delivery) -> bool:
    """Return whether the handler completed the claim in a transaction of the store."""
    return delivery.inbox_claim is not None and delivery.inbox_claim.commit is CommitStatus.DONE


def _failed_or_unknown(result: Failed, released: object) -> Result:
    """Return the result after a failure.

    ``released`` is whether the claim was released, or the text of the store's error.
    """
    detail = released if isinstance(released, str) else ""
    inbox_claim = result.delivery.inbox_claim
    commit = CommitStatus.NONE if inbox_claim is None else inbox_claim.commit
    excused = (commit is not CommitStatus.NONE and result.failure.verdict is None) or _is_of_store(result)
    if (detail or not released) and excused:
        text = printable(f"{_NO_ATTEMPT[commit]}: {detail or result.failure}")
        return Skipped(result.delivery, SkipReason.STORE_FAILED, text)
    return replace(result, detail=detail) if detail else result


def _is_of_store(result: Failed) -> bool:
    """Return whether the handler raised only an error of its inbox's store."""
    of_store = {issubclass(kinds[0], IdempotencyStoreError) for kinds in result.failure.kinds}
    return result.delivery.inbox_claim is not None and result.failure.verdict is None and of_store == {True}


def _call_handler(
    deliveries: list[Delivery], batch: bool, wall_clock: Callable[[], float], progress: GroupProgress
) -> Generator[Step, Any, list[Delivery]]:
    """Call the handler. Add the results, and return the deliveries not begun."""
    left: list[Delivery] = []
    if not batch:
        for delivery in progress.begin(deliveries):
            try:
                yield RunHandler(delivery)
            except NotStarted:
                left.append(delivery)
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001 -- the handler's, whatever it is: sys.exit() too
                progress.ended.add(Failed(delivery, _describe(error, wall_clock())))
            else:
                progress.ended.add(delivery)
    elif deliveries:
        try:
            given = list(deliveries)  # a copy that the handler may change
            found = verdicts((yield RunHandler(given)), deliveries, given)
        except NotStarted:
            left = deliveries
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 -- the handler's, whatever it is: sys.exit() too
            failure = _describe(error, wall_clock())
            for delivery in deliveries:
                progress.ended.add(Failed(delivery, failure, alone=len(deliveries) == 1))
        else:
            for delivery, verdict in found:
                progress.ended.add(delivery if verdict is None else Failed(delivery, describe(verdict, wall_clock())))
    return left


def _describe(error: BaseException, at: float) -> Failure:
    return describe(error.error if type(error) is _HandlerExit else error, at)


def _claim(
    deliveries: list[Delivery], claiming: ClaimPolicy, results: list[Result], wall_clock: Callable[[], float]
) -> Generator[Step, Any, dict[Delivery, Claim]]:
    """Claim keys. Return the deliveries to handle, and add the others to the results."""
    keys: dict[Delivery, str] = {}
    for delivery in deliveries:
        try:
            key = claiming.key_of(delivery)
        except KeyboardInterrupt:
            raise  # on an event loop, it belongs to the program
        except BaseException as error:  # noqa: BLE001 -- the key function's, whatever it is
            results.append(Failed(delivery, describe(error, wall_clock())))
        else:
            if key is None:
                results.append(Skipped(delivery, SkipReason.UNIDENTIFIED))
            else:
                keys[delivery] = key
    new: dict[Delivery, Claim] = {}
    exhausted: dict[Delivery, Claim] = {}
    if claiming.retries:
        yield from _settle_before(claiming, keys, results)
    answer = yield from _ask(claiming, ClaimKeys(list(keys.values()), claiming.lease), len(keys))
    if isinstance(answer, str):
        results.extend(Skipped(delivery, SkipReason.STORE_FAILED, detail=answer) for delivery in keys)
        return new
    for delivery, claim in zip(keys, answer, strict=True):
        if claim.status is ClaimStatus.NEW and delivery.claim is not None:
            delivery.claim = claim  # its handler has returned
        elif claim.status is ClaimStatus.NEW:
            if claiming.transaction is not None:
                delivery.inbox_claim = InboxClaim(claim, claiming.transaction)
            if claim.attempts:
                failures = delivery.begin_failures()
                failures.count = max(failures.count, claim.attempts)
                delivery.redelivered = True
                if failures.count >= claiming.max_attempts:
                    exhausted[delivery] = claim
                    continue
            new[delivery] = claim
        elif claim.status is ClaimStatus.UNREADABLE:
            results.append(Skipped(delivery, SkipReason.STORE_FAILED, _UNREADABLE))
        else:
            reason = SkipReason.DUPLICATE if claim.status is ClaimStatus.DONE else SkipReason.IN_PROGRESS
            results.append(Skipped(delivery, reason))
    results += yield from _release_untried(claiming, exhausted, SkipReason.EXHAUSTED)
    return new


def _release_untried(
    claiming: ClaimPolicy, claims: dict[Delivery, Claim], reason: SkipReason
) -> Generator[Step, Any, list[Result]]:
    """Release the claims of untried deliveries, and return their results."""
    answer = yield from _settle(claiming, list(claims.values()), failed=False)
    return [Skipped(delivery, reason, answer if isinstance(answer, str) else "") for delivery in claims]


def _complete(
    claiming: ClaimPolicy, finished: list[tuple[Delivery, Claim]], results: list[Result]
) -> Generator[Step, Any, None]:
    answer = yield from _settle(claiming, [claim for _, claim in finished], failed=None)
    if isinstance(answer, str):
        for delivery, claim in finished:
            delivery.claim = claim
            results.append(Skipped(delivery, SkipReason.STORE_FAILED, detail=answer))
        return
    for (delivery, _), taken in zip(finished, answer, strict=True):
        delivery.claim = None if taken else _REFUSED
        results.append(delivery if taken else Skipped(delivery, SkipReason.STORE_FAILED, detail=_STALE))


def _settle_before(
    claiming: ClaimPolicy, keys: dict[Delivery, str], results: list[Result]
) -> Generator[Step, Any, None]:
    """Retry the settlements of ``keys``. Drop the keys that still fail."""
    for claims, failed in claiming.retries.settlements(set(keys.values())):
        answer = yield from _settle(claiming, claims, failed)
        if isinstance(answer, str):
            unsettled = {claim.key for claim in claims}
            for delivery in [delivery for delivery, key in keys.items() if key in unsettled]:
                del keys[delivery]
                results.append(Skipped(delivery, SkipReason.STORE_FAILED, detail=answer))


def _settle(
    claiming: ClaimPolicy, claims: list[Claim], failed: bool | None, untried: Collection[Claim] = ()
) -> Generator[Step, Any, list[Any] | str]:
    """Complete claims, or release them as ``failed`` or not. Return like `_ask`.

    Without an answer, those in ``untried`` are to be released later, and not as failed.
    """
    answer = yield from _ask(claiming, Complete(claims) if failed is None else Release(claims, failed), len(claims))
    if isinstance(answer, str):
        claiming.retries.add((claim for claim in claims if claim not in untried), failed)
        claiming.retries.add(untried, failed=False)
    elif claiming.retries:
        claiming.retries.answered(claims, failed)
    return answer


def _ask(
    claiming: ClaimPolicy, step: ClaimKeys | Complete | Release, count: int
) -> Generator[Step, Any, list[Any] | str]:
    """Return the ``count`` answers of the store, or the text of its error."""
    if not count:
        return []
    start = claiming.store.clock()
    try:
        answer = list((yield step))
    except Exception as error:  # noqa: BLE001 -- a store is the user's to write
        problem = shown(error)
    else:
        if len(answer) == count:
            claiming.store.answered()
            return answer
        problem = f"the store gave {len(answer)} answers to {count} questions"
    claiming.store.failed(start, problem)
    return problem
