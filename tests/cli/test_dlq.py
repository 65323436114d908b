"""The command line of ``reliable-mq dlq`` and its tables, without a broker."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
import typer
from rich.console import Console

from reliable_mq import Message
from reliable_mq.cli.dlq import _tell, chosen
from reliable_mq.cli.dlq.render import age, details, listing, summary
from reliable_mq.codec import encode_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.deadletters import DeadMessage, Filter, ReplayReport
from reliable_mq.errors import ConsumeError, ReliableMQError

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


def letter(body: bytes, **table: object) -> DeadMessage:
    properties = encode_properties(Message(body, headers={headers.FORMAT: 1, **table}, message_id="id\x1b[2J"))  # type: ignore[dict-item]
    delivery = Delivery("", 1, False, "", "orders.dead", properties, body)
    delivery.came_from(ChannelGeneration(1, 1, "orders.dead"))
    return DeadMessage(delivery, 1)


def shown(what: object, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(what)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_header_name_leaves_room_for_the_values(width: int) -> None:
    """A narrow terminal, or a long name that a foreign client chose, hides no value."""
    text = shown(details(letter(b"body", **{"x" * 100: "value", "y" * 100: "other"}), 100), width)
    assert all(value in text for value in ("value", "other", "body", "id\\x1b[2J"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("15m", 900), ("2H", 7200), ("7d", 604800), ("1w", 604800)]
)
def test_ages_have_units(text: str, seconds: float) -> None:
    which = chosen(None, None, None, None, None, text, None)
    assert which == Filter(older_than=seconds)


def test_what_is_not_understood_is_refused_by_its_option() -> None:
    with pytest.raises(typer.BadParameter, match="--newer-than"):
        chosen(None, None, None, None, None, None, "1 month")
    with pytest.raises(typer.BadParameter, match="--header"):
        chosen(None, None, None, None, ["=x"], None, None)


def test_failures_that_a_report_does_not_hold_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    failures: list[tuple[DeadMessage, ReliableMQError]] = [(letter(b""), ConsumeError("its origin is unknown"))]
    _tell(ReplayReport(failed=5, failures=failures), dry_run=True)
    assert "its origin is unknown\nand 4 more\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ago", "text"), [(0.5, "0s"), (59, "59s"), (60, "1m"), (7300, "2h"), (90_000, "1d"), (10**6, "1w"), (-5, "0s")]
)
def test_ages_are_shown_in_their_largest_unit(ago: float, text: str) -> None:
    assert age(NOW - timedelta(seconds=ago), NOW) == text
    assert age(None, NOW) == "?"


def test_message_content_reaches_the_terminal_only_escaped() -> None:
    """Ids, headers, reasons and bodies contain no markup or control characters."""
    message = letter(b"one\ntwo\x1b[31m [bold]", reason="[red]", **{headers.DEAD_LETTER_REASON: "\x07[blink]"})
    table = listing()
    table.add_row(*summary(message, NOW))
    for text in (shown(table), shown(details(message, 100))):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[blink]" in text
    full = shown(details(message, 100))
    assert "[red]" in full
    assert "two\\x1b[31m [bold]" in full


@pytest.mark.parametrize(
    ("body", "most", "expected"),
    [
        (b"\x00\xff\x01", 10, "00 ff 01"),
        (b"abcdef", 3, "abc…"),
        ("aé".encode(), 2, "a…"),
        (b"", 10, "body, 0 bytes"),
    ],
)
def test_a_body_is_text_or_bytes_and_is_cut(body: bytes, most: int, expected: str) -> None:
    assert expected in shown(details(letter(body), most))
