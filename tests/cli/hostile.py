"""Text that could control a terminal or confuse a text formatter."""

from __future__ import annotations

from typing import Final

__all__ = ["HOSTILE", "harmless"]

HOSTILE: Final = (
    "[/evil]",
    "[bold red]",
    "[link=file:///etc/passwd]x[/link]",
    ":boom:",
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0gLXJmIC8=\x07",
    "\x9b31m",  # one character for ESC [
    "\x90q\x9c",
    "a\rb\nc\x08\x7f\x00",
    "\u202egnp.exe",
    "\u2066x\u2069\u200b\ufeff",
    "\udcff\ud800",  # bytes that are not UTF-8, as Python decodes them
    "\u2028\u2029\x85\x0b\x0c",
    "\U000e0041\U000e0042",
    "{0} %s ${HOME}",
)


def harmless(shown: str) -> bool:
    """Return whether the text only prints characters, tabs and line breaks."""
    return all(char.isprintable() or char in "\n\t" for char in shown)
