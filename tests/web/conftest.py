"""The dead-letter page on queues in memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from reliable_mq.web import DeadLetterApp
from tests.web.memory_broker import MemoryBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

URL = "amqp://guest:guest@broker.example/shop"
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    made = MemoryBroker()
    monkeypatch.setattr("reliable_mq.web.letters.DeadLetterQueue", made.open)
    monkeypatch.setattr("reliable_mq.web.letters.depths", made.depths)
    return made


@pytest.fixture
def page(broker: MemoryBroker) -> Iterator[Callable[..., TestClient]]:
    """Return a function that creates a page and returns a browser on this machine."""
    apps: list[DeadLetterApp] = []

    def make(queues: Any = ("orders.dead",), *, client: str = "127.0.0.1", **options: Any) -> TestClient:
        app = DeadLetterApp(URL, queues, **options)
        apps.append(app)
        return TestClient(app, "http://localhost", client=(client, 50000), headers=SAME_ORIGIN)

    yield make
    broker.gate.set()
    broker.reading.set()
    for app in apps:
        assert app.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("dead letters orders")]
