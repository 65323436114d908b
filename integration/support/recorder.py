"""An `IOThread` whose client records its calls, so that a test can wait for them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from integration.support.asyncio_thread import AsyncioThread
from reliable_mq.codec import append_publish, encode_properties, publish_head
from reliable_mq.codec.reader import LARGEST_BODY
from reliable_mq.core.channel_setup import publisher_setup
from reliable_mq.core.reconnect import ReconnectPolicy
from reliable_mq.message import Message
from reliable_mq.sync.io_thread import IOThread
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.codec import RawDelivery
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.errors import ReliableMQError


class Event(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


class Recorder:
    """The client. It records each call as an event.

    A hook is called on the I/O thread, after the event with its name is recorded.
    """

    def __init__(self) -> None:
        self.largest_body = LARGEST_BODY
        self.events: list[Event] = []
        self.hooks: dict[str, Callable[..., None]] = {}
        self._changed = threading.Condition()

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        self._record("ready", generation, channel, frame_max, server)

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        self._record("lost", generation, loss)

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        self._record("failed", error, will_retry)

    def blocked(self, reason: str) -> None:
        self._record("blocked", reason)

    def unblocked(self) -> None:
        self._record("unblocked")

    def cancelled(self, consumer_tag: str) -> None:
        self._record("cancelled", consumer_tag)

    def read_finished(self) -> None:
        self._record("read_finished")

    def write_drained(self) -> None:
        self._record("write_drained")

    def acked(self, tag: int, multiple: bool) -> None:
        self._record("acked", tag, multiple)

    def nacked(self, tag: int, multiple: bool) -> None:
        self._record("nacked", tag, multiple)

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        self._record("returned", code, text, exchange, routing_key, properties, body)

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self._record("delivered", deliveries)

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        self._record("got", delivery, message_count)

    def got_empty(self) -> None:
        self._record("got_empty")

    def all(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of all events with this name so far."""
        return [event.arguments for event in list(self.events) if event.name == name]

    def names(self, *but: str) -> list[str]:
        """Return the names of all events so far, in order, except those in `but`."""
        return [event.name for event in list(self.events) if event.name not in but]

    def wait_for(self, name: str, count: int = 1, *, timeout: float = 15) -> tuple[Any, ...]:
        """Wait for the `count`-th event with this name, and return its arguments.

        Raises:
            TimeoutError: If it does not arrive in time. The message has the last 50 events.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.all(name)) >= count, timeout):
                raise TimeoutError(f"{name} came {len(self.all(name))} times, not {count}: {self.names()[-50:]}")
        return self.all(name)[count - 1]

    def _record(self, name: str, *arguments: object) -> None:
        with self._changed:
            self.events.append(Event(name, arguments))
            self._changed.notify_all()
        hook = self.hooks.get(name)
        if hook is not None:
            hook(*arguments)


class Recorded:
    """An I/O thread and its recorder. A context manager.

    On entry it starts the thread. At the end of the block it closes the thread within 10 s.

    Attributes:
        kind: `IOThread`, or `AsyncioThread` for the asyncio API.
    """

    kind: type[IOThread | AsyncioThread] = IOThread

    def __init__(
        self,
        url: str | Sequence[str],
        setup: Callable[[ServerInfo], SetupGenerator] | None = None,
        *,
        name: str = "recorded",
        wait: Any = None,
        stop: Any = None,
        **options: Any,
    ) -> None:
        settings = parse_url(url, **options)
        self.client = Recorder()
        self.io = self.kind(
            name=name,
            settings=settings,
            setup=setup or (lambda server: publisher_setup([], server.version_tuple)),
            client=self.client,
            reconnect_policy=ReconnectPolicy(hosts=len(settings.endpoints), wait=wait, stop=stop),
        )

    def __enter__(self) -> Self:
        self.io.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.io.close(10), "the I/O thread did not end"

    def call(self, fn: Callable[[], Any], timeout: float = 10) -> Any:
        """Run `fn` on the I/O thread and return its result."""
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            result.append(fn())
            done.set()

        assert self.io.call_soon(run), "the I/O thread has ended"
        assert done.wait(timeout), "the I/O thread did not answer"
        return result[0]

    def run_steps(self, generator: StepGenerator, timeout: float = 15) -> Any:
        """Call `IOThread.run` from this thread; return the argument of `done`."""
        done = threading.Event()
        outcome: list[Any] = []

        def finish(result: Any) -> None:
            outcome.append(result)
            done.set()

        self.call(lambda: self.io.run(generator, finish))
        assert done.wait(timeout), "the steps did not end"
        return outcome[0]

    def publish(self, routing_key: str, body: bytes = b"x", *, exchange: str = "", mandatory: bool = True) -> None:
        """Write one publish, with the channel and the frame size of the last ``ready``."""
        data = self.encoded(routing_key, body, exchange=exchange, mandatory=mandatory)
        self.call(lambda: self.io.write(data))

    def encoded(self, routing_key: str, body: bytes, *, exchange: str = "", mandatory: bool = True) -> bytes:
        """Return the frames of one publish."""
        _, channel, frame_max, _ = self.client.all("ready")[-1]
        out: list[bytes] = []
        head = publish_head(channel, exchange, routing_key, mandatory)
        message = Message(body)
        append_publish(out, head, channel, encode_properties(message), message.body, frame_max)
        return b"".join(out)
