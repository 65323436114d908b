"""The checks of ``doctor`` for versions, limits, certificates and queues."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from reliable_mq.cli.doctor import finding
from reliable_mq.cli.doctor.broker import examine_limits, examine_version, remaining_validity
from reliable_mq.cli.doctor.finding import Finding, Status, worst
from reliable_mq.cli.doctor.management import QueueView, Snapshot
from reliable_mq.cli.doctor.queues import examine_queues
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.url import parse_url

NEWEST = (4, 3, 6)

NOTE, OK, UNCHECKED, WARNING, PROBLEM = Status


def test_the_worst_of_several_findings_counts() -> None:
    findings = [Finding(status, "", "", "") for status in (WARNING, OK, UNCHECKED)]
    assert worst(findings) is WARNING
    assert worst([]) is OK
    assert worst([Finding(NOTE, "", "", "")]) is OK


def test_queues_with_long_names_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """They often differ at their ends only."""
    out = io.StringIO()
    monkeypatch.setattr(finding, "output", Console(file=out, width=80))
    names = [f"com.example.shop.orders.invoices.eu-west-1.{place}" for place in ("test", "production")]
    findings = [Finding(PROBLEM, f"queue {name!r}", "dead letters", name[-4:]) for name in names]
    finding.show(parse_url("amqp://user:secret@localhost/v"), findings)
    titles = "".join(line.partition("  ")[0] for line in out.getvalue().splitlines())
    assert all(name in titles for name in names)


# -- version and limits ------------------------------------------------------------------------------------------------


def of_version(version: str, product: str = "RabbitMQ") -> dict[str, Finding]:
    server = ServerInfo.of({"product": product, "version": version})
    return {finding.check: finding for finding in examine_version(server)}


def test_since_4_3_only_reject_counts() -> None:
    found = of_version("4.3.6")
    assert found["version"] == Finding(OK, "broker", "version", "RabbitMQ 4.3.6")
    assert "basic.nack does not" in found["retries"].text
    assert "consumer is cancelled" in found["consumer timeout"].text
    assert found["consumer timeout"].status is NOTE
    assert worst(found.values()) is OK
    assert "within a second" in found["new queues"].text


def test_on_4_0_to_4_2_nacks_count_and_the_default_limit_drops() -> None:
    found = of_version("4.0.5")
    assert "basic.nack, basic.reject and lost connections all count" in found["retries"].text
    assert "limit of 20" in found["poison messages"].text
    assert "channel is closed with 406" in found["consumer timeout"].text


def test_on_3_13_what_is_left_out_is_said() -> None:
    found = of_version("3.13.7")
    assert found["version"].status is WARNING
    assert "x-delivery-limit=-1" in found["version"].text
    assert found["poison messages"].status is WARNING


def test_old_brokers_are_problems_and_other_products_unchecked() -> None:
    assert of_version("3.11.0")["version"].status is PROBLEM
    assert list(of_version("2.1.0", "LavinMQ")) == ["version"]
    assert of_version("2.1.0", "LavinMQ")["version"].status is UNCHECKED


@pytest.mark.parametrize(("heartbeat", "status"), [(3, WARNING), (20, OK), (120, WARNING)])
def test_heartbeats_that_are_too_short_or_too_long_are_warned_of(heartbeat: int, status: Status) -> None:
    settings = parse_url("amqp://localhost", heartbeat=heartbeat)
    found, frame = examine_limits(settings, 131072)
    assert (found.check, found.status) == ("heartbeat", status)
    assert "131,072 bytes" in frame.text


@pytest.mark.parametrize(
    ("not_after", "status", "text"),
    [
        ("Jun 26 21:41:46 2031 GMT", OK, "expires on 2031-06-26"),
        ("Jan 20 00:00:00 2026 GMT", WARNING, "in 19 days"),
        (None, UNCHECKED, "neither the certificate nor its expiry date is verified"),
    ],
)
def test_a_certificate_that_expires_soon_is_warned_of(not_after: str | None, status: Status, text: str) -> None:
    found = remaining_validity("h:5671", "TLSv1.3", not_after, datetime(2026, 1, 1, tzinfo=UTC))
    assert found.status is status
    assert text in found.text


# -- queues ------------------------------------------------------------------------------------------------------------


def queue(name: str = "q", kind: str = "quorum", policy: Any = None, **fields: Any) -> QueueView:
    """Return a queue as the management API shows it.

    Keyword arguments are queue arguments without ``x-`` and with underscores for hyphens.
    """
    own = {"durable", "auto_delete", "exclusive", "messages", "messages_persistent", "messages_details"}
    arguments = {f"x-{key.replace('_', '-')}": value for key, value in fields.items() if key not in own}
    shown = {key: value for key, value in fields.items() if key in own}
    return QueueView(
        {"name": name, "type": kind, "durable": True, "arguments": arguments, "effective_policy_definition": policy}
        | shown
    )


def dead(**fields: Any) -> QueueView:
    return queue("q.dead", delivery_limit=-1, **fields)


SAFE = {
    "delivery_limit": -1,
    "dead_letter_exchange": "",
    "dead_letter_routing_key": "q.dead",
    "dead_letter_strategy": "at-least-once",
    "overflow": "reject-publish",
}


def examine(*queues: QueueView, version: tuple[int, ...] = NEWEST, names: tuple[str, ...] = ("q",), **rest: Any) -> Any:
    snapshot = Snapshot({each.name: each for each in queues}, **rest)
    return examine_queues(snapshot, names, version)


def summary(findings: list[Finding]) -> list[tuple[Status, str]]:
    return [(finding.status, finding.check) for finding in findings]


def test_the_queue_that_we_declare_is_sound() -> None:
    (found,) = examine(queue(**SAFE, messages=1500), dead())
    assert found.status is OK
    assert found.text.startswith("quorum, 1,500 messages")
    assert "dead letters go to 'q.dead'" in found.text


@pytest.mark.parametrize(
    ("arguments", "version", "lost"),
    [
        ({}, (4, 0, 5), True),
        ({}, (3, 13, 7), False),
        ({"delivery_limit": 5}, (3, 13, 7), True),
        ({"delivery_limit": -1}, (4, 3), False),
        ({"delivery_limit": -1, "policy": {"delivery-limit": 7}}, (4, 3), True),
        ({"policy": {"delivery-limit": -1}}, (4, 3), False),
    ],
)
def test_a_delivery_limit_without_dead_letter_exchange_drops(
    arguments: dict[str, Any], version: tuple[int, ...], lost: bool
) -> None:
    (found,) = examine(queue(**arguments), version=version)
    assert (found.status, found.check) == ((PROBLEM, "delivery limit") if lost else (OK, "arguments"))


@pytest.mark.parametrize(("limit", "when"), [(0, "its first delivery, even one"), (5, "6 deliveries, including those")])
def test_deliveries_before_a_drop_are_counted(limit: int, when: str) -> None:
    (found,) = examine(queue(delivery_limit=limit), version=(4, 3))
    assert found.text.endswith(f"a message is dropped after {when} that a lost connection ended")


def test_the_stricter_of_two_delivery_limits_is_in_effect() -> None:
    assert queue(delivery_limit=5, policy={"delivery-limit": 3}).delivery_limit(NEWEST) == 3
    assert queue(delivery_limit=5, policy={"delivery-limit": -1}).delivery_limit(NEWEST) == 5
    assert "dropped after 4 deliveries" in examine(queue(delivery_limit=3))[0].text


@pytest.mark.parametrize(
    ("kind", "name", "own", "policy", "in_effect"),
    [
        ("quorum", "overflow", "reject-publish", "drop-head", "drop-head"),
        ("classic", "overflow", "reject-publish", "drop-head", "reject-publish"),
        *(("quorum", name, 9, 5, 5) for name in ("message-ttl", "expires", "max-length", "max-length-bytes")),
        ("classic", "max-length", 5, 9, 5),
        ("quorum", "dead-letter-exchange", "ours", "theirs", "ours"),
        ("quorum", "max-length", None, 9, 9),
        ("quorum", "max-length", 9, None, 9),
    ],
)
def test_of_an_argument_and_a_policy_the_one_in_effect_counts(
    kind: str, name: str, own: object, policy: object, in_effect: object
) -> None:
    """The queue type decides, as in RabbitMQ."""
    raw = {"type": kind, "arguments": {f"x-{name}": own}, "effective_policy_definition": {name: policy}}
    view = QueueView({"name": "q", **raw})
    assert view.argument(name) == in_effect
    assert view.is_overridden(name) is (own not in (None, in_effect))


def test_a_policy_that_undoes_an_argument_is_named_in_the_fix() -> None:
    view = queue(**SAFE, max_length=5, policy={"overflow": "drop-head"})
    found = [each for each in examine(view, dead()) if each.status is not OK]
    assert [each.check for each in found] == ["dead letters", "length limit"]
    for each in found:
        assert each.fix == "Remove overflow from the policy that matches this queue: it overrides x-overflow."


def test_a_policy_beside_no_argument_is_not_told_to_go() -> None:
    """Without the policy, the queue would still drop its oldest messages."""
    (found,) = examine(queue(delivery_limit=-1, policy={"overflow": "drop-head", "max-length": 5}))
    assert (found.status, found.check) == (PROBLEM, "length limit")
    assert found.fix.startswith("Set x-overflow=reject-publish")


@pytest.mark.parametrize("kind", ["rabbit_mqtt_qos0_queue", "MQTT QoS 0", "x-delayed"])
def test_the_type_of_a_plugin_is_no_wrong_argument(kind: str) -> None:
    """Users cannot declare an MQTT subscription with another type."""
    assert summary(examine(queue(kind=kind, exclusive=True, durable=True))) == [(OK, "arguments")]


def test_a_dead_letter_exchange_by_policy_is_one() -> None:
    policy = {"dead-letter-exchange": "", "dead-letter-routing-key": "q.dead"}
    assert summary(examine(queue(policy=policy), dead())) == [(WARNING, "dead letters")]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dead_letter_strategy": None}, "at most once"),
        ({"overflow": None}, "not in effect"),
    ],
)
def test_what_keeps_dead_lettering_from_being_at_least_once(changes: dict[str, Any], text: str) -> None:
    arguments = {key: value for key, value in {**SAFE, **changes}.items() if value is not None}
    (found,) = examine(queue(**arguments), dead())
    assert (found.status, found.check) == (WARNING, "dead letters")
    assert text in found.text


ROUTE = {"delivery_limit": -1, "dead_letter_strategy": "at-least-once", "overflow": "reject-publish"}


def binding(destination: str, key: str, source: str = "dlx") -> dict[str, Any]:
    return {"source": source, "destination": destination, "destination_type": "queue", "routing_key": key}


@pytest.mark.parametrize(
    ("exchange", "key", "bindings", "expected"),
    [
        ("", "missing", [], (PROBLEM, "'missing' does not exist")),
        ("", None, [], (WARNING, "keep their routing keys")),
        ("", "q", [], (WARNING, "return to the queue itself")),
        ("nowhere", "k", [], (PROBLEM, "'nowhere' does not exist")),
        ("dlx", "k", [], (PROBLEM, "nothing is bound")),
        ("dlx", "k", [binding("q.dead", "other")], (PROBLEM, "no binding")),
        ("dlx", "k", [binding("q.dead", "k")], None),
        ("dlx", None, [binding("q.dead", "k")], (WARNING, "keys that lead to this queue ('q')")),
        ("dlx", None, [binding("q.dead", "q")], None),
        ("dlx", None, [binding("q.dead", "k"), binding("q", "k", "orders")], None),
        ("dlx", None, [binding("q.dead", "k"), binding("q", "j", "orders")], (WARNING, "this queue ('j', 'q')")),
        ("dlx", None, [binding("q.dead", "k"), binding("q", "#", "topics")], None),  # any key may lead there
        ("fan", None, [binding("q.dead", "", "fan")], None),
        ("topics", "a.b.c", [binding("q.dead", "a.*.c", "topics")], None),
        ("topics", "a.b.c", [binding("q.dead", "a.#", "topics")], None),
        ("topics", "a.b.c", [binding("q.dead", "#.c", "topics")], None),
        ("topics", "a.b.c", [binding("q.dead", "a.*", "topics")], (PROBLEM, "no binding")),
        ("topics", "", [binding("q.dead", "#", "topics")], None),
        ("topics", "", [binding("q.dead", "*", "topics")], (PROBLEM, "no binding")),
        # Trying each # with each number of words would take centuries.
        ("topics", "a." * 100, [binding("q.dead", "#." * 100 + "b", "topics")], (PROBLEM, "no binding")),
        ("fan", "k", [binding("q.dead", "", "fan")], None),
        ("alternate", "k", [], None),
    ],
)
def test_dead_letters_that_lead_nowhere(
    exchange: str, key: str | None, bindings: list[dict[str, Any]], expected: tuple[Status, str] | None
) -> None:
    arguments = {**ROUTE, "dead_letter_exchange": exchange}
    if key is not None:
        arguments["dead_letter_routing_key"] = key
    exchanges = {
        "dlx": {"type": "direct"},
        "orders": {"type": "direct"},
        "topics": {"type": "topic"},
        "fan": {"type": "fanout"},
        "alternate": {"type": "direct", "arguments": {"alternate-exchange": "else"}},
    }
    found = examine(queue(**arguments), dead(), exchanges=exchanges, bindings=bindings)[0]
    if expected is None:
        assert found.status is OK
    else:
        assert found.status is expected[0]
        assert expected[1] in found.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "classic", "durable": False}, [(PROBLEM, "durable")]),
        ({"kind": "classic", "auto_delete": True, "messages_persistent": 3}, [(WARNING, "auto-delete")]),
        ({"kind": "classic", "auto_delete": True, "durable": False}, [(OK, "arguments")]),
        ({"kind": "classic", "exclusive": True, "messages_persistent": 3}, [(WARNING, "exclusive")]),
        ({"kind": "classic", "exclusive": True, "durable": False}, [(OK, "arguments")]),
        ({"kind": "classic", "expires": 60_000}, [(WARNING, "expires")]),
        ({"kind": "classic", "message_ttl": 60_000}, [(WARNING, "message TTL")]),
        ({"kind": "classic", "max_length": 10}, [(PROBLEM, "length limit")]),
        ({"kind": "classic", "max_length": 10, "overflow": "reject-publish"}, [(OK, "arguments")]),
        ({"max_length_bytes": 10, **SAFE}, [(OK, "arguments")]),
        ({"kind": "stream", "max_age": "1h"}, [(OK, "arguments")]),
    ],
)
def test_arguments_that_lose_messages(fields: dict[str, Any], expected: list[tuple[Status, str]]) -> None:
    assert summary(examine(queue(**fields), dead())) == expected


def test_with_a_dlq_ttl_is_fine_and_overflow_only_a_warning() -> None:
    route = {"dead_letter_exchange": "", "dead_letter_routing_key": "q.dead"}
    assert summary(examine(queue(kind="classic", message_ttl=1000, **route), dead())) == [(OK, "arguments")]
    assert summary(examine(queue(kind="classic", max_length=10, **route), dead())) == [(WARNING, "length limit")]


def test_a_queue_that_dead_letters_to_itself_keeps_rejected() -> None:
    """RabbitMQ drops what would return to its queue without being rejected."""
    loop = {"dead_letter_exchange": "", "dead_letter_routing_key": "q"}
    returns = (WARNING, "dead letters")
    classic = queue(kind="classic", message_ttl=1000, max_length=10, **loop)
    assert summary(examine(classic)) == [returns, (PROBLEM, "length limit"), (WARNING, "message TTL")]
    assert "the oldest messages are dropped" in examine(classic)[1].text
    limited, *_ = examine(queue(delivery_limit=5, **loop))
    assert (limited.status, limited.check) == (PROBLEM, "delivery limit")
    assert limited.text.startswith("delivery limit 5 and no dead-letter queue except itself: a message is dropped")


def test_unlimited_prefetch_and_automatic_acks_are_warned_of() -> None:
    consumers = [
        {"queue": {"name": "q"}, "prefetch_count": 0, "ack_required": True},
        {"queue": {"name": "q"}, "prefetch_count": 0, "ack_required": False},
        {"queue": {"name": "q"}, "prefetch_count": 200, "ack_required": True},
        {"queue": {"name": "other"}, "prefetch_count": 0, "ack_required": False},
    ]
    acks, prefetch = examine(queue(**SAFE), dead(), consumers=consumers)
    assert acks.text.startswith("1 of 3 consumers use automatic acks")
    assert prefetch.text.startswith("1 of 3 consumers have an unlimited prefetch (0): unless its channel has a limit")
    assert acks.status is prefetch.status is WARNING


def test_without_statistics_nothing_is_claimed_that_they_tell() -> None:
    waiting = queue("wait", **{**SAFE, "dead_letter_routing_key": "q"})
    sound, *others = examine(queue(**SAFE), dead(), waiting, names=("q", "wait"), consumers=None)
    assert sound.text.startswith("quorum; no messages are lost")
    assert [each.check for each in others] == ["arguments"]


def test_a_consumer_by_the_stream_protocol_loses_nothing() -> None:
    """It looks like auto-ack in the management API, but a stream keeps messages."""
    reader = {"queue": {"name": "q"}, "ack_required": False, "prefetch_count": 0, "arguments": {}}
    assert summary(examine(queue(kind="stream"), consumers=[reader])) == [(OK, "arguments")]


def test_waiting_dead_letters_are_reported_with_their_growth() -> None:
    growing = dead(messages=12, messages_details={"rate": 1.5})
    sound, waiting = examine(queue(**SAFE), growing)
    assert sound.status is OK
    assert (waiting.subject, waiting.status) == ("queue 'q.dead'", WARNING)
    assert "holds 12 messages and grows by 1.5 messages per second" in waiting.text
    assert "grows" not in examine(queue(**SAFE), dead(messages=1))[1].text


def test_a_queue_that_does_not_exist_is_a_problem() -> None:
    (found,) = examine(names=("q",))
    assert (found.status, found.check) == (PROBLEM, "exists")


def test_of_all_queues_only_those_with_findings_are_named() -> None:
    lossy = queue("lossy", kind="classic", durable=False)
    found = examine(queue(**SAFE), dead(), lossy, names=())
    assert [finding.subject for finding in found] == ["queue 'lossy'", "queues"]
    assert found[1].text.startswith("2 of 3 queues")


def test_every_finding_that_is_not_well_says_what_to_do() -> None:
    many = [
        queue("a", kind="classic", durable=False, max_length=1, message_ttl=1, expires=1),
        queue("b", dead_letter_exchange="none"),
        queue("c"),
    ]
    found = examine(*many, names=())
    assert all(finding.fix for finding in found if finding.status is not OK)


def test_letters_that_wait_are_known_by_the_name_of_their_queue() -> None:
    """A consumer that declares nothing publishes them itself: no argument of its queue leads there."""
    (origin, letters) = examine(queue(), dead(messages=20), names=("q",))
    assert (letters.check, letters.status) == ("dead letters wait", WARNING), origin
    assert "does not exist" not in letters.text
    assert [one.check for one in examine(dead(messages=20), names=())] == ["dead letters wait", "arguments"]


def test_the_lists_of_a_virtual_host_are_not_walked_per_queue() -> None:
    class Counted(list[Any]):
        walks = 0

        def __iter__(self) -> Iterator[Any]:
            self.walks += 1
            return super().__iter__()

    views = [queue(f"q{number}", dead_letter_exchange="dlx") for number in range(50)]
    consumers = Counted({"queue": {"name": each.name}, "prefetch_count": 1, "ack_required": True} for each in views)
    bindings = Counted([binding("dead", "dead")])
    dlx = {"dlx": {"name": "dlx", "type": "direct"}}
    examine(*views, names=(), consumers=consumers, bindings=bindings, exchanges=dlx)
    assert (consumers.walks, bindings.walks) == (1, 2)
