"""Check histories of overlapping calls of an idempotency store.

A history is linearizable if there is an order of its calls in which each took effect at one moment between its begin
and its end, and which explains every result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reliable_mq.stores import ClaimStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StoreCall", "explain"]


class StoreCall(NamedTuple):
    """A call for one key, and its result.

    Attributes:
        what: ``claim``, ``brief`` (a claim whose lease ends at once), ``complete``, ``release`` or ``fail``.
        token: of the claim that is settled.
        answer: the claim that was made, or whether it was settled; None if the call raised an error: it took effect
            before ``ended``, or not at all.
        begun, ended: the time.
    """

    key: str
    what: str
    token: int
    answer: Any
    begun: float
    ended: float


class _State(NamedTuple):
    """The state of a key in a store.

    After a claim that raised an error the key is in ``doubt``: the next claim in the same process may be its holder.
    """

    kind: str = "free"  # or held, brief, doubt, done
    token: int = 0  # the newest that is known
    attempts: int = 0


def explain(events: Sequence[StoreCall], *, asked_again: bool = False) -> bool:
    """Return whether some order of the calls explains their results.

    Args:
        events: of one key.
        asked_again: whether the store repeats a query whose reply was lost: then, a release may have taken effect and
            return False.
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


def _after(state: _State, event: StoreCall) -> list[_State]:
    """Return the states that may follow a call with this result; none if it is wrong."""
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


def _after_lost(state: _State, event: StoreCall) -> list[_State]:
    """Return the states after a call that took effect and raised an error."""
    if event.what in {"claim", "brief"}:
        return [state._replace(kind="doubt")] if state.kind in {"free", "brief"} else []
    return _after(state, event._replace(answer=True))
