"""A scripted broker for each test, and each face in turn: what holds for one holds for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tenacity
import uvloop

from integration.support.blocking import BlockingPublisher
from reliable_mq import Publisher
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class OnUvloop(BlockingPublisher):
    loop_factory = staticmethod(uvloop.new_event_loop)


PUBLISHERS: dict[str, type[Any]] = {"sync": Publisher, "aio": BlockingPublisher, "uvloop": OnUvloop}


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


@pytest.fixture(params=PUBLISHERS)
def new_publisher(request: pytest.FixtureRequest, broker: ScriptedBroker) -> Callable[..., Any]:
    """A function that makes a publisher of one face, to the scripted broker, that reconnects at once."""

    def make(url: str = broker.url, **options: Any) -> Any:
        return PUBLISHERS[request.param](
            url, **{"reconnect_wait": tenacity.wait_fixed(0.02), "delivery_timeout": 20, **options}
        )

    return make
