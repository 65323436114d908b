"""A connection for a few steps: declare, check, delete.

The steps are performed one by one while the caller waits. Each host is tried once, because a person waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self, overload

from tenacity import RetryCallState
from tenacity.stop import stop_base

from reliable_mq._util.threads import Condition
from reliable_mq.codec.methods import CheckQueue, MethodReply, QueueState, Step
from reliable_mq.connection.channel import data_arrives
from reliable_mq.connection.interfaces import ConnectionListener
from reliable_mq.core.channel_setup import Pipeline, ServerInfo, StepGenerator, StepRefused, refusal
from reliable_mq.core.reconnect import ConnectionLoss, ReconnectPolicy
from reliable_mq.errors import BrokerUnavailable, ReliableMQError, UsageError
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.io_thread import IOThread

_GRACE = 5.0  # seconds for a closing handshake, and beyond the driver's own deadlines
_COUNTS = 3  # times that a queue is counted before a count in doubt is believed
_COUNT_AGAIN = 0.3  # seconds before a queue is counted again


class AdminChannel(ConnectionListener):
    """A channel for administrative steps. Entering the context manager connects.

    Only one thread at a time may use it.

    Args:
        settings: The hosts, credentials, TLS options and tuning parameters.
        name: The name of the connection.
        patience: Seconds for which a lost connection is retried.

    Attributes:
        server: The broker's server properties. Set once entered.
        frame_max: The negotiated maximum size of a frame, in bytes. Set once entered.
    """

    server: ServerInfo
    frame_max: int

    def __init__(self, settings: ConnectionSettings, *, name: str, patience: float = 0.0) -> None:
        self._changed = Condition()
        self._lock = self._changed.lock
        self._ready = False
        self._error: ReliableMQError | None = None
        self._timeout = settings.first_attempts_timeout + _GRACE
        self._stop = _Stop(patience)
        self._io = IOThread(
            name=name,
            settings=settings,
            setup=_no_steps,
            client=self,
            reconnect_policy=ReconnectPolicy(hosts=len(settings.endpoints), stop=self._stop, quiet=True),
        )

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            BrokerUnavailable: If no host can be reached, or none accepts the credentials.
        """
        self._io.start()
        try:
            self._wait_ready()
        except BaseException:
            self._io.close(0)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._io.close(_GRACE)

    @overload
    def perform(self, step: Step) -> MethodReply: ...

    @overload
    def perform(self, step: Pipeline) -> tuple[MethodReply, ...]: ...

    def perform(self, step: Step | Pipeline) -> MethodReply | tuple[MethodReply, ...]:
        """Perform a step or a pipeline, and return the reply. Blocks for a round trip.

        Raises:
            StepRefused: If the broker closes the channel because of the step. The next step gets a new channel.
            BrokerUnavailable: If the connection is lost.
            UsageError: If called outside of the ``with`` block.
        """
        reply: MethodReply | tuple[MethodReply, ...] = self._run(_one(step), type(step).__name__)
        return reply

    def carry_out(self, step: Step) -> MethodReply:
        """Perform a step like `perform`, but raise a `ReliableMQError` if it is refused."""
        try:
            return self.perform(step)
        except StepRefused as refused:
            raise refusal(step, refused) from refused

    def counts(self, queues: Iterable[str]) -> dict[str, QueueState | StepRefused]:
        """Return the numbers of each queue, or the refusal of the broker.

        Blocks for a round trip for each queue. Those whose numbers are in doubt (`QueueState.in_doubt`) are counted
        twice more, which takes 0.6 s for all of them together, because a leader may respond again. After that the
        numbers are believed, since those of an empty queue without consumers are the same.

        Raises:
            BrokerUnavailable: If the connection is lost.
        """
        found: dict[str, QueueState | StepRefused] = {}
        doubtful = list(queues)
        for attempt in range(_COUNTS):
            if attempt and doubtful:
                time.sleep(_COUNT_AGAIN)
            for queue in doubtful:
                found[queue] = self._count(queue)
            doubtful = [name for name, count in found.items() if isinstance(count, QueueState) and count.in_doubt]
        return found

    def _count(self, queue: str) -> QueueState | StepRefused:
        step = CheckQueue(queue)
        try:
            state = self.perform(step)
        except StepRefused as refused:
            return refused
        if not isinstance(state, QueueState):
            raise TypeError(f"the reply to {step} is {state!r}")
        return state

    def _run(self, steps: StepGenerator, name: str) -> Any:
        """Perform steps, all on one channel, and return the result of the generator."""
        self._wait_ready()
        outcome: list[Any] = []
        self._io.call_soon(lambda: self._io.run(steps, partial(self._performed, outcome)))
        with self._lock:
            self._wait_for_reply(name, lambda: outcome, self._timeout)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _wait_for_reply(self, method: str, replied: Callable[[], object], timeout: float) -> None:
        """Wait for the replies of the broker, while the lock is held.

        Raises:
            BrokerUnavailable: If nothing arrived for ``timeout`` seconds.
        """
        before = self._io.bytes_received
        while not self._changed.wait_for(replied, timeout):
            received = self._io.bytes_received
            if not data_arrives(before, received):
                raise BrokerUnavailable(f"the broker did not answer {method} within {timeout:g} s")
            before = received

    def _wait_ready(self) -> None:
        if not self._io.running and self._error is None:
            raise UsageError("not connected: use it inside its `with` block")
        with self._lock:
            timeout = self._timeout + self._stop.patience
            if not self._changed.wait_for(lambda: self._ready or self._error is not None, timeout):
                raise BrokerUnavailable(f"no answer within {timeout:g} s")
            if not self._ready and self._error is not None:
                raise self._error

    # On the I/O thread

    def _performed(self, outcome: list[Any], result: object) -> None:
        with self._lock:
            gone = isinstance(result, StepRefused | BrokerUnavailable)  # the channel; ``lost`` may follow
            self._ready = self._ready and not gone
            outcome.append(result)
            self._changed.notify_all()

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        with self._lock:
            self.server, self.frame_max, self._ready, self._stop.was_ready = server, frame_max, True, True
            self._changed.notify_all()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        with self._lock:
            self._ready = False

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        with self._lock:
            self._error = None if will_retry else error
            self._changed.notify_all()


class _Stop(stop_base):
    """A stop after one attempt or, once a connection is lost, after the patience."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.was_ready = False

    def __call__(self, retry_state: RetryCallState) -> bool:
        return not self.was_ready or (retry_state.seconds_since_start or 0.0) >= self.patience


def _no_steps(_server: ServerInfo) -> Generator[Step, Any, None]:
    yield from ()


def _one(step: Step | Pipeline) -> StepGenerator:
    return (yield step)
