"""What is wrong with the arguments of a queue: misspelt, without effect, unknown to a version, or losing messages.

RabbitMQ takes most arguments that it does not know without a word: ``x-mesage-ttl`` is a queue whose messages never
expire. Pure: arguments in, flaws out; used by `Queue`, which refuses what is certain and warns of the rest, and by
``reliable-mq doctor``.

What every declaration has: a name and arguments, checked to be something that RabbitMQ takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, NamedTuple

from reliable_mq.errors import ConfigurationError

__all__ = [
    "SHORT_STRING_BYTES",
    "ArgumentProblem",
    "Arguments",
    "TopologyWarning",
    "check_flag",
    "check_name",
    "check_new_name",
    "check_short_string",
    "lint_arguments",
]


class TopologyWarning(UserWarning):
    """A `Queue` has an argument that does nothing, or that loses messages, and may yet be meant."""


@dataclass(frozen=True, slots=True)
class ArgumentProblem:
    """Something wrong with an argument.

    Attributes:
        argument: its name.
        text: what is wrong; goes after the name of the argument.
        fix: what to do.
        certain: whether it cannot be meant: RabbitMQ refuses it, or it has no effect at all.
    """

    argument: str
    text: str
    fix: str
    certain: bool = False


class _Known(NamedTuple):
    """An argument that RabbitMQ knows: since which version, up to which (exclusively), and what to do instead."""

    since: tuple[int, ...] = ()
    until: tuple[int, ...] = ()
    instead: str = ""


_KNOWN: Final[Mapping[str, _Known]] = {
    "x-queue-type": _Known(),
    "x-max-length": _Known(),
    "x-max-length-bytes": _Known(),
    "x-overflow": _Known(),
    "x-message-ttl": _Known(),
    "x-expires": _Known(),
    "x-dead-letter-exchange": _Known(),
    "x-dead-letter-routing-key": _Known(),
    "x-dead-letter-strategy": _Known(since=(3, 10)),
    "x-single-active-consumer": _Known(),
    "x-delivery-limit": _Known(),
    "x-delayed-retry-type": _Known(since=(4, 3)),
    "x-delayed-retry-min": _Known(since=(4, 3)),
    "x-delayed-retry-max": _Known(since=(4, 3)),
    "x-consumer-timeout": _Known(since=(4, 3)),
    "x-consumer-disconnected-timeout": _Known(since=(4, 3)),
    "x-max-priority": _Known(),
    "x-queue-version": _Known(),
    "x-queue-mode": _Known(until=(3, 12), instead="classic queues keep messages on disk by themselves"),
    "x-ha-policy": _Known(until=(3,), instead="declare a quorum queue, which is replicated"),
    "x-max-in-memory-length": _Known(until=(4,), instead="quorum queues keep messages on disk"),
    "x-max-in-memory-bytes": _Known(until=(4,), instead="quorum queues keep messages on disk"),
    "x-quorum-initial-group-size": _Known(),
    "x-quorum-target-group-size": _Known(),
    "x-initial-cluster-size": _Known(),
    "x-queue-leader-locator": _Known(),
    "x-queue-master-locator": _Known(until=(4, 3), instead="use x-queue-leader-locator"),
    "x-max-age": _Known(),
    "x-stream-max-segment-size-bytes": _Known(),
    "x-stream-filter-size-bytes": _Known(),
}
#: Of plugins that are widely used: known, and nothing is said about them.
_PLUGINS: Final = frozenset({"x-message-deduplication", "x-cache-size", "x-cache-ttl", "x-cache-persistence"})

_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "x-queue-type": ("quorum", "classic", "stream"),
    "x-overflow": ("drop-head", "reject-publish", "reject-publish-dlx"),
    "x-dead-letter-strategy": ("at-most-once", "at-least-once"),
    "x-delayed-retry-type": ("disabled", "all", "failed", "returned"),
}
_OLDEST: Final = (4, 0)  # that a broker is taken for whose version is not known
_LIKE: Final = 0.8  # how alike two names are of which one is taken for a misspelling of the other


def lint_arguments(
    arguments: Mapping[str, object], queue_type: str, version: tuple[int, ...] | None = None
) -> list[ArgumentProblem]:
    """Look at the arguments of a queue.

    Args:
        arguments: all that it is declared with.
        queue_type: ``"quorum"``, ``"classic"`` or ``"stream"``.
        version: of the broker, e.g. ``(4, 0, 5)``; None where it is not known.

    Returns:
        What is wrong, by the name of the argument.
    """
    given = {name: value for name, value in arguments.items() if value is not None} | {"x-queue-type": queue_type}
    flaws: list[ArgumentProblem] = []
    for name, value in given.items():
        flaws += _name(name, version)
        flaws += _check_value(name, value, queue_type)
    for rule in _RULES:
        flaws += rule(given)
    return sorted(flaws, key=lambda flaw: flaw.argument)


def _name(name: str, version: tuple[int, ...] | None) -> Iterator[ArgumentProblem]:
    known = _KNOWN.get(name)
    if known is None:
        yield from _unknown(name)
        return
    if version is not None and version < known.since:
        since = ".".join(map(str, known.since))
        yield ArgumentProblem(
            name, f"is of RabbitMQ {since} and newer; this broker takes it and does nothing", f"upgrade, or drop {name}"
        )
    if known.until and (version or _OLDEST) >= known.until:
        until = ".".join(map(str, known.until))
        yield ArgumentProblem(
            name, f"does nothing from RabbitMQ {until} on, or is refused", f"drop it: {known.instead}"
        )


def _unknown(name: str) -> Iterator[ArgumentProblem]:
    if name in _PLUGINS:
        return
    close = get_close_matches(name if name.startswith("x-") else f"x-{name}", _KNOWN, 1, _LIKE)
    if close:
        text = f"is not known to RabbitMQ, which ignores it: did you mean {close[0]}?"
        yield ArgumentProblem(name, text, f"write {close[0]}", certain=True)
    elif name.startswith("x-"):
        yield ArgumentProblem(
            name, "is not known to RabbitMQ, which ignores it", "look for its name, unless a plugin of yours reads it"
        )


def _check_value(name: str, value: object, queue_type: str) -> Iterator[ArgumentProblem]:
    allowed = _VALUES.get(name)
    if allowed is not None and value not in allowed:
        close = get_close_matches(str(value), allowed, 1)
        guess = f": did you mean {close[0]!r}?" if close else ""
        yield ArgumentProblem(name, f"cannot be {value!r}{guess}", f"it is one of {', '.join(allowed)}", certain=True)
    if name == "x-overflow" and value == "reject-publish-dlx" and queue_type == "quorum":
        yield ArgumentProblem(
            name, "cannot be reject-publish-dlx on a quorum queue", "use reject-publish", certain=True
        )
    least = _LEAST.get(name)
    if least is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        yield ArgumentProblem(
            name, f"must be a whole number of at least {least}, not {value!r}", "correct it", certain=True
        )


_LEAST: Final = {
    "x-max-length": 0,
    "x-max-length-bytes": 0,
    "x-message-ttl": 0,
    "x-expires": 1,
    "x-delivery-limit": -1,
    "x-delayed-retry-min": 0,
    "x-delayed-retry-max": 0,
}


# -- arguments that contradict each other, or lose messages together ---------------------------------------------------


def _at_least_once(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    if given.get("x-dead-letter-strategy") != "at-least-once" or given["x-queue-type"] != "quorum":
        return
    if "x-dead-letter-exchange" not in given:
        text = "at-least-once needs a dead-letter exchange, and there is none"
        yield ArgumentProblem("x-dead-letter-strategy", text, "give x-dead-letter-exchange (a policy can, too)")
    if given.get("x-overflow", "drop-head") != "reject-publish":
        text = "at-least-once is not in effect without x-overflow=reject-publish; RabbitMQ says so in its log only"
        yield ArgumentProblem("x-dead-letter-strategy", text, "give x-overflow=reject-publish", certain=True)


def _delivery_limit(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    limit = given.get("x-delivery-limit")
    if isinstance(limit, int) and limit >= 0 and "x-dead-letter-exchange" not in given:
        text = (
            f"drops a message after {limit + 1} deliveries, as there is no dead-letter exchange; lost connections count"
        )
        yield ArgumentProblem(
            "x-delivery-limit", text, "give x-dead-letter-exchange, or -1 and a retry policy that counts"
        )


def _routing_key(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    if given.get("x-dead-letter-exchange") == "" and "x-dead-letter-routing-key" not in given:
        text = (
            "is the default exchange and there is no x-dead-letter-routing-key: dead letters go to queues named as "
            "their own routing keys, often this one, where such a cycle ends in dropping them"
        )
        yield ArgumentProblem(
            "x-dead-letter-exchange", text, "give x-dead-letter-routing-key, the name of a dead-letter queue"
        )


def _length(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    limits = [name for name in ("x-max-length", "x-max-length-bytes") if name in given]
    if limits and given["x-queue-type"] != "stream" and "x-overflow" not in given:
        text = "drops the oldest messages when it is reached, confirmed ones too, as there is no x-overflow"
        yield ArgumentProblem(
            limits[0], text, "give x-overflow=reject-publish: a full queue then nacks; or drop-head, if it is meant"
        )


def _head_blocking(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    if "x-message-ttl" in given and "x-max-priority" in given:
        text = "expires messages at the head only: one of a high priority that is not due holds up all that are"
        yield ArgumentProblem("x-message-ttl", text, "give it up, or x-max-priority")


def _expiry(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    expires, ttl = given.get("x-expires"), given.get("x-message-ttl")
    if isinstance(expires, int) and isinstance(ttl, int) and expires <= ttl:
        text = "deletes the unused queue with its messages before x-message-ttl lets them expire: none is dead-lettered"
        yield ArgumentProblem("x-expires", text, "make it longer than x-message-ttl, or leave it out")


def _delayed_retry(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    shortest, longest = given.get("x-delayed-retry-min"), given.get("x-delayed-retry-max")
    if isinstance(shortest, int) and isinstance(longest, int) and shortest > longest:
        yield ArgumentProblem(
            "x-delayed-retry-min", f"({shortest}) is above x-delayed-retry-max ({longest})", "swap", certain=True
        )
    for name in ("x-delayed-retry-min", "x-delayed-retry-max"):
        if name in given and given.get("x-delayed-retry-type", "disabled") == "disabled":
            yield ArgumentProblem(name, "does nothing without x-delayed-retry-type", "give x-delayed-retry-type=failed")


_Rule = Callable[[Mapping[str, object]], Iterator[ArgumentProblem]]
_RULES: Final[tuple[_Rule, ...]] = (
    _at_least_once,
    _delivery_limit,
    _routing_key,
    _length,
    _head_blocking,
    _expiry,
    _delayed_retry,
)


SHORT_STRING_BYTES: Final = 255
"""AMQP carries names and routing keys as short strings."""

_DEEPEST = 32


class Arguments(Mapping[str, object]):
    """Arguments of a declaration: a read-only copy, of types that both drivers can encode.

    Args:
        owner: what they belong to, for the error.
        given: names to ``None``, ``bool``, ``int`` (64 bits), ``str``, ``bytes``, lists and mappings of these.

    Raises:
        ConfigurationError: names the argument.
    """

    __slots__ = ("_items",)

    def __init__(self, owner: str, given: object) -> None:
        self._items = _table(f"arguments of {owner}", given, 0)

    def __getitem__(self, name: str) -> object:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def check_short_string(what: str, value: object) -> str:
    """Return `value`, a text that fits an AMQP short string; `what` names it in the error."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} must be text, not {type(value).__name__}")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} holds a lone surrogate, which UTF-8 cannot carry") from None
    if length > SHORT_STRING_BYTES:
        raise ConfigurationError(f"{what} has {length} bytes in UTF-8; AMQP carries {SHORT_STRING_BYTES} at most")
    if "\0" in value:
        raise ConfigurationError(f"{what} holds a NUL character, which AMQP forbids: remove it")
    return value


def check_name(what: str, value: object) -> str:
    """Return `value`, a name that a queue or an exchange can have; `what` names it in the error."""
    name = check_short_string(what, value)
    if not name:
        raise ConfigurationError(f"{what} must not be empty")
    if "\r" in name or "\n" in name:
        # RabbitMQ strips them and answers with another name; pika then waits for ever for the one it asked for.
        raise ConfigurationError(f"{what} must not hold a line end, which RabbitMQ would strip: {name!r}")
    return name


def check_new_name(what: str, value: object) -> str:
    """Return `value`, a name that can be declared; `what` names it in the error."""
    name = check_name(what, value)
    if name.startswith("amq."):
        raise ConfigurationError(
            f"{what} must not begin with 'amq.', which RabbitMQ reserves: {name!r}. To use one that exists, give its "
            "name alone"
        )
    return name


def check_flag(what: str, value: object) -> None:
    """Check that `value` is True or False; `what` names it in the error."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} must be True or False, not {value!r}")


def _table(what: str, given: object, depth: int) -> dict[str, object]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{what} must be a mapping, not {type(given).__name__}")
    table = {}
    for name, value in given.items():
        check_short_string(f"a name in {what}", name)
        table[name] = _value(f"{name!r} in {what}", value, depth)
    return table


def _value(what: str, value: object, depth: int) -> object:
    if depth > _DEEPEST:
        raise ConfigurationError(f"{what} is nested more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return _table(what, value, depth + 1)
    if isinstance(value, list | tuple):
        return [_value(what, item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return value
        raise ConfigurationError(f"{what} does not fit 64 bits: {value}")
    raise ConfigurationError(
        f"{what} is a {type(value).__name__}: arguments are text, whole numbers, booleans, lists and mappings"
    )
