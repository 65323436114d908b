"""The trace of a publish gets its events, and every attempt has its headers."""

from __future__ import annotations

import pytest
from pamqp import frame
from pamqp.header import ContentHeader

from reliable_mq.codec import plain_properties_head
from reliable_mq.core.headers import POSSIBLE_DUPLICATE
from reliable_mq.core.publisher.publication import Publication
from reliable_mq.core.publisher.trace import PublicationEvent
from tests.core.published import DELAYS, NO_EXCHANGE, Shell


class Trace:
    """Keeps its events, with the number of attempts."""

    def __init__(self) -> None:
        self.headers = {"traceparent": "00-1-2-01"}
        self.plain_head = plain_properties_head(self.headers)
        self.ids: dict[str, str] = {}
        self.recording = True
        self.events: list[tuple[str, int]] = []

    def failed(self, error: BaseException) -> None:
        raise AssertionError(error)

    def event(self, event: PublicationEvent, publication: Publication) -> None:
        self.events.append((event.value, publication.sends))


@pytest.fixture
def shell() -> Shell:
    return Shell()


def traced(shell: Shell, body: str = "body") -> Trace:
    """Accept a publish with a trace, and one without. Return the trace."""
    publications = shell.accept(body, f"another {body}")
    trace = publications[0].trace = Trace()
    return trace


def headers_of(data: bytes) -> list[dict[str, object]]:
    found = []
    while data:
        size, _, part = frame.unmarshal(data)
        if isinstance(part, ContentHeader):
            found.append(dict(part.properties.headers or {}))
        data = data[size:]
    return found


def test_its_headers_go_with_each_attempt_beside_ours(shell: Shell) -> None:
    trace = traced(shell)
    assert headers_of(shell.session.data_to_send(0.0, 1000)) == [trace.headers, {}]
    shell.lose()
    shell.reopen()
    doubt = {POSSIBLE_DUPLICATE: True}
    assert headers_of(shell.session.data_to_send(0.0, 1000)) == [{**trace.headers, **doubt}, doubt]


def test_it_is_told_of_nacks_and_of_attempts(shell: Shell) -> None:
    trace = traced(shell)
    shell.send()
    shell.nack(1)
    shell.send(now=DELAYS[0])
    shell.ack(3)
    assert trace.events == [("sent", 1), ("nacked", 1), ("sent", 2)]


def test_it_is_told_of_a_return(shell: Shell) -> None:
    trace = traced(shell)
    shell.send()
    shell.return_("id of body")
    shell.ack(1)
    assert trace.events == [("sent", 1), ("returned", 1)]


def test_it_is_told_of_doubt(shell: Shell) -> None:
    trace = traced(shell)
    shell.send()
    shell.lose(NO_EXCHANGE, connection=False)
    assert trace.events == [("sent", 1), ("in_doubt", 1)]


def test_it_is_told_of_alarms_while_it_waits(shell: Shell) -> None:
    trace = traced(shell)
    shell.session.blocked("low on memory")
    later = shell.accept("later")[0]
    shell.session.unblocked(1.0)
    shell.send()
    assert trace.events == [("blocked", 0), ("unblocked", 0), ("sent", 1)]
    assert later.trace is None


def test_it_is_told_of_an_alarm_that_was_there_before(shell: Shell) -> None:
    shell.session.blocked("low on memory")
    publication = Publication(shell.accept("first")[0].message, "", "orders", True, 4, 0.0, None)
    trace = publication.trace = Trace()
    shell.session.accept([publication])
    assert trace.events == [("blocked", 0)]


def test_it_is_told_of_a_provisional_confirm_and_its_loss() -> None:
    shell = Shell(grace=2.0)
    shell.new_queues.made(["orders"], 0.0)
    trace = traced(shell)
    shell.send()
    shell.ack(2, multiple=True, now=0.5)
    shell.lose()
    assert trace.events == [("sent", 1), ("provisional", 1), ("in_doubt", 1)]


def test_its_headers_stand_beside_those_of_the_message(shell: Shell) -> None:
    publication = shell.accept("body", headers={"mine": 1})[0]
    trace = publication.trace = Trace()
    assert headers_of(shell.session.data_to_send(0.0, 1000)) == [{"mine": 1, **trace.headers}]
