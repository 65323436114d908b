"""Which publish did the broker close the channel over?

A channel exception (404 no such exchange, 406 message too large, 403 not permitted, ...) names no publish.
Re-publishing everything that was outstanding closes the next channel too, for ever; failing everything would fail the
innocent. So the suspects are re-published in groups that narrow down: a group that settles is innocent, a group over
which the channel closes again is halved, and the one that closes it alone is the culprit.

States and what moves between them::

    idle     --closed(unsettled)-->  probing, with two groups: the halves of what was unsettled
    probing  --next_group()-->       probing the group returned; idle where none is left
    probing  --closed(unsettled): the channel closed over the group-->  its halves are probed first
    probing  --interrupted(unsettled): lost for another reason-->       the same group again
    either   --closed(one unsettled)-->  that one is the culprit; the state stays

Invariants:

- every suspect is either returned as a culprit, settled by the broker, or still in a group: none is forgotten, none is
  in two;
- groups keep the order of publishing;
- a culprit among ``n`` suspects is found after at most ``ceil(log2 n)`` further channel closes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Isolation"]

T = TypeVar("T")


class Isolation(Generic[T]):
    """The groups of suspects still to be probed. Not thread-safe.

    Attributes:
        active: whether suspects are being probed; nothing else may be published meanwhile.
    """

    __slots__ = ("_groups", "active")

    def __init__(self) -> None:
        self.active = False
        self._groups: list[list[T]] = []  # a stack: the next group to probe is last

    def closed(self, unsettled: Sequence[T]) -> T | None:
        """The broker closed the channel over one of ``unsettled``, given in publish order.

        Returns the culprit where it is alone.
        """
        if len(unsettled) == 1:
            return unsettled[0]
        half = len(unsettled) // 2
        self._push(unsettled[half:])
        self._push(unsettled[:half])
        return None

    def interrupted(self, unsettled: Sequence[T]) -> None:
        """The channel was lost for a reason that blames no publish: the group is probed again."""
        self._push(unsettled)

    def next_group(self) -> list[T]:
        """The group to publish now, alone, until all of it is settled or the channel is lost.

        Empty when all are probed: idle.
        """
        if self._groups:
            return self._groups.pop()
        self.active = False
        return []

    def _push(self, group: Sequence[T]) -> None:
        if group:
            self.active = True
            self._groups.append(list(group))
