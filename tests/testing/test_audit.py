"""The counts of a message audit."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.testing.audit import Audit

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.testing import VirtualHost

IDS = st.lists(st.sampled_from("abcdef"))


def account(*, attempted: str = "", confirmed: str = "", failed: str = "", handled: str = "") -> Audit:
    made = Audit()
    for ids, book in ((attempted, made.attempted), (confirmed, made.confirmed), (failed, made.failed)):
        for message_id in ids:
            book(message_id)
    for message_id in handled:
        made.handled(message_id)
    return made


def test_an_empty_account_adds_up() -> None:
    Audit().balance().check()


def test_effects_without_a_handled_message_cannot_be_checked() -> None:
    made = account(attempted="ab", confirmed="ab")
    made.dead_lettered(["a"])
    with pytest.raises(AssertionError, match=r"lost: b$"):
        made.balance().check(effects_once=True)
    made.left(["b"])

    with pytest.raises(UsageError, match="effects_once cannot be checked"):
        made.close(effects_once=True)

    made.effect("a")
    made.close(effects_once=True)


def test_handled_dead_lettered_and_left_add_up_to_confirmed() -> None:
    made = account(attempted="abcd", confirmed="abcd", handled="ab")
    made.dead_lettered(["c"])
    made.left(["d"])

    balance = made.balance()

    balance.check()
    assert (balance.handled, balance.dead_lettered, balance.left, balance.drained) == (2, 1, 1, 4)


def test_a_confirmed_message_that_never_came_out_is_lost() -> None:
    balance = account(attempted="abc", confirmed="abc", handled="b").balance()

    assert balance.lost == {"a", "c"}
    with pytest.raises(AssertionError, match=r"lost: a, c$"):
        balance.check()


def test_a_message_that_was_not_confirmed_may_be_missing() -> None:
    balance = account(attempted="abc", confirmed="a", failed="b", handled="a").balance()

    balance.check()
    assert balance.lost == balance.recovered == balance.refuted == frozenset()


def test_a_message_that_nobody_published_is_unexpected() -> None:
    balance = account(attempted="a", handled="ab").balance()

    assert balance.unexpected == {"b"}
    with pytest.raises(AssertionError, match=r"unexpected: b$"):
        balance.check()


def test_an_effect_of_a_message_nobody_published_is_unexpected() -> None:
    made = account(attempted="a", handled="a")
    made.effect("a")
    made.effect("b")

    balance = made.balance()

    assert balance.unexpected == {"b"}
    with pytest.raises(AssertionError, match=r"unexpected: b$"):
        balance.check(effects_once=True)


def test_an_unknown_outcome_whose_message_arrived_is_recovered() -> None:
    balance = account(attempted="ab", confirmed="a", handled="ab").balance()

    balance.check()
    assert balance.recovered == {"b"}


def test_a_reported_failure_whose_message_arrived_is_refuted() -> None:
    balance = account(attempted="a", failed="a", handled="a").balance()

    balance.check()
    assert balance.refuted == {"a"}


def test_a_message_seen_twice_is_a_duplicate_and_counts_once() -> None:
    made = account(attempted="ab", confirmed="ab", handled="ab")
    made.dead_lettered(["b"])

    balance = made.balance()

    balance.check()
    assert balance.duplicated == {"b"}
    assert (balance.drained, balance.handled, balance.dead_lettered) == (2, 2, 0)


def test_effects_are_checked_on_request_only() -> None:
    made = account(attempted="ab", confirmed="ab", handled="ab")
    made.effect("a")
    made.effect("a")

    balance = made.balance()

    balance.check()
    with pytest.raises(AssertionError, match=r"more than one effect: a\nno effect: b$"):
        balance.check(effects_once=True)


@pytest.mark.parametrize(
    "record",
    [
        lambda made, host: made.left("m1"),
        lambda made, host: made.dead_lettered("m1"),
        lambda made, host: made.drain(host, "orders"),
        lambda made, host: made.drain(host, ["orders"], dead_letters="orders.dead"),
    ],
)
def test_a_text_is_not_taken_for_several_names(record: Callable[[Audit, VirtualHost], None]) -> None:
    """Queues named by its letters do not exist, and so count as drained."""
    host = SimpleNamespace(take_all=lambda *_, **__: [], live_counts=dict)
    with pytest.raises(ConfigurationError, match="must be a collection: write"):
        record(Audit(), cast("VirtualHost", host))


def test_a_long_list_of_ids_is_cut_short() -> None:
    balance = account(attempted="abcdefg", confirmed="abcdefg").balance()

    with pytest.raises(AssertionError, match=r"lost: a, b, c, d, e and 2 more$"):
        balance.check()


def test_the_counts_are_told_in_one_line() -> None:
    balance = account(attempted="abcd", confirmed="abc", failed="d", handled="aab").balance()

    assert str(balance) == (
        "attempted 4, confirmed 3, failed 1, drained 2 (handled 2, dead-lettered 0, left 0), lost 1, unexpected 0, "
        "duplicated 1, recovered 0, refuted 0, effects 0"
    )


@given(IDS, IDS, IDS, IDS, IDS, IDS)
def test_every_message_is_counted_where_it_belongs(
    attempted: list[str], confirmed: list[str], failed: list[str], handled: list[str], dead: list[str], left: list[str]
) -> None:
    made = account(
        attempted="".join(attempted), confirmed="".join(confirmed), failed="".join(failed), handled="".join(handled)
    )
    made.dead_lettered(dead)
    made.left(left)

    balance = made.balance()

    out = Counter(handled + dead + left)
    assert balance.drained == len(out) == balance.handled + balance.dead_lettered + balance.left
    assert balance.lost == {m for m in confirmed if m not in out}
    assert balance.unexpected == {m for m in out if m not in attempted}
    assert balance.duplicated == {m for m in out if out[m] > 1}
    assert balance.recovered == {m for m in out if m in attempted and m not in confirmed and m not in failed}
