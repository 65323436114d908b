"""What a declaration becomes when one of its arguments is corrected to the value that exists on the broker.

AMQP does not return the arguments of a queue or an exchange. Its refusal of a declaration that differs names one
argument with both values. A declaration with that argument corrected gets the next one named, until the broker agrees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reliable_mq.core.setup import DeclareExchange, DeclareQueue
    from reliable_mq.topology import Inequivalence

__all__ = ["corrected"]

_PROPERTIES = frozenset({"durable", "auto_delete", "internal", "type"})


def corrected(
    step: DeclareQueue | DeclareExchange, inequivalence: Inequivalence
) -> DeclareQueue | DeclareExchange | None:
    """Return a declaration with the argument that differs as it exists; None where nothing can be corrected.

    Args:
        step: the declaration that was refused.
        inequivalence: from the text of the refusal, code 406.
    """
    argument = inequivalence.argument
    if not inequivalence.is_known:
        return None
    if argument in _PROPERTIES and hasattr(step, argument):
        value = inequivalence.existing_value(getattr(step, argument))
        fields: dict[str, Any] = {argument: value}
        return None if value is None else replace(step, **fields)
    arguments = dict(step.arguments)
    declared = arguments.pop(argument, None)
    value = inequivalence.existing_value(declared)
    if type(value) is type(declared) and value == declared:  # True equals 1
        return None
    if value is not None:
        arguments[argument] = value
    return replace(step, arguments=arguments)
