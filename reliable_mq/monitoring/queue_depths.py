"""The depths of queues as metrics, without an additional exporter.

A thread queries the broker with passive declares on a separate connection. A passive declare of a queue that does not
exist closes its channel, so it must not use a channel that publishes or consumes. Each queue costs one round trip per
interval, or three if it is empty and without consumers (`AdminChannel.counts`).

RabbitMQ also reports no messages and no consumers while the leader of a quorum queue does not respond. A gauge that
fell to 0 and rose again would look like new messages. So after other counts, such a count is believed only if several
measurements in a row find it.

Invariant: a gauge shows the last reply of the broker, and disappears when there is no reply, or one in doubt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self

from prometheus_client import CollectorRegistry

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import start_daemon
from reliable_mq._util.validation import Duration, seconds
from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.core.statistics import QueueDepthStatistics, QueueStatus
from reliable_mq.errors import ConfigurationError, ReliableMQError, UsageError
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import Reading, Registration, register
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.topology import DEAD_SUFFIX, Queue
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions

logger = get_logger(__name__)

_NAME: Final = "queue depths"
_BELIEVED_AFTER: Final = 4  # measurements in a row that are in doubt
_END: Final = 10.0  # seconds to wait for the end of the thread, which may wait for the broker


class QueueDepths:
    """The measured depths of queues, for a registry. A context manager.

    One process per virtual host is enough. Entering starts a thread and does not wait for the broker, so asyncio
    programs can also use this class. The thread reconnects by itself. An object can be entered only once.

    Args:
        url: The broker's URL or URLs, as for ``Publisher``.
        queues: The queues to measure. A `Queue` means the queue and its dead-letter queue; a name means one queue. The
            label ``role`` is ``dead_letters`` for dead-letter queues and names that end with ``.dead``, else ``queue``.
        registry: A ``prometheus_client.CollectorRegistry``.
        interval: The time between two measurements, in seconds or as a timedelta.
        credentials: The credentials, as for ``Publisher``.
        tls: The TLS options, as for ``Publisher``.
        heartbeat: The heartbeat interval in seconds.
        connect_timeout: The timeout of the handshakes with one host in seconds, as for ``Publisher``.

    Raises:
        ConfigurationError: If an argument is invalid. The message names it.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        queues: Iterable[Queue | str],
        *,
        registry: CollectorRegistry,
        interval: Duration = 15.0,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
        heartbeat: int | None = None,
        connect_timeout: Duration | None = None,
    ) -> None:
        self._settings = parse_url(
            url,
            tls=tls,
            credentials=credentials,
            heartbeat=heartbeat,
            connect_timeout=connect_timeout,
        )
        self._roles = _roles(queues)
        self._interval = seconds("interval", interval, positive=True)
        self._statistics = {name: QueueDepthStatistics() for name in self._roles}
        self._status: dict[str, QueueStatus] = {}
        self._doubts = dict.fromkeys(self._roles, _BELIEVED_AFTER)  # in a row; without an earlier count, 0 is believed
        self._complaints: dict[str, str] = {}
        self._outage = ""  # the last reason why no queue could be measured, until one is
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._registry = registry
        self._registration: Registration | None = None

    def __enter__(self) -> Self:
        """Begin to measure in the background.

        Raises:
            UsageError: If the object was entered before.
            ConfigurationError: If `registry` is not a registry.
        """
        if self._thread is not None:
            raise UsageError("these queue depths were entered before, and run once: make others")
        self._registration = register(self._registry, self._readings)
        try:
            self._thread = start_daemon(_NAME, self._run)
        except BaseException:  # for example, no thread can be started at the moment
            self._registration.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and wait at most ten seconds until the connection is closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END)
        if self._registration is not None:
            self._registration.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with AdminChannel(self._settings, name=_NAME) as channel:
                    while not self._stop.is_set():
                        self._measure(channel)
                        self._stop.wait(self._interval)
            except Exception as error:  # for example, no thread can be started at the moment
                if not isinstance(error, ReliableMQError):
                    logger.exception("failed to get the depths of the queues")
                elif self._outage != str(error):  # once for each reason
                    self._outage = str(error)
                    logger.warning("%s: %s; trying again in %g s", _NAME, error, self._interval)
                self._status = {}
                for statistics in self._statistics.values():
                    statistics.failures += 1
                self._stop.wait(self._interval)

    def _measure(self, channel: AdminChannel) -> None:
        """Measure each queue.

        Raises:
            BrokerUnavailable: If the connection is lost.
        """
        measured = {}
        for name, count in channel.counts(self._roles).items():
            if isinstance(count, StepRefused):
                self._statistics[name].failures += 1
                reason = str(count)
                if self._complaints.get(name) != reason:  # once for each reason
                    logger.warning("failed to get the depth of queue %r: %s", name, reason)
                self._complaints[name] = reason
            else:
                self._doubts[name] = self._doubts[name] + 1 if count.in_doubt else 0
                if not 0 < self._doubts[name] < _BELIEVED_AFTER:
                    measured[name] = QueueStatus(count.messages, count.consumers)
                self._complaints.pop(name, None)
        self._status, self._outage = measured, ""

    # -- a scrape ------------------------------------------------------------------------------------------------------

    def _readings(self) -> Iterator[Reading]:
        status = self._status
        for name, role in self._roles.items():
            yield from readings((name, role), status.get(name), self._statistics[name])


def _roles(queues: Iterable[Queue | str]) -> dict[str, str]:
    """Return the roles of the queues to measure, by queue name."""
    if isinstance(queues, str | Queue):
        raise ConfigurationError(f"queues must be several, such as [{queues!r}]")
    roles: dict[str, str] = {}
    for queue in queues:
        if isinstance(queue, Queue):
            roles.setdefault(queue.name, "queue")
            if queue.dead_letter_name is not None:
                roles[queue.dead_letter_name] = "dead_letters"
        elif isinstance(queue, str) and queue:
            roles.setdefault(queue, "dead_letters" if queue.endswith(DEAD_SUFFIX) else "queue")
        else:
            raise ConfigurationError(f"queues must be names and Queues, not {queue!r}")
    if not roles:
        raise ConfigurationError("queues must name at least one queue")
    return roles
