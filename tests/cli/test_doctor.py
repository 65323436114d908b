"""``doctor`` without a broker: unreachable hosts, management API, and report."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from reliable_mq.cli.app import app
from reliable_mq.cli.doctor import broker, examine
from reliable_mq.cli.doctor.broker import HostEntry, examine_alarms
from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import QueueView, Snapshot
from reliable_mq.cli.doctor.queues import examine_queues
from reliable_mq.codec.methods import DeclareQueue
from reliable_mq.core.channel_setup import ServerInfo, StepRefused
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, PublishRefused
from reliable_mq.monitoring import management
from reliable_mq.monitoring.management import ManagementAPI, ManagementError
from reliable_mq.settings import Credentials
from reliable_mq.tls import TLSOptions
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator


SECRET = "canary-password"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_an_unreachable_host_is_a_problem_and_shows_no_password() -> None:
    url = f"amqp://user:{SECRET}@127.0.0.1:{free_port()}"
    for options in ([], ["--json"]):
        result = CliRunner().invoke(app, ["doctor", url, *options])
        assert result.exit_code == 1
        assert "cannot be reached: Connection refused" in result.output
        assert SECRET not in result.output


def test_a_silent_host_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:
        hosts = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, other))
        (found,) = examine._write(f"amqp://u:p@{hosts}/?connection_timeout=1000", "nowhere")
        other.settimeout(0)
        other.accept()[0].close()
    assert (found.status, found.check) == (Status.UNCHECKED, "write")


def test_a_port_that_speaks_something_else_is_not_let_pass() -> None:
    with http_server({}) as port:
        url = f"amqp://user:{SECRET}@127.0.0.1:{port}?connection_timeout=500"
        result = CliRunner().invoke(app, ["doctor", url, "--json"])
    assert result.exit_code == 1
    written = json.loads(result.output)
    assert [(each["check"], each["status"]) for each in written["findings"]] == [
        ("reachable", "ok"),
        ("TLS", "ok"),
        ("login", "problem"),
        ("everything", "not checked"),
    ]
    assert written["status"] == "problem"


def test_a_port_without_tls_is_told_from_a_bad_certificate() -> None:
    with http_server({}) as port:
        result = CliRunner().invoke(app, ["doctor", f"amqps://user:{SECRET}@127.0.0.1:{port}", "--json"])
    tls = json.loads(result.output)["findings"][1]
    assert (tls["check"], tls["status"]) == ("TLS", "problem")
    assert tls["text"].startswith("the handshake failed")


@pytest.mark.parametrize(
    ("url", "check", "fix"),
    [
        ("amqp://u:p@localhost:15672", "login", "15672 is the port of the management API. AMQP uses 5672"),
        ("amqp://u:p@localhost:5671", "login", "Use amqps://"),
        ("amqp://u:p@localhost:5673", "login", "Is this an AMQP port"),
        ("amqps://u:p@localhost:5672", "TLS", "5672 is the port without TLS"),
        ("amqps://u:p@localhost:5673", "TLS", "5671 by default"),
    ],
)
def test_a_port_that_is_often_taken_for_another_is_named(url: str, check: str, fix: str) -> None:
    settings = parse_url(url)
    (endpoint,) = settings.endpoints
    if check == "login":
        found = broker._refused(settings, endpoint, BrokerUnavailable("closed before the handshake"))
    else:
        ours, theirs = socket.socketpair()
        with ours:
            theirs.close()
            assert settings.tls is not None
            found = broker._tls(settings.tls, endpoint, ours)
    assert (found.check, found.status) == (check, Status.PROBLEM)
    assert fix in found.fix


@pytest.mark.parametrize(
    ("refused", "permanent", "check"),
    [
        ("530 NOT_ALLOWED - vhost limited not found", True, "virtual host"),
        ("530 NOT_ALLOWED - access to vhost 'q' refused for user 'limiter'", True, "virtual host"),
        ("530 NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (1) is reached", False, "login"),
        ("403 ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN", True, "credentials"),
    ],
)
def test_a_name_with_limit_in_it_is_no_connection_limit(refused: str, permanent: bool, check: str) -> None:
    settings = parse_url("amqp://u:p@localhost/limited")
    error = BrokerUnavailable(f"localhost:5672: refused by the broker: {refused}", permanent=permanent)
    found = broker._refused(settings, settings.endpoints[0], error)
    assert (found.check, found.status) == (check, Status.PROBLEM)


def test_a_broker_that_knows_no_queue_types_keeps_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """It declares the queue that the check of permissions asks for. A queue that expires is gone soon."""
    performed: list[object] = []
    old_broker = nullcontext(SimpleNamespace(perform=performed.append))
    monkeypatch.setattr(examine, "AdminChannel", lambda *_, **__: old_broker)
    monkeypatch.setattr(examine, "_write", lambda *_: [])
    found = examine.examine_permissions("amqp://localhost", parse_url("amqp://localhost"), [])
    assert [(each.status, each.check) for each in found] == [
        (Status.UNCHECKED, "configure"),
        (Status.UNCHECKED, "read"),
    ]
    assert [step.arguments["x-expires"] for step in performed if isinstance(step, DeclareQueue)] == [1]


@pytest.mark.parametrize(("queues", "missing"), [([], Status.WARNING), (["orders"], Status.PROBLEM)])
def test_a_named_queue_must_be_readable_and_writable(
    monkeypatch: pytest.MonkeyPatch, queues: list[str], missing: Status
) -> None:
    """A queue can be used by its name without the permission to declare it."""

    class Forbidding:
        blocked = None

        def perform(self, _: object) -> None:
            raise StepRefused(403, "ACCESS_REFUSED")

        def connect(self) -> None: ...

        def publish(self, *_: object, **__: object) -> None:
            raise PublishRefused("no permission", reply_code=403, reply_text="ACCESS_REFUSED")

        def close(self, _: float) -> None: ...

    monkeypatch.setattr(examine, "AdminChannel", lambda *_, **__: nullcontext(Forbidding()))
    monkeypatch.setattr(examine, "Publisher", lambda *_, **__: Forbidding())
    found = examine.examine_permissions("amqp://localhost", parse_url("amqp://localhost"), queues)
    assert [(each.status, each.check) for each in found] == [
        (Status.WARNING, "configure"),
        (missing, "read"),
        (missing, "write"),
    ]


def test_a_host_whose_name_begins_with_queue_comes_first() -> None:
    subjects = ["queue 'q'", "queues", "permissions", "broker", "queue-1.example.com:5672"]
    ordered = sorted((Finding(Status.OK, subject, "check", "text") for subject in subjects), key=examine._place)
    assert [finding.subject for finding in ordered] == [
        "queue-1.example.com:5672",
        "broker",
        "permissions",
        "queue 'q'",
        "queues",
    ]


def test_the_report_shows_and_counts_findings_with_their_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding(Status.OK, "host:5672", "reachable", "accepts connections"),
        Finding(Status.UNCHECKED, "broker", "alarms", "cannot be told"),
        Finding(Status.WARNING, "broker", "heartbeat", "too long", "Shorten it."),
        Finding(Status.PROBLEM, "queue 'q'", "durable", "[red]not durable[/]", "Declare it anew."),
    ]
    monkeypatch.setattr(examine, "examine", lambda *_: findings)
    result = CliRunner().invoke(app, ["doctor", "amqp://localhost"])
    assert result.exit_code == 1
    for text in ("host:5672", "→ Shorten it.", "[red]not durable[/]", "✔ 1 ok", "? 1 not checked", "! 1 warning "):
        assert text in result.output
    assert result.output.rstrip().endswith("✘ 1 problem")


def test_equal_findings_of_many_queues_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of equal lines would hide the others. JSON is complete, and the sum counts each finding."""
    views = {f"q{number:04}": QueueView({"name": f"q{number:04}", "type": "quorum"}) for number in range(1500)}
    views["q0001"].raw["messages"] = 7  # type: ignore[index]
    views["q0001"].raw["arguments"] = {"x-message-ttl": 10}  # type: ignore[index]
    findings = examine_queues(Snapshot(views), (), (4, 3))
    monkeypatch.setattr(examine, "examine", lambda *_: findings)
    shown = CliRunner().invoke(app, ["doctor", "amqp://localhost"]).output
    assert shown.count("delivery limit 20") == 1
    assert all(text in shown for text in ("1,500 queues", "'q0000'", "'q0001'", "'q0002'", "and 1,497 more (--json)"))
    assert "'q0003'" not in shown
    assert shown.count("message TTL of 0.01 s") == 1
    assert "queue 'q0001'" in shown
    assert len(shown.splitlines()) < 30
    assert "✘ 1,500 problems" in shown
    written = json.loads(CliRunner().invoke(app, ["doctor", "amqp://localhost", "--json"]).output)
    assert len(written["findings"]) == len(findings) == 1502


def test_equal_findings_of_the_same_queues_share_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = (("a", "one"), ("a", "two"), ("b", "one"), ("b", "other"), ("b", "two"))
    findings = [Finding(Status.WARNING, f"queue '{name}'", "check", text) for name, text in texts]
    monkeypatch.setattr(examine, "examine", lambda *_: findings)
    shown = CliRunner().invoke(app, ["doctor", "amqp://localhost"]).output
    assert [line.split() for line in shown.splitlines()[3:-1]] == [
        ["2", "queues", "!", "check", "one"],
        ["'a'"],
        ["'b'"],
        ["!", "check", "two"],
        [],
        ["queue", "'b'", "!", "check", "other"],
    ]


def test_a_wrong_url_is_said_without_a_traceback() -> None:
    result = CliRunner().invoke(app, ["doctor", "http://localhost"])
    assert isinstance(result.exception, ConfigurationError)  # `run` prints it as one line


def test_a_wrong_management_url_is_refused_before_any_check() -> None:
    result = CliRunner().invoke(app, ["doctor", "amqp://127.0.0.1:1", "--management-url", "ftp://localhost"])
    assert isinstance(result.exception, ConfigurationError)
    assert "--management-url" in str(result.exception)
    result = CliRunner().invoke(app, ["doctor", "amqp://127.0.0.1:1", "--management-url", "http://user@localhost"])
    assert str(result.exception) == "the password of user 'user' is empty, which RabbitMQ refuses"


@pytest.mark.parametrize("name", ["", "x" * 256], ids=["empty", "too long"])
def test_a_name_that_no_queue_has_is_refused_before_any_check(name: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "amqp://127.0.0.1:1", "--queue", name])
    assert isinstance(result.exception, ConfigurationError)
    assert str(result.exception).startswith("--queue ")


# -- the management API ------------------------------------------------------------------------------------------------


@contextmanager
def http_server(answers: dict[str, tuple[int, object]], received: list[str | None] | None = None) -> Iterator[int]:
    """Serve a management API with these answers by path, and yield its port.

    Any other path is 404. A request without a login is 401. Logins are appended to `received`.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            login = self.headers["Authorization"]
            if received is not None:
                received.append(login)
            status, answer = answers.get(self.path, (404, {"error": "Object Not Found", "reason": "Not Found"}))
            if login is None:
                status, answer = 401, {"error": "not_authorized", "reason": "Not_Authorized"}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None: ...

    class Server(HTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Print nothing: a client may disconnect before it gets the response."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def api(port: int, path: str = "") -> ManagementAPI:
    url = f"http://user:{SECRET}@127.0.0.1:{port}{path}"
    return ManagementAPI.at(url, parse_url("amqp://localhost"), option="url")


def test_segments_are_encoded_and_a_prefix_is_kept() -> None:
    with http_server({"/rabbit/api/queues/%2F/a%20b": (200, {"name": "a b"})}) as port:
        found = api(port, "/rabbit/")
        assert found.get("queues", "/", "a b") == {"name": "a b"}
        assert str(found) == f"http://127.0.0.1:{port}/rabbit"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((401, {"error": "not_authorised", "reason": "Not management user"}), "401 Not management user"),
        ((500, b"oops"), "500 oops"),
        ((200, b"<html>"), "not JSON"),
    ],
)
def test_errors_of_the_api_say_the_reason_and_no_password(answer: tuple[int, object], text: str) -> None:
    with http_server({"/api/overview": answer}) as port, pytest.raises(ManagementError, match=text) as caught:
        api(port).get("overview")
    assert SECRET not in str(caught.value)


def test_an_api_that_is_not_there_is_an_error_without_status() -> None:
    with pytest.raises(ManagementError, match="Connection refused") as caught:
        api(free_port()).get("overview")
    assert caught.value.status == 0


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://localhost", "must be http"),
        ("http://", "must be http"),
        ("http://localhost:port", "must be http"),
    ],
)
def test_a_management_url_that_is_none_is_refused(url: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ManagementAPI.at(url, parse_url("amqp://localhost"), option="url")


def test_without_a_url_the_api_is_looked_for_beside_amqp() -> None:
    assert list(map(str, ManagementAPI.beside(parse_url("amqp://u:p@a,b:5673")))) == [
        "http://a:15672",
        "http://b:15672",
    ]
    assert list(map(str, ManagementAPI.beside(parse_url("amqps://u:p@a")))) == ["https://a:15671"]


@pytest.mark.parametrize(
    ("url", "sends"),
    [
        ("amqp://u:p@a", False),
        ("amqp://u:p@localhost", True),
        ("amqp://u:p@127.0.0.1", True),
        ("amqps://u:p@a", True),
    ],
)
def test_a_guessed_url_gets_a_password_only_if_local_or_verified(url: str, sends: bool) -> None:
    (guess,) = ManagementAPI.beside(parse_url(url))
    assert guess.sends_password is sends
    assert ManagementAPI.at("http://elsewhere", parse_url(url), option="url").sends_password


def test_credentials_are_asked_for_where_the_url_names_no_user() -> None:
    calls: list[int] = []

    def credentials() -> Credentials:
        calls.append(1)
        return Credentials("user", SECRET)

    settings = parse_url("amqp://localhost", credentials=credentials)
    assert ManagementAPI.at(f"http://user:{SECRET}@localhost", settings, option="url").sends_password
    ManagementAPI.check("http://localhost", settings, option="url")
    assert not calls
    assert ManagementAPI.at("http://localhost", settings, option="url").sends_password
    assert len(calls) == 1


def test_a_guessed_url_gets_no_password_without_verification() -> None:
    (guess,) = ManagementAPI.beside(parse_url("amqps://u:p@a", tls=TLSOptions(verify=False)))
    assert not guess.sends_password


def test_no_password_leaves_the_machine_unencrypted_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding lists the skipped checks and the option that enables them."""
    received: list[str | None] = []
    with http_server({}, received) as port:
        monkeypatch.setitem(management._PORTS, "http", port)
        monkeypatch.setattr(examine, "_existence", lambda *_: [])  # it needs AMQP
        entry = HostEntry(parse_url("amqp://localhost"), ServerInfo("RabbitMQ", "4.3.6", (4, 3, 6)), 131072)
        settings = parse_url(f"amqp://user:{SECRET}@0.0.0.0")
        (found,) = examine._by_management(settings, entry, [], None)
        assert received == [None]
        assert found.status is Status.UNCHECKED
        assert "was not sent the password" in found.text
        assert (
            "alarms, the nodes of a cluster, and the arguments, policies and consumers of queues could not be"
            in found.text
        )
        assert f"--management-url http://0.0.0.0:{port}" in found.fix
        examine._by_management(settings, entry, [], f"http://0.0.0.0:{port}")
        assert received[1] is not None


@pytest.mark.parametrize("url", ["http://[::1", "http://a b", "http://a\x00b", "ftp://a", "http://a:port", ""])
def test_what_is_no_url_at_all_is_refused_as_a_management_url(url: str) -> None:
    """The error names the option."""
    settings = parse_url("amqp://localhost")
    with pytest.raises(ConfigurationError, match=r"^--management-url must be http"):
        examine._by_management(
            settings, HostEntry(settings, ServerInfo("RabbitMQ", "4.3.6", (4, 3, 6)), 131072), [], url
        )


def test_with_certificate_login_a_management_url_needs_a_user() -> None:
    settings = parse_url("amqps://localhost", mechanism="EXTERNAL", tls=TLSOptions(cert_file="c"))
    with pytest.raises(ConfigurationError, match=r"^managementUrl needs a user: http"):
        ManagementAPI.check("http://localhost", settings, option="managementUrl")


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((200, {"status": "ok"}), Status.OK),
        ((503, {"status": "failed", "reason": "There are alarms in effect in the cluster"}), Status.PROBLEM),
        ((401, {"reason": "Not monitor user"}), Status.UNCHECKED),
    ],
)
def test_alarms_are_known_or_said_to_be_unknown(answer: tuple[int, object], status: Status) -> None:
    with http_server({"/api/health/checks/alarms": answer}) as port:
        assert examine_alarms(api(port)).status is status


def test_a_snapshot_is_read_from_five_lists() -> None:
    answers: dict[str, tuple[int, object]] = {
        "/api/queues/v": (200, [{"name": "q", "type": "classic", "messages": 3}]),
        "/api/exchanges/v": (200, [{"name": "e", "type": "topic"}]),
        "/api/bindings/v": (200, [{"source": "e", "destination": "q", "destination_type": "queue"}]),
        "/api/consumers/v": (200, []),
        "/api/nodes": (200, [{"name": "rabbit@a", "running": True}]),
    }
    with http_server(answers) as port:
        snapshot = Snapshot.take(api(port), "v")
    assert [node["name"] for node in snapshot.nodes or ()] == ["rabbit@a"]
    assert snapshot.queues["q"].messages == 3
    assert snapshot.exchanges["e"]["type"] == "topic"
    assert len(snapshot.bindings) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_user_who_may_not_read_nodes_gets_the_rest(status: int) -> None:
    lists = ("queues", "exchanges", "bindings", "consumers")
    answers: dict[str, tuple[int, object]] = {f"/api/{name}/v": (200, []) for name in lists}
    answers["/api/nodes"] = (status, {"reason": "Not monitor user"})
    with http_server(answers) as port:
        assert Snapshot.take(api(port), "v").nodes is None


@pytest.mark.parametrize(
    ("status", "shown", "readable"),
    [
        (400, {"effective_policy_definition": {}}, True),
        (400, {}, False),  # RabbitMQ 4.0: the policies are unknown
        (500, {"effective_policy_definition": {}}, False),
    ],
)
def test_without_statistics_queues_need_their_policies(status: int, shown: dict[str, object], readable: bool) -> None:
    answers: dict[str, tuple[int, object]] = {f"/api/{name}/v": (200, []) for name in ("exchanges", "bindings")}
    answers["/api/queues/v"] = (200, [{"name": "q", "type": "quorum", **shown}])
    answers["/api/consumers/v"] = (status, {"reason": "Stats in management UI are disabled on this node"})
    answers["/api/nodes"] = (200, [])
    with http_server(answers) as port:
        if readable:
            assert Snapshot.take(api(port), "v").consumers is None
        else:
            with pytest.raises(ManagementError):
                Snapshot.take(api(port), "v")


def test_nodes_unreadable_for_another_reason_are_an_error() -> None:
    lists = ("queues", "exchanges", "bindings", "consumers")
    with http_server({f"/api/{name}/v": (200, []) for name in lists}) as port, pytest.raises(ManagementError):
        Snapshot.take(api(port), "v")
