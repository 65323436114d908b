"""An exchange to declare, and a binding from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from reliable_mq.errors import ConfigurationError
from reliable_mq.topology.arguments import Arguments, check_flag, check_name, check_new_name, check_short_string
from reliable_mq.topology.queue import Queue

__all__ = ["Binding", "Exchange"]

_TYPES: Final = ("direct", "topic", "fanout", "headers")
_ALTERNATE: Final = "alternate-exchange"


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange to declare.

    Args:
        name: up to 255 bytes; not empty and not ``amq.``: those exist, and are used by their names.
        type: ``"direct"``, ``"topic"``, ``"fanout"``, ``"headers"``, or a plugin's, which begins with ``x-``.
        durable: whether it survives a restart of the broker.
        auto_delete: deleted with its last binding.
        internal: not to be published to, only bound to.
        alternate_exchange: an `Exchange` to declare, or the name of one that exists, for messages that match no
            binding.
        arguments: further ones by RabbitMQ's names.

    Raises:
        ConfigurationError: something that RabbitMQ refuses, or that contradicts itself; names the field.
    """

    name: str
    _: KW_ONLY
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    alternate_exchange: Exchange | str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_new_name("the name of an exchange", self.name)
        what = f"exchange {self.name!r}"
        kind: object = self.type
        if not isinstance(kind, str) or not (kind in _TYPES or kind.startswith("x-")):
            raise ConfigurationError(f"type of {what} must be {', '.join(_TYPES)} or begin with 'x-', not {kind!r}")
        for flag in ("durable", "auto_delete", "internal"):
            check_flag(f"{flag} of {what}", getattr(self, flag))
        alternate: object = self.alternate_exchange
        if alternate is not None and not isinstance(alternate, Exchange):
            check_name(f"alternate_exchange of {what}", alternate)
        object.__setattr__(self, "arguments", Arguments(what, self.arguments))
        if alternate is not None and _ALTERNATE in self.arguments:
            raise ConfigurationError(f"argument {_ALTERNATE} of {what} is given twice: also as alternate_exchange")

    def arguments_for(self, _version: tuple[int, ...]) -> dict[str, object]:
        """Return the arguments of the declaration; the same on every version."""
        alternate = self.alternate_exchange
        name = alternate.name if isinstance(alternate, Exchange) else alternate
        every = {_ALTERNATE: name, **self.arguments}
        return {argument: value for argument, value in every.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue or to another exchange.

    Args:
        source: an `Exchange` to declare, or the name of one that exists, e.g. ``"amq.topic"``.
        destination: a `Queue` or an `Exchange` to declare, or the name of a queue that exists.
        routing_key: up to 255 bytes; its meaning depends on the type of the exchange.
        arguments: of the binding, e.g. ``x-match`` for a headers exchange; None means "present" there.

    Raises:
        ConfigurationError: names the field.
    """

    source: Exchange | str
    destination: Queue | Exchange | str
    routing_key: str = ""
    _: KW_ONLY
    arguments: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.source, Exchange):
            check_name("source of a binding (the default exchange cannot be bound)", self.source)
        if not isinstance(self.destination, Queue | Exchange):
            check_name("destination of a binding", self.destination)
        check_short_string("routing_key of a binding", self.routing_key)
        object.__setattr__(self, "arguments", Arguments("a binding", self.arguments))
