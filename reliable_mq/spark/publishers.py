"""The publishers of a Python worker: one for each broker and user, kept for the next task that the worker runs.

PySpark forks its workers before they load anything of ours, runs one task at a time in each and, unless it is told
otherwise, gives a worker the next task when it is done. A micro-batch of a thousand rows would otherwise spend most of
its time on handshakes. The publisher's own thread keeps heartbeats going, whatever the task does.

Invariants: a publisher is given to one task at a time, and is kept only where that task has seen everything confirmed;
one that nobody has used for a while is closed in good order, before Spark kills its worker for being idle (60 s); a
worker that will not be used again keeps none.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from reliable_mq.errors import ReliableMQError
from reliable_mq.sync.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.spark.options import WriteOptions

__all__ = ["borrowed_publisher", "close_all"]

logger = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 5.0
_KEPT: Final = 4

_lock = threading.Lock()
_idle: dict[str, tuple[Publisher, threading.Timer]] = {}  # by URL, the one that was used last at the end


@contextmanager
def borrowed_publisher(options: WriteOptions) -> Iterator[Publisher]:
    """Lend a publisher, connected or about to be; at a clean exit it is kept, on an exception it is thrown away."""
    publisher = _take(options.url) or Publisher(options.url, name="spark-sink")
    try:
        yield publisher
    except BaseException:
        _close(publisher, 0.0)
        raise
    if os.environ.get("SPARK_REUSE_WORKER"):
        _keep(options.url, publisher)
    else:
        _close(publisher, _CLOSE_SECONDS)


def _take(url: str) -> Publisher | None:
    with _lock:
        entry = _idle.pop(url, None)
    if entry is None:
        return None
    publisher, timer = entry
    timer.cancel()
    return publisher


def _keep(url: str, publisher: Publisher) -> None:
    timer = threading.Timer(_IDLE_SECONDS, _expire, (url, publisher))
    timer.daemon = True
    with _lock:
        _idle[url] = publisher, timer
        surplus = [_idle.pop(next(iter(_idle))) for _ in range(len(_idle) - _KEPT)]
    timer.start()
    for other, its_timer in surplus:
        its_timer.cancel()
        _close(other, _CLOSE_SECONDS)


def _expire(url: str, publisher: Publisher) -> None:
    with _lock:
        entry = _idle.get(url)
        if entry is None or entry[0] is not publisher:  # a task has it
            return
        del _idle[url]
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


atexit.register(close_all)
os.register_at_fork(after_in_child=_idle.clear)
