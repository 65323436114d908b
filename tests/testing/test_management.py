"""The client of the management API reports a broker that does not answer."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from reliable_mq.errors import LabError
from reliable_mq.testing.management import Management


def test_a_refused_connection_names_the_plugin() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # refuses connections, because it does not listen
        management = Management(f"http://127.0.0.1:{bound.getsockname()[1]}")

        with pytest.raises(LabError, match=r"GET /api/overview: .*127\.0\.0\.1:.*refused.*management plugin"):
            management.call("GET", "overview")


def test_a_connection_without_a_response_names_the_plugin() -> None:
    """Docker's port proxy accepts the connection if no server in the container listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        management = Management(f"http://127.0.0.1:{server.getsockname()[1]}")
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(management.alarms)
            server.accept()[0].close()

            with pytest.raises(LabError, match="management plugin"):
                call.result(10)


def test_a_response_that_ends_early_is_no_answer() -> None:
    """The broker was killed while it responded."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        management = Management(f"http://127.0.0.1:{server.getsockname()[1]}")
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(management.connections, "/")
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[")

            with pytest.raises(LabError, match=r"IncompleteRead.*start the broker"):
                call.result(10)
