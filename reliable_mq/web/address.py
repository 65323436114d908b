"""The filter of a page, as an address, a form, words, and a `Filter`.

The fields are named like the options of ``reliable-mq dlq``, which has no ``group``: the letters of one exception and
one reason, as a page groups them. The text of a header or a reason passes through an address unchanged, even if it
holds bytes that are not UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, Self
from urllib.parse import parse_qsl, urlencode

from reliable_mq.core.consumer.attempts import MESSAGE_LIMIT
from reliable_mq.deadletters import Filter
from reliable_mq.deadletters.filter import Filterable, age_in_seconds
from reliable_mq.errors import ConfigurationError

_MOST_FIELDS: Final = 2000
_SINGLE: Final = frozenset({"exception", "reason", "from-queue", "older-than", "newer-than", "group"})
_WORDS: Final = {
    "exception": "exception {}",
    "reason": "reason with “{}”",
    "from-queue": "from queue {}",
    "message-id": "message id {}",
    "header": "header {}",
    "older-than": "older than {}",
    "newer-than": "newer than {}",
}
#: The fields of a filter.
FIELDS: Final = (*_WORDS, "letter", "group")
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Fields:
    """The decoded fields of an address or a form.

    Raises:
        ConfigurationError: If there are too many fields.
    """

    def __init__(self, query: bytes | str) -> None:
        text = query.decode("ascii", "surrogateescape") if isinstance(query, bytes) else query
        try:
            self.pairs = parse_qsl(
                text, keep_blank_values=True, errors="surrogateescape", max_num_fields=_MOST_FIELDS, separator="&"
            )
        except ValueError as error:
            raise ConfigurationError(f"a form has at most {_MOST_FIELDS} fields") from error

    def get(self, name: str, default: str = "") -> str:
        """Return the last value of a field, without surrounding spaces."""
        return self.typed(name, default).strip()

    def typed(self, name: str, default: str = "") -> str:
        """Return the last value of a field as it was typed."""
        found = self.all(name)
        return found[-1] if found else default

    def all(self, name: str) -> list[str]:
        """Return all values of a field."""
        return [value for key, value in self.pairs if key == name]

    def number(self, name: str, *, least: int = 1, most: int = 10**9) -> int | None:
        """Return the whole number in a field, or None if the field is empty.

        Raises:
            ConfigurationError: If the value is not a whole number or is out of range.
        """
        text = self.get(name)
        if not text:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most):
            raise ConfigurationError(f"{name} must be a whole number from {least} to {most}, not {text!r}")
        return int(text)


def group_of(message: Filterable) -> tuple[str, str]:
    """Return the exception and the reason of a letter, as far as a page lists them."""
    return message.exception_type[:MESSAGE_LIMIT], message.reason[:MESSAGE_LIMIT]


@dataclass(frozen=True, kw_only=True)
class _GroupFilter(Filter):
    """A filter for the letters of one group."""

    group: tuple[str, str]

    def matches(self, message: Filterable, now: datetime) -> bool:
        return group_of(message) == self.group and super().matches(message, now)


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection of dead letters, for a page to show or an operation to process."""

    pairs: tuple[tuple[str, str], ...]
    filter: Filter

    @classmethod
    def of(cls, fields: Fields, *others: str) -> Self:
        """Read the fields of a filter. Empty fields and the fields `others` are ignored.

        Any other field is an error: without a misspelt field, the filter would select more letters than the user means.

        Raises:
            ConfigurationError: If a field is invalid. The message names the field.
        """
        for name, _ in fields.pairs:
            if name not in FIELDS and name not in others:
                raise ConfigurationError(f"{name!r} is not a field of a filter: the fields are {', '.join(FIELDS)}")
        return cls.of_pairs(fields.pairs)

    @classmethod
    def of_pairs(cls, given: Iterable[tuple[str, str]]) -> Self:
        """Read pairs of field and value. Raises the same errors as `of`."""
        pairs = tuple((name, value) for name, value in given if name in FIELDS and value.strip())
        single: dict[str, str] = {}
        for name, value in ((name, value.strip()) for name, value in pairs if name in _SINGLE):
            if name in single:
                raise ConfigurationError(f"{name} is given twice: a filter has only one")
            single[name] = value
        headers: dict[str, str] = {}
        for header, value in (_header(value) for name, value in pairs if name == "header"):
            if header in headers:
                raise ConfigurationError(f"header {header!r} is named twice")
            headers[header] = value
        make = partial(_GroupFilter, group=_group(single["group"])) if "group" in single else Filter
        made = make(
            exception=single.get("exception"),
            reason=single.get("reason"),
            queue=single.get("from-queue"),
            message_ids=[value.strip() for name, value in pairs if name == "message-id"] or None,
            fingerprints=[value for name, value in pairs if name == "letter"] or None,
            headers=headers,
            older_than=_age("older-than", single),
            newer_than=_age("newer-than", single),
        )
        return cls(pairs, made)

    def query_of_group(self, exception: str, reason: str) -> str:
        """Return the query that selects one group of these letters."""
        others = [pair for pair in self.pairs if pair[0] != "group"]
        return encoded([*others, ("group", encoded([("exception", exception), ("reason", reason)]))])

    @property
    def everything(self) -> bool:
        return not self.pairs

    @property
    def selected(self) -> int:
        """The number of dead letters that are selected one by one."""
        return sum(name == "letter" for name, _ in self.pairs)

    @property
    def query(self) -> str:
        return encoded(self.pairs)

    @property
    def values(self) -> Mapping[str, str]:
        """The values for a form: the last value of each field."""
        return dict(self.pairs)

    @property
    def group(self) -> str:
        """The group in words, empty if the letters may be of several."""
        if not isinstance(self.filter, _GroupFilter):
            return ""
        exception, reason = self.filter.group
        return f"{exception or 'no exception'} · {reason or 'reason unknown'}"

    @property
    def words(self) -> str:
        parts = [_WORDS[name].format(value) for name, value in self.pairs if name in _WORDS]
        if self.selected:
            parts.insert(0, "1 selected letter" if self.selected == 1 else f"{self.selected} selected letters")
        if self.group:
            parts.append(f"group {self.group}")
        return ", ".join(parts) or "all letters"


def encoded(pairs: Iterable[tuple[str, str]]) -> str:
    return urlencode([*pairs], errors="surrogateescape")


def exactly(when: datetime) -> str:
    """Format a time for people, like ``2026-11-23 06:41:07 UTC``."""
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def ago(when: datetime, now: datetime) -> str:
    """Format an age in its two largest units, like ``3 h 12 min ago``."""
    seconds = (now - when) // timedelta(seconds=1)
    if seconds < 0:
        return "in the future"
    for place, (size, unit) in enumerate(_UNITS):
        if seconds >= size and unit != "s":
            rest_size, rest_unit = _UNITS[place + 1]
            rest = seconds % size // rest_size
            return f"{seconds // size} {unit} {rest} {rest_unit} ago" if rest else f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _group(text: str) -> tuple[str, str]:
    match Fields(text).pairs:
        case [("exception", exception), ("reason", reason)]:
            return exception, reason
    raise ConfigurationError(f"group must be an exception and a reason, as in the link of a group, not {text!r}")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise ConfigurationError(f"header must be NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()


def _age(name: str, values: Mapping[str, str]) -> float | None:
    if name not in values:
        return None
    try:
        return age_in_seconds(values[name])
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error
