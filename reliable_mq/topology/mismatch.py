"""What the broker's refusal of a declaration means, read from its text: AMQP gives it no other form.

The texts are those of RabbitMQ 4.0 and 4.3; one that is not understood is handed on as it is. RabbitMQ cuts a text at
255 bytes, so that with a long name the values, or all of it, may be missing.
"""

from __future__ import annotations

import re
from typing import Final

from reliable_mq.errors import TopologyMismatch

__all__ = ["mismatch_from_reply"]

_ARGUMENT: Final = re.compile(r"inequivalent arg '(?P<argument>[^']+)' for ")
_VALUES: Final = re.compile(r" in vhost '.*?': received (?P<declared>.*) but current is (?P<existing>.*)$", re.DOTALL)
_TYPED_VALUE: Final = re.compile(r"the value '(?P<value>.*)' of type '[^']*'", re.DOTALL)
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


def mismatch_from_reply(kind: str, name: str, code: int, text: str) -> TopologyMismatch:
    """Return the error for a declaration that the broker refused.

    Args:
        kind: ``"queue"``, ``"exchange"`` or ``"binding"``.
        name: of what was declared.
        code: the reply code, e.g. 406.
        text: the reply text.
    """
    what = f"{kind} {name!r}"
    argument = _ARGUMENT.search(text)
    if argument is not None:
        return _inequivalent(kind, name, text, argument["argument"])
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


def _inequivalent(kind: str, name: str, text: str, argument: str) -> TopologyMismatch:
    # Names may hold quotes or what looks like the rest of the text, so ours is stepped over as a whole.
    values = _VALUES.match(text.partition(f" for {kind} '{name}'")[2])
    declared = existing = None
    if values is None:
        difference = f"its {argument} differs from what exists: {text}"
    else:
        declared, existing = _value(values["declared"]), _value(values["existing"])
        difference = f"{argument} is declared as {_shown(declared)}, but exists as {_shown(existing)}"
    to_do = _TO_DO.get(kind, "declare it as it is")
    return TopologyMismatch(
        f"{kind} {name!r}: {difference}. {to_do}",
        kind=kind,
        name=name,
        argument=argument,
        declared=declared,
        existing=existing,
    )


def _value(text: str) -> str:
    """The value alone: RabbitMQ writes ``'20'``, ``the value '20' of type 'signedint'`` or ``none``."""
    typed = _TYPED_VALUE.fullmatch(text)
    if typed is not None:
        return typed["value"]
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text


def _shown(value: str) -> str:
    return value if value == "none" else repr(value)
