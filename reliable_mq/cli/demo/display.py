"""How the job goes, while it goes: a live display where somebody looks at a terminal, a line now and then elsewhere.

The account, closed: what became of every order, and whether it adds up.

What happened, in sentences: made of how things stood at two moments. No clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reliable_mq.cli.demo.scenario import BrokerState, Progress
from reliable_mq.cli.terminal import escaped, say
from reliable_mq.testing.audit import AuditResult

__all__ = ["BrokerStatus", "DemoResult", "Display", "LinesDisplay", "LiveDisplay", "Moment", "Story", "display_for"]

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
    """What is shown beside the counts.

    Attributes:
        broker: what the commands have made of it.
        publisher_connected: whether the publisher is.
        consumer_connected: whether the consumer is.
        blocked: the broker's reason while it takes no publishes; else None.
    """

    broker: BrokerState
    publisher_connected: bool
    consumer_connected: bool
    blocked: str | None

    @property
    def connected(self) -> bool:
        """Whether both are."""
        return self.publisher_connected and self.consumer_connected


class Display(Protocol):
    """A context manager, for one thread. Times are seconds since the job began."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def update(self, time: float, progress: Progress, state: BrokerStatus) -> None:
        """Show how it stands."""

    def tell(self, time: float, event: str) -> None:
        """Show that something happened."""


def display_for(console: Console, title: str, orders: int) -> Display:
    """The display that fits where the output goes."""
    return LiveDisplay(console, title, orders) if console.is_terminal else LinesDisplay(console, title)


class LinesDisplay:
    """A line every two seconds, and one for each event."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._next = 0.0

    def __enter__(self) -> Self:
        self._print(self._title)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def update(self, time: float, progress: Progress, state: BrokerStatus) -> None:
        """Print a line, if it is time."""
        if time < self._next:
            return
        self._next = time + _LINE_EVERY
        self._print(
            f"{_clock(time)}  published {progress.published:,}  confirmed {progress.confirmed:,}  "
            f"handled {progress.handled:,}  retried {progress.retried:,}  "
            f"dead-lettered {progress.dead_lettered:,}  duplicates {progress.duplicates:,}  "
            f"publisher {_connected(state.publisher_connected)}  consumer {_connected(state.consumer_connected)}"
        )

    def tell(self, time: float, event: str) -> None:
        """Print an event."""
        self._print(f"{_clock(time)}  {event}")

    def _print(self, text: str) -> None:
        say(text, console=self._console)


class LiveDisplay:
    """Bars, counts, states and the latest events, redrawn in place."""

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

    def update(self, time: float, progress: Progress, state: BrokerStatus) -> None:
        """Redraw."""
        self._recent.append((time, progress.confirmed))
        while self._recent[0][0] < time - _RATE_OVER:
            self._recent.popleft()
        self._live.update(self._drawn(time, progress, state), refresh=True)

    def tell(self, time: float, event: str) -> None:
        """Keep an event, to be drawn with the next update."""
        self._events.append(Text(escaped(f"{_clock(time)}  {event}")))

    def _drawn(self, time: float, progress: Progress, state: BrokerStatus) -> Group:
        bars = Table.grid(padding=(0, 2))
        bars.add_column()
        bars.add_column()
        bars.add_column(justify="right", min_width=len(f"{self._orders:,}"))
        bars.add_column(justify="right", style="dim", min_width=len("10,000/s"))
        for name, count, beside in (
            ("published", progress.published, _clock(time)),
            ("confirmed", progress.confirmed, f"{self._rate():,.0f}/s"),
            ("handled", progress.handled, ""),
        ):
            bars.add_row(name, ProgressBar(total=self._orders, completed=count, width=40), f"{count:,}", beside)
        counts = Table.grid(padding=(0, 3))
        counts.add_row(
            _count("retried", progress.retried),
            _count("dead-lettered", progress.dead_lettered),
            _count("published again", progress.republished),
            _count("duplicates set aside", progress.duplicates),
        )
        states = Table.grid(padding=(0, 3))
        states.add_row(
            _BROKER[state.broker],
            _link("publisher", connected=state.publisher_connected, blocked=state.blocked),
            _link("consumer", connected=state.consumer_connected, blocked=None),
        )
        return Group(Text(escaped(self._title), style="bold"), "", bars, "", counts, states, "", *self._events, "")

    def _rate(self) -> float:
        (first_time, first), (last_time, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else 0.0


def _clock(time: float) -> str:
    return f"{int(time) // 60:02}:{int(time) % 60:02}"


def _connected(connected: bool) -> str:
    return "connected" if connected else "reconnecting"


def _count(name: str, count: int) -> Text:
    return Text.assemble(f"{name} ", (f"{count:,}", "bold" if count else "dim"))


def _link(name: str, *, connected: bool, blocked: str | None) -> Text:
    if blocked is not None:
        return Text.assemble(("● ", "yellow"), f"{name} blocked: {escaped(blocked)}")
    return Text.assemble(("● ", "green") if connected else ("◌ ", "yellow"), f"{name} {_connected(connected)}")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A closed account.

    Attributes:
        balance: what the account comes to.
        progress: the counts at the end.
        outages: how often the broker was killed.
        seconds: that it took.
    """

    balance: AuditResult
    progress: Progress
    outages: int
    seconds: float

    @property
    def faults(self) -> list[str]:
        """Why it does not add up; empty where it does."""
        balance = self.balance
        faults = []
        try:
            balance.check(effects_once=True)
        except AssertionError as error:
            faults.append(str(error))
        if balance.confirmed + len(balance.recovered | balance.refuted) != balance.handled + balance.dead_lettered:
            faults.append("confirmed is not handled + dead-lettered")
        if balance.left:
            faults.append(f"{balance.left:,} orders are left in the queue")
        return faults

    @property
    def equation(self) -> str:
        """The account in one line."""
        balance = self.balance
        arrived = len(balance.recovered | balance.refuted)
        more = f" + {arrived:,} unconfirmed, yet arrived" if arrived else ""
        sign = "=" if balance.confirmed + arrived == balance.handled + balance.dead_lettered else "≠"
        return (
            f"confirmed {balance.confirmed:,}{more} {sign} handled {balance.handled:,} "
            f"+ dead-lettered {balance.dead_lettered:,}, lost {len(balance.lost):,}"
        )

    @property
    def so_far(self) -> str:
        """An account that was closed early, in one line."""
        balance = self.balance
        return (
            f"of {balance.confirmed:,} confirmed {balance.handled:,} were handled, {balance.dead_lettered:,} "
            f"dead-lettered, {balance.left:,} left in the queue, lost {len(balance.lost):,}"
        )

    def __rich__(self) -> Group:
        balance, progress, faults = self.balance, self.progress, self.faults
        table = Table.grid(padding=(0, 3))
        table.add_column()
        table.add_column(justify="right")
        table.add_column(style="dim")
        again = f"of them {progress.republished:,} again, since nobody could say whether they had arrived"
        once = "each had its effect exactly once" if not balance.repeated_effects else "some had it more than once"
        rows = [
            ("published", balance.attempted, again if progress.republished else ""),
            ("confirmed", balance.confirmed, ""),
            ("handled", balance.handled, once),
            ("dead-lettered", balance.dead_lettered, "the orders that no handler can process, after three attempts"),
            ("lost", len(balance.lost), ""),
        ]
        if balance.failed:
            rows.insert(2, ("failed", balance.failed, "reported as such by the publisher"))
        for name, count, remark in rows:
            table.add_row(name, Text(f"{count:,}", style="bold"), remark)
        killed = {0: "", 1: "The broker was killed once. "}.get(
            self.outages, f"The broker was killed {self.outages} times. "
        )
        summary = (
            f"{killed}{progress.retried:,} failed attempts were tried again, "
            f"{progress.duplicates:,} duplicates were set aside, in {self.seconds:.0f} s."
        )
        mark, style = ("✘", "bold red") if faults else ("✔", "bold green")
        result = Text(f"{mark} {self.equation}", style=style)
        return Group("", table, "", summary, *(Text(fault, style="red") for fault in faults), result)


@dataclass(frozen=True, slots=True)
class Moment:
    """How things stand.

    Attributes:
        time: seconds since the job began.
        broker: what the commands have made of it.
        connected: whether both publisher and consumer are connected.
        blocked: the broker's reason while it takes no publishes; else None.
        outstanding: orders that are neither confirmed nor failed.
        republished: orders published again so far.
    """

    time: float
    broker: BrokerState
    connected: bool
    blocked: str | None
    outstanding: int
    republished: int


class Story:
    """Told moment after moment, tells what happened in between."""

    def __init__(self) -> None:
        self._before: Moment | None = None
        self._lost: Moment | None = None

    def goes_on(self, now: Moment) -> list[str]:
        """What happened since the last moment."""
        before, self._before = self._before, now
        if before is None:
            return []
        events = []
        if now.broker is not before.broker and before.broker is BrokerState.RUNNING:
            events.append(f"the broker is killed, with {now.outstanding:,} orders unconfirmed")
        if before.connected and not now.connected:
            self._lost = now
            if now.broker is BrokerState.RUNNING:
                events.append(f"the connection is lost, with {now.outstanding:,} orders unconfirmed")
        if now.connected and self._lost is not None:
            lost, self._lost = self._lost, None
            again = now.republished - lost.republished
            events.append(f"connected again after {now.time - lost.time:.1f} s, {again:,} orders published again")
        if now.blocked != before.blocked:
            blocked = f"the broker blocks publishing: {now.blocked}"
            events.append("the broker takes publishes again" if now.blocked is None else blocked)
        return events
