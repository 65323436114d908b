"""The decision whether a delivery may be dispatched to a handler.

Invariants:

- A delivery above a limit is refused without an attempt. So is a delivery in a newer format, or with headers of ours
  that cannot be decoded, unless the refusal would lose it.
- A delivery that has failed as often as allowed is refused, by any count. The memory of this process only counts for
  redeliveries: any other delivery is a new copy, and has the attempts of its header.
- A refusal only concerns the refused delivery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import NewerFormat
from reliable_mq.core.consumer.quarantine import failures_by_broker, returns
from reliable_mq.core.retry.retry_headers import PLAIN, RetryState, decode_retry_headers
from reliable_mq.errors import ConsumeError

if TYPE_CHECKING:
    from reliable_mq.core.consumer.attempts import AttemptTracker
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.statistics import ConsumerStatistics

_OURS: Final = headers.PREFIX.encode()
_UNLIMITED: Final = 1 << 62
_MOST_OF_OURS: Final = 4096  # the maximum bytes of headers of ours on a message that has waited


class AdmissionResult(NamedTuple):
    """The result of the checks of a delivery."""

    refusal: str | None  # why the delivery is dead-lettered without a handler
    path: tuple[int, ...] = ()  # the remaining delay queues before its next attempt
    suspect: bool = False  # whether it was in quarantine before
    lost: int = 0  # attempts since its last publish that failed with the loss of their consumer


class Admission:
    """The checks of deliveries. Not thread-safe.

    Args:
        max_attempts: The number of failed attempts after which a message is refused.
        max_body_bytes, max_header_bytes: The sizes above which a message is refused, in bytes. None for no limit.
        keeps: Whether a refused message is kept elsewhere. If not, a message that cannot be decoded passes as a first
            attempt.
        broker_counts: Whether the broker's count of failures counts as attempts.
    """

    def __init__(
        self,
        *,
        attempts: AttemptTracker,
        max_attempts: int,
        max_body_bytes: int | None,
        max_header_bytes: int | None,
        keeps: bool,
        broker_counts: bool = False,
        statistics: ConsumerStatistics,
    ) -> None:
        self._attempts = attempts
        self._keeps = keeps
        self._broker_counts = broker_counts
        self._max_attempts = max_attempts
        self._max_body = _UNLIMITED if max_body_bytes is None else max_body_bytes
        self._max_header = _UNLIMITED if max_header_bytes is None else max_header_bytes
        self._statistics = statistics

    def plain(self, deliveries: list[Delivery]) -> bool:
        """Return whether all are first deliveries within limits, without our headers."""
        max_body, max_header = self._max_body, self._max_header
        for delivery in deliveries:
            properties = delivery.properties
            if (
                delivery.redelivered
                or _OURS in properties
                or len(delivery.body) > max_body
                or len(properties) > max_header
            ):
                return False
        return True

    def check(self, delivery: Delivery, *, forgiven: int | None = None) -> AdmissionResult:
        """Check a delivery, and set its failed attempts.

        A delivery that has waited in a delay queue is restored. For a delivery from quarantine, ``forgiven`` is the
        number of returns that do not count as failed attempts.
        """
        if delivery.redelivered:
            self._statistics.redelivered += 1
        transit: RetryState | str = PLAIN
        if _OURS in delivery.properties and len(delivery.properties) <= self._max_header + _MOST_OF_OURS:
            transit = self._unpacked(delivery)
        unfit = transit if isinstance(transit, str) else self._too_large(delivery)
        if unfit is not None:
            self._statistics.rejected_unseen += 1
            return AdmissionResult(f"not handed to a handler: {unfit}")
        if self._broker_counts and delivery.redelivered:
            counted = failures_by_broker(delivery)
            if counted:
                failures = delivery.begin_failures()
                failures.count = max(failures.count, counted)
        lost = 0
        if forgiven is not None and delivery.redelivered:
            lost = max(returns(delivery) - forgiven, 0)
            if lost:
                failures = delivery.begin_failures()
                failures.count += lost
                failures.lost += lost
        return AdmissionResult(self._given_up(delivery), *transit)._replace(lost=lost)

    def without_body(self, delivery: Delivery, size: int) -> str:
        """Return why a delivery is refused whose body of `size` bytes was not read."""
        self._statistics.redelivered += delivery.redelivered
        self._statistics.rejected_unseen += 1
        return (
            f"not handed to a handler: {size} bytes of body are far above the limit of {self._max_body}, and not read"
        )

    def _given_up(self, delivery: Delivery) -> str | None:
        if delivery.redelivered:
            delivery.set_failures(self._attempts.find(delivery))
        failures = delivery.failures
        if failures is None:
            return None
        delivery.redelivered = True
        if failures.verdict is not None:
            return failures.verdict
        if failures.count < self._max_attempts:
            return None
        lost = f"; {failures.lost} of them by the loss of their consumer" if failures.lost else ""
        return used_up(failures.count, self._max_attempts) + lost

    def _too_large(self, delivery: Delivery) -> str | None:
        for part, size, limit in (
            ("body", len(delivery.body), self._max_body),
            ("properties", len(delivery.properties), self._max_header),
        ):
            if size > limit:
                return f"{size} bytes of {part} are above the limit of {limit}"
        return None

    def _unpacked(self, delivery: Delivery) -> RetryState | str:
        """Restore a delivery from our headers. Return its state, or an error's text."""
        try:
            return decode_retry_headers(delivery)
        except (NewerFormat, ConsumeError) as error:
            delivery.flaw = None  # the handler has not read the broken part
            return str(error) if self._keeps else PLAIN


def used_up(failed: int, max_attempts: int) -> str:
    """Return the reason for a dead letter after the last attempt."""
    return f"{failed} of {max_attempts} attempts failed"
