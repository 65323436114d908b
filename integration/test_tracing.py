"""One trace over publish, retries in a delay queue, dead letter and replay.

This holds for both APIs.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.command_line import run_cli
from reliable_mq import AsyncConsumer, Consumer, Delivery, Message, Publisher, Queue, RetryPolicy
from reliable_mq.testing.waiting import wait_until
from tests.tracing.spans import Recorder, context_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.testing import VirtualHost

ORDERS = Queue("orders")
RETRY = RetryPolicy(3, delays=(0.2,))


def consume(
    vhost: VirtualHost,
    handler: Callable[[Delivery], None],
    until: Callable[[], object],
    *,
    once: bool = False,
    **options: Any,
) -> None:
    """Consume until a condition is true. With `once`, the handler is called once."""

    def handle(delivery: Delivery) -> None:
        if once:
            consumer.stop()
        handler(delivery)

    consumer = Consumer(vhost.url, ORDERS, handle, **options)
    with consumer:
        wait_until(until, timeout=60, what="the end of the consumer's work")


def consume_on_asyncio(
    vhost: VirtualHost,
    handler: Callable[[Delivery], None],
    until: Callable[[], object],
    *,
    once: bool = False,
    **options: Any,
) -> None:
    """Do the same as `consume` on asyncio."""

    async def main() -> None:
        async def coroutine(delivery: Delivery) -> None:
            if once:
                consumer.stop()
            handler(delivery)

        consumer = AsyncConsumer(vhost.url, ORDERS, coroutine, **options)
        async with consumer:
            await asyncio.to_thread(wait_until, until, timeout=60, what="the end of the consumer's work")

    asyncio.run(main())


@pytest.mark.parametrize("run", [consume, consume_on_asyncio])
def test_retries_dead_letter_and_replay_are_in_one_trace(vhost: VirtualHost, run: Callable[..., None]) -> None:
    recorder = Recorder()
    mended = threading.Event()
    handled = threading.Event()

    def handle(_: Delivery) -> None:
        if not mended.is_set():
            raise ValueError("no stock")
        handled.set()

    def dead_lettered() -> bool:
        return any(span.name == "ack orders" for span in recorder.spans) and "send orders.dead" in names()

    def names() -> list[str]:
        return [span.name for span in recorder.spans]

    options = {"tracing": recorder.tracing, "retry": RETRY, "new_queue_grace": 0}
    with Publisher(vhost.url, topology=[ORDERS], tracing=recorder.tracing, new_queue_grace=0) as publisher:
        publisher.publish(Message(b"1"), routing_key="orders")
    run(vhost, handle, dead_lettered, **options)
    trace_id = f"{context_of(recorder.named('send orders')).trace_id:032x}"

    shown = run_cli("dlq", "show", vhost.url, "orders.dead")
    assert shown.returncode == 0, shown.stderr
    assert trace_id in shown.stdout.decode()
    replayed = run_cli("dlq", "replay", vhost.url, "orders.dead")
    assert replayed.returncode == 0, replayed.stderr
    mended.set()
    run(vhost, handle, handled.is_set, **options)

    spans = sorted(recorder.spans, key=lambda span: span.start_time or 0)
    assert {f"{context_of(span).trace_id:032x}" for span in spans} == {trace_id}
    attempts = [span for span in spans if span.name.startswith("process")]
    assert [(span.attributes or {})["reliable_mq.outcome"] for span in attempts] == ["failed"] * 3 + ["handled"]
    creation = context_of(recorder.named("send orders")).span_id
    for before, after in itertools.pairwise(attempts):  # the last pair spans the replay
        assert [link.context.span_id for link in after.links] == [creation, context_of(before).span_id]
    assert names().count("send orders.retry.200") == 2
    assert names().count("send orders.dead") == 1


def take_and_lose(vhost: VirtualHost) -> None:
    """Get the message and lose it, as a consumer killed by its message does."""
    vhost.wait_for_messages("orders", 1)
    with vhost.connect() as connection:
        assert connection.channel().basic_get("orders")[0] is not None


@pytest.mark.parametrize(
    ("run", "failed_before"),
    [
        (consume, True),
        (consume_on_asyncio, False),
        pytest.param(consume, False, marks=pytest.mark.soak),
        pytest.param(consume_on_asyncio, True, marks=pytest.mark.soak),
    ],
)
def test_a_suspect_goes_through_quarantine_in_its_trace(
    vhost: VirtualHost, run: Callable[..., None], failed_before: bool
) -> None:
    """Its attempt there links to the last one that ended.

    Attempts that killed their consumer left no span.
    """
    recorder = Recorder()
    handled = threading.Event()

    def fail(_: Delivery) -> None:
        raise ValueError("no stock")

    def delayed() -> bool:
        return any(span.name == "ack orders" for span in recorder.spans)

    options = {"tracing": recorder.tracing, "retry": RETRY, "new_queue_grace": 0}
    with Publisher(vhost.url, topology=[ORDERS], tracing=recorder.tracing, new_queue_grace=0) as publisher:
        publisher.publish(Message(b"1"), routing_key="orders")
    if failed_before:
        run(vhost, fail, delayed, once=True, **options)  # the next attempt would be a moment later
    for _ in range(2):
        take_and_lose(vhost)
    vhost.wait_for_messages("orders", 1)
    run(vhost, lambda _: handled.set(), handled.is_set, **options)

    spans = sorted(recorder.spans, key=lambda span: span.start_time or 0)
    first, *copies = [span for span in spans if span.name.startswith("send")]
    *before, last = [span for span in spans if span.name.startswith("process")]
    assert {context_of(span).trace_id for span in spans} == {context_of(first).trace_id}
    # It waits in a delay queue after a failed attempt and before quarantine.
    waits = ["send orders.retry.200"] * (len(before) + 1)
    assert [span.name for span in copies] == [*waits, "send orders.quarantine"]
    assert len(before) == failed_before
    assert last.attributes is not None
    assert last.attributes["reliable_mq.outcome"] == "handled"
    assert last.attributes["reliable_mq.attempt"] == 1 + failed_before
    parents = [span.parent.span_id for span in (copies[-1], last) if span.parent is not None]
    assert parents == [context_of([first, *before][-1]).span_id, context_of(first).span_id]
    assert [link.context.span_id for link in last.links] == [context_of(span).span_id for span in (first, *before)]
