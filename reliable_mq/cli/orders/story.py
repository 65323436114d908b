"""What happened, in sentences: made of how things stood at two moments. No clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from reliable_mq.cli.orders.outages import BrokerState

__all__ = ["Moment", "Story"]


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
