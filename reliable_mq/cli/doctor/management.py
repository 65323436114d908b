"""A virtual host, as the management API describes it."""

from __future__ import annotations

import http
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

from reliable_mq.monitoring.management import ManagementError, rows
from reliable_mq.topology.arguments import ARGUMENTS

if TYPE_CHECKING:
    from reliable_mq.monitoring.management import ManagementAPI

_KINDS: Final[Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    "queues": {
        "type": str,
        "messages": (int, float),
        "messages_details": dict,
        "members": list,
        "online": list,
        "arguments": dict,
        "effective_policy_definition": dict,
    },
    "exchanges": {"type": str, "arguments": dict},
    "bindings": {"source": str, "destination": str, "destination_type": str, "routing_key": str},
    "consumers": {"queue": dict},
    "nodes": {},
}
"""The types of the fields that are read, by what they are of."""

_ARGUMENT_KINDS: Final[Mapping[str, type]] = {
    "message-ttl": int,
    "expires": int,
    "dead-letter-exchange": str,
    "dead-letter-routing-key": str,
}

_LOWER: Final = frozenset({"message-ttl", "expires", "max-length", "max-length-bytes"})
"""Of these, the lower of an argument and a policy is in effect; of others, the argument."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue with the arguments in effect: its own and those of its policies."""

    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.raw["name"])

    @property
    def type(self) -> str:
        return str(self.raw.get("type", "classic"))

    @property
    def node(self) -> str:
        """The node of the queue, or of its leader. Empty if there is none."""
        return str(self.raw.get("leader") or self.raw.get("node") or "")

    @property
    def members(self) -> frozenset[str]:
        """The nodes that have a copy of a quorum queue or a stream."""
        return frozenset(map(str, self.raw.get("members") or ()))

    @property
    def online(self) -> frozenset[str]:
        return frozenset(map(str, self.raw.get("online") or ()))

    @property
    def messages(self) -> int:
        return int(self.raw.get("messages") or 0)

    @property
    def growth(self) -> float:
        """The growth in messages per second, according to the broker's statistics."""
        return float((self.raw.get("messages_details") or {}).get("rate") or 0.0)

    def argument(self, name: str) -> Any:
        """Return the effective value of an argument, or None. ``name`` lacks the ``x-``."""
        own, policy = (self.raw.get("arguments") or {}).get(f"x-{name}"), self._policy.get(name)
        if own is None or policy is None:
            return policy if own is None else own
        if name in _LOWER and isinstance(own, int) and isinstance(policy, int):
            return min(own, policy)
        return policy if name == "overflow" and self.type == "quorum" else own

    def is_overridden(self, name: str) -> bool:
        """Return whether the argument is set, but a policy's value is in effect."""
        own = (self.raw.get("arguments") or {}).get(f"x-{name}")
        return own is not None and bool(self.argument(name) != own)

    def delivery_limit(self, version: tuple[int, ...]) -> int | None:
        """Return the delivery limit in effect, or None for no limit.

        A message that is returned more often is dead-lettered or dropped.
        """
        own, policy = (self.raw.get("arguments") or {}).get("x-delivery-limit"), self._policy.get("delivery-limit")
        given = [limit for limit in (own, policy) if isinstance(limit, int)]
        if not given:
            default: int | None = ARGUMENTS["x-delivery-limit"].default_on(version)
            return default
        # RabbitMQ applies the stricter of two limits, and prefers any limit to none.
        limit = min(given) if min(given) >= 0 else max(given)
        return limit if limit >= 0 else None

    @property
    def _policy(self) -> Mapping[str, Any]:
        return self.raw.get("effective_policy_definition") or {}


@dataclass(frozen=True, slots=True)
class Route:
    """The route of dead letters.

    Attributes:
        targets: The target queues, as far as they are known.
        flaw: The reason why dead letters may reach no queue. Empty if they do.
        certain: Whether they certainly reach none. Then they are dropped, or wait if they are dead-lettered at least
            once.
    """

    targets: frozenset[str] = frozenset()
    flaw: str = ""
    certain: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The content of a virtual host, for the checks.

    `nodes` are the nodes of the cluster, or None if this user may not read them. `consumers` is None if the statistics
    of the API are disabled; then queues have no number of messages either.
    """

    queues: Mapping[str, QueueView]
    exchanges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bindings: Sequence[Mapping[str, Any]] = ()
    consumers: Sequence[Mapping[str, Any]] | None = ()
    nodes: tuple[Mapping[str, Any], ...] | None = ()

    @classmethod
    def take(cls, api: ManagementAPI, virtual_host: str) -> Self:
        """Read a virtual host.

        Raises:
            ManagementError: If the API does not respond, or refuses this user.
        """
        queues = {row["name"]: _view(api, row) for row in _rows(api, "queues", virtual_host, named=True)}
        return cls(
            queues=queues,
            exchanges={row["name"]: row for row in _rows(api, "exchanges", virtual_host, named=True)},
            bindings=_rows(api, "bindings", virtual_host),
            consumers=_consumers(api, virtual_host, queues.values()),
            nodes=_nodes(api),
        )

    def consumers_of(self, queue: QueueView) -> list[Mapping[str, Any]]:
        return self._consumers_by_queue.get(queue.name, [])

    @cached_property
    def _consumers_by_queue(self) -> dict[str, list[Mapping[str, Any]]]:
        return _grouped(((each.get("queue") or {}).get("name"), each) for each in self.consumers or ())

    @cached_property
    def _bindings_by_exchange(self) -> dict[str, list[Mapping[str, Any]]]:
        return _grouped((each.get("source"), each) for each in self.bindings)

    @cached_property
    def _bindings_by_queue(self) -> dict[str, list[Mapping[str, Any]]]:
        to_queues = (each for each in self.bindings if each.get("destination_type") == "queue")
        return _grouped((each.get("destination"), each) for each in to_queues)

    def dead_letter_route(self, queue: QueueView) -> Route | None:
        """Return the route of a queue's dead letters, or None if it has no such exchange."""
        exchange, key = queue.argument("dead-letter-exchange"), queue.argument("dead-letter-routing-key")
        if exchange is None:
            return None
        if exchange == "":
            return self._by_default_exchange(key)
        found = self.exchanges.get(exchange)
        if found is None:
            return Route(flaw=f"the dead-letter exchange {exchange!r} does not exist", certain=True)
        if (found.get("arguments") or {}).get("alternate-exchange") or found.get("policy"):
            return Route()  # the alternate exchange or policy routes messages that match no binding
        bound = self._bindings_by_exchange.get(exchange)
        if not bound:
            return Route(flaw=f"nothing is bound to the dead-letter exchange {exchange!r}", certain=True)
        keys = self._keys_of(queue) if key is None else {key}
        matching = [each for each in bound if keys is None or _matches_any(str(found.get("type")), each, keys)]
        if not matching and key is None:
            flaw = (
                f"dead letters keep their routing keys, and no binding of the dead-letter exchange {exchange!r} "
                f"matches the keys that lead to this queue ({', '.join(map(repr, sorted(keys or ())))})"
            )
            return Route(flaw=flaw)
        if not matching:
            flaw = f"no binding of the dead-letter exchange {exchange!r} matches the dead-letter routing key {key!r}"
            return Route(flaw=flaw, certain=True)
        return Route(
            frozenset(each.get("destination", "") for each in matching if each.get("destination_type") == "queue")
        )

    def _keys_of(self, queue: QueueView) -> set[str] | None:
        """Return the routing keys that lead to a queue, or None if others may, too."""
        bindings = [each for each in self._bindings_by_queue.get(queue.name, ()) if each.get("source")]
        if any(self.exchanges.get(each["source"], {}).get("type") != "direct" for each in bindings):
            return None
        return {queue.name, *(str(each.get("routing_key", "")) for each in bindings)}

    def _by_default_exchange(self, key: str | None) -> Route:
        if key is None:
            flaw = (
                "dead letters keep their routing keys, and the default exchange routes them to queues with these "
                "names: often to this queue itself, which drops them in such a cycle"
            )
            return Route(flaw=flaw)
        if key not in self.queues:
            return Route(flaw=f"the dead-letter queue {key!r} does not exist", certain=True)
        return Route(frozenset({key}))


def _grouped(rows: Iterable[tuple[object, Mapping[str, Any]]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in rows:
        if isinstance(name, str):
            groups.setdefault(name, []).append(row)
    return groups


def _rows(api: ManagementAPI, what: str, *segments: str, named: bool = False) -> list[dict[str, Any]]:
    """Return rows whose fields have RabbitMQ's types, or are missing or empty."""
    found = rows(api, what, *segments, named=named)
    for row in found:
        for name, kind in _KINDS[what].items():
            value = row.get(name)
            if value and not isinstance(value, kind):
                raise _another_shape(api, what, name, value)
    return found


def _view(api: ManagementAPI, row: Mapping[str, Any]) -> QueueView:
    view = QueueView(row)
    for name, kind in _ARGUMENT_KINDS.items():
        value = view.argument(name)
        if value is not None and not isinstance(value, kind):
            raise _another_shape(api, "queues", name, value)
    return view


def _another_shape(api: ManagementAPI, what: str, name: str, value: object) -> ManagementError:
    return ManagementError(f"{api}: this is not RabbitMQ's API: {name} of {what} is a {type(value).__name__}")


def _consumers(api: ManagementAPI, virtual_host: str, queues: Iterable[QueueView]) -> list[dict[str, Any]] | None:
    try:
        return _rows(api, "consumers", virtual_host)
    except ManagementError as error:
        # Without statistics, RabbitMQ 4.0 reports no policies, and a queue cannot be judged by its arguments alone.
        has_policies = all("effective_policy_definition" in queue.raw for queue in queues)
        if error.status != http.HTTPStatus.BAD_REQUEST or not has_policies:
            raise
        return None


def _nodes(api: ManagementAPI) -> tuple[Mapping[str, Any], ...] | None:
    try:
        return tuple(_rows(api, "nodes", named=True))
    except ManagementError as error:
        if error.status not in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}:
            raise
        return None


def _matches_any(exchange_type: str, binding: Mapping[str, Any], keys: Iterable[str]) -> bool:
    pattern = str(binding.get("routing_key", ""))
    match exchange_type:
        case "direct":
            return pattern in keys
        case "topic":
            return any(_topic_matches(_words(pattern), _words(key)) for key in keys)
        case _:
            return True


def _words(key: str) -> list[str]:
    """Split a key of a topic exchange. As in RabbitMQ, an empty key has no word."""
    return key.split(".") if key else []


def _topic_matches(pattern: list[str], words: list[str]) -> bool:
    taken = {0}  # the possible numbers of words that the pattern read so far matches
    for part in pattern:
        if part == "#":
            taken = set(range(min(taken), len(words) + 1))
        else:
            taken = {count + 1 for count in taken if count < len(words) and part in ("*", words[count])}
        if not taken:
            return False
    return len(words) in taken
