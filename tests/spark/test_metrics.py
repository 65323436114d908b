"""Metrics of Spark's Python processes: one file per process.

Errors in writing them never stop a query.
"""

from __future__ import annotations

import ast
import inspect
import logging
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import reliable_mq.spark
from reliable_mq.metrics.registry import register
from reliable_mq.spark import metrics
from reliable_mq.spark.metrics import FAMILIES, Exporter, QueueStatistics, exporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

PACKAGE = Path(inspect.getfile(reliable_mq.spark)).parent

ANOTHER_PROCESS = """
import sys
from pathlib import Path
from reliable_mq.spark.metrics import Exporter
print(Exporter(Path(sys.argv[1])).path.name, flush=True)
sys.stdin.read()
"""

FORKING_PROCESS = """
import os, sys
from pathlib import Path
from reliable_mq.spark.metrics import Exporter
exporter = Exporter(Path(sys.argv[1]))
if not os.fork():
    print("forked", flush=True)
    sys.stdin.read()
os._exit(0)
"""


@contextmanager
def nobody() -> Iterator[None]:
    """Drop the rights of root, whom no mode of a file stops."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def started() -> Iterator[Callable[[Path], Exporter]]:
    made: list[Exporter] = []

    def start(directory: Path) -> Exporter:
        made.append(Exporter(directory))
        return made[-1]

    yield start
    for each in made:
        each.close()


def samples(path: Path) -> dict[tuple[str, ...], float]:
    families: Iterator[Metric] = text_string_to_metric_families(path.read_text())
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_process_writes_a_metrics_file_for_the_node_exporter(
    tmp_path: Path, started: Callable[[Path], Exporter]
) -> None:
    """Its number is a label; the directory has only the file and a hidden lock."""
    metrics_of_one = started(tmp_path / "made" / "for it")
    statistics = QueueStatistics(batches=2, reconnects=1, ready={"orders": 7}, held_bytes=100, connected=True)
    statistics.delivered["orders"] = 5
    register(metrics_of_one.registry, statistics.readings)
    metrics_of_one.streams.rows["events"] = 3
    for end in (10, 12):
        metrics_of_one.show(end={"events": end})
    metrics_of_one.sink.dead_lettered["orders.rows"] = 4
    metrics_of_one.write()
    assert metrics_of_one.path.name == "reliable_mq_spark_0.prom"
    assert [path.name for path in metrics_of_one.path.parent.glob("[!.]*")] == ["reliable_mq_spark_0.prom"]
    found = samples(metrics_of_one.path)
    assert found["reliable_mq_spark_queue_deliveries_total", "queue=orders", "worker=0"] == 5
    assert found["reliable_mq_spark_queue_ready", "queue=orders", "worker=0"] == 7
    assert found["reliable_mq_spark_queue_batches_total", "worker=0"] == 2
    assert found["reliable_mq_spark_queue_connected", "worker=0"] == 1
    assert found["reliable_mq_spark_queue_reconnects_total", "worker=0"] == 1
    assert found["reliable_mq_spark_stream_rows_total", "stream=events", "worker=0"] == 3
    assert found["reliable_mq_spark_stream_end", "stream=events", "worker=0"] == 12
    assert found["reliable_mq_spark_sink_dead_lettered_total", "queue=orders.rows", "worker=0"] == 4


def test_a_query_that_ends_leaves_no_gauge(
    tmp_path: Path, started: Callable[[Path], Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SIGTERM, another thread removes them, while the query may still look for new messages."""
    of_one = started(tmp_path)
    of_one.show(end={"events": 10}, planned={"events": 10})
    of_one.streams.rows["events"] = 3
    looking = threading.Thread(target=of_one.show, kwargs={"end": {"events": 12}})
    write = metrics.write_to_textfile

    def write_late(*args: Any) -> None:
        looking.start()
        looking.join(0.2)
        write(*args)

    monkeypatch.setattr(metrics, "write_to_textfile", write_late)
    of_one.hide()
    assert [name for name, *_ in samples(of_one.path) if "stream" in name] == ["reliable_mq_spark_stream_rows_total"]
    looking.join(10)
    assert of_one.streams.end == {"events": 12}


def test_a_stream_that_is_no_longer_read_has_no_gauge(tmp_path: Path, started: Callable[[Path], Exporter]) -> None:
    """It would show a lag for good. Where nothing was found, the values are kept."""
    of_one = started(tmp_path)
    of_one.show(end={"orders-0": 10, "orders-1": 10}, planned={"orders-0": 10, "orders-1": 5})
    of_one.show(end={}, planned={"orders-0": 10})
    assert of_one.streams.end == {"orders-0": 10, "orders-1": 10}
    assert of_one.streams.planned == {"orders-0": 10}


def test_no_two_living_processes_have_the_same_number(tmp_path: Path, started: Callable[[Path], Exporter]) -> None:
    """The node exporter would refuse both. A killed process frees its number."""
    first = started(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "reliable_mq_spark_1.prom\n"
        third = started(tmp_path)
        assert (first.path.name, third.path.name) == ("reliable_mq_spark_0.prom", "reliable_mq_spark_2.prom")
        other.kill()
        other.wait(10)
    assert started(tmp_path).path.name == "reliable_mq_spark_1.prom"


def test_a_forked_child_does_not_keep_the_number_of_its_parent(
    tmp_path: Path, started: Callable[[Path], Exporter]
) -> None:
    """It may live longer, and the gauges of the parent would stay."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING_PROCESS, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        assert parent.stdout.readline() == "forked\n"
        parent.wait(10)
        assert started(tmp_path).path.name == "reliable_mq_spark_0.prom"


def test_files_of_the_dead_are_removed_by_whoever_comes_next(
    tmp_path: Path, started: Callable[[Path], Exporter]
) -> None:
    """Their gauges would stay forever. Files of other programs are kept."""
    living, dead = started(tmp_path), started(tmp_path)
    (tmp_path / "reliable_mq_spark_note.prom").touch()
    (tmp_path / "other.prom").touch()
    dying = started(tmp_path)
    dead.close()
    dying.close()
    assert dead.path.exists()
    assert dying.path.exists()
    successor = started(tmp_path)
    assert successor.path == dead.path
    assert not dying.path.exists()
    assert living.path.exists()
    assert {"reliable_mq_spark_note.prom", "other.prom"} <= {path.name for path in tmp_path.iterdir()}


def test_a_directory_that_cannot_be_had_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning is logged once, and the query continues without metrics."""
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert exporter(str(tmp_path / "file" / "below")) is None
        assert exporter(str(tmp_path / "file" / "below")) is None
    assert [record.getMessage()[:18] for record in caplog.records] == ["writing no metrics"]


def test_the_files_of_another_user_are_passed_over(
    started: Callable[[Path], Exporter], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the lock; the process takes the next number."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o777)
        for number in (0, 1, 3):
            (directory / f"reliable_mq_spark_{number}.prom").touch()
            (directory / f".reliable_mq_spark_{number}.lock").touch(0o000)
        with nobody(), caplog.at_level(logging.WARNING):
            of_one = started(directory)
            of_one.streams.rows["events"] = 3
            of_one.write()
        assert of_one.path.name == "reliable_mq_spark_2.prom"
        assert samples(of_one.path)["reliable_mq_spark_stream_rows_total", "stream=events", "worker=2"] == 3
        assert len(list(directory.glob("*.prom"))) == 4
        assert len(caplog.records) == 1
        assert f"{directory}/.reliable_mq_spark_0.lock belongs to another user" in caplog.text
        of_one.close()


def test_a_directory_that_is_not_writable_is_not_of_many_users() -> None:
    """No lock can be made there."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        with nobody(), pytest.raises(PermissionError):
            Exporter(Path(name))


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, started: Callable[[Path], Exporter], caplog: pytest.LogCaptureFixture
) -> None:
    """The warning is logged once until the file can be written again."""
    one = started(tmp_path / "gone")
    one.path.unlink()
    one.path.mkdir()  # blocks the path
    with caplog.at_level(logging.WARNING):
        one.write()
        one.write()
    assert len(caplog.records) == 1
    one.path.rmdir()
    one.write()
    assert one.path.is_file()


def test_a_process_has_one_exporter_per_directory_and_per_fork(tmp_path: Path) -> None:
    """No number is used twice, even if there was an exporter before a fork."""
    one = exporter(str(tmp_path))
    assert one is not None
    try:
        assert exporter(str(tmp_path)) is one
        assert exporter(None) is None
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            forked = exporter(str(tmp_path))
            os.write(writing, forked.path.name.encode() if forked else b"none")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 100) == b"reliable_mq_spark_1.prom"
        os.close(reading)
        os.close(writing)
    finally:
        metrics._exporters.pop(str(tmp_path))
        one.close()


def test_the_reference_lists_every_metric() -> None:
    """The table has the families that begin with ``spark``; the guide links to it."""
    docs = Path(__file__).parents[2] / "docs"
    assert "(../reference/metrics.md#spark)" in (docs / "guides" / "spark.md").read_text()
    assert "```{metrics} spark\n" in (docs / "reference" / "metrics.md").read_text()
    assert len(FAMILIES) > 10
    assert all(family.name.startswith("spark_") for family in FAMILIES)


def test_nothing_here_needs_pandas() -> None:
    """The extra does not install pandas, and the examples do not use it either."""
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent.parent / "examples").glob("spark_*.py")]
    assert len(sources) > 20
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "pandas"], path
            assert not (isinstance(node, ast.Attribute) and node.attr in ("toPandas", "pandas_udf")), path
