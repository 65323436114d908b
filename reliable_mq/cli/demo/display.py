"""The display of the demo while it runs, and the audit at its end.

A terminal gets bars that are redrawn in place; a pipe or a file gets a line now and then. Times are seconds since the
demo began. No clock, no I/O but the console's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reliable_mq.cli.demo.scenario import BrokerState, Progress
from reliable_mq.cli.terminal import escaped, say
from reliable_mq.testing.audit import AuditResult

__all__ = ["BrokerStatus", "DemoResult", "LinesDisplay", "LiveDisplay", "display_for"]

_EVENTS_SHOWN: Final = 8
_LINE_EVERY: Final = 2.0  # seconds
_RATE_OVER: Final = 2.0  # seconds over which the rate is measured
_BROKER: Final = {
    BrokerState.RUNNING: Text.assemble(("● ", "green"), "broker running"),
    BrokerState.KILLED: Text.assemble(("✘ ", "bold red"), "broker killed"),
    BrokerState.STARTING: Text.assemble(("◌ ", "yellow"), "broker starting"),
}


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """The broker and the connections to it.

    Attributes:
        broker: its state by the commands that kill and restart it.
        publisher_connected, consumer_connected: the states of the connections.
        blocked: the broker's reason for blocking publishes; None if it does not.
    """

    broker: BrokerState
    publisher_connected: bool
    consumer_connected: bool
    blocked: str | None

    @property
    def connected(self) -> bool:
        """Whether both are connected."""
        return self.publisher_connected and self.consumer_connected


class LinesDisplay:
    """A line every two seconds, and one for each event. A context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._next = 0.0

    def __enter__(self) -> Self:
        say(self._title, console=self._console)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, time: float, progress: Progress, status: BrokerStatus) -> None:
        """Print a line, if it is due."""
        if time < self._next:
            return
        self._next = time + _LINE_EVERY
        counts = (
            f"published {progress.published:,}  confirmed {progress.confirmed:,}  handled {progress.handled:,}  "
            f"retried {progress.retried:,}  dead-lettered {progress.dead_lettered:,}  "
            f"duplicates {progress.duplicates:,}  publisher {_connected(status.publisher_connected)}  "
            f"consumer {_connected(status.consumer_connected)}"
        )
        self.tell(time, counts)

    def tell(self, time: float, event: str) -> None:
        """Print an event."""
        say(f"{_clock(time)}  {event}", console=self._console)


class LiveDisplay:
    """Bars, counts, states and the latest events, redrawn in place. A context manager."""

    def __init__(self, console: Console, title: str, orders: int) -> None:
        self._title = title
        self._orders = orders
        self._events: deque[Text] = deque(maxlen=_EVENTS_SHOWN)
        self._recent: deque[tuple[float, int]] = deque()  # time, orders confirmed
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(exc_type, exc, traceback)

    def update(self, time: float, progress: Progress, status: BrokerStatus) -> None:
        """Redraw everything."""
        self._recent.append((time, progress.confirmed))
        while self._recent[0][0] < time - _RATE_OVER:
            self._recent.popleft()
        self._live.update(self._drawn(time, progress, status), refresh=True)

    def tell(self, time: float, event: str) -> None:
        """Keep an event, to be drawn by the next update."""
        self._events.append(Text(escaped(f"{_clock(time)}  {event}")))

    def _drawn(self, time: float, progress: Progress, status: BrokerStatus) -> Group:
        bars = Table.grid("", "", padding=(0, 2))
        bars.add_column(justify="right", min_width=len(f"{self._orders:,}"))
        bars.add_column(justify="right", style="dim", min_width=len("10,000/s"))
        for name, count, note in (
            ("published", progress.published, _clock(time)),
            ("confirmed", progress.confirmed, f"{self._rate():,.0f}/s"),
            ("handled", progress.handled, ""),
        ):
            bars.add_row(name, ProgressBar(total=self._orders, completed=count, width=40), f"{count:,}", note)
        counts = Table.grid(padding=(0, 3))
        counts.add_row(
            _count("retried", progress.retried),
            _count("dead-lettered", progress.dead_lettered),
            _count("published again", progress.republished),
            _count("duplicates set aside", progress.duplicates),
        )
        states = Table.grid(padding=(0, 3))
        states.add_row(
            _BROKER[status.broker],
            _connection("publisher", connected=status.publisher_connected, blocked=status.blocked),
            _connection("consumer", connected=status.consumer_connected),
        )
        return Group(Text(escaped(self._title), style="bold"), "", bars, "", counts, states, "", *self._events, "")

    def _rate(self) -> float:
        (first_time, first), (last_time, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else 0.0


def display_for(console: Console, title: str, orders: int) -> LinesDisplay | LiveDisplay:
    """Return the display that suits a console."""
    return LiveDisplay(console, title, orders) if console.is_terminal else LinesDisplay(console, title)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The audit at the end.

    Attributes:
        balance: the result of the audit.
        progress: the counts.
        outages: how often the broker was killed.
        seconds: duration of the demo.
    """

    balance: AuditResult
    progress: Progress
    outages: int
    seconds: float

    @property
    def faults(self) -> list[str]:
        """The reasons why it does not add up; empty if it does."""
        balance = self.balance
        faults = []
        try:
            balance.check(effects_once=True)
        except AssertionError as error:
            faults.append(str(error))
        if balance.confirmed + self._unconfirmed != balance.handled + balance.dead_lettered:
            faults.append("confirmed is not handled + dead-lettered")
        if balance.left:
            faults.append(f"{balance.left:,} orders are left in the queue")
        return faults

    @property
    def equation(self) -> str:
        """The audit in one line."""
        balance, arrived = self.balance, self._unconfirmed
        more = f" + {arrived:,} unconfirmed, yet arrived" if arrived else ""
        sign = "=" if balance.confirmed + arrived == balance.handled + balance.dead_lettered else "≠"
        return (
            f"confirmed {balance.confirmed:,}{more} {sign} handled {balance.handled:,} "
            f"+ dead-lettered {balance.dead_lettered:,}, lost {len(balance.lost):,}"
        )

    @property
    def so_far(self) -> str:
        """The audit of a demo that was interrupted or ended early, in one line."""
        balance = self.balance
        return (
            f"of {balance.confirmed:,} confirmed {balance.handled:,} were handled, {balance.dead_lettered:,} "
            f"dead-lettered, {balance.left:,} left in the queue, lost {len(balance.lost):,}"
        )

    @property
    def _unconfirmed(self) -> int:
        """Orders that were not confirmed, and arrived all the same."""
        return len(self.balance.recovered | self.balance.refuted)

    def __rich__(self) -> Group:
        balance, progress, faults = self.balance, self.progress, self.faults
        again = f"of them {progress.republished:,} again, since their outcome was unknown"
        once = "each had its effect exactly once" if not balance.repeated_effects else "some had it more than once"
        rows = [
            ("published", balance.attempted, again if progress.republished else ""),
            ("confirmed", balance.confirmed, ""),
            *([("failed", balance.failed, "reported as such by the publisher")] if balance.failed else []),
            ("handled", balance.handled, once),
            ("dead-lettered", balance.dead_lettered, "the orders that no handler can process, after three attempts"),
            ("lost", len(balance.lost), ""),
        ]
        table = Table.grid("", padding=(0, 3))
        table.add_column(justify="right", style="bold")
        table.add_column(style="dim")
        for name, count, remark in rows:
            table.add_row(name, f"{count:,}", remark)
        times = "once" if self.outages == 1 else f"{self.outages} times"
        killed = f"The broker was killed {times}. " if self.outages else ""
        summary = (
            f"{killed}{progress.retried:,} failed attempts were tried again, "
            f"{progress.duplicates:,} duplicates were set aside, in {self.seconds:.0f} s."
        )
        mark, style = ("✘", "bold red") if faults else ("✔", "bold green")
        result = Text(f"{mark} {self.equation}", style=style)
        return Group("", table, "", summary, *(Text(fault, style="red") for fault in faults), result)


def _clock(time: float) -> str:
    return f"{int(time) // 60:02}:{int(time) % 60:02}"


def _connected(connected: bool) -> str:
    return "connected" if connected else "reconnecting"


def _count(name: str, count: int) -> Text:
    return Text.assemble(f"{name} ", (f"{count:,}", "bold" if count else "dim"))


def _connection(name: str, *, connected: bool, blocked: str | None = None) -> Text:
    if blocked is not None:
        return Text.assemble(("● ", "yellow"), f"{name} blocked: {escaped(blocked)}")
    return Text.assemble(("● ", "green") if connected else ("◌ ", "yellow"), f"{name} {_connected(connected)}")
