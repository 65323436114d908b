"""A Spark application in processes of its own, which can be killed, and what its file sink holds then."""

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

from integration.support.programs import ROOT, environment
from integration.support.seeds import soaking
from integration.support.spark import SETTINGS
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

PHASES = ("read planned", "reading", "sink written", "commit log written")  # of a batch


class Application:
    """A program of `integration.programs` that runs Spark, with every process that it starts.

    Args:
        program: its module's name.
        settings: given to it as JSON; with ``held``, it does nothing before `go`.
        log: takes what it says.
        discovered: whether Spark finds the data source by itself, as it does with the wheel.
    """

    def __init__(self, program: str, settings: Mapping[str, Any], log: Path, *, discovered: bool = False) -> None:
        self.log = log
        own = {**environment(), "PYSPARK_PYTHON": sys.executable, "SPARK_TEST_SETTINGS": json.dumps(SETTINGS)}
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
        """Let one that was held begin, as soon as it is ready."""
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(b"go\n")

    def wait_until(
        self, condition: Callable[[], object], *, timeout: float, what: str, interval: float = 0.002
    ) -> None:
        """Wait for a condition, or raise with the log where the program ends before."""

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
        """Wait until it has ended well."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it did not end within {timeout:g} s:\n{self.said()}") from None
        assert code == 0, self.said()

    def kill(self, *, reader_too: bool = True) -> None:
        """SIGKILL the application: its Python and its JVM; with the reader's process, which else has a moment left."""
        processes = descendants(self.process.pid)
        jvm = [pid for pid in processes if _command(pid).startswith("java") or "/java" in _command(pid).split(" ")[0]]
        for pid in (self.process.pid, *(processes if reader_too else jvm)):
            _kill(pid)
        self.process.wait(30)
        wait_until(lambda: not any(map(_runs, processes)), timeout=30, what="its processes gone")

    def said(self) -> str:
        """The end of what it said."""
        return self.log.read_text(errors="replace")[-6000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.kill()


def in_phase(phase: str, directory: Path, *, skip: int = 0, rows: int = 0) -> Callable[[], bool]:
    """Whether a batch of `spark_queries`, which nobody has planned yet, has come to one of the `PHASES`.

    Args:
        phase: its name.
        directory: of the query.
        skip: that many batches before.
        rows: that it has begun with, for "reading".
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
        before.append(begun)  # the first one is of the batches before
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
    """Run ``spark_queries`` and SIGKILL it in phases of a query, in some batch: one of them, in `make soak` each once.

    The other queries are then wherever they are. The next application is made ready meanwhile.
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
    """Whether it has; no where Spark has given up on a new Python process, which on a busy machine takes it 10 s."""
    try:
        application.wait_until(condition, timeout=timeout, what=phase)
    except AssertionError:
        if "Python worker failed to connect back" not in application.said():
            raise
        return False
    return True


def kill_reader(spark: SparkSession, running: Callable[[], object]) -> None:
    """SIGKILL the reader's process of a query in a session; `running` starts the query where it is down."""
    _kill_of(spark, lambda pid: [pid] if "python_streaming_source_runner" in _command(pid) else [], running, "a reader")


def kill_worker(spark: SparkSession, running: Callable[[], object]) -> None:
    """SIGKILL a Python process in which tasks of a session read, a child of Spark's daemon; `running` as before."""
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
    """The processes below one, children first."""
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
    """What a streaming file sink has committed, from its own log: a file that is not in there does not count."""
    files = {
        json.loads(line)["path"].removeprefix("file://")
        for batch in (output / "_spark_metadata").iterdir()
        if batch.name.partition(".")[0].isdigit()  # every tenth repeats those before
        for line in batch.read_text().splitlines()[1:]
    }
    rows: Counter[str] = Counter()
    for path in files:
        rows.update(pyarrow.parquet.read_table(path, columns=[column]).column(0).to_pylist())
    return rows


def batches_in(checkpoint: Path, log: str) -> int:
    """How many batches a log of a checkpoint knows: ``offsets`` or ``commits``."""
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
