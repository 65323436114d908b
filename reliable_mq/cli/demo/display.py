"""Run the demo: watch the shop, kill the broker, show events, counts and audit.

A terminal shows bars that are redrawn in place. A pipe or a file receives a line at intervals. Times are seconds since
the demo began.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reliable_mq.cli.demo.scenario import BrokerState, Outages, Progress, Shop
from reliable_mq.cli.terminal import INTERRUPTED, escaped, output, say
from reliable_mq.testing.audit import AuditResult

_POLL: Final = 0.1  # seconds
_STANDSTILL: Final = 120.0  # seconds without any progress after which the demo ends with an error
_EVENTS_SHOWN: Final = 8
_LINE_EVERY: Final = 2.0  # seconds
_RATE_OVER: Final = 2.0  # seconds over which the rate is measured
_BROKER: Final = {
    BrokerState.RUNNING: Text.assemble(("● ", "green"), "broker running"),
    BrokerState.KILLED: Text.assemble(("✘ ", "bold red"), "broker killed"),
    BrokerState.STARTING: Text.assemble(("◌ ", "yellow"), "broker starting"),
}


def run(shop: Shop, outages: Outages, hosts: str) -> int:
    """Run the demo to its end and return the exit status."""
    interrupted = False
    error: str | None = None
    with shop:
        title = f"{shop.orders:,} orders through {shop.broker} at {hosts}"
        began = time.monotonic()
        try:
            with display_for(output, title, shop.orders) as display:
                error = _watch(shop, outages, display, began)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: closing")
        finally:
            outages.end()
    all_counted = shop.not_deleted is None
    result = DemoResult(shop.audit.balance(), shop.progress, outages.done, time.monotonic() - began, all_counted)
    if shop.not_deleted is not None:
        say(f"reliable-mq: the queues {' and '.join(shop.queues)} are not deleted: {shop.not_deleted}")
    if interrupted:
        say(f"interrupted: {result.so_far}")
        return INTERRUPTED
    error = outages.failure or error
    if outages.failure is not None or not all_counted:  # the audit cannot balance
        say(f"ended early: {result.so_far}")
    else:
        output.print(result)
    if error is not None:
        say(f"reliable-mq: {error}")
    return 1 if result.faults or error is not None or not all_counted else 0


def _watch(shop: Shop, outages: Outages, display: LinesDisplay | LiveDisplay, began: float) -> str | None:
    """Show the progress until the job is done. Return the reason if it ended early."""
    publisher, consumer, story = shop.publisher, shop.consumer, Story()
    latest, latest_at = shop.progress, 0.0
    pause = threading.Event()
    while True:
        now, progress = time.monotonic() - began, shop.progress
        if progress != latest:
            latest, latest_at = progress, now
        status = BrokerStatus(outages.state, publisher.connected, consumer.connected, publisher.blocked)
        for event in story.events(now, status, outstanding=publisher.outstanding, republished=progress.republished):
            display.tell(now, event)
        display.update(now, progress, status)
        outages.advance(progress.confirmed / shop.orders, connected=status.connected)
        if outages.failure is not None:
            return outages.failure
        if shop.failure is not None:
            return f"publishing ended: {shop.failure}"
        if now - latest_at > _STANDSTILL:
            return f"no progress for {_STANDSTILL:.0f} s"
        if status.connected and not outages.pending and shop.is_done():
            return None
        pause.wait(_POLL)


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """The state of the broker and of the connections to it.

    The broker's state follows from the commands that kill and restart it. `blocked` is the broker's reason for blocking
    publishes, or None.
    """

    broker: BrokerState
    publisher_connected: bool
    consumer_connected: bool
    blocked: str | None

    @property
    def connected(self) -> bool:
        return self.publisher_connected and self.consumer_connected


class Story:
    """A comparison of successive statuses that describes the events between them."""

    def __init__(self) -> None:
        self._before: BrokerStatus | None = None
        self._lost: tuple[float, int] | None = None  # time of the loss, and orders republished by then

    def events(self, now: float, status: BrokerStatus, *, outstanding: int, republished: int) -> list[str]:
        """Return the events since the last call."""
        before, self._before = self._before, status
        if before is None:
            return []
        events = []
        running = status.broker is BrokerState.RUNNING
        if before.broker is BrokerState.RUNNING and not running:
            events.append(f"the broker is killed, with {outstanding:,} orders unconfirmed")
        if before.connected and not status.connected:
            self._lost = now, republished
            if running:
                events.append(f"the connection is lost, with {outstanding:,} orders unconfirmed")
        if status.connected and self._lost is not None:
            (lost_at, earlier), self._lost = self._lost, None
            again = republished - earlier
            events.append(f"connected again after {now - lost_at:.1f} s, {again:,} orders published again")
        if status.blocked != before.blocked:
            blocked = f"the broker blocks publishing: {status.blocked}"
            events.append("the broker accepts publishes again" if status.blocked is None else blocked)
        return events


class LinesDisplay:
    """A display of a line every two seconds and one per event. A context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._next = 0.0

    def __enter__(self) -> Self:
        say(self._title, console=self._console)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, now: float, progress: Progress, status: BrokerStatus) -> None:
        if now < self._next:
            return
        self._next = now + _LINE_EVERY
        counts = (
            f"published {progress.published:,}  confirmed {progress.confirmed:,}  handled {progress.handled:,}  "
            f"retried {progress.retried:,}  dead-lettered {progress.dead_lettered:,}  "
            f"duplicates {progress.duplicates:,}  publisher {_connected(status.publisher_connected)}  "
            f"consumer {_connected(status.consumer_connected)}"
        )
        self.tell(now, counts)

    def tell(self, now: float, event: str) -> None:
        say(f"{_clock(now)}  {event}", console=self._console)


class LiveDisplay:
    """A display of bars, counts, states and events, redrawn in place.

    A context manager.
    """

    def __init__(self, console: Console, title: str, orders: int) -> None:
        self._title = title
        self._orders = orders
        self._events: deque[Text] = deque(maxlen=_EVENTS_SHOWN)
        self._recent: deque[tuple[float, int]] = deque()  # time, orders confirmed
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, now: float, progress: Progress, status: BrokerStatus) -> None:
        self._recent.append((now, progress.confirmed))
        while self._recent[0][0] < now - _RATE_OVER:
            self._recent.popleft()
        self._live.update(self._drawn(now, progress, status), refresh=True)

    def tell(self, now: float, event: str) -> None:
        """Keep an event for the next update to draw."""
        self._events.append(Text(escaped(f"{_clock(now)}  {event}")))

    def _drawn(self, now: float, progress: Progress, status: BrokerStatus) -> Group:
        bars = Table.grid("", "", padding=(0, 2))
        bars.add_column(justify="right", min_width=len(f"{self._orders:,}"))
        bars.add_column(justify="right", style="dim", min_width=len("10,000/s"))
        for name, count, note in (
            ("published", progress.published, _clock(now)),
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
    return LiveDisplay(console, title, orders) if console.is_terminal else LinesDisplay(console, title)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The audit at the end.

    `all_counted` is whether the orders left in the queues were counted.
    """

    balance: AuditResult
    progress: Progress
    outages: int
    seconds: float
    all_counted: bool = True

    @property
    def faults(self) -> list[str]:
        """The reasons why the audit does not balance. Empty if it does."""
        balance = self.balance
        faults = []
        try:
            balance.check(effects_once=balance.handled > 0)
        except AssertionError as error:
            faults.append(str(error))
        if balance.confirmed + self._unconfirmed != balance.handled + balance.dead_lettered:
            faults.append("confirmed is not handled + dead-lettered")
        if balance.left:
            faults.append(f"{balance.left:,} orders are left in the queue")
        return faults

    @property
    def equation(self) -> str:
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
        handled = f"of {balance.confirmed:,} confirmed {balance.handled:,} were handled"
        if not self.all_counted:
            return f"{handled}; those left in the queues are not counted"
        return (
            f"{handled}, {balance.dead_lettered:,} dead-lettered, {balance.left:,} left in the queue, "
            f"lost {len(balance.lost):,}"
        )

    @property
    def _unconfirmed(self) -> int:
        """The number of orders that arrived without being confirmed."""
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


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"


def _connected(connected: bool) -> str:
    return "connected" if connected else "reconnecting"


def _count(name: str, count: int) -> Text:
    return Text.assemble(f"{name} ", (f"{count:,}", "bold" if count else "dim"))


def _connection(name: str, *, connected: bool, blocked: str | None = None) -> Text:
    if blocked is not None:
        return Text.assemble(("● ", "yellow"), f"{name} blocked: {escaped(blocked)}")
    return Text.assemble(("● ", "green") if connected else ("◌ ", "yellow"), f"{name} {_connected(connected)}")
