"""The manual matches the code: names, links, code blocks, defaults and lists.

A page is the README or a Markdown file in ``docs/``.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reliable_mq
from reliable_mq import Consumer, Publisher
from reliable_mq.core import headers
from reliable_mq.core.stage import envelope
from reliable_mq.metrics.families import FAMILIES
from reliable_mq.testing import FaultProxy
from tests.test_snapshots import PUBLIC

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "reliable_mq"
README = ROOT / "README.md"
DOCS = ROOT / "docs"
MANUAL = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
PAGES = [README, *MANUAL]
API = DOCS / "reference" / "api.md"
ERRORS = DOCS / "reference" / "errors.md"
SETTINGS = DOCS / "reference" / "settings.md"
METRICS = DOCS / "reference" / "metrics.md"
EXAMPLES = DOCS / "reference" / "examples.md"
ARCHITECTURE = DOCS / "explanation" / "architecture.md"
CONTRIBUTING = DOCS / "contributing.md"
MATRIX = DOCS / "explanation" / "faults.md"
PROXY = DOCS / "guides" / "testing.md"

#: Modules that the programs of the guides use.
NOT_INSTALLED = ("celery", "django.core.asgi", "django.db")
#: Names that blocks use and do not define.
READERS_OWN = {
    "url": "amqp://guest:guest@localhost/",
    "orders": reliable_mq.Queue("orders"),
    "handle": print,
    "ship": print,
    "book": print,
}

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
_UNITS = {"": 1, " s": 1, " MiB": 1024 * 1024, " attempts": 1}


def links(page: Path) -> list[tuple[str, str]]:
    return [(text.strip("`"), target) for text, target in _LINK.findall(page.read_text())]


def inline(*pages: Path) -> set[str]:
    """Return all texts in backticks outside of code blocks."""
    texts = (re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in pages)
    return {found for text in texts for found in _INLINE.findall(text)}


@cache
def names_in(path: Path) -> set[str]:
    """Return the functions and classes that a file defines or assigns."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def section(page: Path, title: str) -> str:
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section {title!r}"
    return found[1]


@cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """The file of a link exists, and so does the heading of its anchor."""
    for _text, target in links(page):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


def test_every_page_is_in_the_table_of_contents() -> None:
    """A page in no toctree cannot be reached."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    named = {line for block in blocks for line in block.splitlines() if line and not line.startswith(":")}
    assert named == {str(page.relative_to(DOCS).with_suffix("")) for page in MANUAL} - {"index"}


def test_the_readme_is_short_and_stands_alone() -> None:
    """A package index shows the README alone, so it has no relative links."""
    assert len(README.read_bytes()) <= 8000
    assert all("://" in target or target.startswith("#") for _text, target in links(README))


def test_the_paths_that_the_readme_names_exist() -> None:
    paths = {name for name in inline(README) if "/" in name and "_build" not in name}
    assert len(paths) > 3
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=lambda page: page.stem)
def test_every_file_that_the_pages_for_contributors_name_exists(page: Path) -> None:
    """Files are named from the root of the package or of the repository."""
    files = {name for name in inline(page) if re.fullmatch(r"[\w/.]+\.(py|sh|md|toml)", name)} - {"stores/NAME.py"}
    assert len(files) > 5
    for name in files:
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name


@pytest.mark.slow
def test_every_table_of_transitions_is_drawn() -> None:
    """A diagram has every state of its table, and each change ends in one of them."""
    spec = importlib.util.spec_from_file_location("state_machines", DOCS / "_ext" / "state_machines.py")
    assert spec is not None
    assert spec.loader is not None
    drawing = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    machines = [*drawing.machines()]
    assert len(machines) > 1
    for machine in machines:
        diagram = drawing.drawn(machine)
        assert all(f">{state.name}" in diagram for state in machine.states)
        assert {edge.after for edge in machine.edges} <= set(machine.states)


@pytest.mark.slow
def test_every_test_that_is_named_exists() -> None:
    """The text of a link to a file of tests is the name of a test in it."""
    named = [
        (text, (page.parent / target).resolve())
        for page in PAGES
        for text, target in links(page)
        if re.search(r"(^|/)test_\w+\.py$", target) and "examples/" not in target
    ]
    assert len(named) > 50
    for name, path in named:
        assert name.startswith(("test_", "Test")), f"{name} is no name of a test"
        assert name in names_in(path), f"{path.relative_to(ROOT)} has no {name}"


def test_every_row_of_the_fault_matrix_that_has_a_test_is_named() -> None:
    """The number in the name of a test is the number of its row."""
    rows = re.findall(r"^\| ([\d, ]+) \| .* \| (.*) \|$", section(MATRIX, "The fault matrix"), re.MULTILINE)
    told = {int(number) for numbers, _ in rows for number in numbers.split(",")}
    tested: set[int] = set()
    for path in (ROOT / "integration").rglob("test_*.py"):
        for name in names_in(path):
            tested |= {int(number) for number in re.findall(r"(?<![a-z0-9])f(\d\d)(?=_)", name.removeprefix("test_"))}
    assert told == tested
    for numbers, tests in rows:
        for number in numbers.split(","):
            assert f"f{int(number):02}" in tests


@pytest.mark.parametrize("driver", ["pika", "aio"])
def test_every_known_bug_of_the_drivers_has_its_tests_named(driver: str) -> None:
    """There are thirteen for each driver, and the names of tests have their numbers."""
    table = section(MATRIX, "Bugs of the drivers").partition(f"\n| {driver}")[2].partition("\n\n")[0]
    rows = {int(number): tests for number, tests in re.findall(r"^\| (\d+) \| .* \| (.*) \|$", table, re.MULTILINE)}
    assert list(rows) == list(range(1, 14))
    for path in (ROOT / "integration").glob(f"test_{driver}_bugs*.py"):
        for name in names_in(path):
            found = re.match(rf"test_{driver}_(\d\d)_", name)
            if found is not None:
                assert f"[{name}](../../integration/{path.name})" in rows[int(found[1])]
    for number, tests in rows.items():
        assert f"[test_{driver}_{number:02}_" in tests


@pytest.mark.slow
def test_python_blocks_in_the_docs_compile_and_import_real_names() -> None:
    """Readers copy these blocks."""
    blocks = [(page, block) for page in PAGES for block in _BLOCK.findall(page.read_text())]
    assert len(blocks) >= 3
    for page, block in blocks:
        compile(block, str(page), "exec")
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module not in NOT_INSTALLED:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


@pytest.mark.slow
def test_python_blocks_construct_with_valid_arguments(tmp_path: Path) -> None:
    """Constructors of the package accept the arguments in the blocks; none connects.

    A call with a name that the block does not define is left out.
    """
    made = 0
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text()):
            names = {**vars(reliable_mq), **READERS_OWN}
            for node in ast.walk(ast.parse(block.replace("/var/log/shop", str(tmp_path)))):
                call = node.value if isinstance(node, ast.Assign) else node
                function = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
                found = names.get(function)
                ours = inspect.isclass(found) and found.__module__.startswith("reliable_mq.")
                assigns = isinstance(node, ast.Assign) and (function or isinstance(call, ast.Constant))
                if ours or assigns or isinstance(node, _DEFINITIONS):
                    try:
                        exec(ast.unparse(node), names)
                    except (NameError, ImportError):
                        continue
                    except Exception as error:
                        error.add_note(f"{page.relative_to(ROOT)}: {ast.unparse(node)}")
                        raise
                    made += ours
    assert made > 100


def test_every_public_name_that_is_named_exists() -> None:
    """A text in backticks that looks like a class of the package is one."""
    public = ("reliable_mq.settings", "reliable_mq.stores", "reliable_mq.testing", "prometheus_client", "datetime")
    places: list[ModuleType] = [reliable_mq, *map(importlib.import_module, public), builtins]
    for text in inline(README, SETTINGS, METRICS, ERRORS):
        found = re.match(r"(?:\w+=)?(?!None|True|False)([A-Z][a-z]+[A-Za-z]*)\b", text)
        if found is not None:
            assert any(hasattr(place, found[1]) for place in places), text


@cache
def texts_of_the_package() -> str:
    """Return every string of the source on a line; of an f-string, its fixed parts."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_every_public_class_of_errors_is_in_the_index() -> None:
    """Each row has the reason and the remedy."""
    table = ERRORS.read_text().partition("## By class")[2].partition("\n## ")[0]
    rows = {name: cells for name, *cells in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", table, re.MULTILINE)}
    public = {
        name
        for module in PUBLIC
        for name in importlib.import_module(module).__all__
        if inspect.isclass(value := getattr(importlib.import_module(module), name))
        and issubclass(value, reliable_mq.ReliableMQError)
    }
    assert len(public) > 15
    assert rows.keys() == public - {"ReliableMQError"}


@pytest.mark.slow
def test_every_error_that_the_index_explains_has_such_a_text() -> None:
    """The fixed parts between the ``…`` of each text are in the source."""
    index = ERRORS.read_text().partition("## By message text")[2].partition("## All texts")[0]
    explained = re.findall(r"^\| `([^`]+)` \|", index, re.MULTILINE)
    assert len(explained) > 40
    for text in explained:
        for part in re.split(r"…|\d{3}", text):
            assert part.strip() in texts_of_the_package(), text


def test_the_reference_has_every_public_name() -> None:
    """The API page documents ``__all__`` of every public package."""
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)$", API.read_text(), re.MULTILINE))
    packages = (
        "reliable_mq",
        "reliable_mq.stores",
        "reliable_mq.outbox",
        "reliable_mq.deadletters",
        "reliable_mq.errors",
        "reliable_mq.monitoring",
        "reliable_mq.stage",
        "reliable_mq.testing.history",
        "reliable_mq.testing.outbox_contract",
        "reliable_mq.testing.store_contract",
        "reliable_mq.web",
    )
    assert ".. automodule:: reliable_mq.testing.fixtures\n" in API.read_text()
    for package in (*packages, "reliable_mq.testing"):
        assert set(importlib.import_module(package).__all__) <= documented
    assert {"Credentials", "TopologyWarning"} <= documented


def test_the_reference_has_what_a_class_inherits() -> None:
    """Inherited methods, such as ``Consumer.stop``, are documented like own methods."""
    blocks = dict(re.findall(r"^\.\. autoclass:: (\w+)\n((?:   :.+\n)*)", API.read_text(), re.MULTILINE))
    checked = 0
    for package in ("reliable_mq", "reliable_mq.stores", "reliable_mq.outbox", "reliable_mq.deadletters"):
        for name in importlib.import_module(package).__all__:
            owner = getattr(importlib.import_module(package), name)
            bases = [base for base in getattr(owner, "__mro__", ()) if base.__module__.startswith("reliable_mq")]
            if name not in blocks or not any("Base" in base.__name__ for base in bases):
                continue
            assert ":inherited-members:" in blocks[name] or re.search(r":members: \w", blocks[name]), name
            checked += 1
    assert checked > 8


@pytest.mark.parametrize("owner", [Publisher, Consumer])
def test_defaults_are_those_of_the_code(owner: type[Publisher | Consumer]) -> None:
    """The tables of settings name parameters and their plain default values."""
    table = SETTINGS.read_text().partition(f"| `{owner.__name__}` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", table, re.MULTILINE)
    assert len(rows) >= 8
    parameters = inspect.signature(owner).parameters
    for cell, defaults in rows:
        names = _INLINE.findall(cell)
        for name, told in zip(names, defaults.split(", ") if len(names) > 1 else [defaults], strict=True):
            default = parameters[name].default
            found = re.fullmatch(r"([\d.]+)( s| MiB| attempts|)", told)
            if isinstance(default, int | float):
                assert found is not None, f"{name}: {told}"
                assert float(found[1]) * _UNITS[found[2]] == default, name
            elif name == "retry":
                assert found is not None, f"{name}: {told}"
                policy = default or reliable_mq.RetryPolicy()
                assert policy.max_attempts == int(found[1])


def test_every_metric_is_listed_and_no_other() -> None:
    """The tables are generated from the families by the first word of their names."""
    tables = re.findall(r"^```\{metrics\} (\w+)$", METRICS.read_text(), re.MULTILINE)
    assert len(tables) == len(set(tables))
    assert {family.name.partition("_")[0] for family in FAMILIES.values()} <= set(tables)
    named = {name.partition(" ")[0] for name in inline(METRICS) if name.startswith("reliable_mq_")}
    assert named
    assert named <= FAMILIES.keys()


def test_every_example_is_listed_and_no_other() -> None:
    """The table of examples matches the directory."""
    listed = {target for _text, target in links(EXAMPLES) if "/examples/" in target}
    assert listed == {f"../../examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


def test_every_control_of_the_fault_proxy_exists() -> None:
    """The list of controls names methods of the proxy."""
    names = {name for name in _INLINE.findall(section(PROXY, "Controls")) if name.isidentifier()}
    assert len(names) > 15
    assert names <= set(dir(FaultProxy))


def test_every_header_of_ours_that_is_named_exists() -> None:
    """Every header that the manual names is written by the code."""
    ours = {envelope.HEADER, *(value for value in vars(headers).values() if isinstance(value, str))}
    named = {name for name in inline(*PAGES) if name.startswith(headers.PREFIX)}
    assert named
    assert named <= ours


def test_make_targets_that_are_named_exist() -> None:
    """Every make target that a reader should run is in the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", README.read_text() + CONTRIBUTING.read_text(), re.MULTILINE)
    )
    named = {name for pair in named for name in pair if name}
    assert {"demo", "test", "check", "bench", "soak", "docs"} <= named <= targets


def test_all_is_sorted_complete_and_importable() -> None:
    """``reliable_mq.__all__`` is complete and in alphabetical order."""
    names = reliable_mq.__all__
    assert names == sorted(names)
    assert len(names) == len(set(names))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(inspect.getsource(reliable_mq)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reliable_mq.")
        for alias in node.names
    }
    assert set(names) == imported
    for name in names:
        assert getattr(reliable_mq, name).__module__.startswith("reliable_mq."), name
