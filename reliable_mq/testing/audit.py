"""A check that no message was lost, by comparing published and drained messages.

The audit follows the ``total-queue`` checker of RabbitMQ's Jepsen test. Publishers and handlers record each event by
message id, from any thread. At the end, the audit drains the queues with plain pika instead of the tested code::

    audit.attempted("1")
    publish_with_any_library(message_id="1")
    audit.confirmed("1")
    audit.drain(virtual_host, ["orders"], dead_letters=["orders.dead"])
    audit.close()

- *lost*: confirmed, but never drained. There must be none.
- *unexpected*: drained or with an effect, but never attempted. There must be none.
- *duplicated*: drained more than once. Allowed after an unknown outcome, and counted.
- *recovered*: neither confirmed nor failed, but drained. Allowed, and counted.
- *refuted*: reported as failed, but drained. Allowed if an earlier send had an unknown outcome, and counted.
- *effects*: the effects of handlers. With an idempotency store, each handled message has exactly one.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from reliable_mq._util.validation import check_collection
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliable_mq.testing.virtual_host import VirtualHost

_SHOWN = 5


class Audit:
    """A collector of message ids. Thread-safe. Only `drain` blocks for long.

    Args:
        report: A function that `close` calls with the line of counts, even if they are wrong.
    """

    def __init__(self, report: Callable[[str], object] | None = None) -> None:
        self._report = report
        self._lock = Lock()
        self._attempted: set[str] = set()
        self._confirmed: set[str] = set()
        self._failed: set[str] = set()
        self._handled: Counter[str] = Counter()
        self._dead_lettered: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._effects: Counter[str] = Counter()

    def attempted(self, message_id: str) -> None:
        """Record that a message will be published. Call this before publishing."""
        with self._lock:
            self._attempted.add(message_id)

    def confirmed(self, message_id: str) -> None:
        """Record that the publisher reported a message as confirmed."""
        with self._lock:
            self._confirmed.add(message_id)

    def failed(self, message_id: str) -> None:
        """Record that the broker does not have a message.

        The message was nacked, returned, refused or blocked. Record nothing if ``may_have_arrived`` is True, nor for a
        message that was nacked and routed to several queues: some of them may have it.
        """
        with self._lock:
            self._failed.add(message_id)

    def handled(self, message_id: str) -> None:
        """Record that a handler has finished with a delivery of a message."""
        with self._lock:
            self._handled[message_id] += 1

    def dead_lettered(self, message_ids: Iterable[str]) -> None:
        """Record messages that were found in a dead-letter queue."""
        check_collection("message_ids", message_ids)
        with self._lock:
            self._dead_lettered.update(message_ids)

    def left(self, message_ids: Iterable[str]) -> None:
        """Record messages that were found in a work queue at the end."""
        check_collection("message_ids", message_ids)
        with self._lock:
            self._left.update(message_ids)

    def effect(self, message_id: str) -> None:
        """Record that a handler had its effect for a message."""
        with self._lock:
            self._effects[message_id] += 1

    def drain(
        self,
        virtual_host: VirtualHost,
        queues: Sequence[str],
        *,
        dead_letters: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        """Take and record all messages of queues. Blocks until the queues are empty.

        A queue is empty when the broker reports no ready messages, no unacked messages, and none on their way to a
        dead-letter queue. A consumer that holds unacked messages prevents this. A queue that does not exist is empty. A
        message without an id is recorded as ``"<no message id>"``.

        Args:
            virtual_host: The virtual host of the queues.
            queues: The work queues, whose messages are *left*.
            dead_letters: The dead-letter queues, whose messages are *dead-lettered*.
            timeout: The maximum wait, in seconds.

        Raises:
            ConfigurationError: If the name of one queue is given in place of several.
            TimeoutError: If a queue is not empty after `timeout`. The message has the counts.
            pika.exceptions.AMQPHeartbeatTimeout: If the broker is silent for about 40 s.
        """
        check_collection("queues", queues)
        check_collection("dead_letters", dead_letters)
        deadline = time.monotonic() + timeout
        while True:
            for queue in queues:
                self.left(virtual_host.take_all(queue, timeout=deadline - time.monotonic()))
            for queue in dead_letters:
                self.dead_lettered(virtual_host.take_all(queue, timeout=deadline - time.monotonic()))
            live = virtual_host.live_counts()
            remaining = {queue: live[queue] for queue in (*queues, *dead_letters) if live.get(queue)}
            if not remaining:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not drained within {timeout:g} s: {remaining}")

    def close(self, *, effects_once: bool = False) -> AuditResult:
        """Report the counts, check them, and return the result.

        Args:
            effects_once: As for `AuditResult.check`.

        Raises:
            AssertionError: If the counts are wrong, as for `AuditResult.check`.
            UsageError: If the check cannot fail, as for `AuditResult.check`.
        """
        result = self.balance()
        if self._report is not None:
            self._report(str(result))
        result.check(effects_once=effects_once)
        return result

    def balance(self) -> AuditResult:
        """Return the result so far."""
        with self._lock:
            drained = self._handled + self._dead_lettered + self._left
            unknown = self._attempted - self._confirmed - self._failed
            return AuditResult(
                attempted=len(self._attempted),
                confirmed=len(self._confirmed),
                failed=len(self._failed),
                handled=len(self._handled),
                dead_lettered=len(self._dead_lettered.keys() - self._handled.keys()),
                left=len(self._left.keys() - self._dead_lettered.keys() - self._handled.keys()),
                drained=len(drained),
                lost=frozenset(self._confirmed - drained.keys()),
                unexpected=frozenset((drained.keys() | self._effects.keys()) - self._attempted),
                duplicated=frozenset(m for m, times in drained.items() if times > 1),
                recovered=frozenset(unknown & drained.keys()),
                refuted=frozenset(self._failed & drained.keys()),
                effects=sum(self._effects.values()),
                repeated_effects=frozenset(m for m, times in self._effects.items() if times > 1),
                missing_effects=frozenset(self._handled.keys() - self._effects.keys()),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The result of an audit: counts of distinct messages, and wrong or repeated ids.

    Attributes:
        handled: The number of messages that a handler finished.
        dead_lettered: The number of messages in a dead-letter queue that were never handled.
        left: The number of messages that were found only in a work queue.
        drained: The sum of these three.
    """

    attempted: int
    confirmed: int
    failed: int
    handled: int
    dead_lettered: int
    left: int
    drained: int
    lost: frozenset[str]
    unexpected: frozenset[str]
    duplicated: frozenset[str]
    recovered: frozenset[str]
    refuted: frozenset[str]
    effects: int
    repeated_effects: frozenset[str]
    missing_effects: frozenset[str]

    def __str__(self) -> str:
        """Return the counts in one line, even if they are wrong."""
        return (
            f"attempted {self.attempted}, confirmed {self.confirmed}, failed {self.failed}, drained {self.drained} "
            f"(handled {self.handled}, dead-lettered {self.dead_lettered}, left {self.left}), lost {len(self.lost)}, "
            f"unexpected {len(self.unexpected)}, duplicated {len(self.duplicated)}, recovered {len(self.recovered)}, "
            f"refuted {len(self.refuted)}, effects {self.effects}"
        )

    def check(self, *, effects_once: bool = False) -> None:
        """Check that every confirmed message, and only attempted ones, were drained.

        Args:
            effects_once: True to also require exactly one effect of every handled message.

        Raises:
            AssertionError: If a check fails. The message has the counts and the first few message ids of each fault.
            UsageError: If the check cannot fail: `effects_once` without a handled message or an effect.
        """
        faults = {"lost": self.lost, "unexpected": self.unexpected}
        if effects_once:
            faults |= {"more than one effect": self.repeated_effects, "no effect": self.missing_effects}
        wrong = [f"{what}: {first_few(sorted(ids))}" for what, ids in faults.items() if ids]
        if wrong:
            raise AssertionError(f"the account does not add up: {self}\n" + "\n".join(wrong))
        if effects_once and not (self.handled or self.effects):
            raise UsageError("effects_once cannot be checked: record handled messages and effects")


def first_few(found: Sequence[object]) -> str:
    """Format the first few findings, and the number of the others."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more
