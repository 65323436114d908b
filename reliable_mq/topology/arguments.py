"""What every declaration has: a name and arguments, checked to be something that RabbitMQ takes as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from reliable_mq.errors import ConfigurationError

__all__ = ["SHORT_STRING_BYTES", "Arguments", "check_flag", "check_name", "check_new_name", "check_short_string"]

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
