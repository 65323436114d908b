"""Consumers with idempotency stores on real servers, under faults of either."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from integration.support.blocking_consumer import ends_with_its_consumer
from integration.support.consuming import Gate, Handler, numbered, publish, send
from integration.support.databases import APIS, ASYNC_DRIVERS, with_driver
from integration.support.lossy import LossyProxy
from integration.support.processes import Process, run
from integration.support.programs import ROOT, environment, faketime
from integration.support.seeds import soaking
from integration.test_stores import make
from reliable_mq import Consumer, Message, Publisher, Queue, RetryPolicy
from reliable_mq.stores import AsyncRedisStore, AsyncSQLAlchemyStore, RedisStore, SQLAlchemyStore, SQLiteStore
from reliable_mq.stores.redis import CLAIM, COMPLETE, RELEASE
from reliable_mq.testing.store_contract import LEASE, RETENTION
from reliable_mq.testing.waiting import wait_until
from tests.stores.subjects import Bridged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from integration.support.databases import Database
    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, VirtualHost

ORDERS = Queue("orders")
UNPREPARED = {"prepare_threshold": None}  # so that a proxy can recognise each query by its text
MYSQL = ("mariadb", "mysql")
servers = pytest.mark.parametrize("kind", ["redis", "postgresql"])
# Each API and each server once; in a soak all combinations.
APIS_AND_SERVERS = (
    [(api, kind) for api in ("sync", "aio") for kind in ("redis", "postgresql")]
    if soaking()
    else [("sync", "redis"), ("aio", "postgresql")]
)


def sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


@pytest.fixture
def new_store(consumer_api: str, database: Callable[[str], Database], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that creates a store by the kind of its server and a proxy's port.

    An asyncio store is used on the loop of its one consumer. A store that several consumers share has its own loop.
    """
    closers: list[Callable[[], object]] = []

    def new(kind: str, port: int | None = None, *, shared: bool = False, **options: Any) -> Any:
        if kind == "sqlite":
            store: Any = SQLiteStore(tmp_path / "store.db", **options)
            closers.append(store.close)
            return store
        url = database(kind).fresh(port)
        if kind == "redis":
            if consumer_api == "aio" and not shared:
                own = AsyncRedisStore(url, **options)
                return ends_with_its_consumer(own, own.close)
            if consumer_api == "aio":
                bridged = Bridged(lambda: AsyncRedisStore(url, **options))
                closers.append(lambda: bridged.blocking.end(bridged.blocking.store.close()))
                return bridged
            store = RedisStore(url, **options)
            closers.append(store.close)
            return store
        direct = create_engine(url.replace(f":{port}/", f":{database(kind).port}/"), poolclass=NullPool)
        SQLAlchemyStore(direct).create_table()
        if consumer_api == "aio" and kind == "postgresql" and not shared:
            loops = create_async_engine(url, connect_args=UNPREPARED)
            return ends_with_its_consumer(AsyncSQLAlchemyStore(loops, **options), loops.dispose)
        if consumer_api == "aio" and kind == "postgresql":
            bridged = Bridged(lambda: AsyncSQLAlchemyStore(create_async_engine(url), **options))
            closers.append(lambda: bridged.blocking.end(bridged.blocking.store._engine.dispose()))
            return bridged
        engine = create_engine(url, pool_size=16, connect_args=UNPREPARED if kind == "postgresql" else {})
        store = SQLAlchemyStore(engine, **options)
        closers.extend([store.close, engine.dispose])
        return store

    yield new
    for close in closers:
        close()


@pytest.mark.parametrize(
    "kind", ["redis", "postgresql", "sqlite", *(pytest.param(kind, marks=pytest.mark.soak) for kind in MYSQL)]
)
def test_f36_copies_that_arrive_together_take_effect_once(
    vhost: VirtualHost, checker: Audit, new_store: Callable[..., Any], kind: str
) -> None:
    """Two consumers with eight handlers each get ten copies of each message.

    Each message takes effect once, and every copy is acked.
    """
    store = new_store(kind, shared=True)
    handlers = [Handler(account=checker), Handler(account=checker)]
    messages = [Message(b"%d" % number, message_id=f"m{number}") for number in range(15) for _ in range(10)]
    with (
        Consumer(vhost.url, ORDERS, handlers[0], concurrency=8, prefetch=50, idempotency=store, name="one") as one,
        Consumer(vhost.url, ORDERS, handlers[1], concurrency=8, prefetch=50, idempotency=store, name="other") as other,
    ):
        send(vhost, "orders", messages, checker)
        wait_until(lambda: one.statistics.acked + other.statistics.acked == 150, timeout=60, what="all acked")
        assert one.statistics.duplicates + other.statistics.duplicates == 135
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 15


@servers
def test_f41_with_the_store_dead_nothing_is_handled_or_acked(
    vhost: VirtualHost, checker: Audit, database: Callable[[str], Database], new_store: Callable[..., Any], kind: str
) -> None:
    """When the store is back, the consumer continues; each message has one effect.

    That includes a message whose handler had its effect before the server died, and ended afterwards.
    """
    handler = Handler(account=checker)
    server = database(kind)

    def handle(delivery: Delivery) -> None:
        handler(delivery)
        if delivery.body == b"50":
            gate(delivery)

    with (
        Gate() as gate,
        Consumer(vhost.url, ORDERS, handle, concurrency=4, idempotency=new_store(kind, timeout=1.0)) as consumer,
    ):
        publish(vhost, "orders", numbered(50), checker)
        handler.wait_done(50)
        wait_until(lambda: consumer.statistics.acked == 50, timeout=20, what="acked")
        publish(vhost, "orders", numbered(1, 50), checker)
        handler.wait_done(51)
        server.kill()
        publish(vhost, "orders", numbered(50, 51), checker)
        wait_until(lambda: consumer.statistics.store_failures >= 50, timeout=30, what="all have failed")
        failures = consumer.statistics.store_failures
        gate.open()
        wait_until(lambda: consumer.statistics.store_failures > failures, timeout=30, what="a completion has failed")
        assert (len(handler.begun), consumer.statistics.acked) == (51, 50)
        health = consumer.health()
        assert health.live
        assert not health.ready
        assert health.reason.startswith("its idempotency store fails: ")
        server.start()
        handler.wait_done(101)
        wait_until(lambda: consumer.statistics.acked == 101, timeout=30, what="all acked")
        assert consumer.health().ready
        assert consumer.statistics.failed == 0, "a failure of the store is no attempt"
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 101


@pytest.mark.parametrize(("consumer_api", "kind"), APIS_AND_SERVERS, indirect=["consumer_api"])
def test_f42_with_a_hanging_store_heartbeats_go_on_without_acks(
    vhost: VirtualHost,
    checker: Audit,
    database: Callable[[str], Database],
    new_store: Callable[..., Any],
    fault_proxy: Any,
    kind: str,
) -> None:
    """Queries end by their deadline, and the consumer recovers.

    A heartbeat is due every 2 s, and the broker waits for 8 s: this process may stop for 5 s.
    """
    handler = Handler(account=checker)
    server = database(kind)
    proxy = fault_proxy(vhost.url)
    store = new_store(kind, timeout=0.5)
    with Consumer(proxy.url, ORDERS, handler, concurrency=4, heartbeat=4, idempotency=store) as consumer:
        publish(vhost, "orders", numbered(20), checker)
        wait_until(lambda: consumer.statistics.acked == 20, timeout=20, what="acked")
        server.pause()
        publish(vhost, "orders", numbered(20, 20), checker)
        wait_until(lambda: consumer.statistics.store_failures > 0, timeout=30, what="a query that has ended")
        before = proxy.seen("heartbeat", "to_broker")
        proxy.wait_for(lambda: proxy.seen("heartbeat", "to_broker") >= before + 2, timeout=30)
        assert (len(handler.begun), consumer.statistics.acked) == (20, 20)
        server.unpause()
        wait_until(lambda: consumer.statistics.acked == 40, timeout=60, what="all acked")
        assert consumer.reconnects == 0
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 40


@pytest.mark.parametrize(("consumer_api", "kind"), APIS_AND_SERVERS, indirect=["consumer_api"])
def test_f42_a_cut_off_consumer_does_not_repeat_its_effect(
    vhost: VirtualHost,
    checker: Audit,
    database: Callable[[str], Database],
    new_store: Callable[..., Any],
    fault_proxy: Any,
    kind: str,
) -> None:
    """Its message is redelivered long before the lease ends.

    The consumer then repeats the completion that the store did not answer.
    """
    server = database(kind)
    proxy = fault_proxy(vhost.url)
    with Gate() as gate:
        handler = Handler(gate, account=checker)
        store = new_store(kind, timeout=0.5)
        with Consumer(proxy.url, ORDERS, handler, concurrency=2, idempotency=store, idempotency_lease=600) as consumer:
            publish(vhost, "orders", numbered(1), checker)
            wait_until(lambda: handler.begun, timeout=20, what="the handler to begin")
            server.pause()
            proxy.cut()
            wait_until(lambda: consumer.statistics.store_failures, timeout=30, what="the redelivery to be refused")
            gate.open()
            wait_until(lambda: consumer.statistics.stale, timeout=30, what="the effect, and a completion that failed")
            server.unpause()
            wait_until(lambda: consumer.statistics.acked, timeout=30, what="acked")
            assert (consumer.statistics.duplicates, len(handler.begun)) == (1, 1)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 1


def test_f42_nor_does_another_consumer_repeat_it(
    vhost: VirtualHost,
    checker: Audit,
    database: Callable[[str], Database],
    new_store: Callable[..., Any],
    fault_proxy: Any,
) -> None:
    """The broker has given it the message, and it waits for the end of the lease.

    The first consumer gets no delivery, but repeats the completion that the store did not answer.
    """
    server = database("redis")
    proxy = fault_proxy(vhost.url)
    store = new_store("redis", timeout=0.5, shared=True)
    options = {"idempotency": store, "idempotency_lease": 20}
    with Gate() as gate:
        handler, other = Handler(gate, account=checker), Handler(account=checker)
        with Consumer(proxy.url, ORDERS, handler, name="cut off", **options) as cut_off:
            publish(vhost, "orders", numbered(1), checker)
            handler.wait_begun(1)
            server.pause()
            proxy.refuse_connections()
            proxy.cut()
            gate.open()
            wait_until(lambda: cut_off.statistics.stale, timeout=30, what="the effect, and a completion that failed")
            server.unpause()
            with Consumer(vhost.url, ORDERS, other, name="other", **options) as second:
                wait_until(lambda: second.statistics.acked, timeout=60, what="acked")
                assert (second.statistics.duplicates, other.begun) == (1, [])
            proxy.accept_connections()
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 1


MARKS: dict[str, dict[str, str]] = {
    "redis": {"claim": sha(CLAIM), "complete": sha(COMPLETE), "release": sha(RELEASE)},
    "postgresql": {"claim": "INSERT INTO reliable_mq", "complete": "SET state = 2", "release": "SET state = 0"},
}


@pytest.mark.parametrize(("consumer_api", "kind"), APIS_AND_SERVERS, indirect=["consumer_api"])
def test_f43_answers_that_are_lost_double_no_effect(
    vhost: VirtualHost,
    checker: Audit,
    database: Callable[[str], Database],
    new_store: Callable[..., Any],
    rng: random.Random,
    kind: str,
) -> None:
    """Of claims, completions and releases, the first two and one in five get no answer.

    One half of these do not reach the server, and the other half are executed.
    """
    dropped: Counter[str] = Counter()
    unanswered: Counter[str] = Counter()

    def is_lost(lost: Counter[str], data: bytes) -> bool:
        for what, mark in MARKS[kind].items():
            if mark.encode() in data and (not lost[what] or rng.random() < 0.1):
                lost[what] += 1
                return True
        return False

    def fail_first(delivery: Delivery) -> None:
        if int(delivery.body) % 4 == 0 and delivery.attempt == 1:
            raise ValueError("no")

    handler = Handler(fail_first, account=checker)
    retry = RetryPolicy(10, delays=(0.01,))
    with LossyProxy(database(kind).port, partial(is_lost, unanswered), partial(is_lost, dropped)) as proxy:
        store = new_store(kind, proxy.port)
        with Consumer(
            vhost.url, ORDERS, handler, concurrency=4, idempotency=store, prefetch=20, retry=retry
        ) as consumer:
            publish(vhost, "orders", numbered(40), checker)
            wait_until(lambda: consumer.statistics.handled == 40, timeout=120, what="all handled")
            assert consumer.statistics.dead_lettered == 0
    assert unanswered.keys() == dropped.keys() == {"claim", "complete", "release"}, (unanswered, dropped)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 40


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
def test_f44_a_duplicate_after_the_retention_takes_effect_again(
    vhost: VirtualHost, database: Callable[[str], Database], consumer_api: str, kind: str
) -> None:
    """The retention is documented to work like this.

    Before it is over, a duplicate takes no effect.
    """
    handler = Handler()
    with ExitStack() as stack:
        subject = stack.enter_context(
            make(kind if consumer_api == "sync" else f"{kind}+{ASYNC_DRIVERS[kind][0]}", database)
        )
        store = subject.store if consumer_api == "sync" else Bridged(subject.store)
        consumer = stack.enter_context(Consumer(vhost.url, ORDERS, handler, idempotency=store, idempotency_lease=LEASE))
        for copy, (age, effects) in enumerate([(0.0, 1), (RETENTION / 2, 1), (RETENTION / 2 + LEASE, 2), (0.0, 2)], 1):
            subject.age(age)
            send(vhost, "orders", [Message(b"x", message_id="m")])
            wait_until(lambda copy=copy: consumer.statistics.acked == copy, timeout=20, what="acked")  # type: ignore[misc]
            assert len(handler.done) == effects
        assert (consumer.statistics.duplicates, consumer.statistics.dead_lettered) == (2, 0)
    assert handler.attempts == [1, 1]


def test_f45_store_leases_and_retention_ignore_the_wall_clock(
    database: Callable[[str], Database], tmp_path: Path, one_api: str
) -> None:
    """Servers use their own clock, and files use the time since the machine booted."""
    offset_file = tmp_path / "offset"
    offset_file.write_text("+0")
    postgresql, file = database("postgresql").fresh(), tmp_path / "sql.db"
    for url in (postgresql, f"sqlite:///{file}"):
        SQLAlchemyStore(create_engine(url, poolclass=NullPool)).create_table()
    urls = [f"sqlite:///{file}", database("redis").fresh(), postgresql]
    if one_api == "aio":
        urls[0] = urls[0].replace("sqlite:", "sqlite+aiosqlite:")
    else:
        urls.append(f"file://{tmp_path / 'store.db'}")
    done = subprocess.run(
        [sys.executable, "-m", "integration.programs.jumping_store", str(offset_file), one_api, *urls],
        env=environment() | faketime(offset_file),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "end\n", done.stderr


# -- processes that die ------------------------------------------------------------------------------------------------


def effects_in(url: str) -> Counter[str]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return Counter(row[0] for row in connection.execute(text("SELECT id FROM effects")))


STEPS = ("claim", "claimed", "effect", "completed", "acking")


PROGRAM = "integration.programs.storing"


def let_die(*arguments: str, steps: Iterable[str], batch: Sequence[str] = ()) -> None:
    for step in steps:
        done = run(PROGRAM, *arguments, step, *batch)
        assert done.returncode == -signal.SIGKILL, (step, done.stderr)


def let_finish(vhost: VirtualHost, *arguments: str, finished: Callable[[], bool], batch: Sequence[str] = ()) -> None:
    """Let a process consume the remaining messages; it ends on SIGTERM, all acked."""
    with Process(PROGRAM, *arguments, "none", *batch, stdout=1, stderr=2) as program:
        try:
            wait_until(finished, timeout=60, what="every message has taken effect", interval=0.2)
            wait_until(lambda: not vhost.live_counts()["orders"], timeout=60, what="every message is acked")
            program.terminate()
            assert program.wait(60) == 0
        finally:
            program.kill()
    assert vhost.live_counts().get("orders", 0) == 0


def new_inbox(database: Callable[[str], Database], directory: Path, kind: str) -> str:
    """Create a database with the tables of a store and of effects; return its URL."""
    url = f"sqlite:///{directory / 'orders.db'}" if kind == "sqlite" else database(kind).fresh()
    engine = create_engine(url, poolclass=NullPool)
    SQLAlchemyStore(engine).create_table()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id varchar(100) NOT NULL)"))
    return url


def check_lines(file: Path, ids: list[str], *, twice_at_most: int) -> None:
    """Check that no effect follows a completion.

    A repeated effect is allowed if the process died before the completion.
    """
    done: set[str] = set()
    effects: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        what, _, message_id = line.partition(" ")
        if what == "done":
            done.add(message_id)
        else:
            assert message_id not in done, "an effect of what the store had as done"
            effects[message_id] += 1
    assert effects.keys() == set(ids)
    assert len(done) > len(ids) / 2  # a process that dies between the store's answer and its line has written none
    assert sum(effects.values()) - len(ids) <= twice_at_most


def all_acked(vhost: VirtualHost, file: Path, ids: list[str]) -> bool:
    effected = set(file.read_text().splitlines()) >= {f"effect {message_id}" for message_id in ids}
    return effected and vhost.live_counts().get("orders", 0) == 0


@pytest.mark.parametrize(("kind", "api", "driver"), [*APIS, ("sqlite", "sync", "")])
def test_f35_with_an_inbox_a_kill_at_any_step_leaves_one_effect(
    vhost: VirtualHost, database: Callable[[str], Database], tmp_path: Path, kind: str, api: str, driver: str
) -> None:
    """Row 34 as well: processes die at different steps, and the last one finishes."""
    url = new_inbox(database, tmp_path, kind)
    ids = publish_orders(vhost, 60)
    steps = STEPS if soaking() or (kind, api) == ("postgresql", "sync") else ("effect", "completed")
    program = (vhost.url, with_driver(url, driver), api, "inbox")
    let_die(*program, steps=steps if soaking() or kind == "postgresql" else steps[:1])
    let_finish(vhost, *program, finished=lambda: len(effects_in(url)) >= len(ids))
    assert effects_in(url) == Counter(ids)


@pytest.mark.parametrize(
    ("kind", "api"), [("redis", "sync"), pytest.param("redis", "aio", marks=pytest.mark.soak), ("sqlite", "sync")]
)
def test_f35_a_kill_between_completion_and_ack_leaves_one_effect(
    vhost: VirtualHost, database: Callable[[str], Database], tmp_path: Path, kind: str, api: str
) -> None:
    """Row 34 as well. The effect is outside of the store.

    So the kill must not happen between the effect and its completion.
    """
    url = database("redis").fresh() if kind == "redis" else f"file://{tmp_path / 'store.db'}"
    effects = tmp_path / "effects"
    ids = publish_orders(vhost, 60)
    program = (vhost.url, url, api, str(effects))
    let_die(*program, steps=("claimed", "completed"))
    let_finish(vhost, *program, finished=lambda: all_acked(vhost, effects, ids))
    # Two handlers run at a time: the effect of one is repeated if the completion of the other ends the process.
    check_lines(effects, ids, twice_at_most=16)


@pytest.mark.parametrize(
    ("kind", "api"),
    [(kind, api) for api in ("sync", "aio") for kind in ("redis", "postgresql")]
    if soaking()
    else [("postgresql", "sync"), ("redis", "aio")],
)
def test_f34_f35_a_kill_in_a_batch_repeats_no_completed_effect(
    vhost: VirtualHost, database: Callable[[str], Database], tmp_path: Path, kind: str, api: str
) -> None:
    """With an inbox, no effect is repeated.

    Without one, only effects of the unfinished batch are repeated.
    """
    file = tmp_path / "effects"
    url = new_inbox(database, tmp_path, kind) if kind == "postgresql" else database(kind).fresh()
    ids = publish_orders(vhost, 60)
    program = (vhost.url, url, api, "inbox" if kind == "postgresql" else str(file))
    let_die(*program, steps=("effect", "completed"), batch=["5"])

    def finished() -> bool:
        return len(effects_in(url)) >= len(ids) if kind == "postgresql" else all_acked(vhost, file, ids)

    let_finish(vhost, *program, finished=finished, batch=["5"])
    if kind == "postgresql":
        assert effects_in(url) == Counter(ids)
    else:
        check_lines(file, ids, twice_at_most=2 * 2 * 5)  # two kills, two handlers with five deliveries each


def publish_orders(vhost: VirtualHost, count: int) -> list[str]:
    """Publish to a queue that exists before its consumers do."""
    messages = [Message(body) for body in numbered(count)]
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        assert publisher.publish_many(messages, routing_key="orders").ok
    return [message.message_id for message in messages]


def test_f36_eight_contending_processes_effect_each_id_once(
    database: Callable[[str], Database], tmp_path: Path, one_api: str
) -> None:
    """Each id is delivered ten times, to any process.

    One attempt in ten fails and is repeated.
    """
    ids, processes = (1000 if soaking() else 30), 8
    urls = [database("redis").fresh()]
    if one_api == "sync":
        urls.append(f"file://{tmp_path / 'store.db'}")
    for kind, driver in (("postgresql", "asyncpg"), *((kind, "asyncmy") for kind in MYSQL if soaking())):
        url = database(kind).fresh()
        SQLAlchemyStore(create_engine(url, poolclass=NullPool)).create_table()
        urls.append(with_driver(url, "" if one_api == "sync" else driver))
    arguments = [str(processes), str(ids), str(tmp_path / "effects"), *urls]
    name = "integration.programs.contending"
    programs = [Process(name, one_api, str(number), *arguments) for number in range(processes)]
    errors = [program.communicate(timeout=110)[1] for program in programs]
    assert [program.returncode for program in programs] == [0] * processes, errors
    for position, url in enumerate(urls):
        effects = Counter((tmp_path / f"effects.{position}").read_text().split())
        assert effects == Counter(f"id-{number}" for number in range(ids)), url
