"""Call a reader in queue mode as Spark does, with a checkpoint, a sink and kills.

Usage: ``python -m integration.programs.spark_reader JSON``, with:

- ``url``, ``queue``, ``directory`` and ``options`` of the source;
- ``most``: the maximum number of rows of a batch;
- ``phase`` and ``batch``: where the process kills itself; not set for never;
- ``idle``: seconds without a message after which it stops; not set for never;
- ``until``: the number of messages that its sink must have before it stops;
- ``hold``: whether to print ``reading`` and keep a batch unwritten until standard input ends.

At the end it prints ``peak`` and its peak memory in bytes.

Given a list of such settings, it runs each in a child process, one after the other. It writes the exit status of each
child, negative for a signal, into ``endings`` of that directory.

The sink is a file of lines ``batch message-id``. A batch is not written again once its commit is in the checkpoint.
Without a commit it is written again, as may happen to any sink of Spark.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows

from reliable_mq.spark.options import QueueOptions, read_options
from reliable_mq.spark.queue_source import QueueSource

PHASES = ("planned", "offsets written", "reading", "sink written", "commits written")


def main(settings: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    given = {"url": settings["url"], "queue": settings["queue"], **settings.get("options", {})}
    options = read_options(given, streaming=True)
    assert isinstance(options, QueueOptions)
    source = QueueSource(options, ["message_id"])
    directory = Path(settings["directory"])
    log = directory / "checkpoint.json"
    offsets, commits = json.loads(log.read_text()) if log.exists() else ([], 0)
    start = offsets[commits - 1] if commits else source.initialOffset()
    batches = 0
    quiet_since = time.monotonic()

    def phase(name: str) -> None:
        if name == settings.get("phase") and batches == settings.get("batch", 0):
            os.kill(os.getpid(), signal.SIGKILL)

    def record() -> None:
        new = log.with_suffix(".new")
        new.write_text(json.dumps([offsets, commits]))
        new.rename(log)

    def enough() -> bool:
        sink = directory / "sink"
        written = sink.read_text().splitlines() if sink.exists() else []
        return len({line.split()[1] for line in written}) >= settings.get("until", 0)

    def process(end: dict[str, Any]) -> None:
        parts = source.partitions(start, end)
        phase("reading")
        rows = [row for part in parts for batch in source.read(part) for row in batch.column(0).to_pylist()]
        if settings.get("hold"):
            print("reading", flush=True)
            os.read(0, 1)
        with (directory / "sink").open("a") as sink:
            sink.writelines(f"{commits} {row}\n" for row in rows)
        phase("sink written")

    if len(offsets) > commits:  # Spark starts with the uncommitted batch
        process(offsets[commits])
        start, commits = offsets[commits], commits + 1
        record()
    while True:
        end = source.latestOffset(start, ReadMaxRows(settings.get("most", 40)))
        source.reportLatestOffset()
        if end == start:
            idle = settings.get("idle")
            if idle is not None and time.monotonic() - quiet_since > idle and enough():
                break
            continue
        phase("planned")
        offsets.append(end)
        record()
        phase("offsets written")
        source.commit(start)
        process(end)
        start, commits = end, commits + 1
        record()
        phase("commits written")
        batches += 1
        quiet_since = time.monotonic()
    source.stop()
    status = Path("/proc/self/status").read_text().splitlines()
    print("peak", next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")), flush=True)


def one_after_the_other(lives: list[dict[str, Any]]) -> int:
    """Run each in a forked child, with all imports done; return the last status."""
    status = 0
    for settings in lives:
        pid = os.fork()
        if pid == 0:
            live(settings)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with (Path(settings["directory"]) / "endings").open("a") as endings:
            endings.write(f"{status}\n")
    return abs(status)


def live(settings: dict[str, Any]) -> None:
    """Run in the child, and exit."""
    try:
        main(settings)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if isinstance(given, list):
        sys.exit(one_after_the_other(given))
    main(given)
