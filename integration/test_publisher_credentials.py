"""A publisher whose password or token changes."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.publishing import book, submit
from reliable_mq import BrokerUnavailable, Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing import Audit, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "publisher_api")

ORDERS = Queue("orders", dead_letter=None)
QUICK = tenacity.wait_fixed(0.1)


class User:
    """A user with rights in one virtual host, and a credentials callback."""

    def __init__(self, vhost: VirtualHost) -> None:
        self.name = f"user-{uuid.uuid4().hex[:12]}"
        self.known = ""  # the password that the callback returns
        self.asked = 0
        self._vhost = vhost

    def set_password(self, password: str) -> None:
        """Set the password on the broker."""
        api = self._vhost.broker.management
        api.call("PUT", "users", self.name, body={"password": password, "tags": ""})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        api.call("PUT", "permissions", self._vhost.name, self.name, body=everything)

    def delete(self) -> None:
        self._vhost.broker.management.call("DELETE", "users", self.name)

    def credentials(self) -> tuple[str, str]:
        """Return the credentials that the publisher asks for."""
        self.asked += 1
        return self.name, self.known

    @property
    def url(self) -> str:
        """Return the URL without credentials."""
        return self._vhost.url.replace("guest:guest@", "")


@pytest.fixture
def user(vhost: VirtualHost) -> Iterator[User]:
    user = User(vhost)
    user.set_password("first")
    user.known = "first"
    yield user
    user.delete()


def test_f52_password_is_rotated(vhost: VirtualHost, checker: Audit, user: User) -> None:
    """The next connection uses the new password, because each connect asks for it."""
    with Publisher(user.url, credentials=user.credentials, topology=[ORDERS], reconnect_wait=QUICK) as publisher:
        assert book(checker, submit(checker, publisher, "orders")) is None
        for password in ("second", "third"):
            user.set_password(password)
            user.known = password
            assert book(checker, submit(checker, publisher, "orders")) is None  # the old connection stays open
            before = user.asked
            wait_until(vhost.close_connections, timeout=20, what="the connection to be known and closed")
            assert book(checker, submit(checker, publisher, "orders")) is None
            assert user.asked > before
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f52_password_is_rotated_before_the_callback_knows_it(vhost: VirtualHost, checker: Audit, user: User) -> None:
    """A password refused after a first connect is requested again until it works.

    No message is lost.
    """
    with Publisher(user.url, credentials=user.credentials, topology=[ORDERS], reconnect_wait=QUICK) as publisher:
        publisher.connect()
        user.set_password("second")
        wait_until(vhost.close_connections, timeout=20, what="the connection to be known and closed")
        before = user.asked
        confirmations = [submit(checker, publisher, "orders") for _ in range(10)]
        wait_until(lambda: user.asked >= before + 3, timeout=20, what="three attempts with the old password")
        assert not any(confirmation.done() for confirmation in confirmations)
        user.known = "second"
        assert [book(checker, confirmation) for confirmation in confirmations] == [None] * 10
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f52_first_password_is_wrong_and_updated(user: User) -> None:
    """A wrong first password is reported at once.

    The same publisher works with the right one.
    """
    user.known = "wrong"
    publisher = Publisher(user.url, credentials=user.credentials, topology=[ORDERS])
    for call in (publisher.connect, lambda: publisher.publish(Message(b"x"), routing_key="orders")):
        with pytest.raises(BrokerUnavailable, match="403") as caught:
            call()
        assert caught.value.permanent
    user.known = "first"
    with publisher:
        assert publisher.publish(Message(b"x"), routing_key="orders").attempts == 1


def test_f52_callback_fails_for_a_while(user: User) -> None:
    """A callback that raises fails the attempt, not the publisher."""
    failures = 3

    def credentials() -> tuple[str, str]:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionError("the vault is down")
        return user.credentials()

    publisher = Publisher(user.url, credentials=credentials, topology=[ORDERS], reconnect_wait=QUICK)
    with pytest.raises(BrokerUnavailable, match="credentials callback raised ConnectionError") as caught:
        publisher.connect()
    assert not caught.value.permanent
    with publisher:
        assert publisher.publish(Message(b"x"), routing_key="orders").attempts == 1
    assert failures == 0
