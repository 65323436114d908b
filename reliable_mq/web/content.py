"""Conversion of message content to visible text of bounded size for a page.

Invariants:

- No character of a message controls how the page looks. A character that does not print (a control character, half of
  a surrogate pair, a mark that changes the text direction) is shown as an escape. The templates pass every text through
  `visible` before they escape it for HTML.
- The size of the text is bounded, whatever the size and the nesting of the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from reliable_mq._util.validation import decode_json
from reliable_mq.codec import CodecError, Properties
from reliable_mq.core.consumer.attempts import printable

if TYPE_CHECKING:
    from reliable_mq.deadletters import DeadMessage

#: The forms of a body.
FORMS: Final = ("json", "text", "hex")
_SHOWN: Final = 64 * 1024  # bytes of a body as text or JSON
_SHOWN_HEX: Final = 8 * 1024
_SHOWN_RESULT: Final = 256 * 1024  # characters of indented JSON
_INDENTED: Final = 12  # levels
_HEADERS: Final = 200
_VALUE: Final = 2000  # characters of a header's value
_EDITABLE: Final = 128 * 1024  # bytes
# A string, a bracket or separator, or another token. The matches cover all JSON text except spaces between tokens.
_PIECE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s"\[\]{},:]+', re.DOTALL)


class Body(NamedTuple):
    """A body in one form."""

    form: str
    text: str
    shown: int
    forms: tuple[str, ...]


def visible(text: str) -> str:
    """Escape the unprintable characters of a text, except line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else printable(char) for char in text)


def body_as(body: bytes, form: str, content_type: str | None) -> Body:
    """Return a body in a form, or in its best form if that one is not available."""
    text = _text(body)
    indented = None if text is None or len(body) > _SHOWN else _indented(text)
    forms = tuple(name for name, there in (("json", indented), ("text", text), ("hex", "")) if there is not None)
    if form not in forms:
        form = "text" if text is not None and (content_type or "").startswith("text/") else forms[0]
    if form == "json" and indented is not None:
        return Body(form, indented, len(body), forms)
    if form == "text" and text is not None:
        return Body(form, text, min(len(body), _SHOWN), forms)
    return Body("hex", "\n".join(_hex_lines(body[:_SHOWN_HEX])), min(len(body), _SHOWN_HEX), forms)


def edit_problem(body: bytes) -> str:
    """Return why a browser cannot send the body back unchanged, or an empty text.

    It can if the body is printable text of moderate size.
    """
    if len(body) > _EDITABLE:
        return f"its body has {len(body):,} bytes, and a form holds at most {_EDITABLE:,}"
    try:
        is_printable = all(char.isprintable() or char in "\n\t" for char in body.decode())
    except UnicodeDecodeError:
        is_printable = False
    return "" if is_printable else "its body is not printable text"


def rows_of_headers(message: DeadMessage) -> list[tuple[str, str]]:
    """Return the names and values of the headers, bounded in number and size."""
    rows = [(printable(name, 200), _value(message.headers[name])) for name in sorted(message.headers)]
    if len(rows) > _HEADERS:
        return [*rows[:_HEADERS], ("…", f"and {len(rows) - _HEADERS} more")]
    return rows


def rows_of_properties(message: DeadMessage) -> list[tuple[str, str]]:
    """Return the names and values of the properties that are set.

    If the properties cannot be read, the result is one row with the error.
    """
    view = Properties(message.properties)
    names = (
        "message_id", "correlation_id", "content_type", "content_encoding", "type", "app_id", "user_id", "reply_to",
        "priority", "expiration", "timestamp", "delivery_mode",
    )  # fmt: skip
    rows = []
    for name in names:
        try:
            value: Any = getattr(view, name)
        except CodecError as error:
            return [("properties", printable(f"cannot be read: {error}", 500))]
        if value is not None:
            rows.append((name.replace("_", " "), _value(value)))
    return rows


def _text(body: bytes) -> str | None:
    """Return the beginning of a body as text, or None if the body is not UTF-8."""
    cut = body[:_SHOWN]
    try:
        return cut.decode()
    except UnicodeDecodeError as error:
        if len(cut) < len(body) and error.start >= len(cut) - 3:  # cut inside a character
            return cut[: error.start].decode()
        return None


def _indented(text: str) -> str | None:
    """Return JSON with line ends and indentation, or None if the text is not JSON.

    No other character changes. The JSON is not decoded and encoded again, so numbers, escapes and repeated names are
    shown as they were sent.
    """
    try:
        decode_json(text, parse_int=len, parse_float=len, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    out: list[str] = []
    depth = size = 0
    before = ""
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece in "]}":
            depth -= 1
            if before not in "[{":
                out.append(_line(depth))
        elif before in ("[", "{", ","):
            out.append(_line(depth))
        out.append(": " if piece == ":" else piece)
        depth += piece in "[{"
        before = piece
        size += len(out[-1]) + min(max(depth, 0), _INDENTED) * 2
        if size > _SHOWN_RESULT:
            out.append("\n…")
            break
    return "".join(out)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, _INDENTED)


def _hex_lines(data: bytes) -> Iterator[str]:
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        left, right = row[:8].hex(" "), row[8:].hex(" ")
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{start:06x}  {left:<23}  {right:<23}  {shown}"


def _value(value: object) -> str:
    plain = value is None or isinstance(value, (int, float, list, tuple, Mapping))
    text = json.dumps(value, ensure_ascii=False, default=_nearest) if plain else _nearest(value)
    return printable(text, _VALUE) if len(text) > _VALUE else visible(text)


def _nearest(value: object) -> str:
    """Return the nearest value that JSON can represent."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
