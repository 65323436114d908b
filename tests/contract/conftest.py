"""Fixtures: a scripted broker for each test, and clients of each API.

A contract test runs once for each API, and in `make soak` on uvloop, too. The tests of `test_event_loop` always do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import tenacity
import uvloop

from integration.support import blocking_consumer
from integration.support.blocking import BlockingPublisher, Loop, UvloopPublisher
from integration.support.blocking_consumer import BlockingConsumer, PlainBlockingConsumer
from reliable_mq import Consumer, Publisher
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


PUBLISHERS: dict[str, type[Any]] = {"sync": Publisher, "aio": BlockingPublisher, "uvloop": UvloopPublisher}
# Coroutine handlers, plain handlers on threads, and coroutine handlers on the other event loop.
CONSUMERS: dict[str, type[Any]] = {
    "sync": Consumer,
    "aio": BlockingConsumer,
    "aio-plain": PlainBlockingConsumer,
    "uvloop": BlockingConsumer,
}


def _left_to_soak(apis: Iterable[str]) -> list[Any]:
    """Leave uvloop to `make soak`."""
    return [pytest.param(api, marks=pytest.mark.soak if api == "uvloop" else ()) for api in apis]


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


@pytest.fixture(params=_left_to_soak(PUBLISHERS))
def new_publisher(request: pytest.FixtureRequest, broker: ScriptedBroker) -> Callable[..., Any]:
    """Return a function that makes publishers of one API.

    They connect to the scripted broker, and reconnect at once.
    """

    def make(url: str = broker.url, **options: Any) -> Any:
        return PUBLISHERS[request.param](
            url, **{"reconnect_wait": tenacity.wait_fixed(0.02), "delivery_timeout": 20, **options}
        )

    return make


@pytest.fixture(params=_left_to_soak(CONSUMERS))
def new_consumer(
    request: pytest.FixtureRequest, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that makes consumers of the queue ``orders`` in one API."""
    if request.param == "uvloop":
        monkeypatch.setattr(blocking_consumer, "Loop", partial(Loop, uvloop.new_event_loop))

    def make(
        handler: Callable[[Any], object] | None = None, queue: Any = "orders", url: str = broker.url, **options: Any
    ) -> Any:
        options = {"reconnect_wait": tenacity.wait_fixed(0.02), "stop_timeout": 5, **options}
        return CONSUMERS[request.param](url, queue, handler, **options)

    return make


@pytest.fixture
def new_publisher_of_the_sync_api(broker: ScriptedBroker) -> Callable[..., Any]:
    """Return a function that makes publishers of the sync API.

    It is for tests whose other clients use each API in turn.
    """
    return partial(Publisher, broker.url, delivery_timeout=20)
