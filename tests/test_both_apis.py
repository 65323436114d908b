"""Both APIs have the same names, arguments and defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import reliable_mq
from reliable_mq import Consumer, Publisher
from reliable_mq.aio.confirmation import AsyncConfirmation
from reliable_mq.aio.consumer import AsyncConsumer
from reliable_mq.aio.publisher import AsyncPublisher
from reliable_mq.engine.publisher_options import PublisherOptions
from reliable_mq.sync.confirmation import Confirmation

COROUTINES = ("publish", "submit", "publish_many", "flush", "connect", "close")


def test_the_asyncio_api_is_there_when_it_is_asked_for() -> None:
    assert reliable_mq.AsyncPublisher is AsyncPublisher
    assert reliable_mq.AsyncConfirmation is AsyncConfirmation
    assert {"AsyncPublisher", "AsyncConfirmation"} <= set(reliable_mq.__all__)
    with pytest.raises(AttributeError, match="AsyncNothing"):
        _ = reliable_mq.AsyncNothing


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_publishers_have_the_same_names() -> None:
    assert public(AsyncPublisher) == public(Publisher)
    assert public(AsyncConfirmation) == public(Confirmation)


@pytest.mark.parametrize("name", ["__init__", *COROUTINES])
def test_both_publishers_take_the_same_arguments_and_defaults(name: str) -> None:
    ours = inspect.signature(getattr(AsyncPublisher, name)).parameters
    theirs = inspect.signature(getattr(Publisher, name)).parameters
    assert list(ours) == list(theirs)
    for argument in ours.values():
        other = theirs[argument.name]
        assert (argument.kind, _plain(argument.default)) == (other.kind, _plain(other.default))


@pytest.mark.parametrize("name", COROUTINES)
def test_what_may_wait_is_a_coroutine(name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(AsyncPublisher, name))


def test_consumers_have_the_same_names() -> None:
    assert public(AsyncConsumer) == public(Consumer)


@pytest.mark.parametrize("name", ["__init__", "get", "run", "stop", "close", "connect"])
def test_both_consumers_take_the_same_arguments_and_defaults(name: str) -> None:
    ours = inspect.signature(getattr(AsyncConsumer, name)).parameters
    theirs = inspect.signature(getattr(Consumer, name)).parameters
    assert list(ours) == list(theirs)
    for argument in ours.values():
        other = theirs[argument.name]
        assert (argument.kind, _plain(argument.default)) == (other.kind, _plain(other.default))


@pytest.mark.parametrize("name", ["run", "close", "connect"])
def test_what_may_wait_of_a_consumer_is_a_coroutine(name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(AsyncConsumer, name))


def test_options_have_the_defaults_of_the_publisher() -> None:
    arguments = inspect.signature(Publisher.__init__).parameters
    for option in inspect.signature(PublisherOptions.__init__).parameters.values():
        if option.name in arguments and option.name not in {"self", "name"}:
            assert _plain(option.default) == _plain(arguments[option.name].default), option.name


@pytest.mark.parametrize(
    ("kind", "wrong", "guess"),
    [
        (Publisher, "max_oustanding", ": did you mean max_outstanding?"),
        (AsyncPublisher, "mandatry", ": did you mean mandatory?"),
        (Consumer, "prefetch_count", ": did you mean prefetch?"),
        (AsyncConsumer, "zzz", ""),
    ],
)
def test_an_error_for_arguments_names_the_public_class(kind: Any, wrong: str, guess: str) -> None:
    with pytest.raises(TypeError) as refused:
        kind("amqp://localhost/", **{wrong: 5})
    assert str(refused.value) == f"{kind.__name__}() got an unexpected keyword argument {wrong!r}{guess}"
    with pytest.raises(TypeError) as refused:
        kind()
    assert str(refused.value) == f"{kind.__name__}() missing a required argument: 'url'"


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Publisher, "publisher"), (AsyncPublisher, "publisher"), (Consumer, "consumer"), (AsyncConsumer, "consumer")],
)
def test_the_help_of_a_constructor_is_for_its_class(kind: Any, what: str) -> None:
    assert kind.__init__.__doc__.startswith(f"Create a {what}. Connects nothing.\n")
    assert kind.__init__.__name__ == "__init__"


def _plain(default: object) -> object:
    """Return a default that can be compared: a policy is compared by its repr."""
    return default if isinstance(default, str | int | float | bool | tuple | type(None)) else repr(default)
