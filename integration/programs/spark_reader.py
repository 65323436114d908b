"""Plays Spark for a reader of queue mode: the same calls in the same order, a checkpoint, a sink, and a death on time.

Usage: ``python -m integration.programs.spark_reader JSON``, with ``url``, ``queue``, ``directory``, ``options`` of the
source, ``most`` (rows of a batch), ``phase`` and ``batch`` (where it kills itself; none for never), ``idle`` (seconds
without a message after which it stops; none for never) and ``until`` (how many messages its sink must have before it
does). If ``hold`` is given, says ``reading`` and waits with a batch in its hands until the standard input ends. At its
end, it says ``peak`` and the most bytes that it has had in memory.

Given a list of such settings, it lives and dies as often, and writes how each life has ended into ``endings`` of that
directory: an exit status, negative for a signal.

The sink is a file of lines ``batch message-id``. A batch that is in there is written again by nobody who has seen its
commit; without one it is, as any sink that Spark writes to may be.
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

    if len(offsets) > commits:  # Spark begins with the batch that was not committed
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
    """Run each in a process of its own, which has all imports already; give the status of the last one."""
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
    """Be the child; does not return."""
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
