"""The renewer of tokens, with a slow callback and a controlled clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.codec.methods import UPDATE_SECRET, encode_update_secret
from reliable_mq.connection import token_renewer as renewer_module
from reliable_mq.connection.token_renewer import TokenRenewer
from reliable_mq.core.reconnect import ConnectionLoss, CredentialsCalls
from reliable_mq.core.statistics import TokenStatistics
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from tests.connection.test_connector import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_TIMEOUT = 2.0
LIFETIME = 3600.0
RENEWED_AFTER = 0.6 * LIFETIME


class Renewal:
    """A renewer of an open connection, whose callback takes a while for each token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: float, token: str = "next") -> None:
        self.loop = Loop()
        self.loop.on_error = pytest.fail  # type: ignore[assignment]
        self.sent: list[bytes] = []
        self.discarded: list[str] = []
        self.unsent = 0  # bytes

        def call(_name: str, fn: Callable[[], Any], done: Callable[[Any], None]) -> None:
            self.loop.call_later(takes, lambda: done(fn()))

        monkeypatch.setattr(renewer_module, "time", SimpleNamespace(monotonic=lambda: self.loop.now))
        monkeypatch.setattr(renewer_module, "call_in_background", call)
        self.renewer = TokenRenewer(
            "test",
            self.loop,
            ConnectionSettings(
                endpoints=(Endpoint("one", 1),),
                credentials=lambda: Credentials("guest", token, LIFETIME),
                connect_timeout=CONNECT_TIMEOUT,
            ),
            CredentialsCalls(0.9 * CONNECT_TIMEOUT),
            discard=self.discarded.append,
            is_blocked=lambda: False,
            unneeded=lambda: None,
        )
        self.renewer.credentials_read(Credentials("guest", "first", LIFETIME))
        self.link: Any = SimpleNamespace(
            frame_max=8192, write=self.sent.append, bytes_received=0, write_buffer_size=lambda: self.unsent
        )
        self.renewer.connected(self.link)


def test_a_token_that_comes_after_connect_timeout_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    renewal = Renewal(monkeypatch, takes=CONNECT_TIMEOUT + 1.0)
    renewal.loop.pass_time(RENEWED_AFTER + CONNECT_TIMEOUT)
    assert renewal.renewer.statistics == TokenStatistics(failed=1)
    renewal.loop.pass_time(1.0)
    assert renewal.sent == [encode_update_secret("next", "the token expires")]
    renewal.renewer.accepted()
    assert renewal.renewer.statistics == TokenStatistics(accepted=1, failed=1)
    renewal.loop.pass_time(RENEWED_AFTER + CONNECT_TIMEOUT)
    assert renewal.renewer.statistics == TokenStatistics(accepted=1, failed=2)


@pytest.mark.parametrize(
    ("code", "over", "refused"),
    [(530, UPDATE_SECRET, True), (403, UPDATE_SECRET, True), (320, (0, 0), False), (541, (60, 40), False)],
    ids=["refusal", "another", "shutdown", "failure"],
)
def test_only_a_close_over_the_new_token_refuses_it(
    monkeypatch: pytest.MonkeyPatch, code: int, over: tuple[int, int], refused: bool
) -> None:
    renewal = Renewal(monkeypatch, takes=0.1)
    renewal.loop.pass_time(RENEWED_AFTER + 0.2)
    assert len(renewal.sent) == 1
    assert renewal.renewer.lost(ConnectionLoss(code, "text", "connection", by_broker=True, over=over)) is refused
    assert renewal.renewer.statistics == TokenStatistics(refused=int(refused))


def test_a_call_that_fails_after_connect_timeout_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    too_large = "x" * 8192
    renewal = Renewal(monkeypatch, takes=CONNECT_TIMEOUT + 1.0, token=too_large)
    renewal.loop.pass_time(RENEWED_AFTER + CONNECT_TIMEOUT + 2.0)
    assert renewal.renewer.statistics == TokenStatistics(failed=1)
    assert not renewal.sent


@pytest.mark.parametrize("direction", ["out", "in"])
def test_an_update_may_wait_behind_other_data_on_a_slow_network(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """A large message takes longer than ``connect_timeout``."""
    renewal = Renewal(monkeypatch, takes=0.0)
    renewal.loop.pass_time(RENEWED_AFTER)
    assert len(renewal.sent) == 1
    for _ in range(3):
        renewal.unsent = 10_000 if direction == "out" else 0
        renewal.link.bytes_received += 10_000 if direction == "in" else 100  # heartbeats
        renewal.loop.pass_time(CONNECT_TIMEOUT)
    assert renewal.discarded == []
    renewal.unsent = 0
    renewal.loop.pass_time(CONNECT_TIMEOUT)
    assert renewal.discarded == ["connection.update-secret was not answered within 2 s"]
