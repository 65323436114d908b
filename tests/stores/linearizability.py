"""Whether the answers of a store to calls that overlap can be those of a store that was asked one call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from reliable_mq.stores import ClaimStatus

__all__ = ["Event", "explain"]


class Event(NamedTuple):
    """A call about one key, and its answer.

    Attributes:
        what: ``claim``, ``brief`` (a claim whose lease ends at once), ``complete``, ``release`` or ``fail``.
        token: of the claim that is settled.
        answer: the claim that was made, or whether it was taken; None where the answer was lost: it took place before
            ``ended``, or not at all.
        begun, ended: when.
    """

    key: str
    what: str
    token: int
    answer: Any
    begun: float
    ended: float


class _State(NamedTuple):
    """What a store has of a key.

    A key is in ``doubt`` whose claim was not answered: whoever claims it next in the same process may be its holder.
    """

    kind: str = "free"  # or held, brief, doubt, done
    token: int = 0  # the newest that is known
    attempts: int = 0


def explain(events: Sequence[Event], *, asked_again: bool = False) -> bool:
    """Say whether some order explains the answers; every call takes place between its begin and its end.

    Args:
        events: of one key.
        asked_again: whether the store itself asks its server again where an answer is lost: then, a release may have
            taken place and be answered as one that has not.
    """
    events = sorted(events, key=lambda event: event.begun)
    refuted: set[tuple[frozenset[int], _State]] = set()
    stack: list[tuple[frozenset[int], _State]] = [(frozenset(range(len(events))), _State())]
    while stack:
        left, state = stack.pop()
        if not left:
            return True
        if (left, state) in refuted:
            continue
        refuted.add((left, state))
        first_end = min(events[number].ended for number in left)
        for number in sorted(left, reverse=True):
            if events[number].begun <= first_end:
                after = _after(state, events[number])
                if asked_again and events[number].what in {"release", "fail"} and not events[number].answer:
                    after += _after(state, events[number]._replace(answer=True))
                stack.extend((left - {number}, each) for each in after)
    return False


def _after(state: _State, event: Event) -> list[_State]:
    """The states that may be after a call that was answered so; none where it could not be."""
    if event.answer is None:
        return [state, *_after_lost(state, event)]
    if event.what in {"claim", "brief"}:
        made = event.answer
        if made.status is ClaimStatus.DONE:
            return [state] if state.kind == "done" else []
        if made.status is ClaimStatus.IN_PROGRESS:
            return [state] if state.kind in {"held", "brief", "doubt"} else []
        if state.kind in {"free", "brief", "doubt"} and made.token > state.token and made.attempts == state.attempts:
            return [_State("held" if event.what == "claim" else "brief", made.token, made.attempts)]
        return []
    holds = state.token == event.token and state.kind in {"held", "brief"}
    if event.what == "complete":
        if holds:
            return [_State("done", state.token, state.attempts)] if event.answer else []
        return [state] if event.answer == (state.kind == "done" and state.token == event.token) else []
    if holds:
        return [_State("free", state.token, state.attempts + (event.what == "fail"))] if event.answer else []
    return [] if event.answer else [state]


def _after_lost(state: _State, event: Event) -> list[_State]:
    """The state after a call that changed something, and was not answered."""
    if event.what in {"claim", "brief"}:
        return [state._replace(kind="doubt")] if state.kind in {"free", "brief"} else []
    return _after(state, event._replace(answer=True))
