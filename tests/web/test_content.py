"""Foreign text on a page is visible, bounded, and never markup.

JSON is shown unchanged, and addresses carry every byte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import reliable_mq.web
from reliable_mq import Message
from reliable_mq.codec import encode_properties, encode_table, join_properties
from reliable_mq.core import headers
from reliable_mq.errors import ConfigurationError
from reliable_mq.web import pages
from reliable_mq.web.address import Choice, Fields, ago, encoded
from reliable_mq.web.content import body_as, edit_problem, visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.testclient import TestClient

    from tests.web.memory_broker import MemoryBroker

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "{{ 7 * 7 }}{% raw %}",
    "</pre></textarea></title><svg onload=alert(1)>",
    "javascript:alert(1)",
    "\x01\x1b[2J\u202e\u2028\x85",
    "&lt;b&gt;&#0;",
    "hx-get=/purge hx-trigger=load",
)


@given(st.text())
def test_visible_text_prints(text: str) -> None:
    shown = visible(text)
    assert all(char.isprintable() or char in "\n\t" for char in shown)
    shown.encode()
    if all(char.isprintable() or char in "\n\t" for char in text):
        assert shown == text


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(_JSON, st.booleans())
def test_indented_json_is_the_same_json(value: object, ascii_only: bool) -> None:
    """Only the white space outside of strings differs."""
    shown = body_as(json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"), "json", None)
    if shown.form == "json":
        assert json.loads(shown.text) == value


def test_json_is_shown_as_it_is() -> None:
    """Decoding and encoding would lose digits, escapes and repeated names."""
    body = b'{"a":1.10,"a":12345678901234567890123,"b":"\\u0041","c":[],"d":{"e":[1,2]}}'
    assert body_as(body, "", None).text == (
        '{\n  "a": 1.10,\n  "a": 12345678901234567890123,\n  "b": "\\u0041",\n  "c": [],\n'
        '  "d": {\n    "e": [\n      1,\n      2\n    ]\n  }\n}'
    )


@pytest.mark.parametrize(
    ("body", "form", "shown"),
    [
        (b"plain", "text", 5),
        (b"", "text", 0),
        (b"\xff\x00", "hex", 2),
        (b'{"a":', "text", 5),
        (b"NaN", "text", 3),
        (b"x" * 100_000, "text", 65536),
        ("ä".encode() * 50_000, "text", 65536),
        (b"\xff" * 100_000, "hex", 8192),
        (b"[" * 32_000 + b"]" * 32_000, "text", 64_000),  # too deep for the decoder
        (b"9" * 60_000, "json", 60_000),
    ],
)
def test_a_body_has_its_best_form_and_bounds(body: bytes, form: str, shown: int) -> None:
    found = body_as(body, "", None)
    assert (found.form, found.shown) == (form, shown)
    assert len(found.text) < 400_000


def test_indentation_is_bounded() -> None:
    nested = b"[" * 400 + b"1," * 15_000 + b"1" + b"]" * 400
    assert len(body_as(nested, "json", None).text) < 300_000


def test_what_can_be_edited() -> None:
    assert not edit_problem("Zoë\n\t{}".encode())
    assert not edit_problem(b"x" * 128 * 1024)
    assert all("not printable text" in edit_problem(body) for body in (b"\r\n", b"\xff", b"\x00", "\u202e".encode()))
    assert edit_problem(b"\xff" * 200_000) == "its body has 200,000 bytes, and a form holds at most 131,072"


@given(st.lists(st.tuples(st.sampled_from(("exception", "reason", "from-queue")), st.text(min_size=1)), max_size=3))
def test_an_address_carries_every_filter(pairs: list[tuple[str, str]]) -> None:
    pairs = [(name, value) for name, value in dict(pairs).items() if value.strip() and _is_text(value)]
    choice = Choice.of_pairs(pairs)
    assert choice.query.isascii()
    assert Choice.of(Fields(choice.query)) == choice


@given(st.text(), st.text())
def test_an_address_carries_every_group(exception: str, reason: str) -> None:
    assume(_is_text(exception) and _is_text(reason))
    query = Choice.of_pairs([("from-queue", "orders")]).query_of_group(exception, reason)
    choice = Choice.of(Fields(query))
    assert choice.query_of_group(exception, reason) == choice.query == query
    assert not choice.filter.everything


def _is_text(value: str) -> bool:
    """Return whether the bytes of a header can be decoded to this text."""
    try:
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") == value
    except UnicodeEncodeError:
        return False


def test_bytes_that_are_no_text_come_back() -> None:
    reason = b"caf\xe9 \xff".decode("utf-8", "surrogateescape")
    assert Choice.of(Fields(encoded([("reason", reason)]))).filter.reason == reason


@pytest.mark.parametrize(
    ("query", "text"),
    [("header=x", "header must be NAME=VALUE"), ("newer-than=1y", "newer-than: an age is a number with")],
)
def test_a_wrong_field_is_named(query: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Choice.of(Fields(query))


def test_ages_are_in_two_units() -> None:
    now = datetime(2026, 1, 10, tzinfo=UTC)
    for seconds, text in ((5, "5 s ago"), (90, "1 min 30 s ago"), (7200, "2 h ago"), (90000, "1 d 1 h ago")):
        assert ago(now - timedelta(seconds=seconds), now) == text
    assert ago(now + timedelta(minutes=1), now) == "in the future"


@pytest.mark.slow
def test_hostile_messages_are_text_on_every_page(page: Callable[..., TestClient], broker: MemoryBroker) -> None:
    """In the body, properties, header names, header values and decoded headers."""
    for text in HOSTILE:
        table = {
            headers.FORMAT: 1,
            headers.ORIGINAL_QUEUE: text,
            headers.DEAD_LETTER_REASON: text,
            headers.EXCEPTION_TYPE: text,
            headers.EXCEPTION_MESSAGE: text,
            headers.CONSUMER: text,
            "traceparent": text,
            text[:100]: {text[:100]: [text, text.encode()]},
        }
        message = Message(text.encode() + b"\0", headers=table, message_id=text, content_type=text, correlation_id=text)
        broker.add("orders.dead", message, Message(json.dumps({text: text}).encode(), headers=table))
    broken = join_properties({"headers": encode_table({"a": "b"})[:-1] + b"\xff"})
    broker.queues["orders.dead"].append((broken, b"broken", False))
    broker.queues["orders.dead"].append((encode_properties(Message(b"", headers={headers.FORMAT: 2**40})), b"", False))
    browser = page(allow_changes=True, allow_editing=True)
    shown = [browser.get("/letters?queue=orders.dead").text]
    for one in re.findall(r'name="letter" value="([0-9a-f]{32})"', shown[0]):
        address = f"/letter?queue=orders.dead&id={one}"
        answers = [browser.get(address), *(browser.get(f"{address}&as={form}") for form in ("text", "hex"))]
        answers.append(browser.get(f"/edit?queue=orders.dead&id={one}"))
        assert {answer.status_code for answer in answers} <= {200, 409}
        shown += [answer.text for answer in answers]
    for text in HOSTILE:
        for path in ("/letters?queue=orders.dead&reason={}", "/letters?queue={}", "/job?id={}", "/{}"):
            shown.append(browser.get(path.format(encoded([("", text)])[1:])).text)
    assert any("{{ 7 * 7 }}{% raw %}" in html for html in shown)
    for html in shown:
        scripts = re.findall(r"<script[^>]*>", html)
        assert all(' src="/static/' in script for script in scripts)
        assert len(scripts) == 2
        assert not re.search(r"<(svg|img|iframe|object|embed|style)\b", html)
        assert not re.search(r"<[^>]*\son\w+\s*=[^>]*>", re.sub(r'"[^"]*"', '""', html))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]", html)


def test_the_vendored_script_is_the_one_that_pages_name() -> None:
    """The hash is that of ``dist/htmx.min.js`` in htmx.org 2.0.11 of npm."""
    (file,) = (Path(reliable_mq.web.__file__).parent / "static").glob("htmx-*.js")
    content = file.read_bytes()
    assert hashlib.sha256(content).hexdigest() == "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"
    digest = base64.b64encode(hashlib.sha384(content).digest()).decode()
    assert (file.name, f"sha384-{digest}") == (pages._HTMX, pages._HTMX_INTEGRITY)


def test_no_template_switches_escaping_off() -> None:
    templates = [*(Path(reliable_mq.web.__file__).parent / "templates").glob("*.html")]
    assert len(templates) > 10
    for template in templates:
        text = template.read_text()
        assert "safe" not in text, template
        assert "autoescape" not in text, template
        assert " style=" not in text, template
        assert "<script>" not in text, template
