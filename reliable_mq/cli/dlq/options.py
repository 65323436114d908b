"""Common options of the commands of ``dlq``: the queue, and the filter."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliable_mq.deadletters import Filter
    from reliable_mq.stores.protocol import ResettableStore

__all__ = ["DeadLetterFilter", "Limit", "QueueName", "chosen", "filtered", "imported_store"]

QueueName: TypeAlias = Annotated[
    str, typer.Argument(metavar="QUEUE", help="The dead-letter queue, such as orders.dead.")
]
DeadLetterFilter: TypeAlias = "Filter"  # which is imported when a command runs

_option: Final = functools.partial(typer.Option, rich_help_panel="Which dead letters")
Limit: TypeAlias = Annotated[int | None, _option(min=1, help="How many at most.")]


def chosen(
    exception: Annotated[
        str | None,
        _option(
            metavar="CLASS",
            help="By the class of the last exception, with its module or without; * and ? are wildcards.",
        ),
    ] = None,
    reason: Annotated[str | None, _option(metavar="TEXT", help="By a text in the reason.")] = None,
    from_queue: Annotated[str | None, _option(metavar="NAME", help="By the queue that they were in before.")] = None,
    message_id: Annotated[list[str] | None, _option(metavar="ID", help="By message id; repeatable.")] = None,
    header: Annotated[
        list[str] | None, _option(metavar="NAME=VALUE", help="By header; repeatable, all must match.")
    ] = None,
    older_than: Annotated[
        str | None, _option(metavar="AGE", help="By age: dead for longer than 90 (seconds), 15m, 2h, 7d, 1w.")
    ] = None,
    newer_than: Annotated[str | None, _option(metavar="AGE", help="By age: dead for less.")] = None,
) -> DeadLetterFilter:
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


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``which`` of a command by the options of `chosen`."""
    options = inspect.signature(chosen, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        which = chosen(**{name: given.pop(name) for name in options})
        command(which=which, **given)

    parameters = list(signature.parameters.values())
    place = list(signature.parameters).index("which")
    parameters[place : place + 1] = [option.replace(kind=option.KEYWORD_ONLY) for option in options.values()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def imported_store(place: str) -> ResettableStore:
    """Import a store of the user's, from the working directory as well.

    Raises:
        typer.BadParameter: there is none at that place.
    """
    module, colon, name = place.partition(":")
    if not module or not colon or not name:
        raise typer.BadParameter(f"--idempotency takes MODULE:NAME, not {place!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        store = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"--idempotency: {error}") from error
    except Exception as error:  # the user's own code
        raise typer.BadParameter(
            f"--idempotency: importing {module!r} raised {type(error).__name__}: {error}"
        ) from error
    from reliable_mq.stores.protocol import ResettableStore

    if not isinstance(store, ResettableStore):
        raise typer.BadParameter(f"--idempotency: {place} is a {type(store).__name__}, which cannot reset attempts")
    return store


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"--header takes NAME=VALUE, not {text!r}")
    return name, value


def _age(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    from reliable_mq.deadletters.filter import age_in_seconds

    try:
        return age_in_seconds(text)
    except ConfigurationError as error:
        raise typer.BadParameter(f"{option} takes a number with s, m, h, d or w behind it, not {text!r}") from error
