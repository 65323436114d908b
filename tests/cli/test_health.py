"""`reliable-mq health`: the exit status, and the reasons that it prints."""

from __future__ import annotations

import http.server
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from reliable_mq.cli import app
from reliable_mq.health import Health, HealthServer
from reliable_mq.testing.containers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["reliable-mq", "health", *arguments])
    return app.run()


def test_the_exit_status_is_the_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    health = Health(live=True, ready=False, progressing=True, since=0.0, reason="not connected: \x1b[31mreset")
    with HealthServer(lambda: health, port=0) as server:
        assert run(monkeypatch, f"{server.url}/livez") == 0
        assert run(monkeypatch, f"{server.url}/readyz") == 1
        assert run(monkeypatch, server.url) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "live, not ready, progressing since 1970-01-01T00:00:00+00:00: not connected: " in lines[0]
    assert "\x1b" not in lines[0]


def test_no_answer_is_a_failure_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, f"http://127.0.0.1:{free_port()}/livez", "--timeout", "2") == 1
    error = capsys.readouterr().err
    assert error.startswith("reliable-mq: no response from 127.0.0.1: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("timeout", ["inf", "1e10"])
def test_a_timeout_too_long_for_a_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timeout: str
) -> None:
    """The error is about the option, and not about the program, which may be well."""
    assert run(monkeypatch, "http://127.0.0.1:1", "--timeout", timeout) == 1
    assert capsys.readouterr().err.startswith("reliable-mq: --timeout must be a number of seconds from 0 to 1e9")


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "amqp://guest:secret@host/", "http://", "http://host:port/"])
def test_what_is_no_url_of_a_probe_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert run(monkeypatch, url) == 1
    error = capsys.readouterr().err
    assert "probe" in error
    assert "secret" not in error


@pytest.fixture
def other_server() -> Iterator[str]:
    """A web server that has no probes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path == "/other" else 200)
            self.end_headers()
            self.wfile.write(b'{"parts": [{"live": true}, 5]}' if self.path == "/parts" else b'{"parts": []}')

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/json", "did not respond like a probe"),
        ("/parts", "did not respond like a probe"),
        ("/other", "responded with 404"),
        ("/é", "not ASCII"),
    ],
)
def test_another_server_is_not_taken_for_a_probe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other_server: str, path: str, text: str
) -> None:
    assert run(monkeypatch, other_server + path) == 1
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_trickles_does_not_hold_up_the_probe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each byte arrives in time, but the whole response does not."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            client, _ = listening.accept()
            with client, suppress(OSError):
                while not over.wait(0.1):
                    client.sendall(b"H")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert run(monkeypatch, f"http://127.0.0.1:{listening.getsockname()[1]}/livez", "--timeout", "1") == 1
        finally:
            over.set()
            thread.join()
    assert "not complete within 1 s" in capsys.readouterr().err
