"""The private layers of pika that the driver uses.

A failure shows what pika has moved.
"""

from __future__ import annotations

import inspect
from typing import Any

import pika
import pytest
from pika import frame, spec
from pika.adapters.base_connection import BaseConnection
from pika.adapters.select_connection import IOLoop, SelectConnection
from pika.adapters.utils import connection_workflow, io_services_utils
from pika.adapters.utils.nbio_interface import AbstractTimerReference
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter
from pika.connection import Connection

LAYERS: list[tuple[Any, str, tuple[str, ...]]] = [
    # what the driver overrides or calls, and the parameters that it relies on
    (Connection, "_on_data_available", ("self", "data_in")),
    (Connection, "_process_frame", ("self", "frame_value")),
    (Connection, "_output_marshaled_frames", ("self", "marshaled_frames")),
    (Connection, "_terminate_stream", ("self", "error")),
    (BaseConnection, "_proto_connection_made", ("self", "transport")),
    (BaseConnection, "_proto_connection_lost", ("self", "error")),
    (io_services_utils._AsyncTransportBase, "_consume", ("self",)),
    (io_services_utils._AsyncTransportBase, "_produce", ("self",)),
    (io_services_utils._AsyncTransportBase, "get_write_buffer_size", ("self",)),
    (io_services_utils._AsyncPlaintextTransport, "write", ("self", "data")),
    (io_services_utils._AsyncSSLTransport, "write", ("self", "data")),
    (IOLoop, "add_callback_threadsafe", ("self", "callback")),
    (IOLoop, "call_later", ("self", "delay", "callback")),
    (IOLoop, "add_handler", ("self", "fd", "handler", "events")),
    (SelectorIOServicesAdapter, "call_later", ("self", "delay", "callback")),
    (AbstractTimerReference, "cancel", ("self",)),
    (
        SelectorIOServicesAdapter,
        "getaddrinfo",
        ("self", "host", "port", "on_done", "family", "socktype", "proto", "flags"),
    ),
    (frame, "decode_frame", ("data_in",)),
]


@pytest.mark.parametrize(("owner", "name", "parameters"), LAYERS, ids=lambda value: getattr(value, "__name__", None))
def test_a_layer_is_where_the_driver_expects_it(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    layer = getattr(owner, name, None)
    where = f"pika {pika.__version__}: {owner.__name__}.{name}, which reliable_mq.connection.pika_driver uses,"
    assert layer is not None, f"{where} is gone"
    found = tuple(inspect.signature(layer).parameters)
    assert found == parameters, f"{where} takes {found}, not {parameters}"


def source(layer: Any) -> str:
    return inspect.getsource(layer)


def test_what_the_driver_relies_on_inside_the_layers() -> None:
    moved = f"pika {pika.__version__} has moved what reliable_mq.connection.pika_driver relies on: "
    transport = io_services_utils._AsyncTransportBase
    assert isinstance(transport._MAX_RECV_BYTES, int), f"{moved}the size of a read"
    assert isinstance(transport._MAX_CONSUME_BYTES, int), f"{moved}how much is read in one turn"
    for name in ("self._MAX_RECV_BYTES", "bytes_consumed < self._MAX_CONSUME_BYTES"):
        assert name in source(transport._consume), f"{moved}a read does not look at {name}"
    assert "self._sock" in source(transport._produce), f"{moved}the socket of a transport"
    assert "self._state != self._STATE_ACTIVE" in source(io_services_utils._AsyncPlaintextTransport.write), (
        f"{moved}the state of a transport"
    )
    for kind in (io_services_utils._AsyncPlaintextTransport, io_services_utils._AsyncSSLTransport):
        assert "self._produce" in source(kind), f"{moved}{kind.__name__} does not send through self._produce"
    plaintext, tls = io_services_utils._AsyncPlaintextTransport, io_services_utils._AsyncSSLTransport
    assert "self._consume()" in source(plaintext._on_socket_readable), f"{moved}how plaintext is read"
    assert "self._ssl_readable_action = self._consume" in source(tls._consume), f"{moved}how TLS is read"
    assert "self._on_data_available(data)" in source(BaseConnection._proto_data_received), f"{moved}input"
    assert "self._transport" in source(BaseConnection._adapter_emit_data), f"{moved}output"
    assert "self._connection.bytes_received" in source(
        pika.heartbeat.HeartbeatChecker.bytes_received_on_connection.fget
    ), f"{moved}heartbeats do not count bytes_received"
    for text in ("self._check_interval = timeout + 5", "return self._idle_byte_intervals > 0"):
        assert text in source(pika.heartbeat.HeartbeatChecker), f"{moved}when a peer is dead"
    assert "if not self._channels:" in source(Connection.close), f"{moved}a connection without channels closes at once"
    assert "if self._callbacks" in source(IOLoop._get_remaining_interval), f"{moved}the length of a poll"
    assert "self._callbacks.popleft()" in source(IOLoop.process_timeouts), f"{moved}the queue of calls"
    failed = connection_workflow.AMQPConnectionWorkflowFailed([ValueError()])
    assert isinstance(failed.exceptions, tuple), f"{moved}the exceptions of a failed attempt"
    phase = connection_workflow.AMQPConnectorSocketConnectError(ValueError())
    assert isinstance(phase, connection_workflow.AMQPConnectorPhaseErrorBase)
    assert isinstance(phase.exception, ValueError), f"{moved}the cause of a failed attempt"


def test_the_clock_of_timers_does_not_jump() -> None:
    """Wall-clock jumps must not affect heartbeats and deadlines."""
    assert "time.monotonic()" in source(pika.compat.time_now)


def test_frames_are_taken_as_the_driver_gives_them() -> None:
    data = frame.Method(0, spec.Connection.CloseOk()).marshal()
    consumed, value = frame.decode_frame(data)
    assert (consumed, value.method.INDEX) == (len(data), spec.Connection.CloseOk.INDEX)


def test_the_connection_takes_io_services_of_ours() -> None:
    assert "nbio_interface.AbstractIOServices" in source(SelectConnection.__init__)
