"""`Tracing`: refused arguments, imports, and names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from sqlalchemy import create_engine

from reliable_mq import ConfigurationError, Consumer, Message, Publisher, Tracing
from reliable_mq.outbox import SQLAlchemyOutbox
from reliable_mq.tracing import conventions
from reliable_mq.tracing.tracing import TracerErrors
from tests.tracing.model import OURS, REGISTRY

URL = "amqp://localhost/"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tracer_provider": "jaeger"}, "tracer_provider must be a TracerProvider"),
        ({"propagator": object()}, "propagator must be a TextMapPropagator"),
        ({"root_ratio": 2}, "root_ratio must be a number from 0 to 1, not 2"),
        ({"root_ratio": True}, "root_ratio must be a number"),
        ({"root_ratio": float("nan")}, "root_ratio must be a number"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Tracing(**arguments)


def test_a_publisher_refuses_another_object_for_tracing() -> None:
    with pytest.raises(ConfigurationError, match="tracing must be a Tracing, not True"):
        Publisher(URL, tracing=True)  # type: ignore[arg-type]


def test_a_consumer_refuses_another_object_for_tracing() -> None:
    with pytest.raises(ConfigurationError, match="tracing must be a Tracing, not True"):
        Consumer(URL, "orders", print, tracing=True)  # type: ignore[arg-type]


def test_an_outbox_refuses_another_object_for_tracing() -> None:
    with pytest.raises(ConfigurationError, match="tracing must be a Tracing, not True"):
        SQLAlchemyOutbox(create_engine("sqlite://"), tracing=True)  # type: ignore[arg-type]


def test_what_a_tracer_raises_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    errors = TracerErrors(lambda: now)
    errors.log(ValueError("first"), "no span")
    now = 59.0
    for _ in range(3):
        errors.log(ValueError("second"), "no span")
    assert [record.getMessage() for record in caplog.records] == [
        "OpenTelemetry raised, 1 times since it was last logged; no span"
    ]
    now = 60.0
    errors.log(ValueError("third"), "no span")
    assert "raised, 4 times since it was last logged" in caplog.records[1].getMessage()
    assert "ValueError: third" in caplog.text


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_opentelemetry_is_imported_with_the_first_tracing() -> None:
    program = (
        "import sys, reliable_mq\n"
        "from reliable_mq import AsyncPublisher, Consumer, Publisher, Tracing\n"
        "Publisher('amqp://localhost/')\n"
        "Consumer('amqp://localhost/', 'orders', print)\n"
        "print('opentelemetry' in sys.modules)\n"
        "Tracing()\n"
        "print('opentelemetry' in sys.modules, 'opentelemetry.sdk' in sys.modules)"
    )
    assert run(program).split() == ["False", "True", "False"]


def test_without_the_extra_the_error_names_it() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from reliable_mq import ConfigurationError, Tracing\n"
        "try:\n"
        "    Tracing()\n"
        "except ConfigurationError as error:\n"
        "    print(error)"
    )
    assert run(program) == "Tracing needs OpenTelemetry's API: install the extra otel, pip install 'reliable-mq[otel]'"


def test_every_attribute_is_one_of_the_conventions_or_ours() -> None:
    names = {value for name, value in vars(conventions).items() if name.isupper() and "." in str(value)}
    assert len(names) > 15
    assert names - REGISTRY.keys() == {*OURS, "amq.default"}  # amq.default is a destination


@pytest.mark.parametrize(
    ("exchange", "routing_key", "queue", "produced", "consumed"),
    [
        ("", "orders", "orders", "orders", "orders"),
        ("shop", "orders.new", "orders", "shop:orders.new", "shop:orders.new:orders"),
        ("shop", "orders", "orders", "shop:orders", "shop:orders"),
        ("shop", "", "orders", "shop", "shop:orders"),
        ("", "", "orders", "amq.default", "orders"),
    ],
)
def test_destinations_are_named_by_the_rules_for_rabbitmq(
    exchange: str, routing_key: str, queue: str, produced: str, consumed: str
) -> None:
    assert conventions.published_to(exchange, routing_key) == produced
    assert conventions.consumed_from(exchange, routing_key, queue) == consumed


def test_the_context_of_a_message_can_be_read() -> None:
    from opentelemetry.trace import get_current_span

    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    context = Tracing().context_of(Message(b"", headers={"traceparent": header}))
    assert get_current_span(context).get_span_context().trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert not Tracing().context_of(Message(b""))
