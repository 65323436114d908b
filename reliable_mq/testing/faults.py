"""The faults of the proxy, on the bytes of a direction and on single frames.

A fault on bytes is a value (`LinkConditions`) that applies to all or some connections. A fault on frames is a
`FrameFault`, whose ``apply`` returns the frames that replace a frame. Cuts, held confirms and a user's own function are
faults on frames.

Invariants:
- Faults are changed and applied only on the proxy's thread.
- Faults on frames are applied in the order in which they were set, each to the output of the previous one.
- Held confirms leave in the order in which they came, never after the close of their channel, and never within another
  content of their channel.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from reliable_mq.errors import ConfigurationError
from reliable_mq.testing.frames import BODY, CONTENT_KEYS, HEADER, Frame

Direction = Literal["to_broker", "to_client"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("to_broker", "to_client")


def directions_of(direction: Direction | Literal["both"]) -> tuple[Direction, ...]:
    """Return the directions that a user named."""
    return DIRECTIONS if direction == "both" else (checked_direction(direction),)


def checked_direction(direction: Direction) -> Direction:
    """Return a direction that a user named, if it is valid."""
    if direction not in DIRECTIONS:
        raise ConfigurationError(f"a direction is 'to_broker' or 'to_client', not {direction!r}")
    return direction


@dataclass(frozen=True, slots=True)
class Cut:
    """A step that replaces a frame and ends the connection.

    Attributes:
        reset: True for a TCP reset on both sides, False for an orderly end (FIN).
        data: The bytes to forward before the end, for example a part of the frame.
    """

    reset: bool = True
    data: bytes = b""


Step = Frame | Cut
RewriteFunction = Callable[[Direction, Frame], Iterable[Step]]


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """The conditions under which one direction of a connection passes bytes.

    Attributes:
        delay: The delay of every byte, in seconds.
        jitter: The maximum deviation from the delay in either direction, in seconds.
        rate: The maximum rate, in bytes per second, or None for no limit.
        black_hole: True to read bytes and not forward them.
        stop_reading: True to not read bytes.
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
    """A fault that is applied to each frame of a direction."""

    @property
    def spent(self) -> bool:
        """Whether the fault has no more effect and can be removed."""
        ...

    def apply(self, connection: int, frame: Frame, /) -> Iterable[Step]:
        """Return the frames that replace a frame of connection number `connection`."""
        ...


@dataclass(slots=True, eq=False)
class Rewrite:
    """A fault that calls a user's own function."""

    function: RewriteFunction
    direction: Direction
    spent: bool = False

    def apply(self, _connection: int, frame: Frame, /) -> Iterable[Step]:
        steps = tuple(self.function(self.direction, frame))
        for step in steps:
            if not isinstance(step, Step):
                raise TypeError(f"a rewrite function returns frames and cuts, not {step!r}")
        return steps


@dataclass(slots=True, eq=False)
class CutAt:
    """A cut of a connection at the n-th matching frame since the fault was set.

    Attributes:
        share: The share of the frame's payload that leaves before the cut, or None for the whole frame.
        times: The number of connections that remain to be cut, or None for every connection.
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
    """The treatment of the broker's confirms and returns."""

    PASS = enum.auto()
    HOLD = enum.auto()
    DROP = enum.auto()


@dataclass(slots=True)
class _HeldFrame:
    """One ack, nack or return, or a method whose content passes.

    Attributes:
        mode: The treatment of the frame and of its content.
        frames: The frames that are held. If the content passes, the released confirms that follow it.
        missing: The bytes of the content that have not come.
    """

    connection: int
    channel: int
    mode: ConfirmMode
    frames: list[Frame]
    missing: int = 0


@dataclass(slots=True, eq=False)
class ConfirmGate:
    """A fault that holds or drops confirms and returns of the broker.

    It applies to ``basic.ack``, ``basic.nack``, and ``basic.return`` with its content.

    Attributes:
        mode: The treatment of frames that arrive from now on.
    """

    mode: ConfirmMode = ConfirmMode.PASS
    _held: deque[_HeldFrame] = field(default_factory=deque)
    _open: dict[tuple[int, int], _HeldFrame] = field(default_factory=dict)

    @property
    def spent(self) -> bool:
        return self.mode is ConfirmMode.PASS and not self._held and not self._open

    @property
    def held(self) -> int:
        """The number of held confirms. A return with its content counts as one."""
        return len(self._held)

    def apply(self, connection: int, frame: Frame, /) -> Iterable[Step]:
        if frame.kind in (HEADER, BODY):
            return self._content(connection, frame)
        mode = self.mode if frame.name in ("basic.ack", "basic.nack", "basic.return") else ConfirmMode.PASS
        entry = _HeldFrame(connection, frame.channel, mode, [])
        if frame.key in CONTENT_KEYS:
            self._open[connection, frame.channel] = entry
        if mode is ConfirmMode.HOLD:
            entry.frames.append(frame)
            self._held.append(entry)
        if mode is not ConfirmMode.PASS:
            return ()
        # No broker sends a confirm after the close of its channel, so held confirms are lost with the channel.
        if frame.name in ("channel.close", "channel.close-ok"):
            self._forget(lambda entry: entry.connection == connection and entry.channel == frame.channel)
        elif frame.name in ("connection.close", "connection.close-ok"):
            self.forget(connection)
        return (frame,)

    def release(self, count: int | None) -> list[tuple[int, list[Frame]]]:
        """Remove the first `count` held confirms (None: all).

        Return the connection number and the frames of each, but no frames if they follow a content that passes.
        """
        released: list[tuple[int, list[Frame]]] = []
        for entry in self._take(count):
            frames, entry.frames = entry.frames, []
            content = self._open.get((entry.connection, entry.channel))
            if content is not None and content.mode is ConfirmMode.PASS:
                content.frames += frames
                frames = []
            entry.mode = ConfirmMode.PASS
            released.append((entry.connection, frames))
        return released

    def drop(self, count: int | None) -> int:
        """Drop the first `count` held confirms (None: all). Return the number dropped."""
        dropped = self._take(count)
        for entry in dropped:
            entry.mode = ConfirmMode.DROP
        return len(dropped)

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
            return (frame, *entry.frames) if entry.missing <= 0 else (frame,)
        if entry.mode is ConfirmMode.HOLD:
            entry.frames.append(frame)
        return ()

    def _take(self, count: int | None) -> list[_HeldFrame]:
        size = len(self._held) if count is None else min(count, len(self._held))
        return [self._held.popleft() for _ in range(size)]

    def _forget(self, matches: Callable[[_HeldFrame], bool]) -> None:
        self._held = deque(entry for entry in self._held if not matches(entry))
        self._open = {place: entry for place, entry in self._open.items() if not matches(entry)}
