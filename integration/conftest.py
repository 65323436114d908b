"""Fixtures of the integration tests: brokers, virtual hosts, seeds and checks.

===================  =========  ========================================================================================
fixture              scope      value
===================  =========  ========================================================================================
`broker`             session    the newest line, shared: a test that harms it as a whole takes `private_broker`
`broker_40`          session    RabbitMQ 4.0, shared
`any_broker`         session    both lines, one after the other
`vhost`              test       a fresh virtual host on `broker` (url, connect, queue, counts); deleted afterwards
`vhost_40`           test       the same on `broker_40`
`any_vhost`          test       the same on each of both lines
`private_broker`     test       the same broker, for a test that kills, pauses or starves it; healed afterwards
`private_vhost`      test       a fresh virtual host on `private_broker`
`authority`          session    the `Authority` of the brokers, whose TLS ports require a certificate of it
`new_vhost`          test       a function `(broker) -> VirtualHost`, for more virtual hosts
`rabbitmq_cluster`   test       in `cluster/`: three nodes, shared; may be harmed, healed after each test
`cluster_vhost`      test       in `cluster/`: a fresh virtual host on the cluster
`traffic`            test       in `cluster/`: messages on the cluster, and their history
`database`           test       a function `(kind) -> Database`: the shared server of that kind, healed for each test
`checker`, `audit`   test       the account of the fault matrix; its counts are printed at the end of the run
`report`             test       a function `(line)`: prints the line at the end of the run (see `tests.reports`)
`record_round`       test       a function `(Round)`: counts the round in the table at the end (see `support.rounds`)
`seed`, `rng`        test       a number that is part of the test's name; `random.Random(seed)`
`fault_proxy`        test       a function `(url, *, seed=0) -> FaultProxy`
`publisher_api`      test       one API (see below): `Publisher` of the test's module is the sync or the asyncio one
`consumer_api`       test       one API (see below): `Consumer` of the test's module is the sync or the asyncio one
`connection_api`     test       one API (see below): a `Recorded` connection is the sync or the asyncio one
`one_api`            test       the name of one API (see below): ``"sync"`` or ``"aio"``
`run_async`          test       a function `(coroutine)`: runs it on a fresh event loop, which must be clean at the end
`baseline`           test       checks afterwards that threads and descriptors are those of before
===================  =========  ========================================================================================

`broker`, `private_broker` and the virtual hosts on them are the newest line. ``@pytest.mark.parametrize("broker",
["4.0"], indirect=True)`` selects the line. `make soak` runs each such test on both lines and with many seeds, unless
it selects a line. Of the tests that run on one API, half run on each; `make soak` runs all of them on both, and also
runs publishers and `run_async` on uvloop. `any_broker` is the newest line; with ``@pytest.mark.both_lines`` or in
`make soak` it is both.
"""

from __future__ import annotations

import gc
import random
import signal
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from xdist.scheduler import LoadFileScheduling

from integration.support import rounds
from integration.support.asyncio_thread import AsyncioThread
from integration.support.baseline import back_to_baseline
from integration.support.blocking import BlockingPublisher, UvloopPublisher
from integration.support.blocking_consumer import BlockingConsumer
from integration.support.certificates import HOSTS, TLS_CONF, Authority
from integration.support.databases import Database
from integration.support.event_loops import _uvloop, run_async
from integration.support.processes import start_server
from integration.support.recorder import Recorded
from integration.support.seeds import SEED, deselect_for_soak, seeds, soaking
from integration.support.set_up import LINES, broker_image, set_up
from reliable_mq.testing import Audit, RabbitMQ, VirtualHost, remove_leftovers
from reliable_mq.testing.fixtures import audit, fault_proxy, new_vhost
from tests import properties, reports
from tests.collecting import pytest_collection
from tests.log_records import records_can_be_formatted
from tests.new_queues import treat_new_queues_as_old
from tests.signal_handlers import restored_handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [  # fixtures and hooks from elsewhere, for every test here
    "_uvloop",
    "audit",
    "fault_proxy",
    "new_vhost",
    "pytest_collection",
    "records_can_be_formatted",
    "restored_handlers",
    "run_async",
]

treat_new_queues_as_old()

# The slowest tests come first, so that no process is left with one at the end. The tests of the files in `_SPLIT` go
# to any process, one by one. The tests of any other file go to one process, with the servers that they share.
_SPLIT = (
    "test_consumer_connection_faults.py",
    "test_examples.py",
    "test_publisher_connection_faults.py",
    "test_new_queues.py",
    "test_cli_dlq.py",
    "test_publisher_races.py",
    "test_staged_source.py",
)
_LONGEST = (
    "test_consumer_stores.py",
    "test_stores.py",
    "test_outbox_sqlalchemy.py",
    "test_cli_outbox.py",
    *_SPLIT,
    "test_cli_doctor.py",
    "test_outbox_disk.py",
    "test_row_leases.py",
    "test_connection.py",
    "test_consumer_handlers.py",
    "test_stage.py",
    "test_broker_fixtures.py",
    "test_publisher_verdicts.py",
    "test_consumer_poison.py",
    "test_tokens.py",
    "test_consumer_retries.py",
    "test_dead_letters.py",
    "test_pika_bugs.py",
    "test_publisher.py",
    "test_cli.py",
    "test_health.py",
    "test_outbox_hangs.py",
    "test_cli_demo.py",
    "test_inbox_faults.py",
    "test_inbox.py",
    "test_consumer_process.py",
    "test_web.py",
    "test_consumer_pull.py",
    "test_consumer_quarantine.py",
    "test_consumer_streams.py",
    "test_alert_rules.py",
    # Spark's
    "test_queue_source.py",
    "test_sink.py",
    "test_outages.py",
    "test_queue_reader.py",
    "test_spark_examples.py",
    "test_queue_kills.py",
    "test_staged.py",
    "test_stream_queries.py",
    "test_stream_ranges.py",
)
_APIS = ("sync", "aio")
# Spark's session, which is slow to start, is needed in two processes: for the tests of these files, and for the others
# that use it.
_SPARK = ("test_queue_source.py", "test_queue_kills.py", "test_outages.py", "test_metrics.py")
_WITHOUT_SPARK = (
    "test_queue_reader.py",
    "test_sink_rows.py",
    "test_staged_source.py",
    "test_stream_ranges.py",
    "test_memory.py",
)
_CLUSTER = "cluster"  # the directory of the tests on a cluster, which take longer than any file
_OLD_LINE = "4.0"  # the tests on this line share one broker
_TESTS_BETWEEN_FREEZES = 20
_tests_begun = count(1)


# -- collecting and reporting ------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before the hypothesis plug-in reads its seed
def pytest_configure(config: pytest.Config) -> None:
    properties.load(config)
    reports.load(config)
    rounds.load(config)
    config.addinivalue_line("markers", "both_lines: a test of `any_broker` that is for both lines in every run")
    # A shell starts background jobs with SIGINT ignored, and their children inherit that. Tests send SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seeds()  # sets the seeds before any process inherits them


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds(), ids=lambda seed: f"seed={seed}")
    for name in ("publisher_api", "consumer_api", "connection_api", "one_api"):
        if name in metafunc.fixturenames and not _chosen(metafunc, name):
            turn = crc32(metafunc.function.__qualname__.encode()) % len(_APIS)
            on_uvloop = ["uvloop"] if name == "publisher_api" else []
            apis = [*_APIS, *on_uvloop] if soaking() else [_APIS[turn]]
            metafunc.parametrize(name, apis, indirect=name != "one_api")
    if "any_broker" in metafunc.fixturenames and not _chosen(metafunc, "any_broker"):
        both = soaking() or metafunc.definition.get_closest_marker("both_lines") is not None
        metafunc.parametrize("any_broker", LINES if both else ["newest"], indirect=True, scope="session")
    for name in ("broker", "private_broker"):
        if soaking() and name in metafunc.fixturenames and not _chosen(metafunc, name):
            metafunc.parametrize(name, LINES, indirect=True)


class _Scheduling(LoadFileScheduling):
    """The scheduler of pytest-xdist: the tests that run in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder, _, name = file.rpartition("/")
        if _OLD_LINE in nodeid.partition("[")[2]:
            return _OLD_LINE
        if folder.rpartition("/")[2] == _CLUSTER:  # they share one cluster
            return folder
        if folder.rpartition("/")[2] == "spark" and not soaking() and name not in _WITHOUT_SPARK:
            return "with Spark" if name in _SPARK else "also with Spark"
        return nodeid if name in _SPLIT else file


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)  # after hypothesis has marked its tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    properties.allow_time(items)
    ranks = {file: rank for rank, file in enumerate(_LONGEST)}

    def rank(item: pytest.Item) -> int:
        first = item.path.parent.name == _CLUSTER or _OLD_LINE in item.name.partition("[")[2]
        return -1 if first else ranks.get(item.path.name, len(ranks))

    items.sort(key=rank)
    deselect_for_soak(config, items, _is_repeated_on_mysql)


def _is_repeated_on_mysql(item: pytest.Item) -> bool:
    """Return whether this test also runs on the other one of MariaDB and MySQL.

    Of the contracts' tests, which are in classes, half run on each. All others run on MariaDB.
    """
    left = "mysql"
    if getattr(item, "cls", None) is not None:
        left = ("mariadb", "mysql")[crc32(item.function.__name__.encode()) % 2]  # type: ignore[attr-defined]
    parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    return any(str(value).startswith(left) for value in parameters.values())


def pytest_report_header() -> list[str]:
    return properties.header_lines()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # `baseline` and `run_async` collect garbage several times per test. Objects that libraries have kept since the
    # collection of the tests are frozen, so that a collection takes milliseconds.
    if next(_tests_begun) % _TESTS_BETWEEN_FREEZES == 0:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    properties.tell_how_to_repeat(item, report)
    callspec = getattr(item, "callspec", None)
    if report.failed and callspec is not None and "seed" in callspec.params:
        seed = callspec.params["seed"]
        name = item.nodeid.partition("[")[0]
        report.sections.append(("to repeat", f"{SEED}={seed} .venv/bin/python -m pytest '{name}'"))
    return report


def _chosen(metafunc: pytest.Metafunc, name: str) -> bool:
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0]
        if name in (names.replace(" ", "").split(",") if isinstance(names, str) else names):
            return True
    return False


# -- brokers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of the certificates of the brokers and their clients."""
    return Authority(tmp_path_factory.mktemp("tls"), "ca")


@pytest.fixture(scope="session")
def _shared_brokers(authority: Authority) -> Iterator[Callable[[str], RabbitMQ]]:
    """The shared brokers, one per requested line."""
    remove_leftovers()
    running: dict[str, RabbitMQ] = {}
    files = authority.files_of_broker(authority.issue("broker", *HOSTS))
    with ExitStack() as stack:

        def get(line: str) -> RabbitMQ:
            if line not in running:
                running[line] = stack.enter_context(RabbitMQ(broker_image(line), conf=TLS_CONF, files=files))
            return running[line]

        yield get


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest, _shared_brokers: Callable[[str], RabbitMQ]) -> RabbitMQ:
    """The shared broker of the newest line, or of the line of an indirect parameter."""
    return _shared_brokers(getattr(request, "param", "newest"))


@pytest.fixture(scope="session", params=[_OLD_LINE])  # the line is then in the test's name
def broker_40(request: pytest.FixtureRequest, _shared_brokers: Callable[[str], RabbitMQ]) -> RabbitMQ:
    """The shared broker of line 4.0."""
    return _shared_brokers(request.param)


@pytest.fixture(scope="session")
def any_broker(request: pytest.FixtureRequest, _shared_brokers: Callable[[str], RabbitMQ]) -> RabbitMQ:
    """The shared brokers, one after the other."""
    return _shared_brokers(request.param)


@pytest.fixture
def private_broker(request: pytest.FixtureRequest, _shared_brokers: Callable[[str], RabbitMQ]) -> Iterator[RabbitMQ]:
    """The shared broker, which has no other client while a test of this process runs.

    The test may kill, pause and starve it. A separate broker would cost a start, and CPU time while it is idle.
    """
    broker = _shared_brokers(getattr(request, "param", "newest"))
    broker.heal()
    yield broker
    broker.heal()


# -- virtual hosts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def vhost(broker: RabbitMQ, new_vhost: Callable[[RabbitMQ], VirtualHost]) -> VirtualHost:
    """A fresh virtual host on the shared broker."""
    return new_vhost(broker)


@pytest.fixture
def vhost_40(broker_40: RabbitMQ, new_vhost: Callable[[RabbitMQ], VirtualHost]) -> VirtualHost:
    """A fresh virtual host on the shared broker of line 4.0."""
    return new_vhost(broker_40)


@pytest.fixture
def any_vhost(any_broker: RabbitMQ, new_vhost: Callable[[RabbitMQ], VirtualHost]) -> VirtualHost:
    """A fresh virtual host on each of the shared brokers, one after the other."""
    return new_vhost(any_broker)


@pytest.fixture
def private_vhost(private_broker: RabbitMQ, new_vhost: Callable[[RabbitMQ], VirtualHost]) -> VirtualHost:
    """A fresh virtual host on the broker that may be harmed."""
    return new_vhost(private_broker)


# -- databases ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _databases() -> Iterator[dict[str, Database]]:
    """One server of each requested kind."""
    remove_leftovers()
    running: dict[str, Database] = {}
    yield running
    for database in running.values():
        database.remove()


@pytest.fixture
def database(_databases: dict[str, Database]) -> Iterator[Callable[[str], Database]]:
    """A function that returns the server of a kind, one of ``KINDS``.

    The test may harm the server.
    """

    def get(kind: str) -> Database:
        if kind not in _databases:
            set_up("databases")
            _databases[kind] = Database(kind).launch()
        return _databases[kind]

    yield get
    for server in _databases.values():
        server.heal()


# -- accounts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checker(audit: Audit) -> Audit:
    """The account of one test; its counts are printed at the end of the run."""
    return audit


@pytest.fixture
def rng(seed: int) -> random.Random:
    """The random generator of a test, seeded with its seed."""
    return random.Random(seed)


@pytest.fixture
def publisher_api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _uvloop: None) -> str:
    """Run the test on one of the APIs; the guarantees hold for both."""
    apis = {"aio": BlockingPublisher, "uvloop": UvloopPublisher}
    if request.param in apis:
        monkeypatch.setattr(request.module, "Publisher", apis[request.param])
    return str(request.param)


@pytest.fixture
def consumer_api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on one of the APIs; coroutine handlers on asyncio.

    The guarantees hold for both APIs.
    """
    if request.param == "aio":
        monkeypatch.setattr(request.module, "Consumer", BlockingConsumer)
    return str(request.param)


@pytest.fixture
def connection_api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on the connection of one API, each with its own driver."""
    if request.param == "aio":
        monkeypatch.setattr(Recorded, "kind", AsyncioThread)
    return str(request.param)


@pytest.fixture
def baseline(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check after the test that its threads and descriptors are gone within 10 s."""
    start_server()  # its socket stays open
    with back_to_baseline():
        yield
        # A logged exception, as pika logs at DEBUG, has frames that refer to a loop and its descriptors.
        caplog.get_records("call").clear()
