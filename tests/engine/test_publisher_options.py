"""The options of a publisher: the error for a wrong one names it.

Messages that cannot be sent are refused.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.codec.methods import ConfirmSelect
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.engine.publisher_options import PublisherOptions
from reliable_mq.errors import ConfigurationError
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.retry import RetryPolicy

if TYPE_CHECKING:
    from pathlib import Path

FRAME_MAX = 131072


def options(**arguments: Any) -> PublisherOptions:
    return PublisherOptions("amqp://guest:guest@one,two/", **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_blocked", "drop"),
        ("on_disconnected", "drop"),
        ("retry", 3),
        ("name", ""),
        ("name", 7),
        ("name", "\ud800"),
        ("mandatory", 1),
        ("max_message_bytes", -1),
        ("max_message_bytes", True),
        ("max_message_bytes", "1"),
        ("max_outstanding", 0),
        ("max_outstanding_bytes", 0),
        ("confirm_timeout", 0),
        ("delivery_timeout", -1),
        ("topology", ["orders"]),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        options(**{name: value})


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("retry_on", RetryPolicy(3, retry_on=OSError)),
        ("give_up_on", RetryPolicy(3, give_up_on=OSError)),
        ("backend", RetryPolicy(3, backend="memory")),
        ("backend", RetryPolicy(3, backend="broker")),
    ],
)
def test_consumer_only_retry_settings_are_refused_by_name(name: str, policy: RetryPolicy) -> None:
    with pytest.raises(ConfigurationError, match=f"retry has {name}, which is for consumers"):
        options(retry=policy)
    assert options(retry=RetryPolicy(3, backend="queues"))


@pytest.mark.parametrize(("name", "text"), [("reconnect_wait", "wait"), ("reconnect_stop", "stop")])
def test_a_wrong_way_to_reconnect_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        options(**{name: 1})


def test_the_parts_fit_each_other() -> None:
    made = options(max_outstanding=5)
    assert (made.max_outstanding, made.window.max_count, made.raise_when_blocked) == (5, 5, False)
    assert options(on_blocked="raise").raise_when_blocked
    assert not made.raise_when_disconnected
    assert options(on_disconnected="raise").raise_when_disconnected
    assert made.settings.first_attempts_timeout == 2 * made.settings.connect_timeout + 1
    assert made.new_reconnect_policy() is not made.new_reconnect_policy()
    assert made.new_session(random.Random(1)).outstanding == 0
    assert list(made.setup(ServerInfo("RabbitMQ", "4.3.6", (4, 3, 6)))) == [ConfirmSelect()]


def test_an_outbox_contradicts_raising_while_disconnected(tmp_path: Path) -> None:
    """With an outbox, a message is stored even without a broker."""
    with pytest.raises(ConfigurationError, match="on_disconnected='raise' contradicts outbox"):
        options(on_disconnected="raise", outbox=SQLiteOutbox(tmp_path / "outbox.db"))
