"""Connection settings: ranges, credentials, and hidden secrets."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from datetime import timedelta
from typing import Any

import pytest

from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from reliable_mq.tls import TLSOptions

CANARY = "canary-of-the-password"
HERE = (Endpoint("localhost", 5672),)


def settings(**options: Any) -> ConnectionSettings:
    return ConnectionSettings(**{"endpoints": HERE, "credentials": Credentials("u", CANARY), **options})


def test_no_text_of_the_settings_shows_a_secret() -> None:
    callback = functools.partial(tuple, ["u", CANARY])
    for credentials in (Credentials("u", CANARY), callback):
        made = settings(credentials=credentials, tls=TLSOptions(cert_file="c", key_password=CANARY))
        for text in (repr(made), str(made), f"{made}", repr([made]), repr(made.resolve_credentials())):
            assert CANARY not in text


def test_str_is_a_url_without_user_and_options() -> None:
    made = settings(endpoints=(Endpoint("a", 1), Endpoint("::1", 2)), virtual_host="x/y", tls=TLSOptions())
    assert str(made) == "amqps://a:1,[::1]:2/x%2Fy"
    assert str(settings()) == "amqp://localhost:5672/%2F"


def test_settings_are_values() -> None:
    assert settings() == settings()
    assert hash(settings()) == hash(settings())
    assert pickle.loads(pickle.dumps(settings())) == copy.deepcopy(settings()) == settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().heartbeat = 7


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("LocalHost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("localhost.example", False),
        ("0.0.0.0", False),
    ],
)
def test_loopback_is_known_without_a_resolver(host: str, loopback: bool) -> None:
    assert Endpoint(host, 5672).is_loopback is loopback


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoints": ()}, "endpoints is empty"),
        ({"endpoints": HERE * 2}, "localhost:5672 is given twice"),
        ({"virtual_host": ""}, "virtual_host must be text"),
        ({"virtual_host": "é" * 128}, "virtual_host has 256 bytes"),
        ({"virtual_host": "v" * 128}, "virtual_host has 128 characters; 127 is the most"),
        ({"virtual_host": 5}, "virtual_host must be text"),
        ({"virtual_host": "\udcff"}, "virtual_host must be text that UTF-8 can carry"),
        ({"tls": True}, "tls must be TLSOptions, not bool"),
        ({"credentials": None}, "credentials must be"),
        ({"credentials": ("u", CANARY)}, "credentials must be Credentials or a callable, not tuple"),
        ({"mechanism": "plain"}, "mechanism must be"),
        ({"mechanism": "EXTERNAL", "tls": TLSOptions(cert_file="c")}, "leave credentials out"),
        ({"mechanism": "EXTERNAL", "credentials": None}, "needs TLS with a client certificate"),
        ({"mechanism": "EXTERNAL", "credentials": None, "tls": TLSOptions()}, "needs TLS with a client certificate"),
        ({"heartbeat": 0}, "heartbeat must be .* cannot be switched off"),
        ({"heartbeat": 65535}, "heartbeat must be a whole number from 1 to 65534"),
        ({"heartbeat": 20.0}, "heartbeat must be"),
        ({"heartbeat": True}, "heartbeat must be"),
        ({"connect_timeout": 0}, "connect_timeout must be"),
        ({"connect_timeout": float("nan")}, "connect_timeout must be"),
        ({"connect_timeout": "10"}, "connect_timeout must be"),
        ({"connection_name": ""}, "connection_name must be"),
        ({"connection_name": "n" * 256}, "connection_name has 256 bytes"),
        ({"frame_max": 8191}, "frame_max must be a whole number from 8192 to 131072"),
        ({"frame_max": 0}, "frame_max must be"),
        ({"frame_max": 131073}, "frame_max must be"),
        ({"channel_max": 0}, "channel_max must be"),
        ({"channel_max": 65536}, "channel_max must be"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        settings(**options)
    assert CANARY not in str(caught.value)


def test_a_timeout_given_as_a_timedelta_is_kept_in_seconds() -> None:
    assert settings(connect_timeout=timedelta(seconds=5)).first_attempts_timeout == 6.0


@pytest.mark.parametrize(("host", "port"), [("", 1), (None, 1), ("h", 0), ("h", 65536), ("h", "5672")])
def test_an_endpoint_is_a_host_and_a_port(host: Any, port: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"host|port"):
        Endpoint(host, port)


@pytest.mark.parametrize(
    ("username", "password", "message"),
    [
        ("u", "", "password of user 'u' is empty"),
        ("u", None, "password must be text"),
        (None, CANARY, "username must be text"),
        ("u", CANARY.encode(), "password must be text, not bytes"),
        ("u\0", CANARY, "username holds a NUL"),
        ("u", CANARY + "\0", "password holds a NUL"),
        ("u\udcff", CANARY, "username holds bytes that are not UTF-8"),
        ("u", CANARY + "\udcff", "password holds bytes that are not UTF-8"),
    ],
)
def test_credentials_that_sasl_cannot_carry_are_refused(username: Any, password: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Credentials(username, password)
    assert CANARY not in str(caught.value)


def test_a_token_needs_no_user_name() -> None:
    assert Credentials("", CANARY).username == ""


def test_the_callback_is_asked_every_time() -> None:
    passwords = iter(["first", "second", "third"])
    made = settings(credentials=lambda: ("u", next(passwords)))
    assert [made.resolve_credentials() for _ in range(2)] == [Credentials("u", "first"), Credentials("u", "second")]
    assert settings(credentials=lambda: Credentials("v", "w")).resolve_credentials() == Credentials("v", "w")


def test_the_first_attempts_include_callbacks_and_files() -> None:
    options: dict[str, Any] = {"endpoints": (Endpoint("one", 1), Endpoint("two", 2)), "connect_timeout": 5.0}
    for credentials, tls, seconds in (
        (Credentials("u", "p"), None, 11.0),
        (Credentials("u", "p"), TLSOptions(), 21.0),
        (lambda: ("u", "p"), None, 21.0),
    ):
        settings = ConnectionSettings(credentials=credentials, tls=tls, **options)
        assert settings.first_attempts_timeout == seconds


@pytest.mark.parametrize(("heartbeat", "seconds"), [(1, 12), (20, 52), (60, 152)])
def test_the_time_until_a_silent_broker_is_noticed(heartbeat: int, seconds: int) -> None:
    assert settings(heartbeat=heartbeat).silence_noticed_within == seconds


def test_static_credentials_stay_and_external_has_none() -> None:
    assert settings().resolve_credentials() == Credentials("u", CANARY)
    external = settings(mechanism="EXTERNAL", credentials=None, tls=TLSOptions(cert_file="c"))
    assert external.resolve_credentials() is None


def test_what_the_callback_raises_is_wrapped_without_its_text() -> None:
    def fail() -> tuple[str, str]:
        raise LookupError(CANARY)

    with pytest.raises(BrokerUnavailable, match="the credentials callback raised LookupError") as caught:
        settings(credentials=fail).resolve_credentials()
    assert isinstance(caught.value.__cause__, LookupError)
    assert not caught.value.permanent
    assert CANARY not in str(caught.value)


def test_the_callback_may_make_credentials_that_are_refused() -> None:
    """The error names the expired token, and the callback is called again."""
    with pytest.raises(BrokerUnavailable, match=r"raised ConfigurationError: expires_in must be .*, not -3") as caught:
        settings(credentials=lambda: Credentials("u", CANARY, expires_in=-3)).resolve_credentials()
    assert not caught.value.permanent
    assert CANARY not in str(caught.value)


def test_the_callback_may_return_a_password_that_is_refused() -> None:
    """A file may be empty while it is replaced, and the callback is called again."""
    answers = [("u", ""), ("u", "p\0"), ("u", "p")]
    asked = settings(credentials=lambda: answers.pop(0))
    for text in ("the password of user 'u' is empty", "password holds a NUL"):
        with pytest.raises(BrokerUnavailable, match=text) as caught:
            asked.resolve_credentials()
        assert not caught.value.permanent
    assert asked.resolve_credentials() == Credentials("u", "p")


def test_a_token_in_the_place_of_its_lifetime_is_not_shown() -> None:
    expires_in: Any = CANARY
    with pytest.raises(ConfigurationError, match="expires_in must be a number of seconds") as caught:
        Credentials("u", "p", expires_in)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("answer", [None, CANARY, ["u", CANARY], ("u", CANARY, "x"), ("u", None)])
def test_a_callback_that_returns_no_credentials_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"callback must return|must be text") as caught:
        settings(credentials=lambda: answer).resolve_credentials()
    assert CANARY not in str(caught.value)


class AskAsync:
    async def __call__(self) -> tuple[str, str]:
        return "u", "p"


@pytest.mark.parametrize("ask", [AskAsync().__call__, AskAsync(), functools.partial(AskAsync())])
def test_a_coroutine_function_is_refused_as_callback(ask: Any) -> None:
    with pytest.raises(ConfigurationError, match="coroutine function"):
        settings(credentials=ask)
