"""The figures of each row of the fault matrix on a cluster, summed over all rounds: a table at the end of a run.

A round is one fault, once. Tests record rounds by the fixture `record_round`; the table has a line for each fault, in
the form of the manual's. A round is recorded before it is checked, so a round that failed is in the table.
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
    """The figures of one round, or of several of the same fault.

    Attributes:
        row: of the fault matrix.
        fault: in words.
        confirmed: messages that began to be published from this fault on, up to the next one, and were confirmed.
        lost: of these.
        repeated: of these, had their effect more than once where an idempotency store forbids it.
        late: operations that ended behind their deadline.
        alone: publishes that were confirmed where no majority was.
        unconfirmed: seconds of the longest silence, in which a publisher had nothing confirmed; NaN if nobody measured.
        unhandled: seconds in which nothing was handled; the same.
        rounds: how many; 0 for more figures of a round that is counted already, such as those of another queue.
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
            row, fault: which.
            history: of the queue.
            result: of this history.
            since: the time of the fault, by the history's clock.
            until: the time of the next one.
            publishers: those whose silences count, each for itself; without them, silences are not measured.
            effects_once: whether an effect must not be repeated.
            rounds: 0 for another queue of a round that is counted.
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
    """Have the table printed."""
    if not config.pluginmanager.has_plugin(__name__):
        config.pluginmanager.register(sys.modules[__name__], __name__)


@pytest.fixture
def record_round(request: pytest.FixtureRequest) -> Callable[[Round], None]:
    """A function that has a round counted in the table."""
    return lambda each: request.node.user_properties.append((PROPERTY, list(astuple(each))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, if there were rounds."""
    from reliable_mq.testing.fixtures import recorded  # late: see `tests.reports`

    found: list[Any] = [value for _, value in recorded(terminalreporter, PROPERTY)]
    if found:
        terminalreporter.section("rounds")
        for line in table(Round(*value) for value in found):
            terminalreporter.write_line(line)
