"""Checks of state machines against their ``TRANSITIONS`` tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["changes", "follows"]


def changes(transitions: Mapping[str, Mapping[Any, set[Any]]]) -> set[tuple[Any, Any]]:
    """Return every change in a table, as a pair of states."""
    return {(before, after) for table in transitions.values() for before, afters in table.items() for after in afters}


def follows(transitions: Mapping[str, Mapping[Any, set[Any]]], attribute: str = "state") -> Any:
    """Return a base class that refuses changes that are not in the table.

    It checks one attribute and records the allowed changes in `seen`. The first state is not checked, unless the table
    has changes from None.
    """
    allowed = changes(transitions)
    born = any(before is None for before, _ in allowed)

    class Follows:
        __slots__ = ()
        seen: ClassVar[set[tuple[Any, Any]]] = set()

        def __setattr__(self, name: str, value: object) -> None:
            if name == attribute:
                before = getattr(self, name, None)
                if value is not before and (born or before is not None):
                    assert (before, value) in allowed, f"from {before} to {value}"
                    self.seen.add((before, value))
            super().__setattr__(name, value)

    return Follows
