"""The management API client: responses of a wrong size, speed or shape."""

from __future__ import annotations

import http.server
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.cli.doctor.management import Snapshot
from reliable_mq.cli.web import _found_by
from reliable_mq.errors import ConfigurationError
from reliable_mq.monitoring import management
from reliable_mq.monitoring.management import ManagementAPI, ManagementError, rows
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SETTINGS = parse_url("amqp://user:secret@127.0.0.1")


@contextmanager
def answering(write: Callable[[http.server.BaseHTTPRequestHandler], object]) -> Iterator[ManagementAPI]:
    """Serve an API whose responses are written by a function."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # the client has disconnected
                write(self)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield ManagementAPI.at(f"http://127.0.0.1:{server.server_address[1]}", SETTINGS, option="url")
        finally:
            server.shutdown()
            thread.join()


def json_of(text: str, length: int | None = None) -> Callable[[http.server.BaseHTTPRequestHandler], object]:
    def write(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(text) if length is None else length))
        handler.end_headers()
        handler.wfile.write(text.encode())

    return write


def slow(where: str) -> Callable[[http.server.BaseHTTPRequestHandler], object]:
    def write(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if where == "body" else b"X: "))
        while True:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            threading.Event().wait(0.01)

    return write


def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"[" * 65536)


def test_an_answer_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "_MOST", 1024 * 1024)
    with answering(endless) as api, pytest.raises(ManagementError, match="more than 1 MiB"):
        api.get("queues")


@pytest.mark.parametrize("where", ["head", "body"])
def test_an_answer_is_bounded_in_time_as_a_whole(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "_TOTAL", 0.3)
    with answering(slow(where)) as api, pytest.raises(ManagementError, match="no answer in time"):
        api.get("queues")


def test_a_path_is_sent_as_a_browser_sends_it() -> None:
    paths: list[str] = []

    def write(handler: http.server.BaseHTTPRequestHandler) -> None:
        paths.append(handler.path)
        json_of("[]")(handler)

    with answering(write) as api:
        for prefix in ("/caf\u00e9 1;v=2/", "/caf%C3%A9%201;v=2"):
            assert ManagementAPI.at(f"{api}{prefix}", SETTINGS, option="url").get("queues", "a/b") == []
    assert paths == ["/caf%C3%A9%201;v=2/api/queues/a%2Fb"] * 2


def test_an_answer_that_ends_early_is_an_error() -> None:
    with answering(json_of("[]", length=10**12)) as api, pytest.raises(ManagementError, match="IncompleteRead"):
        api.get("queues")


@pytest.mark.parametrize("text", ["{}", "[1]", "null", "[{}]", '[{"name": 5}]', '"x"'])
def test_an_answer_of_another_shape_is_no_flaw_of_ours(text: str) -> None:
    with answering(json_of(text)) as api:
        with pytest.raises(ManagementError, match="this is not RabbitMQ's API: the answer about queues"):
            Snapshot.take(api, "/")
        find = _found_by(SETTINGS, str(api))
        with pytest.raises(ConfigurationError, match="this is not RabbitMQ's API"):
            find()


@pytest.mark.parametrize(
    "field",
    [
        '"arguments": [1]',
        '"messages": "many"',
        '"members": 5',
        '"messages_details": [1]',
        '"type": 5',
        '"arguments": {"x-expires": "z"}',
        '"effective_policy_definition": {"dead-letter-exchange": 5}',
    ],
)
def test_a_queue_of_another_shape_is_no_flaw_of_ours(field: str) -> None:
    with (
        answering(json_of(f'[{{"name": "q", {field}}}]')) as api,
        pytest.raises(ManagementError, match=r"this is not RabbitMQ's API: .* of queues is a"),
    ):
        Snapshot.take(api, "/")


def test_empty_fields_are_taken_for_missing_ones() -> None:
    """Some releases write an empty table as a list."""
    with answering(json_of('[{"name": "q", "arguments": [], "effective_policy_definition": []}]')) as api:
        assert Snapshot.take(api, "/").queues["q"].argument("message-ttl") is None
        assert [row["name"] for row in rows(api, "queues", named=True)] == ["q"]
