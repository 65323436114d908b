"""The streams that a query reads, the partitions of super streams among them.

A super stream is an exchange; its partitions are bound to it, in the order of ``x-stream-partition-order``. AMQP lists
no bindings: with the management API they are read, and without it partitions are those that are called ``name-0``,
``name-1`` and so on.

Invariants: a stream that was found stays in its place; where a later look fails, what was found before is kept.
"""

from __future__ import annotations

import http
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.monitoring.management import ManagementAPI, ManagementError
from reliable_mq.spark.stream_broker import exists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliable_mq.settings import ConnectionSettings
    from reliable_mq.spark.stream_broker import StreamChannel

__all__ = ["PartitionFinder", "bound_partitions"]

logger = logging.getLogger(__name__)

_LOOK_AGAIN: Final = 30.0  # seconds
_MOST: Final = 1000
_LAST: Final = 2**63


class PartitionFinder:
    """Finds streams, and looks again for new partitions.

    Args:
        settings: of the connection.
        names: of streams and super streams.
        management_url: of the management API; None to find partitions by their names.
    """

    def __init__(self, settings: ConnectionSettings, names: Sequence[str], management_url: str | None) -> None:
        self._settings = settings
        self._names = names
        self._management_url = management_url
        self._found: dict[str, list[str]] = {}  # by name; a stream is its own
        self._looked_at = float("-inf")

    def streams(self, channel: StreamChannel) -> list[str]:
        """Return the streams in order, each once.

        Raises:
            ConfigurationError: a name is neither a stream nor a super stream.
            BrokerUnavailable: the broker, or its management API, does not answer, and nothing is known yet.
        """
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_AGAIN:
            for name in self._names:
                if self._found.get(name) != [name]:
                    self._look(channel, name)
            self._looked_at = now
        return list(dict.fromkeys(stream for name in self._names for stream in self._found[name]))

    def _look(self, channel: StreamChannel, name: str) -> None:
        known = self._found.get(name, [])
        if not known and exists(channel, name):
            self._found[name] = [name]
            return
        try:
            found = (
                _numbered(channel, name, known)
                if self._management_url is None
                else self._bound(self._management_url, name)
            )
        except BrokerUnavailable as error:
            if not known or self._management_url is None:
                raise
            logger.warning("the partitions of super stream %r are not looked up for now: %s", name, error)
            return
        for stream in found:
            if known and stream not in known:
                logger.info("super stream %r has a new partition %r: it is read from its first message", name, stream)
        self._found[name] = found

    def _bound(self, management_url: str, name: str) -> list[str]:
        api = ManagementAPI.at(management_url, self._settings)  # each time: a token may have expired
        try:
            bindings = api.get("exchanges", self._settings.virtual_host, name, "bindings", "source")
        except ManagementError as error:
            refused = error.status in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}
            raise BrokerUnavailable(f"the bindings of {name!r} cannot be read: {error}", permanent=refused) from error
        found = bound_partitions(bindings)
        if not found:
            raise ConfigurationError(
                f"there is no stream {name!r}, and no super stream: no queue is bound to an exchange of that name"
            )
        return found


def bound_partitions(bindings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the queues of bindings in their order; those without one are last."""
    order: dict[str, int] = {}
    for binding in bindings:
        if binding.get("destination_type") == "queue":
            place = binding.get("arguments", {}).get("x-stream-partition-order")
            number = place if isinstance(place, int) else int(place) if str(place).isdecimal() else _LAST
            queue = str(binding["destination"])
            order[queue] = min(number, order.get(queue, _LAST))
    return sorted(order, key=lambda queue: (order[queue], queue))


def _numbered(channel: StreamChannel, name: str, known: Sequence[str]) -> list[str]:
    found = list(known)
    while len(found) < _MOST and exists(channel, f"{name}-{len(found)}"):
        found.append(f"{name}-{len(found)}")
    if not found:
        raise ConfigurationError(
            f"there is no stream {name!r}, and no super stream with a partition '{name}-0': create it, or, where the "
            "partitions of a super stream have other names, give managementUrl, or these, separated by commas"
        )
    return found
