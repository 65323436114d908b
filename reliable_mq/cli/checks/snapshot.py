"""A virtual host as the management API shows it, and the questions that the checks of queues ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from reliable_mq.cli.checks.management import ManagementAPI

__all__ = ["QueueView", "Route", "Snapshot"]


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue with the arguments that are in effect: its own, and those of its policies."""

    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.raw["name"])

    @property
    def type(self) -> str:
        return str(self.raw.get("type", "classic"))

    @property
    def messages(self) -> int:
        return int(self.raw.get("messages") or 0)

    @property
    def growth(self) -> float:
        """Messages per second by which it grows, by the broker's statistics."""
        return float((self.raw.get("messages_details") or {}).get("rate") or 0.0)

    def argument(self, name: str) -> Any:
        """The value in effect of an argument, named without its ``x-``; None where there is none."""
        return (self.raw.get("arguments") or {}).get(f"x-{name}", self._policy.get(name))

    def delivery_limit(self, version: tuple[int, ...]) -> int | None:
        """After how many returns a message is dead-lettered or dropped; None for never."""
        own, policy = (self.raw.get("arguments") or {}).get("x-delivery-limit"), self._policy.get("delivery-limit")
        given = [limit for limit in (own, policy) if isinstance(limit, int)]
        if not given:
            return 20 if version >= (4,) else None
        # RabbitMQ takes the stricter of two limits, and any limit before none.
        limit = min(given) if min(given) >= 0 else max(given)
        return limit if limit >= 0 else None

    @property
    def _policy(self) -> Mapping[str, Any]:
        return self.raw.get("effective_policy_definition") or {}


@dataclass(frozen=True, slots=True)
class Route:
    """Where dead letters go.

    Attributes:
        targets: the queues, as far as they can be told.
        flaw: why they may go nowhere; empty where they do not.
        certain: whether they certainly go nowhere.
    """

    targets: frozenset[str] = frozenset()
    flaw: str = ""
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything in a virtual host that the checks look at.

    Attributes:
        queues: by name.
        exchanges: by name.
        bindings: all of them.
        consumers: all of them.
    """

    queues: Mapping[str, QueueView]
    exchanges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bindings: Sequence[Mapping[str, Any]] = ()
    consumers: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def take(cls, api: ManagementAPI, virtual_host: str) -> Self:
        """Read a virtual host.

        Raises:
            ManagementError: the API does not answer, or does not let this user see it.
        """
        return cls(
            queues={queue["name"]: QueueView(queue) for queue in api.get("queues", virtual_host)},
            exchanges={exchange["name"]: exchange for exchange in api.get("exchanges", virtual_host)},
            bindings=api.get("bindings", virtual_host),
            consumers=api.get("consumers", virtual_host),
        )

    def consumers_of(self, queue: QueueView) -> list[Mapping[str, Any]]:
        """The consumers of a queue."""
        return [each for each in self.consumers if (each.get("queue") or {}).get("name") == queue.name]

    def dead_letter_route(self, queue: QueueView) -> Route | None:
        """Where the dead letters of a queue go; None where it has no dead-letter exchange."""
        exchange, key = queue.argument("dead-letter-exchange"), queue.argument("dead-letter-routing-key")
        if exchange is None:
            return None
        if exchange == "":
            return self._by_default_exchange(key)
        found = self.exchanges.get(exchange)
        if found is None:
            return Route(flaw=f"the dead-letter exchange {exchange!r} does not exist", certain=True)
        if (found.get("arguments") or {}).get("alternate-exchange") or found.get("policy"):
            return Route()  # what matches nothing goes on from there
        bound = [each for each in self.bindings if each.get("source") == exchange]
        if not bound:
            return Route(flaw=f"nothing is bound to the dead-letter exchange {exchange!r}", certain=True)
        matching = bound if key is None else [each for each in bound if _matches(str(found.get("type")), each, key)]
        if not matching:
            flaw = f"no binding of the dead-letter exchange {exchange!r} matches the dead-letter routing key {key!r}"
            return Route(flaw=flaw, certain=True)
        return Route(frozenset(each["destination"] for each in matching if each["destination_type"] == "queue"))

    def _by_default_exchange(self, key: str | None) -> Route:
        if key is None:
            flaw = (
                "dead letters keep their routing keys, and the default exchange takes them to queues of that name: "
                "often this queue itself, where such a cycle ends in dropping them"
            )
            return Route(flaw=flaw)
        if key not in self.queues:
            return Route(flaw=f"the dead-letter queue {key!r} does not exist", certain=True)
        return Route(frozenset({key}))


def _matches(exchange_type: str, binding: Mapping[str, Any], key: str) -> bool:
    pattern = str(binding.get("routing_key", ""))
    match exchange_type:
        case "direct":
            return pattern == key
        case "topic":
            return _topic_matches(pattern.split("."), key.split("."))
        case _:
            return True


def _topic_matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, *rest = pattern
    if head == "#":
        return any(_topic_matches(rest, words[start:]) for start in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _topic_matches(rest, words[1:])
