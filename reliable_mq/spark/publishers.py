"""The publishers of a Python worker: one for each broker and user, kept for the next task that the worker runs.

PySpark forks its workers before they load anything of ours, runs one task at a time in each and, unless it is told
otherwise, gives a worker the next task when it is done. A micro-batch of a thousand rows would otherwise spend most of
its time on handshakes. The publisher's own thread keeps heartbeats going, whatever the task does.

Invariants: a publisher is given to one task at a time, and is kept only where that task has seen everything confirmed;
one that nobody has used for a while is closed in good order, before Spark kills its worker for being idle (60 s); a
worker that will not be used again keeps none.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from reliable_mq.errors import ReliableMQError
from reliable_mq.hooks import ExitStage, ForkStage, at_exit, in_child
from reliable_mq.spark.metrics import exporter
from reliable_mq.sync.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.spark.options import WriteOptions

__all__ = ["borrowed_publisher", "close_all"]

logger = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 5.0
_KEPT: Final = 4

_Key = tuple[str, str | None]

_lock = threading.Lock()
# By URL and directory for metrics, the one that was used last at the end.
_idle: dict[_Key, tuple[Publisher, threading.Timer]] = {}


@contextmanager
def borrowed_publisher(options: WriteOptions) -> Iterator[Publisher]:
    """Lend a publisher, connected or about to be; at a clean exit it is kept, on an exception it is thrown away."""
    key = options.url, options.metrics_directory
    metrics = exporter(options.metrics_directory)
    registry = None if metrics is None else metrics.registry
    publisher = _take(key) or Publisher(options.url, name="spark-sink", registry=registry)
    try:
        yield publisher
    except BaseException:
        _close(publisher, 0.0)
        raise
    else:
        if os.environ.get("SPARK_REUSE_WORKER"):
            _keep(key, publisher)
        else:
            _close(publisher, _CLOSE_SECONDS)
    finally:
        if metrics is not None:
            metrics.write()  # nobody knows how long this process lives


def _take(key: _Key) -> Publisher | None:
    with _lock:
        entry = _idle.pop(key, None)
    if entry is None:
        return None
    publisher, timer = entry
    timer.cancel()
    return publisher


def _keep(key: _Key, publisher: Publisher) -> None:
    timer = threading.Timer(_IDLE_SECONDS, _expire, (key, publisher))
    timer.daemon = True
    with _lock:
        _idle[key] = publisher, timer
        surplus = [_idle.pop(next(iter(_idle))) for _ in range(len(_idle) - _KEPT)]
    timer.start()
    for other, its_timer in surplus:
        its_timer.cancel()
        _close(other, _CLOSE_SECONDS)


def _expire(key: _Key, publisher: Publisher) -> None:
    with _lock:
        entry = _idle.get(key)
        if entry is None or entry[0] is not publisher:  # a task has it
            return
        del _idle[key]
    _close(publisher, _CLOSE_SECONDS)


def _close(publisher: Publisher, timeout: float) -> None:
    try:
        publisher.close(timeout)
    except ReliableMQError as error:  # the task has said so, or says it now
        logger.debug("closing a publisher: %s", error)


def close_all() -> None:
    """Close those that nobody uses, in good order."""
    with _lock:
        entries = list(_idle.values())
        _idle.clear()
    for publisher, timer in entries:
        timer.cancel()
        _close(publisher, _CLOSE_SECONDS)


at_exit(ExitStage.KEPT, close_all)
in_child(ForkStage.FORGET, _idle.clear)
