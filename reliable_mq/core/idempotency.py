"""Claims of an idempotency store, and retries of settlements without an answer.

If the store does not answer a settlement, it is sent again about every second, before the same key is claimed, and
when the consumer stops. So when the message is delivered again, on another channel, to another consumer or as its own
next attempt, its key is done or free instead of claimed until the lease ends. A handler that has returned is not called
again just because the store and the broker were lost together.

Invariants:

- Of all ``NEW`` claims on a key, at most one at a time has a token that the store accepts. Tokens are never reused and
  always grow, so a holder whose expired lease was taken over cannot settle the claim of another holder.
- A settlement is retried until the store answers, with any answer. One that the store cannot take does not keep the
  others from it. Above ``capacity``, only the latest settlements are retried.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from reliable_mq._util.validation import Duration, is_coroutine_function, is_text, seconds
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

LEASE: Final = 300.0  # seconds, by default


def namespace_of(cluster: str, virtual_host: str) -> str:
    """Return a name for a virtual host, within which queue names are unique.

    The name is the same for connections to every node of a cluster.
    """
    return f"{cluster.replace('%', '%25').replace('/', '%2F')}/{virtual_host}"


def key_prefix(namespace: str, queue: str) -> str:
    """Return the beginning of the keys of a queue, and of no other queue's keys."""
    return "".join(part.replace("%", "%25").replace("|", "%7C") + "|" for part in (namespace, queue))


def check_options(key: object, namespace: object, lease: Duration, *, has_store: bool) -> float:
    """Check a consumer's options for its store, and return the lease in seconds.

    Raises:
        ConfigurationError: If an option is invalid, or is given without a store. The message names it.
    """
    if key is not None and not callable(key):
        raise ConfigurationError(f"idempotency_key must be callable, not {key!r}")
    if is_coroutine_function(key):
        raise ConfigurationError("idempotency_key is a coroutine function, which would never be awaited")
    if namespace is not None and not is_text(namespace):
        raise ConfigurationError(f"idempotency_namespace must be text, not {namespace!r}")
    checked = seconds("idempotency_lease", lease, positive=True)
    given = {"key": key is not None, "namespace": namespace is not None, "lease": checked != LEASE}
    for option, is_given in given.items():
        if is_given and not has_store:
            raise ConfigurationError(f"idempotency_{option} has no effect without idempotency=: give a store")
    return checked


def checked_key(key: object) -> str | None:
    """Return the result of a function ``idempotency_key`` after checking it.

    Raises:
        ConfigurationError: If it is neither None nor text.
    """
    if key is not None and not isinstance(key, str):
        raise ConfigurationError(f"idempotency_key must give text or None, not {type(key).__name__}")
    return key


class ClaimStatus(enum.Enum):
    """The answer of a store to a claim."""

    NEW = "new"
    """The key is ours until the lease ends: do the work, then complete or release it."""
    IN_PROGRESS = "in progress"
    """Another holder has it, and its lease has not ended."""
    DONE = "done"
    """The work was completed before, and the store still knows."""
    UNREADABLE = "unreadable"
    """A newer version of this package wrote the record of the key: nothing is to be done now."""


class Claim(NamedTuple):
    """A claim on a key, as answered by a store.

    Attributes:
        key: The claimed key.
        status: The store's answer to the claim.
        token: The fencing token of a new claim, 0 for any other.
        attempts: The number of times that a holder has released the key as failed.
    """

    key: str
    status: ClaimStatus
    token: int = 0
    attempts: int = 0


class CommitStatus(enum.Enum):
    """The state of a transaction that marks a claim as done."""

    NONE = "none"  # there is no transaction, or its commit has not begun
    UNKNOWN = "unknown"  # the commit may have been sent, without an answer: only the database knows the outcome
    DONE = "done"  # the transaction was committed


@dataclass(eq=False, slots=True)
class InboxClaim:
    """The claim of a running delivery, in a store with a method ``transaction``."""

    claim: Claim
    transaction: Callable[..., Any]
    commit: CommitStatus = CommitStatus.NONE  # of a transaction of the handler that marks the claim as done
    recorded_in: object = None  # the newest transaction of the database that marks it as done


class StoreHealth:
    """Whether a store answers. Thread-safe.

    Calls run concurrently. One that fails says nothing if the store has answered another since it began.

    Args:
        clock: A callable that returns the current time in seconds, on a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._answered_at = float("-inf")
        self._failure: tuple[float, float, str] | None = None  # the start of the failed call, and `failing`

    @property
    def failing(self) -> tuple[float, str] | None:
        """Since when the store fails, and its last error. None if it answers."""
        failure = self._failure
        return None if failure is None or failure[0] <= self._answered_at else failure[1:]

    def answered(self) -> None:
        """Record that the store has answered a call."""
        self._answered_at = self.clock()

    def failed(self, start: float, problem: str) -> None:
        """Record that a call that began at ``start`` had no answer."""
        failing = self.failing
        since = self.clock() if failing is None else failing[0]
        self._failure = start, since, problem

    def forget(self) -> None:
        """Forget a failure, because no call will show that the store answers again."""
        self._failure = None


class SettlementRetries:
    """Settlements without an answer.

    Thread-safe, because each step is one dict operation. A settlement is a claim and its outcome: None if the claim is
    complete, otherwise whether the attempt failed.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._settlements: dict[tuple[Claim, bool | None], None] = {}

    def __len__(self) -> int:
        return len(self._settlements)

    def add(self, claims: Iterable[Claim], failed: bool | None) -> None:
        """Add settlements that the store did not answer."""
        self._settlements.update(dict.fromkeys((claim, failed) for claim in claims))
        if len(self._settlements) > self._capacity:
            for oldest in list(self._settlements)[: -self._capacity]:
                self._settlements.pop(oldest, None)

    def postpone(self, claim: Claim, failed: bool | None) -> None:
        """Put a settlement behind the others."""
        self._settlements.pop((claim, failed), None)
        self._settlements[claim, failed] = None

    def answered(self, claims: Iterable[Claim], failed: bool | None) -> None:
        """Remove settlements that the store has answered."""
        for claim in claims:
            self._settlements.pop((claim, failed), None)

    def settlements(self, keys: Container[str] | None = None) -> list[tuple[list[Claim], bool | None]]:
        """Return the settlements by outcome, limited to ``keys`` if given."""
        found = [each for each in list(self._settlements) if keys is None or each[0].key in keys]
        kinds = dict.fromkeys(failed for _, failed in found)
        return [([claim for claim, failed in found if failed is kind], kind) for kind in kinds]
