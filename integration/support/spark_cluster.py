"""Spark's servers on this machine: a standalone cluster, and Spark Connect.

They are those of the pip-installed PySpark.

Invariant: at the end of the block, all started processes have ended.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyspark

from integration.support.programs import ROOT, environment
from integration.support.spark import JAVA_OPTIONS, SETTINGS
from integration.support.spark_application import descendants
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_PROGRAMS = Path(pyspark.__file__).parent / "bin"
_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_WORKER = re.compile("(Successfully registered) with master")
_CONNECT = re.compile(r"Spark Connect server started at: (\S+)")
_HERE = "127.0.0.1"


class _Servers:
    """Processes with logs. A context manager.

    Args:
        directory: For the logs, and for everything that the processes write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._launch()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _launch(self) -> None:
        """Start all processes, and wait until they are ready."""
        raise NotImplementedError

    def _start(self, name: str, *command: str, **own: str) -> Path:
        """Start a program of PySpark; return its log."""
        log = self._directory / f"{name}.log"
        settings = {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": _HERE,
            "SPARK_LOCAL_DIRS": str(self._directory / "local"),
            **own,
        }
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [str(_PROGRAMS / command[0]), *command[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**environment(), **settings},
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


class StandaloneCluster(_Servers):
    """A master, and a worker on each host. A context manager.

    Args:
        directory: For the logs, and for everything that executors write.
        cores: The cores of each worker.
        hosts: Addresses of this machine, one for each worker. Spark treats them as different hosts.

    Attributes:
        url: The URL of the master. Set on entry.
    """

    url: str

    def __init__(self, directory: Path, cores: int = 2, hosts: Sequence[str] = (_HERE,)) -> None:
        super().__init__(directory)
        self._cores = cores
        self._hosts = hosts

    def _launch(self) -> None:
        log = self._daemon("master", _HERE, "--port", "0")
        self.url = self._wait_for(log, _MASTER)
        for host in self._hosts:
            log = self._daemon("worker", host, "--cores", str(self._cores), "--memory", "1g", self.url)
            self._wait_for(log, _WORKER)

    def _daemon(self, name: str, host: str, *arguments: str) -> Path:
        return self._start(
            f"{name}-{host}",
            "spark-class",
            f"org.apache.spark.deploy.{name}.{name.title()}",
            *("--host", host, "--webui-port", "0"),
            *arguments,
            SPARK_LOCAL_IP=host,
            SPARK_WORKER_DIR=str(self._directory / "work"),
            SPARK_DAEMON_MEMORY="300m",
            SPARK_DAEMON_JAVA_OPTS=JAVA_OPTIONS,
        )

    @property
    def executors(self) -> list[int]:
        """The process ids of the running executors."""
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
        """SIGKILL an executor; return its process id. The worker starts another."""
        pid = wait_until(lambda: self.executors, timeout=60, what="an executor")[0]
        os.kill(pid, signal.SIGKILL)
        return pid


class ConnectServer(_Servers):
    """A server of Spark Connect, which runs Spark itself.

    Its Python has this package, but not pandas.

    Args:
        directory: For the log, and for everything that Spark writes.
        discovered: Whether the server finds the data source by itself, as it does with the wheel.

    Attributes:
        url: For ``SparkSession.builder.remote``. Set on entry.
    """

    url: str

    def __init__(self, directory: Path, *, discovered: bool) -> None:
        super().__init__(directory)
        self._discovered = discovered

    def _launch(self) -> None:
        modules = self._directory / "modules"
        modules.mkdir()
        (modules / "pandas.py").write_text('raise ImportError("there is no pandas")\n')
        found = modules / "pyspark_reliable_mq.py"
        if self._discovered:
            shutil.copy(ROOT / "reliable_mq" / "spark" / "autoregister.py", found)
        else:
            found.touch()  # hides the installed one
        log = self._start(
            "connect",
            "spark-submit",
            *("--master", "local[2]", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
            *(f"--conf={name}={value}" for name, value in self._settings().items()),
            PYTHONPATH=f"{modules}:{ROOT}",
            SPARK_CONNECT_MODE="0",  # otherwise spark-submit would be a client
        )
        self.url = f"sc://{self._wait_for(log, _CONNECT)}"

    def _settings(self) -> Mapping[str, str]:
        own = {
            "spark.connect.grpc.binding.address": _HERE,
            "spark.connect.grpc.binding.port": "0",
            "spark.sql.warehouse.dir": str(self._directory / "warehouse"),
            "spark.log.level": "INFO",  # logs the port
        }
        return {**SETTINGS, **own}
