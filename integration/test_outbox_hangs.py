"""An outbox whose database is frozen.

It accepts connections, keeps the existing ones, and answers nothing.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from integration.support.blocking import BlockingPublisher
from integration.support.databases import APIS, ASYNC_DRIVERS, with_driver
from integration.support.lossy import LossyProxy
from reliable_mq import Message, OutboxError, Publisher, Queue
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import SQLAlchemyOutbox
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support.databases import Database
    from reliable_mq.testing import VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", type="classic", dead_letter=None)
DEADLINE = 1.0
GRACE = 20.0  # seconds beyond a deadline: each hanging thread gets two, and the machine is busy; the outbox's own is 30


@contextmanager
def in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < DEADLINE + GRACE


@pytest.fixture(params=["sync", "psycopg_async", pytest.param("asyncpg", marks=pytest.mark.soak)])
def new_publisher(
    request: pytest.FixtureRequest, database: Callable[[str], Database]
) -> Iterator[Callable[[str], Any]]:
    """A function that creates a publisher of either API with an outbox in a database."""
    if request.param != "sync":
        engine = create_async_engine(with_driver(database("postgresql").fresh(), request.param))
        yield lambda url: BlockingPublisher(url, outbox=SQLAlchemyOutbox(engine, create=True), topology=[ORDERS])
        asyncio.run(engine.dispose())
    else:
        plain = create_engine(database("postgresql").fresh())
        yield lambda url: Publisher(url, outbox=SQLAlchemyOutbox(plain, create=True), topology=[ORDERS])
        plain.dispose()


def test_f42_calls_on_an_outbox_whose_database_hangs_end_in_time(
    vhost: VirtualHost, database: Callable[[str], Database], new_publisher: Callable[[str], Any]
) -> None:
    """This is for publishing, flushing, closing and opening.

    Accepted messages are published when the database answers again.
    """
    server = database("postgresql")
    publisher, another = new_publisher(vhost.url), new_publisher(vhost.url)
    publisher.publish(Message(b"before"), routing_key="orders")
    publisher.flush(20)
    server.pause()
    with in_time(), pytest.raises(TimeoutError, match="does not answer"):
        publisher.flush(DEADLINE)
    with in_time(), pytest.raises(OutboxError, match="hangs") as not_stored:
        publisher.publish(Message(b"in doubt"), routing_key="orders", timeout=DEADLINE)
    assert not_stored.value.may_have_arrived
    with in_time(), pytest.raises(TimeoutError):
        publisher.flush(DEADLINE)
    with in_time():
        publisher.close(DEADLINE)
    for _ in range(2):
        with in_time(), pytest.raises(OutboxError, match="does not answer"):
            another.publish(Message(b"never"), routing_key="orders", timeout=DEADLINE)
    with in_time(), pytest.raises(OutboxError, match="does not answer"):
        another.flush(DEADLINE)
    server.unpause()
    another.publish(Message(b"after"), routing_key="orders", timeout=20)
    another.flush(20)
    another.close()
    found = [body for _, body in vhost.bodies("orders")]
    assert [body for body in found if body != b"in doubt"] == [b"before", b"after"]


def test_an_idle_publisher_whose_database_hangs_is_not_ready(
    vhost: VirtualHost, database: Callable[[str], Database]
) -> None:
    """Its relay waits, and each of its calls ends without an answer sooner than the probe gets impatient."""
    server = database("postgresql")
    engine = create_engine(server.fresh())
    with Publisher(vhost.url, outbox=short_of_time(engine), topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"before"), routing_key="orders", timeout=20)
        wait_for_answer(lambda: publisher.flush(20), "an empty outbox")
        server.pause()
        wait_until(lambda: not publisher.health(stuck_after=3).ready, timeout=60, what="the probe")
        health = publisher.health(stuck_after=3)
        assert (health.live, health.ready, health.progressing) == (True, False, False)
        assert "its outbox has not answered its relay for" in health.reason
        server.unpause()
        wait_until(lambda: publisher.health(stuck_after=3).ready, timeout=60, what="the probe")
    engine.dispose()


@pytest.mark.parametrize(("kind", "api", "driver"), APIS)
def test_an_outbox_goes_on_when_its_connections_fall_silent(
    vhost: VirtualHost, database: Callable[[str], Database], kind: str, api: str, driver: str
) -> None:
    """Their host is gone, and another one answers.

    Calls on such connections fail in time.
    """
    server = database(kind)
    with LossyProxy(server.port) as proxy:
        url = make_url(server.fresh()).set(port=proxy.port)
        engine: Any
        if api == "sync":
            engine = create_engine(url)
            publisher: Any = Publisher(vhost.url, outbox=(outbox := short_of_time(engine)), topology=[ORDERS])
        else:
            engine = create_async_engine(with_driver(url.render_as_string(hide_password=False), driver))
            publisher = BlockingPublisher(vhost.url, outbox=(outbox := short_of_time(engine)), topology=[ORDERS])
        wait_for_answer(lambda: publisher.publish(Message(b"before"), routing_key="orders"), "a message before")
        wait_for_answer(lambda: publisher.flush(20), "an empty outbox before")
        proxy.silence()

        def is_stored() -> bool:
            try:
                publisher.publish(Message(b"after"), routing_key="orders", timeout=20)
            except OutboxError as error:
                assert error.may_have_arrived  # noqa: PT017
                return False
            return True

        wait_until(is_stored, timeout=60, what="a stored message")
        wait_for_answer(lambda: publisher.flush(20), "an empty outbox")
        publisher.close()
        assert wait_for_answer(outbox.status, "the rows that are left").rows == 0
        outbox.close()
        if api == "sync":
            engine.dispose()
        else:
            asyncio.run(engine.dispose())
    assert b"after" in {body for _, body in vhost.bodies("orders")}


@pytest.mark.parametrize("driver", ["", *ASYNC_DRIVERS["postgresql"]])
def test_no_query_of_an_outbox_is_left_that_waits_for_a_lock(database: Callable[[str], Database], driver: str) -> None:
    """While PostgreSQL waits for a lock, it does not notice that its client is gone.

    It ends the query itself, a little before the outbox gives up.
    """
    url = database("postgresql").fresh()
    engine: Any = create_async_engine(with_driver(url, driver)) if driver else create_engine(url)
    outbox, other = short_of_time(engine), create_engine(url)
    claims = outbox.claims()
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    def left() -> int:
        with other.connect() as looking:
            return int(looking.scalar(waiting) or 0)

    def write() -> None:
        outbox.write([NewRow(Message(b"1"), "", "orders", True, None)], [])

    calls: list[Callable[[], object]] = [write, outbox.status, outbox.backlog, lambda: claims.take(1)]
    with other.begin() as holding:
        holding.execute(text("LOCK TABLE reliable_mq_outbox"))
        for call in calls:
            with pytest.raises(OutboxError, match=r"lock timeout|no answer within"):
                call()
        wait_until(lambda: left() == 0, timeout=20, what="no query that waits")
    wait_for_answer(write, "a stored message")
    assert len(wait_for_answer(lambda: claims.take(1), "a row").rows) == 1
    outbox.close()
    other.dispose()
    if driver:
        asyncio.run(engine.dispose())
    else:
        engine.dispose()


def short_of_time(engine: Any) -> SQLAlchemyOutbox:
    """Return an outbox whose transactions must end within a second, also on a busy machine."""
    return SQLAlchemyOutbox(engine, create=True, timeout=1)


def wait_for_answer(call: Callable[[], Any], what: str) -> Any:
    """Return what a call of an outbox that is `short_of_time` returns, once it is in time."""

    def answered() -> list[Any]:
        try:
            return [call()]
        except (OutboxError, TimeoutError):
            return []

    return wait_until(answered, timeout=60, what=what)[0]
