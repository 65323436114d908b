"""A signal handler raises while a block is entered or left. No broker.

Python runs signal handlers between any two steps of the main thread. The exception is raised at each of them in turn,
and the tests check what is left behind.
"""

from __future__ import annotations

import gc
import linecache
import logging
import signal
import socket
import sys
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.seeds import soaking
from reliable_mq import Consumer, Message, Publisher, PublishNacked, PublishUnconfirmed, Queue, RetryPolicy
from reliable_mq.engine.publisher_channel import BasePublisherChannel
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.sync.consumer import _open_consumers
from reliable_mq.sync.publisher import _open_publishers
from reliable_mq.testing.waiting import wait_until
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

# If the creation of a socket is interrupted, its garbage collection closes it with a warning.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*<socket.socket:pytest.PytestUnraisableExceptionWarning",
    "ignore:unclosed <socket.socket:ResourceWarning",
)

EVERY = 1 if soaking() else 12  # steps
WAITS = ("_await_first_attempts", "wait_connected", "_wait_until")  # all wait for connect_timeout

entered: list[str] = []  # the blocks that were reached


class Interrupted(Exception):
    """An exception like Celery's soft time limit."""


class Interruption:
    """Raises at the n-th line of the sync API and its engine on this thread."""

    def __init__(self, step: int) -> None:
        self.left = step
        self.where = ""

    def __call__(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        inside = any(part in frame.f_code.co_filename for part in ("reliable_mq/sync/", "reliable_mq/engine/"))
        # No code could react between the last step of entering and the block, or before the first step of leaving.
        return self.line if inside and frame.f_code.co_name not in ("__enter__", "__exit__") else None

    def line(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.left -= 1
            # Tracing sees the beginning of a ``try`` and the end of a ``with`` block, but no signal handler runs there.
            statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if self.left <= 0 and not self.where and not statement.startswith(("try:", "with ")):
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise Interrupted
        return self.line


@contextmanager
def signal_raises() -> Iterator[None]:
    """Raise `Interrupted` at SIGUSR1."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, former)


def interrupt_when(condition: Callable[[], bool]) -> None:
    """Send SIGUSR1 to the main thread once a condition is true."""
    wait_until(condition, timeout=20, what="what is waited for before the signal")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and sends nothing."""
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen(200)
        yield f"amqp://guest:guest@127.0.0.1:{server.getsockname()[1]}/"


def publisher(url: str, _: Path) -> None:
    with Publisher(url, name="interrupted"):
        entered.append(url)


def publisher_with_outbox(url: str, path: Path) -> None:
    with Publisher(url, outbox=SQLiteOutbox(path / "outbox"), name="interrupted"):
        entered.append(url)


def consumer(url: str, _: Path) -> None:
    with Consumer(url, Queue("orders"), lambda _: None, name="interrupted", connect_timeout=0.5):
        entered.append(url)


def consumer_that_pulls(url: str, _: Path) -> None:
    with Consumer(url, Queue("orders"), name="interrupted", connect_timeout=0.5):
        entered.append(url)


def leftovers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("interrupted")]


def descriptors() -> list[str]:
    """Return the open descriptors of this process.

    The descriptor of the listing itself is closed, so it is left out.
    """
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(f"{link.name} → {link.readlink()}")
    return found


def nothing_is_left(where: str, before: list[str]) -> None:
    wait_until(lambda: not leftovers(), timeout=20, what=lambda: f"the end of {leftovers()}, after {where}")
    left_open = [one for one in (*_open_publishers, *_open_consumers) if "interrupted" in repr(one)]
    assert not left_open, f"to be closed at exit, after {where}"
    gc.collect()
    now = descriptors()
    assert len(now) <= len(before), f"open after {where}: {set(now) - set(before)}"


def interrupt(use: Callable[[str, Path], None], url: str, path: Path, step: int) -> str:
    """Return where the call was interrupted, or an empty text if it ended first."""
    interruption = Interruption(step)
    tracer = sys.gettrace()
    sys.settrace(interruption)
    try:
        use(url, path)
    except Interrupted:
        pass
    finally:
        sys.settrace(tracer)
    return interruption.where


def interrupt_to_the_end(use: Callable[[str, Path], None], path: Path, steps: range) -> None:
    """Interrupt at one step after the other, until the call ends first.

    There is no broker.
    """
    before = descriptors()
    for step in steps:
        where = interrupt(use, "amqp://guest:guest@127.0.0.1:1/", path, step)
        nothing_is_left(where, before)
        if not where:
            return
    pytest.fail("it never came to its end")


@pytest.mark.slow
@pytest.mark.parametrize(
    "use", [publisher, publisher_with_outbox, consumer, consumer_that_pulls], ids=lambda use: use.__name__
)
def test_an_interrupted_entering_leaves_no_thread(
    silent: str, tmp_path: Path, use: Callable[[str, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The block was never entered, so nothing leaves it.

    This holds for every step.
    """
    caplog.set_level(logging.CRITICAL)
    entered.clear()
    before = descriptors()
    for step in count(1, EVERY):
        where = interrupt(use, silent, tmp_path, step)
        nothing_is_left(where, before)
        if entered or where.endswith(WAITS):
            break
    assert step > 90, "it looked at nothing"


def running_consumer(url: str, _: Path) -> None:
    one = Consumer(url, Queue("orders"), lambda _: None, name="interrupted", stop_timeout=5)
    over = threading.Event()

    def stop_it() -> None:
        wait_until(lambda: one._subscription is not None or over.is_set(), timeout=20, what="a consumer that runs")
        one.stop()

    stopper = threading.Thread(target=stop_it)
    stopper.start()
    try:
        one.run()
    finally:
        over.set()
        stopper.join()


@pytest.mark.slow
@pytest.mark.parametrize("use", [consumer, running_consumer], ids=lambda use: use.__name__)
def test_an_interrupted_stop_leaves_no_thread_of_a_consumer(
    tmp_path: Path, use: Callable[[str, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """This holds for ``with`` and for `Consumer.run`."""
    caplog.set_level(logging.CRITICAL)
    interrupt_to_the_end(use, tmp_path, range(100, 10_000, EVERY))


@pytest.mark.slow
def test_an_interrupted_leaving_closes_a_publisher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A time limit interrupts the flush at the end of a block.

    The publisher gives up what is left, and disconnects.
    """
    caplog.set_level(logging.CRITICAL)
    interrupt_to_the_end(publisher, tmp_path, range(100, 10_000, EVERY))


@pytest.mark.slow
def test_close_raises_a_failure_an_interrupted_publish_missed() -> None:
    """The publish expires without a confirm after the interruption."""
    with ScriptedBroker() as broker, ExitStack() as leaving:
        publisher = leaving.enter_context(Publisher(broker.url))
        interrupting = threading.Thread(target=interrupt_when, args=(lambda: len(broker.published) == 1,))
        interrupting.start()
        with signal_raises(), pytest.raises(Interrupted):
            publisher.publish(Message(b""), routing_key="q", timeout=2)
        interrupting.join()
        with pytest.raises(PublishUnconfirmed):
            leaving.close()


def test_close_raises_a_failure_whose_submit_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message is in the inbox, and its caller has not begun to wait."""
    with ScriptedBroker() as broker, ExitStack() as leaving:
        broker.script = lambda published: published.channel.nack(published.number)
        publisher = leaving.enter_context(Publisher(broker.url, retry=RetryPolicy(max_attempts=1)))
        assert publisher._channel is not None

        def wake(_fn: object) -> bool:
            monkeypatch.undo()
            raise Interrupted

        monkeypatch.setattr(publisher._channel._io, "call_soon", wake)
        with pytest.raises(Interrupted):
            publisher.publish(Message(b""), routing_key="q")
        with pytest.raises(PublishNacked):
            leaving.close()


def test_a_failure_as_its_publish_is_interrupted_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception comes after the outcome is written.

    The I/O thread has not settled the publish yet.
    """
    noted = threading.Event()
    settle, not_reported = BasePublisherChannel._settle, BasePublisherChannel.not_reported

    def interrupt_and_settle(channel: BasePublisherChannel[Any]) -> None:
        if channel.session.settled:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert noted.wait(20)
        settle(channel)

    def note(channel: BasePublisherChannel[Any], confirmation: Any) -> None:
        not_reported(channel, confirmation)
        noted.set()

    monkeypatch.setattr(BasePublisherChannel, "_settle", interrupt_and_settle)
    monkeypatch.setattr(BasePublisherChannel, "not_reported", note)
    publisher = Publisher("amqp://guest:guest@127.0.0.1:1/")
    with signal_raises(), pytest.raises(Interrupted):
        publisher.publish(Message(b""), routing_key="q", timeout=0.5)
    with pytest.raises(PublishUnconfirmed):
        publisher.close(0)
