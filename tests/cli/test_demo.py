"""The demo without a broker: outages, events, progress display, and the account."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from reliable_mq.cli.app import app
from reliable_mq.cli.demo import display
from reliable_mq.cli.demo.display import BrokerStatus, DemoResult, LinesDisplay, LiveDisplay, Story, display_for
from reliable_mq.cli.demo.scenario import BrokerState, Outages, Progress, Shop, fails_once, is_poison
from reliable_mq.testing.audit import Audit
from reliable_mq.url import parse_url

RUNNING, KILLED, STARTING = BrokerState.RUNNING, BrokerState.KILLED, BrokerState.STARTING


def progress(**counts: int) -> Progress:
    names = ("published", "confirmed", "handled", "dead_lettered", "retried", "republished", "duplicates")
    return Progress(**{**dict.fromkeys(names, 0), **counts})


def test_1_order_in_50_fails_once_and_1_in_500_always_fails() -> None:
    assert sum(map(fails_once, range(1000))) == 20
    assert sum(map(is_poison, range(1000))) == 2
    assert not any(fails_once(number) and is_poison(number) for number in range(1000))


@pytest.mark.parametrize("options", [["--kill-command", "true"], ["--restart-command", "true"]])
def test_a_broker_that_is_killed_has_to_be_started_again(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *options])
    assert result.exit_code == 2
    assert "go together" in result.output


def test_the_password_may_come_from_the_environment() -> None:
    for password, reason in (({"RELIABLE_MQ_PASSWORD": "p"}, "Connection refused"), ({}, "has no password")):
        result = CliRunner().invoke(app, ["demo", "--url", "amqp://u@127.0.0.1:1/"], env=password)
        assert reason in str(result.exception)


# -- a broker that stays away ------------------------------------------------------------------------------------------


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A shop whose broker is gone when the demo ends."""
    url = "amqp://guest:guest@127.0.0.1:1/"
    shop = Shop(url, parse_url(url), orders=10, rate=0)
    shop.broker = "RabbitMQ"
    shop.audit.attempted("1")
    shop.audit.confirmed("1")

    def enter(shop: Shop) -> Shop:
        shop._open.callback(shop._take_down)
        return shop

    monkeypatch.setattr(Shop, "__enter__", enter)
    return shop


def test_a_broker_that_stays_away_hides_no_failed_command(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outages = Outages("true", "false", times=1)

    def watch(*_: object) -> None:
        outages.advance(1.0, connected=True)

    monkeypatch.setattr(display, "_watch", watch)
    assert display.run(shop, outages, "h") == 1
    told = capsys.readouterr().err
    assert "'false' failed with status 1" in told
    assert f"{shop.queues[0]} and {shop.queues[1]} are not deleted: 127.0.0.1:1" in told
    assert "of 1 confirmed 0 were handled" in told
    assert "lost" not in told


def test_a_broker_that_stays_away_hides_no_reason(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "_watch", lambda *_: "no progress for 120 s")
    assert display.run(shop, Outages(None, None, times=0), "h") == 1
    assert "reliable-mq: no progress for 120 s" in capsys.readouterr().err


def test_ctrl_c_during_an_outage_has_its_status(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(display, "_watch", watch)
    assert display.run(shop, Outages(None, None, times=0), "h") == 130


# -- outages -----------------------------------------------------------------------------------------------------------


def touching(path: Path) -> str:
    return f"{sys.executable} -c \"import pathlib; pathlib.Path({str(path)!r}).open('a').write('x')\""


def test_the_broker_is_killed_midway_and_started_again(tmp_path: Path) -> None:
    outages = Outages(touching(tmp_path / "killed"), touching(tmp_path / "started"), times=1)
    outages.advance(0.49, connected=True)
    outages.advance(0.9, connected=False)
    assert (outages.done, outages.state, outages.pending) == (0, RUNNING, True)
    outages.advance(0.5, connected=True)
    outages.end()
    assert (tmp_path / "killed").read_text() == (tmp_path / "started").read_text() == "x"
    assert (outages.done, outages.state) == (1, STARTING)
    outages.advance(0.6, connected=False)
    assert outages.state is STARTING
    outages.advance(1.0, connected=True)
    assert (outages.done, outages.state, outages.pending) == (1, RUNNING, False)


def test_no_outage_occurs_without_commands_or_after_the_end() -> None:
    none = Outages(None, None, times=2)
    none.advance(1.0, connected=True)
    assert (none.done, none.pending) == (0, False)
    ended = Outages("false", "false", times=2)
    ended.end()
    ended.advance(1.0, connected=True)
    assert ended.done == 0


@pytest.mark.parametrize(
    ("command", "why"),
    [("false", "'false' failed with status 1"), ("no-such-program", "No such file"), ("'", "No closing quotation")],
)
def test_a_command_that_fails_ends_it(command: str, why: str) -> None:
    outages = Outages(command, "true", times=1)
    outages.advance(1.0, connected=True)
    outages.end()
    assert why in (outages.failure or "")
    assert not outages.pending


# -- events and progress -----------------------------------------------------------------------------------------------


def events(
    story: Story, time: float, *, broker: BrokerState = RUNNING, connected: bool = True, blocked: str | None = None,
    outstanding: int = 0, republished: int = 0,
) -> list[str]:  # fmt: skip
    status = BrokerStatus(broker, connected, connected, blocked)
    return story.events(time, status, outstanding=outstanding, republished=republished)


def test_the_story_of_an_outage() -> None:
    story = Story()
    assert events(story, 0) == []
    assert events(story, 1) == []
    assert events(story, 2, broker=KILLED, outstanding=1200) == ["the broker is killed, with 1,200 orders unconfirmed"]
    assert events(story, 3, broker=KILLED, connected=False, outstanding=1300) == []
    assert events(story, 4, broker=STARTING, connected=False) == []
    assert events(story, 8.5, republished=1300) == ["connected again after 5.5 s, 1,300 orders published again"]


def test_the_story_reports_a_lost_connection_and_an_alarm() -> None:
    story = Story()
    events(story, 0)
    assert events(story, 1, connected=False, outstanding=3) == ["the connection is lost, with 3 orders unconfirmed"]
    events(story, 2)
    assert events(story, 3, blocked="low on memory") == ["the broker blocks publishing: low on memory"]
    assert events(story, 4) == ["the broker accepts publishes again"]


def text_console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=terminal, color_system=None), out


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    console, out = text_console()
    with display_for(console, "10 orders", 10) as display:
        assert isinstance(display, LinesDisplay)
        display.update(0.0, progress(published=3), BrokerStatus(RUNNING, True, True, None))
        display.update(1.0, progress(published=4), BrokerStatus(RUNNING, True, True, None))
        display.tell(1.5, "the broker is [killed]")
        display.update(62.0, progress(published=9, confirmed=8, duplicates=1), BrokerStatus(KILLED, False, True, None))
    counts = "retried 0  dead-lettered 0  duplicates"
    assert out.getvalue().splitlines() == [
        "10 orders",
        f"00:00  published 3  confirmed 0  handled 0  {counts} 0  publisher connected  consumer connected",
        "00:01  the broker is [killed]",
        f"01:02  published 9  confirmed 8  handled 0  {counts} 1  publisher reconnecting  consumer connected",
    ]


def test_on_a_terminal_it_is_drawn_in_place() -> None:
    console, out = text_console(terminal=True)
    with display_for(console, "10 orders", 10) as display:
        assert isinstance(display, LiveDisplay)
        display.update(0.0, progress(), BrokerStatus(RUNNING, True, True, None))
        display.tell(1.0, "the broker is [killed]")
        display.update(1.0, progress(published=9, confirmed=8), BrokerStatus(KILLED, False, True, "low on memory"))
    last = out.getvalue()[-1500:]
    for text in ("✘ broker killed", "publisher blocked: low on memory", "8/s", "00:01  the broker is [killed]"):
        assert text in last


# -- the account -------------------------------------------------------------------------------------------------------


def account(*, confirmed: str = "abc", handled: str = "ab", dead: str = "c", left: str = "") -> Audit:
    made = Audit()
    for message_id in "abc":
        made.attempted(message_id)
    for message_id in confirmed:
        made.confirmed(message_id)
    for message_id in handled:
        made.effect(message_id)
        made.handled(message_id)
    made.dead_lettered(list(dead))
    made.left(list(left))
    return made


def verdict(made: Audit, outages: int = 1) -> DemoResult:
    return DemoResult(made.balance(), progress(retried=4, republished=7, duplicates=2), outages, 12.3)


def shown(what: DemoResult) -> str:
    console, out = text_console()
    console.print(what)
    return out.getvalue()


def test_an_account_that_adds_up() -> None:
    good = verdict(account())
    assert good.faults == []
    assert good.equation == "confirmed 3 = handled 2 + dead-lettered 1, lost 0"
    text = shown(good)
    assert "The broker was killed once. 4 failed attempts were tried again, 2 duplicates were set aside" in text
    assert text.rstrip().endswith("✔ confirmed 3 = handled 2 + dead-lettered 1, lost 0")
    assert "killed 2 times" in shown(verdict(account(), 2))
    assert "killed" not in shown(verdict(account(), 0))


def test_an_unconfirmed_message_that_arrived_is_named() -> None:
    good = verdict(account(confirmed="ab"))
    assert good.faults == []
    assert good.equation == "confirmed 2 + 1 unconfirmed, yet arrived = handled 2 + dead-lettered 1, lost 0"


def test_an_account_without_a_handled_message_may_add_up() -> None:
    assert verdict(account(confirmed="c", handled="")).faults == []


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (account(handled="a"), "lost: b"),
        (account(handled="aab"), "more than one effect: a"),
        (account(handled="a", left="b"), "1 orders are left"),
    ],
)
def test_an_account_that_does_not_add_up_says_why(made: Audit, fault: str) -> None:
    bad = verdict(made)
    assert any(fault in each for each in bad.faults)
    assert "✘ confirmed 3" in shown(bad)


def test_an_account_that_was_closed_early_names_what_is_left() -> None:
    assert verdict(account(handled="a", left="b")).so_far == (
        "of 3 confirmed 1 were handled, 1 dead-lettered, 1 left in the queue, lost 0"
    )


def test_failed_orders_are_listed() -> None:
    made = account(confirmed="ab", handled="ab", dead="")
    made.failed("c")
    assert "failed" in shown(verdict(made))
    assert verdict(made).faults == []
