"""The selection of dead letters, and counts by cause, queue of origin and age."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol

from reliable_mq._util.validation import Duration, check_collection, seconds
from reliable_mq.core.consumer.attempts import MESSAGE_LIMIT
from reliable_mq.deadletters.message import DeadMessage, Origin
from reliable_mq.errors import ConfigurationError

_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d+)?)([smhdw]?)")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def age_in_seconds(text: str) -> float:
    """Return the seconds of an age such as ``90``, ``15m``, ``2h``, ``7d`` or ``1w``.

    Raises:
        ConfigurationError: If the text is not an age.
    """
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigurationError(f"an age is a number with s, m, h, d or w behind it, not {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


class Filterable(Protocol):
    """The part of a `DeadMessage` that a filter reads."""

    exception_type: str
    reason: str
    message_id: str | None
    died_at: datetime | None

    @property
    def origin(self) -> Origin | None: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Conditions on dead letters. All must hold; without any, every message matches.

    Args:
        exception: The class of the last exception, with or without its module. ``*`` and ``?`` are wildcards, for
            example in ``"app.errors.*"``. A message without an exception, for example an expired one, does not match.
        reason: A text that the reason contains. Case is ignored.
        queue: The queue that the message was in before it died.
        message_ids: The message ids to match. An empty collection matches no message.
        fingerprints: The values of `DeadMessage.fingerprint` to match. Messages that are equal in every byte share a
            fingerprint. An empty collection matches no message.
        headers: The headers to match, as a mapping of names to values. A header that is not text is compared by its
            ``str()``, a byte string as UTF-8, and a boolean as ``true`` or ``false``.
        older_than: The minimum time since the message died, in seconds or as a timedelta. Messages with an unknown
            time of death do not match.
        newer_than: The maximum time since the message died, in seconds or as a timedelta. Messages with an unknown
            time of death do not match.

    Raises:
        ConfigurationError: If a value is invalid. The message names the field.
    """

    exception: str | None = None
    reason: str | None = None
    queue: str | None = None
    message_ids: Collection[str] | None = None
    fingerprints: Collection[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    older_than: Duration | None = None
    newer_than: Duration | None = None

    def __post_init__(self) -> None:
        for name in ("exception", "reason", "queue"):
            value: object = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigurationError(f"{name} must be text that is not empty, not {value!r}")
        for name in ("message_ids", "fingerprints"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "headers", _headers(self.headers))
        for name in ("older_than", "newer_than"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, seconds(name, getattr(self, name)))

    @property
    def everything(self) -> bool:
        """Whether the filter has no conditions."""
        return self == Filter()

    def matches(self, message: Filterable, now: datetime) -> bool:
        """Return whether a dead letter matches; ``now`` must be an aware datetime."""
        return (
            self._is_exception(message.exception_type)
            and (self.reason is None or self.reason.casefold() in message.reason.casefold())
            and (self.queue is None or (message.origin is not None and message.origin.queue == self.queue))
            and (self.message_ids is None or message.message_id in self.message_ids)
            and (self.fingerprints is None or message.fingerprint in self.fingerprints)
            and all(_shown(message.headers.get(name)) == value for name, value in self.headers.items())
            and self._is_of_age(message.died_at, now)
        )

    def _is_exception(self, name: str) -> bool:
        if self.exception is None:
            return True
        own = name.rpartition(".")[2]
        return bool(name) and (fnmatchcase(name, self.exception) or fnmatchcase(own, self.exception))

    def _is_of_age(self, died_at: datetime | None, now: datetime) -> bool:
        if self.older_than is None and self.newer_than is None:
            return True
        if died_at is None:
            return False
        age = (now - died_at) / timedelta(seconds=1)
        older, newer = self.older_than, self.newer_than
        return (older is None or age > seconds("older_than", older)) and (
            newer is None or age < seconds("newer_than", newer)
        )


def _texts(name: str, values: object) -> frozenset[str]:
    check_collection(name, values)
    texts: list[Any] = list(values) if isinstance(values, Iterable) else [values]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(f"{name} must be a collection of texts, not {values!r}")
    return frozenset(texts)


def _headers(values: object) -> dict[str, str]:
    if not isinstance(values, Mapping) or not all(isinstance(text, str) for pair in values.items() for text in pair):
        raise ConfigurationError(f"headers must be a mapping of texts to texts, not {values!r}")
    return dict(values)


def _shown(value: object) -> str | None:
    match value:
        case None:
            return None
        case str():
            return value
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case bool():
            return str(value).lower()
        case _:
            return str(value)


_AGES: Final = (
    ("up to a minute", timedelta(minutes=1)),
    ("up to an hour", timedelta(hours=1)),
    ("up to a day", timedelta(days=1)),
    ("up to a week", timedelta(weeks=1)),
)
_OLDER: Final = "older"
_UNKNOWN: Final = "unknown"

#: The age classes, the youngest first.
AGES: Final = (*(name for name, _ in _AGES), _OLDER, _UNKNOWN)


class Statistics:
    """Counts of dead letters. Not thread-safe.

    Attributes:
        messages: The number of messages.
        bytes: The total size of their bodies, in bytes.
        by_cause: The number of messages by exception class or, without an exception, by reason. Of a longer text, which
            only another program writes, the first 512 characters count.
        by_queue: The number of messages by the queue that they were in before; an empty name if unknown. The same
            applies to a longer name.
        by_age: The number of messages by the names in `AGES`.
        oldest, newest: The earliest and the latest known time of death; None if unknown.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.by_cause: Counter[str] = Counter()
        self.by_queue: Counter[str] = Counter()
        self.by_age: Counter[str] = Counter()
        self.oldest: datetime | None = None
        self.newest: datetime | None = None

    def add(self, message: DeadMessage, now: datetime) -> None:
        """Count a dead letter; ``now`` must be an aware datetime."""
        self.messages += 1
        self.bytes += len(message.body)
        self.by_cause[message.cause[:MESSAGE_LIMIT]] += 1
        self.by_queue["" if message.origin is None else message.origin.queue[:MESSAGE_LIMIT]] += 1
        died_at = message.died_at
        self.by_age[_age(died_at, now)] += 1
        if died_at is not None:
            self.oldest = died_at if self.oldest is None else min(self.oldest, died_at)
            self.newest = died_at if self.newest is None else max(self.newest, died_at)

    def __repr__(self) -> str:
        return f"<Statistics of {self.messages} dead letters>"


def _age(died_at: datetime | None, now: datetime) -> str:
    if died_at is None:
        return _UNKNOWN
    return next((name for name, longest in _AGES if now - died_at <= longest), _OLDER)
