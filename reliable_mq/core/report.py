"""What became of many publishes: the report of ``publish_many``, and one error for several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliable_mq.errors import PublishError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.message import Message

__all__ = ["PublishReport", "summary"]

_FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of the messages of one ``publish_many``.

    Attributes:
        confirmed: how many the broker has.
        failures: every other message with its error, in the order in which they settled.
        stored: how many are durable in the outbox, where there is one; then none is counted as confirmed.
    """

    confirmed: int
    failures: tuple[tuple[Message, PublishError], ...] = ()
    stored: int = 0

    @property
    def ok(self) -> bool:
        """Whether every message was confirmed, or stored."""
        return not self.failures

    def raise_for_failures(self) -> None:
        """Raise one PublishError for all failures, if there are any."""
        if self.failures:
            raise summary([error for _, error in self.failures], len(self.failures))


def summary(errors: Sequence[PublishError], count: int) -> PublishError:
    """One error for ``count`` failures, of which ``errors`` are the last, or all that are still known."""
    if count == len(errors) == 1:
        return errors[0]
    what = f"{count} messages were not confirmed"
    if not errors:
        return PublishError(f"{what}; the publisher does not remember which")
    return PublishError(
        f"{what}; one of them: {errors[0]}", message_id=errors[0].message_id, failures=errors[:_FAILURES_KEPT]
    )
