"""The files on the path of a message are those listed on the architecture page.

A profiler notes every function of the package that is called. Each file is in the table of its path, or among the files
named below the table, which take no part in it. No path has more files than its bound.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import reliable_mq
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.core.consumer import quarantine
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from reliable_mq.engine.confirmation import BaseConfirmation
    from tests.contract.scripted_broker import Published

PACKAGE = Path(reliable_mq.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
#: The maximum number of files for each path.
BOUNDS = {"publish": 13, "confirm": 10, "delivery": 12, "ack": 11}
COMPLETES = {"core/consumer/handler.py", "core/idempotency.py"}
CLAIMS = COMPLETES | {"codec/properties.py"}
GROUPS = {"engine/claim_groups.py"}  # read for the size of a group
WAKES = "sync/io_thread.py"  # for many results at a time; a single one, as here, may be found by the timer of its ack
MESSAGES = 20  # enough that a few find a running thread, which needs no wake-up, on a busy machine


class Profile:
    """The files whose functions are called, for each path of a message."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {way: set() for way in BOUNDS}
        self._way: set[str] | None = None
        self._unseen: set[int] = set()  # threads

    def enter(self, way: str | None) -> None:
        self._way = None if way is None else self.files[way]

    def leave(self, owner: Any) -> None:
        """Record the path until the I/O thread is idle, then leave it."""
        self._unseen.add(threading.get_ident())
        idle = threading.Event()
        owner._io.call_soon(idle.set)
        assert idle.wait(10)
        self.enter(None)
        self._unseen.remove(threading.get_ident())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the calls of this thread and of those that it starts.

        Garbage collection is disabled.
        """
        gc.collect()
        gc.disable()
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # as `sys.setprofile` accepts
            gc.enable()

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        way = self._way
        if event == "call" and way is not None and threading.get_ident() not in self._unseen:
            path = Path(frame.f_globals.get("__file__", ""))  # also of generated code, which has no file
            if path.is_relative_to(PACKAGE):
                way.add(str(path.relative_to(PACKAGE)))


def publish(profile: Profile) -> None:
    """Publish a message that opens the connection, and then the measured ones."""
    with (
        ScriptedBroker() as broker,
        profile.running(),
        Publisher(broker.url, delivery_timeout=20, heartbeat=3600) as publisher,
    ):
        for number in range(MESSAGES + 1):
            message = Message(b"paid")
            profile.enter("publish" if number else None)
            confirmation = publisher.submit(message, routing_key="orders")
            published = broker.wait_published(number + 1)[-1]
            profile.leave(publisher._channel)
            confirming = threading.Thread(target=confirm, args=(confirmation, published))
            profile.enter("confirm" if number else None)
            confirming.start()
            confirmation.result(20)
            profile.leave(publisher._channel)
            confirming.join()


def confirm(confirmation: BaseConfirmation, published: Published) -> None:
    """Confirm a publish whose caller waits."""
    pause = threading.Event()
    while confirmation.callbacks is None:
        pause.wait(0.001)
    published.channel.ack(published.number)


def consume(profile: Profile, **options: Any) -> None:
    """Consume a message that starts the threads, and then the measured ones."""
    handled = 0

    def handle(_: object) -> None:
        nonlocal handled
        profile.leave(consumer._subscription)
        handled += 1
        profile.enter("ack" if handled > 1 else None)

    queue = Queue("orders", dead_letter=None)
    with ScriptedBroker() as broker, profile.running():
        consumer = Consumer(broker.url, queue, handle, heartbeat=3600, **options)  # no heartbeat is sent
        with consumer:
            broker.wait(lambda: broker.consumed, "a subscription")
            for number in range(MESSAGES + 1):
                wait_until(handlers_are_idle, timeout=10, what="idle handlers")  # the last steps are those of an ack
                profile.enter("delivery" if number else None)
                broker.consuming.deliver(b"paid", message_id=f"{number}")
                broker.wait_settled(number + 1)
                profile.leave(consumer._subscription)


def handlers_are_idle() -> bool:
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if "-worker-" in thread.name]
    return all(frames[thread.ident].f_code is threading.Condition.wait.__code__ for thread in threads if thread.ident)


@pytest.fixture(scope="module", autouse=True)
def without_quarantine() -> Iterator[None]:
    """Delay the subscription to quarantine beyond the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quarantine, "AFTER", 3600.0)
        yield


@pytest.fixture(scope="module")
def called() -> dict[str, set[str]]:
    profile = Profile()
    publish(profile)
    consume(profile)
    return profile.files


class Listed(NamedTuple):
    """The part of the page about one path."""

    count: int
    table: list[str]
    asked: set[str]


def listed(way: str) -> Listed:
    part = re.search(
        rf"^(?:A|Its) {way}, from [^|]*? passes (\d+)\b[^|]*\n\n(\| file .*?)\n\n(Asked .*?)\n\n",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert part is not None, f"no table of a {way}"
    rows = [row.split(" | ")[0] for row in part[2].splitlines()]
    return Listed(int(part[1]), files(" ".join(rows)), set(files(part[3])))


def files(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", text)


@pytest.mark.parametrize("way", BOUNDS)
def test_a_message_passes_the_files_of_the_page(way: str, called: dict[str, set[str]]) -> None:
    count, table, asked = listed(way)
    passed = set(table) - (CLAIMS if way == "delivery" else set())
    assert len(table) == len(set(table))
    assert len(passed) == count
    assert len(table) <= BOUNDS[way]
    assert not passed & asked
    seen = called[way] | {WAKES} if way == "ack" else called[way]
    assert seen == passed | asked


def test_what_a_store_adds_is_on_the_page(called: dict[str, set[str]]) -> None:
    assert set(listed("delivery").table) >= CLAIMS
    profile = Profile()
    consume(profile, idempotency=MemoryStore())
    others = called["delivery"] | called["ack"] | {"stores/memory.py", WAKES} | GROUPS
    assert profile.files["delivery"] - others == CLAIMS
    assert profile.files["ack"] - others == COMPLETES
