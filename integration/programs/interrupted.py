"""Publish while a signal handler raises exceptions; then check the publisher.

Usage: ``python -m integration.programs.interrupted URL SEED SECONDS COUNT``. The exceptions are raised at random
moments, for so many seconds, and until there are more than COUNT of them and of confirmed messages. Prints a summary;
fails if the publisher lost count of anything.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from typing import TYPE_CHECKING

from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from types import FrameType

    from reliable_mq import Confirmation

WINDOW = 20


class Interrupted(Exception):
    """The exception that the signal handler raises, like KeyboardInterrupt."""


def interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def use(publisher: Publisher, rng: random.Random, confirmations: list[Confirmation]) -> None:
    """Make one random call as a program would."""
    match rng.randrange(10):
        case 0:
            publisher.publish(Message(b"published"), routing_key="orders")
        case 1:
            publisher.flush(5)
        case 2 if confirmations:
            rng.choice(confirmations).result(5)
        case 3:
            publisher.publish_many([Message(b"one of many")] * 5, routing_key="orders")
        case _:
            confirmations.append(publisher.submit(Message(b"submitted"), routing_key="orders"))


def main(url: str, seed: int, duration: float, count: int) -> None:
    rng = random.Random(seed)
    signal.signal(signal.SIGALRM, interrupt)
    publisher = Publisher(url, topology=[Queue("orders", type="classic")], max_outstanding=WINDOW)
    confirmations: list[Confirmation] = []
    publisher.connect()
    interruptions = 0
    end = time.monotonic() + duration
    while time.monotonic() < end or min(interruptions, publisher.statistics.confirmed) <= count:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00001, 0.002))
            while True:
                use(publisher, rng, confirmations)
        except Interrupted:
            interruptions += 1
        del confirmations[:-1000]
    publisher.flush(20)
    assert publisher.outstanding == 0
    assert all(confirmation.done() for confirmation in confirmations)
    assert publisher._options.window.count <= 0, "places of the window are lost"
    last = [publisher.submit(Message(b"last"), routing_key="orders", timeout=10) for _ in range(10 * WINDOW)]
    assert [confirmation.exception(20) for confirmation in last] == [None] * len(last)
    publisher.close(10)
    print(f"{interruptions} interruptions, {publisher.statistics.confirmed} confirmed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
