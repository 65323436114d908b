"""Prints the figures of the fault matrix on a cluster at the end of a test run.

A round is one fault, once. Tests record rounds with the fixture `record_round`. The table has a line for each fault,
summed over all rounds, in the format of the table in the manual. A round is recorded before it is checked, so the table
includes failed rounds.
"""

from __future__ import annotations

import math
import sys
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.testing.history import OperationKind, OperationOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from reliable_mq.testing.history import History, HistoryResult

__all__ = ["Round", "load", "pytest_terminal_summary", "record_round", "table"]

PROPERTY = "round"
HEAD = (
    "| row | fault | rounds | confirmed | lost | effects twice | late | no majority | no confirm for | idle for |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round, or of several rounds of the same fault.

    Attributes:
        row: The row of the fault matrix.
        fault: A description of the fault.
        confirmed: Confirmed messages whose publishing started between this fault and the next one.
        lost: How many of these were lost.
        repeated: How many of these had their effect more than once although an idempotency store forbids it.
        late: Operations that ended after their deadline.
        alone: Publishes that were confirmed without a majority.
        unconfirmed: The longest time, in seconds, in which a publisher received no confirm. NaN if not measured.
        unhandled: The longest time, in seconds, in which no message was handled. NaN if not measured.
        rounds: The number of rounds. 0 for further figures of a round that is already counted, such as those of another
            queue.
    """

    row: int
    fault: str
    confirmed: int = 0
    lost: int = 0
    repeated: int = 0
    late: int = 0
    alone: int = 0
    unconfirmed: float = math.nan
    unhandled: float = math.nan
    rounds: int = 1

    def __add__(self, other: Round) -> Round:
        return Round(
            self.row,
            self.fault,
            self.confirmed + other.confirmed,
            self.lost + other.lost,
            self.repeated + other.repeated,
            self.late + other.late,
            self.alone + other.alone,
            _longest(self.unconfirmed, other.unconfirmed),
            _longest(self.unhandled, other.unhandled),
            self.rounds + other.rounds,
        )

    def __str__(self) -> str:
        counts = (self.rounds, self.confirmed, self.lost, self.repeated, self.late, self.alone)
        silences = ("-" if math.isnan(each) else f"{each:.1f} s" for each in (self.unconfirmed, self.unhandled))
        cells = (str(self.row), self.fault, *(f"{count:,}".replace(",", " ") for count in counts), *silences)
        return f"| {' | '.join(cells)} |"

    @classmethod
    def of(
        cls,
        row: int,
        fault: str,
        history: History,
        result: HistoryResult,
        *,
        since: float = -math.inf,
        until: float = math.inf,
        publishers: Collection[str] = (),
        effects_once: bool = True,
        rounds: int = 1,
    ) -> Round:
        """Return the figures of one queue in a span of time.

        Args:
            row, fault: As the attributes.
            history: The history of the queue.
            result: The result of this history.
            since: The time of the fault, by the history's clock.
            until: The time of the next fault.
            publishers: The publishers whose silences are measured, each separately. If empty, silences are not
                measured.
            effects_once: Whether an effect must not be repeated.
            rounds: 0 for another queue of a round that is already counted.
        """
        publishes = {
            each.message_id: each
            for each in history.operations
            if each.kind is OperationKind.PUBLISH and since <= each.start < until
        }
        balance = result.balance
        silences = [history.longest_silence(OperationKind.PUBLISH, since, until, by=[name]) for name in publishers]
        return cls(
            row,
            fault,
            confirmed=sum(each.outcome is OperationOutcome.OK for each in publishes.values()),
            lost=len(balance.lost & publishes.keys()),
            repeated=len(balance.repeated_effects & publishes.keys()) if effects_once else 0,
            late=sum(since <= each.start < until for each in result.late),
            alone=sum(since <= each.start < until for each in result.without_majority),
            unconfirmed=max(silences, default=math.nan),
            unhandled=history.longest_silence(OperationKind.HANDLE, since, until) if silences else math.nan,
            rounds=rounds,
        )


def table(rounds: Iterable[Round]) -> list[str]:
    """Return the lines of the table: one for each row and fault."""
    sums: dict[tuple[int, str], Round] = {}
    for each in rounds:
        key = (each.row, each.fault)
        sums[key] = sums[key] + each if key in sums else each
    return [*HEAD, *(str(sums[key]) for key in sorted(sums))]


def _longest(one: float, other: float) -> float:
    known = [each for each in (one, other) if not math.isnan(each)]
    return max(known, default=math.nan)


# -- for pytest --------------------------------------------------------------------------------------------------------


def load(config: pytest.Config) -> None:
    """Register this module as a plugin, so that the table is printed."""
    if not config.pluginmanager.has_plugin(__name__):
        config.pluginmanager.register(sys.modules[__name__], __name__)


@pytest.fixture
def record_round(request: pytest.FixtureRequest) -> Callable[[Round], None]:
    """Return a function that adds a round to the table."""
    return lambda each: request.node.user_properties.append((PROPERTY, list(astuple(each))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, if rounds were recorded."""
    from reliable_mq.testing.fixtures import recorded  # a late import: see `tests.reports`

    found: list[Any] = [value for _, value in recorded(terminalreporter, PROPERTY)]
    if found:
        terminalreporter.section("rounds")
        for line in table(Round(*value) for value in found):
            terminalreporter.write_line(line)
