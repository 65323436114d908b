"""Publish through an outbox and die at a given line of the outbox's code.

Arguments: URL OUTBOX API COUNT KILL_AT. OUTBOX is the path of a SQLite file, or a database URL; with the API ``aio``,
the database is used with an ``AsyncEngine``. Writes ``attempt ID`` before and ``accepted ID`` after each publish to
stdout, unbuffered, and at the end ``lines N``, the number of executed lines of the modules below. At line number
KILL_AT, in whichever thread runs it, the process sends itself SIGKILL; 0 means never.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from reliable_mq import AsyncPublisher, Message, Publisher, Queue
from reliable_mq import outbox as outbox_package
from reliable_mq.aio import outbox_channel as aio_outbox_channel
from reliable_mq.aio import publisher as aio_publisher
from reliable_mq.core import outbox as core_outbox
from reliable_mq.engine import outbox_channel
from reliable_mq.outbox import Outbox, SQLAlchemyOutbox, SQLiteOutbox
from reliable_mq.sync import outbox_channel as sync_outbox_channel
from reliable_mq.sync import publisher as sync_publisher

if TYPE_CHECKING:
    from types import FrameType

# Every module of the package `outbox`, and the other modules that a stored message passes through.
TRACED = (
    os.path.dirname(outbox_package.__file__),  # noqa: PTH120  # compared with file names of code objects
    core_outbox.__file__,
    outbox_channel.__file__,
    sync_outbox_channel.__file__,
    sync_publisher.__file__,
    aio_outbox_channel.__file__,
    aio_publisher.__file__,
)
ORDERS = Queue("orders", type="classic", dead_letter=None)
THREADS = 3
LEASE = 1.0  # seconds, for a database


class Killer:
    """Count the lines that run in the modules above, and kill the process at one."""

    def __init__(self, kill_at: int) -> None:
        self.lines = 0
        self._kill_at = kill_at
        self._traced: dict[str, bool] = {}

    def install(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        traced = self._traced.get(name)
        if traced is None:
            traced = self._traced[name] = name.startswith(TRACED)
        return self._line if traced else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


def tell(what: str, message: Message | str) -> None:
    text = message if isinstance(message, str) else message.message_id
    os.write(1, f"{what} {text}\n".encode())


def messages(thread: int, count: int) -> list[Message]:
    """Return messages with numbered bodies.

    The numbers show the order. Every second message has an ordering key, which is its correlation id.
    """
    return [
        Message(b"%d" % number, correlation_id=f"{os.getpid()}-{thread}" if number % 2 else None)
        for number in range(count)
    ]


def publish(publisher: Publisher, thread: int, count: int) -> None:
    """Publish one by one in the first thread, and pipelined in the others."""
    confirmations = []
    for message in messages(thread, count):
        tell("attempt", message)
        if thread == 0:
            publisher.publish(message, routing_key="orders")
            tell("accepted", message)
        else:
            confirmations.append(publisher.submit(message, routing_key="orders"))
    for confirmation in confirmations:
        confirmation.result()
        tell("accepted", confirmation.message_id)


def run(url: str, outbox: Outbox, count: int) -> None:
    with Publisher(url, topology=[ORDERS], outbox=outbox) as publisher:
        threads = [threading.Thread(target=publish, args=(publisher, number, count)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        publisher.flush(60)


async def publish_async(publisher: AsyncPublisher, task: int, count: int) -> None:
    confirmations = []
    for message in messages(task, count):
        tell("attempt", message)
        if task == 0:
            await publisher.publish(message, routing_key="orders")
            tell("accepted", message)
        else:
            confirmations.append(await publisher.submit(message, routing_key="orders"))
    for confirmation in confirmations:
        await confirmation
        tell("accepted", confirmation.message_id)


async def run_async(url: str, outbox: Outbox, count: int) -> None:
    async with AsyncPublisher(url, topology=[ORDERS], outbox=outbox) as publisher:
        await asyncio.gather(*(publish_async(publisher, number, count) for number in range(THREADS)))
        await publisher.flush(60)


def ordering_key(message: Message, _exchange: str, _routing_key: str) -> str | None:
    return message.correlation_id


def new_outbox(where: str, api: str) -> Outbox:
    if "://" not in where:
        return SQLiteOutbox(where, ordering_key=ordering_key)
    engine = create_async_engine(where) if api == "aio" else create_engine(where)
    return SQLAlchemyOutbox(engine, ordering_key=ordering_key, lease=LEASE)


def main(url: str, where: str, api: str, count: str, kill_at: str) -> None:
    outbox = new_outbox(where, api)
    killer = Killer(int(kill_at))
    killer.install()
    if api == "aio":
        asyncio.run(run_async(url, outbox, int(count)))
    else:
        run(url, outbox, int(count))
    tell("lines", str(killer.lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
