"""The relay into a stage: it consumes a queue and publishes into a stream.

Any thread can start, watch and close a `StageRelay`. `reliable_mq.stage.client` runs its connection on a separate
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry

from reliable_mq.core.stage.options import StageOptions
from reliable_mq.core.stage.session import StageSession
from reliable_mq.core.statistics import StageStatistics, StageStatus
from reliable_mq.errors import BrokerUnavailable, ReliableMQError, UsageError
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import Reading, register
from reliable_mq.settings import ConnectionSettings
from reliable_mq.stage.client import RelayClient, RelayState
from reliable_mq.url import parse_url

_LONG_TAIL: Final = 64_000  # messages


class StageRelay:
    """A relay that moves a queue into a stage on a separate thread. Thread-safe.

    The constructor does not connect; `start` connects in the background. The relay reconnects automatically, and runs
    once. A second relay of the same stage waits, and takes over when the first is gone. Every wait ends when the relay
    is closed.

    Args:
        options: The options of the relay, including the queue and the stage.
        registry: The registry for Prometheus metrics. None registers none.
        settings: The connection settings. None takes them from the URL of the options.

    Attributes:
        statistics: The counts of the relay.
    """

    def __init__(
        self,
        options: StageOptions,
        *,
        registry: CollectorRegistry | None = None,
        settings: ConnectionSettings | None = None,
    ) -> None:
        self._options = options
        self._session = StageSession(options)
        self.statistics: StageStatistics = self._session.statistics
        self._client = RelayClient(options, self._session, parse_url(options.url) if settings is None else settings)
        self._registration = None if registry is None else register(registry, self._readings)

    def start(self) -> None:
        """Connect and begin to move messages, in the background."""
        self._client.begin()

    @property
    def error(self) -> ReliableMQError | None:
        """The error that ended the relay, or None."""
        with self._client.changed:
            return self._client.error

    @property
    def active(self) -> bool:
        """Whether the relay moves messages, rather than waits for a relay or the broker."""
        return self._client.state is RelayState.ACTIVE

    @property
    def tail_messages(self) -> int:
        """The number of entries read from the end of the stage, since the relay began."""
        return self._session.tail_messages

    def wait_declared(self, timeout: float) -> None:
        """Wait until the stage is declared.

        Raises:
            ReliableMQError: If the stage is not declared within ``timeout`` seconds, or cannot be.
            UsageError: If the relay was closed before.
        """
        client = self._client
        if not self._wait_for(lambda: client.declared_at is not None, timeout):
            if client.state is RelayState.ENDED:
                raise UsageError(f"{self!r} was closed before its stage was declared")
            raise client.last_error or BrokerUnavailable(
                f"stage {self._options.stage!r} was not declared within {timeout:g} s"
            )

    def wait_active(self, timeout: float) -> bool:
        """Wait until the relay moves messages. Return whether it does.

        Raises:
            ReliableMQError: If an error has ended the relay.
        """
        return self._wait_for(lambda: self.active, timeout)

    def wait_moved(self, timeout: float) -> bool:
        """Wait until the messages that were ready at activation are moved.

        Other consumers may have taken some of them, so the wait also ends once the queue was found empty twice, and a
        new subscription shows that nothing is on its way. It does not end while a consumer that came later is there and
        may have one.

        Args:
            timeout: The maximum time to wait, in seconds.

        Returns:
            Whether they are moved.

        Raises:
            ReliableMQError: If an error has ended the relay.
        """
        client = self._client
        return self._wait_for(lambda: self.active and client.counts.has_moved(client.moved), timeout)

    def wait_settled(self, timeout: float) -> None:
        """Wait until the next relay has little to read from the end of the stage.

        That needs some seconds without messages. The wait ends once another message is moved.

        Raises:
            ReliableMQError: If an error has ended the relay.
        """
        client, moved, most = self._client, self._client.moved, _LONG_TAIL // self._options.messages_per_entry
        self._wait_for(lambda: not self.active or client.unsettled <= most or client.moved != moved, timeout)

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        client = self._client
        with client.changed:
            client.changed.wait_for(
                lambda: client.error is not None or client.state is RelayState.ENDED or condition(), timeout
            )
            if client.error is not None:
                raise client.error
            return condition()

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the relay has ended or was closed. Return whether it has."""
        return self._client.wait_ended(timeout)

    def close(self, timeout: float) -> None:
        """Stop reading, wait for outstanding confirms, ack, and disconnect.

        Blocks at most a few seconds longer than ``timeout`` seconds. Messages that are not confirmed by then stay in
        the queue.
        """
        self._client.end(timeout)
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()

    def status(self) -> StageStatus:
        """Return the current status."""
        session = self._session
        return StageStatus(int(self.active), session.outstanding, session.held, self._client.counts.ready)

    def _readings(self) -> Iterator[Reading]:
        return readings((self._options.queue, self._options.stage), self.status(), self.statistics)

    def __repr__(self) -> str:
        return repr(self._client)
