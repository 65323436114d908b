"""The command ``reliable-mq stage``: move queues into streams, each message once."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Annotated, Final

import typer

from reliable_mq._util.signals import stop_signals_handled
from reliable_mq.cli.terminal import INTERRUPTED, URL, MetricsAddress, MetricsPort, metrics_served, say
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliable_mq.stage import StageRelay

_DRAIN: Final = 30.0  # seconds for outstanding confirms at the end
_NAMES: Final = {
    "queue": "QUEUE",
    "stage": "STREAM",
    "partitions": "--partitions",
    "key": "--key",
    "retention": "--retention",
    "max_bytes": "--max-bytes",
    "confirm_timeout": "--confirm-timeout",
    "missing_queue_timeout": "--missing-queue-timeout",
}  # the options, as the user writes them
_CHECK_EVERY: Final = 0.2  # seconds between two checks of the relays


def stage(
    url: URL,
    pairs: Annotated[
        list[str],
        typer.Argument(metavar="QUEUE STREAM ...", help="An existing queue, and the stream to move its messages into."),
    ],
    *,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Make each stage a super stream with this number of partitions.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="What selects the partition: message_id (the default), routing_key or header:NAME."),
    ] = None,
    retention: Annotated[
        str, typer.Option(help="The minimum time for which a stage keeps messages, such as 12h or 7D; 0 for no limit.")
    ] = "7D",
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="The size in bytes above which a partition drops its oldest messages.")
    ] = None,
    missing_id: Annotated[
        str,
        typer.Option(
            metavar="refuse|repeat",
            help="At a message without a message_id: end, or move it, possibly twice if the relay dies.",
        ),
    ] = "refuse",
    messages_per_entry: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="The maximum number of messages in one message of STREAM. Other programs can read a STREAM with 1.",
        ),
    ] = 1,
    max_outstanding: Annotated[
        int, typer.Option(min=1, max=65_535, help="The maximum number of unacked messages.")
    ] = 2000,
    confirm_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="The time without a confirm after which a relay reconnects.")
    ] = 30.0,
    missing_queue_timeout: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="How long a QUEUE or STREAM may be missing before the command ends."
        ),
    ] = 60.0,
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = None,
) -> None:
    """Move queues into streams until SIGTERM or SIGINT, for Spark's staged mode.

    Each message is published to the stream, confirmed, and then acked. After a crash, messages that are in the stream
    are not moved again. Of several relays with the same STREAM, one is active, and the others wait.
    """
    from reliable_mq.stage import MissingId, StageOptions, StageRelay

    if len(pairs) % 2:
        raise typer.BadParameter("each QUEUE needs a STREAM: give pairs of QUEUE and STREAM")
    try:
        missing = MissingId(missing_id)
    except ValueError:
        raise typer.BadParameter("--missing-id must be refuse or repeat") from None
    if key is None:
        key = "message_id"
    elif key not in ("message_id", "routing_key") and not (key.startswith("header:") and len(key) > len("header:")):
        raise typer.BadParameter(f"--key must be message_id, routing_key or header:NAME, not {key!r}")
    elif partitions is None:
        raise typer.BadParameter("--key needs --partitions: without them, each message goes to the one STREAM")
    staged = list(zip(pairs[::2], pairs[1::2], strict=True))
    if len({name for _, name in staged}) < len(staged):
        raise ConfigurationError("two queues have the same STREAM: a stage has one relay, give each queue its own")
    queues = [name for name, _ in staged]
    for name in queues:
        if queues.count(name) > 1:
            raise ConfigurationError(f"{name} is named twice: each of its messages would be in one of the stages only")
    options = [
        StageOptions(
            url=url,
            queue=queue,
            stage=name,
            partitions=partitions,
            key=key,
            retention=None if retention == "0" else retention,
            max_bytes=max_bytes,
            missing_id=missing,
            messages_per_entry=messages_per_entry,
            max_outstanding=max_outstanding,
            confirm_timeout=confirm_timeout,
            missing_queue_timeout=missing_queue_timeout,
            names=_NAMES,
        )
        for queue, name in staged
    ]
    received: list[int] = []
    with (
        stop_signals_handled(lambda number, _frame: received.append(number)),
        metrics_served(metrics_address, metrics_port) as registry,
    ):
        relays = [StageRelay(each, registry=registry) for each in options]
        try:
            for relay in relays:
                relay.start()
            _wait(relays, received)
        finally:
            _close(relays)
    moved = sum(relay.statistics.moved for relay in relays)
    say(f"{moved:,} messages moved")
    for relay in relays:
        if relay.error is not None:
            raise relay.error
    if signal.SIGINT in received:
        raise typer.Exit(INTERRUPTED)


def _wait(relays: list[StageRelay], received: list[int]) -> None:
    """Wait for a signal, or until a relay has ended with an error."""
    idle = threading.Event()
    while not received and all(relay.error is None for relay in relays):
        idle.wait(_CHECK_EVERY)


def _close(relays: list[StageRelay]) -> None:
    """Close all relays concurrently: each waits for its confirms."""
    from reliable_mq._util.threads import start_daemon

    for thread in [start_daemon("stage drain", relay.close, _DRAIN) for relay in relays]:
        thread.join()
