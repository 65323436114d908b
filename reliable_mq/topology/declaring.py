"""In which order a topology is declared: what is referred to comes before what refers to it, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from reliable_mq.errors import ConfigurationError
from reliable_mq.topology.exchange import Binding, Exchange
from reliable_mq.topology.queue import Queue

__all__ = ["Declaration", "declarations"]

Declaration = Queue | Exchange | Binding


def declarations(topology: Iterable[Declaration]) -> list[Declaration]:
    """Return what to declare, in order: exchanges, queues (each after its dead-letter queue), then bindings.

    What a queue, an exchange or a binding refers to is declared too, unless it is a plain name.

    Args:
        topology: in any order; what is equal may be in it repeatedly.

    Raises:
        ConfigurationError: something else is in it, or two that have one name and differ.
    """
    collected = _Collected()
    for item in _listed(topology):
        collected.add(item)
    return [*collected.exchanges.values(), *collected.queues.values(), *collected.bindings]


class _Collected:
    """What was found so far, by kind, in the order of declaration."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.queues: dict[str, Queue] = {}
        self.bindings: dict[Binding, None] = {}

    def add(self, item: object) -> None:
        match item:
            case Exchange():
                self._refer(item.alternate_exchange)
                _check_same("exchange", item, self.exchanges.get(item.name))
                self.exchanges[item.name] = item
            case Queue():
                self._refer(item.dead_letter_queue)
                _check_same("queue", item, self.queues.get(item.name))
                self.queues[item.name] = item
            case Binding():
                self._refer(item.source)
                self._refer(item.destination)
                self.bindings[item] = None
            case _:
                raise ConfigurationError(
                    f"topology holds a {type(item).__name__}: it takes Queue, Exchange and Binding"
                    + (" (what exists and is not to be declared is left out)" if isinstance(item, str) else "")
                )

    def _refer(self, item: Queue | Exchange | str | None) -> None:
        if item is not None and not isinstance(item, str):
            self.add(item)


def _listed(topology: object) -> Iterable[object]:
    if isinstance(topology, str | Queue | Exchange | Binding) or not isinstance(topology, Iterable):
        raise ConfigurationError(f"topology must be a list, not one {type(topology).__name__}: put it in brackets")
    return topology


def _check_same(kind: str, one: Queue | Exchange, other: Queue | Exchange | None) -> None:
    if other is None or one == other:
        return
    names = [name for name in (field.name for field in fields(one)) if getattr(one, name) != getattr(other, name)]
    differences = ", ".join(f"{name} {getattr(other, name)!r} and {getattr(one, name)!r}" for name in names)
    raise ConfigurationError(f"{kind} {one.name!r} is in the topology twice, with {differences}: declare it once")
