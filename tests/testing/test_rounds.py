"""The table of rounds at the end of a run on a cluster."""

from __future__ import annotations

import math

from integration.support.rounds import Round, table
from reliable_mq.testing.history import History, OperationKind, OperationOutcome

LEADERS = "leaders killed"


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rounds_of_a_fault_are_summed_with_the_longest_silences() -> None:
    rounds = [
        Round(64, "leader transferred", 500, unconfirmed=0.5, unhandled=0.4),
        Round(20, LEADERS, 1000, lost=1, repeated=2, late=3, alone=4, unconfirmed=2.5, unhandled=1.0),
        Round(20, LEADERS, 1234, lost=10, repeated=20, late=30, alone=40, unconfirmed=1.5, unhandled=3.0),
        Round(20, LEADERS, 1, rounds=0),
    ]
    assert table(rounds)[2:] == [
        "| 20 | leaders killed | 2 | 2 235 | 11 | 22 | 33 | 44 | 2.5 s | 3.0 s |",
        "| 64 | leader transferred | 1 | 500 | 0 | 0 | 0 | 0 | 0.5 s | 0.4 s |",
    ]


def test_the_same_row_with_another_fault_has_a_line_of_its_own() -> None:
    lines = table([Round(22, "cut off"), Round(22, "cut off one way")])
    assert [line.split(" | ")[1] for line in lines[2:]] == ["cut off", "cut off one way"]


def test_silences_that_nobody_measured_are_a_dash() -> None:
    assert str(Round(66, "fails over", 7)) == "| 66 | fails over | 1 | 7 | 0 | 0 | 0 | 0 | - | - |"


def test_a_round_has_the_figures_of_its_span_alone() -> None:
    clock = Clock()
    history = History(clock=clock)

    def publish(message_id: str, *, at: float, until: float, timeout: float = math.inf) -> None:
        clock.now = at
        operation = history.begin(OperationKind.PUBLISH, message_id, by="one", timeout=timeout)
        clock.now = until
        operation.end()

    publish("before", at=1, until=2)
    publish("lost", at=11, until=14)
    publish("late", at=15, until=18, timeout=1)
    publish("fine", at=18, until=19)
    publish("after", at=21, until=22)
    failed = history.begin(OperationKind.PUBLISH, "failed", by="one")
    failed.end(OperationOutcome.FAILED)
    for at, message_id in ((12, "before"), (16, "late"), (17, "fine"), (23, "after")):
        clock.now = at
        history.begin(OperationKind.HANDLE, message_id).end()
        history.begin(OperationKind.EFFECT, message_id).end()
    history.begin(OperationKind.EFFECT, "late").end()

    found = Round.of(20, LEADERS, history, history.result(), since=10, until=20, publishers=["one"])
    assert found == Round(20, LEADERS, 3, lost=1, repeated=1, late=1, unconfirmed=4.0, unhandled=4.0)
    without_store = Round.of(20, LEADERS, history, history.result(), since=10, until=20, effects_once=False)
    assert without_store.repeated == 0
    assert math.isnan(without_store.unconfirmed)
