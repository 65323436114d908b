"""Handle deliveries, on the thread or task that runs the handler, step by step.

`handling` is a generator: it yields the step to carry out (call the handler, claim keys, ...), is sent the answer, or
gets the exception thrown in, and returns the result of each delivery. So the order of claim, effect and completion is
decided here, once, for the sync and the asyncio API; a step may block there, or be awaited.

Without a store: call the handler. With one::

    claim --done--> duplicate        --in progress--> wait, no attempt        --store failed--> wait, no attempt
          --unreadable--> as where the store failed
          --new--> call the handler --not now--> release --> not begun
                                    --raised--> release (failed) --> failed
                                                      --its transaction may be committed--> claim again later
                                    --returned, done by its own transaction--> handled
                                    --returned--> complete --taken--> handled
                                                           --token stale--> claim again later
                                                           --store failed--> complete again later, without the handler

If the store did not answer when a claim was released or completed, that is done again before the key is claimed, and at
the end (`settling`).

Invariants:

- every delivery has exactly one result;
- with a store, no handler is called without a new claim, and no delivery is reported as handled before the store has it
  as done;
- a handler that has returned is not called again for want of the store's answer;
- a failed attempt is released before it is reported, or before its key is claimed again, so that the next one may;
- if the handler's own transaction is committed though it raised, or may be, no attempt is counted unless the store
  still has the claim: else its last attempt would be dead-lettered with its effect done. A `DeadLetter` it may raise;
- a delivery is never reported as handled because its handler is a generator or coroutine function, of which a call runs
  nothing, or because a verdict was returned instead of raised: acking it would lose it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final, TypeAlias

from reliable_mq.core.consumer.attempts import Failure, describe, printable, shown
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.dispatch import verdicts
from reliable_mq.core.idempotency import Claim, ClaimStatus, CommitStatus, InboxClaim, SettlementRetries
from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.retry import DeadLetter, RetryLater

__all__ = [
    "ClaimKeys",
    "ClaimPolicy",
    "Complete",
    "Failed",
    "Handling",
    "NotStarted",
    "Release",
    "Result",
    "RunHandler",
    "SkipReason",
    "Skipped",
    "Step",
    "check_answer",
    "check_handler",
    "failure_of_handler",
    "handling",
    "is_coroutine_function",
    "settling",
]

_STALE: Final = "the lease ended before the handler did, and another holder took over"
_COMMITTED: Final = "its handler raised after its transaction was committed"
_UNKNOWN: Final = "whether its transaction was committed is not known, and asked again"
_UNREADABLE: Final = "its record was written by a newer version of this package: use that version here, too"


class SkipReason(enum.Enum):
    """Why the handler of a delivery was not called, or will be called again."""

    DUPLICATE = "duplicate"  # the store has it as done
    IN_PROGRESS = "in progress"  # another holder has claimed it
    EXHAUSTED = "exhausted"  # the store has counted as many failed attempts as there may be
    UNIDENTIFIED = "unidentified"  # there is no key to claim
    STORE_FAILED = "store failed"  # the store did not answer, or refused the token
    NOT_BEGUN = "not begun"  # the handler was not called; the claim was given up
    CANCELLED = "cancelled"  # the handler's task was cancelled; the claim was given up


class NotStarted(Exception):
    """Raised into the generator when the handler is not to be called now."""


class _HandlerExit(Exception):
    """Stands for a ``GeneratorExit`` of the handler.

    That would close the generator before it releases the claim.
    """

    def __init__(self, error: GeneratorExit) -> None:
        self.error = error


def failure_of_handler(error: BaseException) -> BaseException:
    """Return the exception to throw into `handling` if the handler raised ``error``."""
    return _HandlerExit(error) if isinstance(error, GeneratorExit) else error


@dataclass(frozen=True, slots=True)
class Skipped:
    """A delivery that was neither handled nor failed."""

    delivery: Delivery
    reason: SkipReason
    detail: str = ""  # the error of the store, if it failed


@dataclass(frozen=True, slots=True)
class Failed:
    """A delivery whose handler raised, or returned a verdict that is no ack.

    Attributes:
        alone: whether the failure is this delivery's own; else it is that of a batch, which names no culprit.
        detail: the error of the store, if it failed to release the claim.
    """

    delivery: Delivery
    failure: Failure
    alone: bool = True
    detail: str = ""


#: The result of a delivery; the delivery itself if it was handled.
Result: TypeAlias = Delivery | Skipped | Failed


@dataclass(slots=True)  # not frozen: there is one for each delivery, and that would double its cost
class RunHandler:
    """Call the handler with ``argument``; send its return value, or throw its error."""

    argument: Delivery | list[Delivery]


@dataclass(frozen=True, slots=True)
class ClaimKeys:
    """Claim keys; send one `Claim` per key."""

    keys: list[str]
    lease: float


@dataclass(frozen=True, slots=True)
class Complete:
    """Complete claims; send one truth value per claim."""

    claims: list[Claim]


@dataclass(frozen=True, slots=True)
class Release:
    """Release claims, as failed or as not tried; send one truth value per claim."""

    claims: list[Claim]
    failed: bool


Step: TypeAlias = RunHandler | ClaimKeys | Complete | Release


class ClaimPolicy:
    """The keys and the lease by which deliveries are claimed.

    Args:
        namespace: of the queue; None for that of the virtual host that a delivery comes from.
        key: returns the key of a delivery, or None; by default its ``message_id``.
        lease: seconds after which a claim that nobody settled may be taken over.
        max_attempts: the failed attempts after which the handler is not called any more.
        transaction: the store's method of that name, for the handler; None where it has none.
    """

    def __init__(
        self,
        *,
        queue: str,
        namespace: str | None = None,
        key: Callable[[Delivery], str | None] | None,
        lease: float,
        max_attempts: int,
        transaction: Callable[..., Any] | None = None,
    ) -> None:
        self._queue = queue
        self._namespace = namespace
        self._prefix: tuple[str, str] | None = None  # the namespace of the last delivery, and the prefix of its key
        self.key = key
        self.lease = lease
        self.max_attempts = max_attempts
        self.transaction = transaction
        self.retries = SettlementRetries()

    def key_of(self, delivery: Delivery) -> str | None:
        """Return the key to claim for a delivery; None if it has none."""
        key = delivery.message_id if self.key is None else self.key(delivery)
        if not key:
            return None
        namespace = delivery.source.namespace if self._namespace is None else self._namespace
        prefix = self._prefix
        if prefix is None or prefix[0] != namespace:
            # Escaped, so that no key of one namespace or queue can be read as one of another.
            parts = [part.replace("%", "%25").replace("|", "%7C") for part in (namespace, self._queue)]
            self._prefix = prefix = namespace, "|".join((*parts, ""))
        return prefix[1] + key


Handling: TypeAlias = Generator[Step, Any, list[Result]]


def handling(
    deliveries: Sequence[Delivery], *, batch: bool, claiming: ClaimPolicy | None, wall_clock: Callable[[], float]
) -> Handling:
    """Handle deliveries, step by step.

    Args:
        deliveries: at least one. The handler is called for one after the other, or once if ``batch``.
        batch: whether the handler takes a list.
        claiming: how to claim; None without a store.
        wall_clock: returns the time of a failure, in seconds since 1970.

    Returns:
        The result of each delivery, in any order.
    """
    results: list[Result] = []
    if claiming is None:
        handled, failed, left = yield from _call_handler(list(deliveries), batch, wall_clock)
        return [*handled, *failed, *(Skipped(delivery, SkipReason.NOT_BEGUN) for delivery in left)]
    done = [(delivery, delivery.claim) for delivery in deliveries if delivery.claim is not None]
    fresh = [delivery for delivery in deliveries if delivery.claim is None]
    claims = yield from _claim(fresh, claiming, results, wall_clock)
    handled, failed, left = yield from _call_handler(list(claims), batch, wall_clock)
    untried = {delivery: claims[delivery] for delivery in left}
    results += yield from _release_untried(claiming, untried, SkipReason.NOT_BEGUN)
    for counts in (True, False):
        some = [result for result in failed if result.alone is counts]
        answer = yield from _settle(claiming, [claims[result.delivery] for result in some], failed=counts)
        results.extend(map(_failed_or_unknown, some, repeat(answer) if isinstance(answer, str) else answer))
    if claiming.transaction is not None:
        results.extend(delivery for delivery in handled if _is_completed(delivery))
        handled = [delivery for delivery in handled if not _is_completed(delivery)]
    done += [(delivery, claims[delivery]) for delivery in handled]
    yield from _complete(claiming, done, results)
    return results


def settling(claiming: ClaimPolicy) -> Generator[Step, Any, None]:
    """Retry the settlements that the store did not answer to."""
    for claims, failed in claiming.retries.settlements():
        yield from _settle(claiming, claims, failed)


def _is_completed(delivery: Delivery) -> bool:
    """Whether the handler has completed the claim, in a transaction of the store."""
    return delivery.inbox_claim is not None and delivery.inbox_claim.commit is CommitStatus.DONE


def _failed_or_unknown(result: Failed, released: object) -> Result:
    """Return the result after a failure. ``released``: True, False or an error's text."""
    detail = released if isinstance(released, str) else ""
    inbox_claim = result.delivery.inbox_claim
    commit = CommitStatus.NONE if inbox_claim is None else inbox_claim.commit
    if (detail or not released) and commit is not CommitStatus.NONE and result.failure.verdict is None:
        why = _COMMITTED if commit is CommitStatus.DONE else _UNKNOWN
        said = f"{result.failure.exception_type}: {result.failure.exception_message}"
        return Skipped(result.delivery, SkipReason.STORE_FAILED, printable(f"{why}: {detail or said}"))
    return replace(result, detail=detail) if detail else result


def _call_handler(
    deliveries: list[Delivery], batch: bool, wall_clock: Callable[[], float]
) -> Generator[Step, Any, tuple[list[Delivery], list[Failed], list[Delivery]]]:
    """Call the handler. Return the deliveries handled, failed, and not begun."""
    handled: list[Delivery] = []
    failed: list[Failed] = []
    left: list[Delivery] = []
    if not batch:
        for delivery in deliveries:
            try:
                yield RunHandler(delivery)
            except NotStarted:
                left.append(delivery)
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001 -- the handler's, whatever it is: sys.exit() too
                failed.append(Failed(delivery, _describe(error, wall_clock())))
            else:
                handled.append(delivery)
    elif deliveries:
        try:
            given = list(deliveries)  # the handler's own, to do with as it likes
            found = verdicts((yield RunHandler(given)), deliveries, given)
        except NotStarted:
            left = deliveries
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 -- the handler's, whatever it is: sys.exit() too
            failure = _describe(error, wall_clock())
            failed.extend(Failed(delivery, failure, alone=len(deliveries) == 1) for delivery in deliveries)
        else:
            for delivery, verdict in found:
                if verdict is None:
                    handled.append(delivery)
                else:
                    failed.append(Failed(delivery, describe(verdict, wall_clock())))
    return handled, failed, left


def _describe(error: BaseException, at: float) -> Failure:
    return describe(error.error if isinstance(error, _HandlerExit) else error, at)


def _claim(
    deliveries: list[Delivery], claiming: ClaimPolicy, results: list[Result], wall_clock: Callable[[], float]
) -> Generator[Step, Any, dict[Delivery, Claim]]:
    """Claim keys. Return the deliveries to handle; put the others among the results."""
    keys: dict[Delivery, str] = {}
    for delivery in deliveries:
        try:
            key = claiming.key_of(delivery)
        except KeyboardInterrupt:
            raise  # on an event loop it is the program's
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
    answer = yield from _ask(ClaimKeys(list(keys.values()), claiming.lease), len(keys))
    if isinstance(answer, str):
        results.extend(Skipped(delivery, SkipReason.STORE_FAILED, detail=answer) for delivery in keys)
        return new
    for delivery, claim in zip(keys, answer, strict=True):
        if claim.status is ClaimStatus.NEW:
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
    if keys and claiming.retries:  # the store answers: a good time for those of other keys
        for claims, failed in claiming.retries.settlements():
            yield from _settle(claiming, claims, failed)
    results += yield from _release_untried(claiming, exhausted, SkipReason.EXHAUSTED)
    return new


def _release_untried(
    claiming: ClaimPolicy, claims: dict[Delivery, Claim], reason: SkipReason
) -> Generator[Step, Any, list[Result]]:
    """Release the claims of deliveries that are not tried, and return their results."""
    answer = yield from _settle(claiming, list(claims.values()), failed=False)
    detail = answer if isinstance(answer, str) else ""
    return [Skipped(delivery, reason, detail) for delivery in claims]


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
        delivery.claim = None
        results.append(delivery if taken else Skipped(delivery, SkipReason.STORE_FAILED, detail=_STALE))


def _settle_before(
    claiming: ClaimPolicy, keys: dict[Delivery, str], results: list[Result]
) -> Generator[Step, Any, None]:
    """Retry the settlements of these keys; leave out those that the store still fails."""
    for claims, failed in claiming.retries.settlements(set(keys.values())):
        answer = yield from _settle(claiming, claims, failed)
        if isinstance(answer, str):
            unsettled = {claim.key for claim in claims}
            for delivery in [delivery for delivery, key in keys.items() if key in unsettled]:
                del keys[delivery]
                results.append(Skipped(delivery, SkipReason.STORE_FAILED, detail=answer))


def _settle(claiming: ClaimPolicy, claims: list[Claim], failed: bool | None) -> Generator[Step, Any, list[Any] | str]:
    """Complete claims, or release them, as ``failed`` or not. Returns as `_ask`."""
    answer = yield from _ask(Complete(claims) if failed is None else Release(claims, failed), len(claims))
    if isinstance(answer, str):
        claiming.retries.add(claims, failed)
    elif claiming.retries:
        claiming.retries.answered(claims, failed)
    return answer


def _ask(step: ClaimKeys | Complete | Release, count: int) -> Generator[Step, Any, list[Any] | str]:
    """Return ``count`` answers of the store, or the text of its error."""
    if not count:
        return []
    try:
        answer = list((yield step))
    except Exception as error:  # noqa: BLE001 -- a store is the user's to write
        return shown(error)
    if len(answer) != count:
        return f"the store gave {len(answer)} answers to {count} questions"
    return answer


def is_coroutine_function(handler: object) -> bool:
    """Whether this is a coroutine function, or an object that is called as one."""
    return _is(inspect.iscoroutinefunction, handler)


def check_handler(handler: object) -> None:
    """Refuse a handler that cannot handle anything.

    Raises:
        ConfigurationError: it cannot be called, or is a generator function.
    """
    if not callable(handler):
        raise ConfigurationError(f"handler must be callable, not {handler!r}")
    if _is(inspect.isgeneratorfunction, handler) or _is(inspect.isasyncgenfunction, handler):
        raise ConfigurationError("handler is a generator function, of which a call runs nothing: take out its yield")


def check_answer(answer: object, *, batch: bool) -> None:
    """Raise a verdict that a handler returned; refuse a value of one that did nothing.

    The verdicts of a batch handler are read elsewhere.

    Raises:
        RetryLater, DeadLetter: the value is that, or that class.
        UsageError: the value is a coroutine or a generator.
    """
    if not batch:
        if isinstance(answer, (RetryLater, DeadLetter)):
            raise answer
        if isinstance(answer, type) and issubclass(answer, (RetryLater, DeadLetter)):
            raise answer
    if isinstance(answer, CoroutineType):
        answer.close()  # or Python says that it was never awaited
        raise UsageError(
            "the handler returned a coroutine, of which nothing has run; define it with async def, await what it "
            "calls, and give it to an AsyncConsumer"
        )
    if isinstance(answer, (GeneratorType, AsyncGeneratorType)):
        raise UsageError("the handler returned a generator, of which nothing has run: take out its yield")


def _is(kind: Callable[[object], bool], handler: object) -> bool:
    return kind(handler) or kind(type(handler).__call__)
