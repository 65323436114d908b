"""The private layers of aiormq that the driver uses.

A failure shows what aiormq has moved.
"""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from typing import Any

import aiormq
import aiormq.exceptions
import pytest
from aiormq.abc import TaskWrapper
from aiormq.base import Base, FutureStore
from aiormq.connection import Connection, FrameReceiver, TransportFactory

LAYERS: list[tuple[Any, str, tuple[str, ...]]] = [
    # what the driver overrides or calls, and the parameters that it relies on
    (TransportFactory, "create", ("self", "url", "kwargs")),
    (Connection, "connect", ("self", "client_properties")),
    (Connection, "_credentials_class", ("self", "start_frame")),
    (Base, "close", ("self", "exc", "timeout")),
]

MOVED = f"aiormq {version('aiormq')} has moved what reliable_mq.connection.aiormq_driver relies on: "


@pytest.mark.parametrize(("owner", "name", "parameters"), LAYERS, ids=lambda value: getattr(value, "__name__", None))
def test_a_layer_is_where_the_driver_expects_it(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    layer = getattr(owner, name, None)
    assert layer is not None, f"{MOVED}{owner.__name__}.{name} is gone"
    found = tuple(inspect.signature(layer).parameters)
    assert found == parameters, f"{MOVED}{owner.__name__}.{name} takes {found}, not {parameters}"


def test_what_the_driver_relies_on_inside_the_layers() -> None:
    arguments = inspect.signature(Connection.__init__).parameters
    for name in ("url", "transport_factory", "client_properties"):
        assert name in arguments, f"{MOVED}the argument {name} of a connection"
    source = inspect.getsource(Connection)
    for what, text in (
        ("the transport of a connection", "self._transport_factory.create("),
        ("who chooses the mechanism", "self._credentials_class(frame)"),
        ("what is asked of a mechanism", "credentials.value(self).marshal()"),
        ("its name", "mechanism=credentials.name"),
        ("the virtual host", "spec.Connection.Open(virtual_host=self.vhost)"),
        ("limits are taken as they are offered", "frame_max=connection_tune.frame_max"),
        ("heartbeats as we ask for them", "connection_tune.heartbeat = self.heartbeat_timeout"),
        ("every frame is a sign of life", "self.__last_frame_time = self.loop.time()"),
        ("when a peer is dead", "(self.heartbeat_timeout + 1) * self.HEARTBEAT_GRACE_MULTIPLIER"),
        ("how often it looks", "max(1, self.heartbeat_timeout // 2)"),
        ("whole frames are written in one piece", "writer.write(channel_frame.payload)"),
        ("the task that reads", "self._reader_task = self.create_task("),
        ("the task that writes", "self._writer_task = self.create_task("),
        ("what the broker says of itself", "self.server_properties = server_properties"),
    ):
        assert text in source, f"{MOVED}{what}"
    assert isinstance(Connection.is_connection_was_stuck, property), f"{MOVED}whether a peer is dead"
    assert isinstance(Base.closing, property), f"{MOVED}the future of the end"
    assert "self.reader.readexactly" in inspect.getsource(FrameReceiver.get_frame), f"{MOVED}frames are read otherwise"
    wrapped = "TaskWrapper(self.loop.create_task(coro))"
    assert wrapped in inspect.getsource(FutureStore.create_task), f"{MOVED}its tasks are wrapped otherwise"
    assert "self.task = task" in inspect.getsource(TaskWrapper.__init__), f"{MOVED}the task in its wrapper"
    for name in ("AMQPConnectionError", "ProtocolSyntaxError", "IncompatibleProtocolError"):
        assert issubclass(getattr(aiormq.exceptions, name), Exception), f"{MOVED}its exceptions"


def test_the_clock_of_heartbeats_does_not_jump() -> None:
    """Wall-clock jumps must not affect heartbeats and deadlines.

    The loop's clock is monotonic.
    """
    assert "time.monotonic()" in inspect.getsource(asyncio.BaseEventLoop.time)
