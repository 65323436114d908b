"""The faults of the proxy: on a direction's bytes, and on single frames.

A fault on bytes is a value (`LinkConditions`), the same for every connection or for some. A fault on frames is an
object whose `apply` returns the frames that leave in place of a frame: cutting, holding confirms and a user's own
function are such faults (`FrameFault`).

Invariants:
- faults are changed and applied on the proxy's thread only;
- they are applied in the order in which they were set, each to the output of the one before it;
- held confirms leave in the order in which they came, and never after the close of their channel.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from reliable_mq.errors import ConfigurationError
from reliable_mq.testing.frames import BODY, HEADER, Frame

__all__ = [
    "DIRECTIONS",
    "ConfirmGate",
    "ConfirmMode",
    "Cut",
    "CutAt",
    "Direction",
    "FrameFault",
    "LinkConditions",
    "Rewrite",
    "RewriteFunction",
    "Step",
    "check_at_least_one",
    "checked_direction",
    "directions_of",
]

Direction = Literal["to_broker", "to_client"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("to_broker", "to_client")


def directions_of(direction: Direction | Literal["both"]) -> tuple[Direction, ...]:
    """Return the direction that a user names, or both."""
    return DIRECTIONS if direction == "both" else (checked_direction(direction),)


def checked_direction(direction: Direction) -> Direction:
    """Return a direction that a user names."""
    if direction not in DIRECTIONS:
        raise ConfigurationError(f"a direction is 'to_broker' or 'to_client', not {direction!r}")
    return direction


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
    """How one direction of a connection passes bytes.

    Attributes:
        delay: seconds that every byte takes.
        jitter: seconds by which the delay varies at most, either way.
        rate: bytes per second; None for no limit.
        black_hole: bytes are read and kept.
        stop_reading: bytes are not read.
    """

    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None
    black_hole: bool = False
    stop_reading: bool = False

    @property
    def clear(self) -> bool:
        """Whether bytes leave at once."""
        return not (self.black_hole or self.delay or self.rate is not None)


class FrameFault(Protocol):
    """A fault that sees each frame of a direction."""

    @property
    def spent(self) -> bool:
        """Whether it has no more effect, and can be removed."""
        ...

    def apply(self, connection: int, frame: Frame, /) -> Iterable[Step]:
        """Return the frames that leave on connection number `connection` in place of one."""
        ...


@dataclass(slots=True, eq=False)
class Rewrite:
    """A user's own function."""

    function: RewriteFunction
    direction: Direction
    spent: bool = False

    def apply(self, _connection: int, frame: Frame, /) -> Iterable[Step]:
        return self.function(self.direction, frame)


@dataclass(slots=True, eq=False)
class CutAt:
    """Cut a connection at the n-th frame that matches since the fault was set.

    Attributes:
        share: of the frame's payload, the part that leaves before the cut; None for the whole frame.
        times: connections that are still to be cut; None for every one.
    """

    matches: Callable[[Frame], bool]
    nth: int
    reset: bool
    times: int | None
    share: float | None = None
    _counts: dict[int, int] = field(default_factory=dict)

    @property
    def spent(self) -> bool:
        return self.times == 0

    def apply(self, connection: int, frame: Frame, /) -> Iterable[Step]:
        if self.spent or not self.matches(frame):
            return (frame,)
        count = self._counts[connection] = self._counts.get(connection, 0) + 1
        if count != self.nth:
            return (frame,)
        if self.times is not None:
            self.times -= 1
        if self.share is None:
            return frame, Cut(self.reset)
        return (Cut(self.reset, frame.raw[: 7 + int(self.share * len(frame.payload))]),)


class ConfirmMode(enum.Enum):
    """How the broker's confirms and returns pass."""

    PASS = enum.auto()
    HOLD = enum.auto()
    DROP = enum.auto()


@dataclass(slots=True)
class _HeldFrame:
    """One ack, nack or return; the mode of a return holds for its content, too."""

    connection: int
    channel: int
    mode: ConfirmMode
    frames: list[Frame]
    missing: int = 0


@dataclass(slots=True, eq=False)
class ConfirmGate:
    """Hold or drop ``basic.ack``, ``basic.nack`` and ``basic.return`` of the broker.

    Attributes:
        mode: of those that come from now on.
    """

    mode: ConfirmMode = ConfirmMode.PASS
    _held: deque[_HeldFrame] = field(default_factory=deque)
    _open: dict[tuple[int, int], _HeldFrame] = field(default_factory=dict)

    @property
    def spent(self) -> bool:
        return self.mode is ConfirmMode.PASS and not self._held and not self._open

    @property
    def held(self) -> int:
        """The number that is held; a return counts as one, with its content."""
        return len(self._held)

    def apply(self, connection: int, frame: Frame, /) -> Iterable[Step]:
        if frame.kind in (HEADER, BODY):
            return self._content(connection, frame)
        if frame.name in ("basic.ack", "basic.nack", "basic.return") and self.mode is not ConfirmMode.PASS:
            entry = _HeldFrame(connection, frame.channel, self.mode, [frame])
            if frame.name == "basic.return":
                self._open[connection, frame.channel] = entry
            if self.mode is ConfirmMode.HOLD:
                self._held.append(entry)
            return ()
        # No broker sends a confirm after the close of its channel: those that are held are lost with it.
        if frame.name in ("channel.close", "channel.close-ok"):
            self._forget(lambda entry: entry.connection == connection and entry.channel == frame.channel)
        elif frame.name in ("connection.close", "connection.close-ok"):
            self.forget(connection)
        return (frame,)

    def release(self, count: int | None) -> list[tuple[int, list[Frame]]]:
        """Remove the first `count` held ones (None: all); return connection and frames."""
        return [(entry.connection, entry.frames) for entry in self._take(count, ConfirmMode.PASS)]

    def drop(self, count: int | None) -> int:
        """Drop the first `count` (None: all) that are held; return their number."""
        return len(self._take(count, ConfirmMode.DROP))

    def forget(self, connection: int) -> None:
        """Drop the held frames of a connection that has ended."""
        self._forget(lambda entry: entry.connection == connection)

    def _content(self, connection: int, frame: Frame) -> Iterable[Step]:
        entry = self._open.get((connection, frame.channel))
        if entry is None:
            return (frame,)
        size = frame.content_size
        entry.missing = size if size is not None else entry.missing - len(frame.payload)
        if entry.missing <= 0:
            del self._open[connection, frame.channel]
        if entry.mode is ConfirmMode.PASS:
            return (frame,)
        if entry.mode is ConfirmMode.HOLD:
            entry.frames.append(frame)
        return ()

    def _take(self, count: int | None, mode: ConfirmMode) -> list[_HeldFrame]:
        taken: list[_HeldFrame] = []
        while self._held and (count is None or len(taken) < count):
            entry = self._held.popleft()
            entry.mode = mode
            taken.append(entry)
        return taken

    def _forget(self, matches: Callable[[_HeldFrame], bool]) -> None:
        self._held = deque(entry for entry in self._held if not matches(entry))
        self._open = {place: entry for place, entry in self._open.items() if not matches(entry)}


def check_at_least_one(**values: int | None) -> None:
    """Raise unless each number, where there is one, is at least 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is at least 1, not {value!r}")
