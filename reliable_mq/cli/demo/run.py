"""Run the demo: watch the job, kill the broker, tell what happens, and show the audit at the end."""

from __future__ import annotations

import threading
import time
from typing import Final

from reliable_mq.cli.demo.display import BrokerStatus, DemoResult, Display, Moment, Story, display_for
from reliable_mq.cli.demo.scenario import Outages, Progress, Shop
from reliable_mq.cli.terminal import output, say

__all__ = ["Demo"]

_INTERRUPTED: Final = 130
_LOOK_EVERY: Final = 0.1  # seconds between two looks at the job
_STANDSTILL: Final = 120.0  # seconds without any progress, after which something is wrong


class Demo:
    """One run."""

    def __init__(self, shop: Shop, outages: Outages) -> None:
        self._shop = shop
        self._outages = outages
        self._story = Story()
        self._began = time.monotonic()

    def run(self, where: str) -> int:
        """Run to the end; return the exit status."""
        interrupted = False
        error: str | None = None
        with self._shop:
            title = f"{self._shop.orders:,} orders through {self._shop.broker} at {where}"
            self._began = time.monotonic()
            try:
                with display_for(output, title, self._shop.orders) as display:
                    error = self._watch(display)
            except KeyboardInterrupt:
                interrupted = True
                say("interrupted: closing")
            finally:
                self._outages.end()
        verdict = DemoResult(
            self._shop.account.balance(), self._shop.progress, self._outages.done, time.monotonic() - self._began
        )
        if interrupted:
            say(f"interrupted: {verdict.so_far}")
            return _INTERRUPTED
        output.print(verdict)
        if error is not None:
            say(f"reliable-mq: {error}")
        return 1 if verdict.faults or error is not None else 0

    def _watch(self, display: Display) -> str | None:
        """Look at the job until it is done. Returns why it ended early, if it did."""
        shop, outages = self._shop, self._outages
        latest, latest_at = shop.progress, 0.0
        pause = threading.Event()
        while True:
            now, progress = time.monotonic() - self._began, shop.progress
            if progress != latest:
                latest, latest_at = progress, now
            state = self._state()
            for event in self._story.goes_on(_moment(now, state, shop.publisher.outstanding, progress)):
                display.tell(now, event)
            display.update(now, progress, state)
            outages.advance(progress.confirmed / shop.orders, connected=state.connected)
            if outages.failure is not None:
                return outages.failure
            if shop.failure is not None:
                return f"publishing ended: {shop.failure}"
            if now - latest_at > _STANDSTILL:
                return f"no progress for {_STANDSTILL:.0f} s"
            if state.connected and not outages.pending and shop.is_done():
                return None
            pause.wait(_LOOK_EVERY)

    def _state(self) -> BrokerStatus:
        publisher = self._shop.publisher
        return BrokerStatus(self._outages.state, publisher.connected, self._shop.consumer.connected, publisher.blocked)


def _moment(now: float, state: BrokerStatus, outstanding: int, progress: Progress) -> Moment:
    return Moment(now, state.broker, state.connected, state.blocked, outstanding, progress.republished)
