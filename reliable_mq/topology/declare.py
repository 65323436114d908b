"""Exchanges and bindings, the order of declarations, and their refusals.

A topology is declared in an order in which each item follows the items that it refers to, without repetition.

A refusal in AMQP has no structure except its text. This module parses the texts of RabbitMQ 4.0 and 4.3, and passes on
unknown texts unchanged. RabbitMQ cuts a text at 255 bytes, so with a long name, the values or the whole text may be
missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Final, NamedTuple

from reliable_mq._util.validation import check_flag
from reliable_mq.errors import ConfigurationError, Difference, TopologyMismatch
from reliable_mq.topology.arguments import Arguments, check_name, check_new_name, check_short_string
from reliable_mq.topology.queue import Queue

_TYPES: Final = ("direct", "topic", "fanout", "headers")
_ALTERNATE: Final = "alternate-exchange"

_ARGUMENT: Final = re.compile(r"inequivalent arg '(?P<argument>[^']+)' for ")
_VALUES: Final = re.compile(r" in vhost '.*?': received (?P<declared>.*) but current is (?P<existing>.*)$", re.DOTALL)
_TYPED_VALUE: Final = re.compile(r"the value '(?P<value>.*)' of type '(?P<type>[^']*)'", re.DOTALL)
_NUMBER: Final = re.compile(r"-?[0-9]+")
_INVALID: Final = re.compile(r"invalid (?:arg|property) '(?P<argument>[^']+)' for ")
_UNKNOWN_TYPE: Final = re.compile(r"(?:unknown|invalid) exchange type '(?P<type>.*)'", re.DOTALL)

_TO_DO: Final = {
    "queue": (
        "RabbitMQ cannot change an existing queue: declare it as it is (in arguments, None leaves one of our defaults "
        "out), use its plain name, or delete it first"
    ),
    "exchange": (
        "RabbitMQ cannot change an existing exchange: declare it as it is, use its plain name, or delete it first"
    ),
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange to declare.

    Args:
        name: The name, up to 255 bytes. It must not be empty or begin with ``amq.``: such exchanges exist, and are used
            by their names.
        type: The type: ``"direct"``, ``"topic"``, ``"fanout"``, ``"headers"``, or a plugin's type, which begins with
            ``x-``.
        durable: Whether the exchange survives a restart of the broker.
        auto_delete: Whether the exchange is deleted with its last binding.
        internal: Whether the exchange refuses publishes, and can only be bound to.
        alternate_exchange: The exchange for messages that match no binding: an `Exchange` to declare, or the name of an
            existing one.
        arguments: Further arguments by RabbitMQ's names.

    Raises:
        ConfigurationError: If RabbitMQ would refuse the exchange, or its options are contradictory. The message names
            the field.
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
        object.__setattr__(self, "name", check_new_name("the name of an exchange", self.name))
        what = f"exchange {self.name!r}"
        kind: object = self.type
        if not isinstance(kind, str) or not (kind in _TYPES or kind.startswith("x-")):
            raise ConfigurationError(f"type of {what} must be {', '.join(_TYPES)} or begin with 'x-', not {kind!r}")
        object.__setattr__(self, "type", check_short_string(f"type of {what}", kind))
        for flag in ("durable", "auto_delete", "internal"):
            check_flag(f"{flag} of {what}", getattr(self, flag))
        alternate: object = self.alternate_exchange
        if alternate is not None and not isinstance(alternate, Exchange):
            object.__setattr__(self, "alternate_exchange", check_name(f"alternate_exchange of {what}", alternate))
        object.__setattr__(self, "arguments", Arguments(what, self.arguments))
        if alternate is not None and _ALTERNATE in self.arguments:
            raise ConfigurationError(f"argument {_ALTERNATE} of {what} is given twice: also as alternate_exchange")

    def arguments_for(self, _version: tuple[int, ...]) -> dict[str, object]:
        """Return the arguments of the declaration, which are the same for every version."""
        alternate = self.alternate_exchange
        name = alternate.name if isinstance(alternate, Exchange) else alternate
        every = {_ALTERNATE: name, **self.arguments}
        return {argument: value for argument, value in every.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue or to another exchange.

    Args:
        source: An `Exchange` to declare, or the name of an existing exchange, for example ``"amq.topic"``.
        destination: A `Queue` or an `Exchange` to declare, or the name of an existing queue.
        routing_key: The routing key, up to 255 bytes. Its meaning depends on the type of the exchange.
        arguments: The arguments of the binding, for example ``x-match`` for a headers exchange, where None means
            "present".

    Raises:
        ConfigurationError: If a value is invalid. The message names the field.
    """

    source: Exchange | str
    destination: Queue | Exchange | str
    routing_key: str = ""
    _: KW_ONLY
    arguments: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.source, Exchange):
            source = check_name("source of a binding (the default exchange cannot be bound)", self.source)
            object.__setattr__(self, "source", source)
        if not isinstance(self.destination, Queue | Exchange):
            object.__setattr__(self, "destination", check_name("destination of a binding", self.destination))
        object.__setattr__(self, "routing_key", check_short_string("routing_key of a binding", self.routing_key))
        object.__setattr__(self, "arguments", Arguments("a binding", self.arguments))


Declaration = Queue | Exchange | Binding


def declarations(topology: Iterable[Declaration]) -> list[Declaration]:
    """Return the declarations in order: exchanges, queues, bindings.

    A queue follows its dead-letter queue. Queues and exchanges that other items refer to are also declared, unless the
    reference is a plain name. Equal items may be repeated.

    Raises:
        ConfigurationError: If the topology contains another type, or different items with the same name.
    """
    collected = _Collected()
    for item in _listed(topology):
        collected.add(item)
    return [*collected.exchanges.values(), *collected.queues.values(), *collected.bindings.values()]


class _Collected:
    """The declarations found so far, by kind, in order."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.queues: dict[str, Queue] = {}
        self.bindings: dict[tuple[object, ...], Binding] = {}

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
                arguments = repr(sorted(item.arguments.items()))  # hashable, and tells True from 1
                self.bindings[item.source, item.destination, item.routing_key, arguments] = item
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
    names = [each.name for each in fields(one) if getattr(one, each.name) != getattr(other, each.name)]
    differences = ", ".join(f"{name} {getattr(other, name)!r} and {getattr(one, name)!r}" for name in names)
    raise ConfigurationError(f"{kind} {one.name!r} is in the topology twice, with {differences}: declare it once")


def mismatch_from_reply(kind: str, name: str, code: int, text: str) -> TopologyMismatch:
    """Return the error for a declaration that the broker refused.

    The ``kind`` is ``"queue"``, ``"exchange"`` or ``"binding"``, whose name is that of its destination.
    """
    what = f"{kind} {name!r}"
    inequivalence = inequivalence_from_reply(kind, name, text)
    if inequivalence is not None:
        return mismatch_from_differences(
            kind, name, [inequivalence.difference], more="" if inequivalence.is_known else text
        )
    invalid = _INVALID.search(text)
    if invalid is not None:
        message = f"{what} cannot have {invalid['argument']!r} on this broker: {text} ({code})"
        return TopologyMismatch(message, kind=kind, name=name, argument=invalid["argument"])
    unknown_type = _UNKNOWN_TYPE.search(text)
    if unknown_type is not None:
        declared = unknown_type["type"]
        message = f"{what}: the broker has no exchange type {declared!r}; enable the plugin that provides it ({code})"
        return TopologyMismatch(message, kind=kind, name=name, argument="type", declared=declared)
    return TopologyMismatch(f"the broker refused to declare {what}: {text} ({code})", kind=kind, name=name)


class Inequivalence(NamedTuple):
    """An argument that differs, with its values as the broker wrote them.

    A value is None if the text was cut.
    """

    argument: str
    declared: str | None
    existing: str | None

    @property
    def difference(self) -> Difference:
        """The difference without types and quotes, to show to a user."""
        return Difference(self.argument, _value(self.declared), _value(self.existing))

    @property
    def is_known(self) -> bool:
        """Whether the text contains the existing value, or states that there is none."""
        return self.existing is not None

    def existing_value(self, declared: object) -> object:
        """Return the existing value in its type; None if there is none or it is unknown.

        A value that is written without a type has the type of the declared one.
        """
        if self.existing is None or self.existing == "none":
            return None
        typed = _TYPED_VALUE.fullmatch(self.existing)
        value = str(_value(self.existing))
        if isinstance(declared, bool) if typed is None else typed["type"] == "bool":
            return value == "true"
        numeric = isinstance(declared, int) if typed is None else typed["type"] != "longstr"
        return int(value) if numeric and _NUMBER.fullmatch(value) else value


def inequivalence_from_reply(kind: str, name: str, text: str) -> Inequivalence | None:
    """Return the argument that a refusal names, or None if it has another reason.

    The ``kind`` is ``"queue"`` or ``"exchange"``, and ``text`` the reply text.
    """
    argument = _ARGUMENT.search(text)
    if argument is None:
        return None
    # A name may contain quotes or text like the rest of the reply, so the declared name is skipped as a whole.
    named = f" for {kind} '{str.__str__(name)}'"  # a member of an enum is another text in an f-string
    values = _VALUES.match(text.partition(named)[2])
    if values is None:
        return Inequivalence(argument["argument"], None, None)
    return Inequivalence(argument["argument"], values["declared"], values["existing"])


def mismatch_from_differences(
    kind: str, name: str, differences: Sequence[Difference], *, more: str = ""
) -> TopologyMismatch:
    """Return the error for a declaration that differs from the existing one.

    There is at least one difference. ``more`` is the broker's reply that ended the search, empty if there are no more
    differences.
    """
    shown = "; ".join(map(_described, differences))
    if more:
        shown += f" (more may differ, the broker answered: {more})"
    to_do = _TO_DO.get(kind, "declare it as it is")
    return TopologyMismatch(f"{kind} {name!r}: {shown}. {to_do}", kind=kind, name=name, differences=differences)


def _described(difference: Difference) -> str:
    argument, declared, existing = difference
    if declared is None or existing is None:
        return f"its {argument} differs from what exists"
    return f"{argument} is declared as {_shown(declared)}, but exists as {_shown(existing)}"


def _value(text: str | None) -> str | None:
    """Return a value without its type and quotes.

    RabbitMQ writes ``'20'``, ``the value '20' of type 'signedint'`` or ``none``.
    """
    if text is None:
        return None
    typed = _TYPED_VALUE.fullmatch(text)
    if typed is not None:
        return typed["value"]
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text


def _shown(value: str) -> str:
    return value if value == "none" else repr(value)
