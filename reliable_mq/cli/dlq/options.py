"""Common options of the commands of ``dlq``: the queue, and the filter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

if TYPE_CHECKING:
    from reliable_mq.deadletters import Filter

__all__ = [
    "URL",
    "Exceptions",
    "FromQueue",
    "Headers",
    "Limit",
    "MessageIds",
    "NewerThan",
    "OlderThan",
    "QueueName",
    "Reason",
    "chosen",
]

URL: TypeAlias = Annotated[
    str, typer.Argument(metavar="URL", help="amqp:// or amqps://, several hosts separated by commas.")
]
QueueName: TypeAlias = Annotated[
    str, typer.Argument(metavar="QUEUE", help="The dead-letter queue, such as orders.dead.")
]
_WHICH: Final = "Which dead letters"

Exceptions: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="CLASS",
        rich_help_panel=_WHICH,
        help="By the class of the last exception, with its module or without; * and ? are wildcards.",
    ),
]
Reason: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TEXT", rich_help_panel=_WHICH, help="By a text in the reason.")
]
FromQueue: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=_WHICH, help="By the queue that they were in before.")
]
MessageIds: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="ID", rich_help_panel=_WHICH, help="By message id; repeatable.")
]
Headers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", rich_help_panel=_WHICH, help="By header; repeatable, all must match."),
]
OlderThan: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="AGE", rich_help_panel=_WHICH, help="By age: dead for longer than 90 (seconds), 15m, 2h, 7d, 1w."
    ),
]
NewerThan: TypeAlias = Annotated[
    str | None, typer.Option(metavar="AGE", rich_help_panel=_WHICH, help="By age: dead for less.")
]
Limit: TypeAlias = Annotated[int | None, typer.Option(min=1, rich_help_panel=_WHICH, help="How many at most.")]

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def chosen(
    exception: str | None,
    reason: str | None,
    from_queue: str | None,
    message_id: Sequence[str] | None,
    header: Sequence[str] | None,
    older_than: str | None,
    newer_than: str | None,
) -> Filter:
    """Return the filter that the options describe.

    Raises:
        typer.BadParameter: one of them is wrong.
    """
    from reliable_mq.deadletters import Filter

    return Filter(
        exception=exception,
        reason=reason,
        queue=from_queue,
        message_ids=message_id or [],
        headers=dict(map(_header, header or [])),
        older_than=_age("--older-than", older_than),
        newer_than=_age("--newer-than", newer_than),
    )


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"--header takes NAME=VALUE, not {text!r}")
    return name, value


def _age(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{option} takes a number with s, m, h, d or w behind it, not {text!r}")
    return float(match[1]) * _SECONDS[match[2]]
