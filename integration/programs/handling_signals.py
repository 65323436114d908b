"""Publish while a signal handler uses the same publisher at random moments.

Usage: ``python -m integration.programs.handling_signals URL SEED``. The handler of SIGTERM closes the publisher and
prints the number of confirmed messages.
"""

from __future__ import annotations

import random
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from types import FrameType


def main(url: str, seed: int) -> None:
    rng = random.Random(seed)
    publisher = Publisher(url, topology=[Queue("orders", type="classic")], max_outstanding=20)

    def use(_number: int, _frame: FrameType | None) -> None:
        match rng.randrange(4):
            case 0:
                publisher.submit(Message(b"from a handler"), routing_key="orders")
            case 1:
                publisher.publish(Message(b"from a handler"), routing_key="orders")
            case 2:
                publisher.flush(20)
            case 3:
                publisher.submit(Message(b"from a handler"), routing_key="orders").add_done_callback(print_nothing)
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00001, 0.002))

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.setitimer(signal.ITIMER_REAL, 0)
        publisher.close(20)
        print(publisher.statistics.confirmed, flush=True)
        sys.exit(0)

    signal.signal(signal.SIGALRM, use)
    signal.signal(signal.SIGTERM, end)
    publisher.connect()
    print("ready", flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while True:
        if rng.randrange(10):
            publisher.submit(Message(b"x"), routing_key="orders")
        else:
            publisher.publish(Message(b"x"), routing_key="orders")


def print_nothing(_confirmation: object) -> None:
    """A callback."""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
