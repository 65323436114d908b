"""No log, repr, error or traceback contains a password, body or header.

Every secret is a canary: a word that occurs nowhere else. The tests collect everything that a program could print or
log, with every logger at DEBUG, including the driver's, and tracebacks with the values of local variables.
"""

from __future__ import annotations

import base64
import logging
import traceback
import uuid
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import tenacity

from reliable_mq import (
    BrokerUnavailable,
    ConfigurationError,
    Message,
    Publisher,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    Queue,
    RetryPolicy,
)
from reliable_mq.settings import Credentials
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

QUICK = tenacity.wait_fixed(0.05)
BOUND = {"x-max-length": 1, "x-overflow": "reject-publish"}
TOPOLOGY = [
    Queue("orders", dead_letter=None),
    Queue("full", type="classic", dead_letter=None, arguments=BOUND),
]


def canary(what: str) -> str:
    return f"{what}canary{uuid.uuid4().hex}"


class Collector(logging.Handler):
    """Collects all visible output as text."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[str] = []
        self.loggers: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.loggers.add(record.name.partition(".")[0])
        self.seen.append(record.getMessage())
        self.seen.extend(map(repr, record.args or ()))
        if record.exc_info and record.exc_info[1] is not None:
            self.error(record.exc_info[1])

    def error(self, error: BaseException, *, local_variables: bool = True) -> None:
        """Add an exception as text, and as a traceback with all causes."""
        self.seen += [str(error), repr(error), repr(vars(error))]
        formatted = traceback.TracebackException.from_exception(error, capture_locals=local_variables)
        self.seen.extend(formatted.format())

    def show(self, *things: object) -> None:
        """Add values that a program might print."""
        for thing in things:
            self.seen += [str(thing), repr(thing)]

    def expect(self, kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> None:
        """Call it, and add the error that it must raise."""
        with pytest.raises(kind) as caught:
            call()
        # For a wrong argument, the local variables include the argument itself.
        self.error(caught.value, local_variables=not isinstance(caught.value, ConfigurationError))

    def check(self, *canaries: str) -> None:
        """Check that no canary was seen in any encoding."""
        assert len(self.seen) > 20, "hardly anything was collected"
        text = "\n".join(self.seen)
        for word in canaries:
            encodings = {word, base64.b64encode(word.encode()).decode().rstrip("="), word.encode().hex()}
            for offset in (1, 2):  # as part of a longer text
                encodings.add(base64.b64encode(word.encode()[offset:]).decode().rstrip("=")[:-2])
            for encoding in encodings:
                where = text.find(encoding)
                assert where < 0, f"{word} is seen: {text[max(0, where - 300) : where + 300]}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector of every logger, at DEBUG."""
    collector = Collector()
    root = logging.getLogger()
    former = {logger: logger.level for logger in (root, *map(logging.getLogger, ("reliable_mq", "pika")))}
    root.addHandler(collector)
    for logger in former:
        logger.setLevel(logging.DEBUG)
    with warnings.catch_warnings(record=True) as warned:
        yield collector
    root.removeHandler(collector)
    for logger, level in former.items():
        logger.setLevel(level)
    assert not warned


class User:
    """A user whose password is a canary."""

    def __init__(self, vhost: VirtualHost) -> None:
        self.name = f"user-{uuid.uuid4().hex[:12]}"
        self.password = canary("password")
        self.api = vhost.broker.management
        self.api.call("PUT", "users", self.name, body={"password": self.password, "tags": ""})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.api.call("PUT", "permissions", vhost.name, self.name, body=everything)

    def url(self, url: str, password: str | None = None) -> str:
        return url.replace("guest:guest@", f"{self.name}:{password or self.password}@")


@pytest.fixture
def user(vhost: VirtualHost) -> Iterator[User]:
    user = User(vhost)
    yield user
    user.api.call("DELETE", "users", user.name)


@pytest.mark.parametrize("source", ["URL", "callback", "static"])
def test_no_password_shows_through_a_publishers_life(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, user: User, collector: Collector, source: str
) -> None:
    """Connecting, refusals, reconnects, failures and closing show no password.

    Its source does not matter.
    """
    proxy = fault_proxy(vhost.url)
    wrong = canary("wrong")
    bare = proxy.url.replace("guest:guest@", "")

    def publisher(password: str) -> Publisher:
        match source:
            case "URL":
                return Publisher(user.url(proxy.url, password), topology=TOPOLOGY, reconnect_wait=QUICK)
            case "callback":
                give = {"credentials": lambda: (user.name, password)}
            case _:
                give = {"credentials": Credentials(user.name, password)}
        return Publisher(bare, topology=TOPOLOGY, reconnect_wait=QUICK, **give)

    refused = publisher(wrong)
    collector.show(refused, vars(refused), refused._options, refused._options.settings)
    collector.expect(BrokerUnavailable, refused.connect)
    collector.expect(BrokerUnavailable, lambda: refused.publish(Message(b"x"), routing_key="orders"))
    with publisher(user.password) as good:
        collector.show(good, good.publish(Message(b"x"), routing_key="orders"))
        proxy.cut()
        good.publish(Message(b"x"), routing_key="orders")
        user.api.call("PUT", "users", user.name, body={"password": "another", "tags": ""})
        before = len(collector.seen)
        proxy.cut()
        wait_until(
            lambda: any("403 ACCESS_REFUSED" in line for line in collector.seen[before:]),
            timeout=10,
            what="a refused reconnect",
        )
        collector.expect(BrokerUnavailable, good.connect)
        collector.expect(PublishUnconfirmed, lambda: good.publish(Message(b"x"), routing_key="orders", timeout=0.2))
        collector.show(good, vars(good), vars(good._channel))
        user.api.call("PUT", "users", user.name, body={"password": user.password, "tags": ""})
        good.publish(Message(b"x"), routing_key="orders")
    collector.show(good)
    assert collector.loggers >= {"reliable_mq", "pika"}
    collector.check(user.password, wrong)


def test_no_secret_of_a_credentials_callback_that_fails_shows(vhost: VirtualHost, collector: Collector) -> None:
    """The exception of a callback may contain anything.

    So may a result that is not valid credentials.
    """
    word = canary("token")

    def raises() -> tuple[str, str]:
        raise ConnectionError("the vault is down")

    bare = vhost.url.replace("guest:guest@", "")
    answers: list[Callable[[], Any]] = [raises, lambda: word, lambda: (word,), lambda: {"token": word}]
    for answer in answers:
        publisher = Publisher(bare, credentials=answer, reconnect_stop=tenacity.stop_after_attempt(1))
        collector.expect((BrokerUnavailable, ConfigurationError), publisher.connect)
    collector.check(word)


@pytest.mark.parametrize(
    "malformed",
    [
        "amqp://user:{0}@localhost:port/",
        "amqp://user:{0}@local host/",
        "amqp://user:{0}@localhost/?heartbeat=30s",
        "amqp://user:{0}@localhost/?unknown=1",
        "amqp://user:{0}%zz@localhost/",
        "http://user:{0}@localhost/",
        "user:{0}@localhost",
        "amqp://user:{0}/@localhost/",
        "amqp://user:{0}@localhost/?password={0}",
    ],
)
def test_no_password_in_the_error_of_a_malformed_url(malformed: str) -> None:
    """An invalid URL is not printed: part of the password may look like a host."""
    word = canary("password")
    with pytest.raises(ConfigurationError) as caught:
        Publisher(malformed.format(word))
    seen = [str(caught.value), repr(caught.value)]
    seen.extend(traceback.TracebackException.from_exception(caught.value).format())
    assert word not in "\n".join(seen)


def test_no_body_or_header_shows_for_any_outcome_of_a_message(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, collector: Collector
) -> None:
    """All outcomes of a message show only its id."""
    body, value, correlation = canary("body"), canary("header"), canary("correlation")

    def message(**properties: Any) -> Message:
        made = Message(
            body.encode(), headers={"h": value, "nested": {"n": [value]}}, correlation_id=correlation, **properties
        )
        collector.show(made)
        return made

    def told(confirmation: object) -> None:
        collector.show(confirmation)
        raise ValueError("a callback that fails")

    proxy = fault_proxy(vhost.url)
    retry = RetryPolicy(max_attempts=1)
    publisher = Publisher(proxy.url, topology=TOPOLOGY, retry=retry, max_message_bytes=2000, reconnect_wait=QUICK)
    publisher.connect()
    collector.show(publisher.publish(message(), routing_key="orders"))
    collector.show(publisher.publish(message(), routing_key="full"))
    collector.expect(PublishReturned, lambda: publisher.publish(message(), routing_key="nowhere"))
    collector.expect(PublishNacked, lambda: publisher.publish(message(), routing_key="full"))
    collector.expect(PublishRefused, lambda: publisher.publish(message(), exchange="missing"))
    collector.expect(PublishRefused, lambda: publisher.publish(message(user_id="other"), routing_key="orders"))
    large = Message(body.encode() * 100, headers={"h": value})
    collector.expect(PublishRefused, lambda: publisher.publish(large, routing_key="orders"))
    wide = Message(body.encode(), headers={"h": value * 10_000})
    collector.expect(PublishRefused, lambda: publisher.publish(wide, routing_key="orders"))
    collector.expect(ConfigurationError, lambda: publisher.publish(body.encode(), routing_key="orders"))
    collector.expect(ConfigurationError, lambda: publisher.publish({"body": body}, routing_key="orders"))
    collector.expect(ConfigurationError, lambda: Message(body))
    collector.expect(ConfigurationError, lambda: Message(b"", headers={"h": {value}}))
    collector.expect(ConfigurationError, lambda: Message(b"", headers={"h": [value, object()]}))
    report = publisher.publish_many([message(), message()], routing_key="nowhere")
    collector.show(report)
    collector.expect(PublishError, report.raise_for_failures)
    proxy.hold_confirms()
    confirmation = publisher.submit(message(), routing_key="orders")
    confirmation.add_done_callback(told)
    collector.show(confirmation)
    collector.expect(TimeoutError, lambda: confirmation.result(0.05))
    given_up = publisher.submit(message(), routing_key="orders", timeout=0.2)
    collector.expect(PublishUnconfirmed, given_up.result)
    proxy.cut()
    proxy.heal()
    collector.show(confirmation, confirmation.result(20))
    publisher.submit(message(), routing_key="nowhere")
    publisher.submit(message(), routing_key="nowhere")
    collector.expect(PublishError, publisher.close)
    collector.check(body, value, correlation)


def test_an_undecodable_frame_shows_no_body_and_no_header(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, collector: Collector
) -> None:
    """A broken frame closes the connection; the error shows none of its data."""
    body, value = canary("body"), canary("header")
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=TOPOLOGY, reconnect_wait=QUICK) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        confirmation = publisher.submit(Message(body.encode(), headers={"h": value}), routing_key="orders")
        proxy.wait_for(lambda: proxy.held_confirms == 1)
        broken = b"\x09\x00\x01" + len(body).to_bytes(4, "big") + body.encode() + b"\x00"
        proxy.inject("to_client", broken)
        wait_until(lambda: publisher.statistics.in_doubt == 1, timeout=10, what="the loss of the connection")
        proxy.heal()
        confirmation.result(20)
    collector.check(body, value)
