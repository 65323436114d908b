"""Stored forms of keys, and the holders of claims whose reply was lost."""

from __future__ import annotations

import multiprocessing

from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.stores.base import UnansweredClaims, stored_key, unique

TEXT = st.text(st.characters(codec=None), max_size=250) | st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True)


def test_a_usual_key_is_stored_as_it_is() -> None:
    for key in ("orders|01890a5d-ac96-774b-bcce-b302099a8057", "a", "a b", "x" * 200):
        assert stored_key(key) == key


@given(TEXT, TEXT)
def test_keys_are_stored_apart_in_what_any_database_takes(one: str, other: str) -> None:
    stored = stored_key(one)
    assert 0 < len(stored) <= 200
    assert stored.isascii()
    assert stored.isprintable()
    assert stored == stored.strip()
    assert (stored == stored_key(other)) is (one == other)


def test_keys_come_once_and_in_the_order_of_what_is_stored() -> None:
    keys = unique(["b", "ä", "a", "b"])
    assert list(keys) == ["a", "b", "ä"]
    assert list(keys.values()) == sorted(keys.values())


def test_a_claim_without_reply_is_repeated_by_the_same_holder() -> None:
    unanswered = UnansweredClaims()
    first = unanswered.holders(["a", "b"])
    assert first["a"] == first["b"] > 0
    unanswered.add(first)
    again = unanswered.holders(["a", "c"])
    assert again["a"] == first["a"]
    assert again["c"] != first["a"]
    assert unanswered.holders(["a"])["a"] != first["a"], "one takes it"
    assert unanswered.holders(["b"]) == {"b": first["b"]}


def test_several_holders_of_a_key_are_repeated_in_order() -> None:
    unanswered = UnansweredClaims()
    one, other = unanswered.holders(["a"]), unanswered.holders(["a"])
    unanswered.add(one)
    unanswered.add(other)
    assert unanswered.holders(["a"]) == one
    assert unanswered.holders(["a"]) == other
    assert unanswered.holders(["a"]) not in (one, other)


def test_the_number_of_remembered_holders_is_bounded() -> None:
    unanswered = UnansweredClaims(capacity=2)
    claimed = unanswered.holders(["a", "b", "c"])
    unanswered.add(claimed)
    assert unanswered.holders(["a"]) != {"a": claimed["a"]}
    assert unanswered.holders(["c"]) == {"c": claimed["c"]}


def test_a_forked_child_does_not_repeat_claims_of_its_parent() -> None:
    """Otherwise both would get the claim. The child waits for no lock either."""
    unanswered = UnansweredClaims()
    claimed = unanswered.holders(["a"])
    unanswered.add(claimed)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with unanswered._lock:
        child = context.Process(target=lambda: answers.put(unanswered.holders(["a"])))
        child.start()
        child.join(20)
    assert child.exitcode == 0
    assert answers.get() != claimed
    assert unanswered.holders(["a"]) == claimed
