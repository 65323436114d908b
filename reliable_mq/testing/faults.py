"""The faults that the proxy can set: on the line (bytes), and on single frames.

A fault on the line is a value (`LinkConditions`), the same for every connection or for some. A fault on frames is an
object with `apply`, which answers each frame with what is to leave in its place; `FrameFault` is the general primitive,
and cutting, holding back confirms and a user's own function are all built on it.

Invariants:
- faults are changed and asked on the proxy's thread only;
- they are asked in the order in which they were set, each about what the one before it let through;
- confirms held back leave in the order in which they came, and never after the close of their channel.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from reliable_mq.testing.frames import BODY, HEADER, Frame

__all__ = [
    "ConfirmGate",
    "ConfirmMode",
    "Cut",
    "CutAfter",
    "CutInBody",
    "Direction",
    "FrameFault",
    "LinkConditions",
    "Rewrite",
    "RewriteFunction",
    "Step",
]

Direction = Literal["to_broker", "to_client"]


@dataclass(frozen=True, slots=True)
class Cut:
    """In place of a frame: end the connection here.

    Attributes:
        reset: True for a TCP reset on both sides, False for an orderly end (FIN).
        data: bytes to forward before, for instance a part of the frame.
    """

    reset: bool = True
    data: bytes = b""


Step = Frame | Cut
RewriteFunction = Callable[[Direction, Frame], Iterable[Step]]


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """What one direction of a connection does to the bytes that pass.

    Attributes:
        delay: seconds by which every byte is late.
        jitter: seconds by which the delay varies at most, either way.
        rate: bytes per second; None for no limit.
        black_hole: bytes are read, and do not leave.
        stop_reading: bytes are not read.
    """

    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None
    black_hole: bool = False
    stop_reading: bool = False


class FrameFault(Protocol):
    """A fault that sees each frame of a direction."""

    @property
    def spent(self) -> bool:
        """It will not do anything any more, and can be taken out."""
        ...

    def apply(self, link: int, frame: Frame, /) -> Iterable[Step]:
        """Say what leaves on connection number `link` in place of a frame."""
        ...


@dataclass(slots=True, eq=False)
class Rewrite:
    """A user's own function."""

    function: RewriteFunction
    direction: Direction
    spent: bool = False

    def apply(self, _link: int, frame: Frame, /) -> Iterable[Step]:
        return self.function(self.direction, frame)


@dataclass(slots=True, eq=False)
class CutAfter:
    """Cuts a connection behind the n-th frame, counted per connection from when the fault was set."""

    frames: int
    reset: bool
    key: int | None
    times: int | None
    _counts: dict[int, int] = field(default_factory=dict)

    @property
    def spent(self) -> bool:
        return self.times == 0

    def apply(self, link: int, frame: Frame, /) -> Iterable[Step]:
        if self.spent or (self.key is not None and frame.key != self.key):
            return (frame,)
        count = self._counts[link] = self._counts.get(link, 0) + 1
        if count != self.frames:
            return (frame,)
        if self.times is not None:
            self.times -= 1
        return frame, Cut(self.reset)


@dataclass(slots=True, eq=False)
class CutInBody:
    """Cuts a connection inside the n-th body frame, counted per connection from when the fault was set."""

    share: float
    nth: int
    reset: bool
    times: int | None
    _counts: dict[int, int] = field(default_factory=dict)

    @property
    def spent(self) -> bool:
        return self.times == 0

    def apply(self, link: int, frame: Frame, /) -> Iterable[Step]:
        if self.spent or frame.kind != BODY:
            return (frame,)
        count = self._counts[link] = self._counts.get(link, 0) + 1
        if count != self.nth:
            return (frame,)
        if self.times is not None:
            self.times -= 1
        return (Cut(self.reset, frame.raw[: 7 + int(self.share * len(frame.payload))]),)


class ConfirmMode(enum.Enum):
    """What happens to the broker's confirms and returns."""

    PASS = enum.auto()
    HOLD = enum.auto()
    DROP = enum.auto()


@dataclass(slots=True)
class _HeldFrame:
    """One ack, nack or return. A return has a content, and its fate decides about what of that is still to come."""

    link: int
    channel: int
    fate: ConfirmMode
    frames: list[Frame]
    missing: int = 0


@dataclass(slots=True, eq=False)
class ConfirmGate:
    """Holds back or drops ``basic.ack``, ``basic.nack`` and ``basic.return`` from the broker.

    Attributes:
        mode: what happens to those that come from now on.
    """

    mode: ConfirmMode = ConfirmMode.PASS
    _held: deque[_HeldFrame] = field(default_factory=deque)
    _open: dict[tuple[int, int], _HeldFrame] = field(default_factory=dict)

    @property
    def spent(self) -> bool:
        return self.mode is ConfirmMode.PASS and not self._held and not self._open

    @property
    def held(self) -> int:
        """How many are held back; a return counts as one, with its content."""
        return len(self._held)

    def apply(self, link: int, frame: Frame, /) -> Iterable[Step]:
        if frame.kind in (HEADER, BODY):
            return self._content(link, frame)
        if frame.name in ("basic.ack", "basic.nack", "basic.return") and self.mode is not ConfirmMode.PASS:
            entry = _HeldFrame(link, frame.channel, self.mode, [frame])
            if frame.name == "basic.return":
                self._open[link, frame.channel] = entry
            if self.mode is ConfirmMode.HOLD:
                self._held.append(entry)
            return ()
        # A confirm behind the close of its channel is what no broker sends: those that are held are lost with it.
        if frame.name in ("channel.close", "channel.close-ok"):
            self._forget(lambda entry: entry.link == link and entry.channel == frame.channel)
        elif frame.name in ("connection.close", "connection.close-ok"):
            self.forget(link)
        return (frame,)

    def release(self, count: int | None) -> list[tuple[int, list[Frame]]]:
        """Take the first `count` (None: all) that are held: (connection number, frames) each, to be sent now."""
        return [(entry.link, entry.frames) for entry in self._take(count, ConfirmMode.PASS)]

    def drop(self, count: int | None) -> int:
        """Drop the first `count` (None: all) that are held. Returns how many."""
        return len(self._take(count, ConfirmMode.DROP))

    def forget(self, link: int) -> None:
        """Drop what is held of a connection: it is gone."""
        self._forget(lambda entry: entry.link == link)

    def _content(self, link: int, frame: Frame) -> Iterable[Step]:
        entry = self._open.get((link, frame.channel))
        if entry is None:
            return (frame,)
        size = frame.content_size
        entry.missing = size if size is not None else entry.missing - len(frame.payload)
        if entry.missing <= 0:
            del self._open[link, frame.channel]
        if entry.fate is ConfirmMode.PASS:
            return (frame,)
        if entry.fate is ConfirmMode.HOLD:
            entry.frames.append(frame)
        return ()

    def _take(self, count: int | None, fate: ConfirmMode) -> list[_HeldFrame]:
        taken: list[_HeldFrame] = []
        while self._held and (count is None or len(taken) < count):
            entry = self._held.popleft()
            entry.fate = fate
            taken.append(entry)
        return taken

    def _forget(self, matches: Callable[[_HeldFrame], bool]) -> None:
        self._held = deque(entry for entry in self._held if not matches(entry))
        self._open = {place: entry for place, entry in self._open.items() if not matches(entry)}
