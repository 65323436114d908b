"""What is done to keys and to questions that were not answered, before a database is asked."""

from __future__ import annotations

import multiprocessing

from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.stores.keys import UnansweredClaims, stored_key, unique

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


def test_a_question_without_an_answer_is_asked_again_in_the_name_of_the_same_holder() -> None:
    doubts = UnansweredClaims()
    first = doubts.holders(["a", "b"])
    assert first["a"] == first["b"] > 0
    doubts.add(first)
    again = doubts.holders(["a", "c"])
    assert again["a"] == first["a"]
    assert again["c"] != first["a"]
    assert doubts.holders(["a"])["a"] != first["a"], "one takes it"
    assert doubts.holders(["b"]) == {"b": first["b"]}


def test_of_several_holders_each_is_tried_in_its_turn() -> None:
    doubts = UnansweredClaims()
    one, other = doubts.holders(["a"]), doubts.holders(["a"])
    doubts.add(one)
    doubts.add(other)
    assert doubts.holders(["a"]) == one
    assert doubts.holders(["a"]) == other
    assert doubts.holders(["a"]) not in (one, other)


def test_doubts_are_bounded() -> None:
    doubts = UnansweredClaims(capacity=2)
    asked = doubts.holders(["a", "b", "c"])
    doubts.add(asked)
    assert doubts.holders(["a"]) != {"a": asked["a"]}
    assert doubts.holders(["c"]) == {"c": asked["c"]}


def test_what_a_process_was_not_answered_its_forked_child_does_not_ask_in_the_same_name() -> None:
    """Both would be granted it. And the child does not wait for a lock that a thread of its parent had."""
    doubts = UnansweredClaims()
    asked = doubts.holders(["a"])
    doubts.add(asked)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with doubts._lock:
        child = context.Process(target=lambda: answers.put(doubts.holders(["a"])))
        child.start()
        child.join(20)
    assert child.exitcode == 0
    assert answers.get() != asked
    assert doubts.holders(["a"]) == asked
