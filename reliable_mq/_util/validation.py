"""Check users' arguments: numbers, durations, hosts, JSON, and paths for SQLite.

A constructor that passes its arguments on gets its signature from the class that declares them (`declared_by`).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import ipaddress
import json
import math
import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from stat import S_ISDIR
from types import FunctionType, MethodType
from typing import Any, Concatenate, Final, ParamSpec, TypeGuard

from reliable_mq.errors import ConfigurationError

P = ParamSpec("P")

Duration = float | timedelta

LONGEST_BUSY_TIMEOUT: Final = 2_000_000.0  # seconds, about three weeks; SQLite counts milliseconds in 32 bits
SHORT_STRING_BYTES: Final = 255  # of a name or routing key, which AMQP carries as a short string
LONGEST: Final = 1e9  # seconds, about thirty years: longer than a timer can be trusted with


def is_called_as(kind: Callable[[object], bool], function: object) -> bool:
    """Return whether a call runs a function of this ``kind``, as `inspect` finds it."""
    while isinstance(function, partial):  # perhaps of an object, whose method inspect does not look for
        function = function.func
    if isinstance(function, (FunctionType, MethodType)):
        return kind(function)
    return kind(function) or (callable(function) and kind(type(function).__call__))


def is_coroutine_function(function: object) -> bool:
    """Return whether ``function`` is a coroutine function, or is called as one."""
    return is_called_as(inspect.iscoroutinefunction, function)


def is_whole_number(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Return whether ``value`` is an int, not a bool, between two bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is an int or a float, not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_text(value: object) -> TypeGuard[str]:
    """Return whether ``value`` is a str that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_host(text: str) -> bool:
    """Return whether Python's sockets accept a host name, which may not exist.

    No part between the dots of such a name is empty or longer than 63 characters, and no character is a NUL.
    """
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text) and "\0" not in text


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address, or None if the text is none.

    An IPv4-mapped address, such as ``::ffff:127.0.0.1``, is the IPv4 address in it.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def whole_number(field: str, value: object, least: int, most: int | None = None, *, unit: str = "") -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``most``.

    Errors name the value ``field``, and show ``unit`` after the bounds.

    Raises:
        ConfigurationError: If ``value`` is not an int, is a bool, or is out of bounds.
    """
    if is_whole_number(value, least, math.inf if most is None else most):
        return value
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ConfigurationError(f"{field} must be a whole number {limits}{unit and f' ({unit})'}, not {value!r}")


def fraction(field: str, value: object) -> float:
    """Return ``value`` if it is a number from 0 to 1. Errors name it ``field``."""
    if is_number(value) and 0 <= value <= 1:
        return float(value)
    raise ConfigurationError(f"{field} must be a number from 0 to 1, not {value!r}")


def check_flag(field: str, value: object) -> None:
    """Check that ``value`` is True or False. Errors name it ``field``."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{field} must be True or False, not {value!r}")


def check_collection(field: str, value: object) -> None:
    """Check that ``value`` is not one text, which is also a sequence of texts."""
    if isinstance(value, str):
        raise ConfigurationError(f"{field} must be a collection: write [{value!r}]")


def seconds(field: str, value: Duration, *, positive: bool = False) -> float:
    """Return a duration in seconds. Errors name it ``field``.

    Raises:
        ConfigurationError: If ``value`` is not a duration, negative, over 1e9 seconds, or 0 despite ``positive``.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not (is_number(number) and 0 <= number <= LONGEST) or (positive and number == 0):
        least = "above 0" if positive else "from 0"
        raise ConfigurationError(f"{field} must be a number of seconds {least} to 1e9, or a timedelta, not {value!r}")
    return float(number)


def lock_timeout(timeout: float) -> int:
    """Return PostgreSQL's ``lock_timeout`` in milliseconds for a call's timeout.

    The wait for a lock ends a little before ``timeout`` seconds. While it lasts, PostgreSQL does not notice that its
    client is gone, and abandoned connections would pile up until it refuses new ones.
    """
    return max(int(0.9 * min(timeout, LONGEST_BUSY_TIMEOUT) * 1000), 1)


def missing_extra(name: str, extra: str, error: ImportError) -> ConfigurationError:
    """Return the error for a class whose optional dependencies are not installed."""
    return ConfigurationError(f"{name} needs more ({error}): pip install 'reliable-mq[{extra}]'")


_JSON_DEEPEST: Final = 500  # levels
_NO_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^][{}"]+', re.DOTALL)


def decode_json(text: str | bytes, **options: Any) -> Any:
    """Decode JSON that may come from anybody. ``options`` are those of `json.loads`.

    Raises:
        ValueError: If the text is not JSON.
        RecursionError: If it has more than 500 levels. Python's decoder would raise that at the end of the stack. A
            garbage collection that runs down there cannot call destructors.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if text.count("[") + text.count("{") > _JSON_DEEPEST:
        depth = deepest = 0
        for bracket in _NO_BRACKETS.sub("", text):
            depth += 1 if bracket in "[{" else -1
            deepest = max(deepest, depth)
        if deepest > _JSON_DEEPEST:
            raise RecursionError(f"JSON of {deepest} levels")
    return json.loads(text, **options)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; for use as a hook of `decode_json`.

    Raises:
        ConfigurationError: If two keys are equal. Python itself would keep the last one.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"the key {twice!r} occurs twice; remove one")
    return found


def file_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file, which need not exist.

    Raises:
        ConfigurationError: If the path is a directory, is invalid, or would make SQLite keep the data in memory.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(given, str) and given and "\0" not in given and not given.startswith((":memory:", "file:")):
        found = Path(given)
        try:
            is_directory = S_ISDIR(found.stat().st_mode)  # is_dir() raises no error from Python 3.14 on
        except (FileNotFoundError, NotADirectoryError):
            is_directory = False
        except (OSError, UnicodeEncodeError) as error:
            raise ConfigurationError(f"path cannot be the path of a file: {error}") from error
        if not is_directory:
            return found
    raise ConfigurationError(f"path must be the path of a file, not {given!r}")


def declared_by(
    declaration: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[Concatenate[Any, P], None]], Callable[Concatenate[Any, P], None]]:
    """Decorate a constructor with the signature and docstring of ``declaration``.

    Type checkers, ``help()`` and `inspect.signature` then show these. A `TypeError` for the arguments names the class
    of the object, and the argument that was perhaps meant.
    """
    signature = inspect.signature(declaration)

    def decorate(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(declaration, assigned=("__doc__",), updated=())
        @functools.wraps(method)
        def constructor(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                mistake = str(error)
                for unknown in kwargs.keys() - signature.parameters.keys():
                    near = difflib.get_close_matches(unknown, signature.parameters, n=1)
                    guess = f": did you mean {near[0]}?" if near else ""
                    mistake = f"got an unexpected keyword argument {unknown!r}{guess}"
                raise TypeError(f"{type(self).__name__}() {mistake}") from None
            method(self, *args, **kwargs)

        return constructor

    return decorate
