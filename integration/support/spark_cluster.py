"""A standalone Spark cluster on this machine, out of the pip-installed PySpark, which has no script to start one.

Invariant: everything that was started has ended when the block is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyspark

from integration.support.programs import environment
from integration.support.spark_application import descendants
from integration.support.waiting import wait_until

if TYPE_CHECKING:
    from types import TracebackType

_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class StandaloneCluster:
    """A master and a worker; a context manager.

    Args:
        directory: takes logs, and what executors write.
        cores: of the worker.

    Attributes:
        url: of the master; once entered.
    """

    url: str

    def __init__(self, directory: Path, cores: int = 2) -> None:
        self._directory = directory
        self._cores = cores
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            log = self._start("master", "org.apache.spark.deploy.master.Master", "--port", "0", "--webui-port", "0")
            self.url = self._wait_for(log, _MASTER)
            arguments = ["--cores", str(self._cores), "--memory", "1g", "--webui-port", "0", self.url]
            log = self._start("worker", "org.apache.spark.deploy.worker.Worker", *arguments)
            self._wait_for(log, re.compile("(Successfully registered) with master"))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def executors(self) -> list[int]:
        """The processes of executors that run now."""
        found = []
        for process in self._processes:
            for pid in descendants(process.pid):
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"CoarseGrainedExecutorBackend" in command:
                    found.append(pid)
        return found

    def kill_executor(self) -> int:
        """SIGKILL an executor, and answer which; the worker starts another."""
        pid = wait_until(lambda: self.executors, timeout=60, what="an executor")[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def _start(self, name: str, kind: str, *arguments: str) -> Path:
        log = self._directory / f"{name}.log"
        own = {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._directory / "local"),
            "SPARK_WORKER_DIR": str(self._directory / "work"),
            "SPARK_DAEMON_MEMORY": "300m",
            "SPARK_DAEMON_JAVA_OPTS": _OPTIONS,
        }
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [str(_SPARK_CLASS), kind, "--host", "127.0.0.1", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**environment(), **own},
                    start_new_session=True,
                )
            )
        return log

    def _wait_for(self, log: Path, pattern: re.Pattern[str]) -> str:
        def said() -> str:
            found = pattern.search(log.read_text(errors="replace"))
            if found is None and self._processes[-1].poll() is not None:
                raise RuntimeError(f"it ended:\n{log.read_text(errors='replace')[-3000:]}")
            return found[1] if found else ""

        return wait_until(said, timeout=120, what=lambda: f"{pattern.pattern} in:\n{log.read_text()[-3000:]}")

    def _end(self) -> None:
        for process in reversed(self._processes):
            for pid in (*descendants(process.pid), process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait(30)
        self._processes.clear()
