"""Run the demo: watch the shop, kill the broker, report events and the audit."""

from __future__ import annotations

import threading
import time
from typing import Final

from reliable_mq.cli.demo.display import BrokerStatus, DemoResult, LinesDisplay, LiveDisplay, display_for
from reliable_mq.cli.demo.scenario import BrokerState, Outages, Shop
from reliable_mq.cli.terminal import INTERRUPTED, output, say

__all__ = ["Story", "run"]

_POLL: Final = 0.1  # seconds
_STANDSTILL: Final = 120.0  # seconds without any progress, after which something is wrong


def run(shop: Shop, outages: Outages, where: str) -> int:
    """Run the demo to its end; return the exit status.

    Args:
        shop: the publisher and the consumer.
        outages: of the broker.
        where: the broker's hosts, for the title.
    """
    interrupted = False
    error: str | None = None
    began = time.monotonic()
    with shop:
        title = f"{shop.orders:,} orders through {shop.broker} at {where}"
        began = time.monotonic()
        try:
            with display_for(output, title, shop.orders) as display:
                error = _watch(shop, outages, display, began)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: closing")
        finally:
            outages.end()
    result = DemoResult(shop.audit.balance(), shop.progress, outages.done, time.monotonic() - began)
    if interrupted:
        say(f"interrupted: {result.so_far}")
        return INTERRUPTED
    if outages.failure is not None:  # it ended in the middle of the job, which cannot balance
        say(f"ended early: {result.so_far}")
        say(f"reliable-mq: {outages.failure}")
        return 1
    output.print(result)
    if error is not None:
        say(f"reliable-mq: {error}")
    return 1 if result.faults or error is not None else 0


def _watch(shop: Shop, outages: Outages, display: LinesDisplay | LiveDisplay, began: float) -> str | None:
    """Show the progress until the job is done; return the reason if it ended early."""
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


class Story:
    """Compare the status with the one before, and describe the events in between."""

    def __init__(self) -> None:
        self._before: BrokerStatus | None = None
        self._lost: tuple[float, int] | None = None  # when the connection was lost; orders republished by then

    def events(self, time: float, status: BrokerStatus, *, outstanding: int, republished: int) -> list[str]:
        """Return the events since the last call.

        Args:
            time: of this call.
            status: of now.
            outstanding: orders that are neither confirmed nor failed.
            republished: orders that were published again so far.
        """
        before, self._before = self._before, status
        if before is None:
            return []
        events = []
        running = status.broker is BrokerState.RUNNING
        if before.broker is BrokerState.RUNNING and not running:
            events.append(f"the broker is killed, with {outstanding:,} orders unconfirmed")
        if before.connected and not status.connected:
            self._lost = time, republished
            if running:
                events.append(f"the connection is lost, with {outstanding:,} orders unconfirmed")
        if status.connected and self._lost is not None:
            (lost_at, earlier), self._lost = self._lost, None
            again = republished - earlier
            events.append(f"connected again after {time - lost_at:.1f} s, {again:,} orders published again")
        if status.blocked != before.blocked:
            blocked = f"the broker blocks publishing: {status.blocked}"
            events.append("the broker takes publishes again" if status.blocked is None else blocked)
        return events
