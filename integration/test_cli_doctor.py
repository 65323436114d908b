"""``reliable-mq doctor`` on real brokers: its findings; it changes nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from pika.exceptions import UnroutableError

from integration.support.command_line import run_cli
from reliable_mq import Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from integration.support.certificates import Authority
    from reliable_mq.testing import FaultProxyFactory, RabbitMQ, VirtualHost

SECRET = "canary-password"


def doctor(vhost: VirtualHost, *options: str, url: str | None = None) -> tuple[int, list[dict[str, str]]]:
    """Return exit status and findings, with the broker's management API."""
    api = ["--management-url", vhost.broker.management.url] if url is None else []
    done = run_cli("doctor", url or vhost.url, "--json", *api, *options)
    assert done.stderr == b""
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    assert SECRET not in done.stdout.decode()
    return done.returncode, findings


def about(findings: list[dict[str, str]], check: str) -> dict[str, str]:
    (found,) = (each for each in findings if each["check"] == check)
    return found


def not_well(findings: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    """Return the findings that are not ok.

    The consumer timeout is left out, because it can never be read.
    """
    return [
        (each["status"], each["subject"], each["check"])
        for each in findings
        if each["status"] != "ok" and each["check"] != "consumer timeout"
    ]


def user(vhost: VirtualHost, name: str, *, configure: str, write: str, read: str, tags: str = "") -> str:
    """Create a user of this virtual host; return its URL."""
    api = vhost.broker.management
    api.call("PUT", "users", name, body={"password": SECRET, "tags": tags})
    body = {"configure": configure, "write": write, "read": read}
    api.call("PUT", "permissions", vhost.name, name, body=body)
    return vhost.url.replace("guest:guest", f"{name}:{SECRET}")


def declare(vhost: VirtualHost, name: str, *, durable: bool = True, **arguments: Any) -> None:
    table = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
    with vhost.connect() as connection:
        connection.channel().queue_declare(name, durable=durable, arguments=table)


def test_what_we_declare_is_well_on_every_version(any_vhost: VirtualHost) -> None:
    with Publisher(any_vhost.url, topology=[Queue("orders"), Queue("events", type="stream")]) as publisher:
        publisher.connect()
    status, findings = doctor(any_vhost, "--queue", "orders", "--queue", "events")
    assert status == 0
    assert not_well(findings) == []
    assert about(findings, "version")["text"] == f"RabbitMQ {any_vhost.broker.version}"
    assert about(findings, "write")["status"] == about(findings, "alarms")["status"] == "ok"


def test_it_changes_nothing(any_vhost: VirtualHost) -> None:
    """It adds no queue and no message, and does not mark messages as redelivered."""
    declare(any_vhost, "orders", queue_type="quorum")
    assert run_cli("publish", any_vhost.url, "--queue", "orders", stdin=b"x\n").returncode == 0
    doctor(any_vhost, "--queue", "orders", "--queue", "missing")
    doctor(any_vhost)
    api = any_vhost.broker.management
    assert [queue["name"] for queue in api.call("GET", "queues", any_vhost.name)] == ["orders"]
    taken = run_cli("consume", any_vhost.url, "orders", "--ack", "--count", "1", "--json")
    line = json.loads(taken.stdout)
    assert (line["redelivered"], line.get("headers")) == (False, None)


def test_queues_that_lose_messages_are_found(any_vhost: VirtualHost) -> None:
    declare(any_vhost, "limit", queue_type="quorum", delivery_limit=3)
    declare(any_vhost, "nowhere", queue_type="quorum", delivery_limit=-1, dead_letter_exchange="missing")
    declare(any_vhost, "once", queue_type="quorum", dead_letter_exchange="", dead_letter_routing_key="full")
    declare(any_vhost, "full", queue_type="classic", max_length=5)
    declare(any_vhost, "fleeting", queue_type="classic", message_ttl=1000)
    status, findings = doctor(any_vhost)
    assert status == 1
    assert not_well(findings) == [
        ("warning", "queue 'fleeting'", "message TTL"),
        ("problem", "queue 'full'", "length limit"),
        ("problem", "queue 'limit'", "delivery limit"),
        ("problem", "queue 'nowhere'", "dead letters"),
        ("warning", "queue 'nowhere'", "dead letters"),
        ("warning", "queue 'once'", "dead letters"),
    ]


def wait_for_policy(vhost: VirtualHost) -> None:
    """Wait until the statistics of the queue ``orders`` have its policy."""
    wait_until(
        lambda: (vhost.queue("orders") or {}).get("effective_policy_definition"),
        timeout=60,
        what="the policy in the statistics",
        interval=0.2,
    )


def test_a_policy_counts_like_an_argument(vhost: VirtualHost) -> None:
    declare(vhost, "orders", queue_type="quorum", delivery_limit=-1)
    api = vhost.broker.management
    policy = {"pattern": "orders", "definition": {"max-length": 10}, "apply-to": "queues"}
    api.call("PUT", "policies", vhost.name, "short", body=policy)
    wait_for_policy(vhost)
    _, findings = doctor(vhost, "--queue", "orders")
    assert not_well(findings) == [("problem", "queue 'orders'", "length limit")]


def test_queues_are_looked_at_without_statistics(private_broker: RabbitMQ, private_vhost: VirtualHost) -> None:
    """RabbitMQ recommends to disable them where Prometheus is used."""
    declare(private_vhost, "orders", queue_type="quorum", delivery_limit=-1)
    policy = {"pattern": "orders", "definition": {"max-length": 10}, "apply-to": "queues"}
    private_broker.management.call("PUT", "policies", private_vhost.name, "short", body=policy)
    setting = "application:set_env(rabbitmq_management, disable_management_stats, {})"
    private_broker.evaluate(setting.format("true"))
    try:
        status, findings = doctor(private_vhost)
    finally:
        private_broker.evaluate(setting.format("false"))
    assert status == 1
    assert not_well(findings) == [
        ("not checked", "broker", "statistics"),
        ("problem", "queue 'orders'", "length limit"),
    ]


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_of_a_policy_and_an_argument_the_one_in_effect_counts(any_vhost: VirtualHost, kind: str) -> None:
    """A policy overrides the overflow of a quorum queue, not of a classic one.

    The lower of two limits applies.
    """
    policy = {"pattern": "orders", "definition": {"overflow": "drop-head", "max-length": 2}, "apply-to": "queues"}
    any_vhost.broker.management.call("PUT", "policies", any_vhost.name, "short", body=policy)
    limits = {"delivery_limit": -1} if kind == "quorum" else {}
    declare(any_vhost, "orders", queue_type=kind, max_length=9, overflow="reject-publish", **limits)
    done = run_cli("publish", any_vhost.url, "--queue", "orders", "--timeout", "20", stdin=b"1\n2\n3\n4\n5\n")
    drops = kind == "quorum"
    assert (done.returncode == 0) is drops, "the oldest messages go, or the publisher is told"
    wait_for_policy(any_vhost)
    _, findings = doctor(any_vhost, "--queue", "orders")
    assert not_well(findings) == ([("problem", "queue 'orders'", "length limit")] if drops else [])
    if drops:
        assert about(findings, "length limit")["text"].startswith("max-length 2 with overflow drop-head")


def test_a_queue_that_a_restart_deletes_is_a_problem(any_vhost: VirtualHost) -> None:
    declare(any_vhost, "orders", durable=False)
    assert not_well(doctor(any_vhost)[1]) == [("problem", "queue 'orders'", "durable")]


def test_of_messages_that_return_only_rejected_ones_are_kept(any_vhost: VirtualHost) -> None:
    """A queue that dead-letters to itself loses what expires or exceeds its limit."""
    routes = {"dead_letter_exchange": "", "dead_letter_routing_key": "orders", "delivery_limit": -1}
    declare(any_vhost, "orders", queue_type="quorum", max_length=2, message_ttl=60_000, **routes)
    run_cli("publish", any_vhost.url, "--queue", "orders", stdin=b"1\n2\n3\n4\n5\n")
    any_vhost.wait_for_messages("orders", 2)
    _, findings = doctor(any_vhost, "--queue", "orders")
    assert {"length limit", "message TTL"} <= {check for _, _, check in not_well(findings)}
    assert about(findings, "length limit")["status"] == "problem"
    with any_vhost.connect() as connection:
        channel = connection.channel()
        for _ in range(4):
            method, _, _ = channel.basic_get("orders")
            channel.basic_reject(method.delivery_tag, requeue=False)
            any_vhost.wait_for_messages("orders", 2)


def test_consumers_and_dead_letters_are_looked_at(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[Queue("orders")]) as publisher:
        publisher.connect()
    run_cli("publish", vhost.url, "--queue", "orders.dead", stdin=b"x\ny\n")
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_consume("orders", lambda *_: None)
        channel.basic_consume("orders", lambda *_: None, auto_ack=True)
        api = vhost.broker.management
        wait_until(
            lambda: (
                len(api.call("GET", "consumers", vhost.name)) == 2
                and (vhost.queue("orders.dead") or {}).get("messages") == 2
            ),
            timeout=60,
            what="consumers and messages in the statistics",
            interval=0.2,
        )
        _, findings = doctor(vhost, "--queue", "orders")
    assert not_well(findings) == [
        ("warning", "queue 'orders'", "acks"),
        ("warning", "queue 'orders'", "prefetch"),
        ("warning", "queue 'orders.dead'", "dead letters wait"),
    ]


def test_a_missing_queue_is_found_without_the_management_api_too(vhost: VirtualHost) -> None:
    expected = ("problem", "queue 'missing'", "exists")
    assert expected in not_well(doctor(vhost, "--queue", "missing")[1])
    status, findings = doctor(vhost, "--queue", "missing", "--management-url", "http://127.0.0.1:1")
    assert status == 1
    assert not_well(findings) == [("not checked", "broker", "management API"), expected]


def test_a_queue_that_a_user_may_not_look_at_is_not_missing(any_vhost: VirtualHost) -> None:
    declare(any_vhost, "orders", queue_type="quorum")
    url = user(any_vhost, "sender", configure="^$", write=r"^amq\.default$", read="^$")
    found = about(doctor(any_vhost, "--queue", "orders", url=url)[1], "exists")
    assert (found["status"], found["text"].partition(" - ")[0]) == ("not checked", "unknown: 403 ACCESS_REFUSED")


def test_permissions_are_told_without_the_management_api(any_vhost: VirtualHost) -> None:
    declare(any_vhost, "orders", queue_type="quorum")
    url = user(any_vhost, "narrow", configure="^mine", write="^$", read="^orders$")
    status, findings = doctor(any_vhost, "--queue", "orders", "--queue", "mine", url=url)
    assert status == 1  # "mine" does not exist
    permissions = [
        (each["check"], each["text"], each["status"]) for each in findings if each["subject"] == "permissions"
    ]
    assert permissions == [
        ("configure", "queue 'orders': may not be declared", "warning"),
        ("read", "queue 'orders': may be consumed", "ok"),
        ("configure", "queue 'mine': may be declared", "ok"),
        ("read", "queue 'mine': may not be consumed", "problem"),
        (
            "write",
            "the default exchange (amq.default): may not be published to, so queues cannot be addressed by name",
            "problem",
        ),
    ]
    assert about(findings, "management API")["status"] == "not checked"


def test_a_user_whom_the_management_api_does_not_let_in(vhost: VirtualHost) -> None:
    url = user(vhost, "plain", configure=".*", write=".*", read=".*")
    status, findings = doctor(vhost, "--management-url", vhost.broker.management.url, url=url)
    assert status == 0
    found = about(findings, "management API")
    assert found["status"] == "not checked"
    assert "401" in found["text"]
    assert "alarms" in found["text"]
    assert found["fix"].startswith("Check the password, give the user the tag 'monitoring'")


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (("guest:guest", f"guest:{SECRET}"), "credentials", "ACCESS_REFUSED"),
        (("/test-", "/no-such-"), "virtual host", "not found"),
    ],
)
def test_why_a_login_is_refused(any_vhost: VirtualHost, change: tuple[str, str], check: str, text: str) -> None:
    status, findings = doctor(any_vhost, url=any_vhost.url.replace(*change))
    assert status == 1
    found = about(findings, check)
    assert found["status"] == "problem"
    assert text in found["text"]


def test_every_host_is_looked_at(vhost: VirtualHost) -> None:
    own = f"{vhost.broker.host}:{vhost.broker.port}"
    status, findings = doctor(vhost, url=vhost.url.replace(own, f"127.0.0.1:1,{own}"))
    assert status == 1
    assert [(each["subject"], each["status"]) for each in findings if each["check"] == "reachable"] == [
        ("127.0.0.1:1", "problem"),
        (own, "ok"),
    ]
    assert about(findings, "login")["subject"] == own


def test_a_connection_that_is_lost_costs_no_other_finding(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """It is lost while the doctor checks a queue without the management API."""
    declare(vhost, "orders", queue_type="quorum", delivery_limit=-1)
    proxy = fault_proxy(vhost.url)
    proxy.cut_after(1, "to_broker", of="queue.declare")
    status, findings = doctor(vhost, "--queue", "orders", url=proxy.url)
    found = about(findings, "exists")
    assert (status, found["status"], found["subject"]) == (1, "problem", "queues")
    assert "the connection was lost" in found["text"]
    assert about(findings, "login")["status"] == about(findings, "write")["status"] == "ok"


def test_an_alarm_is_seen_with_and_without_the_management_api(
    private_broker: RabbitMQ, private_vhost: VirtualHost
) -> None:
    private_broker.alarm("memory")
    status, findings = doctor(private_vhost)
    assert status == 1
    assert about(findings, "alarms")["status"] == "problem"
    status, findings = doctor(private_vhost, "--management-url", "http://127.0.0.1:1")
    assert status == 1
    assert "publishing is blocked (low on memory)" in about(findings, "blocked")["text"]


@pytest.mark.parametrize(
    ("name", "trusted", "status", "text"),
    [
        ("localhost", True, "warning", "certificate and host name verified; the certificate expires on"),
        ("other.example", True, "problem", "cannot be verified: Hostname mismatch"),
        ("localhost", False, "problem", "cannot be verified"),
    ],
)
def test_tls_is_verified_and_dated(
    private_broker: RabbitMQ, authority: Authority, name: str, trusted: bool, status: str, text: str
) -> None:
    client = authority.issue("client")
    files = f"certfile={client.cert_file}&keyfile={client.key_file}&server_name_indication={name}"
    trust = f"&cacertfile={authority.file}" if trusted else ""
    done = run_cli("doctor", f"amqps://guest:guest@localhost:{private_broker.tls_port}/?{files}{trust}", "--json")
    found = about(json.loads(done.stdout)["findings"], "TLS")
    assert (found["status"], text in found["text"]) == (status, True), found


def test_a_missing_client_certificate_is_named(private_broker: RabbitMQ, authority: Authority) -> None:
    url = f"amqps://guest:guest@localhost:{private_broker.tls_port}/?cacertfile={authority.file}"
    found = about(json.loads(run_cli("doctor", url, "--json").stdout)["findings"], "login")
    assert (found["status"], found["fix"].partition(" that")[0]) == ("problem", "Give a client certificate")


def test_the_queues_around_a_queue_are_looked_at(any_vhost: VirtualHost) -> None:
    """Wrong or unused delay queues, and arguments that RabbitMQ ignores, are reported."""
    sound = Queue("orders.retry.1000", message_ttl=1, dead_letter="orders")
    with Publisher(any_vhost.url, topology=[Queue("orders"), sound]) as publisher:
        publisher.connect()
    assert not_well(doctor(any_vhost)[1]) == []
    declare(
        any_vhost,
        "orders.retry.5000",
        queue_type="quorum",
        message_ttl=500,
        delivery_limit=-1,
        dead_letter_strategy="at-least-once",
    )
    declare(any_vhost, "spelt", queue_type="quorum", delivery_limit=-1, mesage_ttl=5)
    status, findings = doctor(any_vhost)
    assert status == 1
    told = {(each["subject"], each["check"]): each["text"] for each in findings}
    assert "did you mean x-message-ttl?" in told["queue 'spelt'", "arguments"]
    assert ("queue 'orders.retry.5000'", "delay queue") in told
    assert not any(subject == "queue 'orders.retry.1000'" for subject, _ in told)


def test_topic_exchanges_take_dead_letters_as_doctor_predicts(any_vhost: VirtualHost) -> None:
    """The patterns include empty words and an empty key, which has no word."""
    patterns = ("", "#", "*", ".", "*.#", "#.*", "#.", ".#", "a", "a.", "a..b", "a.*.b", "a.#.b", "#.#", "#.b.#")
    keys = ("", ".", "a", "a.", "..", "a.b", "a..b", "a.c.b")
    declared, routed = set(), set()
    with any_vhost.connect() as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number, (pattern, key) in enumerate(product(patterns, keys)):
            exchange, queue = f"topic.{pattern}", f"q.{number}"
            channel.exchange_declare(exchange, "topic", durable=True)
            channel.queue_declare(f"bound.{pattern}", durable=True)
            channel.queue_bind(f"bound.{pattern}", exchange, pattern)
            channel.queue_declare(
                queue,
                durable=True,
                arguments={"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": key},
            )
            declared.add((queue, pattern, key))
            with suppress(UnroutableError):
                channel.basic_publish(exchange, key, b"", mandatory=True)
                routed.add((queue, pattern, key))
    _, findings = doctor(any_vhost)
    nowhere = {each["subject"] for each in findings if "no binding" in each["text"]}
    assert {each for each in declared if f"queue {each[0]!r}" not in nowhere} == routed
