"""The relay into a stage: it consumes a queue and publishes into a stream.

`StageRelay` starts it, waits for it and closes it, on any thread. `reliable_mq.stage.client` has its connection, on a
thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from reliable_mq.core.stage.options import StageOptions
from reliable_mq.core.stage.session import StageSession
from reliable_mq.core.statistics import StageStatistics, StageStatus
from reliable_mq.errors import BrokerUnavailable, ReliableMQError
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import Reading, register
from reliable_mq.settings import ConnectionSettings
from reliable_mq.stage.client import RelayClient, RelayState
from reliable_mq.url import parse_url

__all__ = ["StageRelay"]


class StageRelay:
    """Move a queue into a stage, on a thread of its own. Thread-safe.

    Construction does not connect; `start` does, in the background. It reconnects by itself, and runs once. A second
    relay of the same stage waits, and takes over when the first is gone.

    Args:
        options: what to move where.
        registry: where to register Prometheus metrics; None for none.
        settings: how to connect; None for what the URL of the options says.

    Attributes:
        statistics: counts.
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
        """Why the relay has ended by itself; None if it has not."""
        with self._client.changed:
            return self._client.error

    @property
    def active(self) -> bool:
        """Whether it moves messages; False while it waits for another relay or the broker."""
        return self._is_active()

    def wait_declared(self, timeout: float) -> None:
        """Wait until the stage is declared.

        Raises:
            ReliableMQError: it could not be, within ``timeout`` seconds or at all.
        """
        client = self._client
        if not self._wait_for(lambda: client.declared_at is not None, timeout):
            raise client.last_error or BrokerUnavailable(
                f"stage {self._options.stage!r} was not declared within {timeout:g} s"
            )

    def wait_active(self, timeout: float) -> bool:
        """Wait until it moves messages; return whether it does.

        Raises:
            ReliableMQError: it has ended by itself.
        """
        return self._wait_for(self._is_active, timeout)

    def wait_moved(self, timeout: float) -> bool:
        """Wait until the messages that were ready when it became active are moved.

        Other consumers may have taken some: so the wait ends, too, once the queue was found empty twice.

        Args:
            timeout: seconds.

        Returns:
            Whether they are moved.

        Raises:
            ReliableMQError: it has ended by itself.
        """
        client = self._client
        return self._wait_for(lambda: self._is_active() and client.counts.has_moved(client.moved), timeout)

    def _is_active(self) -> bool:
        return self._client.state is RelayState.ACTIVE

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        client = self._client
        with client.changed:
            client.changed.wait_for(lambda: client.error is not None or condition(), timeout)
            if client.error is not None:
                raise client.error
            return condition()

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until it has ended by itself, or was closed; return whether it has."""
        return self._client.wait_ended(timeout)

    def close(self, timeout: float) -> None:
        """Read no more, wait for outstanding confirms, ack, and disconnect.

        Blocks for ``timeout`` seconds and a few at most. What is not confirmed by then stays in the queue.
        """
        self._client.end(timeout)
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()

    def status(self) -> StageStatus:
        """Return the present state."""
        session = self._session
        return StageStatus(int(self._is_active()), session.outstanding, session.held, self._client.counts.ready)

    def _readings(self) -> Iterator[Reading]:
        return readings((self._options.queue, self._options.stage), self.status(), self.statistics)

    def __repr__(self) -> str:
        return repr(self._client)
