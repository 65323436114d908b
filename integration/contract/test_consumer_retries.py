"""Retries on every backend: equal attempts, an unchanged message, never early.

Other tests cover the differences between the backends.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.consuming import Gate, Handler, dead_letters, send
from integration.support.lag import Lag
from reliable_mq import (
    Consumer,
    DeadLetter,
    Exchange,
    KillSwitch,
    Message,
    Publisher,
    Queue,
    RetryLater,
    RetryPolicy,
    TopologyMismatch,
)
from reliable_mq.codec import join_properties, split_properties
from reliable_mq.codec.tables import walk_table
from reliable_mq.core import headers
from reliable_mq.testing.waiting import wait_until
from reliable_mq.topology import Binding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")
DELAYED = Queue("orders", delayed_retry=(0.2, 0.4))

#: Every backend on every broker that has it. The one in memory does the same on each.
BACKENDS = pytest.mark.parametrize(
    ("any_broker", "backend"),
    [
        ("newest", "queues"),
        ("4.0", "queues"),
        ("newest", "memory"),
        pytest.param("4.0", "memory", marks=pytest.mark.soak),
        ("newest", "broker"),
    ],
    indirect=["any_broker"],
)
PREFIX = headers.PREFIX
LATE = 1.0  # seconds that a retry may be late; above ten seconds of delay, a tenth of it
HOPS = 5  # of the dozen threads and processes that a retry passes through, those that may be late at once
SAID = ("attempts", "dead-letter-reason", "exception-type")
BY_THE_BROKER = {b"x-delivery-count", b"x-acquired-count"}


class Attempts:
    """A handler that fails and records its calls."""

    def __init__(self, failures: int = 100, error: Exception | None = None) -> None:
        self.seen: list[tuple[float, bytes, int, bool, str, str, bytes]] = []
        self.fails = failures
        self._error = error or ValueError("not yet")

    def __call__(self, delivery: Delivery) -> None:
        self.seen.append(
            (
                time.monotonic(),
                delivery.body,
                delivery.attempt,
                delivery.redelivered,
                delivery.exchange,
                delivery.routing_key,
                delivery.properties,
            )
        )
        if delivery.attempt <= self.fails:
            raise self._error

    @property
    def gaps(self) -> list[float]:
        times = [one[0] for one in self.seen]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def attempts(self) -> list[int]:
        return [one[2] for one in self.seen]


def entries(properties: bytes) -> tuple[dict[str, bytes], set[bytes]]:
    """Return the properties without headers, and each header as bytes.

    Headers in which the broker counts are left out.
    """
    segments = split_properties(properties)
    table = segments.pop("headers", b"\0\0\0\0")
    found = {table[start:end] for _, start, end in walk_table(table, 4, len(table))}
    return segments, {one for one in found if one[1 : 1 + one[0]] not in BY_THE_BROKER}


def nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {queue: count for queue, count in counts.items() if count}


def short(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def header(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + value


def foreign() -> bytes:
    """Return properties that the publishing of a copy would not preserve."""
    table = b"".join(
        (
            header(b"CC", b"A" + struct.pack(">I", 9) + b"S" + struct.pack(">I", 4) + b"copy"),
            header(b"ratio", b"f" + struct.pack(">f", 0.1)),
            header(b"exact", b"d" + struct.pack(">d", 0.75)),
            header(b"late", b"T" + struct.pack(">Q", 1_700_000_000_000)),
            header(b"small", b"s" + struct.pack(">h", -7)),
            header(b"raw", b"S" + struct.pack(">I", 2) + b"\xff\xfe"),
        )
    )
    return join_properties(
        {
            "content_type": short("application/x-odd"),
            "headers": struct.pack(">I", len(table)) + table,
            "delivery_mode": b"\x02",
            "priority": b"\x03",
            "correlation_id": short("c"),
            "reply_to": short("r"),
            "expiration": short("60000"),
            "message_id": short("m"),
            "timestamp": struct.pack(">Q", 1_700_000_000_000),
            "type": short("t"),
            "user_id": short("guest"),
            "app_id": short("a"),
        }
    )


def check_gaps(gaps: Sequence[float], asked: Sequence[float], lag: Lag) -> None:
    """Check that no retry was early or too late.

    The delay of threads, and of the broker, is allowed for.
    """
    late = [gap - delay for gap, delay in zip(gaps, asked, strict=True)]
    assert min(late) >= 0, gaps
    assert max(late) < LATE + HOPS * lag.worst, f"{gaps}, while threads or broker ran late by {lag.worst:.3f} s"


def backend_of(name: Any, *, max_attempts: int = 3) -> tuple[Queue, RetryPolicy]:
    """Return the queue and policy that make a backend delay by 0.2, then 0.4 s."""
    return DELAYED if name == "broker" else ORDERS, RetryPolicy(max_attempts, delays=(0.2, 0.4), backend=name)


@BACKENDS
def test_a_retried_message_is_the_same_message_and_never_early(any_vhost: VirtualHost, backend: str) -> None:
    """CC, user_id, expiration, float headers, exchange and routing key are unchanged.

    Every attempt sees the same values as the first one.
    """
    shop = Exchange("shop", type="topic")
    queue, retry = backend_of(backend)
    topology = [shop, Binding(shop, queue, "new.*"), Binding(shop, Queue("copy", dead_letter=None), "copy")]
    handler = Attempts(failures=2)
    with Lag(any_vhost) as lag, Consumer(any_vhost.url, queue, handler, topology=topology, retry=retry) as consumer:
        sent = Message.from_wire(b"\x00body\xff", foreign())
        send(any_vhost, "new.order", [sent], exchange="shop")
        wait_until(lambda: consumer.statistics.handled == 1, timeout=15, what="handled")
        assert (consumer.statistics.retried, consumer.statistics.delayed) == (2, 2 if backend == "queues" else 0)
    assert handler.attempts == [1, 2, 3]
    assert [one[3] for one in handler.seen] == [False, True, True]
    assert {one[1] for one in handler.seen} == {sent.body}
    assert {one[4:6] for one in handler.seen} == {("shop", "new.order")}
    assert [entries(one[6]) for one in handler.seen] == [entries(foreign())] * 3
    check_gaps(handler.gaps, (0.2, 0.4), lag)
    print(f"{backend}: asked for 0.2 and 0.4 s, measured", [round(gap, 3) for gap in handler.gaps])
    wait_until(lambda: nonzero(any_vhost.live_counts()) == {"copy": 1}, timeout=10, what="nothing left but the copy")


@BACKENDS
def test_a_message_of_another_user_is_retried_and_dead_lettered(any_vhost: VirtualHost, backend: str) -> None:
    """The message's user_id is not the connection's user.

    Publishing the message again with that user_id would close the channel with 406.
    """
    any_vhost.add_user("worker")
    handler = Attempts(failures=1)
    queue, retry = backend_of(backend, max_attempts=2)
    with Consumer(any_vhost.url.replace("guest:guest", "worker:worker"), queue, handler, retry=retry) as consumer:
        send(any_vhost, "orders", [Message(b"good", user_id="guest")])
        wait_until(lambda: consumer.statistics.handled == 1, timeout=15, what="handled")
        handler.fails = 2
        send(any_vhost, "orders", [Message(b"poison", user_id="guest")])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=15, what="dead-lettered")
        assert (consumer.statistics.republish_failed, consumer.reconnects) == (0, 0)
    assert handler.attempts == [1, 2, 1, 2]
    assert {split_properties(one[6])["user_id"] for one in handler.seen} == {short("guest")}
    [dead] = dead_letters(any_vhost, "orders.dead", 1)
    assert dead["properties"]["headers"][headers.ORIGINAL_USER_ID] == "guest"


@BACKENDS
def test_f27_f30_the_cap_holds_and_the_dead_letter_says_why(
    any_vhost: VirtualHost, backend: str, checker: Audit
) -> None:
    """Each poison message gets ``max_attempts`` calls and one dead letter.

    No other message moves. A handler that raises ``DeadLetter`` is called once.
    """

    def handle(delivery: Delivery) -> None:
        if delivery.body.startswith(b"chosen"):
            raise DeadLetter("as told")
        if delivery.body.startswith(b"poison"):
            raise ValueError("cannot be parsed")

    handler = Handler(then=handle, account=checker)
    queue, retry = backend_of(backend)
    bodies = [b"%s-%d" % (kind, number) for number in range(5) for kind in (b"good", b"poison", b"chosen")]
    with Consumer(any_vhost.url, queue, handler, retry=retry) as consumer:
        send(any_vhost, "orders", [Message(body, message_id=body.decode()) for body in bodies], checker)
        wait_until(lambda: consumer.statistics.dead_lettered == 10, timeout=20, what="dead-lettered")
        handler.wait_done(5)
    calls = Counter((one.body, attempt) for one, attempt in zip(handler.begun, handler.attempts, strict=True))
    attempts = {b"good": (1,), b"poison": (1, 2, 3), b"chosen": (1,)}
    assert calls == Counter((body, number) for body in bodies for number in attempts[body.partition(b"-")[0]])
    dead = dead_letters(any_vhost, "orders.dead", 10)
    said = [
        (one["payload"].partition("-")[0], *(one["properties"]["headers"][PREFIX + name] for name in SAID))
        for one in dead
    ]
    assert Counter(said) == {
        ("poison", 3, "3 of 3 attempts failed", "ValueError"): 5,
        ("chosen", 1, "as told", "reliable_mq.retry.DeadLetter"): 5,
    }
    checker.dead_lettered([one["properties"]["message_id"] for one in dead])
    checker.drain(any_vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


@pytest.mark.soak
@BACKENDS
def test_f28_f58_headers_of_ours_from_elsewhere_are_not_misread(any_vhost: VirtualHost, backend: str) -> None:
    """An attempt count forged by a client is ignored.

    A format newer than this library's is dead-lettered without a handler call.
    """
    handler = Attempts(failures=2)
    queue, retry = backend_of(backend)
    spoofed = {"x-death": [{"count": 99}], "x-delivery-count": 99, "x-acquired-count": 99, PREFIX + "attempt": 10**6}
    with Consumer(any_vhost.url, queue, handler, retry=retry) as consumer:
        send(any_vhost, "orders", [Message(b"spoofed", headers=spoofed)])
        wait_until(lambda: consumer.statistics.handled == 1, timeout=15, what="handled")
        send(any_vhost, "orders", [Message(b"newer", headers={headers.FORMAT: headers.FORMAT_VERSION + 1})])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=15, what="dead-lettered")
    assert handler.attempts == [1, 2, 3]
    assert {one[1] for one in handler.seen} == {b"spoofed"}


def test_a_delay_that_no_queue_has_goes_through_several(vhost: VirtualHost) -> None:
    """RetryLater(delay) is never early and at most a second late.

    The queues are declared when they are first needed.
    """
    handler = Attempts(failures=3, error=RetryLater(2.3))
    with Lag(vhost) as lag, Consumer(vhost.url, ORDERS, handler, retry=RetryPolicy(5, delays=(60,))) as consumer:
        send(vhost, "orders", [Message(b"x")])
        wait_until(lambda: consumer.statistics.handled == 1, timeout=30, what="handled")
    assert handler.attempts == [1, 2, 3, 4]
    check_gaps(handler.gaps, (2.3, 2.3, 2.3), lag)


def test_f56_mixed_delays_do_not_wait_for_each_other(vhost: VirtualHost, checker: Audit) -> None:
    """Messages with short delays return in time behind those with long ones.

    No queue blocks at its head. A retry goes to the end of the work queue, so one that is due before all first
    attempts have begun is counted as late from that moment.
    """
    back: dict[bytes, float] = {}
    gone: dict[bytes, float] = {}

    def handle(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            gone[delivery.body] = time.monotonic()
            raise RetryLater(float(delivery.body.partition(b"/")[0]))
        back[delivery.body] = time.monotonic()

    handler = Handler(then=handle, account=checker)
    delays = (8.0, 0.5, 1.0)
    messages = [Message(f"{delay}/{number}".encode()) for number in range(20) for delay in delays]
    retry = RetryPolicy(2, delays=delays, backend="queues")
    with Lag(vhost) as lag, Consumer(vhost.url, ORDERS, handler, retry=retry) as consumer:
        send(vhost, "orders", messages, checker)
        handler.wait_done(len(messages))
        assert consumer.statistics.delayed == len(messages)
    all_begun = max(gone.values())
    late = []
    for delay in delays:
        bodies = [body for body in back if body.startswith(b"%.1f/" % delay)]
        waited = [back[body] - gone[body] for body in bodies]
        print(f"asked for {delay} s, measured {min(waited):.3f} to {max(waited):.3f} s")
        assert min(waited) >= delay
        late += [back[body] - max(gone[body] + delay, all_begun) for body in bodies]
    late.sort()
    print(f"late by up to {late[-1]:.3f} s, while threads or broker ran late by {lag.worst:.3f} s")
    assert late[len(late) * 95 // 100] < LATE + lag.worst, f"more than one in twenty: {late}"
    assert late[-1] < LATE + HOPS * lag.worst, f"{late}, while threads or broker ran late by {lag.worst:.3f} s"
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


def test_f57_a_delay_queue_that_was_deleted_is_declared_again(vhost: VirtualHost) -> None:
    """The retry is returned; its original stays unacked until the queue is back."""
    handler = Attempts(failures=1)
    with Consumer(vhost.url, ORDERS, handler, retry=RetryPolicy(2, delays=(0.2,))) as consumer:
        vhost.delete_queue("orders.retry.200")
        send(vhost, "orders", [Message(b"x")])
        wait_until(lambda: consumer.statistics.handled == 1, timeout=20, what="handled")
        assert (consumer.statistics.republish_failed, consumer.statistics.delayed) == (1, 1)
    assert handler.attempts == [1, 2]


def test_a_delay_queue_that_differs_is_said_at_the_start(vhost: VirtualHost) -> None:
    """A differing delay queue is an error at the start, like any declared queue."""
    with Publisher(vhost.url, topology=[Queue("orders.retry.200", dead_letter=None)]) as publisher:
        publisher.connect()
    consumer = Consumer(vhost.url, ORDERS, Attempts(), retry=RetryPolicy(2, delays=(0.2,)))
    with pytest.raises(TopologyMismatch, match=r"orders\.retry\.200"):
        consumer.connect()


def test_a_differing_delay_queue_needed_later_is_left_alone(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names every difference, and the message is held in the process.

    The delay is that of a RetryLater. The refused declaration costs one channel.
    """
    with Publisher(vhost.url, topology=[Queue("orders.retry.2000", max_length=3, dead_letter=None)]) as publisher:
        publisher.connect()
    handler = Attempts(failures=1, error=RetryLater(2))
    with caplog.at_level(logging.INFO, "reliable_mq"), Consumer(vhost.url, ORDERS, handler) as consumer:
        send(vhost, "orders", [Message(b"x")])
        wait_until(lambda: "not declared" in caplog.text, timeout=20, what="refused")
        send(vhost, "orders", [Message(b"y")])
        wait_until(lambda: consumer.statistics.handled == 2, timeout=20, what="handled")
    assert sorted(handler.attempts) == [1, 1, 2, 2]
    [told] = [text for text in caplog.messages if "not declared" in text]
    assert all(argument in told for argument in ("x-max-length", "x-dead-letter-exchange", "x-message-ttl")), told
    lost = [text for text in caplog.messages if " lost: " in text]
    assert len(lost) == 1, lost


def test_attempts_survive_the_process_in_delay_queues(vhost: VirtualHost) -> None:
    """The count is in the message, so another consumer continues it.

    It also knows the time of the first failure.
    """
    policy = RetryPolicy(3, delays=(0.5,))
    first = Attempts()
    with Gate(lambda delivery: delivery.attempt > 1) as gate:
        handler = Handler(then=lambda delivery: (gate(delivery), first(delivery)))
        with Consumer(vhost.url, ORDERS, handler, retry=policy, name="first") as consumer:
            send(vhost, "orders", [Message(b"x")])
            wait_until(lambda: consumer.statistics.delayed >= 1, timeout=10, what="waiting")
            consumer.stop()
            gate.open()  # it has not begun with the last attempt, however late it stops
    second = Attempts()
    with Consumer(vhost.url, ORDERS, second, retry=policy, name="second") as consumer:
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=20, what="dead-lettered")
    assert first.attempts + second.attempts == [1, 2, 3]
    [dead] = dead_letters(vhost, "orders.dead", 1)
    said = dead["properties"]["headers"]
    assert said[PREFIX + "attempts"] == 3
    assert said[PREFIX + "first-failure"] <= said[PREFIX + "last-failure"]
    assert said[PREFIX + "consumer"] == "second"
    assert not {"x-death", PREFIX + "retry", PREFIX + "attempt"} & said.keys()


def test_a_plain_name_gets_no_queues_beside_it(vhost: VirtualHost) -> None:
    """Only a Queue is declared, so retries of a named queue are held in the process."""
    with Publisher(vhost.url, topology=[Queue("named", dead_letter=None)]) as publisher:
        publisher.connect()
    handler = Attempts(failures=2)
    with Consumer(vhost.url, "named", handler, retry=RetryPolicy(3, delays=(0.1,))) as consumer:
        send(vhost, "named", [Message(b"x")])
        wait_until(lambda: consumer.statistics.handled == 1, timeout=10, what="handled")
    assert handler.attempts == [1, 2, 3]
    assert set(vhost.live_counts()) == {"named"}


def test_f28_a_forged_path_of_delays_declares_no_delay_queues(vhost: VirtualHost) -> None:
    """Without delay queues, such a message is held no longer than a retry.

    It occupies its place in the prefetch for that time.
    """
    ways = [Message(b"x", headers={headers.FORMAT: 1, headers.RETRY: {"path": [301 + way]}}) for way in range(5)]
    retry = RetryPolicy(3, delays=(0.2,))
    with Consumer(vhost.url, ORDERS, Attempts(failures=0), retry=retry) as consumer:
        send(vhost, "orders", ways)
        wait_until(lambda: consumer.statistics.handled == 5, timeout=10, what="handled")
    made = {name for name in vhost.live_counts() if ".retry." in name}
    assert made <= {"orders.retry.100", "orders.retry.200", "orders.retry.500", "orders.retry.1000"}
    held = [Message(b"x", headers={headers.FORMAT: 1, headers.RETRY: {"path": [10**10]}}) for _ in range(2)]
    with Consumer(vhost.url, "orders", Attempts(failures=0), retry=retry, prefetch=2) as consumer:
        send(vhost, "orders", [*held, Message(b"behind them")])
        wait_until(lambda: consumer.statistics.handled == 3, timeout=10, what="handled")


def test_the_policy_decides_by_the_exception(vhost: VirtualHost) -> None:
    """Exceptions that the policy gives up on are dead-lettered with the reason.

    A verdict of the handler wins.
    """

    def handle(delivery: Delivery) -> None:
        if delivery.body == b"hopeless":
            raise FileNotFoundError("gone")
        if delivery.body == b"chosen":
            raise DeadLetter("as told")
        if delivery.attempt < 3:
            raise TimeoutError("slow")

    handler = Handler(then=handle)
    policy = RetryPolicy(3, delays=(0.1,), retry_on=OSError, give_up_on=FileNotFoundError)
    with Consumer(vhost.url, ORDERS, handler, retry=policy) as consumer:
        send(vhost, "orders", [Message(body) for body in (b"hopeless", b"chosen", b"slow")])
        handler.wait_done(1)
        wait_until(lambda: consumer.statistics.dead_lettered == 2, timeout=10, what="dead-lettered")
    reasons = {
        dead["payload"]: dead["properties"]["headers"]["x-reliable-mq-dead-letter-reason"]
        for dead in dead_letters(vhost, "orders.dead", 2)
    }
    assert reasons == {
        "hopeless": "the retry policy gives up on FileNotFoundError: gone",
        "chosen": "as told",
    }


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("alarm", ["memory", "disk"])
def test_f18_f19_retries_go_on_under_an_alarm(private_vhost: VirtualHost, checker: Audit, alarm: str) -> None:
    """Failed messages are held and retried although publishing is blocked.

    Messages that are given up are rejected, so that the broker dead-letters them. Other messages are handled, and
    nothing is lost. Publishes outstanding when the alarm began are waited for first, up to a minute.
    """
    vhost = private_vhost

    def handle(delivery: Delivery) -> None:
        if delivery.body.startswith(b"poison") or (delivery.body.startswith(b"flaky") and delivery.attempt == 1):
            raise ValueError("no")

    handler = Handler(then=handle, account=checker)
    bodies = [f"{kind}-{number}".encode() for number in range(10) for kind in ("good", "flaky", "poison")]
    with Consumer(vhost.url, ORDERS, handler, retry=RetryPolicy(2, delays=(0.2,)), prefetch=200) as consumer:
        send(vhost, "orders", [Message(b"poison-first"), Message(b"flaky-first")], checker)  # so that it is connected
        handler.wait_done(1)
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=20, what="one dead letter")
        with Gate() as gate:
            handler._then = lambda delivery: (gate(delivery), handle(delivery))
            send(vhost, "orders", [Message(body) for body in bodies], checker)
            wait_until(lambda: len(handler.begun) > 4, timeout=10, what="begun")
            vhost.broker.alarm(alarm)
            gate.open()
            wait_until(lambda: len(handler.done) == 21, timeout=120, what="good and flaky ones handled under the alarm")
            wait_until(
                lambda: consumer.statistics.rejected + consumer.statistics.dead_lettered == 11,
                timeout=120,
                what=lambda: f"poison given up: {consumer.statistics}",
            )
        vhost.broker.clear_alarm(alarm)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


DELAYED_FOR_LONG = Queue("orders", delayed_retry=(0.5, 1.0))


@pytest.mark.parametrize("broker", ["newest"], indirect=True)
def test_f27_the_brokers_own_delayed_retry(vhost: VirtualHost) -> None:
    """The delay is linear up to a maximum, and the message is never published again.

    The cap holds, and the dead letter says why.
    """
    handler = Attempts()
    retry = RetryPolicy(4, backend="broker")
    with Lag(vhost) as lag, Consumer(vhost.url, DELAYED_FOR_LONG, handler, retry=retry) as consumer:
        sent = Message.from_wire(b"\x00body\xff", foreign())
        send(vhost, "orders", [sent])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=20, what="dead-lettered")
        assert (consumer.statistics.retried, consumer.statistics.delayed) == (3, 0)
    assert handler.attempts == [1, 2, 3, 4]
    assert [one[3] for one in handler.seen] == [False, True, True, True]
    check_gaps(handler.gaps, (0.5, 1.0, 1.0), lag)
    print("asked for 0.5, 1, 1 s, measured", [round(gap, 3) for gap in handler.gaps])
    [dead] = dead_letters(vhost, "orders.dead", 1)
    assert dead["properties"]["headers"]["x-reliable-mq-dead-letter-reason"] == "4 of 4 attempts failed"


def test_f27_delayed_retry_by_an_older_broker_is_refused(vhost_40: VirtualHost) -> None:
    """The error is raised at the start.

    Such a broker would accept the arguments and requeue at once.
    """
    with pytest.raises(TopologyMismatch, match=r"knows from 4\.3 on"):
        Consumer(vhost_40.url, DELAYED, Attempts()).connect()


def test_a_consumer_pauses_when_all_handlers_fail_and_resumes(vhost: VirtualHost) -> None:
    """No message is lost, and most keep their attempts.

    Messages that have not begun wait for a successful probe.
    """
    down = threading.Event()
    down.set()

    def handle(_delivery: Delivery) -> None:
        if down.is_set():
            time.sleep(0.01)  # as a failing service would take
            raise ConnectionError("the service is down")

    handler = Handler(then=handle)
    switch = KillSwitch(share=0.9, minimum=10, pause=0.2, longest_pause=0.5)
    retry = RetryPolicy(10, delays=(0.1,))
    with Consumer(vhost.url, ORDERS, handler, retry=retry, kill_switch=switch) as consumer:
        send(vhost, "orders", [Message(b"%d" % number) for number in range(200)])
        wait_until(lambda: consumer.statistics.pauses >= 3, timeout=20, what="paused, and probed in vain")
        assert len(handler.begun) < 100
        down.clear()
        handler.wait_done(200)
        assert consumer.statistics.dead_lettered == 0
    assert max(handler.attempts) < 10
