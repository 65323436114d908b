"""The contract of stores on real servers, and faults of the servers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
import redis
import redis.asyncio
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from integration.support.databases import ASYNC_DRIVERS, Database, with_driver
from integration.support.lossy import LossyProxy
from integration.support.seeds import soak_seeds, soaking
from reliable_mq import IdempotencyStoreError
from reliable_mq.stores import AsyncRedisStore, AsyncSQLAlchemyStore, ClaimStatus, RedisStore, SQLAlchemyStore
from reliable_mq.testing.store_contract import LEASE, RETENTION, StoreContract, StoreOnThread, contended, explain
from reliable_mq.testing.waiting import wait_until
from tests.stores import subjects
from tests.stores.purging import grow
from tests.stores.subjects import Subject

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine

# A database, with a driver if it is not the usual one.
KINDS = ("redis", "redis+asyncio", "postgresql", "postgresql+psycopg_async", "mariadb", "mysql")
BOTH_APIS = [{"redis", "postgresql"}, {"redis+asyncio", "postgresql+psycopg_async"}]  # on one server
MORE_DRIVERS = ("postgresql+asyncpg", "postgresql+psycopg2", "mariadb+asyncmy", "mysql+asyncmy")
EVERY_KIND = [*KINDS, *(pytest.param(kind, marks=pytest.mark.soak) for kind in MORE_DRIVERS)]
_AGE = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key) - ARGV[1]
  local head, ends = string.match(redis.call('GET', key), '^(.*|)(%d+)$')
  if left <= 0 then
    redis.call('DEL', key)
  else
    redis.call('SET', key, head .. string.format('%.0f', math.max(ends - ARGV[1] * 1000, 0)), 'PX', left)
  end
end
"""
_REWRITE = """
local key = redis.call('KEYS', '*' .. ARGV[1])[1]
redis.call('SET', key, '2' .. string.sub(redis.call('GET', key), 2), 'KEEPTTL')
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Outside of a soak, half of a server's tests run on each API."""
    left = set() if soaking() else BOTH_APIS[crc32(metafunc.function.__name__.encode()) % 2]
    kinds = [kind for kind in EVERY_KIND if not isinstance(kind, str) or kind not in left]
    for name in ("subject", "breakable"):
        if name in metafunc.fixturenames and not any(metafunc.definition.iter_markers("parametrize")):
            metafunc.parametrize(name, kinds, indirect=True)


def redis_subject(url: str, *, on_asyncio: bool) -> Subject:
    def opened() -> Any:
        if not on_asyncio:
            return stack.enter_context(closing(RedisStore(url, retention=RETENTION, timeout=30)))
        blocking = StoreOnThread(lambda: AsyncRedisStore(url, retention=RETENTION, timeout=30))
        stack.callback(lambda: blocking.end(blocking.store.close()))
        return blocking

    client, stack = redis.Redis.from_url(url), contextlib.ExitStack()
    stack.callback(client.close)
    age, rewrite = client.register_script(_AGE), client.register_script(_REWRITE)
    return Subject(
        opened(),
        lambda seconds: age(args=[int(seconds * 1000)]),
        client.flushall,
        lambda key: rewrite(args=[key]),
        opened,
        stack,
    )


def make(kind: str, database: Callable[[str], Database]) -> Subject:
    name, _, driver = kind.partition("+")
    url = database(name).fresh()
    if name != "redis":
        if driver in ASYNC_DRIVERS[name]:
            return subjects.sqlalchemy_async(with_driver(url, driver), create_engine(url, poolclass=NullPool))
        return subjects.sqlalchemy(create_engine(with_driver(url, driver)))
    return redis_subject(url, on_asyncio=bool(driver))


@pytest.fixture
def subject(request: pytest.FixtureRequest, database: Callable[[str], Database]) -> Iterator[Subject]:
    with make(request.param, database) as made:
        yield made


class TestStores(StoreContract):
    @pytest.fixture
    def examples(self) -> int:
        return 5 * soak_seeds()


# -- expired rows ------------------------------------------------------------------------------------------------------

IN_SQL = ("postgresql", "postgresql+psycopg_async", "mariadb", "mysql")


@pytest.mark.parametrize("subject", IN_SQL if soaking() else IN_SQL[:1], indirect=True)
def test_a_table_holds_what_is_not_over_and_little_more(subject: Subject) -> None:
    grow(subject, seconds=LEASE)


def over(engine: Engine, count: int = 300) -> None:
    """Insert expired rows into the table."""
    rows = ", ".join(f"('over-{number}', 1, 2, 1, 0, 0, 1, {number})" for number in range(count))
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO reliable_mq_claims VALUES {rows}"))


@pytest.fixture(params=["postgresql", "mariadb", "mysql"])
def two_stores(
    request: pytest.FixtureRequest, database: Callable[[str], Database]
) -> Iterator[tuple[SQLAlchemyStore, Engine]]:
    """A store, and a separate engine."""
    url = database(request.param).fresh()
    engine, other = create_engine(url), create_engine(url)
    store = SQLAlchemyStore(engine, timeout=20.0)
    store.create_table()
    yield store, other
    store.close()
    engine.dispose()
    other.dispose()


def test_claims_do_not_wait_for_a_purge(two_stores: tuple[SQLAlchemyStore, Engine]) -> None:
    """The claims are for new keys, with any expiry, during an open purge."""
    store, other = two_stores
    with other.connect() as purging:
        over(other, 200)  # the index ends behind them
        statements_of_a_purge(store, purging)
        assert purging.scalar(text("SELECT count(*) FROM reliable_mq_claims")) == 0, "not committed yet"
        claims = store.claim_many([f"key-{number}" for number in range(64)], LEASE)
        assert all(store.complete_many(claims))


def test_a_purge_does_not_wait_for_rows_that_others_have(two_stores: tuple[SQLAlchemyStore, Engine]) -> None:
    """For example, a handler's transaction is open; claims do not wait either."""
    store, other = two_stores
    over(other)
    with other.connect() as holding:
        holding.execute(text("SELECT * FROM reliable_mq_claims WHERE claim_key = 'over-7' FOR UPDATE"))
        [claim] = store.claim_many(["a"], LEASE)
        assert claim.status is ClaimStatus.NEW
        store.purge()
        with other.connect() as looking:
            left = looking.execute(text("SELECT claim_key FROM reliable_mq_claims ORDER BY claim_key")).scalars().all()
    assert left == ["a", "over-7"]


def test_a_thousand_keys_lock_no_other_row(two_stores: tuple[SQLAlchemyStore, Engine]) -> None:
    """MariaDB looks up the rows of the table in a list of so many keys."""
    store, other = two_stores
    held, *claims = store.claim_many([f"key-{number:04}" for number in range(1300)], LEASE)
    with other.connect() as holding:
        holding.execute(text(f"SELECT * FROM reliable_mq_claims WHERE claim_key = '{held.key}' FOR UPDATE"))
        assert all(store.release_many(claims[:1000], failed=True))
        again = store.claim_many([claim.key for claim in claims[:1000]], LEASE)
        assert {(claim.status, claim.attempts) for claim in again} == {(ClaimStatus.NEW, 1)}
        assert all(store.reset_many([claim.key for claim in again]))
        assert all(store.complete_many(again))


def test_unheld_keys_do_not_wait_for_a_key_that_somebody_holds(
    two_stores: tuple[SQLAlchemyStore, Engine],
) -> None:
    """The table is so small that the server would prefer to scan and lock all of it."""
    store, other = two_stores
    held, *claims = store.claim_many([f"key-{number:03}" for number in range(200)], LEASE)
    with other.connect() as holding:
        holding.execute(text(f"SELECT * FROM reliable_mq_claims WHERE claim_key = '{held.key}' FOR UPDATE"))
        assert all(store.release_many(claims[100:], failed=True))
        assert all(store.reset_many([claim.key for claim in claims[100:150]]))
        assert all(store.complete_many(claims[:100]))
        again = store.claim_many([claim.key for claim in claims[100:]], LEASE)
        assert {claim.status for claim in again} == {ClaimStatus.NEW}


@pytest.mark.parametrize("mode", ["ORACLE", "SIMULTANEOUS_ASSIGNMENT"])
def test_claims_in_modes_whose_assignments_see_the_old_row(database: Callable[[str], Database], mode: str) -> None:
    """Otherwise, MariaDB's assignments see the results of those to their left."""
    settings = {"init_command": f"SET SESSION sql_mode = '{mode}'"}
    engine = create_engine(database("mariadb").fresh(), connect_args=settings)
    with closing(SQLAlchemyStore(engine, timeout=20.0)) as store:
        store.create_table()
        claims = store.claim_many(["failed"], LEASE)
        assert store.release_many(claims, failed=True) == [True]
        assert [one.status for one in store.claim_many(["failed"], LEASE)] == [ClaimStatus.NEW]
        store.claim_many(["late"], 1e-6)
        assert [one.status for one in store.claim_many(["late"], LEASE)] == [ClaimStatus.NEW]
        assert [one.status for one in store.claim_many(["late"], LEASE)] == [ClaimStatus.IN_PROGRESS]
    engine.dispose()


@pytest.mark.parametrize("other", ["completion", "reset"])
def test_claims_and_other_calls_for_the_same_keys_never_deadlock(
    database: Callable[[str], Database], other: str
) -> None:
    """They lock keys in the same order, also if the database sorts texts in another."""
    url = make_url(database("postgresql").fresh())
    name = f"{url.database}_icu"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'"))
    engine.dispose()
    engine = create_engine(url.set(database=name))
    errors: list[str] = []
    event.listen(engine, "handle_error", lambda context: errors.append(str(context.original_exception)))
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    with closing(SQLAlchemyStore(engine, timeout=20.0)) as store, ThreadPoolExecutor() as threads:
        store.create_table()
        claims = [*store.claim_many(["a"], LEASE), *store.claim_many(["B"], LEASE)]  # in this order in the table
        if other == "reset":
            for claim in claims:
                store.release_many([claim], failed=True)
        with engine.connect() as holding, engine.connect() as looking:
            holding.execute(text("SELECT * FROM reliable_mq_claims WHERE claim_key = 'B' FOR UPDATE"))
            again = threads.submit(store.claim_many, ["B", "a"], LEASE)
            wait_until(lambda: looking.scalar(waiting) == 1, timeout=10, what="the claim to wait")
            call = partial(store.complete_many, claims) if other == "completion" else partial(store.reset_many, "Ba")
            changed = threads.submit(call)
            wait_until(lambda: looking.scalar(waiting) == 2, timeout=10, what=f"the {other} to wait")
        assert changed.result() == [True, True]
        again.result()
    assert errors == []
    engine.dispose()


@pytest.mark.parametrize("two_stores", ["postgresql"], indirect=True)
def test_no_query_is_left_that_waits_for_a_lock(two_stores: tuple[SQLAlchemyStore, Engine]) -> None:
    """While PostgreSQL waits for a lock, it does not notice that its client is gone.

    It ends the query itself, a little before the client gives up.
    """
    store, other = two_stores
    hasty = SQLAlchemyStore(other, timeout=1.0)
    claims = store.claim_many(["a"], LEASE)
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    calls: list[Callable[[], object]] = [
        lambda: hasty.claim_many(["a"], LEASE),
        lambda: hasty.complete_many(claims),
        lambda: hasty.release_many(claims, failed=True),
        lambda: hasty.reset_many(["a"]),
    ]

    def left() -> int:
        with other.connect() as looking:
            return int(looking.scalar(waiting) or 0)

    assert store.release_many(claims, failed=True) == [True]  # without a failed attempt, there is nothing to reset
    claims = store.claim_many(["a"], LEASE)
    with other.connect() as holding:
        holding.execute(text("SELECT * FROM reliable_mq_claims WHERE claim_key = 'a' FOR UPDATE"))
        for call in calls:
            with pytest.raises(IdempotencyStoreError, match=r"LockNotAvailable|no answer within"):
                call()
        wait_until(lambda: left() == 0, timeout=20, what="no query that waits")
    hasty.close()
    assert store.complete_many(claims) == [True]


def test_a_purge_reads_what_is_over_by_the_index(two_stores: tuple[SQLAlchemyStore, Engine]) -> None:
    """This holds for a large table, analyzed or not.

    The rows are then looked up by their keys.
    """
    store, other = two_stores
    over(other, 5000)
    with other.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO reliable_mq_claims SELECT concat(name, claim_key), 1, 2, 1, 0, 0, 1, 9000000000000000 "
                "FROM reliable_mq_claims CROSS JOIN (SELECT 'a' AS name UNION SELECT 'b' UNION SELECT 'c') AS names"
            )
        )
    for analyze in ("", f"ANALYZE {'' if other.dialect.name == 'postgresql' else 'TABLE'} reliable_mq_claims"):
        with other.connect() as connection:
            if analyze:
                connection.exec_driver_sql(analyze)
            plans = statements_of_a_purge(store, connection)
        assert "reliable_mq_claims_expires" in plans[0], plans[0]
        assert not any("Seq Scan" in plan or "Sort" in plan or "filesort" in plan for plan in plans), plans
        if len(plans) > 1:  # MySQL shows no plan for a DELETE with its hint
            assert all("PRIMARY" in plan or "not executable" in plan for plan in plans[1:]), plans


def statements_of_a_purge(store: SQLAlchemyStore, connection: Connection) -> list[str]:
    """Run the statements in a transaction left open; return the plan of each."""
    plans: list[str] = []
    steps = store._sql.purge(250, now=0)
    ask = next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            if "VERSION()" not in ask.sql:
                plan = connection.execute(text("EXPLAIN " + ask.sql), ask.parameters).all()
                plans.append("\n".join(str(list(row)) for row in plan))
            result = connection.execute(text(ask.sql), ask.parameters)
            ask = steps.send(result.all() if result.returns_rows else ())
    return plans


# -- faults of servers -------------------------------------------------------------------------------------------------


class Breakable:
    """A store with a short timeout, and its server."""

    def __init__(
        self, kind: str, database: Callable[[str], Database], timeout: float = 1.0, port: int | None = None
    ) -> None:
        name, _, driver = kind.partition("+")
        self.server = database(name)
        url = self.server.fresh(port)
        if name != "redis":
            url = with_driver(url, driver)
        self.closers: list[Callable[[], object]] = []
        if driver in ASYNC_DRIVERS[name]:
            blocking = StoreOnThread(lambda: self._make_async(name, url, timeout))
            self.store: Any = blocking
            if name != "redis":
                blocking.run(blocking.store.create_table())
                pool = blocking.store._engine.pool
                self.closers.append(lambda: all_returned(pool))
                self.closers.append(lambda: blocking.end(blocking.store._engine.dispose()))
            else:
                self.closers.append(lambda: blocking.end(blocking.store.close()))
        elif name == "redis":
            self.store = RedisStore(url, timeout=timeout)
            self.closers.append(self.store.close)
        else:
            engine = create_engine(url)
            self.store = SQLAlchemyStore(engine, timeout=timeout)
            self.store.create_table()
            self.closers += [self.store.close, lambda: all_returned(engine.pool), engine.dispose]

    @staticmethod
    def _make_async(name: str, url: str, timeout: float) -> Any:
        if name == "redis":
            return AsyncRedisStore(url, timeout=timeout)
        return AsyncSQLAlchemyStore(create_async_engine(url), timeout=timeout)

    def claim(self, *keys: str) -> list[Any]:
        return list(self.store.claim_many(keys, 300.0))

    def close(self) -> None:
        self.server.heal()
        for close in self.closers:
            close()


def all_returned(pool: Any) -> None:
    """Wait until every connection has returned its place in the pool."""
    wait_until(lambda: pool.checkedout() == 0, timeout=20, what=pool.status)


@pytest.fixture
def breakable(request: pytest.FixtureRequest, database: Callable[[str], Database]) -> Iterator[Breakable]:
    made = Breakable(request.param, database)
    yield made
    made.close()


def test_f41_a_store_fails_with_its_server_and_recovers_with_it(breakable: Breakable) -> None:
    """Claims and completions survive the restart, and the store works again."""
    done, held = answered_again(partial(breakable.claim, "done", "held"))
    assert answered_again(partial(breakable.store.complete_many, [done])) == [True]
    breakable.server.kill()
    begun = time.monotonic()
    with pytest.raises(IdempotencyStoreError, match="failed"):
        breakable.claim("other")
    assert time.monotonic() - begun < 10
    breakable.server.start()
    made = answered_again(partial(breakable.claim, "done", "held", "other"))
    assert [one.status for one in made] == [ClaimStatus.DONE, ClaimStatus.IN_PROGRESS, ClaimStatus.NEW]
    assert answered_again(partial(breakable.store.complete_many, [held])) == [True]


def test_f42_a_hanging_store_fails_in_time_and_finds_its_claim(breakable: Breakable) -> None:
    """The frozen server may still execute the claim.

    The next claim does not wait for that lease.
    """
    [done] = answered_again(partial(breakable.claim, "done"))
    breakable.server.pause()
    begun = time.monotonic()
    with pytest.raises(IdempotencyStoreError):
        breakable.claim("a", "b")
    with pytest.raises(IdempotencyStoreError):
        breakable.store.complete_many([done])
    assert time.monotonic() - begun < 12
    breakable.server.unpause()
    made = answered_again(partial(breakable.claim, "a", "b"))
    assert [one.status for one in made] == [ClaimStatus.NEW] * 2
    assert answered_again(partial(breakable.store.complete_many, [done, *made])) == [True] * 3


@pytest.mark.parametrize("kind", ["redis", "redis+asyncio"])
def test_redis_takes_a_call_of_each_of_many_workers(database: Callable[[str], Database], kind: str) -> None:
    """By default, redis-py has a hundred connections, and no call waits for one."""
    with closing(Breakable(kind, database, timeout=30.0)) as made, ThreadPoolExecutor(150) as pool:
        made.server.pause()
        calls = [pool.submit(made.claim, str(number)) for number in range(150)]
        wait_until(lambda: all(call.running() for call in calls), timeout=20, what="all calls at once")
        made.server.unpause()
        assert {call.result()[0].status for call in calls} == {ClaimStatus.NEW}


@pytest.mark.parametrize("kind", ["redis", "redis+asyncio"])
def test_a_store_leaves_a_redis_that_became_a_replica(database: Callable[[str], Database], kind: str) -> None:
    """It stays up and refuses to write, and the URL leads to the new primary."""
    with (
        Database("redis") as old,
        LossyProxy(old.port) as proxy,
        closing(Breakable(kind, database, timeout=10.0, port=proxy.port)) as made,
    ):
        made.claim("a")
        proxy.upstream = made.server.port
        with redis.Redis(port=old.port) as client:
            client.replicaof("127.0.0.1", made.server.port)
        claims = made.claim("a", *map(str, range(2500)))
        assert {one.status for one in claims} == {ClaimStatus.NEW}
        assert all(made.store.complete_many(claims))


def answered_again(call: Callable[[], list[Any]]) -> list[Any]:
    """Call again while answers are late.

    After a freeze or a start, earlier queries may still hold locks. Before it, a server may be slow, too.
    """
    for _ in range(10):
        try:
            return call()
        except IdempotencyStoreError as error:
            last = error
    raise last


@pytest.mark.parametrize(
    "kind", KINDS + MORE_DRIVERS if soaking() else ("redis+asyncio", "postgresql")
)  # MariaDB's and MySQL's locks outlive a connection for long
def test_f43_claims_whose_answers_are_lost_are_linearizable(
    database: Callable[[str], Database], rng: random.Random, kind: str
) -> None:
    """A query without an answer may or may not have been executed."""
    name = kind.partition("+")[0]
    share = 0.3 if name == "redis" else 0.1  # a query to the others has several parts
    losing = threading.Event()
    with (
        LossyProxy(database(name).port, lambda _: losing.is_set() and rng.random() < share) as proxy,
        closing(Breakable(kind, database, timeout=10.0, port=proxy.port)) as made,
    ):
        losing.set()
        history = contended(made.store, rng.randrange(1000))
        losing.clear()
    assert sum(event.answer is None for event in history) > 5
    for key in "abc":
        events = [event for event in history if event.key == key]
        assert explain(events, asked_again=True), key


def test_f43_a_lost_answer_to_the_last_query_costs_no_pool_place(
    database: Callable[[str], Database],
) -> None:
    """psycopg2 asks the server to reset the isolation level.

    That answer is lost more often than the pool has places.
    """
    kind = "postgresql+psycopg2"
    with (
        LossyProxy(database("postgresql").port, lambda question: b"SET default_transaction" in question) as proxy,
        closing(Breakable(kind, database, timeout=10.0, port=proxy.port)) as made,
    ):
        for number in range(40):
            [claim] = made.claim(f"key {number}")
            assert claim.status is ClaimStatus.NEW
        assert proxy.lost > 15  # a new connection has nothing to reset


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_connection_goes_back_to_its_pool_as_it_came(database: Callable[[str], Database], driver: str) -> None:
    """Others get transactions at the engine's own isolation level."""
    engine = create_engine(
        with_driver(database("postgresql").fresh(), driver), pool_size=1, max_overflow=0, isolation_level="SERIALIZABLE"
    )
    store = SQLAlchemyStore(engine, timeout=30.0)
    store.create_table()
    assert store.complete_many(store.claim_many(["a"], LEASE)) == [True]
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE kept (id integer)"))
        assert connection.get_isolation_level() == "SERIALIZABLE"
        connection.rollback()
        assert connection.scalar(text("SELECT to_regclass('kept')")) is None
    store.close()
    engine.dispose()


# -- round trips -------------------------------------------------------------------------------------------------------

# For a claim, a completion and a release. MariaDB and MySQL need a change and a read, a read and a change, and
# COMMIT. Then SQLAlchemy rolls back the connection that it returns to its pool, and psycopg2 resets the isolation
# level each time.
ROUND_TRIPS = {"mariadb": (4, 4, 4), "mysql": (4, 4, 4), "postgresql+psycopg2": (2, 2, 2)}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_64_keys_are_one_round_trip(database: Callable[[str], Database], kind: str) -> None:
    """Round trips are counted once the server knows the statements or the script."""
    name = kind.partition("+")[0]
    with (
        LossyProxy(database(name).port) as proxy,
        closing(Breakable(kind, database, timeout=10.0, port=proxy.port)) as made,
    ):
        pace = getattr(getattr(made.store, "store", made.store), "_pace", None)
        if pace is not None:
            pace._not_before = math.inf  # no purge, which would be counted as well
        counted: list[tuple[int, ...]] = []
        for number in range(12):  # psycopg prepares the sixth statement
            keys = [f"{number}-{key}" for key in range(64)]
            before = proxy.round_trips
            claims = made.claim(*keys)
            claimed = proxy.round_trips
            assert all(made.store.complete_many(claims[:32]))
            completed = proxy.round_trips
            assert all(made.store.release_many(claims[32:], failed=True))
            counted.append((claimed - before, completed - claimed, proxy.round_trips - completed))
        assert set(counted[-4:]) == {ROUND_TRIPS.get(kind, ROUND_TRIPS.get(name, (1, 1, 1)))}, counted


@pytest.mark.parametrize("kind", ["redis", "redis+asyncio"])
def test_thousands_of_keys_are_sent_to_redis_at_once(database: Callable[[str], Database], kind: str) -> None:
    """The store does not ask first whether the script is there.

    If it is missing, the store loads it and sends the keys again.
    """
    seen: list[bytes] = []

    def look(data: bytes) -> bool:
        seen.append(data)
        return False

    server = database("redis")
    with (
        LossyProxy(server.port, look) as proxy,
        closing(Breakable(kind, database, timeout=10.0, port=proxy.port)) as made,
    ):
        for number in range(2):
            with redis.Redis(port=server.port) as client:
                if number == 0:
                    client.script_flush()
            seen.clear()
            claims = made.claim(*(f"{number}-{key}" for key in range(2500)))
            assert all(made.store.complete_many(claims))
            assert (b"SCRIPT" in b"".join(seen)) is (number == 0)


@pytest.mark.parametrize(
    "breakable", ["redis", "postgresql", pytest.param("mariadb", marks=pytest.mark.soak)], indirect=True
)
def test_f42_a_long_hang_of_the_server_uses_bounded_threads(breakable: Breakable) -> None:
    """Dozens of callers fail within the deadline.

    Threads that they leave behind end with the freeze.
    """
    before = threading.active_count()
    answered_again(partial(breakable.claim, "x"))
    breakable.server.pause()
    slowest: list[float] = []

    def ask() -> None:
        for _ in range(2):
            begun = time.monotonic()
            with pytest.raises(IdempotencyStoreError):
                breakable.claim("a")
            slowest.append(time.monotonic() - begun)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(slowest) == 48
    assert max(slowest) < 12
    assert threading.active_count() - before <= 64
    breakable.server.unpause()
    # Each claim had its own holder, and one of them has the key; this tries them in turn.
    wait_until(
        lambda: answered_again(partial(breakable.claim, "a"))[0].status is ClaimStatus.NEW,
        timeout=20,
        what="claimed",
        interval=0,
    )


def test_a_database_without_the_table_says_how_to_get_it(database: Callable[[str], Database]) -> None:
    """The error text has the statements."""
    engine = create_engine(database("postgresql").fresh())
    store = SQLAlchemyStore(engine, timeout=30.0)
    with pytest.raises(IdempotencyStoreError, match=r"create_table\(\)"):
        store.claim_many(["a"], LEASE)
    for statement in store.ddl:
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)
    assert store.claim_many(["a"], LEASE)[0].status is ClaimStatus.NEW
    store.close()
    engine.dispose()


@pytest.mark.parametrize("subject", IN_SQL, indirect=True)
def test_a_forked_child_opens_connections_of_its_own(subject: Subject) -> None:
    """Two processes on one connection would read each other's replies."""
    subject.store.claim_many(["parent"], LEASE)
    store = getattr(subject.store, "store", subject.store)
    opened: list[object] = []
    event.listen(getattr(store._engine, "sync_engine", store._engine), "connect", lambda *made: opened.append(made))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        claims = store.claim_many(["parent", "child"], LEASE)
        claims = claims if isinstance(claims, list) else asyncio.run(claims)
        answers.put(([claim.status for claim in claims], len(opened)))
        os._exit(0)

    process = context.Process(target=child, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert answers.get() == ([ClaimStatus.IN_PROGRESS, ClaimStatus.NEW], 1)
    assert subject.store.claim_many(["child"], LEASE)[0].status is ClaimStatus.IN_PROGRESS
    assert not opened
