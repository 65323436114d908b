"""The management API client: responses of a wrong size, speed or shape."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.certificates import Authority
from reliable_mq.cli.doctor import examine
from reliable_mq.cli.doctor.broker import HostEntry
from reliable_mq.cli.doctor.management import Snapshot
from reliable_mq.cli.web import _found_by
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.errors import ConfigurationError
from reliable_mq.monitoring import management
from reliable_mq.monitoring.management import ManagementAPI, ManagementError, rows
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from integration.support.certificates import Certificate

SETTINGS = parse_url("amqp://user:secret@127.0.0.1")


@contextmanager
def answering(
    write: Callable[[http.server.BaseHTTPRequestHandler], object], certificate: Certificate | None = None
) -> Iterator[ManagementAPI]:
    """Serve an API whose responses are written by a function, over TLS with a certificate."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # the client has disconnected
                write(self)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.cert_file, certificate.key_file)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            scheme = "http" if certificate is None else "https"
            yield ManagementAPI.at(f"{scheme}://127.0.0.1:{server.server_address[1]}", SETTINGS, option="url")
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


def json_of(text: str, length: int | None = None) -> Callable[[http.server.BaseHTTPRequestHandler], object]:
    def write(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(text) if length is None else length))
        handler.end_headers()
        handler.wfile.write(text.encode())

    return write


def of_status(status: int) -> Callable[[http.server.BaseHTTPRequestHandler], object]:
    def write(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()

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


@pytest.mark.parametrize("name", ["rabbit.internal", "rabbit.internal."])
def test_the_server_name_of_amqp_is_verified_beside_amqp(
    name: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"amqps://user:secret@127.0.0.1/?cacertfile={authority.file}"
    with answering(json_of("[]"), authority.issue("api", "rabbit.internal")) as served:
        monkeypatch.setitem(management._PORTS, "https", served.port)
        (api,) = ManagementAPI.beside(parse_url(f"{url}&server_name_indication={name}"))
        assert api.get("queues") == []
        (unnamed,) = ManagementAPI.beside(parse_url(url))
        with pytest.raises(ManagementError, match=r"certificate does not verify: .*'127.0.0.1'"):
            unnamed.get("queues")


def test_the_server_name_of_amqp_is_verified_on_its_hosts(authority: Authority) -> None:
    """A tunnel ends at an address, and the certificate is for the name of the broker."""
    amqp = f"cacertfile={authority.file}&server_name_indication=rabbit.internal"
    there, elsewhere = (parse_url(f"amqps://user:secret@{host}/?{amqp}") for host in ("127.0.0.1", "192.0.2.1"))
    with answering(json_of("[]"), authority.issue("api", "rabbit.internal")) as served:
        url = f"https://127.0.0.1:{served.port}"
        assert ManagementAPI.at(url, there, option="url").get("queues") == []
        with pytest.raises(ManagementError, match=r"certificate does not verify: .*'127.0.0.1'"):
            ManagementAPI.at(url, elsewhere, option="url").get("queues")


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


def test_another_fix_is_advised_if_the_certificate_is_wrong(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(json_of("[]"), authority.issue("api", "rabbit.internal")) as api:
        assert "certificate authority" in fix_for(str(api), monkeypatch)


@pytest.mark.parametrize(
    ("status", "start"), [(401, "Check the password"), (403, "Check the password"), (404, "Enable the plugin")]
)
def test_the_plugin_is_advised_only_if_the_api_is_missing(
    status: int, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(of_status(status)) as api:
        assert fix_for(str(api), monkeypatch).startswith(start)


@pytest.mark.parametrize("status", [500, 200])
def test_nothing_is_advised_if_the_api_fails(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of an answer with status 200 is not JSON."""
    with answering(of_status(status)) as api:
        assert fix_for(str(api), monkeypatch) == ""


def test_the_plugin_is_advised_if_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        assert "Enable the plugin" in fix_for(url, monkeypatch)


def fix_for(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the doctor advises about a management API that it cannot read."""
    monkeypatch.setattr(examine, "_existence", lambda *_: [])  # it needs AMQP
    entry = HostEntry(SETTINGS, ServerInfo("RabbitMQ", "4.3.6", (4, 3, 6)), 131072)
    (finding,) = examine._by_management(SETTINGS, entry, [], url)
    return finding.fix
