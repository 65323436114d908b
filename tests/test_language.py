"""The language of the source: names, docstrings, class names, and module sizes.

Each rule has a budget: the number of places that break it today. A change may lower the number but must not raise it. A
rule with the budget 0 holds everywhere.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "reliable_mq"

BANNED_NAMES: Final = re.compile(
    r"(?:^|_)(lanes?|carriers?|rooms?|ways|roster|owed|ladders?|strikes?|fates?|appetite|pump|faces?|shell|hand_?back"
    r"|handed_back|give_back|taken|taken_back|looks|doubts)(?:_|$)"
)
BANNED_WORDS: Final = re.compile(
    r"\b(faces?|lanes?|roster|ladders?|pumps?|hand(?:s|ed|ing)?(?: \w+)? back|see the module)\b", re.IGNORECASE
)
#: Allows the name of an argument or a label: ``what``, "what:".
NOUN_WHAT: Final = re.compile(r"(?<!`)\bwhat\b(?![`:])", re.IGNORECASE)
BANNED_VERBS: Final = re.compile(r"(Answers?|Gives?(?! up)|Says?|Have|Has|Tells?)\b")
LONGEST_FIRST_LINE: Final = 80
LONGEST_TEST_NAME: Final = 60
#: The two drivers implement the same protocols under the same names.
DRIVERS: Final = ("connection/interfaces.py", "connection/pika_driver/", "connection/aiormq_driver/")
TEST: Final = re.compile(r"\s*(?:async )?def (test_\w+)")
SMALLEST, LARGEST = 75, 600
#: Modules that users import, or that cover their subject completely.
SMALL_MODULES: Final = frozenset(
    {
        "_util/boottime.py", "_util/generators.py", "_util/validation.py", "_util/version.py", "cli/__main__.py",
        "core/publisher/trace.py", "spark/autoregister.py", "spark/datasource.py", "spark/pickling.py",
        "testing/deliveries.py", "testing/fixtures.py", "testing/waiting.py", "tracing/conventions.py",
        "tracing/propagation.py",
    }
)  # fmt: skip

BUDGET: Final = {
    "names": 0,
    "words": 0,
    "what as a noun": 0,
    "docstring verbs": 0,
    "docstring lengths": 0,
    "class names": 0,
    "module sizes": 0,
    "test names": 0,
}


class Place(NamedTuple):
    """A place that breaks a rule."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"reliable_mq/{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True, eq=False)
class Source:
    """A module of the package."""

    file: str
    text: str
    nodes: list[ast.AST]


@cache
def sources() -> list[Source]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        found.append(Source(str(path.relative_to(PACKAGE)), text, list(ast.walk(ast.parse(text)))))
    return found


def definitions(source: Source) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in source.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def banned_names() -> Iterator[Place]:
    for source in sources():
        for part in Path(source.file).with_suffix("").parts:
            if BANNED_NAMES.search(part):
                yield Place(source.file, 1, f"module {part}")
        for node in definitions(source):
            name = snake_case(node.name)
            if BANNED_NAMES.search(name):
                yield Place(source.file, node.lineno, node.name)


def banned_words() -> Iterator[Place]:
    """In comments and docstrings, which users do not see."""
    for source in sources():
        for line, text in prose(source):
            for match in BANNED_WORDS.finditer(text):
                yield Place(source.file, line, match[0])


def noun_whats() -> Iterator[Place]:
    """A noun is more precise: "the unconfirmed publishes", not "what is on the wire"."""
    for source in sources():
        for line, text in prose(source):
            for match in NOUN_WHAT.finditer(text):
                yield Place(source.file, line, text[max(match.start() - 30, 0) : match.end() + 30])


@cache
def prose(source: Source) -> list[tuple[int, str]]:
    """Return the comments and docstrings of a module, each as one line."""
    return [(line, " ".join(text.split())) for line, text in [*comments(source), *docstrings(source)]]


def comments(source: Source) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def docstrings(source: Source) -> list[tuple[int, str]]:
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((getattr(node, "lineno", 1), text))
    return found


def docstring_verbs() -> Iterator[Place]:
    for source in sources():
        for line, text in docstrings(source):
            if BANNED_VERBS.match(text):
                yield Place(source.file, line, text.partition("\n")[0])


def docstring_lengths() -> Iterator[Place]:
    for source in sources():
        for line, text in docstrings(source):
            first = text.partition("\n")[0]
            if len(first) > LONGEST_FIRST_LINE:
                yield Place(source.file, line, f"{len(first)} characters: {first}")


def class_names() -> Iterator[Place]:
    """Names that differ only in a leading underscore count as equal."""
    found = defaultdict(list)
    for source in sources():
        for node in definitions(source):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(Place(source.file, node.lineno, f"class {node.name}"))
    for places in found.values():
        if not all(place.file.startswith(DRIVERS) for place in places):
            yield from places[1:]


def module_sizes() -> Iterator[Place]:
    for source in sources():
        lines = source.text.count("\n")
        small = lines < SMALLEST and not source.file.endswith("__init__.py") and source.file not in SMALL_MODULES
        if (small and not source.file.startswith(DRIVERS)) or lines > LARGEST:
            yield Place(source.file, 1, f"{lines} lines")


def long_test_names() -> Iterator[Place]:
    for folder in ("tests", "integration"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = TEST.match(line)
                if match and len(match[1]) > LONGEST_TEST_NAME:
                    yield Place(f"../{path.relative_to(ROOT)}", number, f"{len(match[1])} characters: {match[1]}")


RULES: Final[dict[str, Callable[[], Iterator[Place]]]] = {
    "names": banned_names,
    "words": banned_words,
    "what as a noun": noun_whats,
    "docstring verbs": docstring_verbs,
    "docstring lengths": docstring_lengths,
    "class names": class_names,
    "module sizes": module_sizes,
    "test names": long_test_names,
}


@pytest.mark.slow
def test_the_source_keeps_its_language() -> None:
    try:
        broken = {rule: places for rule, find in RULES.items() if len(places := list(find())) > BUDGET[rule]}
    finally:
        for kept in (sources, prose, docstrings):  # millions of nodes, which every later garbage collection would visit
            kept.cache_clear()
    assert not broken, "\n".join(f"{rule}: {place}" for rule, places in broken.items() for place in places)


def test_what_the_rules_find() -> None:
    """A pattern that matches nothing would make its rule pass forever."""
    assert all(BANNED_NAMES.search(snake_case(name)) for name in ("_pump", "SyncLane", "hand_back", "takenBack"))
    assert not any(BANNED_NAMES.search(snake_case(name)) for name in ("Plane", "always", "interface", "mistaken"))
    assert BANNED_WORDS.search("both faces")
    assert BANNED_WORDS.search("hands it back")
    assert BANNED_WORDS.search("pump")
    assert not BANNED_WORDS.search("an interface, a surface")
    assert NOUN_WHAT.search("Ack what is on the wire")
    assert NOUN_WHAT.search("What it says")
    assert not NOUN_WHAT.search("whatever comes; ``what`` is a label; what: a name")
    assert BANNED_VERBS.match("Says which")
    assert not BANNED_VERBS.match("Saying")
    assert TEST.match("    async def test_it() -> None:")
