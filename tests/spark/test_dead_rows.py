"""Dead letters of rows: the values of a row that does not fit into a message, and failures."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from reliable_mq.core import headers
from reliable_mq.errors import PublishBlocked, PublishError, PublishRefused, PublishReturned
from reliable_mq.message import Message
from reliable_mq.spark import sink
from reliable_mq.spark.options import WriteOptions
from reliable_mq.spark.rows import MessageIds, Outgoing, UnsendableRow, letter_of_message, letter_of_row


def letter(**values: Any) -> Message:
    row = UnsendableRow(7, None, "the reason", {"exchange": "", "routing_key": "orders", **values})
    return letter_of_row(row, MessageIds("query/0/0"))


def test_what_a_message_can_carry_stays_and_the_rest_is_text() -> None:
    """The reason is in the headers that all dead letters have."""
    made = letter(
        body=b"b", message_id="id", type="\udcff", priority=-1, app_id="shop", timestamp=2**62,
        content_type="text/plain",
        headers=[("fine", "1"), ("CC", "other"), ("bad", "\udcff"), ("\udcfe", "v")],
    )  # fmt: skip
    assert (made.body, made.message_id, made.app_id, made.content_type) == (b"b", "id", "shop", "text/plain")
    assert (made.type, made.priority, made.timestamp, made.persistent) == (None, None, None, True)
    assert made.headers["fine"] == "1"
    assert "CC" not in made.headers
    assert made.headers[headers.DEAD_LETTER_REASON] == "the reason"
    assert made.headers[headers.ORIGINAL_QUEUE] == made.headers[headers.ORIGINAL_ROUTING_KEY] == "orders"
    assert made.headers[headers.ORIGINAL_COLUMNS] == {
        "type": b"\xff",
        "priority": "-1",
        "timestamp": f"{2**62} microseconds since 1970",
        "headers[CC]": "other",
        "headers[bad]": b"\xff",
        "headers[\\udcfe]": "v",
    }


def test_a_letter_neither_expires_nor_asks_for_a_user() -> None:
    """Both values become headers, as in a consumer's dead letters."""
    made = letter(body=b"b", user_id="somebody", expiration=1.5, priority=300)
    assert (made.user_id, made.expiration) == (None, None)
    assert made.headers[headers.ORIGINAL_USER_ID] == "somebody"
    assert made.headers[headers.ORIGINAL_EXPIRATION] == "1500"


@pytest.mark.parametrize("message_id", [None, "x" * 256, "\udcff", ""])
def test_a_letter_has_the_same_id_at_every_attempt(message_id: str | None) -> None:
    """Other rows have other ids."""
    first, again = letter(body=None, message_id=message_id), letter(body=None, message_id=message_id)
    assert first.message_id == again.message_id
    assert first.message_id.startswith("query/0/0/")
    assert first.message_id != letter(body=b"", message_id=message_id).message_id


@pytest.mark.parametrize(
    ("name", "shown"), [("a\0b", "a\\x00b"), ("\u00fc" * 200, "\u00fc" * 100), ("n" * 300, "n" * 200)]
)
def test_a_header_name_no_message_can_carry_is_kept_as_text(name: str, shown: str) -> None:
    """Invalid characters of the name are replaced, and a long name is truncated."""
    made = letter(body=b"b", headers=[(name, "v"), ("fine", "1")])
    assert made.headers["fine"] == "1"
    assert made.headers[headers.ORIGINAL_COLUMNS] == {f"headers[{shown}]": "v"}
    assert made.encoded_properties is not None


def test_a_letter_asks_for_no_direct_reply() -> None:
    """RabbitMQ would refuse it, because the channel consumes no replies."""
    direct = "amq.rabbitmq.reply-to"
    made = letter(body=b"b", reply_to=direct, priority=300)
    assert (made.reply_to, made.headers[headers.ORIGINAL_COLUMNS]) == (None, {"reply_to": direct, "priority": "300"})
    error = PublishRefused("refused", reply_code=406, reply_text="PRECONDITION_FAILED - fast reply consumer")
    made = letter_of_message(Outgoing(Message(b"b", reply_to=direct), "", "orders"), error)
    assert (made.reply_to, made.headers[headers.ORIGINAL_COLUMNS]) == (None, {"reply_to": direct})
    made = letter_of_message(Outgoing(Message(b"b", reply_to="replies"), "", "orders"), error)
    assert (made.reply_to, headers.ORIGINAL_COLUMNS in made.headers) == ("replies", False)


def test_a_letter_fits_into_a_frame_whatever_the_row_holds() -> None:
    """The body is truncated if it is too large; a header has the original size."""
    made = letter(
        body=bytes(2**24 + 1), headers=[("large", "x" * 10**6)], routing_key="k" * 10**6, type="\udcff" * 10**6
    )
    assert len(made.encoded_properties or b"") < 8192
    assert (len(made.body), made.headers[headers.ORIGINAL_SIZE]) == (2**16, 2**24 + 1)
    assert made.headers[headers.ORIGINAL_COLUMNS] == {"headers": "headers, which are too large for a dead letter"}


def test_a_message_that_is_refused_keeps_its_properties() -> None:
    """Except for those that would route it, let it expire, or get it refused again."""
    when = datetime(2026, 1, 2, tzinfo=UTC)
    message = Message(
        b"b", headers={"tenant": "a", "CC": ["other"]}, message_id="id", user_id="u", expiration=2, timestamp=when,
        persistent=False,
    )  # fmt: skip
    error = PublishReturned(
        "no queue", message_id="id", reply_code=312, reply_text="NO_ROUTE", exchange="e", routing_key="k"
    )
    made = letter_of_message(Outgoing(message, "e", "k"), error)
    assert (made.message_id, made.timestamp, made.user_id, made.expiration) == ("id", when, None, None)
    assert made.persistent
    assert {name: made.headers[name] for name in made.headers if name != headers.PACKAGE_VERSION} == {
        "tenant": "a",
        headers.FORMAT: 1,
        headers.DEAD_LETTER_REASON: "no queue",
        headers.CONSUMER: "spark-sink",
        headers.ORIGINAL_EXCHANGE: "e",
        headers.ORIGINAL_ROUTING_KEY: "k",
        headers.ORIGINAL_CC: ["other"],
        headers.ORIGINAL_USER_ID: "u",
        headers.ORIGINAL_EXPIRATION: "2000",
    }


def test_a_body_is_cut_only_if_it_was_refused_for_its_size() -> None:
    """The size limit of a broker may be lower than the default."""
    outgoing = Outgoing(Message(bytes(10**6)), "", "orders")
    text = "PRECONDITION_FAILED - message size 1000000 is larger than configured max size 500000"
    cut = letter_of_message(outgoing, PublishRefused("refused", reply_code=406, reply_text=text))
    whole = letter_of_message(outgoing, PublishRefused("refused", reply_code=406, reply_text="PRECONDITION_FAILED"))
    assert (len(cut.body), len(whole.body)) == (2**16, 10**6)


class FullBroker:
    """A publisher whose rows are returned late, and whose dead letters fail in one of two ways."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    def submit(self, message: Message, *, exchange: str = "", routing_key: str) -> SimpleNamespace:
        error: PublishError = PublishBlocked("the broker is full")
        if routing_key == "dead" and self._at_once:
            raise error
        outcome = "nacked" if routing_key == "dead" else None  # None: the sink has to wait
        if outcome is None:
            error = PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="k")
        return SimpleNamespace(
            message=message, message_id=message.message_id, exchange=exchange, routing_key=routing_key,
            outcome=outcome, exception=lambda: error,
        )  # fmt: skip

    def close(self, timeout: float) -> None:
        """Do nothing."""


@pytest.mark.parametrize("at_once", [True, False])
def test_the_first_failed_letter_ends_a_task_of_many_rows(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows after it are failures, and get no dead letters."""
    monkeypatch.setattr(sink, "_TaskPublisher", lambda *_, **__: FullBroker(at_once=at_once))
    writer = sink.BatchSink(WriteOptions(url="amqp://localhost/", dead_letter_queue="dead"), ("body", "routing_key"))
    rows = pa.RecordBatch.from_pydict({"body": ["b"] * 3000, "routing_key": ["k"] * 3000})
    with pytest.raises(
        PublishError, match=r"^3000 of 3000 rows .* row 0, message \S+: no queue; and its dead letter"
    ) as failed:
        writer.write(iter([rows]))
    assert str(failed.value).count("its dead letter was not confirmed") == 1


class SlowRow:
    """A publisher that confirms each row at once, and the first one only when the sink waits for it."""

    def __init__(self) -> None:
        self.submitted = 0  # bytes
        self.held = 0  # bytes submitted until the sink waited

    def submit(self, message: Message, **_: str) -> SimpleNamespace:
        outcome = "confirmed" if self.submitted else None
        self.submitted += len(message.body)
        body = range(len(message.body))  # only the size
        return SimpleNamespace(message=SimpleNamespace(body=body), outcome=outcome, exception=self._waited)

    def _waited(self) -> None:
        self.held = self.held or self.submitted

    def close(self, timeout: float) -> None:
        """Do nothing."""


def test_bodies_behind_an_unconfirmed_row_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as rows of one full queue among others, while the publisher tries again."""
    publisher = SlowRow()
    monkeypatch.setattr(sink, "_TaskPublisher", lambda *_, **__: publisher)
    writer = sink.BatchSink(WriteOptions(url="amqp://localhost/", routing_key="orders"), ("body",))
    rows = pa.RecordBatch.from_pydict({"body": [bytes(2**20)]})
    written = writer.write(iter([rows] * 200))
    assert (written.rows, publisher.submitted) == (200, 200 * 2**20)
    assert 2**26 <= publisher.held <= 2**27 + 2**20
