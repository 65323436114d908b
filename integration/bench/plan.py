"""What a run measures: how many messages, how many rounds, which points of the curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from integration.bench.contender import Contender, Role

__all__ = ["FULL", "QUICK", "Plan", "Point", "rotated"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve: a window and a message size, and how many messages are published there."""

    axis: str  # "window" or "size": what varies
    window: int
    size: int
    messages: int

    @property
    def x(self) -> int:
        return self.window if self.axis == "window" else self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a run.

    Attributes:
        rounds: how often everyone runs; medians are reported.
        published: messages of a pipelined publisher.
        published_one_by_one: of one that waits at every message.
        consumed: by a consumer.
        held: outstanding messages of a memory contender.
        windows, sizes: the points of the curves.
        curve_rounds: how often each point is measured.
        curve_messages, curve_bytes: at most so many at a point; a window of 1 gets `published_one_by_one`.
        rest: seconds to wait before each process until the machine has nothing else to do.
    """

    rounds: int
    published: int
    published_one_by_one: int
    consumed: int
    held: int
    windows: tuple[int, ...]
    sizes: tuple[int, ...]
    curve_rounds: int
    curve_messages: int
    curve_bytes: int = 128 * 1024 * 1024
    rest: float = 20.0
    window: int = 2000
    size: int = 1024
    held_size: int = 10

    def messages(self, contender: Contender) -> int:
        if contender.role in (Role.CONSUMER, Role.STREAM):
            return self.consumed
        if contender.role is Role.MEMORY:
            return self.held
        return self.published_one_by_one if contender.one_by_one else self.published

    def points(self) -> list[Point]:
        return [Point("window", window, self.size, self._at(window, self.size)) for window in self.windows] + [
            Point("size", self.window, size, self._at(self.window, size)) for size in self.sizes
        ]

    def _at(self, window: int, size: int) -> int:
        return max(min(self.curve_messages, self.curve_bytes // size, self.published_one_by_one * window), 1)


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return the items in the order of round `number`: another first each time, and every other time backwards."""
    order = list(items) if number % 2 == 0 else list(reversed(items))
    shift = number // 2 % len(order) if order else 0
    return order[shift:] + order[:shift]


FULL = Plan(
    rounds=3,
    published=100_000,
    published_one_by_one=4_000,
    consumed=200_000,
    held=1_000_000,
    windows=(1, 10, 30, 100, 300, 1000, 2000, 5000, 10_000),
    sizes=(100, 1024, 10 * 1024, 100 * 1024, 1024 * 1024),
    curve_rounds=1,
    curve_messages=50_000,
)
QUICK = Plan(
    rounds=1,
    published=5_000,
    published_one_by_one=300,
    consumed=10_000,
    held=50_000,
    windows=(1, 100, 10_000),
    sizes=(100, 1024 * 1024),
    curve_rounds=1,
    curve_messages=3_000,
    curve_bytes=16 * 1024 * 1024,
    rest=0.0,
)
