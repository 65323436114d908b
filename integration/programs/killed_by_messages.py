"""Run consumers that some messages kill, and that are restarted when they die.

Usage: ``python -m integration.programs.killed_by_messages URL LOG [--option value ...]``, see `Settings`. A body that
begins with ``kill`` ends the process with SIGKILL, ``poison`` always fails, and ``flaky`` fails at its first attempt.
Before that, each handler call writes a line to the log: body, attempt and time.

Without ``--workers``, the test restarts the program. With it, the program forks that many consumers and replaces
those that are killed, like a pre-forking server. Each death is a line ``died`` in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.support.blocking_consumer import in_a_coroutine
from reliable_mq import AsyncConsumer, Consumer, Delivery, Queue, RetryPolicy
from reliable_mq.stores import SQLiteStore

ORDERS = Queue("orders")
LEASE = 1.0  # seconds until the claims of a killed consumer are free


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the program.

    Attributes:
        attempts: maximum number of attempts, the first one included.
        delay: seconds between attempts.
        prefetch: of each consumer.
        api: ``sync`` or ``aio``.
        work: seconds that a handler takes.
        workers: number of consumers; 0 for one, in this process.
        store: file of an idempotency store that the consumers share; empty for none.
    """

    attempts: int = 3
    delay: float = 0.2
    prefetch: int = 50
    api: str = "sync"
    work: float = 0.0
    workers: int = 0
    store: str = ""

    def arguments(self) -> list[str]:
        return [word for name in self.__slots__ for word in (f"--{name}", str(getattr(self, name)))]


def consume(url: str, log: Path, settings: Settings) -> None:
    with log.open("a", buffering=1) as file:

        def handle(delivery: Delivery) -> None:
            body = delivery.body.decode()
            file.write(f"{body} {delivery.attempt} {time.time():.3f}\n")
            if body.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(settings.work)
            if body.startswith("poison") or (body.startswith("flaky") and delivery.attempt == 1):
                raise ValueError("no")

        given: dict[str, Any] = {
            "retry": RetryPolicy(settings.attempts, delays=(settings.delay,)),
            "prefetch": settings.prefetch,
        }
        if settings.store:
            given |= {"idempotency": SQLiteStore(settings.store), "idempotency_lease": LEASE}
        if settings.api == "sync":
            Consumer(url, ORDERS, handle, **given).run()
        else:
            asyncio.run(AsyncConsumer(url, ORDERS, in_a_coroutine(handle), **given).run())


def supervise(url: str, log: Path, settings: Settings) -> None:
    """Fork consumers and replace killed ones until SIGTERM; then end them."""
    workers = set()
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True
        for worker in workers:
            os.kill(worker, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        while not ending and len(workers) < settings.workers:
            worker = os.fork()
            if not worker:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                consume(url, log, settings)
                os._exit(0)
            workers.add(worker)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if not workers:
            return
        worker, status = os.wait()
        workers.discard(worker)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            with log.open("a") as file:
                file.write(f"died 0 {time.time():.3f}\n")
        elif status and not (ending and status == signal.SIGTERM):  # SIGTERM ends a starting consumer
            raise SystemExit(f"a consumer ended by itself, with {status}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("log", type=Path)
    defaults = Settings()
    for name in Settings.__slots__:
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = vars(parser.parse_args())
    url, log = given.pop("url"), given.pop("log")
    settings = Settings(**given)
    (supervise if settings.workers else consume)(url, log, settings)


if __name__ == "__main__":
    main()
