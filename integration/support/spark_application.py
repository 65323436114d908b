"""Spark applications in separate processes that tests can kill, and their output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow.parquet
from pyspark.errors import StreamingQueryException

from integration.programs.spark_queries import start
from integration.support.programs import ROOT, environment
from integration.support.seeds import soaking
from integration.support.spark import SETTINGS
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

GIVEN_UP = "Python worker failed to connect back"  # within 10 s, which is too little on a busy machine
PHASES = ("read planned", "reading", "sink written", "commit log written")  # the phases of a batch


class Application:
    """A Spark program of `integration.programs`, with all processes that it starts.

    Args:
        program: The name of its module.
        settings: Passed to the program as JSON. With ``held``, the program waits for `go`.
        log: The file for its output.
        discovered: Whether Spark finds the data source by itself, as it does with the wheel.
        python: The program for Spark's Python processes.
    """

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Any],
        log: Path,
        *,
        discovered: bool = False,
        python: str = sys.executable,
    ) -> None:
        self.log = log
        own = {**environment(), "SPARK_TEST_SETTINGS": json.dumps(SETTINGS)}
        own["PYSPARK_PYTHON"] = own["PYSPARK_DRIVER_PYTHON"] = python
        if discovered:
            wheel = log.parent / "wheel"
            wheel.mkdir(exist_ok=True)
            shutil.copy(ROOT / "reliable_mq" / "spark" / "autoregister.py", wheel / "pyspark_reliable_mq.py")
            own["PYTHONPATH"] += f":{wheel}"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"integration.programs.{program}", json.dumps(settings)],
                stdin=subprocess.PIPE if settings.get("held") else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=own,
                start_new_session=True,
            )

    def go(self) -> None:
        """Let a held program start its work, as soon as it is ready."""
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(b"go\n")

    def wait_until(
        self, condition: Callable[[], object], *, timeout: float, what: str, interval: float = 0.002
    ) -> None:
        """Wait for a condition; raise with the log if the program ends before."""

        def met() -> bool:
            if condition():
                return True
            if self.process.poll() is not None:
                raise AssertionError(f"it ended with {self.process.returncode} before {what}:\n{self.said()}")
            return False

        try:
            wait_until(met, timeout=timeout, what=what, interval=interval)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.said()}") from None

    def wait(self, timeout: float) -> None:
        """Wait until the program ends; it must succeed."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it did not end within {timeout:g} s:\n{self.said()}") from None
        assert code == 0, self.said()

    def kill(self, *, reader_too: bool = True) -> None:
        """SIGKILL the application: its Python and its JVM.

        Args:
            reader_too: Whether to kill its other processes, too. Otherwise the reader's process runs for another
                moment.
        """
        processes = descendants(self.process.pid)
        jvm = [pid for pid in processes if _command(pid).startswith("java") or "/java" in _command(pid).split(" ")[0]]
        for pid in (self.process.pid, *(processes if reader_too else jvm)):
            _kill(pid)
        self.process.wait(30)
        wait_until(lambda: not any(map(_runs, processes)), timeout=30, what="its processes gone")

    def said(self) -> str:
        """Return the end of the program's output."""
        return self.log.read_text(errors="replace")[-6000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.kill()


def in_phase(phase: str, directory: Path, *, skip: int = 0, rows: int = 0) -> Callable[[], bool]:
    """Return a condition: a batch that is not yet planned has reached a phase.

    The batch is one of `spark_queries`.

    Args:
        phase: One of `PHASES`.
        directory: The directory of the query.
        skip: The number of batches to skip.
        rows: For "reading": the number of rows that the batch has started with.
    """
    checkpoint, metadata = directory / "checkpoint", directory / "output" / "_spark_metadata"
    batch = batches_in(checkpoint, "offsets") + skip
    before: list[int] = []

    def planned() -> bool:
        return batches_in(checkpoint, "offsets") > batch

    def reading() -> bool:
        if not planned():
            return False
        begun = len(list(directory.glob("reading-*")))
        before.append(begun)  # the first count covers only earlier batches
        return begun > before[0] + rows

    return {
        "read planned": planned,
        "reading": reading,
        "sink written": lambda: any((metadata / f"{batch}{end}").exists() for end in ("", ".compact")),
        "commit log written": lambda: batches_in(checkpoint, "commits") > batch,
    }[phase]


def killed_in_each_phase(
    settings: Mapping[str, Any], directory: Path, rng: random.Random, *, of: str, timeout: float
) -> None:
    """Run ``spark_queries`` and SIGKILL it in a phase of a query, in some batch.

    This is done once, in a random phase; in `make soak` once in each phase. The other queries may be in any phase. The
    next application starts while the current one runs.
    """
    held = {**settings, "directory": str(directory), "held": True}
    phases = rng.sample(PHASES, len(PHASES) if soaking() else 1)
    with ExitStack() as stack:

        def made_ready() -> Application:
            return stack.enter_context(Application("spark_queries", held, directory / "log"))

        following = made_ready()
        for number, phase in enumerate(phases, 1):
            application = following
            condition = in_phase(phase, directory / of, skip=rng.randrange(3), rows=rng.randrange(20))
            application.go()
            if number < len(phases):
                following = made_ready()
            while not _came_to(condition, application, phase, timeout):
                application = made_ready()
                application.go()
            application.kill(reader_too=rng.random() < 0.5)


def _came_to(condition: Callable[[], bool], application: Application, phase: str, timeout: float) -> bool:
    """Wait for the phase; return False if Spark has given up on a new Python process."""
    try:
        application.wait_until(condition, timeout=timeout, what=phase)
    except AssertionError:
        if GIVEN_UP not in application.said():
            raise
        return False
    return True


def drained(spark: SparkSession, settings: Mapping[str, Any], timeout: float) -> list[StreamingQuery]:
    """Run queries of `spark_queries` in a session until all is read; return them.

    A query is started again if Spark has given up on a new Python process.
    """
    settings = {**settings, "drain": True}
    queries = start(spark, settings)
    for number, (name, options) in enumerate(settings["sources"].items()):
        while not _has_ended(queries[number], timeout):
            [queries[number]] = start(spark, {**settings, "sources": {name: options}})
    return queries


def _has_ended(query: StreamingQuery, timeout: float) -> bool:
    """Wait until a query ends; return False if Spark has given up on a new process."""
    try:
        assert query.awaitTermination(timeout)
    except StreamingQueryException as error:
        if GIVEN_UP not in str(error):
            raise
        return False
    return True


def kill_reader(spark: SparkSession, running: Callable[[], object]) -> None:
    """SIGKILL the reader's process of a query.

    `running` starts the query if it is down.
    """
    _kill_of(spark, lambda pid: [pid] if "python_streaming_source_runner" in _command(pid) else [], running, "a reader")


def kill_worker(spark: SparkSession, running: Callable[[], object]) -> None:
    """SIGKILL a Python process that reads in tasks, a child of Spark's daemon.

    `running` starts the query if it is down.
    """
    _kill_of(
        spark, lambda pid: descendants(pid) if "plan_data_source_read" in _command(pid) else [], running, "a worker"
    )


def _kill_of(spark: SparkSession, wanted: Callable[[int], list[int]], running: Callable[[], object], what: str) -> None:
    gateway: Any = spark.sparkContext._gateway

    def found() -> list[int]:
        running()
        return [pid for below in descendants(gateway.proc.pid) for pid in wanted(below)]

    _kill(wait_until(found, timeout=120, what=what)[0])


def descendants(pid: int) -> list[int]:
    """Return the processes below this one, each before its own children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def committed_rows(output: Path, column: str = "message_id") -> Counter[str]:
    """Count the rows that a streaming file sink has committed.

    Only the files in the sink's log count.
    """
    files = {
        json.loads(line)["path"].removeprefix("file://")
        for batch in (output / "_spark_metadata").iterdir()
        if batch.name.partition(".")[0].isdigit()  # every tenth entry repeats the previous ones
        for line in batch.read_text().splitlines()[1:]
    }
    rows: Counter[str] = Counter()
    for path in files:
        rows.update(pyarrow.parquet.read_table(path, columns=[column]).column(0).to_pylist())
    return rows


def batches_in(checkpoint: Path, log: str) -> int:
    """Return the number of batches in the ``offsets`` or ``commits`` of a checkpoint."""
    try:
        return sum(path.name.isdigit() for path in (checkpoint / log).iterdir())
    except FileNotFoundError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
