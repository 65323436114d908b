"""A consumer that some messages kill: run as a program, started again by a test whenever it dies.

``python -m integration.programs.killed_by_messages URL LOG [MAX_ATTEMPTS [DELAY [PREFETCH]]]``. A body that begins with
``kill`` ends the process with SIGKILL, one that begins with ``poison`` always fails, one that begins with ``flaky``
fails at its first attempt. Each handler call is a line in the log before anything happens: what, body and time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from reliable_mq import Consumer, Delivery, Queue, RetryPolicy

ORDERS = Queue("orders")


def main(url: str, log: str, max_attempts: str = "3", delay: str = "0.2", prefetch: str = "50") -> None:
    with Path(log).open("a", buffering=1) as file:

        def handle(delivery: Delivery) -> None:
            body = delivery.body.decode()
            file.write(f"{body} {delivery.attempt} {time.time():.3f}\n")
            if body.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if body.startswith("poison") or (body.startswith("flaky") and delivery.attempt == 1):
                raise ValueError("no")

        retry = RetryPolicy(int(max_attempts), delays=(float(delay),))
        Consumer(url, ORDERS, handle, retry=retry, prefetch=int(prefetch)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
