"""A publish that goes into an outbox: it ends when the message is durable there, or when it is known not to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.core.publication import Outcome, Publication, Receipt

if TYPE_CHECKING:
    from reliable_mq.errors import PublishError

__all__ = ["StoredPublication"]


class StoredPublication(Publication):
    """A publication whose outcome is that of storing it. The relay's publish of the same message is another one.

    ``watchers`` and the rest are as on every publication; ``seen`` and ``outcome`` are written by who stores it.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # of the classes of either face, which derive from two classes

        @property
        def error(self) -> PublishError | None:
            """Why it is not stored, or not known to be."""

        @error.setter
        def error(self, error: PublishError | None) -> None: ...

        def settled(self) -> None:
            """Tell who watches: the face's own."""

    def stored(self, error: PublishError | None) -> None:
        """It is durable, or was not stored; where the error says that it may have arrived, that is not known."""
        self.error = error
        if error is None:
            self.outcome = Outcome.STORED
        else:
            self.outcome = Outcome.UNKNOWN if error.may_have_arrived else Outcome.REFUSED

    def receipt(self) -> Receipt:
        """The receipt of a message that is stored."""
        return Receipt(self.message.message_id, status="stored", attempts=0)

    def failure(self) -> PublishError | None:
        """The error that it ended with; None where it is stored, or is still on its way."""
        return None if self.outcome is None else self.error
