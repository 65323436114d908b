"""The table of queue arguments that RabbitMQ knows, and the checks that use it.

RabbitMQ accepts most arguments that it does not know: a queue with ``x-mesage-ttl`` never expires a message.
`ARGUMENTS` has one row for each argument. `Queue`, the linter, ``reliable-mq doctor`` and the Spark source use it. A
rule over several arguments is a function below (`_RULES`).

`Arguments`, `check_name` and similar functions check the parts of any declaration.

Invariant: the checks do no I/O. They take arguments and return problems. `Queue` raises an error for certain problems
and warns about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, Literal

from reliable_mq._util.validation import SHORT_STRING_BYTES, is_text, is_whole_number, seconds
from reliable_mq.errors import ConfigurationError

QueueType = Literal["quorum", "classic", "stream"]

# The names that other modules use, too. A DLX is a dead-letter exchange.
DLX: Final = "x-dead-letter-exchange"
DLX_KEY: Final = "x-dead-letter-routing-key"
DEAD_LETTER_STRATEGY: Final = "x-dead-letter-strategy"
SINGLE_ACTIVE_CONSUMER: Final = "x-single-active-consumer"
CONSUMER_TIMEOUT: Final = "x-consumer-timeout"  # milliseconds

_QUORUM: Final = frozenset({"quorum"})
_CLASSIC: Final = frozenset({"classic"})
_STREAM: Final = frozenset({"stream"})
#: The types of queues that have copies on several nodes.
REPLICATED: Final = _QUORUM | _STREAM
_NO_STREAM: Final = _QUORUM | _CLASSIC
_EVERY: Final = _NO_STREAM | _STREAM


class TopologyWarning(UserWarning):
    """A warning about an argument of a `Queue` that has no effect or loses messages.

    The argument may be intended; otherwise, an error is raised.
    """


@dataclass(frozen=True, slots=True)
class ArgumentProblem:
    """A problem with one argument of a queue."""

    argument: str
    text: str  # worded to follow the argument's name
    fix: str
    certain: bool = False  # it cannot be intended, because RabbitMQ refuses it or it has no effect at all


@dataclass(frozen=True, slots=True)
class Argument:
    """A row of the table: an argument of a queue that RabbitMQ knows."""

    name: str
    _: KW_ONLY
    kinds: frozenset[str] = _EVERY  # the types of queues for which RabbitMQ accepts it
    since: tuple[int, ...] = ()  # the first version that knows it; earlier versions accept it without effect
    until: tuple[int, ...] = ()  # the first version that ignores or refuses it
    instead: str = ""  # its replacement, if it has an `until`
    values: tuple[str, ...] = ()  # the allowed texts, if only some are allowed
    least: int | None = None  # the lowest allowed value, if it is a whole number with a lower bound
    default: Any = None  # the value that a broker assumes for a queue without it; None if there is none
    default_since: tuple[int, ...] = ()  # the first version with that default
    with_policies: bool = False  # the doctor checks it with policies and other queues, instead of with the linter
    field: str = ""  # of `Queue`; empty if there is none
    field_range: tuple[int, int] | None = None  # that the field accepts, if it is a whole number
    encode: Callable[[str, Any], object] | None = None  # makes its value of the field's name and value

    def default_on(self, version: tuple[int, ...]) -> Any:
        """Return the value that a broker of `version` assumes without the argument."""
        return self.default if version >= self.default_since else None

    def is_sent_to(self, version: tuple[int, ...]) -> bool:
        """Return whether our default for the argument is sent to a broker of `version`."""
        return version >= max(self.since, self.default_since)


def _milliseconds(field: str, value: Any) -> int:
    """Return a duration in milliseconds, at least 1 unless it is 0.

    A TTL of 0 has another meaning: the message expires unless it can be delivered at once.
    """
    duration = seconds(field, value)
    return round(duration * 1000) or int(duration > 0)


def _one_delay(place: int, field: str, delays: Any) -> int:
    return _milliseconds(field, delays[place])


_KEPT_ON_DISK: Final = "quorum queues keep messages on disk"
_MOST: Final = 2**63 - 1

ARGUMENTS: Final[Mapping[str, Argument]] = {
    row.name: row
    for row in (
        Argument("x-queue-type", values=("quorum", "classic", "stream")),
        Argument(
            "x-max-length", kinds=_NO_STREAM, least=0, with_policies=True, field="max_length", field_range=(0, _MOST)
        ),
        Argument("x-max-length-bytes", least=0, with_policies=True, field="max_length_bytes", field_range=(0, _MOST)),
        Argument(
            "x-overflow",
            kinds=_NO_STREAM,
            values=("drop-head", "reject-publish", "reject-publish-dlx"),
            default="drop-head",
        ),
        Argument("x-message-ttl", kinds=_NO_STREAM, least=0, field="message_ttl", encode=_milliseconds),
        Argument("x-expires", kinds=_NO_STREAM, least=1, with_policies=True),
        Argument(DLX, kinds=_NO_STREAM, with_policies=True),
        Argument(DLX_KEY, kinds=_NO_STREAM),
        Argument(
            DEAD_LETTER_STRATEGY,
            kinds=_QUORUM,
            since=(3, 10),
            values=("at-most-once", "at-least-once"),
            with_policies=True,
        ),
        Argument(SINGLE_ACTIVE_CONSUMER, kinds=_NO_STREAM, field="single_active_consumer"),
        # Up to 3.13, a quorum queue has no delivery limit by default. -1 means no limit, and is known from 4.0 on.
        Argument("x-delivery-limit", kinds=_QUORUM, least=-1, default=20, default_since=(4,), with_policies=True),
        Argument(
            "x-delayed-retry-type",
            kinds=_QUORUM,
            since=(4, 3),
            values=("disabled", "all", "failed", "returned"),
            default="disabled",
            field="delayed_retry",
            encode=lambda _field, _delays: "failed",
        ),
        Argument(
            "x-delayed-retry-min",
            kinds=_QUORUM,
            since=(4, 3),
            least=0,
            field="delayed_retry",
            encode=partial(_one_delay, 0),
        ),
        Argument(
            "x-delayed-retry-max",
            kinds=_QUORUM,
            since=(4, 3),
            least=0,
            field="delayed_retry",
            encode=partial(_one_delay, 1),
        ),
        Argument(CONSUMER_TIMEOUT, kinds=_QUORUM, since=(4, 3)),
        Argument("x-consumer-disconnected-timeout", kinds=_QUORUM, since=(4, 3)),
        Argument("x-max-priority", kinds=_CLASSIC, field="max_priority", field_range=(1, 255)),
        Argument("x-queue-version", kinds=_CLASSIC),
        Argument(
            "x-queue-mode", kinds=_CLASSIC, until=(3, 12), instead="classic queues keep messages on disk by themselves"
        ),
        Argument("x-ha-policy", until=(3,), instead="declare a quorum queue, which is replicated"),
        Argument("x-max-in-memory-length", kinds=_QUORUM, until=(4,), instead=_KEPT_ON_DISK),
        Argument("x-max-in-memory-bytes", kinds=_QUORUM, until=(4,), instead=_KEPT_ON_DISK),
        Argument("x-quorum-initial-group-size", kinds=_QUORUM),
        Argument("x-quorum-target-group-size"),
        Argument("x-initial-cluster-size", kinds=_STREAM),
        Argument("x-queue-leader-locator"),
        Argument("x-queue-master-locator", kinds=_CLASSIC, until=(4, 3), instead="use x-queue-leader-locator"),
        # The durations of a stream are whole seconds.
        Argument("x-max-age", kinds=_STREAM, field="max_age", encode=lambda name, age: f"{int(seconds(name, age))}s"),
        Argument("x-stream-max-segment-size-bytes", kinds=_STREAM),
        Argument("x-stream-filter-size-bytes", kinds=_STREAM),
    )
}
"""Every argument of a queue that RabbitMQ knows, by its name.

`Argument.kinds` is from RabbitMQ 4.0 and 4.3, which refuse the others with "invalid arg ... of queue type". RabbitMQ
4.0 does not know some arguments of 4.3, and accepts them for every type, without effect.
"""

#: Arguments of widely used plugins. They are not reported.
_PLUGINS: Final = frozenset({"x-message-deduplication", "x-cache-size", "x-cache-ttl", "x-cache-persistence"})

_OLDEST: Final = (4, 0)  # the version assumed for a broker whose version is unknown
_LIKE: Final = 0.8  # the similarity from which one name is taken for a misspelling of another


def lint_arguments(
    arguments: Mapping[str, object], queue_type: str, version: tuple[int, ...] | None = None
) -> list[ArgumentProblem]:
    """Return the problems with a queue's arguments, sorted by argument.

    All arguments of the declaration are given. The version of the broker is None or empty if it is unknown.
    """
    given = {name: value for name, value in arguments.items() if value is not None} | {"x-queue-type": queue_type}
    problems: list[ArgumentProblem] = []
    for name, value in given.items():
        argument = ARGUMENTS.get(name)
        if argument is None:
            problems += _check_unknown(name)
        else:
            problems += _check_version(argument, version)
            problems += _check_value(argument, value, queue_type)
    for rule in _RULES:
        problems += rule(given)
    return sorted(problems, key=lambda problem: problem.argument)


def _check_unknown(name: str) -> Iterator[ArgumentProblem]:
    if name in _PLUGINS:
        return
    close = get_close_matches(name if name.startswith("x-") else f"x-{name}", ARGUMENTS, 1, _LIKE)
    if close:
        text = f"is not known to RabbitMQ, which ignores it: did you mean {close[0]}?"
        yield ArgumentProblem(name, text, f"write {close[0]}", certain=True)
    elif name.startswith("x-"):
        yield ArgumentProblem(
            name, "is not known to RabbitMQ, which ignores it", "check its spelling, unless a plugin uses it"
        )


def _check_version(argument: Argument, version: tuple[int, ...] | None) -> Iterator[ArgumentProblem]:
    name = argument.name
    if version and version < argument.since:
        since = ".".join(map(str, argument.since))
        yield ArgumentProblem(
            name,
            f"requires RabbitMQ {since} or newer; this broker accepts and ignores it",
            f"upgrade, or remove {name}",
        )
    if argument.until and (version or _OLDEST) >= argument.until:
        until = ".".join(map(str, argument.until))
        yield ArgumentProblem(
            name, f"is ignored or refused by RabbitMQ {until} and newer", f"remove it: {argument.instead}"
        )


def _check_value(argument: Argument, value: object, queue_type: str) -> Iterator[ArgumentProblem]:
    name, values, least = argument.name, argument.values, argument.least
    if values and value not in values:
        close = get_close_matches(str(value), values, 1)
        guess = f": did you mean {close[0]!r}?" if close else ""
        yield ArgumentProblem(name, f"cannot be {value!r}{guess}", f"use one of {', '.join(values)}", certain=True)
    if name == "x-overflow" and value == "reject-publish-dlx" and queue_type == "quorum":
        yield ArgumentProblem(
            name, "cannot be reject-publish-dlx on a quorum queue", "use reject-publish", certain=True
        )
    if least is not None and not is_whole_number(value, least):
        yield ArgumentProblem(
            name, f"must be a whole number of at least {least}, not {value!r}", "correct it", certain=True
        )


# -- arguments that contradict each other, or lose messages together ---------------------------------------------------


def _at_least_once(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    if given.get(DEAD_LETTER_STRATEGY) != "at-least-once" or given["x-queue-type"] != "quorum":
        return
    if DLX not in given:
        text = "at-least-once requires a dead-letter exchange"
        yield ArgumentProblem(DEAD_LETTER_STRATEGY, text, "set x-dead-letter-exchange, here or in a policy")
    if given.get("x-overflow") != "reject-publish":
        text = "at-least-once is not in effect without x-overflow=reject-publish; RabbitMQ reports this only in its log"
        yield ArgumentProblem(DEAD_LETTER_STRATEGY, text, "set x-overflow=reject-publish", certain=True)


def _delivery_limit(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    limit = given.get("x-delivery-limit")
    if isinstance(limit, int) and limit >= 0 and DLX not in given:
        text = (
            f"drops a message after {limit + 1} deliveries, including those that a lost connection ended, "
            "because there is no dead-letter exchange"
        )
        yield ArgumentProblem("x-delivery-limit", text, "set x-dead-letter-exchange, or use -1 and a retry policy")


def _routing_key(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    if given.get(DLX) == "" and DLX_KEY not in given:
        text = (
            "is the default exchange and there is no x-dead-letter-routing-key: dead letters go to the queue named "
            "like their own routing key, often this queue itself, which drops them in such a cycle"
        )
        yield ArgumentProblem(DLX, text, "set x-dead-letter-routing-key to the name of a dead-letter queue")


def _length(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    limits = [name for name in ("x-max-length", "x-max-length-bytes") if name in given]
    if limits and given["x-queue-type"] != "stream" and "x-overflow" not in given:
        text = "drops the oldest messages when it is reached, including confirmed ones, because x-overflow is not set"
        yield ArgumentProblem(
            limits[0],
            text,
            "set x-overflow=reject-publish, so that a full queue nacks, or drop-head, if this is intended",
        )


def _head_blocking(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    if "x-message-ttl" in given and "x-max-priority" in given:
        text = "expires messages only at the head of the queue: a message of a high priority can hold up expired ones"
        yield ArgumentProblem("x-message-ttl", text, "remove x-message-ttl or x-max-priority")


def _expiry(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    expires, ttl = given.get("x-expires"), given.get("x-message-ttl")
    if isinstance(expires, int) and isinstance(ttl, int) and expires <= ttl:
        text = "deletes an unused queue before x-message-ttl expires its messages: they are dropped, not dead-lettered"
        yield ArgumentProblem("x-expires", text, "make it longer than x-message-ttl, or remove it")


def _delayed_retry(given: Mapping[str, object]) -> Iterator[ArgumentProblem]:
    shortest, longest = given.get("x-delayed-retry-min"), given.get("x-delayed-retry-max")
    if isinstance(shortest, int) and isinstance(longest, int) and shortest > longest:
        yield ArgumentProblem(
            "x-delayed-retry-min", f"({shortest}) is above x-delayed-retry-max ({longest})", "swap them", certain=True
        )
    for name in ("x-delayed-retry-min", "x-delayed-retry-max"):
        if name in given and given.get("x-delayed-retry-type", "disabled") == "disabled":
            yield ArgumentProblem(name, "does nothing without x-delayed-retry-type", "set x-delayed-retry-type=failed")


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


_DEEPEST: Final = 32


class Arguments(Mapping[str, object]):
    """A read-only copy of the arguments of a declaration, limited to AMQP's types.

    These are ``None``, ``bool``, ``int`` (64 bits), ``str``, ``bytes``, and lists and mappings of these. For another
    type, the constructor raises a `ConfigurationError` that names the argument and its owner.
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


def check_short_string(label: str, value: object) -> str:
    """Return `value` as a plain string. Errors contain `label`.

    A member of an enum of strings is not plain: its format is the member's name.

    Raises:
        ConfigurationError: If it is not text that fits a short string.
    """
    if not isinstance(value, str):
        raise ConfigurationError(f"{label} must be text, not {type(value).__name__}")
    if not is_text(value):
        raise ConfigurationError(f"{label} holds a lone surrogate, which UTF-8 cannot carry")
    length = len(value.encode())
    if length > SHORT_STRING_BYTES:
        raise ConfigurationError(f"{label} has {length} bytes in UTF-8; AMQP carries {SHORT_STRING_BYTES} at most")
    if "\0" in value:
        raise ConfigurationError(f"{label} holds a NUL character, which AMQP forbids: remove it")
    return str.__str__(value)


def check_name(label: str, value: object) -> str:
    """Return `value` if it is a queue's or exchange's name. Errors contain `label`."""
    name = check_short_string(label, value)
    if not name:
        raise ConfigurationError(f"{label} must not be empty")
    if "\r" in name or "\n" in name:
        # RabbitMQ strips line ends and replies with another name; pika would wait forever for the requested name.
        raise ConfigurationError(f"{label} must not hold a line end, which RabbitMQ would strip: {name!r}")
    return name


def check_new_name(label: str, value: object) -> str:
    """Return `value` if it is a name that can be declared. Errors contain `label`."""
    name = check_name(label, value)
    if name.startswith("amq."):
        raise ConfigurationError(
            f"{label} must not begin with 'amq.', which RabbitMQ reserves: {name!r}. To use one that exists, give its "
            "name alone"
        )
    return name


def _table(label: str, given: object, depth: int) -> dict[str, object]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{label} must be a mapping, not {type(given).__name__}")
    table = {}
    for name, value in given.items():
        check_short_string(f"a name in {label}", name)
        table[name] = _value(f"{name!r} in {label}", value, depth)
    return table


def _value(label: str, value: object, depth: int) -> object:
    if depth > _DEEPEST:
        raise ConfigurationError(f"{label} is nested more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return _table(label, value, depth + 1)
    if isinstance(value, list | tuple):
        return [_value(label, item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return value
        raise ConfigurationError(f"{label} does not fit 64 bits: {value}")
    raise ConfigurationError(
        f"{label} is a {type(value).__name__}: arguments are text, whole numbers, booleans, lists and mappings"
    )
