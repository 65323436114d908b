"""What a contender is, what it is asked to do, and what it answers.

Invariants:

- a contender runs in a process of its own and shares nothing with the others but the broker;
- everything it publishes is persistent and confirmed, everything it consumes is acked by hand; the runner checks this
  afterwards, by the number of messages in the queue;
- what is measured lies between `Meter.start` and `Meter.stop`: connecting, importing and warming up do not count.
"""

from __future__ import annotations

import enum
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["Bar", "Contender", "Job", "Limit", "Measure", "Meter", "Role", "Sample", "Unavailable", "peak_rss", "rss"]

_STATUS = Path("/proc/self/status")


class Unavailable(Exception):
    """A contender cannot run on this machine; the message says why."""


class Role(enum.StrEnum):
    """What a contender does."""

    PUBLISHER = "publisher"  # publishes job.messages, and knows that each was confirmed
    CONSUMER = "consumer"  # consumes job.messages that are in the queue, and acks each
    STREAM = "stream"  # reads job.messages that are in the stream, from its first on
    MEMORY = "memory"  # holds job.messages outstanding on a peer that confirms only the last, when it has come


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a contender; its fields are the options of the command line that all contenders share.

    Attributes:
        url: of the broker.
        queue: where to; it exists, and is durable.
        messages: how many are measured.
        size: bytes of each body.
        window: how many may be outstanding.
        prefetch: of a consumer.
        ack_every: a consumer acks so many deliveries at a time.
        warmup: messages to publish before the clock starts.
    """

    url: str
    queue: str = ""
    messages: int
    size: int = 1024
    window: int = 2000
    prefetch: int = 300
    ack_every: int = 100
    warmup: int = 0

    @property
    def body(self) -> bytes:
        return b"x" * self.size

    def arguments(self) -> list[str]:
        """Return this as command line options."""
        return [
            word
            for field in fields(self)
            for word in (f"--{field.name.replace('_', '-')}", str(getattr(self, field.name)))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one run measured.

    Attributes:
        messages: how many.
        wall_seconds, cpu_seconds: for all of them; CPU is user and system time of all threads of the client.
        peak_rss_bytes: of the client's process, from its start.
        rss_growth_bytes: of a memory contender, what its outstanding messages added, their bodies left out.
    """

    messages: int
    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    rss_growth_bytes: int | None = None


class Measure(enum.Enum):
    """What is compared."""

    RATE = "msg/s"
    CPU = "µs CPU/message"
    MEMORY = "bytes/message"

    def of(self, sample: Sample) -> float:
        if self is Measure.RATE:
            return sample.messages / sample.wall_seconds
        if self is Measure.CPU:
            return sample.cpu_seconds / sample.messages * 1e6
        return (sample.rss_growth_bytes or 0) / sample.messages


@dataclass(frozen=True, slots=True)
class Limit:
    """A measure's least or greatest allowed value: a number, or a multiple of another contender's value."""

    measure: Measure
    value: float
    of: str | None = None

    def keeps(self, value: float) -> bool:
        """Whether a value, or the ratio that was measured, is within this."""
        return value >= self.value if self.measure is Measure.RATE else value <= self.value


@dataclass(frozen=True, slots=True)
class Bar:
    """What a contender has to reach: at least one of the limits."""

    contender: str
    any_of: tuple[Limit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to publish or to consume.

    Attributes:
        name: short and unique, for the command line and for bars.
        label: for tables.
        role: what it does.
        run: does a job, in a fresh interpreter.
        program: in place of `run`: makes a program that takes the common options, and returns its command line; it
            runs once, before anything is measured. Raises Unavailable.
        one_by_one: it waits for the broker at every message, and so gets fewer of them.
        identified: the messages that it consumes have a ``message_id`` each.
        reference: others of its role are compared with it, in a column under this heading.
        curve: it is in the plots over window and message size.
    """

    name: str
    label: str
    role: Role
    run: Callable[[Job], Sample] | None = None
    program: Callable[[], Sequence[str]] | None = None
    one_by_one: bool = False
    identified: bool = False
    reference: str = ""
    curve: bool = False


class Meter:
    """Wall clock and CPU time, between the last `start` and `stop`.

    Args:
        cpu_seconds: tells the CPU time; by default that of this process.
    """

    def __init__(self, cpu_seconds: Callable[[], float] | None = None) -> None:
        self._cpu_seconds = cpu_seconds or _cpu_seconds
        self._wall = self._cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._cpu_seconds()

    def look(self) -> None:
        """Have the CPU time told, where it is of processes that may be gone at the end."""
        self._cpu_seconds()

    def stop(self, messages: int) -> Sample:
        wall, cpu = time.perf_counter() - self._wall, self._cpu_seconds() - self._cpu
        return Sample(messages=messages, wall_seconds=wall, cpu_seconds=cpu, peak_rss_bytes=peak_rss())


def rss() -> int:
    """Return the resident set size of this process, in bytes.

    Raises:
        Unavailable: this system has no /proc.
    """
    return _status("VmRSS")


def peak_rss() -> int:
    """Return the peak resident set size of this process, in bytes."""
    try:
        return _status("VmHWM")
    except Unavailable:
        # Where there is /proc, this is the wrong number: it starts at the peak of the process that spawned this one.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(key: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError as error:
        raise Unavailable(f"memory is measured from {_STATUS}: {error}") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
