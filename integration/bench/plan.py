"""The plan of a run: the numbers of messages and rounds, and the points of curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from integration.bench.contender import Contender, Role

__all__ = ["FULL", "QUICK", "Plan", "Point", "rotated"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve: window, message size, and the number of messages."""

    axis: str  # "window" or "size", whichever varies
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
        rounds: How often each contender runs. Medians are reported.
        published: Messages of a pipelined publisher.
        published_one_by_one: Messages of a publisher that waits after every message.
        consumed: Messages of a consumer.
        held: Outstanding messages of a memory contender.
        windows, sizes: The points of the curves.
        curve_rounds: How often each point is measured.
        curve_messages, curve_bytes: The maximum at a point. A window of 1 gets at most `published_one_by_one` messages.
        rest: Maximum seconds to wait before each process until the machine is idle.
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
    """Return the items in the order of round `number`.

    Each round starts with another item, and every other round runs backwards.
    """
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
