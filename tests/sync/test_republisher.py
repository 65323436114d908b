"""The republisher reports every dead letter once, whatever its publisher does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reliable_mq import PublishError, PublishReturned, ReliableMQError, UsageError
from reliable_mq.core.consumer.delivery import ChannelGeneration
from reliable_mq.core.retry.dead_letters import DeadLetters, RepublishRequest
from reliable_mq.sync.subscription import Republisher
from tests.core.deliveries import delivery
from tests.refused_threads import refusing_threads

RETURNED = PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="bin")


class Confirmation:
    """A confirmation that is settled at once."""

    def __init__(self, error: PublishError | None) -> None:
        self._error = error

    def exception(self) -> PublishError | None:
        return self._error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


class Publisher:
    """A publisher with scripted results of ``submit``: outcomes and exceptions."""

    def __init__(self, *script: Exception | None) -> None:
        self.script = list(script)
        self.submitted: list[tuple[bytes, bytes | None, str, str]] = []
        self.failure_at_close: PublishError | None = None

    def submit(self, message: Any, *, exchange: str = "", routing_key: str) -> Confirmation:
        self.submitted.append((message.body, message.encoded_properties, exchange, routing_key))
        step = self.script.pop(0)
        if isinstance(step, PublishError) or step is None:
            return Confirmation(step)
        raise step

    def close(self, _timeout: float) -> None:
        if self.failure_at_close is not None:
            raise self.failure_at_close


class Answers:
    def __init__(self) -> None:
        self.given: list[tuple[RepublishRequest, ReliableMQError | None]] = []
        self._changed = threading.Condition()

    def __call__(self, republish: RepublishRequest, error: ReliableMQError | None) -> None:
        with self._changed:
            self.given.append((republish, error))
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[ReliableMQError | None]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.given) >= count, 10), self.given
        return [error for _, error in self.given]


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def make(answers: Answers) -> Iterator[Callable[[Publisher], Republisher]]:
    made: list[Republisher] = []

    def new(publisher: Publisher) -> Republisher:
        made.append(Republisher(publisher, answers, "test"))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for republisher in made:
        republisher.close(5)


def dead_letter(*, properties: bytes | None = None) -> RepublishRequest:
    item = delivery(body=b"body", message_id="m1")
    item.came_from(ChannelGeneration(1, 1, "orders"))
    made = DeadLetters("bin", consumer="c", version="0").make(item, "why")
    if properties is not None:
        made.properties = properties
    return made


def test_each_republish_is_sent_unchanged_and_gets_its_outcome(
    make: Callable[[Publisher], Republisher], answers: Answers
) -> None:
    publisher = Publisher(None, RETURNED)
    republisher = make(publisher)
    first, second = dead_letter(), dead_letter()
    republisher.put(first)
    republisher.put(second)
    assert answers.wait_for(2) == [None, RETURNED]
    assert [republish for republish, _ in answers.given] == [first, second]
    assert publisher.submitted[0] == (b"body", first.properties, "", "bin")


def test_a_publish_that_cannot_be_watched_answers_an_error(
    make: Callable[[Publisher], Republisher], answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread for callbacks cannot start, for example.

    So it will never be known whether the message is confirmed.
    """

    def refuse(_confirmation: Confirmation, _callback: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Confirmation, "add_done_callback", refuse)
    republisher = make(Publisher(None))
    republisher.put(dead_letter())
    [failed] = answers.wait_for(1)
    assert "can't start new thread" in str(failed)


def test_without_a_thread_the_outcome_is_an_error(make: Callable[[Publisher], Republisher], answers: Answers) -> None:
    publisher = Publisher(None)
    republisher = make(publisher)
    with refusing_threads("test"):
        republisher.put(dead_letter())
    [failed] = answers.wait_for(1)
    assert "can't start new thread" in str(failed)
    republisher.put(dead_letter())
    assert answers.wait_for(2) == [failed, None]
    assert len(publisher.submitted) == 1


@pytest.mark.parametrize("error", [UsageError("closed"), RuntimeError("a bug")])
def test_what_cannot_be_submitted_is_answered_with_an_error(
    make: Callable[[Publisher], Republisher], answers: Answers, error: Exception
) -> None:
    republisher = make(Publisher(error, None))
    republisher.put(dead_letter())
    republisher.put(dead_letter())
    failed, published = answers.wait_for(2)
    assert isinstance(failed, ReliableMQError)
    assert str(error) in str(failed)
    assert published is None


def test_properties_that_are_none_are_answered_with_an_error(
    make: Callable[[Publisher], Republisher], answers: Answers
) -> None:
    publisher = Publisher()
    make(publisher).put(dead_letter(properties=b"\x00"))
    [error] = answers.wait_for(1)
    assert isinstance(error, ReliableMQError)
    assert publisher.submitted == []


def test_closing_gives_up_what_is_not_confirmed(
    make: Callable[[Publisher], Republisher], answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(None)
    publisher.failure_at_close = PublishError("one was not confirmed")
    republisher = make(publisher)
    republisher.put(dead_letter())
    answers.wait_for(1)
    republisher.close(5)
    publisher.failure_at_close = None
    assert "their originals stay in the queue" in caplog.text
    assert threading.active_count() == 1 or not any(thread.name == "test" for thread in threading.enumerate())
