"""Trace headers: their valid form, and the ids in them."""

from __future__ import annotations

import pytest

from reliable_mq.core.headers import checked_traceparent, trace_ids
from reliable_mq.errors import ConfigurationError

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "text",
    [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"cc-{TRACE}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01-more-to-come"],
)
def test_a_context_has_two_ids(text: str) -> None:
    assert trace_ids(text) == {"trace_id": TRACE, "span_id": SPAN}
    assert checked_traceparent("traceparent", text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rubbish",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01more",
        f"01-{TRACE}-{SPAN}-01-{'x' * 65}",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_text_of_another_form_is_no_context(text: str) -> None:
    assert trace_ids(text) is None
    with pytest.raises(ConfigurationError, match=r"^a name must be a W3C trace context"):
        checked_traceparent("a name", text)
