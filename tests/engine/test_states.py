"""The states of publishers and consumers follow the tables, on both APIs.

This holds whatever is called. No broker.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reliable_mq import (
    AsyncConsumer,
    AsyncPublisher,
    BrokerUnavailable,
    Consumer,
    Message,
    Publisher,
    Queue,
    ReliableMQError,
    UsageError,
)
from reliable_mq.engine import consumer, publisher
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.sync.publisher_channel import PublisherChannel
from tests.contract.scripted_broker import ScriptedBroker
from tests.transitions import changes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


def follows(transitions: Mapping[str, Mapping[Any, set[Any]]], born: object = None) -> type:
    allowed = changes(transitions)

    class Follows:
        """Refuses state changes that are not in the table, and records the others."""

        seen: ClassVar[set[tuple[Any, Any]]] = set()

        def __setattr__(self, name: str, value: object) -> None:
            before = vars(self).get("_state", born)
            if name == "_state" and before is not None and value is not before:
                assert (before, value) in allowed, f"from {before} to {value}"
                self.seen.add((before, value))
            super().__setattr__(name, value)

    return Follows


class CheckedPublisher(follows(publisher.TRANSITIONS), Publisher):  # type: ignore[misc]
    pass


class CheckedAsyncPublisher(follows(publisher.TRANSITIONS), AsyncPublisher):  # type: ignore[misc]
    pass


class CheckedConsumer(follows(consumer.TRANSITIONS, consumer.RunState.IDLE), Consumer):  # type: ignore[misc]
    pass


class CheckedAsyncConsumer(follows(consumer.TRANSITIONS, consumer.RunState.IDLE), AsyncConsumer):  # type: ignore[misc]
    pass


def handle(_: object) -> None:
    raise AssertionError


def arguments(call: str) -> tuple[list[Any], dict[str, Any]]:
    if call in ("publish", "submit"):
        return [Message(b"")], {"timeout": 0.01}
    if call == "publish_many":
        return [[Message(b"")]], {"timeout": 0.01}
    if call == "__exit__":
        return [ValueError, ValueError(), None], {}
    return [], {"timeout": 0} if call in ("flush", "close") else {}


async def use(made: Any, calls: list[str]) -> None:
    """Make the calls one after the other. Every error is one of this package."""
    for call in calls:
        name = call if isinstance(made, Publisher | Consumer) else call.replace("__e", "__ae")
        given, options = arguments(call) if isinstance(made, Publisher | AsyncPublisher) else ([], {})
        if call == "__exit__":
            given = [ValueError, ValueError(), None]
        with suppress(ReliableMQError, TimeoutError):
            result = getattr(made, name)(*given, **options)
            if asyncio.iscoroutine(result):
                await result


def check(made: Any, calls: list[str], end: object) -> None:
    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(use(made, [*calls, "close"]))
    finally:
        logging.disable(logging.NOTSET)
    assert made._state is end


few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
calls_of_publishers = st.lists(
    st.sampled_from(["publish", "submit", "publish_many", "flush", "connect", "close", "__enter__", "__exit__"]),
    max_size=4,
)
calls_of_consumers = st.lists(st.sampled_from(["stop", "connect", "close", "__enter__", "__exit__"]), max_size=4)


@pytest.mark.parametrize("kind", [CheckedPublisher, CheckedAsyncPublisher])
@pytest.mark.parametrize("stored", [False, True], ids=["", "outbox"])
@given(calls=calls_of_publishers)
@few
def test_a_publisher_follows_its_table(kind: Any, stored: bool, calls: list[str], tmp_path: Path) -> None:
    outbox = SQLiteOutbox(tmp_path / "outbox") if stored else None
    options = {"connect_timeout": 1, "delivery_timeout": 0.05, "outbox": outbox}
    check(kind(NOBODY, **options), calls, publisher.PublisherState.CLOSED)


@pytest.mark.parametrize("kind", [CheckedConsumer, CheckedAsyncConsumer])
@given(calls=calls_of_consumers)
@few
def test_a_consumer_follows_its_table(kind: Any, calls: list[str]) -> None:
    check(kind(NOBODY, Queue("orders"), handle, connect_timeout=1), calls, consumer.RunState.FINISHED)


def test_every_transition_of_a_publisher_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler interrupts the start of a publisher, and closes it."""
    made = CheckedPublisher(NOBODY, connect_timeout=1)
    made.seen.clear()
    with suppress(ReliableMQError):
        made.connect()
    made.close(0)
    interrupted = CheckedPublisher(NOBODY, connect_timeout=1)
    monkeypatch.setattr(PublisherChannel, "start", lambda _: interrupted.close(0))
    with pytest.raises(UsageError):
        interrupted.connect()
    assert made.seen == changes(publisher.TRANSITIONS)


def test_every_transition_of_a_consumer_happens() -> None:
    def make(url: str) -> Any:
        return CheckedConsumer(url, Queue("orders", dead_letter=None), handle, connect_timeout=10)

    never_started = make(NOBODY)
    never_started.seen.clear()
    never_started.stop()
    never_started.close()
    without_broker = make(NOBODY)
    with pytest.raises(BrokerUnavailable):
        without_broker.connect()
    with ScriptedBroker() as broker:
        with make(broker.url):
            pass
        connected, entered = make(broker.url), make(broker.url)
        connected.connect()
        connected.close()
        entered.connect()
        with entered:
            pass
    assert never_started.seen == changes(consumer.TRANSITIONS)
