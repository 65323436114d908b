"""What an exception of a signal handler leaves behind that comes while something is entered or left. No broker.

Python runs signal handlers between any two steps of the main thread: here the exception comes at each of them in turn.
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

from reliable_mq import Consumer, Message, Publisher, PublishNacked, PublishUnconfirmed, Queue, RetryPolicy
from reliable_mq.engine.publisher_channel import BasePublisherChannel
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.sync.consumer import _open_consumers
from reliable_mq.sync.publisher import _open_publishers
from reliable_mq.testing.waiting import wait_until
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

# A socket whose making is interrupted is closed when it is collected, with a warning; so is nothing else.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*<socket.socket:pytest.PytestUnraisableExceptionWarning",
    "ignore:unclosed <socket.socket:ResourceWarning",
)

EVERY = 3  # steps
WAITS = ("_await_first_attempts", "wait_connected")  # for the whole of the time to connect

entered: list[str] = []  # the blocks that were reached


class Interrupted(Exception):
    """As Celery's soft time limit is one."""


class Interruption:
    """Raises at the n-th line that the sync API and its engine run on this thread."""

    def __init__(self, step: int) -> None:
        self.left = step
        self.where = ""

    def __call__(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        inside = any(part in frame.f_code.co_filename for part in ("reliable_mq/sync/", "reliable_mq/engine/"))
        # Between the last step of entering and the block, and before the first of leaving it, nobody could do anything.
        return self.line if inside and frame.f_code.co_name not in ("__enter__", "__exit__") else None

    def line(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.left -= 1
            # No signal handler runs at the beginning of a ``try``, which is not guarded, nor between the block of a
            # ``with`` and its exit, which is on the line of the ``with``: tracing sees both.
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
    """Send SIGUSR1 to the main thread once a condition holds."""
    wait_until(condition, timeout=20, what="what is waited for before the signal")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts and says nothing."""
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
    with Consumer(url, Queue("orders"), lambda _: None, name="interrupted"):
        entered.append(url)


def consumer_that_pulls(url: str, _: Path) -> None:
    with Consumer(url, Queue("orders"), name="interrupted"):
        entered.append(url)


def leftovers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("interrupted")]


def descriptors() -> list[str]:
    """What this process has open, by descriptor; but for the listing itself, which is closed again."""
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
    """Where it was interrupted; empty where it was over before."""
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
    """Interrupt at one step after the other, without a broker, until it is over before."""
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
    """Whatever step of it the exception comes at: nobody is there to leave what was never entered."""
    caplog.set_level(logging.CRITICAL)
    entered.clear()
    before = descriptors()
    for step in count(1, EVERY):
        where = interrupt(use, silent, tmp_path, step)
        nothing_is_left(where, before)
        if entered or where.endswith(WAITS):
            break
    assert step > 30 * EVERY, "it looked at nothing"


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
    """Of ``with``, and of `Consumer.run`."""
    caplog.set_level(logging.CRITICAL)
    interrupt_to_the_end(use, tmp_path, range(100, 10_000, EVERY))


@pytest.mark.slow
def test_an_interrupted_leaving_closes_a_publisher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A time limit that strikes in the flush at the end of a block gives up what is left, and disconnects."""
    caplog.set_level(logging.CRITICAL)
    interrupt_to_the_end(publisher, tmp_path, range(100, 10_000))


@pytest.mark.slow
def test_close_raises_a_failure_an_interrupted_publish_missed() -> None:
    """It waits for a confirm that does not come, and its time is over after the interruption."""
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
    """The message is in the inbox, and its caller does not come to waiting."""
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
    """The outcome is written when the exception comes, and the I/O thread has not settled it yet."""
    noted = threading.Event()
    settle, not_reported = BasePublisherChannel._settle, BasePublisherChannel.not_reported

    def interrupt_and_settle(channel: BasePublisherChannel[Any]) -> None:
        if channel.session.settled:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert noted.wait(20)
        settle(channel)

    def note(channel: BasePublisherChannel[Any], confirmations: Iterable[Any]) -> None:
        not_reported(channel, confirmations)
        noted.set()

    monkeypatch.setattr(BasePublisherChannel, "_settle", interrupt_and_settle)
    monkeypatch.setattr(BasePublisherChannel, "not_reported", note)
    publisher = Publisher("amqp://guest:guest@127.0.0.1:1/")
    with signal_raises(), pytest.raises(Interrupted):
        publisher.publish(Message(b""), routing_key="q", timeout=0.5)
    with pytest.raises(PublishUnconfirmed):
        publisher.close(0)
