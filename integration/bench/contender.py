"""Contenders, their jobs and their results.

Invariants:

- a contender runs in a separate process and shares only the broker with the others;
- everything it publishes is persistent and confirmed, everything it consumes is acked manually; the runner checks this
  afterwards, by the number of messages in the queue;
- only the time between `Meter.start` and `Meter.stop` is measured: connecting, importing and warming up do not count.
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
    """The role of a contender."""

    PUBLISHER = "publisher"  # publishes job.messages, and checks that each is confirmed
    CONSUMER = "consumer"  # consumes job.messages from the queue, and acks each
    STREAM = "stream"  # reads job.messages from the beginning of the stream
    MEMORY = "memory"  # keeps job.messages outstanding on a peer that confirms only the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a contender. Its fields are the common command-line options.

    Attributes:
        url: The URL of the broker.
        queue: The name of the queue, which exists and is durable.
        messages: The number of messages to measure.
        size: The size of each body, in bytes.
        window: The maximum number of outstanding messages.
        prefetch: The prefetch of a consumer.
        ack_every: The number of deliveries that a consumer acks at a time.
        warmup: The number of messages to publish before the clock starts.
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
        """Return the job as command-line options."""
        return [
            word
            for field in fields(self)
            for word in (f"--{field.name.replace('_', '-')}", str(getattr(self, field.name)))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The result of one run.

    Attributes:
        messages: The number of messages.
        wall_seconds, cpu_seconds: For all messages. CPU time is the user and system time of all threads of the client.
        peak_rss_bytes: For the client's process, since its start.
        rss_growth_bytes: For a memory contender, the growth by its outstanding messages, without their bodies.
    """

    messages: int
    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    rss_growth_bytes: int | None = None


class Measure(enum.Enum):
    """A measure by which contenders are compared."""

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
    """The limit of a measure: a number, or a multiple of another contender's value."""

    measure: Measure
    value: float
    of: str | None = None

    def keeps(self, value: float) -> bool:
        """Return whether a measured value or ratio is within the limit."""
        return value >= self.value if self.measure is Measure.RATE else value <= self.value


@dataclass(frozen=True, slots=True)
class Bar:
    """A requirement for a contender: it must reach at least one of the limits."""

    contender: str
    any_of: tuple[Limit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to publish or to consume.

    Attributes:
        name: A short and unique name, for the command line and for bars.
        label: The label in tables.
        role: The role.
        run: Does a job, in a fresh interpreter.
        program: In place of `run`. Builds a program that takes the common options, and returns its command line. Called
            once, before anything is measured. Raises Unavailable.
        one_by_one: Whether it waits for the broker after every message, and so gets fewer messages.
        identified: Whether the messages that it consumes have a ``message_id`` each.
        reference: The heading of a column that compares others of the same role with it. Empty for no column.
        curve: Whether it is in the plots over window and message size.
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
    """Measures wall clock and CPU time between the last `start` and `stop`.

    Args:
        cpu_seconds: Returns the CPU time. By default that of this process.
    """

    def __init__(self, cpu_seconds: Callable[[], float] | None = None) -> None:
        self._cpu_seconds = cpu_seconds or _cpu_seconds
        self._wall = self._cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._cpu_seconds()

    def look(self) -> None:
        """Read the CPU time, because some of the processes may have ended before `stop`."""
        self._cpu_seconds()

    def stop(self, messages: int) -> Sample:
        wall, cpu = time.perf_counter() - self._wall, self._cpu_seconds() - self._cpu
        return Sample(messages=messages, wall_seconds=wall, cpu_seconds=cpu, peak_rss_bytes=peak_rss())


def rss() -> int:
    """Return the resident set size of this process, in bytes.

    Raises:
        Unavailable: If this system has no /proc.
    """
    return _status("VmRSS")


def peak_rss() -> int:
    """Return the peak resident set size of this process, in bytes."""
    try:
        return _status("VmHWM")
    except Unavailable:
        # With /proc, this number is wrong: it starts at the peak of the process that spawned this one.
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
