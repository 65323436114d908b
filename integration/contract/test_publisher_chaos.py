"""Messages with every outcome, from several threads, over a network with faults.

A seed determines the faults.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.publishing import book
from reliable_mq import (
    Message,
    PublishBlocked,
    Publisher,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    Queue,
    RetryPolicy,
    UsageError,
)
from reliable_mq.testing import connection_blocked, connection_unblocked
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from reliable_mq import Confirmation
    from reliable_mq.testing import Audit, FaultProxy, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", dead_letter=None)
BOUND = {"x-max-length": 20, "x-overflow": "reject-publish"}
FULL = Queue("full", type="classic", dead_letter=None, arguments=BOUND)
THREADS, MESSAGES = 4, 200
DEADLINE = 8.0
LATE = 6.0  # seconds that a busy machine may add

# Exchange and routing key → possible outcomes, None for confirmed. A message may always be too late.
OUTCOMES: dict[tuple[str, str], set[type[PublishError] | None]] = {
    ("", "orders"): {None},
    ("", "nowhere"): {PublishReturned},
    ("", "full"): {None, PublishNacked},
    ("missing", "orders"): {PublishRefused},
}
WEIGHTS = (90, 4, 5, 1)
TOO_LATE = {PublishUnconfirmed, PublishBlocked}


def block(proxy: FaultProxy) -> None:
    with suppress(UsageError):  # if no connection is live
        proxy.inject("to_client", connection_blocked("chaos"))


def unblock(proxy: FaultProxy) -> None:
    with suppress(UsageError):
        proxy.inject("to_client", connection_unblocked())


def faults(proxy: FaultProxy, rng: Random) -> list[Callable[[], object]]:
    """Return the network's faults, each of which lasts a moment.

    As with TCP, a frame is never lost without its connection.
    """
    return [
        proxy.cut,
        lambda: proxy.cut(reset=False),
        lambda: proxy.cut_after(rng.randrange(1, 60), rng.choice(["to_broker", "to_client"])),
        lambda: proxy.cut_in_body(rng.random(), nth=rng.randrange(1, 10)),
        proxy.hold_confirms,
        proxy.release_confirms,
        lambda: proxy.release_confirms(rng.randrange(1, 5)),
        lambda: proxy.black_hole(rng.choice(["to_broker", "to_client", "both"]), new_connections=False),
        proxy.resume,
        lambda: proxy.stop_reading("to_broker", new_connections=False),
        proxy.refuse_connections,
        proxy.hang_connections,
        proxy.accept_connections,
        lambda: proxy.delay(0.02, jitter=0.02),
        lambda: block(proxy),
        lambda: unblock(proxy),
        proxy.heal,
        proxy.heal,
        proxy.heal,
    ]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("publisher_api")
def test_every_message_ends_right_and_in_time_on_any_network(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, seed: int
) -> None:
    """No outcome is wrong, late or lost.

    Confirmed messages are in their queues, once or more.
    """
    proxy = fault_proxy(vhost.url, seed=seed)
    over = threading.Event()

    def disturb() -> None:
        rng = random.Random(seed)
        what = faults(proxy, rng)
        while not over.wait(rng.expovariate(1 / 0.08)):
            rng.choice(what)()
        proxy.heal()
        unblock(proxy)

    with Publisher(
        proxy.url,
        topology=[ORDERS, FULL],
        max_outstanding=100,
        confirm_timeout=1.0,
        connect_timeout=1.0,
        delivery_timeout=DEADLINE,
        heartbeat=5,
        retry=RetryPolicy(max_attempts=3, delays=(0.01,)),
        reconnect_wait=tenacity.wait_random(0, 0.05),
    ) as publisher:
        refused: list[PublishUnconfirmed | PublishBlocked] = []

        def work(number: int) -> list[tuple[Confirmation, float, set[type[PublishError] | None]]]:
            rng = random.Random(f"{seed} {number}")
            submitted = []
            for _ in range(MESSAGES):
                message = Message(rng.randbytes(rng.choice([0, 10, 1000, 50_000])))
                ((exchange, routing_key),) = rng.choices(list(OUTCOMES), WEIGHTS)
                timeout = rng.choice([None, None, None, rng.uniform(0, 1)])
                checker.attempted(message.message_id)
                began = time.monotonic()
                deadline = began + (DEADLINE if timeout is None else timeout)
                try:
                    confirmation = publisher.submit(
                        message, exchange=exchange, routing_key=routing_key, timeout=timeout
                    )
                except (PublishUnconfirmed, PublishBlocked) as error:
                    refused.append(error)
                    checker.failed(message.message_id)
                    assert time.monotonic() < deadline + LATE
                else:
                    submitted.append((confirmation, deadline, OUTCOMES[exchange, routing_key]))
            return submitted

        disturbing = threading.Thread(target=disturb)
        with ThreadPoolExecutor(THREADS) as pool:
            disturbing.start()
            working = [pool.submit(work, number) for number in range(THREADS)]
            for future in working:
                for confirmation, deadline, _ in future.result(120):
                    wait_until(confirmation.done, timeout=max(deadline - time.monotonic(), 0) + LATE, what="an outcome")
        over.set()
        disturbing.join(30)
        assert not any(getattr(error, "sent", False) for error in refused), "refused, and yet sent"
        ends: dict[str, int] = {}
        for future in working:
            for confirmation, _, allowed in future.result():
                error = book(checker, confirmation, timeout=0)
                end = None if error is None else type(error)
                assert end in allowed or end in TOO_LATE, f"{confirmation}: {error}"
                ends[end.__name__ if end else "confirmed"] = ends.get(end.__name__ if end else "confirmed", 0) + 1
        assert publisher.outstanding == 0
        # Whatever the outcomes, the publisher still works.
        for _ in range(100):
            message = Message(b"afterwards")
            checker.attempted(message.message_id)
            confirmation = publisher.submit(message, routing_key="orders", timeout=60)  # not the short one of above
            assert book(checker, confirmation, timeout=70) is None
        print(ends, publisher.statistics, f"{proxy.connections} connections")
    checker.drain(vhost, ["orders", "full"])
    assert not checker.close().refuted, "an error said that the broker does not have a message that it has"
