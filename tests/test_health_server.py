"""The probes over HTTP: the server thread and the ASGI application."""

from __future__ import annotations

import asyncio
import errno
import http.client
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.routing import Mount

from reliable_mq import Publisher, UsageError
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.publisher import CLOSE_TIMEOUT
from reliable_mq.errors import ConfigurationError
from reliable_mq.health import Health, HealthApp, HealthServer
from reliable_mq.testing.waiting import wait_until
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

WELL = Health(live=True, ready=True, progressing=True, since=1_800_000_000.0)


class Part:
    """A part whose health the test sets."""

    def __init__(self) -> None:
        self.answer: Any = WELL

    def __repr__(self) -> str:
        return "<Part>"

    def health(self) -> Health:
        if isinstance(self.answer, BaseException):
            raise self.answer
        found: Health = self.answer
        return found


def get(server: HealthServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("health", "statuses"),
    [
        (WELL, (200, 200, 200)),
        (Health(True, False, True, 0.0, "not connected"), (200, 503, 200)),
        (Health(False, False, True, 0.0, "stalled"), (503, 503, 200)),
        (Health(True, True, False, 0.0, "stuck"), (200, 200, 503)),
    ],
)
def test_each_question_has_its_path(health: Health, statuses: tuple[int, ...]) -> None:
    part, well = Part(), Part()
    part.answer = health
    with HealthServer(well, part, port=0) as server:
        found = [get(server, path) for path in ("/livez", "/readyz", "/progressz?verbose=1")]
    assert tuple(status for status, _, _ in found) == statuses
    report = json.loads(found[1][2])
    assert report["ready"] is health.ready
    assert [one["part"] for one in report["parts"]] == ["<Part>", "<Part>"]
    assert report["parts"][1]["reason"] == health.reason
    assert report["parts"][0]["since"] == "2027-01-15T08:00:00+00:00"
    assert found[0][1]["Cache-Control"] == "no-store"


def test_draining_is_not_ready_and_lives() -> None:
    with HealthServer(Part(), port=0) as server:
        assert get(server, "/readyz")[0] == 200
        server.drain()
        status, _, body = get(server, "/readyz")
        assert status == 503
        assert json.loads(body)["parts"][1]["reason"] == "draining"
        assert get(server, "/livez")[0] == 200


def test_a_part_that_raises_is_not_live_and_hides_its_text(caplog: pytest.LogCaptureFixture) -> None:
    part = Part()
    part.answer = ValueError("a secret")
    with HealthServer(part, lambda: WELL, port=0) as server:
        status, _, body = get(server, "/livez")
        assert status == 503
        assert b"ValueError" in body
        assert b"a secret" not in body
        part.answer = True
        assert b"returned bool" in get(server, "/livez")[2]
    assert "health() of <Part> raised" in caplog.text


def test_a_part_whose_repr_raises_is_shown_all_the_same() -> None:
    class Unfinished(Part):
        def __repr__(self) -> str:
            raise AttributeError("_name")

    part = Unfinished()
    with HealthServer(part, port=0) as server:
        status, _, body = get(server, "/livez")
        assert status == 200
        assert "Unfinished object at" in json.loads(body)["parts"][0]["part"]
        part.answer = ValueError()
        assert get(server, "/livez")[0] == 503


def test_metrics_are_served_in_the_format_that_is_asked_for() -> None:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc()
    with HealthServer(Part(), port=0, registry=registry) as server:
        status, headers, body = get(server, "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        assert b"things_total 1.0" in body
        _, headers, body = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")
    with HealthServer(Part(), port=0) as server:
        status, _, body = get(server, "/metrics")
        assert status == 404
        assert b"/livez" in body


def test_other_requests_are_refused() -> None:
    with HealthServer(Part(), port=0) as server:
        assert get(server, "/livez", "POST")[0] == 405
        assert get(server, "/")[0] == 404
        status, headers, body = get(server, "/livez", "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0
        for request in (b"\x16\x03\x01 tls\r\n\r\n", b"GET /livez\r\n\r\n", b"GET /livez SMTP\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), timeout=30) as client:
                client.sendall(request)
                assert client.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.slow
def test_slow_clients_hold_up_no_probe_and_are_dropped() -> None:
    """This covers clients that send nothing and clients that send too much."""
    with HealthServer(Part(), port=0) as server:
        address = "127.0.0.1", urlsplit(server.url).port or 0
        silent = [socket.create_connection(address, timeout=30) for _ in range(20)]
        try:
            assert get(server, "/livez")[0] == 200
            silent[0].sendall(b"GET /livez HTTP/1.1\r\nX: " + b"x" * 100_000)
            assert silent[0].recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            assert silent[1].recv(1) == b""  # after a few seconds
            for client in silent:
                client.close()
        assert get(server, "/livez")[0] == 200


def test_many_silent_clients_hold_up_no_probe() -> None:
    """If the connections exceed the limit, the server closes the oldest one."""
    with HealthServer(Part(), port=0) as server:
        address = "127.0.0.1", urlsplit(server.url).port or 0
        silent = [socket.create_connection(address, timeout=30) for _ in range(150)]
        try:
            assert [get(server, "/livez")[0] for _ in range(3)] == [200] * 3
        finally:
            for client in silent:
                client.close()


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each client could hold a copy of all metrics indefinitely."""
    monkeypatch.setattr("reliable_mq.health._PATIENCE", 1.0)
    registry = CollectorRegistry()
    Counter("large", "x" * 20_000_000, registry=registry)
    with HealthServer(Part(), port=0, registry=registry) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect(("127.0.0.1", urlsplit(server.url).port or 0))
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert client.recv(4)  # the server has responded
        # The server closes the connection before the client reads the response or disconnects.
        wait_until(lambda: not _connected_to(server), timeout=30, what="the end of the connection")


def _connected_to(server: HealthServer) -> list[str]:
    """Return the connections of this process that a server holds."""
    port = f":{urlsplit(server.url).port or 0:04X}"
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
    established = [line for line in lines[1:] if line[1].endswith(port) and line[3] in ("01", "08")]
    return [line[9] for line in established]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("parts", HealthServer),
        ("part", lambda: HealthServer(object())),  # type: ignore[arg-type]
        ("host", lambda: HealthServer(Part(), host="")),
        ("port", lambda: HealthServer(Part(), port=65536)),
        ("port", lambda: HealthServer(Part(), port=True)),
        ("registry", lambda: HealthApp(Part(), registry="default")),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_named(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError, match=name):
        make()


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid"])
def test_an_address_that_cannot_be_listened_at_is_named(host: str) -> None:
    with pytest.raises(ConfigurationError, match=f"host '{host}', port 0: cannot be listened at"):
        HealthServer(Part(), host=host, port=0).start()


def test_a_port_in_use_is_named() -> None:
    with HealthServer(Part(), port=0) as server:
        port = urlsplit(server.url).port or 0
        with pytest.raises(ConfigurationError, match=f"port {port}"):
            HealthServer(Part(), port=port).start()
        with pytest.raises(UsageError, match="started before"):
            server.start()
    server.close()
    with pytest.raises(OSError, match=r"refused|reset"):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert not [one for one in threading.enumerate() if one.name == "reliable_mq health"]


def test_a_server_without_a_thread_leaves_its_port() -> None:
    server = HealthServer(Part(), port=0)
    with refusing_threads("health"), pytest.raises(RuntimeError, match="can't start new thread"):
        server.start()
    with pytest.raises(OSError, match=r"refused|reset"):
        socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), timeout=5)
    with server:
        assert get(server, "/livez")[0] == 200


def test_a_server_whose_loop_fails_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(main: Coroutine[Any, Any, None]) -> Never:
        main.close()
        raise OSError(errno.EMFILE, "Too many open files")

    server = HealthServer(Part(), port=0)
    monkeypatch.setattr(asyncio, "run", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        server.start()
    monkeypatch.undo()
    with server:
        assert get(server, "/livez")[0] == 200


def test_a_part_that_is_callable_is_asked_for_its_health() -> None:
    class Application(Part):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

    with HealthServer(Application(), port=0) as server:
        assert get(server, "/livez")[0] == 200


def test_a_part_that_exits_does_not_end_the_server() -> None:
    part = Part()
    part.answer = SystemExit(3)
    with HealthServer(part, port=0) as server:
        for _ in range(2):
            status, _, body = get(server, "/livez")
            assert status == 503
            assert "its health() raised SystemExit" in body.decode()


@pytest.mark.parametrize("since", [float("nan"), 1e30, None])
def test_a_part_of_no_known_time_is_not_live(since: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The other parts are shown as well, so that it is known which one is wrong."""
    part, well = Part(), Part()
    part.answer = Health(True, True, True, since)
    with HealthServer(part, well, port=0) as server:
        status, _, body = get(server, "/livez")
    assert status == 503
    assert [part["live"] for part in json.loads(body)["parts"]] == [False, True]
    assert "<Part> raised" in caplog.text


def test_it_answers_until_publishers_have_ended_at_exit() -> None:
    """Hooks of publishers run at exit while the probe responds."""
    program = """
        import sys, urllib.request, urllib.error
        from reliable_mq._util.hooks import ExitStage, at_exit
        from reliable_mq.health import Health, HealthServer

        server = HealthServer(lambda: Health(True, True, True, 0.0), port=0)
        server.start()
        at_exit(ExitStage.PUBLISHERS, lambda: print(urllib.request.urlopen(server.url + "/livez").status))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "200\n"


def test_a_forked_child_does_not_keep_the_port() -> None:
    with HealthServer(Part(), port=0) as server:
        port = urlsplit(server.url).port
        child = os.fork()
        if not child:
            signal.pause()  # until it is killed
            os._exit(0)
        try:
            assert get(server, "/livez")[0] == 200
            server.close()
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                wait_until(lambda: binds(other, port), timeout=30, what="the port to be free")
                other.listen()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def binds(listener: socket.socket, port: int | None) -> bool:
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_the_application_is_served_alone_and_mounted() -> None:
    part = Part()
    registry = CollectorRegistry()
    app = HealthApp(part, registry=registry)
    mounted = Starlette(routes=[Mount("/health", app=app)])

    async def ask(application: Any, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://probe") as client:
            return await client.get(path)

    for application, prefix in ((app, ""), (mounted, "/health")):
        response = asyncio.run(ask(application, f"{prefix}/readyz"))
        assert response.status_code == 200
        assert response.json()["ready"] is True
        assert asyncio.run(ask(application, f"{prefix}/metrics")).status_code == 200
    part.answer = Health(True, False, True, time.time(), "not connected")
    assert asyncio.run(ask(app, "/readyz")).status_code == 503
    part.answer = WELL
    app.drain()
    assert asyncio.run(ask(app, "/readyz")).status_code == 503


ODD_FORMATS = [
    "application/openmetrics-text; version=latest",
    "text/plain; version=v1",
    "application/openmetrics-text; version=",
    "application/openmetrics-text; version=1.0.0; escaping=odd",
    "text/plain; version=1.0.0; escaping=",
    ";;;,,,=",
    "\xff",
]


@pytest.mark.parametrize("accept", ODD_FORMATS)
def test_a_format_that_is_none_is_answered_all_the_same(accept: str) -> None:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc()
    with HealthServer(Part(), port=0, registry=registry) as server:
        status, headers, body = get(server, "/metrics", Accept=accept)
    assert status == 200
    assert b"things_total 1.0" in body
    if "version=latest" in accept or "v1" in accept:
        assert headers["Content-Type"].startswith("text/plain")


def test_a_collector_that_raises_is_a_500_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> list[Any]:
            raise ZeroDivisionError("of the user")

    registry = CollectorRegistry()
    registry.register(Broken())  # type: ignore[arg-type]
    with HealthServer(Part(), port=0, registry=registry) as server:
        status, _, body = get(server, "/metrics")
        assert get(server, "/livez")[0] == 200
    assert (status, body) == (500, b"a collector of the metrics raised an error\n")
    (line,) = caplog.records
    assert line.getMessage() == "failed to render the metrics: a collector raised ZeroDivisionError: of the user"
    assert line.exc_info is None

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=HealthApp(Part(), registry=registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://probe") as client:
            return await client.get("/metrics", headers={"Accept": ODD_FORMATS[0]})

    assert asyncio.run(ask()).status_code == 500


def test_a_slow_collector_holds_up_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes are refused until the collector returns, and are served again then."""
    asked, over = threading.Event(), threading.Event()

    class Slow:
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> list[Any]:
            asked.set()
            over.wait(30)
            return []

    monkeypatch.setattr("reliable_mq.health._PATIENCE", 1.0)
    registry = CollectorRegistry()
    registry.register(Slow())  # type: ignore[arg-type]
    statuses: list[int] = []
    with HealthServer(Part(), port=0, registry=registry) as server:
        scraper = threading.Thread(target=lambda: statuses.append(get(server, "/metrics")[0]))
        scraper.start()
        try:
            assert asked.wait(30)
            began = time.monotonic()
            assert get(server, "/livez")[0] == 200
            assert time.monotonic() - began < 1
            scraper.join(30)
            status, _, body = get(server, "/metrics")
            assert (status, body) == (503, b"a collector of the metrics has not returned\n")
        finally:
            over.set()
            scraper.join(30)
        assert statuses == [503]
        wait_until(lambda: get(server, "/metrics")[0] == 200, timeout=30, what="a scrape")


def test_scrapes_at_the_same_time_are_all_served() -> None:
    class Pausing:
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> list[Any]:
            time.sleep(0.05)
            return []

    registry = CollectorRegistry()
    registry.register(Pausing())  # type: ignore[arg-type]
    with HealthServer(Part(), port=0, registry=registry) as server, ThreadPoolExecutor(4) as scrapers:
        assert [*scrapers.map(lambda _: get(server, "/metrics")[0], range(8))] == [200] * 8


def test_the_application_begins_and_ends_with_its_server() -> None:
    events = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        return {"type": next(events)}

    async def send(message: dict[str, str]) -> None:
        sent.append(message["type"])

    asyncio.run(HealthApp(Part())({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(UsageError, match="websocket"):
        asyncio.run(HealthApp(Part())({"type": "websocket"}, receive, send))


def test_no_answer_shows_a_password() -> None:
    publisher = Publisher("amqp://user:canary-password@127.0.0.1:1/")
    with HealthServer(publisher, port=0) as server:
        body = get(server, "/readyz")[2]
    assert b"not started" in body
    assert b"canary" not in body
    publisher.close()


def test_the_manual_manifest_is_valid_and_uses_existing_paths() -> None:
    """Liveness does not use readiness, and the grace period covers the shutdown."""
    page = (Path(__file__).parent.parent / "docs/guides/kubernetes.md").read_text()
    manifest = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])
    pod = manifest["spec"]["template"]["spec"]
    [container] = pod["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    stop_timeout = inspect.signature(ConsumerOptions.__init__).parameters["stop_timeout"].default
    pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pre_stop + stop_timeout + CLOSE_TIMEOUT
    with HealthServer(Part(), port=0) as server:
        assert {get(server, path)[0] for path in paths.values()} == {200}
