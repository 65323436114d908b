"""The parsed OpenTelemetry model, and the check that finds wrong spans."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags

from tests.tracing import model
from tests.tracing.model import ALSO, OURS, REGISTRY, SPANS, flaws

SETTLE = {
    "messaging.system": "rabbitmq",
    "messaging.operation.name": "ack",
    "messaging.operation.type": "settle",
    "messaging.destination.name": "orders",
    "messaging.rabbitmq.message.delivery_tag": 1,
    "server.port": 5672,
}


def span(kind: SpanKind = SpanKind.CLIENT, name: str = "ack orders", **others: Any) -> ReadableSpan:
    attributes = {**SETTLE, **{name.replace("__", "."): value for name, value in others.items()}}
    given = {name: value for name, value in attributes.items() if value is not None}
    with TracerProvider().get_tracer("test").start_as_current_span(name, kind=kind, attributes=given) as made:
        assert isinstance(made, ReadableSpan)
        return made


def test_a_span_lists_attributes_of_its_groups_and_refinements() -> None:
    assert set(SPANS) == {
        "messaging.create.producer",
        "messaging.send.producer",
        "messaging.send.client",
        "messaging.receive.client",
        "messaging.process.consumer",
        "messaging.settle.client",
    }
    process = SPANS["messaging.process.consumer"]
    assert [name for name, level in process.items() if level == "required"] == [
        "messaging.system",
        "messaging.operation.name",
        "messaging.destination.name",
    ]
    levels = {name: process[name] for name in ("error.type", "messaging.client.id", "messaging.message.body.size")}
    assert list(levels.values()) == ["conditionally_required", "recommended", "opt_in"]
    assert process["messaging.rabbitmq.destination.routing_key"] == "conditionally_required"
    assert "network.peer.address" not in process
    assert SPANS["messaging.create.producer"]["messaging.destination.name"] == "conditionally_required"


def test_every_attribute_that_a_span_lists_is_in_the_registry() -> None:
    assert {name for names in ALSO.values() for name in names} <= REGISTRY.keys()
    assert not REGISTRY.keys() & OURS.keys()
    assert {name for names in SPANS.values() for name in names} <= REGISTRY.keys()


def test_what_we_add_is_what_the_model_does_not_list() -> None:
    assert not [name for kind, names in ALSO.items() for name in names if name in SPANS[kind]]


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"kind": SpanKind.PRODUCER}, "there is no span messaging.settle.producer"),
        ({"messaging__operation__type": "publish"}, "there is no span messaging.publish.client"),
        ({"messaging__system": None}, "messaging.system is required"),
        ({"error__type": "ValueError"}, "error.type goes with a failure"),
        ({"name": "ack invoices"}, "the name of the span is 'ack invoices'"),
        ({"messaging__message__body__size": 4}, "messaging.message.body.size is not of messaging.settle.client"),
        ({"reliable_mq__seconds": 4}, "reliable_mq.seconds is not of messaging.settle.client"),
        ({"server__port": "5672"}, "server.port is '5672', and not <class 'int'>"),
        ({"server__port": True}, "server.port is True, and not <class 'int'>"),
        ({"reliable_mq__attempt": "1"}, "reliable_mq.attempt is '1', and not <class 'int'>"),
        ({"messaging__system": "rabbit"}, "messaging.system is 'rabbit', and not of"),
    ],
)
def test_a_span_that_strays_from_the_model_is_found(changes: dict[str, Any], flaw: str) -> None:
    assert not list(flaws(span()))
    assert any(found.startswith(flaw) for found in flaws(span(**changes))), list(flaws(span(**changes)))


def test_what_is_deprecated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    [flaw] = model._flaws_of_value("messaging.operation.type", "publish")
    assert flaw.startswith("messaging.operation.type is 'publish', and not of ['create', 'send', ")
    monkeypatch.setitem(REGISTRY, "server.port", {**REGISTRY["server.port"], "deprecated": {"reason": "renamed"}})
    assert list(flaws(span())) == ["server.port is deprecated"]


def test_a_failure_without_its_type_is_found() -> None:
    with (
        TracerProvider()
        .get_tracer("test")
        .start_as_current_span("ack orders", kind=SpanKind.CLIENT, attributes=SETTLE) as made
    ):
        made.set_status(StatusCode.ERROR)
        assert isinstance(made, ReadableSpan)
        assert list(flaws(made)) == ["error.type goes with a failure"]


def test_events_and_links_are_looked_at_too() -> None:
    context = SpanContext(1, 2, True, TraceFlags(1))
    with (
        TracerProvider()
        .get_tracer("test")
        .start_as_current_span(
            "ack orders", kind=SpanKind.CLIENT, attributes=SETTLE, links=[Link(context, {"server.port": 1})]
        ) as made
    ):
        made.add_event("reliable_mq.sent", {"reliable_mq.attempt": "1"})
        made.add_event("sent", {"mine": 1})
        made.record_exception(ValueError("no"))
        assert isinstance(made, ReadableSpan)
        assert list(flaws(made)) == [
            "reliable_mq.attempt is '1', and not <class 'int'>",
            "there is an event sent",
            "mine is 1, and not None",
            "a link has attributes",
        ]
