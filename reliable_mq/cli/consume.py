"""The command ``reliable-mq consume``: write messages, then ack or requeue them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from reliable_mq.cli.terminal import URL, ended_by, product, say

if TYPE_CHECKING:
    from reliable_mq import Consumer, Delivery

_AHEAD: Final = 200  # maximum unacked deliveries
_LONG: Final = 3600.0  # seconds; longer than stopping takes
_PEEK_WAIT: Final = 1.0  # seconds without a delivery after which all messages were seen
_PEEK_MOST: Final = 65_535  # the largest possible prefetch
_POLL_EVERY: Final = 0.05  # seconds between two polls of the connection


def consume(
    url: URL,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="An existing queue, which is no stream.")],
    *,
    ack: Annotated[bool, typer.Option("--ack", help="Ack each message when it is written.")] = False,
    peek: Annotated[
        bool,
        typer.Option("--peek", help=f"Write at most {_PEEK_MOST} messages, and requeue all of them at the end."),
    ] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Maximum number of messages.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="End after these seconds without a message, while connected. Default: 1 with --peek, none with --ack.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, with properties, as publish --json reads it.")
    ] = False,
) -> None:
    """Write the messages of a queue to standard output, one per line.

    Without --json, a message is written as its body and a line end. On a terminal, control characters are escaped. If
    --count is not reached, the exit status is 1; without --count, also if --peek reaches its limit.

    Messages that were only peeked at, or prefetched, are requeued and marked as redelivered. A quorum queue may change
    their order, and up to RabbitMQ 4.2 it counts them against its delivery limit. A message in a pipe counts as
    written: with `| head -5`, also use --count 5.
    """
    if ack == peek:
        raise typer.BadParameter("give either --ack or --peek")
    if peek and count is not None and count > _PEEK_MOST:
        raise typer.BadParameter(f"--count is at most {_PEEK_MOST} with --peek: RabbitMQ delivers no more without acks")
    from reliable_mq.deadletters.jsonl import write_line
    from reliable_mq.retry import MOST_ATTEMPTS, RetryPolicy
    from reliable_mq.sync.consumer import Consumer

    follower = _Follower(
        product(as_json=as_json),
        write_line if as_json else _body,
        keep=peek,
        count=count,
        timeout=_PEEK_WAIT if peek and timeout is None else timeout,
    )
    prefetch = min(count or _PEEK_MOST, _PEEK_MOST if peek else _AHEAD)
    consumer = Consumer(
        url,
        queue,
        follower.handle,
        prefetch=prefetch,
        retry=RetryPolicy(MOST_ATTEMPTS, delays=(0,)),  # whatever the policy of the queue's own consumer is
        dead_letter=None,  # it creates no dead letters
        name="reliable-mq consume",
    )
    follower.follow(consumer)
    raise typer.Exit(follower.status)


def _body(delivery: Delivery) -> bytes:
    return delivery.body


class _Follower:
    """A writer of deliveries, until the count, the timeout or a closed pipe.

    Unacked deliveries are held until the consumer stops, and are then requeued.
    """

    def __init__(
        self,
        out: BinaryIO,
        form: Callable[[Delivery], bytes],
        *,
        keep: bool,
        count: int | None,
        timeout: float | None,
    ) -> None:
        self._out = out
        self._form = form
        self._keep = keep
        self._count = count
        self._timeout = timeout
        self._written = 0
        self._changed = threading.Condition()
        self._status: int | None = None  # None while running
        self._signal: int | None = None
        self._error: OSError | None = None
        self._writing = False
        self._latest = time.monotonic()

    @property
    def status(self) -> int:
        if self._status is not None:
            return self._status
        return 1 if self._signal is None else ended_by(self._signal)

    def follow(self, consumer: Consumer) -> None:
        """Run the consumer to the end."""
        from reliable_mq._util.threads import start_daemon
        from reliable_mq.sync.consumer import run_to_signal

        start_daemon("stop-when-over", self._stop_when_over, consumer)
        self._signal = run_to_signal(consumer)
        if self._error is not None:
            raise self._error
        if self._status and self._is_cut_off:
            say(f"{self._written} messages written, the limit of --peek; more may be in the queue")

    def handle(self, delivery: Delivery) -> None:
        """Write a delivery. When this returns, the pipe or the file has received it."""
        if self._status is None:
            self._writing = True
            try:
                self._out.write(self._form(delivery) + b"\n")
                self._out.flush()
            except OSError as error:
                # A reader that closed the pipe needs no more output: that is not a failure.
                self._end(0, None if isinstance(error, BrokenPipeError) else error)
            else:
                self._written += 1
                if self._written == self._count:
                    self._end(0)
                if not self._keep:
                    return
            finally:
                self._latest = time.monotonic()
                self._writing = False
        from reliable_mq import RetryLater

        raise RetryLater(_LONG)

    @property
    def _is_cut_off(self) -> bool:
        """Whether the prefetch is full, so that RabbitMQ delivers no further message."""
        return self._keep and self._count is None and self._written >= _PEEK_MOST

    def _end(self, status: int, error: OSError | None = None) -> None:
        with self._changed:
            self._status, self._error = status, error
            self._changed.notify_all()

    def _stop_when_over(self, consumer: Consumer) -> None:
        with self._changed:
            while self._status is None:
                if self._timeout is None:
                    self._changed.wait()
                elif not consumer.connected or self._writing:  # both may take longer than the timeout
                    self._latest = time.monotonic()
                    self._changed.wait(_POLL_EVERY)
                elif (remaining := self._latest + self._timeout - time.monotonic()) > 0:
                    self._changed.wait(min(remaining, _POLL_EVERY))
                else:
                    self._status = 0 if self._count is None and not self._is_cut_off else 1
        consumer.stop()
