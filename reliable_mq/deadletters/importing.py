"""Import dead letters: publish JSON lines into a queue, in batches.

Invariants:

- A line is confirmed only if RabbitMQ has confirmed its message. Any other line is a failure, with its number, unless
  it is blank.
- The report is complete up to the end of a batch. If a run is interrupted, each line up to there is confirmed, failed
  or blank, and later lines may have arrived.
- A run tries no more lines if RabbitMQ settled no message of a batch within its time, or if the connection is lost and
  does not come back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from reliable_mq.codec import CodecError, Properties, join_properties
from reliable_mq.deadletters.jsonl import is_blank, read_line
from reliable_mq.deadletters.replay import Progress, none_was_settled
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, PublishError, ReliableMQError
from reliable_mq.message import Message
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.publisher import Publisher

_BATCH: Final = 1000  # messages
_BATCH_BYTES: Final = 32 * 1024 * 1024  # less than a publisher holds


@dataclass(slots=True)
class ImportReport:
    """The counts of an import.

    Attributes:
        lines: The number of lines up to the end of the last batch. Each is confirmed, failed or blank. An import that
            was interrupted goes on with the next line.
        confirmed: The number of confirmed messages.
        sent_again: The number of confirmed messages that were published again because a confirm was lost with its
            connection. Each may be in the queue twice.
        failures: The numbers of the failed lines, from 1, each with its error.
    """

    lines: int = 0
    confirmed: int = 0
    sent_again: int = 0
    failures: list[tuple[int, ReliableMQError]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all messages were confirmed."""
        return not self.failures


class Import:
    """One run of an import, with the options of `DeadLetterQueue.import_lines`."""

    def __init__(self, publisher: Publisher, queue: str, *, progress: Progress | None, report: ImportReport) -> None:
        self._publisher = publisher
        self._queue = queue
        self._progress = progress
        self._report = report
        self._waiting: list[tuple[int, Confirmation]] = []
        self._failed: list[tuple[int, ReliableMQError]] = []  # of this batch
        self._bytes = 0  # of this batch
        self._submitted = False  # whether any line was submitted
        self._ended: ReliableMQError | None = None  # the reason why no more lines are tried

    def run(self, lines: Iterable[bytes]) -> ImportReport:
        """Run to the end. Blocks.

        Raises:
            BrokerUnavailable: If no host could be reached, or none accepted the login. No message was published.
        """
        number = 0
        for number, line in enumerate(lines, start=1):
            if is_blank(line):
                continue
            if self._ended is None:
                self._submit(number, line)
            else:
                self._failed.append((number, self._ended))
            if len(self._waiting) >= _BATCH or self._bytes >= _BATCH_BYTES:
                self._collect(number)
        self._collect(number)
        return self._report

    def _submit(self, number: int, line: bytes) -> None:
        self._bytes += len(line)
        try:
            confirmation = self._publisher.submit(_imported(line), routing_key=self._queue)
        except (ConfigurationError, PublishError) as error:
            self._failed.append((number, error))
        except BrokerUnavailable as error:
            if not self._submitted:
                raise
            self._ended = error
            self._failed.append((number, error))
        else:
            self._submitted = True
            self._waiting.append((number, confirmation))

    def _collect(self, number: int) -> None:
        """Wait for the confirms of the batch, which ends with a line, and report it."""
        errors = [confirmation.exception() for _, confirmation in self._waiting]
        for (line, confirmation), error in zip(self._waiting, errors, strict=True):
            if error is None:
                self._report.confirmed += 1
                self._report.sent_again += confirmation.receipt().possible_duplicate
            else:
                self._failed.append((line, error))
        if none_was_settled(errors):
            self._ended = BrokerUnavailable(
                f"not tried, because none of {len(errors)} messages before it was confirmed in time: does the broker "
                "have an alarm, or the queue no leader?"
            )
        self._report.lines = number
        self._report.failures += sorted(self._failed, key=lambda failure: failure[0])
        self._waiting.clear()
        self._failed.clear()
        self._bytes = 0
        if self._progress is not None:
            self._progress(number, number)


def _imported(line: bytes) -> Message:
    message = read_line(line).message
    view = Properties(message.encoded_properties or join_properties({}))
    try:
        routing = view.headers_beginning("CC").keys() | view.headers_beginning("BCC").keys()
    except CodecError as error:
        raise ConfigurationError(f"its headers are broken: {error}") from error
    if {"CC", "BCC"} & routing:
        raise ConfigurationError("it has a CC or BCC header, which would route it to other queues too")
    return message
